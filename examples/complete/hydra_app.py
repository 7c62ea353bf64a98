"""Configure a run with Hydra: a folder of options, changed on the command line.

    python examples/complete/hydra_app.py workers=2 optimizer=sgd optimizer.lr=0.1
    python examples/complete/hydra_app.py --multirun model.width=32,64,128

Hydra runs once, in the launcher, so there is one folder of outputs for each run, and it has the
run's checkpoints. `unisono.launch` starts the workers, each of which gets the configuration.
"""

import hydra
import torch
import torch.nn.functional as F
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from torch import nn

import unisono
from unisono.data import digits


class Net(nn.Sequential):
    def __init__(self, width, dropout):
        super().__init__(
            nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, 10)
        )


def loss(model, batch):
    images, labels = batch
    logits = model(images)
    accuracy = (logits.argmax(1) == labels).float().mean()
    return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy}


def train(config, directory):
    """Run on every worker."""
    torch.manual_seed(config.seed)
    model = Net(**config.model)
    optimizer = instantiate(config.optimizer, model.parameters())
    trainer = unisono.Trainer(model, optimizer, loss, directory=directory, **config.trainer)
    summary = trainer.fit(digits(), validate=digits(train=False), **config.fit)
    return None if summary.validation is None else summary.validation["loss"]


@hydra.main(config_path="config", config_name="config", version_base="1.3")
def main(config):
    directory = config.directory or HydraConfig.get().runtime.output_dir
    values = unisono.launch(train, config, directory, workers=config.workers)
    print(f"results are in {directory}")
    return values[0]  # what a sweeper of Hydra minimizes


if __name__ == "__main__":
    main()
