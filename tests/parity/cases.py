"""Models, optimizers and data for the parity tests; run in workers, so importable there."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from tests.classified import with_accuracy as classify
from torch import nn
from torch.utils.data import TensorDataset

import unisono

NUM_SAMPLES = 107  # a prime: no batch size, no number of shards or workers divides it
BATCH_SIZE = 16
STEPS = 21


class Cnn(nn.Module):
    def __init__(self, *, norm: bool = False, dropout: float = 0.25) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6) if norm else nn.Identity()
        self.second = nn.Conv2d(6, 8, 3, padding=1)
        self.second_norm = nn.BatchNorm2d(8) if norm else nn.Identity()
        self.dropout = nn.Dropout(dropout if norm else 0.0)
        self.last = nn.Linear(8 * 4, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = F.max_pool2d(torch.relu(self.norm(self.first(images))), 2)
        hidden = F.max_pool2d(torch.relu(self.second_norm(self.second(hidden))), 2)
        return self.last(self.dropout(hidden.flatten(1)))


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 32)
        self.places = nn.Parameter(torch.randn(12, 32) * 0.02)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], tokens.device)
        hidden = self.tokens(tokens) + self.places[: tokens.shape[1]]
        return self.head(self.blocks(hidden, mask=mask, is_causal=True))


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(20, 16, mode="mean")
        self.lstm = nn.LSTM(16, 24, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(24, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        pairs = tokens.reshape(-1, 2)
        words = self.bag(pairs).view(tokens.shape[0], -1, 16)
        return self.head(self.lstm(words)[0][:, -1])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.mix = nn.Linear(16, 16)
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.mix(self.tokens(tokens))))


class SometimesUnused(nn.Module):
    """Branches are taken for some batches only, a frozen layer never learns, one is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(64, 16)
        self.rarely = nn.Linear(16, 16)
        self.often = nn.Linear(16, 16)
        self.never = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 10)
        self.frozen.requires_grad_(False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.always(images.flatten(1)))
        if float(images[0, 0, 0, 0].detach()) > 0.8:
            hidden = hidden + self.rarely(hidden)
        if float(images[0, 0, 0, 0].detach()) > -0.5:
            hidden = hidden + self.often(hidden)
        return self.frozen(hidden)


class Mixed(nn.Module):
    """Three dtypes, a parameter without dimensions, one without elements, channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 6, 3, padding=1).to(memory_format=torch.channels_last)
        self.wide = nn.Conv2d(6, 4, 3).to(memory_format=torch.channels_last)
        self.exact = nn.Linear(4 * 36, 24).double()
        self.rough = nn.Linear(24, 16).bfloat16()
        self.last = nn.Linear(16, 10)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(10))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.seen += len(images)
        hidden = torch.relu(self.wide(self.conv(images)))
        hidden = torch.relu(self.exact(hidden.flatten(1).double()))
        outputs = self.last(torch.relu(self.rough(hidden.bfloat16())).float()) * self.scale
        self.mean = 0.9 * self.mean + 0.1 * outputs.detach().mean(0)  # a new tensor each time
        return outputs + self.nothing.sum()


class Matrices(nn.Module):
    """All parameters are matrices, as Muon wants them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 24, bias=False)
        self.second = nn.Linear(24, 10, bias=False)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(images.flatten(1))))


def images() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(NUM_SAMPLES, 1, 8, 8, generator=generator),
        torch.randint(0, 10, (NUM_SAMPLES,), generator=generator),
    )


def texts() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(torch.randint(0, 20, (NUM_SAMPLES, 13), generator=generator))


def next_token(model: nn.Module, batch: Any) -> Any:
    tokens = batch[0]
    targets = tokens[:, 1:].reshape(-1)
    known = targets > 2  # some tokens do not count: weights differ from shard to shard
    losses = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), targets, reduction="none")
    return (losses * known).sum(), known.sum()


def last_token(model: nn.Module, batch: Any) -> Any:
    tokens = batch[0]
    return F.cross_entropy(model(tokens[:, :-1]), tokens[:, -1])


MODELS = {
    "cnn": (lambda: Cnn(), images, classify),
    "cnn with norm and dropout": (lambda: Cnn(norm=True), images, classify),
    "gpt": (Gpt, texts, next_token),
    "lstm with bag": (Lstm, texts, last_token),
    "tied": (Tied, texts, next_token),
    "sometimes unused": (SometimesUnused, images, classify),
}

OTHER_MODELS = {
    "cnn with norm": (lambda: Cnn(norm=True, dropout=0.0), images, classify),
    "mixed": (Mixed, images, classify),
    "matrices": (Matrices, images, classify),
}


def _two_groups(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0, "lr": 2e-3},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


OPTIMIZERS = {
    "sgd with momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9),
    "fused sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, fused=True),
    "adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2),
    "fused adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, fused=True),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "fused adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True),
    "two groups": _two_groups,
}

OTHER_OPTIMIZERS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    "nesterov": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True),
    "foreach sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, foreach=True),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, amsgrad=True),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.5, centered=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05),
    "fused adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05, fused=True),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), lr=1e-2),
    "radam": lambda m: torch.optim.RAdam(m.parameters(), lr=1e-2),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), lr=0.05),
    "rprop": lambda m: torch.optim.Rprop(m.parameters(), lr=1e-2),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters(), lr=1e-2),
    "muon": lambda m: torch.optim.Muon([p for p in m.parameters() if p.ndim == 2], lr=1e-3),
    "own": lambda m: SignOfMean(m.parameters(), lr=1e-3),
}


class SignOfMean(torch.optim.Optimizer):
    """An optimizer nobody has heard of, which looks at whole parameters and counts."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["seen"] = state.get("seen", 0) + 1
                    away = parameter.grad.sign() * (parameter.grad.mean().abs() + 1)
                    parameter.sub_(away, alpha=group["lr"] / state["seen"])


def train(
    model: str,
    optimizer: str,
    shards: int,
    steps: int = STEPS,
    device: str = "cpu",
    directory: str | None = None,
    split: list[str] | None = None,
    **options: Any,
) -> str:
    """Train one case in this worker, on one device or split; returns the digest."""
    make_model, make_data, loss = (MODELS | OTHER_MODELS)[model]
    torch.manual_seed(11)
    module = make_model()
    made = (OPTIMIZERS | OTHER_OPTIMIZERS)[optimizer](module)
    if split is not None:
        device = "auto"
        unisono.split(module, split)
    trainer = unisono.Trainer(
        module, made, loss, shards=shards, seed=5, directory=directory, device=device, **options
    )
    trainer.fit(make_data(), batch_size=BATCH_SIZE, steps=steps)
    return trainer.digest()


def train_all(
    cases: list[tuple[str, str, int]], steps: int = STEPS, device: str = "cpu"
) -> list[str]:
    """Train cases one after the other in this worker."""
    return [train(*case, steps, device) for case in cases]
