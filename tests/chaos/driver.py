"""Kill random workers of a run at random instants; the result must be that of the undisturbed run.

    python -m tests.chaos.driver --kills 200 --steps 2000 --workers 3 --seed 7
    python -m tests.chaos.driver --kills 200 --exchange sim     on the test accelerator
    python -m tests.chaos.driver --kills 40 --steps 400 --hosts 2 1    on virtual hosts, as root

The seed decides when each kill comes (after which step, how long after that, or in which phase) and
whom it meets. Kills are spread over the whole run, from its first step to its last, so that they
also meet replacements while they start.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from tests.chaos.exchanges import EXCHANGES, device_of, variables_of
from tests.chaos.hosts_job import HostsJob
from tests.chaos.jobs import Job, gone_within
from tests.chaos.training import STEPS_PER_EPOCH, Options

LOOPS = ("trainer", "own")
OPTIMIZERS = ("adam", "clipped", "adafactor")
# Where a kill waits for its victim; most instants of a run lie elsewhere.
AIMS = (
    *("fetching", "forward", "waiting", "adding up", "updating", "waiting again", "between steps"),
    *("snapshot", "joining", "evaluate", "starting", "loading"),
)
AIMED_AT_MOST_S = 0.05
PACE_MS = 0.5
SLOW_EVERY = 40
REPEATS = 2  # of the samples in an epoch
POLL_S = 0.0002
AT_ONCE = 0.2  # so many kills come together with the one before


@dataclass(frozen=True)
class Kill:
    """A kill: `delay_s` after a step, in phase `aim` if one comes soon, of `whom`, a part of 1."""

    step: int
    delay_s: float
    aim: str | None
    whom: float


@dataclass(frozen=True)
class Outcome:
    """What came of it: equal results on every worker, and how many were killed, in which phases."""

    is_equal: bool
    num_kills: int
    phases: Counter[str]
    seconds: float
    trouble: str


def plan(seed: int, num_kills: int, num_steps: int) -> list[Kill]:
    """Plan all kills; nothing else is random."""
    generator = random.Random(seed)
    steps = sorted(generator.randrange(num_steps) for _ in range(num_kills))
    kills = [
        Kill(
            step,
            generator.uniform(0, 0.01),
            generator.choice(AIMS) if generator.random() < 0.6 else None,
            generator.random(),
        )
        for step in steps
    ]
    for at in range(1, num_kills):
        if generator.random() < AT_ONCE:
            kills[at] = replace(kills[at], step=kills[at - 1].step, delay_s=0.0, aim=None)
    return kills


def options_of(seed: int, num_steps: int, phases: Path) -> Options:
    """Choose what is trained, for at least so many steps."""
    return Options(
        loop=LOOPS[seed % 2],
        optimizer=OPTIMIZERS[seed // 2 % 3],
        epochs=-(-num_steps // (STEPS_PER_EPOCH * REPEATS - 1)),
        repeats=REPEATS,
        pace_ms=PACE_MS,
        slow_every=SLOW_EVERY,
        phases=str(phases),
    )


def undisturbed(folder: Path, options: Options) -> dict[str, object]:
    """Train on one worker, in a plain process, and without being slow."""
    plain = replace(options, phases="", pace_ms=0.0, slow_every=0, every=0, device="cpu")
    job = Job(folder, plain)
    assert job.wait(600) == 0, job.err
    (result,) = job.results
    return result


def disturb(
    folder: Path,
    options: Options,
    kills: list[Kill],
    num_workers: int,
    timeout_s: float,
    exchange: str,
    hosts: Sequence[int] = (),
) -> tuple[Job | HostsJob, Counter[str]]:
    """Run and kill; returns the job, which has ended, and the phases in which workers were lost."""
    job: Job | HostsJob
    if hosts:
        job = HostsJob(folder, options, hosts)
    else:
        job = Job(
            folder,
            replace(options, device=device_of(exchange)),
            workers=num_workers,
            flags=("--restarts", 100000),
            variables=variables_of(exchange),
        )
    deadline_s = time.monotonic() + timeout_s
    lost = kill_all(job, kills, deadline_s)
    job.wait(max(1.0, deadline_s - time.monotonic()))
    return job, lost


def kill_all(job: Job | HostsJob, kills: list[Kill], deadline_s: float) -> Counter[str]:
    """Kill workers as planned, until the job has ended; returns the phases in which that was."""
    watch = Watch(job, deadline_s)
    lost: Counter[str] = Counter()
    for kill in kills:
        watch.wait_for_step(kill.step)
        time.sleep(kill.delay_s)
        victim = watch.choose(kill)
        if victim is None:
            break
        with suppress(psutil.NoSuchProcess):  # its launcher was quicker
            victim.kill()
        psutil.wait_procs([victim], timeout=5)
        lost[job.phase(victim)[0]] += 1
    return lost


class Watch:
    """Sees how far a job is and who is there. Final."""

    def __init__(self, job: Job | HostsJob, deadline_s: float) -> None:
        self._job, self._deadline_s = job, deadline_s
        self._furthest = -1

    def wait_for_step(self, step: int) -> None:
        """Wait until any worker has come to `step`, or the job has ended."""
        while self._goes_on() and self._furthest < step:
            # The first kill must wait for a step: before, nobody has made a Run.
            steps = [self._job.phase(one)[1] for one in self._job.workers()]
            self._furthest = max(self._furthest, *steps, -1)
            time.sleep(POLL_S)

    def choose(self, kill: Kill) -> psutil.Process | None:
        """Choose a victim; waits until there is one. None: the job has ended."""
        give_up_s = time.monotonic() + AIMED_AT_MOST_S
        while self._goes_on():
            alive = self._job.workers()
            if kill.aim is not None and time.monotonic() < give_up_s:
                alive = [one for one in alive if self._job.phase(one)[0] == kill.aim]
            if alive:
                return alive[int(kill.whom * len(alive))]
            time.sleep(POLL_S)
        return None

    def _goes_on(self) -> bool:
        if time.monotonic() > self._deadline_s:
            said = self._job.err[-3000:]
            self._job.end()
            raise AssertionError(f"it hangs in step {self._furthest}:\n{said}")
        return self._job.process.poll() is None


def chaos(
    seed: int,
    num_kills: int,
    num_steps: int,
    num_workers: int,
    timeout_s: float,
    exchange: str = "shared",
    hosts: Sequence[int] = (),
) -> Outcome:
    """Do it once."""
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="unisono-chaos-") as name:
        folder = Path(name)
        phases = folder / "phases"
        phases.mkdir()
        options = options_of(seed, num_steps, phases)
        expected = undisturbed(folder, options)
        kills = plan(seed, num_kills, num_steps)
        written = replace(options, events=str(folder / "events.jsonl"))
        job, lost = disturb(folder, written, kills, num_workers, timeout_s, exchange, hosts)
        results, status = job.results, job.process.returncode
        is_equal = bool(results) and all(result == expected for result in results)
        trouble = ""
        if status != 0 or not is_equal:
            trouble = f"exit status {status}\nexpected {expected}\nfound {results}\n{job.err}"
        if options.loop == "trainer" and not trouble:
            trouble = trouble_in(folder / "events.jsonl", expected)
    seconds = time.monotonic() - start_s
    return Outcome(not trouble, lost.total(), lost, seconds, trouble)


def trouble_in(events: Path, expected: Mapping[str, object], *, has_end: bool = True) -> str:
    """Say what is wrong with an event file: each step must stand there once, and then its end."""
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    found = [line["step"] for line in lines if line["event"] == "step"]
    is_ended = lines[-1]["event"] == "end" or not has_end
    if found == list(range(int(str(expected["step"])))) and is_ended:
        return ""
    missing = sorted(set(range(int(str(expected["step"])))) - set(found))
    again = sorted(step for step, count in Counter(found).items() if count > 1)
    last = lines[-1]["event"]
    return f"event file: missing {missing}, more than once {again}, its last line is `{last}`\n"


def kill_launchers(seed: int, num_kills: int, num_workers: int) -> Outcome:
    """Kill the launcher at random instants, and start it again each time; the last one goes on."""
    generator = random.Random(seed)
    start_s = time.monotonic()
    found: Counter[str] = Counter()
    trouble = ""
    with tempfile.TemporaryDirectory(prefix="unisono-chaos-") as name:
        folder = Path(name)
        options = Options(
            loop=LOOPS[seed % 2],
            optimizer=OPTIMIZERS[seed // 2 % 3],
            epochs=3 * (num_kills + 1),
            directory=str(folder / "run"),
            every=1,
            pace_ms=PACE_MS,
        )
        expected = undisturbed(folder, replace(options, directory=str(folder / "whole")))
        for start in range(num_kills):
            phases = folder / f"phases-{start}"
            phases.mkdir()
            started = replace(options, phases=str(phases))
            job = Job(folder, started, workers=num_workers, popen=subprocess.Popen)
            Watch(job, time.monotonic() + 60).wait_for_step(0)
            time.sleep(generator.uniform(0, 0.6))
            processes = job.processes()
            job.process.kill()
            job.process.wait()
            left = gone_within(processes, 10)
            trouble += f"left behind: {left}\n" if left else ""
            passed_over = "is skipped" in job.out + job.err
            found["passed over" if passed_over else "whole"] += 1
        job = Job(folder, replace(options, pace_ms=0.0, every=0), workers=num_workers)
        status, results = job.wait(120), job.results
        is_equal = bool(results) and all(result == expected for result in results)
        if status != 0 or not is_equal:
            trouble += f"exit status {status}\nexpected {expected}\nfound {results}\n{job.err}"
        if options.loop == "trainer" and not trouble:
            trouble = trouble_in(folder / "run" / "events.jsonl", expected)
    return Outcome(not trouble, num_kills, found, time.monotonic() - start_s, trouble)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=None, help="0 or more; drawn by default")
    parser.add_argument(
        "--launcher-kills", type=int, default=0, help="then kill the launcher so often"
    )
    parser.add_argument("--exchange", choices=EXCHANGES, default="shared", help="of the workers")
    parser.add_argument(
        "--hosts", type=int, nargs="+", default=(), help="workers of each virtual host; takes root"
    )
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    exchange = args.exchange
    print(f"seed {seed}: {args.kills} kills over {args.steps} steps, {exchange}", flush=True)
    options = {"exchange": exchange, "hosts": args.hosts}
    outcome = chaos(seed, args.kills, args.steps, args.workers, args.timeout, **options)
    for phase, count in outcome.phases.most_common():
        print(f"{count:6}  {phase}")
    is_well = told(seed, "workers", outcome) and outcome.num_kills == args.kills
    if is_well and args.launcher_kills:
        is_well = told(seed, "launchers", kill_launchers(seed, args.launcher_kills, args.workers))
    return 0 if is_well else 1


def told(seed: int, whom: str, outcome: Outcome) -> bool:
    """Print what came of it; returns whether it is well."""
    word = "equal" if outcome.is_equal else "NOT EQUAL"
    seconds = outcome.seconds
    print(f"seed {seed}: {outcome.num_kills} {whom} killed in {seconds:.0f} s, results {word}")
    print(outcome.trouble[-20_000:], end="", flush=True)
    return outcome.is_equal


if __name__ == "__main__":
    raise SystemExit(main())
