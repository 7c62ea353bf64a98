"""Tests and bench on a GPU in one sitting of ten minutes: ``python -m bench.gpu.sitting``.

First ``tests/gpu``, one pytest a file and several at once; then ``bench.gpu``, alone. Both end in
time. Whatever is found is in one JSON file from that moment on, and what fails or hangs costs
nothing but itself. The output ends with a summary.

Nothing has to be installed but what Unisono needs, pytest, pytest-timeout and hypothesis; a
checkout that is not installed is found beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from bench.gpu import find_package
from bench.gpu.__main__ import add_arguments, failed, plan_of, why_not
from bench.gpu.figures import FAILURES, KILLS, NOTES, TARGETS, TESTS, Figures
from bench.gpu.measuring import measure_all
from bench.gpu.turns import NOT_INSTALLED, TOO_FEW_GPUS
from bench.processes import REPOSITORY, environment, kill_all
from bench.table import print_verdicts
from bench.targets import Verdict

FINDINGS_VARIABLE = "UNISONO_GPU_FINDINGS"
DEVICE_VARIABLE = "UNISONO_TEST_DEVICE"
MARGIN_S = 8.0  # for the summary
LINES_OF_A_FAILURE = 12
LONG = ("kills", "compiled", "sharing", "checkpoints")


class TimeIsUp(Exception):
    """The sitting has to end now."""


def main() -> int:
    """Test, measure, sum up; the exit status is 1 if a test or a side has failed."""
    made = argparse.ArgumentParser(prog="python -m bench.gpu.sitting", description=__doc__)
    add_arguments(made)
    made.add_argument("--limit-s", type=float, default=570.0, help="for all of it (570)")
    made.add_argument("--tests-s", type=float, default=240.0, help="for the tests (240)")
    made.add_argument("--jobs", type=int, default=4, help="test files at once (4)")
    made.add_argument("--no-bench", action="store_true", help="test only")
    made.add_argument("-k", dest="expression", default="", help="tests to run, as pytest's -k")
    args = made.parse_args()
    find_package()
    if reason := why_not(args.device):
        print(f"bench.gpu.sitting: {reason}", file=sys.stderr)
        return 2
    console = Console(width=None if os.isatty(1) else 130)
    start_s = time.monotonic()
    figures = Figures(args.json, args.commit, args.device)
    try:
        with ends_after(args.limit_s - MARGIN_S):
            test(args, figures, console)
            if not args.no_bench:
                left_s = args.limit_s - MARGIN_S - (time.monotonic() - start_s)
                args.seconds = max(0.0, left_s - MARGIN_S)
                measure_all(plan_of(args), figures, console)
    except TimeIsUp:
        figures.add(NOTES, {"note": f"ended by the limit of {args.limit_s:.0f} s"})
    except Exception as error:
        figures.add(FAILURES, {"workload": "sitting", "side": "", "how": repr(error)})
    figures.add(NOTES, {"seconds": time.monotonic() - start_s})
    return sum_up(figures, console)


@contextmanager
def ends_after(seconds: float) -> Iterator[None]:
    """Raise :class:`TimeIsUp` where a block takes longer."""

    def raise_it(number: int, frame: FrameType | None) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, raise_it)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test(args: argparse.Namespace, figures: Figures, console: Console) -> None:
    """Run the files of ``tests/gpu``, some at once, and write down what each test comes to."""
    waiting = sorted((REPOSITORY / "tests" / "gpu").glob("test_*.py"), key=_is_short)
    deadline_s = time.monotonic() + args.tests_s
    running: dict[Path, subprocess.Popen[bytes]] = {}
    with tempfile.TemporaryDirectory(prefix="unisono-gpu-tests-") as name:
        folder = Path(name)
        findings = Findings(folder / "findings", figures)
        try:
            while waiting or running:
                while waiting and len(running) < args.jobs:
                    path = waiting.pop(0)
                    running[path] = start_pytest(path, args, folder)
                time.sleep(0.2)
                findings.read()
                is_late = time.monotonic() > deadline_s
                for path, process in list(running.items()):
                    if is_late:
                        kill_all(process)
                    if process.poll() is not None:
                        del running[path]
                        log = folder / f"{path.stem}.log"
                        end_of_file(path, process.returncode, log, figures, console)
                if is_late:
                    for path in waiting:
                        figures.add(FAILURES, _failure(path, "was not begun in time"))
                    waiting = []
        finally:
            for process in running.values():
                kill_all(process)
            findings.read()


def _is_short(path: Path) -> bool:
    """Sort what takes long before the rest."""
    return not path.stem.endswith(LONG)


def start_pytest(path: Path, args: argparse.Namespace, folder: Path) -> subprocess.Popen[bytes]:
    """Start the tests of one file."""
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-m", "gpu", str(path), "-W", "default"),
        *("-p", "no:cacheprovider", "--tb", "short", "--color", "no"),
        *(["-k", args.expression] if args.expression else []),
    ]
    more = {FINDINGS_VARIABLE: str(folder / "findings"), "PYTHONUNBUFFERED": "1"}
    if args.device != "cuda":
        more[DEVICE_VARIABLE] = args.device
    else:
        more["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    with open(folder / f"{path.stem}.log", "wb") as output:
        return subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=environment(1, **more),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


class Findings:
    """What tests write down while they run, one JSON object a line. Final."""

    def __init__(self, path: Path, figures: Figures) -> None:
        self._path, self._figures = path, figures
        self._num_read, self._rest = 0, b""

    def read(self) -> None:
        """Take over what is new."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._num_read)
            new = file.read()
        self._num_read += len(new)
        *lines, self._rest = (self._rest + new).split(b"\n")
        for line in lines:
            self._figures.add(TESTS, json.loads(line))


