"""The CNN with Lightning: a module and a trainer, with what the trainer does unasked."""

from __future__ import annotations

import os
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from bench.peers.sitting import Sitting


class Module(lightning.LightningModule):
    def __init__(self, sitting: Sitting) -> None:
        super().__init__()
        self.network = sitting.model()
        self._sitting = sitting

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._sitting.loss(self.network, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._sitting.adam(self)


class Clock(lightning.Callback):
    def __init__(self, sitting: Sitting) -> None:
        self._sitting = sitting

    def on_train_batch_end(self, *_: Any) -> None:
        self._sitting.count_step()


def main() -> None:
    sitting = Sitting()
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=int(os.environ["WORLD_SIZE"]),
        strategy="ddp",
        max_steps=sitting.num_steps,
        default_root_dir=sitting.folder,
        callbacks=[Clock(sitting)],
    )
    trainer.fit(Module(sitting), DataLoader(sitting.dataset, sitting.batch_size, shuffle=True))
    sitting.end()


if __name__ == "__main__":
    main()
