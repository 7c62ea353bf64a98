"""Small models of the kinds that people train, and a plain loop around them."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

SAMPLES = 10


class Cnn(nn.Module):
    """With BatchNorm, dropout, something frozen and something that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.3)
        )
        self.head = nn.Linear(4 * 36, 10)
        self.frozen = nn.Linear(10, 10).requires_grad_(False)
        self.unused = nn.Linear(2, 2)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.frozen(self.head(self.features(images).flatten(1)))


class Gpt(nn.Module):
    """Two blocks of a transformer; the first and the last layer share their weights."""

    def __init__(self, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.token, self.position = nn.Embedding(16, 8), nn.Embedding(6, 8)
        layer = nn.TransformerEncoderLayer
        self.blocks = nn.ModuleList(layer(8, 2, 16, 0.2, batch_first=True) for _ in range(2))
        self.head = nn.Linear(8, 16, bias=False)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.token.weight

    def _apply(self, *args: object, **kwargs: object) -> Gpt:
        super()._apply(*args, **kwargs)
        self.tie()  # a move to a simulated device makes new parameters of both
        return self

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens) + self.position.weight
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(x)


def images(seed: int, samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(samples, 1, 8, 8, generator=generator)
    return drawn, torch.randint(10, (samples,), generator=generator)


def texts(seed: int, samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(16, (samples, 7), generator=generator)
    return drawn[:, :-1], drawn[:, 1:]


Batches = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]


def train(
    model: nn.Module,
    batches: Batches,
    *,
    steps: int = 3,
    make: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    **options: object,
) -> list[float]:
    """Train in a plain loop, with a short last batch; return the losses."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = make(parameters, **({"foreach": False} | options))
    losses = []
    for step in range(steps):
        inputs, labels = batches(step, SAMPLES if step < steps - 1 else 3)
        outputs = model(inputs)
        loss = F.cross_entropy(outputs.flatten(0, -2), labels.flatten().to(outputs.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def bits_of(model: nn.Module) -> dict[str, bytes]:
    """Give the bytes of all parameters, gradients and buffers by name."""
    found = dict(model.state_dict())
    found |= {
        f"gradient of {name}": parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return {name: tensor.cpu().numpy().tobytes() for name, tensor in found.items()}
