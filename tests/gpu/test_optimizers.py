"""Every optimizer of torch, in each of the ways in which torch computes it on the device."""

from __future__ import annotations

import pytest
from tests.gpu import cases
from tests.gpu.loops import first_difference, plain_loop, unisono_loop

STEPS = 7  # RAdam does something else from its sixth on


@pytest.mark.parametrize(("name", "way"), cases.ROWS)
def test_one_shard_has_the_bits_of_a_plain_loop(name, way, device):
    if reason := cases.is_offered(name, way, device):
        pytest.skip(reason)
    how = {"optimizer": name, "way": way}
    theirs = plain_loop("cnn", device, STEPS, **how)
    assert first_difference(unisono_loop("cnn", device, STEPS, **how), theirs) is None
