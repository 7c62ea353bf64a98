"""Models of every shape that is cut, and plain loops that train them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from unisono.engine.splitting.split import split
from unisono.engine.state.contents import digest_of

VOCABULARY, WIDTH, LENGTH = 11, 16, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.hidden = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        p = 0.1 if self.training else 0.0
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=p)
        x = x + F.dropout(self.out(seen), p)
        return x + self.hidden(self.after(x))


class GPT(nn.Module):
    """Tied weights, a parameter and a buffer of its own, activations that are used again."""

    def __init__(self, num_blocks: int = 3, checkpoints: bool | None = None) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.9))
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.checkpoints = checkpoints

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = F.dropout(self.embedding(tokens) + self.position, 0.1, self.training)
        every = [x]
        for block in self.blocks:
            if self.checkpoints is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpoints)
            every.append(x)
        return self.head(self.norm(x * self.scale + sum(every)))

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=generator)
        return tokens[:, :-1], tokens[:, 1:]


class UNet(nn.Module):
    """Skip connections, activations that change in place behind the cut, BatchNorm, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.down, self.middle = self._layers(4, 8), self._layers(8, 8)
        self.up, self.last = self._layers(16, 4), self._layers(8, 4)
        self.out = nn.Conv2d(4, 10, 1)

    @staticmethod
    def _layers(before: int, after: int) -> nn.Module:
        convolution = nn.Conv2d(before, after, 3, padding=1)
        return nn.Sequential(
            nn.LeakyReLU(0.2, inplace=True), convolution, nn.BatchNorm2d(after), nn.Dropout(0.2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.first(x)
        two = self.down(F.avg_pool2d(one, 2))
        low = self.up(torch.cat([self.middle(two), two], 1))
        whole = F.interpolate(low, scale_factor=2, mode="nearest")
        whole = self.last(torch.cat([whole, one], 1))
        whole += one
        return self.out(whole).mean((2, 3))

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        images = torch.randn(4, 1, 8, 8, generator=generator)
        return images, torch.randint(10, (4,), generator=generator)


class CNN(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.Linear(36, 16),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(16, 10),
        )

    batch = staticmethod(UNet.batch)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 6)
        self.lstm = nn.LSTM(6, 5, 2, batch_first=True, dropout=0.2)
        self.gru, self.out = nn.GRU(5, 4, batch_first=True), nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embed(x[:, 0]))
        return self.out(self.gru(hidden)[0][:, -1])

    batch = staticmethod(UNet.batch)


class Layers(nn.Module):
    """torch's own transformer, which computes otherwise in ``eval()``."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3)
        self.out = nn.Linear(8, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(x[:, 0])[:, 0])

    batch = staticmethod(UNet.batch)


class Dense(nn.Module):
    """Uses each activation on both sides of every cut, more than twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.out = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        every = [torch.sin(self.first(x[:, 0].flatten(1)[:, :16]))]
        for layer in self.layers:
            every.append(torch.tanh(layer(sum(every) * every[0]) + every[0] * every[-1]))
        return self.out(sum(every))

    batch = staticmethod(CNN.batch)


class Recomputed(GPT):
    """With activation checkpointing, which draws again in the backward pass."""

    def __init__(self) -> None:
        super().__init__(checkpoints=False)


class RecomputedReentrant(GPT):
    def __init__(self) -> None:
        super().__init__(checkpoints=True)


MODELS: dict[str, Callable[[], Any]] = {
    each.__name__: each
    for each in (CNN, GPT, UNet, Recurrent, Layers, Recomputed, RecomputedReentrant)
}


def trained(
    make: Callable[[], Any], devices: Sequence[str], steps: int = 4, **options: Any
) -> tuple[str, list[float], int]:
    """Train in a plain loop; gives the digest, outputs in ``eval()`` mode, and a number drawn."""
    torch.manual_seed(1)
    model = make()
    split(model, devices, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=False)
    torch.manual_seed(5)
    for step in range(steps):
        inputs, targets = model.batch(torch.Generator().manual_seed(step))
        outputs = model(inputs.to(devices[0]))
        loss = F.cross_entropy(outputs.flatten(0, -2), targets.to(outputs.device).flatten())
        optimizer.zero_grad()
        with torch.autograd.set_multithreading_enabled(False):
            loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        found = model(inputs.to(devices[0])).flatten().tolist()
    drawn = torch.randint(2**40, (1,), device=devices[0]).item()
    return digest_of(model, optimizer), found, drawn
