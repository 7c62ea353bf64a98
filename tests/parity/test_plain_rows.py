"""Ports have the numbers of their plain loops, in every way of running them."""

import functools

import pytest
import torch
from tests.everywhere import STEPS, one_result
from tests.parity.plain_rows import ROWS, trained

EACH = pytest.mark.parametrize("name", ROWS)


@EACH
@pytest.mark.parametrize("shards", [1, 6])
def test_a_port_has_the_numbers_of_its_plain_loop(name, shards):
    expected = ROWS[name]().by_a_plain_loop(STEPS)
    found = trained(name, shards, STEPS, None)
    assert shards > 1 or found == expected
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "exchange"), [(name, each) for name, row in ROWS.items() for each in row.exchanges]
)
def test_a_port_has_them_in_every_way(name, exchange, monkeypatch, tmp_path):
    monkeypatch.setenv("UNISONO_EXCHANGE", exchange)
    one_result(functools.partial(trained, name, 6), monkeypatch, tmp_path)
