"""What is trained on a GPU? Model, data, loss, optimizer and batch of each workload.

The data are random: the time of a step does not depend on what they show. All sides read the same
tensors from the host's memory, batch by batch, and compute in bfloat16 with torch's autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from bench.gpu.networks import Gpt2, ResNet, SmallNet

SEED = 0
PRECISION = torch.bfloat16
Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class GpuWorkload:
    """One table of the comparison.

    Attributes:
        name: what ``--only`` calls it.
        title: what the table calls it.
        build: makes the model.
        draw: makes the dataset.
        loss: takes (model, batch) to the mean loss; the batch is on the model's device.
        optimizer: is made of parameters.
        batch_size: samples of one step.
        unit: what a rate counts.
        units_per_sample: how many of them a sample has.
        channels_last: whether images have their channels last in memory.
    """

    name: str
    title: str
    build: Callable[[], nn.Module]
    draw: Callable[[], TensorDataset]
    loss: Callable[[nn.Module, Batch], Tensor]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
    batch_size: int
    unit: str
    units_per_sample: int = 1
    channels_last: bool = False

    def model(self) -> nn.Module:
        """Make the model with the same weights in every process."""
        torch.manual_seed(SEED)
        return self.build()

    def dataset(self) -> TensorDataset:
        """Make the dataset with the same numbers in every process."""
        torch.manual_seed(SEED)
        return self.draw()


def next_token(model: nn.Module, batch: Batch) -> Tensor:
    (tokens,) = batch
    return model(tokens[:, :-1], tokens[:, 1:])


def classify(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images), labels)


def classify_bytes(model: nn.Module, batch: Batch) -> Tensor:
    images, labels = batch
    return F.cross_entropy(model(images.float().div_(255)), labels)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-4)


def texts(num_samples: int, context: int, vocabulary: int) -> TensorDataset:
    return TensorDataset(torch.randint(vocabulary, (num_samples, context + 1)))


def bytes_of_images(num_samples: int, side: int, num_classes: int) -> TensorDataset:
    images = torch.randint(256, (num_samples, 3, side, side), dtype=torch.uint8)
    return TensorDataset(images, torch.randint(num_classes, (num_samples,)))


def images(num_samples: int) -> TensorDataset:
    return TensorDataset(torch.randn(num_samples, 3, 32, 32), torch.randint(10, (num_samples,)))


GPT2, RESNET, SMALL = "gpt2", "resnet50", "small"
NAMES = (GPT2, RESNET, SMALL)


def workload(name: str, *, tiny: bool) -> GpuWorkload:
    """Make a workload; `tiny`: so small that a CPU takes a second for dozens of steps."""
    return {GPT2: _gpt2, RESNET: _resnet50, SMALL: _small}[name](tiny)


def _gpt2(tiny: bool) -> GpuWorkload:
    vocabulary, context = (64, 16) if tiny else (50304, 1024)
    return GpuWorkload(
        GPT2,
        f"GPT-2, {'tiny' if tiny else '124 M'}, {4 if tiny else 16} × {context} tokens",
        build=lambda: Gpt2(vocabulary, context, 32, 2, 2) if tiny else Gpt2(),
        draw=lambda: texts(64 if tiny else 2048, context, vocabulary),
        loss=next_token,
        optimizer=adamw,
        batch_size=4 if tiny else 16,
        unit="tokens",
        units_per_sample=context,
    )


def _resnet50(tiny: bool) -> GpuWorkload:
    side = 32 if tiny else 224
    return GpuWorkload(
        RESNET,
        f"ResNet{'' if tiny else '-50'}, {8 if tiny else 128} images of {side} × {side}, AMP, "
        "channels last",
        build=lambda: ResNet((1, 1, 1, 1), 4, 10) if tiny else ResNet(),
        draw=lambda: bytes_of_images(64 if tiny else 4096, side, 10 if tiny else 1000),
        loss=classify_bytes,
        optimizer=momentum,
        batch_size=8 if tiny else 128,
        unit="images",
        channels_last=True,
    )


def _small(tiny: bool) -> GpuWorkload:
    return GpuWorkload(
        SMALL,
        f"Eight convolutions, {8 if tiny else 128} images of 32 × 32: overhead of a step",
        build=lambda: SmallNet(4 if tiny else 32),
        draw=lambda: images(64 if tiny else 8192),
        loss=classify,
        optimizer=momentum,
        batch_size=8 if tiny else 128,
        unit="images",
    )
