"""A process that has made a group takes no fresh pages for blocks that come and go."""

import platform

import pytest


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_blocks_that_come_again_cost_no_page_faults(run_ranks):
    (ended,) = run_ranks("freed_memory.py", 1)
    assert ended.exit_code == 0, ended.output
    without_group, with_group = map(int, ended.output.split())
    assert with_group < without_group / 10
