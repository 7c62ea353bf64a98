"""What is trained? The workloads of the comparison: model, data, loss, batch, step counts.

Every side gets the same dataset object and the same loss, and takes the same number of samples
per worker. Where the real data are not at hand, random data of the same shape stand in; the time
of a step does not depend on what the pixels show.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
CONTEXT = 128
NUM_CHARACTERS = 65


@dataclass(frozen=True)
class Workload:
    """One row of the comparison.

    Attributes:
        name: what ``--only`` calls it.
        title: what the table calls it.
        build: makes the model; the caller seeds torch first.
        load: makes the dataset, of at least the given number of samples where it may choose,
            from a folder of data (or None) and says whether the data are real.
        batch_size: samples per worker and step.
        warmup_steps: steps before the clock starts.
        timed_steps: steps under the clock: about three seconds' worth or more. Where these are few,
            none is one that Unisono rehearses: a power of two, or the last one.
        lr: the learning rate of Adam.
        sides: which sides train it; None: all of them.
    """

    name: str
    title: str
    build: Callable[[], nn.Module]
    load: Callable[[Path, int], tuple[Dataset[Any], bool]]
    batch_size: int
    warmup_steps: int
    timed_steps: int
    lr: float = 1e-3
    sides: tuple[str, ...] | None = None

    def loss(self, model: nn.Module, batch: list[Tensor]) -> Tensor:
        """Mean cross entropy of one batch, over every position that has a target."""
        inputs, targets = batch
        return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def cnn() -> nn.Module:
    """The classic MNIST network, 421,642 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def mlp() -> nn.Module:
    """Few large matrices: 21 million parameters to sum and update for little arithmetic."""
    return nn.Sequential(
        nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)
    )


def tiny() -> nn.Module:
    """Two small layers: nearly all of a step is overhead."""
    return nn.Sequential(nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 10))


class Block(nn.Module):
    """Causal attention and two linear layers, each added to its input."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.to_qkv(self.norm_1(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, num_heads, length, dim / num_heads)
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.to_out(heads.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    """Six layers of width 256: 4.8 million parameters."""

    def __init__(self, dim: int = 256, num_layers: int = 6, num_heads: int = 8) -> None:
        super().__init__()
        self.token = nn.Embedding(NUM_CHARACTERS, dim)
        self.position = nn.Embedding(CONTEXT, dim)
        self.blocks = nn.Sequential(*(Block(dim, num_heads) for _ in range(num_layers)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, NUM_CHARACTERS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.blocks(x)))


def load_mnist(folder: Path, num_samples: int) -> tuple[TensorDataset, bool]:
    """Read the 60,000 training images; the folder is MNIST's own or holds one named ``mnist``."""
    from unisono.data import mnist

    for candidate in (folder, folder / "mnist"):
        if any(candidate.glob("train-images-idx3-ubyte*")):
            return mnist(candidate), True
    return TensorDataset(torch.rand(60_000, 1, 28, 28), torch.randint(10, (60_000,))), False


class Digits(Dataset[tuple[Tensor, int]]):
    """MNIST as tutorials read it: bytes in memory, each image converted when it is asked for."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels  # uint8 (samples, 28, 28) and (samples,)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index].unsqueeze(0).to(torch.float32).div(255)
        return image, int(self.labels[index])


def load_digits(folder: Path, num_samples: int) -> tuple[Digits, bool]:
    """Make a dataset of single items of what :func:`load_mnist` reads."""
    dataset, is_real = load_mnist(folder, num_samples)
    pixels, labels = dataset.tensors
    return Digits(pixels.squeeze(1).mul(255).round().to(torch.uint8), labels), is_real


def load_vectors(folder: Path, num_samples: int) -> tuple[TensorDataset, bool]:
    """Draw random vectors; there are no real ones."""
    return TensorDataset(torch.randn(num_samples, 1024), torch.randint(10, (num_samples,))), False


def load_text(folder: Path, num_samples: int) -> tuple[TensorDataset, bool]:
    """Cut tinyshakespeare, if it is there, into windows of 128 characters and their successors."""
    path = folder / "tinyshakespeare" / "input.txt"
    is_real = path.is_file()
    if is_real:
        text = path.read_text(encoding="utf-8")
        code = {character: index for index, character in enumerate(sorted(set(text)))}
        tokens = torch.tensor([code[character] for character in text])
    else:
        tokens = torch.randint(NUM_CHARACTERS, (1_000_000,))
    windows = tokens.unfold(0, CONTEXT + 1, CONTEXT)  # (windows, 129)
    return TensorDataset(windows[:, :-1].contiguous(), windows[:, 1:].contiguous()), is_real


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("cnn8", "MNIST CNN, batch 8 per worker", cnn, load_mnist, 8, 100, 1000),
        Workload(
            "cnn8-items",
            "MNIST CNN, batch 8 per worker, read item by item",
            cnn,
            load_digits,
            8,
            100,
            500,
            sides=(
                *("plain", "passes", "ddp", "ddp-tuned"),
                *("unisono", "unisono-events", "unisono-fused", "unisono-fused-events"),
            ),
        ),
        Workload("cnn64", "MNIST CNN, batch 64 per worker", cnn, load_mnist, 64, 65, 62),
        Workload(
            "mlp", "MLP 1024-4096-4096-10, batch 32 per worker", mlp, load_vectors, 32, 33, 30
        ),
        Workload(
            "tiny",
            "Two small layers, batch 8 per worker: overhead of a step",
            tiny,
            load_vectors,
            8,
            200,
            3000,
            sides=("plain", "passes", "ddp-tuned", "unisono", "unisono-fused"),
        ),
        Workload("gpt", "GPT, 6 layers, 4 × 128 tokens per worker", GPT, load_text, 4, 33, 25),
    )
}
