"""Train a small model on every worker; say what it has come to, and how long steps have taken."""

import argparse
import time

import torch
from torch import nn

import unisono
from unisono.state.digest import digest_of


class Cnn(nn.Sequential):
    """Convolutions, BatchNorm with its buffers, dropout."""

    def __init__(self) -> None:
        super().__init__(
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

    @staticmethod
    def data() -> torch.utils.data.TensorDataset:
        return torch.utils.data.TensorDataset(
            torch.randn(64, 1, 14, 14), torch.randint(0, 10, (64,))
        )


class Gpt(nn.Module):
    """A transformer's layer over characters, and embeddings that not every shard uses."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(32, width), nn.Embedding(16, width)
        self.rare = nn.Parameter(torch.zeros(width))
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True)
        self.head = nn.Linear(width, 32)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        values = self.embed(text) + self.place(torch.arange(text.shape[1]))
        if int(text[0, 0]) % 8 == 0:
            values = values + self.rare
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        return self.head(self.layer(values, mask, is_causal=True)).transpose(1, 2)

    @staticmethod
    def data() -> torch.utils.data.TensorDataset:
        text = torch.randint(0, 32, (64, 17))
        return torch.utils.data.TensorDataset(text[:, :-1], text[:, 1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=("cnn", "gpt"))
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--directory")
    given = parser.parse_args()
    torch.manual_seed(0)
    model = Cnn() if given.model == "cnn" else Gpt(given.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    every = {"checkpoint_every": 2} if given.directory else {}
    run = unisono.Run(
        model, optimizer, shards=given.shards, clip_norm=5.0, directory=given.directory, **every
    )
    begun_s = time.monotonic()
    for step in run.steps(model.data(), batch_size=32, steps=given.steps):
        with step:
            for inputs, targets in step.shards:
                step.backward(nn.functional.cross_entropy(model(inputs), targets))
        time.sleep(given.pause)
        print(f"rank {run.world.rank} step {run.position.step}", flush=True)
    took_s = time.monotonic() - begun_s
    print(
        f"rank {run.world.rank} digest {digest_of(model, optimizer)} in {took_s:.3f} s", flush=True
    )


main()
