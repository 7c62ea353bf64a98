"""A process that has made a group takes no fresh pages for blocks that come and go."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "freed_memory.py"


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_blocks_that_come_again_cost_no_page_faults():
    # A new interpreter: in a fork of a full one something now and then takes a block's place.
    output = subprocess.check_output([sys.executable, PROGRAM], text=True, timeout=60)
    without_group, with_group = map(int, output.split())
    assert with_group < without_group / 10
