"""Train a model that is cut over several devices: one half of a GPT on each of two.

On a machine with four GPUs worker 0 takes GPUs 0 and 1, and worker 1 takes 2 and 3. (Never run on
GPUs.) Without GPUs the CPU stands for both devices.

python split.py              # one worker with two devices
unisono run -n 2 split.py    # two workers with two devices each, the same digest
"""

import torch
import torch.nn.functional as F
from torch import nn

import unisono
from unisono.data import digits

DEVICES = 2  # of each worker


class Transformer(nn.Module):
    """Reads an image line by line, and says which digit it is."""

    def __init__(self, dim=32, num_layers=4):
        super().__init__()
        self.embed, self.position = nn.Linear(8, dim), nn.Parameter(torch.zeros(8, dim))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 4, 4 * dim, 0.1, batch_first=True, norm_first=True)
            for _ in range(num_layers)
        )
        self.head = nn.Linear(dim, 10)

    def forward(self, images):
        x = self.embed(images[:, 0]) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


def loss(model, batch):
    images, labels = batch
    logits = model(images)
    labels = labels.to(logits.device)  # the last one
    accuracy = (logits.argmax(1) == labels).float().mean()
    return {"loss": F.cross_entropy(logits, labels), "accuracy": accuracy}


def devices():
    """Choose this worker's devices. The model expects its inputs on the first."""
    first = unisono.world().local_rank * DEVICES
    if torch.cuda.device_count() < first + DEVICES:
        return ["cpu"] * DEVICES
    return [f"cuda:{first + number}" for number in range(DEVICES)]


def main():
    torch.manual_seed(0)
    # As for one device: names, files and digest are those of the whole model.
    model = unisono.split(Transformer(), devices())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4)
    trainer.fit(digits(), batch_size=64, epochs=5, validate=digits(train=False))
    if unisono.world().rank == 0:
        for name, block in model.blocks.named_children():
            print(f"block {name} is on {next(block.parameters()).device}")


if __name__ == "__main__":
    main()
