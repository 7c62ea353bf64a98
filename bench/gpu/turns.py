"""Whose turn is it? Starts the sides of one workload and has them compute blocks of steps in turn.

    A B C … then C B A …

Whatever else the machine does meets all of them, and each comes as often after as before another.
A side that fails, or does not answer in time, is left out from there on; the others go on.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from bench.gpu.clock import GO, OFF, ON, SAID, TUNED
from bench.gpu.side_program import BARE, SIDES
from bench.processes import REPOSITORY, environment, kill_all, unisono_run

PROGRAM = REPOSITORY / "bench" / "gpu" / "side_program.py"
START_TIMEOUT_S = 90.0  # of all sides together
BLOCK_TIMEOUT_S = 45.0
WARMUP_STEPS = 5  # of each block, after what others did to the device's memory and caches
MOST_STEPS, LEAST_STEPS = 5000, 3
NOT_INSTALLED, TOO_FEW_GPUS = "is not installed", "are needed at least"
OWN = "its own"  # the settings of sides that are not told any


class SideLostError(Exception):
    """A side has failed; says how."""


@dataclass(frozen=True)
class Entry:
    """A side with deterministic settings: one row of a table."""

    side: str
    setting: str


@dataclass(frozen=True)
class GpuBlock:
    """What one block of steps took."""

    workload: str
    side: str
    setting: str
    turn: int
    steps: int
    seconds: float
    peak_bytes: int | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def entries(sides: Sequence[str], *, has_convolutions: bool) -> list[Entry]:
    """List what takes turns: each side with deterministic settings off and on, or with its own."""
    found = []
    for name in sides:
        settings = (OWN,) if SIDES[name].keeps_settings else (OFF, ON)
        if name == BARE and has_convolutions:
            settings = (*settings, TUNED)
        found += [Entry(name, setting) for setting in settings]
    return found


def why_not(side: str, device: str) -> str | None:
    """Say why a side cannot be measured here."""
    if device == "cuda" and torch.cuda.device_count() < SIDES[side].gpus:
        return f"{SIDES[side].gpus} GPUs {TOO_FEW_GPUS}"
    package = SIDES[side].package
    if package and importlib.util.find_spec(package) is None:
        return f"{package} {NOT_INSTALLED}"
    return None


class SideProcess:
    """The process of one side, and the pipes to it. Final; ends with its ``with`` block."""

    def __init__(self, side: str, workload: str, device: str, folder: Path, *, tiny: bool) -> None:
        self.side = side
        folder.mkdir()
        for name in (GO, SAID):
            os.mkfifo(folder / name)
        # For both directions, so that opening waits for nobody; the other end sees it close.
        self._go = os.open(folder / GO, os.O_RDWR)
        self._said = os.open(folder / SAID, os.O_RDWR | os.O_NONBLOCK)
        self._heard, self._log = b"", folder / "log"
        workers = SIDES[side].workers
        starter = [sys.executable]
        if workers:
            # Between its turns a worker stands still for as long as the others take.
            starter = [*unisono_run(workers), "--stall-timeout", "86400"]
            starter += ["--workers-per-gpu", str(workers)] if device == "cuda" else []
        command = [
            *(*starter, str(PROGRAM), "--side", side, "--workload", workload),
            *("--device", device, "--folder", str(folder), *(["--tiny"] if tiny else [])),
        ]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env=environment(
                    1,
                    CUBLAS_WORKSPACE_CONFIG=":4096:8",
                    TMPDIR=str(folder),
                    **({} if device == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}),
                ),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until its model is made.

        Raises:
            SideLostError: it has failed, or is not ready in time.
        """
        self._hear(timeout_s)

    def compute(self, steps: int, setting: str, timeout_s: float) -> dict[str, Any]:
        """Have it compute a block; returns what it says about it. Raises as above."""
        order = {"warmup": WARMUP_STEPS, "steps": steps, "setting": setting}
        os.write(self._go, json.dumps(order).encode() + b"\n")
        return self._hear(timeout_s)

    def end(self) -> None:
        """Kill it and whatever it has started."""
        kill_all(self._process)
        for end in (self._go, self._said):
            with contextlib.suppress(OSError):
                os.close(end)

    def _hear(self, timeout_s: float) -> dict[str, Any]:
        deadline_s = time.monotonic() + timeout_s
        while b"\n" not in self._heard:
            has_ended = self._process.poll() is not None
            if select.select([self._said], [], [], 0 if has_ended else 0.2)[0]:
                self._heard += os.read(self._said, 1 << 16)
            elif has_ended:
                raise self._lost(f"ended with {self._process.returncode}")
            elif time.monotonic() > deadline_s:
                raise self._lost(f"did not answer within {timeout_s:.0f} s")
        line, _, self._heard = self._heard.partition(b"\n")
        said: dict[str, Any] = json.loads(line)
        if "failed" in said:
            raise SideLostError(said["failed"])
        return said

    def _lost(self, how: str) -> SideLostError:
        last_lines = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        return SideLostError(f"it {how}, last lines:\n{last_lines}")


