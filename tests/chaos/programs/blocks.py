"""The models of random programs, made of blocks with one width."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from tests.chaos.programs.choices import Choices
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 12
CHANNELS = 4
SIDE = 5
NUM_TOKENS = 15
LENGTH = 6
NUM_CLASSES = 4


class Model(nn.Module):
    """First layer, blocks, last layer."""

    def __init__(self, choices: Choices) -> None:
        super().__init__()
        self.kind = choices.kind
        num_classes = NUM_TOKENS if choices.kind == "tokens" else NUM_CLASSES
        width = CHANNELS * SIDE * SIDE if choices.kind == "images" else WIDTH
        self.first = FIRST[choices.kind]()
        self.blocks = nn.ModuleList(made(name, choices.kind) for name in choices.blocks)
        self.last = nn.Linear(width, num_classes, bias=not choices.is_tied)
        if choices.is_tied:
            self.last.weight = self.first.weight
        if choices.has_unused:
            self.unused = nn.Parameter(torch.randn(3, WIDTH))
            self.fixed = nn.Linear(2, 2).requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        if self.kind == "tokens":
            hidden = hidden.mean(1)
        return self.last(torch.tanh(hidden.flatten(1).float()))


FIRST: dict[str, Callable[[], nn.Module]] = {
    "vectors": lambda: nn.Linear(WIDTH, WIDTH),
    "images": lambda: nn.Conv2d(2, CHANNELS, 3, padding=1),
    "tokens": lambda: nn.Embedding(NUM_TOKENS, WIDTH),
}


def made(name: str, kind: str) -> nn.Module:
    """Make a block."""
    own = OF_KIND[kind].get(name)
    return (own or OF_ALL[name])()


class Applied(nn.Module):
    """Applies a function beside a layer: `apply(layer, hidden)`."""

    def __init__(self, layer: nn.Module, apply: Callable[[nn.Module, torch.Tensor], torch.Tensor]):
        super().__init__()
        self.layer, self.apply_to = layer, apply

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.apply_to(self.layer, hidden)


def residual(layer: nn.Module) -> nn.Module:
    return Applied(layer, lambda layer, hidden: hidden + layer(torch.relu(hidden)))


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())


class Counter(nn.Module):
    """Counts samples and averages what it sees, in place and by new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("last", torch.zeros(2), persistent=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += len(hidden)
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().float().mean()
            self.last.copy_(hidden.detach().float().flatten()[:2])
        return hidden - self.mean * 0.1


class Scale(nn.Module):
    """Has parameters without dimensions and without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.1))
        self.nothing = nn.Parameter(torch.empty(0, 2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden * self.scale + self.nothing.sum()


class Gate(nn.Module):
    """Multiplies by what a second layer and random numbers say."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        noise = torch.randn_like(hidden) * 0.05 if self.training else 0.0
        return hidden * torch.sigmoid(self.gate(hidden) + noise)


class Sometimes(nn.Module):
    """Takes a branch for some shards only, as their samples or random numbers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.rarely = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if float(hidden.detach().flatten()[0]) > -0.2:
            hidden = hidden + self.often(hidden)
        if self.training and float(torch.rand((), device=hidden.device)) > 0.7:
            hidden = hidden + self.rarely(hidden)
        return hidden


class Experts(nn.Module):
    """Sends each row to one of three layers; some get none."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weights = self.router(hidden).softmax(1)
        chosen = weights.argmax(1)
        outputs = hidden.clone()
        for index, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == index)
            if len(rows):
                found = expert(hidden[rows]) * weights[rows, index, None]
                outputs = outputs.index_add(0, rows, found.to(outputs.dtype))
        return outputs


class OwnBatchNorm(nn.Module):
    """Normalizes over the samples of a shard, also over one, with statistics of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(hidden.float().mean(0), 0.1)
        return (hidden - self.mean) * self.weight


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 3, dropout=0.1, batch_first=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]


class Places(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.places


class Shared(nn.Module):
    """Uses one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.again = self.layer

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.again(torch.relu(self.layer(hidden)))


def recurrent(layer: nn.Module) -> nn.Module:
    return Applied(layer, lambda layer, hidden: layer(hidden)[0])


def along_time(layer: nn.Module) -> nn.Module:
    return Applied(layer, lambda layer, hidden: layer(hidden.transpose(1, 2)).transpose(1, 2))


def checkpointed() -> nn.Module:
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(0.2))
    return Applied(layer, lambda layer, hidden: checkpoint(layer, hidden, use_reentrant=False))


