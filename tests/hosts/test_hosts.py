"""Workers of several hosts: the same bits, few bytes, and what happens when one is lost."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml
from tests.chaos.exchanges import ACCELERATED, skip_without
from tests.hosts.conftest import MakeHosts
from tests.hosts.virtual_hosts import Host, Link, torchrun
from tests.promises import promise

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]

TRAIN, FIT, RING, LOOPED = (
    f"tests/hosts/programs/{name}.py" for name in ("train", "fit", "ring", "looped")
)
ENDED_WITHIN_S = 120.0
NAMED_WITHIN_S = 10.0
CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"


class Output:
    """What a host's program prints, line by line, with the time of each."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process, self.lines = process, list[tuple[float, str]]()
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line))

    @property
    def text(self) -> str:
        return "".join(line for _, line in self.lines)

    def end(self) -> str:
        """Wait for the end of the program; gives all that it has printed."""
        self.process.wait(ENDED_WITHIN_S)
        self._reading.join()
        return self.text

    def has_ended_well(self) -> str:
        text = self.end()
        assert self.process.returncode == 0, text
        return text

    def await_line(self, pattern: str) -> float:
        """Wait until a line matches; gives its time."""
        deadline = time.monotonic() + ENDED_WITHIN_S
        while time.monotonic() < deadline:
            for at_s, line in list(self.lines):
                if re.search(pattern, line):
                    return at_s
            assert self._reading.is_alive() or re.search(pattern, self.text), self.text
            time.sleep(0.02)
        raise AssertionError(f"no line matches {pattern}: {self.text}")


def all_well(outputs: Sequence[Output]) -> str:
    """See that all have ended well; gives what they have printed."""
    text = "".join(output.end() for output in outputs)
    assert not any(output.process.returncode for output in outputs), text
    assert "covers only the shards" not in text  # the program keeps nothing in its loop
    return text


def start(
    hosts: Sequence[Host], workers: Sequence[int], program: Sequence[str], *, elastic: str = ""
) -> list[Output]:
    return [Output(process) for process in torchrun(hosts, workers, program, elastic=elastic)]


def digests(outputs: Sequence[Output]) -> set[str]:
    return {one for output in outputs for one in re.findall(r"digest (\w+)", output.text)}


def trained(hosts: Sequence[Host], workers: Sequence[int], *options: str) -> set[str]:
    outputs = start(hosts, workers, [TRAIN, *options])
    all_well(outputs)
    found = digests(outputs)
    assert sum(output.text.count("digest") for output in outputs) == sum(workers)
    return found


@pytest.mark.parametrize("options", [("cnn",), ("gpt",), ("gpt", "--optimizer", "normed")], ids=str)
def test_any_division_among_hosts_gives_the_same_bits(make_hosts: MakeHosts, options) -> None:
    hosts = make_hosts(4)
    one = trained(hosts[:1], [4], *options)
    assert len(one) == 1
    for workers in ([2, 2], [1, 3], [1, 1, 1, 1]):
        assert trained(hosts[: len(workers)], workers, *options) == one, workers


SIM = ("--device", "sim")


@pytest.mark.parametrize("model", ["cnn", "gpt"])
def test_replicas_on_several_hosts_have_the_bits_of_one_copy(make_hosts: MakeHosts, model) -> None:
    skip_without(ACCELERATED)
    hosts = make_hosts(2)
    one = trained(hosts[:1], [4], model)
    ways = [([2, 2], SIM), ([1, 3], SIM), ([2, 2], ("--exchange", "staged"))]
    ways += [([1, 1], (*SIM, "--split", "2")), ([1, 3], ("--exchange", "gloo"))]
    for workers, options in ways:
        assert trained(hosts, workers, model, *options) == one, (workers, options)


@pytest.mark.parametrize(
    "options", [("--optimizer", "lbfgs"), ("--optimizer", "sam"), ("--noise",)]
)
def test_closures_and_functions_of_gradients_have_the_bits_of_one_host(
    make_hosts: MakeHosts, options
) -> None:
    skip_without(ACCELERATED)
    hosts = make_hosts(2)
    one = trained(hosts[:1], [2], "gpt", *options)
    assert trained(hosts, [2, 1], "gpt", *options) == one
    assert trained(hosts, [2, 2], "gpt", *options, *SIM) == one


ASK = """
import socket, sys, time
begun_s = time.monotonic()
try:
    socket.create_connection((sys.argv[1], 9))
except ConnectionRefusedError:
    print(time.monotonic() - begun_s)
"""