class Turns:
    """The sides of one workload. Final; ends them with its ``with`` block.

    Args:
        workload, device, tiny: what is trained, on what, and whether it is small.
        sides: who takes turns.
        folder: a folder of its own.
        fail: is told which side has failed, and how.
    """

    def __init__(
        self,
        workload: str,
        device: str,
        sides: Sequence[str],
        folder: Path,
        fail: Callable[[str, str], None],
        *,
        tiny: bool,
    ) -> None:
        self._workload, self._device, self._tiny = workload, device, tiny
        self._names, self._folder, self._fail = sides, folder, fail
        self._sides: dict[str, SideProcess] = {}

    def __enter__(self) -> Turns:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for side in self._sides.values():
            side.end()

    def _start(self) -> None:
        for name in self._names:
            if reason := why_not(name, self._device):
                self._fail(name, reason)
                continue
            self._sides[name] = SideProcess(
                name, self._workload, self._device, self._folder / name, tiny=self._tiny
            )
        deadline_s = time.monotonic() + START_TIMEOUT_S
        for name, side in list(self._sides.items()):
            with self._losing(name):
                side.wait_until_ready(max(1.0, deadline_s - time.monotonic()))

    def measure(
        self, rows: Sequence[Entry], block_s: float, seconds: float, most_turns: int
    ) -> Iterator[GpuBlock]:
        """Go round, there and back, until the time is up; yields each block as it is done.

        The first block of each row is not counted: libraries choose and load what they compute by.
        """
        deadline_s = time.monotonic() + seconds
        steps = LEAST_STEPS
        for row in rows:
            first = self._block(row, -1, LEAST_STEPS)
            if first is not None and row.side == BARE:
                steps = round(block_s * first.steps / first.seconds)
        steps = min(max(steps, LEAST_STEPS), MOST_STEPS)
        turn_s = 0.0
        for turn in range(most_turns):
            start_s = time.monotonic()
            if turn and start_s + turn_s > deadline_s:
                return
            for row in rows if turn % 2 == 0 else reversed(rows):
                block = self._block(row, turn, steps)
                if block is not None:
                    yield block
            turn_s = time.monotonic() - start_s

    def _block(self, row: Entry, turn: int, steps: int) -> GpuBlock | None:
        if row.side not in self._sides:
            return None
        with self._losing(row.side):
            said = self._sides[row.side].compute(steps, row.setting, BLOCK_TIMEOUT_S)
            return GpuBlock(self._workload, row.side, row.setting, turn, **said)
        return None

    @contextlib.contextmanager
    def _losing(self, name: str) -> Iterator[None]:
        """Leave a side out that is lost within the block."""
        try:
            yield
        except SideLostError as error:
            self._sides.pop(name).end()
            self._fail(name, str(error))
