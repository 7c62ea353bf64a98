"""How long does a killed worker hold the others up? From SIGKILL to the next step that is done.

Every worker writes down when it has done a step (``recovery_programs``); this process kills one
after the other, each time once the replacement of the one before has done ``SETTLE_STEPS``, and
reads the figures from what was written::

    step   N             N+1        N+2
    ───────┼──────✗───────┼──────────┼────►      ✗ the kill; N is the last step anybody had
                  ├───────────────────┤            written down by then
                    the figure: `to_committed_s`

Step N+1 may have been done but for its line when the kill came. Nobody has begun N+2 then, as every
step needs all workers, so N+2 cannot be done before the loss was noticed: it is what is waited for,
by whoever writes it first. Two undisturbed steps are part of that time, at most. The time to the
first line of a step after N is told as well (``to_next_s``); it may be next to nothing.

Steps that come again count only once they go past what was done. On ``torchrun`` a checkpoint is
written after every step, so that no step is lost there either.
"""

from __future__ import annotations

import contextlib
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench.processes import SideFailedError, environment, unisono_run

PROGRAM = Path(__file__).with_name("recovery_programs.py")
WORKLOAD = "cnn64"
UNISONO, TORCHRUN = "unisono run", "torchrun"
KILLS = {UNISONO: 10, TORCHRUN: 3}
QUICK_KILLS = 2
SETTLE_STEPS, QUICK_SETTLE_STEPS = 30, 5
SNAPSHOTS, NO_SNAPSHOTS = "--restarts as usual", "--restarts 0"
TORCHRUN_ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    # By default workers that were restarted share a store with those before them (torch 2.13), find
    # addresses of the dead in it, and wait for them without end.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}
WARMUP_STEPS = 10
COST_STEPS, QUICK_COST_STEPS = 200, 30
TIMEOUT_S = 600.0  # of one run, all kills included
END_S = 15.0
POLL_S = 0.2  # times are in the file, so looking seldom costs no precision


class Line(NamedTuple):
    """One step that one worker has done."""

    step: int
    at_s: float
    pid: int
    rank: int


@dataclass(frozen=True)
class Kill:
    """One kill and what came of it.

    Attributes:
        way: how the workers were started.
        rank: of the victim.
        to_next_s: from the kill to the first line of a step that nobody had written down.
        to_committed_s: from the kill to the first line of the step after that.
        step_s: the median time of the undisturbed steps just before the kill.
    """

    way: str
    rank: int
    to_next_s: float
    to_committed_s: float
    step_s: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Cost:
    """The steps of one undisturbed run, with snapshots or without.

    The mean tells more than the median here: a snapshot comes at intervals, not at every step.
    """

    way: str
    repeat: int
    median_s: float
    mean_s: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def measure_recovery(
    way: str,
    num_workers: int,
    data: Path,
    *,
    is_quick: bool,
    flags: tuple[str, ...] = (),
    device: str | None = None,
) -> Iterator[Kill]:
    """Kill workers of one run, ranks in turn; yield each kill once its figures are there.

    Args:
        way: :data:`UNISONO` or :data:`TORCHRUN`.
        num_workers: of the run.
        data: folder with mnist/.
        is_quick: few kills, to see that it works.
        flags: further ones of the launcher.
        device: of :data:`UNISONO`: what `Run` is told; None: nothing.

    Raises:
        SideFailedError: with the last lines that the run printed.
    """
    num_kills = QUICK_KILLS if is_quick else KILLS[way]
    settle_steps = QUICK_SETTLE_STEPS if is_quick else SETTLE_STEPS
    flags = ("--restarts", "100000", *flags)
    with _Job(way, num_workers, data, flags, device=device) as job:
        killed_s = 0.0
        for number in range(num_kills):
            rank = number % num_workers
            lines = job.wait_until_settled(killed_s, settle_steps)
            victim = next(line.pid for line in reversed(lines) if line.rank == rank)
            killed_s = job.kill(victim)
            yield _read_kill(way, rank, victim, killed_s, job.wait_for_step(killed_s), settle_steps)


def measure_cost(num_workers: int, data: Path, repeats: int, *, is_quick: bool) -> Iterator[Cost]:
    """Yield what undisturbed steps take, with snapshots and without, in turn.

    Raises:
        SideFailedError: with the last lines that the run printed.
    """
    num_steps = WARMUP_STEPS + (QUICK_COST_STEPS if is_quick else COST_STEPS)
    for repeat in range(repeats):
        for way, flags in ((SNAPSHOTS, ()), (NO_SNAPSHOTS, ("--restarts", "0"))):
            with _Job(UNISONO, num_workers, data, flags, num_steps) as job:
                lines = [line for line in job.wait_until_done() if line.rank == 0]
            if len(lines) != num_steps:
                raise SideFailedError(f"{way}: {len(lines)} of {num_steps} steps were seen")
            steps_s = _differences(lines[WARMUP_STEPS - 1 :])
            yield Cost(way, repeat, statistics.median(steps_s), statistics.mean(steps_s))


