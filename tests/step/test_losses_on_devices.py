"""Losses and scalars that an accelerator has yet to give."""

import pytest
import torch

from unisono.engine.step.loss import PendingLosses, is_known_bad, read_loss
from unisono.runtime.device import Device
from unisono.runtime.world import World

FORMS = {
    "mean": lambda on: on(0.1),
    "a half": lambda on: on(0.1, dtype=torch.bfloat16),
    "sum and weight": lambda on: (on(3.7), on(5, dtype=torch.int64)),
    "sum and number": lambda on: (on(3.7), 5),
    "dict": lambda on: {"loss": on([0.3]), "right": (on(2), on(3)), "plain": 0.7, "flag": on(True)},
    "not finite": lambda on: {"loss": on(float("nan")), "other": on(float("inf"))},
}


@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_those_of_the_cpu(accelerator, form):
    copies = Device.of("sim", World()).copies()

    def there(value, dtype=None):
        return torch.tensor(value, dtype=dtype).to("sim")

    here = read_loss(FORMS[form](torch.tensor), 7)
    pending = PendingLosses(copies)
    value = FORMS[form](there)
    with accelerator.synchronizations() as seen:
        pending.losses += [(shard, read_loss(value, 7)) for shard in (2, 5)]
        read = list(pending.read())
    assert seen == []
    assert [shard for shard, _ in read] == [2, 5]
    assert not pending.losses
    for _, loss in read:
        assert repr(loss.scalars) == repr(here.scalars)


def test_a_counter_that_goes_on_counting_is_read_as_it_was(accelerator):
    count = torch.ones((), device="sim")
    pending = PendingLosses(Device.of("sim", World()).copies())
    for shard in range(2):
        pending.losses.append((shard, read_loss({"loss": count * 1, "count": count}, 1)))
        count += 1
    assert [loss.scalars["count"] for _, loss in pending.read()] == [(1, 1), (2, 1)]


def test_what_cannot_be_a_loss_is_refused_at_once(accelerator):
    with pytest.raises(TypeError, match="must be a real number"):
        read_loss(torch.ones((), dtype=torch.complex64, device="sim"), 1)
    with pytest.raises(ValueError, match="must be a scalar"):
        read_loss(torch.ones(2, device="sim"), 1)
    loss = read_loss((torch.ones((), device="sim"), torch.tensor(-1.0).to("sim")), 1)
    assert not is_known_bad(loss)
    with pytest.raises(ValueError, match="weight of loss must be at least 0, but is -1"):
        loss.numbers()
