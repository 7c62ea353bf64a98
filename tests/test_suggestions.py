"""Command lines that people write from habit are refused with what to write."""

import socket

import pytest
from click.testing import CliRunner
from tests.promises import promise

from unisono.runtime.workers import interfaces
from unisono.tools.cli import main


def said(*arguments):
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == 2, result.output
    return result.output.strip()


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").touch()
    return str(tmp_path / "train.py")


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["train.py"], "unisono run train.py"),
        (["train.py", "--lr", "0.1"], "unisono run train.py --lr 0.1"),
        (["a folder/train.py"], "unisono run 'a folder/train.py'"),
        (["-n", "2", "train.py"], "unisono run -n 2 train.py"),
        (["-n2", "train.py"], "unisono run -n2 train.py"),
        (["-m", "package"], "unisono run -m package"),
    ],
)
def test_what_was_meant_is_said(arguments, meant):
    assert said(*arguments).endswith(f"use `{meant}`.")


STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
STEP |= {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "n[1-2]"}


@pytest.mark.parametrize(
    "task",
    [
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
        {**STEP, "SLURM_STEP_TASKS_PER_NODE": "2"},
        {**STEP, "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_PTY_PORT": "9"},
    ],
)
def test_a_launcher_for_each_task_is_refused(task, script, monkeypatch):
    for name, value in task.items():
        monkeypatch.setenv(name, value)
    assert "is one of 2 tasks of" in said("run", "-n", "2", script)


@promise("where-it-ends.9")
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--node-rank", "1"], "`--node-rank` is for several hosts"),
        (
            ["--nnodes", "2:1"],
            "`--nnodes` must be a number of hosts, or the least and the most, but",
        ),
        (["--nnodes", "2"], "`--node-rank` must be the number of this host, 0 … 1"),
        (["--nnodes", "2", "--node-rank", "2"], "different on each of 2, but is 2"),
        (["--nnodes", "2", "--node-rank", "0"], "`--rendezvous` must be the address of host 0"),
        (["--nnodes", "2", "--node-rank", "0", "--rendezvous", "a:0"], "but is a:0"),
        (
            ["--nnodes", "2", "--node-rank", "0", "--rendezvous", "a:1", "--workers-per-gpu", "2"],
            "`--workers-per-gpu` is for workers of one host",
        ),
        (
            ["--nnodes", "2", "--node-rank", "0", "--rendezvous", "127.0.0.1:1"],
            "all hosts must reach this one, but 127.0.0.1 leads nowhere beyond it",
        ),
    ],
)
def test_half_of_what_several_hosts_need_is_refused(options, words, script):
    assert words in said("run", *options, script)


def test_variables_that_make_no_sense_are_refused_before_others_wait(script, monkeypatch):
    monkeypatch.setenv("UNISONO_INTERFACE", "lo")
    options = ["--nnodes", "2", "--node-rank", "1", "--rendezvous", "127.0.0.1:1"]
    for name, words in (
        ("NOTICE_AFTER", "a number of seconds"),
        ("FAULTS", "each row must be"),
    ):
        with monkeypatch.context() as patch:
            patch.setenv(f"UNISONO_{name}", "soon")
            assert words in said("run", *options, script)


@pytest.mark.parametrize(
    ("interface", "words"),
    [
        ("no", "`UNISONO_INTERFACE` must name an interface"),
        ("lo", "all hosts must reach this one, but lo leads nowhere beyond it"),
    ],
)
def test_an_interface_that_leads_to_no_other_host_is_refused(interface, words, script, monkeypatch):
    monkeypatch.setenv("UNISONO_INTERFACE", interface)
    monkeypatch.setattr(interfaces, "address_towards", lambda where, port: "10.0.0.2")
    options = ["--nnodes", "2", "--node-rank", "0", "--rendezvous", "10.0.0.1:1"]
    assert words in said("run", *options, script)


def test_the_rendezvous_must_be_free_and_on_host_0(script, monkeypatch):
    monkeypatch.setenv("UNISONO_INTERFACE", "lo")
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = f"127.0.0.1:{other.getsockname()[1]}"
        options = ["--nnodes", "2", "--node-rank", "0", "--rendezvous", place]
        words = said("run", *options, script)
    assert "`--rendezvous` must be an address of host 0, which this is, and a free port" in words
    assert "Address already in use" in words
