"""Search for hyperparameters with Optuna; each trial trains on several workers.

    python examples/complete/optuna_search.py --workers 2

A trial trains epoch by epoch: each call of `unisono.launch` resumes from the trial's checkpoint and
trains one epoch more. After it, the test loss tells Optuna whether to prune the trial. A trial that
fails (a loss that is not finite, a worker that is lost again and again) is marked as failed, and
the search continues. Stop it with Ctrl-C; the same command continues with the next trial.
"""

import argparse
from pathlib import Path

import optuna
import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.data import digits


def loss(model, batch):
    images, labels = batch
    logits = model(images)
    accuracy = (logits.argmax(1) == labels).float().mean()
    return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy}


def train(params, epochs, directory):
    """Train up to `epochs` in total, on every worker; return validation means and the digest."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, params["width"]),
        nn.LeakyReLU(),
        nn.Dropout(params["dropout"]),
        nn.Linear(params["width"], 10),
    )
    optimizer = torch.optim.SGD(model.parameters(), params["lr"], momentum=0.9)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4, seed=0, directory=directory)
    trainer.fit(digits(), batch_size=64, epochs=epochs)
    return trainer.evaluate(digits(train=False), batch_size=256), trainer.digest()


def objective(trial, args):
    params = {
        "lr": trial.suggest_float("lr", 1e-3, 100.0, log=True),  # too wide: some trials fail
        "width": trial.suggest_int("width", 16, 128, log=True),
        "dropout": trial.suggest_float("dropout", 0.0, 0.5),
    }
    directory = Path(args.directory) / f"trial-{trial.number}"
    for epoch in range(1, args.epochs + 1):
        results = unisono.launch(train, params, epoch, directory, workers=args.workers)
        means, digest = results[0]  # the same on every worker
        trial.report(means["loss"], epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    trial.set_user_attr("digest", digest)
    return means["loss"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, default=2, help="of each trial")
    parser.add_argument("--trials", type=int, default=10, help="more than there are already")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--directory", default="runs/search", help="trials, and what they found")
    parser.add_argument("--quick", action="store_true", help="two trials of two epochs")
    args = parser.parse_args()
    if args.quick:
        args.trials, args.epochs = 2, 2
    if unisono.world().world_size > 1:
        parser.error("start it with `python`: it starts workers itself, as many as --workers says")

    Path(args.directory).mkdir(parents=True, exist_ok=True)
    study = optuna.create_study(
        study_name="digits",
        storage=f"sqlite:///{args.directory}/study.db",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_startup_trials=2),
    )
    # Trials that are added later must not repeat what the first ones tried.
    study.sampler = optuna.samplers.TPESampler(seed=len(study.trials))
    try:
        study.optimize(
            lambda trial: objective(trial, args), args.trials, catch=(unisono.UnisonoError,)
        )
    except KeyboardInterrupt:
        print("stopped; the same command continues the search")
    for trial in study.trials:
        value = "" if trial.value is None else f"loss {trial.value:.4f}"
        print(f"trial {trial.number}: {trial.state.name.lower()} {value} {trial.params}")
    if any(trial.state.name == "COMPLETE" for trial in study.trials):
        best = study.best_trial
        print(f"best: trial {best.number}, {best.params}, digest {best.user_attrs['digest']}")


if __name__ == "__main__":
    main()
