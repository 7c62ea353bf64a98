"""`unisono run --nnodes`: agents of several hosts, here all on the loopback of this one."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from tests.warm import processes

from unisono.tools.cli.endings import NumHosts, SeveralHosts
from unisono.tools.cli.hosts_agent import HostAgent
from unisono.tools.cli.hosts_rendezvous import HostsStart

pytestmark = pytest.mark.slow

PROGRAM = """
import torch, unisono
import torch.distributed as dist
with unisono.distributed.init() as here:
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"rank {here.rank} of {int(total)}")
"""


class Agents:
    """Agents that meet at one free port. Final."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.place = f"127.0.0.1:{free.getsockname()[1]}"
        self._stack = stack
        self.script = folder / "program.py"
        self.script.write_text(PROGRAM)

    def start(self, number: int, nnodes: str = "2", **environ: str) -> Any:
        command = [sys.executable, "-m", "unisono", "run", "-n", "1", "--nnodes", nnodes]
        command += ["--node-rank", str(number), "--rendezvous", self.place, str(self.script)]
        agent = processes.start(
            command,
            env={**os.environ, "UNISONO_INTERFACE": "lo", **environ},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._stack.enter_context(agent)
        self._stack.callback(agent.kill)
        return agent


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with ExitStack() as stack:
        yield Agents(tmp_path, stack)


def said(agent: Any) -> str:
    output, _ = agent.communicate(timeout=120)
    return output


def await_line(agent: Any, pattern: str) -> None:
    for line in agent.stdout:
        if re.search(pattern, line):
            return
    raise AssertionError(f"no line matches {pattern}")


SOON = {"UNISONO_NOTICE_AFTER": "0.3"}


def test_a_second_host_of_the_same_number_is_refused_and_disturbs_nobody(agents: Agents) -> None:
    zero = agents.start(0, **SOON)
    await_line(zero, "and not all hosts have arrived")
    told = said(agents.start(0))
    assert "must be an address of host 0, which this is, and a free port on it" in told
    one, other = agents.start(1, "2"), agents.start(1, "2")
    outputs = [said(agent) for agent in (zero, one, other)]
    assert sum("`--node-rank` must differ on each host" in output for output in outputs) == 1
    assert sorted(agent.returncode for agent in (zero, one, other)) == [0, 0, 1]
    assert "rank 0 of 2" in outputs[0]
    assert ("rank 1 of 2" in outputs[1]) != ("rank 1 of 2" in outputs[2])


@pytest.mark.parametrize("number", [0, 1])
def test_ctrl_c_while_hosts_wait_ends_all_of_them(agents: Agents, number: int) -> None:
    there = [agents.start(number, "3", **SOON) for number in (0, 1)]
    for agent in there:
        await_line(agent, "and not all hosts have arrived")
    there[number].send_signal(signal.SIGINT)
    assert "another host has ended the run" in said(there[1 - number])
    assert said(there[number]) == ""
    assert [agent.returncode for agent in there] == [130, 130]


def test_a_host_ends_though_the_store_does_not_answer(agents: Agents) -> None:
    zero, one = (agents.start(number, "3", **SOON) for number in (0, 1))
    for agent in (zero, one):
        await_line(agent, "and not all hosts have arrived")
    os.kill(zero.pid, signal.SIGSTOP)
    one.send_signal(signal.SIGTERM)
    assert said(one) == ""
    assert one.returncode == 143


@pytest.mark.parametrize("number", [0, 1])
def test_a_host_that_waits_too_long_for_others_ends_with_1(agents: Agents, number: int) -> None:
    agent = agents.start(number, UNISONO_RENDEZVOUS_TIMEOUT="0.5")
    assert f"{agents.place} within 0.5 s, but " in said(agent)
    assert agent.returncode == 1


WAITING = """
import os, time, torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} of {int(total)}", flush=True)
while not os.path.exists(__file__ + ".go"):
    time.sleep(0.01)
"""


def test_all_begin_again_with_a_host_that_lost_its_launcher(agents: Agents) -> None:
    agents.script.write_text(WAITING)
    zero, one = (agents.start(number, GLOO_SOCKET_IFNAME="lo") for number in (0, 1))
    await_line(zero, "rank 0 of 2")
    await_line(one, "rank 1 of 2")
    (launcher,) = psutil.Process(one.pid).children()
    launcher.kill()
    await_line(one, "All hosts begin again once they are there")
    # Its workers are in no step, in which they would miss the others.
    await_line(zero, "another host begins again, and all others with it")
    await_line(zero, "rank 0 of 2")
    await_line(one, "rank 1 of 2")
    Path(f"{agents.script}.go").touch()
    assert (said(zero), said(one)) == ("", "")
    assert (zero.returncode, one.returncode) == (0, 0)


@pytest.mark.parametrize(
    ("ended", "are_connected", "missed"),
    [(None, False, {7}), (None, True, set()), (0, False, set())],
)
def test_a_host_is_missed_by_agents_until_workers_are_connected(
    ended: int | None, are_connected: bool, missed: set[int]
) -> None:
    opened = []
    rendezvous: Any = SimpleNamespace(
        ended=lambda: ended,
        is_over=lambda start: False,
        lacks_one=lambda: True,
        are_connected=lambda start: are_connected,
        begin_again=opened.append,
    )
    hosts = SeveralHosts(NumHosts(2, 2), 0, "host:1")
    agent = HostAgent([], 1, 3, hosts, ("host", 1), None, lambda: None)
    agent._launcher = subprocess.Popen(["sleep", "0.1"])
    assert agent._watch(rendezvous, HostsStart(7, 0, (), "")) is False
    assert set(opened) == missed


@pytest.mark.parametrize(("status", "ends"), [(1, True), (128 + signal.SIGTERM, False)])
def test_an_exception_ends_the_run_though_another_host_begins_again(
    status: int, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its host has written the last checkpoint for so long that others took it for lost."""
    opened = []
    rendezvous: Any = SimpleNamespace(begin_again=opened.append, beat=lambda: None)
    hosts = SeveralHosts(NumHosts(2, 2), 0, "host:1")
    agent = HostAgent([], 1, 3, hosts, ("host", 1), None, lambda: None)
    launcher = subprocess.Popen(["sh", "-c", f"exit {status}"])
    monkeypatch.setattr(agent, "_started", lambda start: launcher)
    monkeypatch.setattr(agent, "_watch", lambda rendezvous, start: True)
    assert agent._run_once(rendezvous, HostsStart(7, 0, (), "")) == (status if ends else None)
    assert opened == ([] if ends else [7])


def test_a_program_that_is_no_store_is_not_waited_for_forever(agents: Agents) -> None:
    address, _, port = agents.place.partition(":")
    with socket.create_server((address, int(port))):
        agent = agents.start(1, UNISONO_RENDEZVOUS_TIMEOUT="1")
        assert "what listens there does not answer as one" in said(agent)
    assert agent.returncode == 1


def test_a_worker_starts_a_run_of_its_own_only_without_the_variable(agents: Agents) -> None:
    own = agents.script.with_name("own.py")
    own.write_text("import unisono; print(unisono.world().world_size, 'alone')")
    command = [sys.executable, "-m", "unisono", "run", "-n", "1", str(own)]
    agents.script.write_text(
        "import os, subprocess\n"
        f"command = {command}\n"
        "if os.environ['RANK'] == '0':\n"
        "    refused = subprocess.run(command, capture_output=True, text=True)\n"
        "    print(refused.returncode, refused.stderr)\n"
        "    del os.environ['UNISONO_HOSTS']\n"
        "    subprocess.run(command, check=True)\n"
    )
    zero, one = (agents.start(number) for number in (0, 1))
    output = said(zero)
    assert "2 unisono: `unisono run` must be started by the agent of its host" in output
    assert "1 alone" in output
    said(one)
    assert (zero.returncode, one.returncode) == (0, 0)
