"""What is refused as a loss on an accelerator, whose numbers are yet to come."""

import pytest
import torch

from unisono.engine.step.loss import is_known_bad, read_loss


def test_what_cannot_be_a_loss_is_refused_at_once(accelerator):
    with pytest.raises(TypeError, match="must be a real number"):
        read_loss(torch.ones((), dtype=torch.complex64, device="sim"), 1)
    with pytest.raises(ValueError, match="must be a scalar"):
        read_loss(torch.ones(2, device="sim"), 1)
    loss = read_loss((torch.ones((), device="sim"), torch.tensor(-1.0).to("sim")), 1)
    assert not is_known_bad(loss)
    with pytest.raises(ValueError, match="weight of loss must be at least 0, but is -1"):
        loss.numbers()
