import os

import pytest
import torch

from unisono.runtime.workers.memory import Memory, aligned


@pytest.mark.parametrize(("num_bytes", "expected"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_sizes_are_rounded_to_cache_lines(num_bytes, expected):
    assert aligned(num_bytes) == expected


def test_two_mappings_of_one_memory_are_one():
    fd = os.memfd_create("test")
    os.ftruncate(fd, 8192)
    one, other = Memory.map(fd, 8192), Memory.map(fd, 8192)
    os.close(fd)
    one.flat(64, 3, torch.float32).copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert other.flat(64, 3, torch.float32).tolist() == [1.0, 2.0, 3.0]
    assert other.read(64, 12) == one.read(64, 12)


def test_tensors_keep_their_strides():
    memory = Memory.private(4096)
    like = torch.empty(2, 3, 4, 5).to(memory_format=torch.channels_last)
    tensor = memory.tensor(128, like.shape, like.dtype, like.stride())
    assert tensor.stride() == like.stride()
    tensor.fill_(1.0)
    assert memory.flat(128, 120, torch.float32).sum() == 120


def test_an_offset_between_elements_is_refused():
    with pytest.raises(ValueError, match="multiple of 4"):
        Memory.private(64).flat(2, 1, torch.float32)


def test_a_tensor_keeps_its_memory_alive():
    tensor = Memory.private(4096).flat(0, 4, torch.float64)
    tensor.fill_(2.0)
    assert tensor.sum() == 8.0
