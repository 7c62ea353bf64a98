"""Train a small network on every worker and print the digest; the first argument says which."""

import torch
from torch import nn

import unisono
from unisono.state.digest import digest_of


class Cnn(nn.Module):
    """Convolutions, BatchNorm with buffers, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.25),
            nn.Linear(8 * 7 * 7, 32),
            nn.ReLU(),
            nn.Linear(32, 10),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images)


def main() -> None:
    torch.manual_seed(0)
    model = Cnn()
    images, labels = torch.randn(64, 1, 14, 14), torch.randint(0, 10, (64,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run = unisono.Run(model, optimizer, shards=8, seed=1, clip_norm=5.0)
    data = torch.utils.data.TensorDataset(images, labels)
    for step in run.steps(data, batch_size=32, epochs=3):
        with step:
            for x, y in step.shards:
                step.backward(nn.functional.cross_entropy(model(x), y))
    print(f"rank {run.world.rank} has {digest_of(model, optimizer)}", flush=True)


main()
