"""Train on a Ray cluster: ``train.py`` as a function that Ray Train runs on its workers.

Ray starts the workers, and starts them again, on as many as there is room for, when one is lost.
The digest is the same in each case, and that of ``python train.py``.
"""

import argparse

import torch
import torch.nn.functional as F
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import nn

import unisono
from unisono.callbacks import RayTrain
from unisono.data import digits


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def train(config):
    # Everything that trains is made here, on each worker.
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    trainer = unisono.Trainer(
        *(model, torch.optim.Adam(model.parameters(), lr=2e-3), loss),
        shards=8,
        directory="checkpoints",  # in Ray's folder of this run, on each node
        checkpoint="1min",
        callbacks=[RayTrain()],
    )
    trainer.fit(digits(), batch_size=64, epochs=config["epochs"], validate=digits(train=False))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, nargs=2, default=[1, 8], help="at least, at most")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--storage", help="a folder that all nodes see, or s3://bucket/folder")
    args = parser.parse_args()
    run_config = RunConfig(
        storage_path=args.storage,
        checkpoint_config=CheckpointConfig(num_to_keep=2),
        failure_config=FailureConfig(max_failures=3),
    )
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": args.epochs},
        scaling_config=ScalingConfig(num_workers=tuple(args.workers)),
        run_config=run_config,
    )
    print(trainer.fit().metrics)


if __name__ == "__main__":
    main()
