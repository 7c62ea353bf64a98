"""How many workers are too many?"""

from __future__ import annotations

import os

import pytest

from unisono.launch.job import num_workers_at_most, too_many_workers


@pytest.mark.parametrize(("num_cores", "at_most"), [(1, 256), (32, 256), (33, 264), (128, 1024)])
def test_eight_for_each_core_and_never_fewer_than_256(num_cores: int, at_most: int) -> None:
    assert num_workers_at_most(num_cores) == at_most


def test_only_more_than_that_are_refused() -> None:
    at_most = num_workers_at_most(len(os.sched_getaffinity(0)))
    assert too_many_workers("-n", at_most) == ""
    reason = too_many_workers("-n", at_most + 1)
    assert reason.startswith(f"`-n` must be at most {at_most:,} on this machine, but is")
    assert "start about one worker for each core" in reason
