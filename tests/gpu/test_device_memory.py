"""Memory of the host that a GPU copies from: pinned in place, the memory of a run included."""

from __future__ import annotations

import os

import pytest
import torch
from tests.gpu.devices import CPU

import unisono
from unisono.runtime.device import Device

NUM_BYTES = 64 << 20


def mapped(num_bytes: int) -> torch.Tensor:
    """Map memory as a run's: a file without a name, which other processes map, too."""
    fd = os.memfd_create("unisono-test")
    try:
        os.ftruncate(fd, num_bytes)
        path = f"/proc/{os.getpid()}/fd/{fd}"
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    finally:
        os.close(fd)


@pytest.mark.needs_accelerator
def test_mapped_memory_is_pinned_where_it_lies(device):
    memory = mapped(NUM_BYTES)
    assert not memory.is_pinned()
    here = Device.of(device, unisono.world())
    undo = here.register(memory)
    assert undo is not None
    try:
        assert memory.is_pinned()
        source = torch.randint(256, (NUM_BYTES,), dtype=torch.uint8, device=here.torch)
        memory.copy_(source, non_blocking=True)
        torch.get_device_module(here.torch).synchronize()
        assert torch.equal(memory, source.cpu())
        assert torch.equal(memory.to(here.torch, non_blocking=True), source)
    finally:
        undo()
    assert not memory.is_pinned()


@pytest.mark.on_the_cpu_too
def test_copies_arrive_in_both_directions(device):
    here = Device.of(device, unisono.world())
    memory = torch.empty(1 << 20)
    undo = here.register(memory)
    source = torch.randn(1 << 20).to(here.torch)
    copies = here.copies()
    for turn in range(3):
        source += turn
        copies.to_host(memory, source)
        copies.wait()
        assert torch.equal(memory, source.cpu())
        memory.mul_(2)
        back = torch.empty_like(source)
        copies.to_device(back, memory)
        doubled = back + 0
        copies.wait()
        assert torch.equal(doubled.cpu(), memory)
    if undo is not None:
        undo()
    assert (undo is not None) == (device != CPU)


@pytest.mark.needs_cuda
def test_memory_registered_twice_is_refused_and_harms_nothing(device):
    here = Device.of(device, unisono.world())
    memory = mapped(1 << 20)
    undo = here.register(memory)
    assert undo is not None
    assert here.register(memory) is None
    assert torch.ones(2, device=here.torch).sum().item() == 2
    undo()