def test_late_and_lost_packets_change_no_bit(make_hosts: MakeHosts) -> None:
    near, far = make_hosts(1), make_hosts(2, Link(delay_ms=5, loss_percent=1, rate="100mbit"))
    assert float(far[0].run(sys.executable, "-c", ASK, far[1].address)) >= 0.02  # there and back
    one = trained(near, [2], "gpt")
    assert trained(far, [1, 1], "gpt") == one
    assert trained(far, [1, 1], "gpt", "--exchange", "gloo") == one


def sent_a_step(make_hosts: MakeHosts, workers: Sequence[int], program: Sequence[str]) -> float:
    """The most bytes that a host sends in a step, without those of the beginning and the end."""
    counts = []
    for steps in (4, 14):
        hosts = make_hosts(len(workers))
        all_well(start(hosts, workers, [*program, "--steps", str(steps)]))
        counts.append([host.sent_bytes() for host in hosts])
    return max(more - less for less, more in zip(*counts, strict=True)) / 10


def test_hosts_send_what_a_ring_would(make_hosts: MakeHosts) -> None:
    ring = sent_a_step(make_hosts, [1, 1], [RING, "--width", "256"])
    ours = sent_a_step(make_hosts, [2, 2], [TRAIN, "gpt", "--width", "256"])
    assert 0.5 * ring < ours <= 1.05 * ring


def unisono_run(
    hosts: Sequence[Host],
    workers: Sequence[int],
    program: Sequence[str],
    *,
    faults: Sequence[str] = (),
    kills: str = "",
    flags: Sequence[str] = ("--restarts", "3"),
    nnodes: str = "",
    numbers: Sequence[int] = range(9),
    rendezvous: str = "10.77.0.1:29400",
) -> list[Output]:
    place = ["--nnodes", nnodes or str(len(hosts)), "--rendezvous", rendezvous]
    if hosts[0].number and not nnodes:
        place[-1] = f"{hosts[0].address}:29400"
    command = (sys.executable, "-m", "unisono", "run", *place, *flags)
    return [
        Output(
            host.start(
                *(*command, "-n", str(count), "--node-rank", str(number), *program),
                environ={"UNISONO_FAULTS": "; ".join(faults), "KILLS": kills},
            )
        )
        for number, host, count in zip(numbers, hosts, workers, strict=False)
    ]


LONGER = ("--steps", "12", "--pause", "0.05")
KILLS = {
    # Its parts are published or not, sums cross between hosts, parameters are torn, all is done.
    (2, 2): ("rank=3,step=1,at=shard", "rank=0,step=3,at=sums", "rank=2,step=5,at=updated"),
    (1, 3): ("rank=0,step=2,at=gradients", "rank=0,at=join", "rank=3,step=7,at=commit"),
    (1, 1): ("rank=1,step=2,at=update", "rank=0,step=4,at=snapshot"),
}


@promise("where-it-ends.9")
@pytest.mark.parametrize("workers", KILLS, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        ("cnn",),
        ("gpt", "--optimizer", "normed"),
        ("cnn", "--device", "sim"),
        ("gpt", "--optimizer", "lbfgs"),
        ("gpt", "--exchange", "gloo"),
    ],
    ids=str,
)
def test_after_a_loss_all_hosts_start_again_from_memory(
    make_hosts: MakeHosts, tmp_path: Path, workers, options
) -> None:
    if SIM[1] in options:
        skip_without(ACCELERATED)
    hosts, kills, plain = make_hosts(2), KILLS[workers], [*options, *LONGER]
    program = [TRAIN, *plain, "--directory", str(tmp_path / "a run")]
    outputs = unisono_run(hosts, workers, program, faults=[f"kill:{kill}" for kill in kills])
    text = all_well(outputs)
    assert len(re.findall(r"rank \d \(pid \d+\) was killed", text)) == len(kills)
    assert len(re.findall(r"ranks? .* started again", text)) == len(kills) * len(hosts)
    assert text.count("digest") == sum(workers)
    on_cpus = [option for option in plain if option not in SIM]
    assert digests(outputs) == trained(hosts[:1], [2], *on_cpus)


