"""What is trained on GPUs: networks whose kernels are those of larger ones, on the CPU small ones.

Dropout, BatchNorm, embeddings, attention with a mask, tied weights, a loss that is a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from tests.classified import with_accuracy as classify
from tests.gpu.devices import CPU, SIM
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

NUM_SAMPLES = 107  # a prime: no batch size, no number of shards or workers divides it
BATCH_SIZE = 32
STEPS_PER_EPOCH = 4
SEED = 5


class Cnn(nn.Module):
    """Convolutions with BatchNorm, max pooling and dropout, on images of 16 × 16."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.first_norm = nn.BatchNorm2d(width)
        self.second = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.second_norm = nn.BatchNorm2d(2 * width)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(2 * width * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.max_pool2d(torch.relu(self.first_norm(self.first(images))), 2)
        hidden = torch.relu(self.second_norm(self.second(hidden)))
        return self.last(self.dropout(hidden.flatten(1)))


class Layer(nn.Module):
    """Attention and two linear layers, both with dropout."""

    def __init__(self, dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads, self.rate = num_heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.to_qkv(self.norm_1(x)).view(batch, length, 3, self.num_heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        rate = self.rate if self.training else 0.0
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        x = x + self.to_out(heads.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.norm_2(x))


class Gpt(nn.Module):
    """Tied embedding and head; `recomputes`: with activation checkpointing."""

    def __init__(
        self, dim: int, num_layers: int, *, dropout: float = 0.1, recomputes: bool = False
    ) -> None:
        super().__init__()
        self.recomputes = recomputes
        self.tokens, self.places = nn.Embedding(64, dim), nn.Embedding(32, dim)
        self.layers = nn.ModuleList(Layer(dim, 4, dropout) for _ in range(num_layers))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 64, bias=False)
        self.tie()

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        for layer in self.layers:
            is_kept = not (self.recomputes and self.training)
            x = layer(x) if is_kept else checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))

    def tie(self) -> None:
        """Tie what `to` has untied, as it does for devices that torch does not bring itself."""
        self.head.weight = self.tokens.weight


def images(num_samples: int = NUM_SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(num_samples, 3, 16, 16, generator=generator),
        torch.randint(0, 10, (num_samples,), generator=generator),
    )


def texts(num_samples: int = NUM_SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randint(0, 64, (num_samples, 33), generator=generator))


def next_token(model: nn.Module, batch: Any) -> Any:
    (tokens,) = batch
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def some_tokens(model: nn.Module, batch: Any) -> Any:
    (tokens,) = batch
    targets = tokens[:, 1:].flatten()
    counts = targets > 2  # weights differ from shard to shard
    losses = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), targets, reduction="none")
    return (losses * counts).sum(), counts.sum()


@dataclass(frozen=True)
class GpuCase:
    """A model, its data and its loss."""

    build: Callable[[bool], nn.Module]  # takes whether it is to be small
    data: Callable[[], TensorDataset]
    loss: Callable[[nn.Module, Any], Any]

    def model(self, device: str) -> nn.Module:
        """Make the model on the CPU, with the same weights each time."""
        torch.manual_seed(11)
        return self.build(device in (CPU, SIM))


CASES = {
    "cnn": GpuCase(lambda small: Cnn(4 if small else 32), images, classify),
    "cnn, small": GpuCase(lambda small: Cnn(4), images, classify),
    "gpt": GpuCase(lambda small: Gpt(16 if small else 128, 2), texts, next_token),
    "gpt, certain": GpuCase(
        lambda small: Gpt(16 if small else 128, 2, dropout=0.0), texts, next_token
    ),
    "gpt, a sum": GpuCase(lambda small: Gpt(16 if small else 128, 2), texts, some_tokens),
    "gpt, recomputed": GpuCase(
        lambda small: Gpt(16 if small else 128, 2, recomputes=True), texts, next_token
    ),
}


