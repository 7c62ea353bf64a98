"""The CNN with Lightning Fabric: objects set up, a loop of one's own."""

from __future__ import annotations

import os

from lightning.fabric import Fabric
from torch.utils.data import DataLoader

from bench.peers.sitting import Sitting


def main() -> None:
    sitting = Sitting()
    fabric = Fabric(accelerator="cpu", devices=int(os.environ["WORLD_SIZE"]), strategy="ddp")
    fabric.launch()
    model = sitting.model()
    optimizer = sitting.adam(model)
    model, optimizer = fabric.setup(model, optimizer)
    loader = DataLoader(sitting.dataset, sitting.batch_size, shuffle=True)
    loader = fabric.setup_dataloaders(loader)

    model.train()
    for batch in loader:
        optimizer.zero_grad()
        fabric.backward(sitting.loss(model, batch))
        optimizer.step()
        if sitting.count_step():
            break
    sitting.end()


if __name__ == "__main__":
    main()