# What each kills, at meetings or while hosts connect; 1' is the first to take the place of rank 1,
# and 1+ a rank 1 that was started again as others were lost.
ELSEWHERE = {
    "before the first step": "1 unisono.share 2; 2+ run directory 1; 0+ taking up 1; "
    "2' start of a loop 1; 0' sharing parameters 1; 1' addresses 1; 2'' snapshot 1 after",
    "in evaluations": "2 evaluate 1; 0+ evaluate 4 after; 1+ evaluate 3; 2' evaluate 2; "
    "0' evaluate 3",
    "at the end of a loop": "2 snapshot 2; 0+ snapshot 1 after; 1+ last checkpoint 1; 2' summary 1",
    "in predictions": "2 predict 1; 0+ file of predict 1; 1+ rows of predict 1 after; "
    "0' rows of predict 1; 2' file of predict 1",
    "while another starts again": "2 gradients of step 2 1; 2' connecting 1; 1+ connecting 1; "
    "0+ addresses 1; 1' putting back 1; 2'' addresses 1; 0' connecting 1",
    "at once": "2 gradients of step 1 1; 1 gradients of step 1 1; 0 gradients of step 1 1; "
    "0' gradients of step 3 1; 2' gradients of step 3 1 after",
}


@pytest.mark.parametrize("workers", [(2, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("kills", ELSEWHERE.values(), ids=ELSEWHERE)
def test_all_start_again_wherever_workers_are_lost(
    make_hosts: MakeHosts, tmp_path: Path, workers, kills
) -> None:
    program = [FIT, str(tmp_path / "run")]
    flags = ["--restarts", "99"]
    outputs = unisono_run(make_hosts(len(workers)), workers, program, kills=kills, flags=flags)
    text = all_well(outputs)
    # Of those that die at once, a launcher may have killed some already.
    at_least = 3 if kills == ELSEWHERE["at once"] else len(kills.split(";"))
    assert len(re.findall(r"rank \d \(pid \d+\) was killed", text)) >= at_least
    alone = [sys.executable, "-m", "tests.hosts.programs.fit"]
    done = subprocess.run(alone, capture_output=True, text=True, check=True)
    said = re.findall("digest .* of .*|rows .*", done.stdout)
    assert set(re.findall("digest .* of .*|rows .*", text)) == set(said)
    assert text.count("rows ") >= sum(workers)  # some were killed after that


def test_a_loop_that_evaluates_between_steps_goes_on_after_losses_there(
    make_hosts: MakeHosts,
) -> None:
    kills = "2 evaluate 2; 0+ evaluate 1 after; 1+ evaluate 2"
    outputs = unisono_run(make_hosts(2), [2, 1], [LOOPED], kills=kills)
    text = all_well(outputs)
    assert len(re.findall(r"rank \d \(pid \d+\) was killed", text)) == 3
    alone = [sys.executable, "-m", "tests.hosts.programs.looped"]
    done = subprocess.run(alone, capture_output=True, text=True, check=True)
    assert re.findall("digest .*", text) == re.findall("digest .*", done.stdout) * 3


def test_a_snapshot_of_a_loop_that_was_left_counts_on_all_hosts(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    hosts, program = make_hosts(2), [TRAIN, "cnn", "--leave", "3", "--steps", "8"]
    kept = ["--directory", str(tmp_path / "a run")]
    kill = "kill:rank=1,step=6,at=snapshot"  # of which its host has a part
    outputs = unisono_run(hosts, [1, 1], [*program, *kept], faults=[kill])
    assert "rank 1 has started again" in all_well(outputs)
    assert digests(outputs) == trained(hosts[:1], [2], *program[1:])


def test_a_worker_is_replaced_while_another_host_stands_still(make_hosts: MakeHosts) -> None:
    hosts, program = make_hosts(2), [TRAIN, "cnn", "--steps", "16", "--pause", "0.3"]
    outputs = unisono_run(hosts, [2, 2], program)
    workers = ("-f", "unisono.runtime.launch.forkserver")
    outputs[0].await_line("rank 0 step 4")
    hosts[0].run("pkill", "-STOP", *workers)
    hosts[1].run("pkill", "-KILL", "-n", *workers)
    outputs[1].await_line("rank 3 .* was killed")
    time.sleep(5)
    hosts[0].run("pkill", "-CONT", *workers)
    all_well(outputs)
    assert digests(outputs) == trained(hosts[:1], [2], *program[1:4], "--pause", "0")


def test_a_worker_that_hangs_is_replaced(make_hosts: MakeHosts) -> None:
    hosts, program = make_hosts(2), [TRAIN, "cnn", *LONGER]
    stops = ["stop:rank=1,step=3,at=update", "stop:rank=2,step=6,at=gradients"]
    flags = ["--stall-timeout", "2"]
    outputs = unisono_run(hosts, [2, 1], program, faults=stops, flags=flags)
    text = all_well(outputs)
    assert len(re.findall("has stopped it .* It is ended", text)) == len(stops)
    assert digests(outputs) == trained(hosts[:1], [2], *program[1:])


@pytest.mark.parametrize(("rank", "named"), [(2, "2"), (0, "[01]")])  # the latter with the store
def test_a_host_that_is_lost_with_a_replacement_is_named(
    make_hosts: MakeHosts, rank: int, named: str
) -> None:
    hosts = make_hosts(2)
    program = [FIT, "/dev/shm/tmp/run"]
    # It never comes so far: nobody is connected with it.
    kills = f"{rank} gradients of step 2 1; {rank}' stands still 1"
    outputs = unisono_run(hosts, [2, 1], program, kills=kills)
    there, here = outputs if rank == 0 else outputs[::-1]
    there.await_line(f"rank {rank} stands still")
    here.await_line("rank . has looked")
    hosts[1].cut()
    cut_s = time.monotonic()
    named_s = here.await_line(f"but rank {named} was lost")
    assert named_s - cut_s < NAMED_WITHIN_S
    for host in hosts:
        host.kill()


def test_a_host_that_is_lost_is_not_waited_for_as_a_worker_would_be(make_hosts: MakeHosts) -> None:
    hosts = make_hosts(2)
    outputs = unisono_run(hosts, [2, 2], [TRAIN, "cnn", "--steps", "99", "--pause", "0.3"])
    outputs[0].await_line("rank 0 step 4")
    hosts[1].kill()
    lost_s = time.monotonic()
    named_s = outputs[0].await_line("but rank [23] was lost")
    assert named_s - lost_s < NAMED_WITHIN_S
    hosts[0].kill()


# Which host's processes are all killed, for how long, and who comes in its place.
@pytest.mark.parametrize(
    ("number", "away_s", "other"), [(1, 0, 1), (1, 3, 1), (1, 3, 2), (0, 0, 0), (0, 20, 0)]
)
def test_a_host_that_is_lost_comes_back(
    make_hosts: MakeHosts, tmp_path: Path, number: int, away_s: float, other: int
) -> None:
    hosts, plain = make_hosts(3), [TRAIN, "cnn", "--steps", "40", "--pause", "0.2"]
    program = [*plain, "--directory", str(tmp_path / "a run"), "--every", "99"]
    outputs = unisono_run(hosts[:2], [2, 1], program, nnodes="2")
    outputs[0].await_line("rank 0 step 20")
    hosts[number].run("sh", "-c", "kill -KILL -1")
    time.sleep(away_s)
    outputs += unisono_run([hosts[other]], [2], program, nnodes="2", numbers=[number])
    del outputs[number]
    all_well(outputs)
    assert "resuming from checkpoint" in "".join(output.text for output in outputs)
    assert digests(outputs) == trained(hosts[:1], [2], *plain[1:4], "--pause", "0")


def test_hosts_go_on_without_one_and_with_it_again(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """Host 1 is away for good, as far as host 0 knows; its place in the rendezvous is not 0's."""
    hosts, plain = make_hosts(3), [TRAIN, "cnn", "--steps", "99", "--pause", "0.3"]
    program = [*plain, "--directory", str(tmp_path / "a run"), "--every", "99"]
    outputs = unisono_run(hosts, [1, 1, 2], program, nnodes="1:3")
    outputs[0].await_line("rank 0 step 9")
    for host in hosts[1:]:
        host.run("sh", "-c", "kill -KILL -1")
    outputs[0].await_line("rank 0 step 19")
    outputs += unisono_run(hosts[2:], [1], program, nnodes="1:3", numbers=[2])
    outputs[0].await_line("another host has joined")
    all_well((outputs[0], outputs[3]))
    assert outputs[3].text.count("rank 1 digest") == 1
    # What was done when the hosts were lost came from memory.
    assert outputs[0].text.count("rank 0 step 1\n") == 1
    assert digests(outputs) == trained(hosts[:1], [2], *plain[1:4], "--pause", "0")


STORE = """
import signal, socket, sys, torch
listening = socket.create_server((sys.argv[1], 29400))
at = {"wait_for_workers": False, "master_listen_fd": listening.detach()}
store = torch.distributed.TCPStore(sys.argv[1], 29400, is_master=True, **at)
print("is there", flush=True)
signal.pause()
"""


def test_a_store_elsewhere_outlives_host_0(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """Host 1 goes on alone, and with another host in the place of host 0."""
    *hosts, elsewhere = make_hosts(4)
    plain = [TRAIN, "cnn", "--steps", "70", "--pause", "0.3"]
    program = [*plain, "--directory", str(tmp_path / "a run"), "--every", "99"]
    store = Output(elsewhere.start(sys.executable, "-c", STORE, elsewhere.address))
    store.await_line("is there")
    how = {"nnodes": "1:2", "rendezvous": f"{elsewhere.address}:29400/first"}
    outputs = unisono_run(hosts[:2], [1, 1], program, **how)
    outputs[1].await_line("rank 1 step 9")
    hosts[0].run("sh", "-c", "kill -KILL -1")
    outputs[1].await_line("rank 0 step 15")
    outputs[0] = unisono_run(hosts[2:], [2], program, **how)[0]
    outputs[1].await_line("another host has joined")
    all_well(outputs)
    assert [output.text.count("digest") for output in outputs] == [2, 1]
    assert outputs[1].text.count("rank 1 step 1\n") == 1  # done once: it came from memory
    assert digests(outputs) == trained(hosts[:1], [2], *plain[1:4], "--pause", "0")
    (late,) = unisono_run(hosts[:1], [1], program, **how)
    assert "another host has ended the run: see its messages. Start another run" in late.end()
    elsewhere.kill()


def test_more_losses_than_are_allowed_end_the_run(make_hosts: MakeHosts) -> None:
    program = [TRAIN, "cnn", *LONGER]
    kill = ["kill:rank=3,step=4,at=gradients"]
    outputs = unisono_run(make_hosts(2), [2, 2], program, faults=kill, flags=["--restarts", "0"])
    assert re.search("but rank 3 has died", outputs[0].end())
    assert "on host 1, worker 1 of 2 was killed by SIGKILL" in outputs[1].end()
    assert [output.process.returncode for output in outputs] == [1, 1]


def test_more_losses_than_are_allowed_make_all_hosts_begin_again(make_hosts: MakeHosts) -> None:
    """As often as `--restarts` allows: the same worker is killed in each start."""
    program = [TRAIN, "cnn", *LONGER]
    kills = ["kill:rank=3,step=2,at=gradients", "kill:rank=3,at=join"]
    hosts, outputs = make_hosts(2), []
    for number, restarts in ((0, "3"), (1, "1")):
        given = {"faults": kills, "nnodes": "2", "numbers": [number]}
        flags = ["--restarts", restarts]
        outputs += unisono_run([hosts[number]], [2], program, flags=flags, **given)
    text = outputs[1].end()
    assert text.count("All hosts begin again once they are there") == 1
    assert text.count("`--restarts` allows no other start") == 1
    assert outputs[0].end().count("another host has ended the run: see its messages") == 1
    assert [output.process.returncode for output in outputs] == [1, 1]


def test_a_worker_lost_in_a_process_group_makes_all_hosts_begin_again(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    program = tmp_path / "grouped.py"
    program.write_text(GROUPED)
    outputs = unisono_run(make_hosts(2), [1, 2], [str(program)])
    text = all_well(outputs)
    assert text.count("All hosts begin again once they are there") == 2
    assert text.count("the sum is 3") == 3


GROUPED = """
import os, pathlib, signal, torch, torch.distributed as dist, unisono
with unisono.distributed.init() as here:
    lost = pathlib.Path(__file__).with_name("lost")
    if here.rank == 2 and not lost.exists():
        lost.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"the sum is {int(total)}\\n", end="", flush=True)
"""


def test_an_exception_on_one_host_ends_all_and_is_shown_once(make_hosts: MakeHosts) -> None:
    """Host 0 has the larger address, which torch would count as the second one."""
    outputs = unisono_run(make_hosts(2)[::-1], [1, 2], [TRAIN, "cnn", *LONGER, "--raises", "2"])
    assert outputs[1].end().count("\nRuntimeError: bad luck") == 1  # of the traceback
    assert "rank 0 step 1\n" in outputs[0].end()
    assert "rank 2 has failed" in outputs[0].text
    assert "unisono: another host has ended the run" in outputs[0].text
    assert outputs[0].text.count("step 1\n") == 1  # it has not begun again
    assert [output.process.returncode for output in outputs] == [1, 1]


def test_a_worker_that_exits_early_ends_the_run(make_hosts: MakeHosts) -> None:
    """It is rank 2 of all, and worker 1 of its host."""
    outputs = unisono_run(make_hosts(2), [1, 2], [TRAIN, "cnn", *LONGER, "--exits", "2"])
    assert "left with exit status 0 in the middle of its program" in outputs[1].end()
    assert outputs[0].end().count("rank 0 step 1\n") == 1  # it has not begun again
    assert [output.process.returncode for output in outputs] == [1, 1]


def test_the_status_of_a_program_is_that_of_all_hosts(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    script = tmp_path / "leaving.py"
    raising = 'raise RuntimeError("bad luck")'
    script.write_text(Path(TRAIN).read_text().replace(raising, "raise SystemExit(5)"))
    outputs = unisono_run(make_hosts(2), [1, 2], [str(script), "cnn", *LONGER, "--raises", "2"])
    for output in outputs:
        output.end()
    assert [output.process.returncode for output in outputs] == [5, 5]


def test_a_program_that_ends_early_on_one_host_ends_on_all(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    script = tmp_path / "leaving.py"
    leaving = f"if unisono.world().rank == 1 and run.position.step == 3:\n{16 * ' '}os._exit(0)"
    before = "if unisono.world().rank == given.raises"
    script.write_text(Path(TRAIN).read_text().replace(before, f"{leaving}\n{12 * ' '}{before}"))
    outputs = unisono_run(make_hosts(2), [1, 1], [str(script), "cnn", *LONGER])
    assert "PeerLostError: " in outputs[0].end()
    assert "another host has reached the end of its program, so this one" in outputs[0].text
    assert (outputs[0].process.returncode, outputs[1].end().count("Error")) == (1, 0)


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP, signal.SIGKILL], ids=str)
def test_what_ends_the_agent_of_a_host_ends_its_launcher(
    make_hosts: MakeHosts, tmp_path: Path, signum: signal.Signals
) -> None:
    """Ctrl-C ends the other host, too, as does a terminal that is closed.

    A killed agent may be started again, and is waited for: no step is finished without it.
    """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # tests under nohup hand on that it is ignored
    hosts, kept = make_hosts(2), ["--directory", str(tmp_path / "a run"), "--every", "500"]
    program = [TRAIN, "cnn", "--steps", "999", "--pause", "0.1", *kept]
    outputs = unisono_run(hosts, [1, 2], program)
    outputs[1].await_line("rank 2 step 3")
    hosts[1].run("pkill", f"-{signum}", "-f", "unisono run --nnodes")
    assert "; all 2 workers were ended." in outputs[1].end()
    if signum == signal.SIGKILL:
        outputs[0].await_line("10 s have passed at .*, and not all hosts have arrived")
        hosts[0].run("pkill", "-INT", "-f", "unisono run --nnodes")
    outputs[0].end()
    ended = [output.process.returncode for output in outputs]
    assert ended == ([130, -signum] if signum == signal.SIGKILL else [128 + signum] * 2)
    if signum != signal.SIGKILL:  # then the other host may have written its newest snapshot
        assert len(list(tmp_path.glob("a run/checkpoints/step-*"))) == 1
    for host in hosts:
        assert "unisono" not in host.run("ps", "-eo", "args")


@pytest.mark.parametrize("host", [0, 1])
def test_a_notice_to_one_agent_of_torchs_leaves_a_checkpoint(
    make_hosts: MakeHosts, tmp_path: Path, host: int
) -> None:
    """Each agent passes SIGTERM on to its own workers alone; those of the other host hear of it."""
    hosts, program = make_hosts(2), [TRAIN, "cnn", "--steps", "16", "--pause", "0.3"]
    kept = [*program, "--directory", str(tmp_path / "a run"), "--every", "99"]
    outputs = start(hosts, [2, 1], kept)
    outputs[host].await_line("rank . step 4")
    hosts[host].run("pkill", "-TERM", "-f", "bin/torchrun --nnodes")
    for output in outputs:
        output.end()
    newest = max(int(n) for out in outputs for n in re.findall(r"rank \d step (\d+)", out.text))
    assert newest < 16
    checkpoints = (tmp_path / "a run" / "checkpoints").iterdir()
    assert [int(path.name.partition("-")[2]) for path in checkpoints] == [newest]
    again = start(hosts, [1, 1], kept)
    all_well(again)
    assert digests(again) == trained(hosts[:1], [2], *program[1:4], "--pause", "0")


@pytest.mark.parametrize(("host", "signum"), [(1, "INT"), (0, "TERM"), (1, "TERM")])
def test_a_signal_on_any_host_leaves_a_checkpoint_of_the_step_under_way(
    make_hosts: MakeHosts, tmp_path: Path, host: int, signum: str
) -> None:
    hosts, program = make_hosts(2), [TRAIN, "cnn", "--steps", "16", "--pause", "0.3"]
    kept = [*program, "--directory", str(tmp_path / "a run"), "--every", "99"]
    outputs = unisono_run(hosts, [2, 1], kept)
    outputs[host].await_line("rank . step 4")
    hosts[host].run("pkill", f"-{signum}", "-f", "unisono run --nnodes")
    texts = [output.end() for output in outputs]
    assert "finishing the step, then writing a checkpoint" in texts[host]
    assert "another host has ended the run" in texts[1 - host]
    # Whichever host a cluster's tool asks, the run was told to end.
    ended = {output.process.returncode for output in outputs}
    assert ended == {{"INT": 130, "TERM": 143}[signum]}
    newest = max(map(int, re.findall(r"rank \d step (\d+)", "".join(texts))))
    assert newest < 16
    checkpoints = (tmp_path / "a run" / "checkpoints").iterdir()
    assert max(int(path.name.partition("-")[2]) for path in checkpoints) == newest
    again = unisono_run(hosts, [1, 1], kept)
    all_well(again)
    assert digests(again) == trained(hosts[:1], [2], *program[1:4], "--pause", "0")


def test_pods_of_the_manifest_train(make_hosts: MakeHosts, tmp_path: Path) -> None:
    """With the variables that the operator's runtime gives each pod."""
    hosts = make_hosts(2)
    *_, job = yaml.safe_load_all((CLUSTER / "trainjob.yaml").read_text())
    torchrun, restarts, script, directory = job["spec"]["trainer"]["command"]
    program = str(CLUSTER / Path(script).name)
    run = f"--directory={tmp_path}/{Path(directory.partition('=')[2]).name}"
    pod = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "host0"}
    pod |= {"PET_MASTER_PORT": "29500"}
    outputs = [
        Output(
            host.start(
                os.path.join(os.path.dirname(sys.executable), torchrun),
                *(restarts, program, run, "--epochs", "1"),
                environ={**pod, "PET_NODE_RANK": str(host.number)},
            )
        )
        for host in hosts
    ]
    all_well(outputs)
    assert "on 4 workers" in outputs[0].text
    assert digests(outputs) == trained_here("--epochs", "1")


def trained_here(*options: str) -> set[str]:
    program = [sys.executable, str(CLUSTER / "train.py"), *options]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    return set(re.findall(r"digest (\w+)", done.stdout))


INIT = """
import os, torch, unisono
import torch.distributed as dist
with unisono.distributed.init() as here:
    total = torch.ones(1)
    dist.all_reduce(total)
    print(f"rank {here.rank} of {int(total)}, {here.local_rank} here, on {here.backend}, "
          f"{os.environ['GLOO_SOCKET_IFNAME']}")
"""


def test_init_joins_the_workers_of_all_launchers(make_hosts: MakeHosts, tmp_path: Path) -> None:
    script = tmp_path / "init.py"
    script.write_text(INIT)
    outputs = unisono_run(make_hosts(2), [1, 2], [str(script)])
    said = all_well(outputs)
    told = [f"rank {rank} of 3, {here} here, on gloo, eth0" for rank, here in enumerate((0, 0, 1))]
    assert sorted(re.findall(r"rank \d of .*", said)) == told


@promise("open-ports.4", "open-ports.5")
@pytest.mark.parametrize(
    ("launch", "everywhere", "at_address"),
    [
        (start, {"29500"}, set()),  # torchrun's agent, at all addresses
        (unisono_run, set(), {"29400"}),  # where our agents meet
    ],
)
def test_what_listens_is_what_the_docs_name(
    make_hosts: MakeHosts, launch, everywhere, at_address
) -> None:
    hosts = make_hosts(2)
    outputs = launch(hosts, [2, 2], [TRAIN, "cnn", "--steps", "10", "--pause", "0.3"])
    outputs[0].await_line("rank 0 step 3")
    first, second = [[place.rsplit(":", 1) for place in host.listening()] for host in hosts]
    assert {address for address, _ in first} <= {"*", hosts[0].address}
    for address, expected in (("*", everywhere), (hosts[0].address, at_address)):
        assert {port for where, port in first if where == address} == expected
    assert not second  # workers listen no longer than until all have connected
    all_well(outputs)


SLOW = (TRAIN, "cnn", "--steps", "16", "--pause", "0.3")


# Two megabytes a step take two seconds, nearly all of each step: the cut is in their midst.
SENDING = (TRAIN, "gpt", "--width", "256", "--steps", "5")
MOMENTS = pytest.mark.parametrize(
    ("program", "rate", "line"), [(SLOW, "", 4), (SENDING, "10mbit", 2)], ids=["pausing", "sending"]
)


@MOMENTS
def test_a_link_that_is_cut_for_five_seconds_changes_nothing(
    make_hosts: MakeHosts, program: Sequence[str], rate: str, line: int
) -> None:
    hosts = make_hosts(2, Link(rate))
    outputs = start(hosts, [1, 1], program)
    outputs[0].await_line(f"rank 0 step {line}")
    time.sleep(0.5)
    hosts[1].cut()
    time.sleep(5)
    hosts[1].restore()
    all_well(outputs)
    assert digests(outputs) == trained(hosts[:1], [2], *program[1:])


@MOMENTS
def test_a_link_that_is_cut_for_good_is_named_on_both_sides(
    make_hosts: MakeHosts, program: Sequence[str], rate: str, line: int
) -> None:
    hosts = make_hosts(2, Link(rate))
    outputs = start(hosts, [2, 2], program)
    outputs[0].await_line(f"rank 0 step {line}")
    time.sleep(0.5)
    hosts[1].cut()
    cut_s = time.monotonic()
    for output, others in zip(outputs, ("[23]", "[01]"), strict=True):
        named_s = output.await_line(f"but rank {others} cannot be reached any more")
        assert named_s - cut_s < NAMED_WITHIN_S
        output.end()
        assert output.process.returncode == 1


@pytest.mark.parametrize("what", ["host", "worker"])
def test_the_run_resumes_when_torchrun_starts_it_again(
    make_hosts: MakeHosts, tmp_path: Path, what: str
) -> None:
    """A lost host is done without; where a worker was lost both hosts begin again."""
    hosts, directory = make_hosts(2), ("--directory", str(tmp_path / "a run"))
    outputs = start(hosts, [2, 2], [*SLOW, *directory], elastic="1:2")
    outputs[0].await_line("rank 0 step 6")
    if what == "host":
        hosts[1].cut()
        hosts[1].kill()
    else:
        hosts[1].run("pkill", "-9", "-n", "-f", "python.* -u .*train.py")
    if what == "host":  # after a worker's loss torchrun may end the others before they say so
        lost_s = time.monotonic()
        assert outputs[0].await_line("but rank [23] ") - lost_s < NAMED_WITHIN_S
    outputs[0].await_line("resuming from checkpoint step-")
    assert digests([outputs[0]]) == set()
    outputs[0].has_ended_well()
    assert outputs[0].text.count("step 1\n") == 2  # of the first start alone
    assert digests(outputs) == trained(hosts[:1], [2], *SLOW[1:4])


def test_a_rank_that_ended_before_it_came_is_not_waited_for(
    make_hosts: MakeHosts, tmp_path: Path
) -> None:
    program = [TRAIN, "cnn", "--fails-once", str(tmp_path / "has failed")]
    outputs = start(make_hosts(2), [2, 2], program, elastic="2:2")
    for output in outputs:
        output.has_ended_well()  # in less time than a rank is waited for
    assert sum(output.text.count("digest") for output in outputs) == 4


def test_a_run_resumes_from_the_newest_checkpoint_that_all_hosts_have(
    make_hosts: MakeHosts,
) -> None:
    hosts, own = make_hosts(2), "/dev/shm/tmp/run"  # each host has one
    program = [TRAIN, "cnn", "--directory", own, "--steps"]
    kill = ["kill:rank=1,step=3,at=update"]  # its replacement writes there, too
    all_well(unisono_run(hosts, [1, 1], [*program, "4"], faults=kill))
    hosts[1].run("rm", "-r", f"{own}/checkpoints/step-000000000004")
    outputs = start(hosts, [1, 1], [*program, "8"])
    all_well(outputs)
    assert "resuming from checkpoint step-000000000002 in" in outputs[0].text
    assert digests(outputs) == trained(hosts[:1], [2], "cnn", "--steps", "8")
    hosts[1].run("rm", "-r", own)
    for output in start(hosts, [1, 1], [*program, "9"]):
        assert "but host 0 has [4, 6, 8]; host 1 has none: copy" in output.end()
        assert output.process.returncode == 1


@pytest.mark.parametrize("wiped", [(1,), (0, 1)])
def test_a_run_resumes_from_a_url_where_disks_are_new(
    make_hosts: MakeHosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wiped: Sequence[int]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/shm/cache")  # each host has one
    hosts, program = make_hosts(2), [TRAIN, "cnn", "--directory", f"file://{tmp_path}/there"]
    all_well(unisono_run(hosts, [1, 1], [*program, "--steps", "4"], faults=[]))
    for host in wiped:
        hosts[host].run("rm", "-r", "/dev/shm/cache")
    outputs = start(hosts, [1, 1], [*program, "--steps", "8"])
    all_well(outputs)
    assert "resuming from checkpoint step-000000000004 in" in outputs[0].text
    assert digests(outputs) == trained(hosts[:1], [2], "cnn", "--steps", "8")
