"""What cannot be computed on a GPU is explained: operations, memory, devices, too many workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu import cases
from tests.gpu.devices import CPU, CUDA, settings
from tests.gpu.loops import trainer_of
from torch import nn

import unisono


class Summed(nn.Module):
    """A sum along images, which torch computes on GPUs in any order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(images.cumsum(-1) / 16)


class Pooled(nn.Module):
    """A pooling whose backward pass adds in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 3)
        self.pool = nn.AdaptiveMaxPool2d(3)
        self.head = nn.Linear(36, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.pool(self.convolution(images)).flatten(1))


def trainer(model: nn.Module, device: str, **options: Any) -> unisono.Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return unisono.Trainer(model, optimizer, cases.classify, shards=2, device=device, **options)


class Put(nn.Module):
    """Numbers put to places, some of them to the same; refused on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(10, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        places = torch.arange(10, device=images.device) % 7
        chosen = images.new_zeros(len(images), 10)
        chosen.put_(places, images.flatten()[:10])
        return self.head(chosen)


MODELS = {
    "put_": Put,
    "cumsum": lambda: Summed(cases.CASES["cnn"].model("cuda")),
    "adaptive_max_pool2d": Pooled,
}


def skip_where_it_is_allowed(operation: str, device: str) -> None:
    if device == CPU or (device != CUDA and operation != "put_"):
        pytest.skip(f"{operation} is computed on {device}")


@pytest.mark.parametrize("operation", MODELS)
def test_an_operation_without_a_deterministic_form_is_named(operation, device):
    skip_where_it_is_allowed(operation, device)
    before = settings()
    torch.manual_seed(0)
    run = trainer(MODELS[operation](), device)
    with pytest.raises(unisono.errors.NondeterministicError) as caught:
        run.fit(cases.images(), batch_size=cases.BATCH_SIZE, steps=1)
    assert operation in caught.value.operation
    assert "exact=False" in str(caught.value)
    assert settings() == before


@pytest.mark.parametrize("operation", MODELS)
def test_it_is_computed_where_exactness_is_given_up(operation, device):
    skip_where_it_is_allowed(operation, device)
    torch.manual_seed(0)
    run = trainer(MODELS[operation](), device, precision=unisono.Precision(exact=False))
    assert run.fit(cases.images(), batch_size=cases.BATCH_SIZE, steps=2).steps == 2


@pytest.mark.needs_accelerator
def test_memory_that_is_not_there_is_explained(device):
    def greedy(model: nn.Module, batch: Any) -> Any:
        torch.empty(1 << 50, dtype=torch.uint8, device=batch[0].device)
        return cases.classify(model, batch)

    run = trainer_of("cnn", device, 2, loss=greedy)
    with pytest.raises(unisono.errors.OutOfMemoryError, match="pass `shards=4`") as caught:
        run.fit(cases.images(), batch_size=cases.BATCH_SIZE, steps=1)
    assert caught.value.step == 0
    assert caught.value.needed["parameters"] > 0
