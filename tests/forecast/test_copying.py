"""What a byte between hosts costs a core."""

from __future__ import annotations

import pytest

from unisono.forecast import copying


def test_a_byte_costs_a_core_some_of_a_nanosecond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "_BYTES", 1 << 20)
    assert 1e-11 < copying.copying_cost_s() < 1e-7
