"""Search for hyperparameters with Optuna; each trial trains on several workers.

A trial calls `unisono.launch` once an epoch, which resumes from the trial's checkpoint; then Optuna
says whether to continue. A failed trial is marked, and the search continues, also when you stop
it with Ctrl-C and start it again. Needs `pip install optuna`.

python search.py WORKERS    # any number of workers, the same trials
"""

import sys
from pathlib import Path

import optuna
import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.data import digits

EPOCHS, TRIALS, DIRECTORY = 4, 8, Path("runs/search")


def loss(model, batch):
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def train(params, epochs, directory):
    """Train up to `epochs` in total, on every worker; return validation loss and digest."""
    torch.manual_seed(0)
    dropout, width = nn.Dropout(params["dropout"]), params["width"]
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, width), nn.ReLU(), dropout, nn.Linear(width, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), params["lr"], momentum=0.9)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4, seed=0, directory=directory)
    trainer.fit(digits(), batch_size=64, epochs=epochs)
    return trainer.evaluate(digits(train=False), batch_size=256)["loss"], trainer.digest()[:16]


def objective(trial):
    params = {
        "lr": trial.suggest_float("lr", 1e-3, 100.0, log=True),  # too wide: some trials fail
        "width": trial.suggest_int("width", 16, 128, log=True),
        "dropout": trial.suggest_float("dropout", 0.0, 0.5),
    }
    workers = int(sys.argv[1]) if sys.argv[1:] else 2
    for epochs in range(1, EPOCHS + 1):
        directory = DIRECTORY / f"trial-{trial.number}"
        found = unisono.launch(train, params, epochs, directory, workers=workers)
        value, digest = found[0]  # the same on every worker
        trial.report(value, epochs)
        if trial.should_prune():
            raise optuna.TrialPruned
    trial.set_user_attr("digest", digest)
    return value


def main():
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        storage=f"sqlite:///{DIRECTORY}/study.db",
        study_name="digits",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
    )
    # Trials that are added later must not repeat what the first ones tried.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    study.optimize(objective, TRIALS, catch=unisono.UnisonoError)
    best = study.best_trial
    print(f"best: trial {best.number}, {best.params}, digest {best.user_attrs['digest']}")


if __name__ == "__main__":
    main()
