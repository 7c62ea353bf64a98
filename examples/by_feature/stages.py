"""Cut a model into stages, one process each, without changing the program.

python examples/by_feature/stages.py
unisono run -n 2 --stages 2 examples/by_feature/stages.py    # one replica in two stages
unisono run -n 4 --stages 2 examples/by_feature/stages.py    # two replicas
"""

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.data import digits


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(0.1))

    def forward(self, x):
        return x + self.inner(x).relu()


class Net(nn.Module):
    """Four blocks in a row; an auxiliary loss looks at the second one's output."""

    def __init__(self, width=128):
        super().__init__()
        self.embed = nn.Linear(64, width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(4))
        self.early, self.head = nn.Linear(width, 10), nn.Linear(width, 10)

    def forward(self, images):
        x = self.embed(images.flatten(1))
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                early = self.early(x)
        return early, self.head(x)


def loss(model, batch):
    images, labels = batch
    early, last = model(images)
    return F.cross_entropy(last, labels) + 0.3 * F.cross_entropy(early, labels)


def main():
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4)
    trainer.fit(digits(), batch_size=64, epochs=3, validate=digits(train=False))


if __name__ == "__main__":
    main()
