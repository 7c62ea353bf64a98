import pytest
import torch

from unisono.runtime.workers.memory import Memory


def test_an_offset_between_elements_is_refused():
    with pytest.raises(ValueError, match="multiple of 4"):
        Memory.private(64).flat(2, 1, torch.float32)


def test_a_tensor_keeps_its_memory_alive():
    tensor = Memory.private(4096).flat(0, 4, torch.float64)
    tensor.fill_(2.0)
    assert tensor.sum() == 8.0