@dataclass(frozen=True)
class GpuOptimizer:
    """One of torch's optimizers, and which of torch's ways to compute it there are."""

    kind: type[torch.optim.Optimizer]
    options: dict[str, Any]
    ways: tuple[str, ...]
    only_matrices: bool = False

    def of(self, parameters: Iterable[nn.Parameter], way: str = "usual") -> torch.optim.Optimizer:
        """Make it, to be computed in one of :data:`WAYS`."""
        chosen = [p for p in parameters if not self.only_matrices or p.ndim == 2]
        return self.kind(chosen, **self.options, **WAYS[way])  # type: ignore[call-arg]


_LOOP, _FOREACH, _FUSED, _CAPTURABLE = "loop", "foreach", "fused", "capturable"
WAYS: dict[str, dict[str, bool]] = {
    "usual": {},
    _LOOP: {"foreach": False},
    _FOREACH: {"foreach": True},
    _FUSED: {"fused": True},
    _CAPTURABLE: {"capturable": True},
}
_USUAL = ("usual", _LOOP, _FOREACH)
_O = torch.optim
OPTIMIZERS = {
    "sgd": GpuOptimizer(_O.SGD, {"lr": 0.05}, (*_USUAL, _FUSED)),
    "momentum": GpuOptimizer(
        _O.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3}, (*_USUAL, _FUSED)
    ),
    "nesterov": GpuOptimizer(
        _O.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}, (*_USUAL, _FUSED)
    ),
    "adam": GpuOptimizer(_O.Adam, {"lr": 1e-2}, (*_USUAL, _FUSED, _CAPTURABLE)),
    "amsgrad": GpuOptimizer(_O.Adam, {"lr": 1e-2, "amsgrad": True}, (*_USUAL, _FUSED, _CAPTURABLE)),
    "adamw": GpuOptimizer(_O.AdamW, {"lr": 1e-2}, (*_USUAL, _FUSED, _CAPTURABLE)),
    "adagrad": GpuOptimizer(_O.Adagrad, {"lr": 0.05}, (*_USUAL, _FUSED)),
    "adadelta": GpuOptimizer(_O.Adadelta, {}, (*_USUAL, _CAPTURABLE)),
    "adamax": GpuOptimizer(_O.Adamax, {}, (*_USUAL, _CAPTURABLE)),
    "nadam": GpuOptimizer(_O.NAdam, {"lr": 1e-2}, (*_USUAL, _CAPTURABLE)),
    "radam": GpuOptimizer(_O.RAdam, {"lr": 1e-2}, (*_USUAL, _CAPTURABLE)),
    "asgd": GpuOptimizer(_O.ASGD, {"lr": 0.05}, (*_USUAL, _CAPTURABLE)),
    "rprop": GpuOptimizer(_O.Rprop, {"lr": 1e-2}, (*_USUAL, _CAPTURABLE)),
    "rmsprop": GpuOptimizer(
        _O.RMSprop, {"momentum": 0.5, "centered": True}, (*_USUAL, _CAPTURABLE)
    ),
    "adafactor": GpuOptimizer(_O.Adafactor, {"lr": 1e-2}, _USUAL),
    "muon": GpuOptimizer(_O.Muon, {"lr": 1e-3}, ("usual",), only_matrices=True),
}
ROWS = [(name, way) for name, optimizer in OPTIMIZERS.items() for way in optimizer.ways]


def is_offered(name: str, way: str, device: str) -> str | None:
    """Try one step of an optimizer; returns why torch does not offer it, or None."""
    model = nn.Linear(3, 2).to(device)
    try:
        optimizer = OPTIMIZERS[name].of(model.parameters(), way)
        model(torch.ones(1, 3, device=device)).sum().backward()
        optimizer.step()
    except (RuntimeError, AssertionError, NotImplementedError, ValueError) as error:
        return f"torch {torch.__version__} on {device}: {str(error).splitlines()[0]}"
    return None