def as_written(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Compute a layer in the dtype of its weights, whatever autocast says."""

    def apply(layer: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return layer(hidden.to(dtype)).float()

    return Applied(layer.to(dtype), apply)


def bilinear() -> nn.Module:
    both = Applied(nn.Bilinear(WIDTH, WIDTH, WIDTH), lambda layer, hidden: layer(hidden, hidden))
    return as_written(both, torch.float32)


def batch_norm_of_rows() -> nn.Module:
    # Over pairs of features, as a shard may have one row.
    return Applied(
        nn.BatchNorm1d(WIDTH // 2),
        lambda layer, hidden: layer(hidden.unflatten(1, (WIDTH // 2, 2))).flatten(1),
    )


OF_ALL: dict[str, Callable[[], nn.Module]] = {
    "layer norm": lambda: nn.LayerNorm(WIDTH),
    "dropout": lambda: nn.Dropout(0.3),
    "residual": lambda: residual(linear()),
    "gate": Gate,
    "double": lambda: as_written(nn.Linear(WIDTH, WIDTH), torch.float64),
    "counter": Counter,
    "scale": Scale,
    "frozen": lambda: residual(linear().requires_grad_(False)),
    "checkpointed": checkpointed,
}
OF_KIND: dict[str, dict[str, Callable[[], nn.Module]]] = {
    "vectors": {
        "linear": linear,
        "group norm": lambda: nn.GroupNorm(3, WIDTH),
        "batch norm": batch_norm_of_rows,
        "own batch norm": OwnBatchNorm,
        "bilinear": bilinear,
        "sometimes": Sometimes,
        "alpha dropout": lambda: nn.AlphaDropout(0.2),
        "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
        "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
        "experts": Experts,
        "shared": Shared,
    },
    "images": {
        "conv": lambda: nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.ReLU()),
        "batch norm 2d": lambda: nn.BatchNorm2d(CHANNELS),
        "batch norm average": lambda: nn.BatchNorm2d(CHANNELS, momentum=None),
        "group norm": lambda: nn.GroupNorm(2, CHANNELS),
        "instance norm": lambda: nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True),
        "dropout 2d": lambda: nn.Dropout2d(0.3),
        "depthwise": lambda: nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS),
        "transposed": lambda: nn.ConvTranspose2d(CHANNELS, CHANNELS, 3, padding=1),
        "residual conv": lambda: residual(nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)),
        "frozen": lambda: residual(nn.Conv2d(CHANNELS, CHANNELS, 1).requires_grad_(False)),
    },
    "tokens": {
        "lstm": lambda: recurrent(nn.LSTM(WIDTH, WIDTH, batch_first=True)),
        "two lstms": lambda: recurrent(nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.2)),
        "gru": lambda: recurrent(nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)),
        "rnn": lambda: recurrent(nn.RNN(WIDTH, WIDTH, batch_first=True)),
        "attention": Attention,
        "transformer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.1, batch_first=True),
        "conv 1d": lambda: along_time(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
        "batch norm": lambda: along_time(nn.BatchNorm1d(WIDTH)),
        "places": Places,
    },
}


def loss_of(form: str) -> Callable[[nn.Module, tuple[torch.Tensor, torch.Tensor]], object]:
    """Give the loss of a form that `fit` may be given."""

    def mean(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1])

    def smoothed(model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.1)

    def weighted(model, batch):
        inputs, labels = batch
        # At least one of each shard counts, as the weights of a batch must not add up to nothing.
        counts = (labels != 0) | (torch.arange(len(labels), device=labels.device) == 0)
        losses = F.cross_entropy(model(inputs), labels, reduction="none")
        return (losses * counts).sum(), counts.sum()

    def with_scalars(model, batch):
        inputs, labels = batch
        outputs = model(inputs)
        hits = (outputs.argmax(1) == labels).float().mean()
        return {"loss": F.cross_entropy(outputs, labels), "accuracy": hits}

    def weighted_with_scalars(model, batch):
        inputs, labels = batch
        outputs = model(inputs)
        weights = 1.0 + labels
        losses = F.cross_entropy(outputs, labels, reduction="none")
        hits = (outputs.argmax(1) == labels).float()
        return {"loss": ((losses * weights).sum(), weights.sum()), "hits": (hits.sum(), len(hits))}

    def noisy(model, batch):
        inputs, labels = batch
        outputs = model(inputs)
        if model.training:
            outputs = outputs + 0.1 * torch.randn_like(outputs)
        penalty = sum(p.float().square().sum() for p in model.parameters() if p.requires_grad)
        return F.cross_entropy(outputs, labels) + 1e-4 * penalty

    return {
        "mean": mean,
        "label smoothing": smoothed,
        "weighted": weighted,
        "dict": with_scalars,
        "weighted dict": weighted_with_scalars,
        "noisy": noisy,
    }[form]
