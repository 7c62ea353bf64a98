"""The same bits, whoever started the ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # eleven processes that load torch

PROGRAM = str(Path(__file__).parent / "programs" / "train.py")
STARTS = {
    "spawn": [sys.executable, PROGRAM, "spawn"],
    "unisono run": [sys.executable, "-m", "unisono", "run", "-n", "3", PROGRAM, "run"],
    "torchrun": [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", "3", PROGRAM, "torchrun"),
    ],
}


def test_every_launcher_gives_the_same_bits(tmp_path):
    digests = []
    for how, command in STARTS.items():
        backend = "gloo" if how == "torchrun" else "unisono"
        ended = subprocess.run(
            [*command, backend, str(tmp_path / how.replace(" ", "_"))],
            capture_output=True,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            timeout=100,
        )
        assert ended.returncode == 0, ended.stderr
        # torchrun has its ranks write every piece of a line by itself.
        found = re.findall(r"[0-9a-f]{16}", ended.stdout)
        assert len(found) == 3, ended.stdout
        digests += found
    assert len(set(digests)) == 1
