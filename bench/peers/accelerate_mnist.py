"""The CNN with Accelerate: objects prepared, a loop of one's own."""

from __future__ import annotations

from accelerate import Accelerator
from torch.utils.data import DataLoader

from bench.peers.sitting import Sitting


def main() -> None:
    sitting = Sitting()
    accelerator = Accelerator(cpu=True)
    model = sitting.model()
    optimizer = sitting.adam(model)
    loader = DataLoader(sitting.dataset, sitting.batch_size, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    model.train()
    for batch in loader:
        optimizer.zero_grad()
        accelerator.backward(sitting.loss(model, batch))
        optimizer.step()
        if sitting.count_step():
            break
    sitting.end()


if __name__ == "__main__":
    main()