def _read_kill(
    way: str, rank: int, victim: int, killed_s: float, lines: list[Line], settle_steps: int
) -> Kill:
    before = _last_step(lines, killed_s)
    after = [line for line in lines if line.at_s > killed_s]
    quiet = [line for line in lines if line.pid == victim and line.at_s <= killed_s]
    return Kill(
        way,
        rank,
        min(line.at_s for line in after if line.step > before) - killed_s,
        min(line.at_s for line in after if line.step > before + 1) - killed_s,
        statistics.median(_differences(quiet[-settle_steps:])),
    )


def _last_step(lines: list[Line], until_s: float) -> int:
    return max(line.step for line in lines if line.at_s <= until_s)


def _differences(lines: list[Line]) -> list[float]:
    return [after.at_s - before.at_s for before, after in pairwise(lines)]


class _Job:
    """A run of the program, and hands to disturb it with; nothing of it is left behind. Final."""

    def __init__(
        self,
        way: str,
        num_workers: int,
        data: Path,
        flags: tuple[str, ...] = (),
        num_steps: int | None = None,
        device: str | None = None,
    ) -> None:
        self._way, self._num_workers = way, num_workers
        self._deadline_s = time.monotonic() + TIMEOUT_S
        self._stack = contextlib.ExitStack()
        name = tempfile.TemporaryDirectory(prefix="unisono-recovery-")
        folder = Path(self._stack.enter_context(name))
        self._times, self._log = folder / "times", folder / "log"
        self._times.touch()
        launchers = {
            UNISONO: [*unisono_run(num_workers), *flags],
            TORCHRUN: [
                *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
                *("--local-addr", "127.0.0.1", "--max-restarts", "1000"),
                *("--nproc-per-node", str(num_workers)),
            ],
        }
        program = [
            *(str(PROGRAM), "unisono" if way == UNISONO else "ddp", "--workload", WORKLOAD),
            *("--workers", str(num_workers), "--data", str(data), "--times", str(self._times)),
            *("--checkpoint", str(folder / "checkpoint.pt")),
            *("--until", str(self._deadline_s)),
            *(() if num_steps is None else ("--steps", str(num_steps))),
            *(() if device is None else ("--device", device)),
        ]
        # torchrun leaves folders in the one for temporary files, unless that goes away with them.
        env = environment(1, **TORCHRUN_ENVIRONMENT, TMPDIR=str(folder))
        if device == "cpu":
            env["CUDA_VISIBLE_DEVICES"] = ""
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [*launchers[way], *program],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._end()
        finally:
            self._stack.close()

    def wait_until_settled(self, killed_s: float, num_steps: int) -> list[Line]:
        """Wait until every rank has done so many steps by one process since the last kill."""
        while True:
            lines = self._read()
            newest = {line.rank: line.pid for line in lines}
            done = [
                sum(line.pid == pid and line.at_s > killed_s for line in lines)
                for pid in newest.values()
            ]
            if len(done) == self._num_workers and min(done) >= num_steps:
                return lines
            self._wait_a_little()

    def wait_for_step(self, killed_s: float) -> list[Line]:
        """Wait for the step that is counted after a kill."""
        while True:
            lines = self._read()
            if max(line.step for line in lines) >= _last_step(lines, killed_s) + 2:
                return lines
            self._wait_a_little()

    def wait_until_done(self) -> list[Line]:
        """Wait for the end of a run that nobody disturbs."""
        while self._process.poll() is None:
            self._wait_a_little()
        if self._process.returncode != 0:
            raise self._failure(f"ended with {self._process.returncode}")
        return self._read()

    def kill(self, pid: int) -> float:
        """Kill one worker; returns the time on the clock just before."""
        victim = psutil.Process(pid)
        if self._process.pid not in [parent.pid for parent in victim.parents()]:
            raise self._failure(f"process {pid} is not one of its workers")
        at_s = time.monotonic()
        victim.kill()
        return at_s

    def _read(self) -> list[Line]:
        # The last line is left out while it is being written.
        whole, _, _ = self._times.read_text().rpartition("\n")
        return [
            Line(int(step), float(at_s), int(pid), int(rank))
            for step, at_s, pid, rank in map(str.split, whole.splitlines())
        ]

    def _wait_a_little(self) -> None:
        if time.monotonic() > self._deadline_s:
            raise self._failure(f"was not done after {TIMEOUT_S:.0f} s")
        with contextlib.suppress(subprocess.TimeoutExpired):
            if self._process.wait(POLL_S) != 0:
                raise self._failure(f"ended with {self._process.returncode}")

    def _failure(self, what: str) -> SideFailedError:
        last_lines = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        return SideFailedError(f"{self._way} {what}, last lines:\n{last_lines}")

    def _end(self) -> None:
        """Kill what still runs; the launcher is stopped first, so that it starts nobody new."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGSTOP)
            processes = psutil.Process(self._process.pid).children(recursive=True)
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            self._process.kill()
            self._process.wait()
            psutil.wait_procs(processes, timeout=END_S)
