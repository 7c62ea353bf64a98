"""A digest tells two runs apart that differ in one bit of anything that they keep."""

import pytest
import torch
from torch import nn

from unisono.engine.state.contents import digest_of


def trained():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.mark.parametrize(
    "kept",
    [
        lambda model, optimizer: model[0].weight,
        lambda model, optimizer: model[1].running_mean,
        lambda model, optimizer: model[1].num_batches_tracked,
        lambda model, optimizer: optimizer.state[model[0].bias]["exp_avg_sq"],
        lambda model, optimizer: optimizer.state[model[0].bias]["step"],
    ],
    ids=["parameter", "buffer", "scalar buffer", "state", "scalar state"],
)
def test_one_flipped_bit_changes_the_digest(kept):
    model, optimizer = trained()
    assert digest_of(model, optimizer) == digest_of(*trained())
    kept(model, optimizer).detach().view(-1).view(torch.uint8)[0] ^= 1
    assert digest_of(model, optimizer) != digest_of(*trained())