def end_of_file(path: Path, status: int, log: Path, figures: Figures, console: Console) -> None:
    """Print how a file's tests ended; 5: there were none to run."""
    last_lines = log.read_text(errors="replace").splitlines()
    said = last_lines[-1] if last_lines else ""
    console.print(f"{path.name}: {said}", markup=False, highlight=False)
    if status not in (0, 1, 5):
        how = f"ended with {status}: " + "\n".join(last_lines[-LINES_OF_A_FAILURE:])
        figures.add(FAILURES, _failure(path, how))


def _failure(path: Path, how: str) -> dict[str, str]:
    return {"workload": "tests", "side": path.name, "how": how}


def sum_up(figures: Figures, console: Console) -> int:
    """Print the end of the sitting."""
    content = figures.content
    console.rule("summary")
    outcomes = Counter(test["outcome"] for test in content[TESTS])
    for found in content[TESTS]:
        if found["outcome"] == "failed":
            message = found["message"].strip().splitlines()[-LINES_OF_A_FAILURE:]
            console.print(f"FAILED {found['name']}", style="red", markup=False)
            console.print("\n".join(f"    {line[:160]}" for line in message), markup=False)
    for line in failures_told(content[FAILURES]):
        console.print(line, markup=False, highlight=False)
    print_verdicts(console, [Verdict(**verdict) for verdict in content[TARGETS]])
    if content[KILLS]:
        times_s = [kill["to_committed_s"] for kill in content[KILLS]]
        console.print(
            f"{len(times_s)} kills: next committed step after {statistics.median(times_s):.3f} s, "
            f"{min(times_s):.3f} … {max(times_s):.3f}",
            highlight=False,
        )
    told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    console.print(f"tests: {told or 'none'}", highlight=False)
    console.print(f"All figures are in {figures.path}", highlight=False, soft_wrap=True)
    return 1 if outcomes["failed"] or failed(figures) else 0


def failures_told(failures: list[dict[str, str]]) -> list[str]:
    """Tell what has failed, and in a line each what is not installed or needs more GPUs."""
    missing = {one["side"] for one in failures if one["how"].endswith(NOT_INSTALLED)}
    larger = {one["side"] for one in failures if one["how"].endswith(TOO_FEW_GPUS)}
    told = []
    if missing:
        told.append(f"left out, as their packages are missing: {', '.join(sorted(missing))}")
    if larger:
        told.append(f"left out, as they need more GPUs: {', '.join(sorted(larger))}")
    for one in failures:
        if one["side"] not in missing | larger:
            lines = one["how"].splitlines()[-LINES_OF_A_FAILURE:]
            told.append(f"FAILED {one['workload']} {one['side']}: " + "\n    ".join(lines))
    return told


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda signum, frame: sys.exit(128 + signum))
    raise SystemExit(main())
