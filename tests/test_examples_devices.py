"""The examples of several devices run as they are copied, on the CPU and on simulated devices."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import pytest
from tests.accelerator import sim
from tests.warm import processes

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).resolve().parents[1] / "examples" / "devices"
needs_sim = pytest.mark.usefixtures("simulated")


@pytest.fixture(scope="module")
def simulated():
    if reason := sim.why_not():
        pytest.skip(reason)


def run(script, *args, workers=None, fails=False, folder=EXAMPLES):
    starter = ["-m", "unisono", "run", "-n", str(workers)] if workers else []
    command = [sys.executable, *starter, str(folder / script), *args]
    done = processes.run(command, timeout=200, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""})
    assert (done.returncode != 0) == fails, done.stdout + done.stderr
    return done.stdout + done.stderr if fails else done.stdout


def last(output):
    return output.splitlines()[-1]


def test_the_toy_model_has_the_same_weights_on_each_number_of_devices():
    outputs = [run("data_parallel.py", "--devices", names) for names in ("cpu", "cpu,cpu,cpu")]
    assert last(outputs[0]) == last(outputs[1])
    assert "in the model: input (8, 5) on cpu" in outputs[0]
    assert "outside: input (30, 5), output (30, 2)" in outputs[0]
    assert last(run("data_parallel.py", "--shards", "2")) != last(outputs[0])


@needs_sim
def test_the_toy_model_runs_on_simulated_devices():
    output = run("data_parallel.py", "--devices", "sim:0,sim:1")
    assert "in the model: input (6, 5) on sim:1" in output
    assert last(output) == last(run("data_parallel.py", "--devices", "sim:3"))


@needs_sim
def test_two_layers_are_on_two_devices():
    output = run("two_layers.py", "--devices", "sim:0,sim:1")
    assert re.search(r"net1.bias +on sim:0\nnet2.weight +on sim:1", output)
    assert last(output) == last(run("two_layers.py")) == "the same bits"


@needs_sim
def test_the_large_classifier_fits_on_two_devices_and_not_on_one():
    limited = ("--limit-mb", "40", "--devices")
    output = run("large_classifier.py", *limited, "sim:0,sim:1")
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert losses == sorted(losses, reverse=True)
    assert "sim:1 has ranges.2.weight, ranges.2.bias, ranges.3.weight" in output
    refused = run("large_classifier.py", *limited, "sim:0", fails=True)
    assert "it does not fit on sim:0: sim:0 is out of memory" in refused


@needs_sim
def test_a_gpt_in_two_is_on_two_simulated_devices():
    devices = ("--devices", "sim:0,sim:1")
    halves = run("gpt_in_two.py", *devices, workers=2)
    assert "2 workers; blocks of worker 0 on sim:0, sim:0, sim:1, sim:1" in halves
    assert last(halves) == last(run("gpt_in_two.py", "--devices", "cpu"))


def test_without_the_repository_the_way_out_is_told(tmp_path):
    folder = tmp_path / "a folder" / "examples" / "devices"
    shutil.copytree(EXAMPLES, folder)
    said = run("data_parallel.py", "--devices", "sim:0", fails=True, folder=folder)
    assert "must be run from a checkout of Unisono's repository" in said
    assert "pass `--devices cpu,cpu`" in said
