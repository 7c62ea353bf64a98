"""Random programs: a short piece of what ``make chaos`` does at length."""

from __future__ import annotations

import pytest
from tests.chaos.exchanges import has_accelerator
from tests.chaos.programs import runner


@pytest.mark.long
def test_a_program_comes_to_the_same_in_every_way(tmp_path):
    ways = list(runner.run(5, tmp_path))
    others = 2 if has_accelerator() else 1
    assert [way.trouble for way in ways] == [""] * (7 + 2 * others)
    assert ways[-2 - others].num_disturbed >= 1
