"""The bench for GPUs: its arithmetic, and that all of it runs where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bench.gpu import clock as clocks
from bench.gpu.clock import GO, OFF, ON, SAID, Clock, choose_setting
from bench.gpu.networks import Gpt2, ResNet
from bench.gpu.peaks import peak_flops
from bench.gpu.side_program import BARE
from bench.gpu.summary import rows_of, verdicts_of
from bench.gpu.turns import OWN, Entry, GpuBlock, Turns
from bench.gpu.workloads import GPT2, RESNET, SMALL, workload
from tests.warm.processes import run

REPOSITORY = Path(__file__).parents[2]


def test_a_peak_is_found_by_the_name_that_torch_gives():
    names = ["NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA L4", "NVIDIA L40S", "Tesla T4"]
    assert [*map(peak_flops, names)] == [989.4e12, 756.5e12, 121e12, 362e12, None]


@pytest.mark.slow
def test_networks_are_as_large_as_their_papers_say():
    with torch.device("meta"):
        sizes = [
            sum(parameter.numel() for parameter in network.parameters())
            for network in (Gpt2(), ResNet())
        ]
        assert Gpt2().flops_per_token() == pytest.approx(8.56e8, rel=0.01)
    assert sizes == [124_475_904, 25_557_032]


def blocks(times_ms, name=GPT2):
    return [
        GpuBlock(name, side, setting, turn, 10, 10 * ms / 1000, 2**20)
        for (side, setting), row in times_ms.items()
        for turn, ms in enumerate(row)
    ]


def test_rows_are_medians_and_ratios_to_the_bare_loop():
    chosen = workload(GPT2, tiny=True)
    found = rows_of(
        blocks({("unisono", OWN): [21.0, 22.0, 90.0], (BARE, ON): [20.0], (BARE, OFF): [10.0]}),
        chosen,
        "NVIDIA H200",
    )
    assert [(row["side"], row["setting"]) for row in found] == [
        *((BARE, OFF), (BARE, ON)),
        ("unisono", OWN),
    ]
    ours = found[2]
    assert (ours["ms"], ours["ms_min"], ours["ms_max"]) == pytest.approx((22.0, 21.0, 90.0))
    assert (ours["over_bare_off"], ours["over_bare_on"]) == pytest.approx((2.2, 1.1))
    tokens_per_s = 4 * 16 / 0.022
    assert ours["units_per_s"] == pytest.approx(tokens_per_s)
    assert ours["mfu"] == pytest.approx(tokens_per_s * chosen.model().flops_per_token() / 989.4e12)


def test_promises_are_judged_by_the_same_settings():
    times_ms = {(BARE, OFF): [10.0], (BARE, ON): [10.4], ("unisono", OWN): [10.7]}
    rows = [
        *rows_of(blocks(times_ms), workload(GPT2, tiny=True), "cpu"),
        *rows_of(blocks(times_ms, SMALL), workload(SMALL, tiny=True), "cpu"),
    ]
    assert [(verdict.promise.split(":")[0], verdict.is_met) for verdict in verdicts_of(rows)] == [
        (GPT2, False),  # 1.029 × the bare loop with the same settings, of 1.02
        (SMALL, True),
        (GPT2, True),  # deterministic: 1.04 × the default, of 1.05
    ]


@pytest.fixture
def pipes(tmp_path):
    """Give the ends of a side's pipes that `Turns` has: writes an order, reads what was said."""
    for name in (GO, SAID):
        os.mkfifo(tmp_path / name)
    go = os.open(tmp_path / GO, os.O_RDWR)
    said = os.open(tmp_path / SAID, os.O_RDWR | os.O_NONBLOCK)

    def order(**what):
        os.write(go, json.dumps(what).encode() + b"\n")

    def hear():
        try:
            return [json.loads(line) for line in os.read(said, 4096).splitlines()]
        except BlockingIOError:
            return []

    yield order, hear
    os.close(go)
    os.close(said)
    choose_setting(OFF)


@pytest.fixture
def now_s(monkeypatch):
    """Give what the bench's clock shows, to be changed."""
    shown = [100.0]
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter=lambda: shown[0]))
    return shown


def test_a_block_is_its_warmup_and_then_its_steps(pipes, tmp_path, now_s):
    order, hear = pipes
    order(warmup=2, steps=3, setting=ON)
    order(warmup=1, steps=1, setting=OFF)
    order(warmup=1, steps=1, setting=OFF)
    clock = Clock(tmp_path, torch.device("cpu"), keeps_settings=False)
    clock.ready()
    assert hear() == [{"ready": True}]
    now_s[0] += 5  # while it warms up
    for _ in range(4):
        clock.tick()
    assert torch.are_deterministic_algorithms_enabled()
    assert hear() == []
    now_s[0] += 7
    clock.tick()
    (block,) = hear()
    assert (block["steps"], block["seconds"]) == (3, 7)
    assert not torch.are_deterministic_algorithms_enabled()
    clock.tick()
    assert hear() == []
    clock.tick()
    assert hear()[0]["steps"] == 1
    clock.close()


@pytest.mark.parametrize("module", ["bench.gpu", "bench.gpu.sitting"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.slow
def test_without_a_gpu_the_way_out_is_told(module):
    done = run([sys.executable, "-m", module], cwd=REPOSITORY)
    assert done.returncode == 2
    assert "`--device cpu --tiny`" in done.stderr


EVERY_SIDE = [SMALL, *(pytest.param(name, marks=pytest.mark.long) for name in (GPT2, RESNET))]


@pytest.mark.long
@pytest.mark.parametrize("name", EVERY_SIDE)
def test_sides_take_turns_and_a_lost_one_leaves_the_others(name, tmp_path):
    failures = []
    chosen = [BARE, "unisono"]
    with Turns(
        name, "cpu", chosen, tmp_path, lambda *failure: failures.append(failure), tiny=True
    ) as turns:
        rows = [Entry(BARE, ON), Entry("unisono", OWN)]
        measuring = turns.measure(rows, block_s=0.01, seconds=60, most_turns=3)
        order = [next(measuring).side for _ in range(4)]
        turns._sides["unisono"]._process.kill()
        rest = list(measuring)
    assert order == [BARE, "unisono", "unisono", BARE]
    assert [block.side for block in rest] == [BARE]
    assert all(block.seconds > 0 and block.workload == name for block in rest)
    assert [side for side, _ in failures] == ["unisono"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_sitting_writes_tests_and_figures_into_one_file(tmp_path):
    path = tmp_path / "figures.json"
    command = [
        *(sys.executable, "-m", "bench.gpu.sitting", "--device", "cpu", "--tiny"),
        *("--only", "small", "--sides", "bare,unisono", "--jobs", "2"),
        *("-k", "plain and momentum", "--json", str(path), "--commit", "abc"),
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests: 4 passed" in done.stdout
    content = json.loads(path.read_text())
    assert content["machine"]["commit"] == "abc"
    assert len(content["tests"]) == 4
    assert {row["side"] for row in content["rows"]} == {"bare", "unisono"}
    assert content["failures"] == []
