"""The programs of the articles that people come from train here, or hear which word to change."""

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.warm import processes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

PROGRAMS = Path(__file__).parent / "programs"
ON_TWO = ["-m", "unisono", "run", "-n", "2"]
TRAINS = ""
NO_GPU = "this machine has no GPU that torch can use: where the program says `cuda`, write"
SPAWNS = "each of the 2 workers has started all ranks once more, with `mp.spawn`, at the same port"


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without GPUs")
@pytest.mark.parametrize(
    ("way", "name", "said"),
    [
        ([], "getting_started", TRAINS),
        (ON_TWO, "getting_started", f"{SPAWNS}: start this program with `python`"),
        (["-m", "unisono", "run", "-n", "1"], "getting_started", TRAINS),  # the other remedy
        (ON_TWO, "multigpu_torchrun", NO_GPU),
        (ON_TWO, "multigpu", NO_GPU),
        ([], "data_parallel", TRAINS),
        (ON_TWO, "data_parallel", TRAINS),
        (ON_TWO, "model_parallel", NO_GPU),
    ],
    ids=str,
)
def test_a_program_of_an_article_trains_or_says_what_to_change(tmp_path, way, name, said):
    popen = processes.start if way else subprocess.Popen  # a spawned process imports its parent's
    source = (PROGRAMS / f"{name}.py").read_text()
    with socket.create_server(("", 0)) as free:  # the articles' port may be taken by another test
        source = re.sub(r'(?<="MASTER_PORT"\] = ")\d+', str(free.getsockname()[1]), source)
    (tmp_path / f"{name}.py").write_text(source)
    command = [sys.executable, *way, f"{name}.py"]
    done = processes.run(command, popen=popen, cwd=tmp_path, timeout=240)
    assert (done.returncode == 0) == (said == TRAINS), done
    assert said in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without GPUs")
def test_gloo_in_the_place_of_nccl_trains(tmp_path):
    source = (PROGRAMS / "multigpu_torchrun.py").read_text()
    source = source.replace('"nccl"', '"gloo"')
    source = source.replace("    torch.cuda.set_device(int", "    (int")
    source = source.replace("self.gpu_id = int(os.environ", 'self.gpu_id = "cpu" or (os.environ')
    source = source.replace(", device_ids=[self.gpu_id]", "")
    (tmp_path / "train.py").write_text(source)
    done = processes.run([sys.executable, *ON_TWO, "train.py"], cwd=tmp_path)
    assert done.returncode == 0, done
