"""`buffer.data = new` must keep the shape; what else it does, the row `ReplacedBuffers` shows."""

import pytest
import torch
from tests.classified import by_sign, cross_entropy
from tests.parity.plain_rows import ReplacedBuffers

import unisono


def test_data_of_another_shape_is_refused_by_name():
    def reshaped(model, batch):
        model.centre.data = torch.zeros(3)
        return cross_entropy(model, batch)

    model = ReplacedBuffers.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = r"a buffer must keep its shape .* `centre` was \(4,\) of torch.float32 and is \(3,\)"
    with pytest.raises((ValueError, RuntimeError), match=words):
        unisono.Trainer(model, optimizer, reshaped, shards=2).fit(
            by_sign(36), batch_size=6, steps=1
        )
