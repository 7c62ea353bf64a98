"""What keeps N workers from being N times as fast as one? Steps are timed on each number of them.

Ideally, a step of N workers takes 1/N of the time of a step of one. What it takes beyond that is
divided into causes that add up to it.

A single formula, whose inputs are printed, estimates several hosts like this one::

    step = passes · m(H W) / m(W) + update + (k + 1) (H − 1) / H · bytes / link

    H hosts of W workers each, S shards; m(n): the most shards that one of n workers has
    passes     of the slowest of W workers on this host                           measured
    update     optimizer, sums and synchronization of W workers on this host      measured
    k          the number of sub-trees that a host's shards form: 1 as in a ring
    link       bytes per second, without the 6 % for Ethernet, IP and TCP

Batch and shards, and so all bits, stay the same; therefore S workers are the most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from unisono.engine.step.records import Phase
from unisono.plan.shards import parts_of_hosts
from unisono.runtime.notices import duration, percent, plural, size
from unisono.tools.verify.recorder import Limits
from unisono.tools.verify.trace import RankTrace
from unisono.tools.verify.trials import Program, Trial, trials_of
from unisono.training.events.step_sample import Seconds, without_pauses

_TURNS = 2
_STEPS_AT_LEAST = 4


@dataclass(frozen=True, slots=True)
class TimedSteps:
    """The time of a step on some workers, in seconds: means over the steps of all turns."""

    num_workers: int  # N
    num_steps: int  # number of timed steps
    own_s: float  # loading and passes, averaged over workers
    slowest_s: float  # the same of the slowest worker of each step
    updating_s: float  # the optimizer
    exchange_s: float  # the rest: sums, waits, transfers, time between steps
    turns_s: tuple[float, ...]  # a step in each turn

    @property
    def step_s(self) -> float:
        """The time of a whole step."""
        return self.slowest_s + self.updating_s + self.exchange_s


@dataclass(frozen=True, slots=True)
class Measured:
    """The measurements of one program."""

    device: str  # the device of the workers
    num_shards: int  # S
    batch_size: int  # samples of a step, on any number of workers
    num_samples: int | None  # of an epoch; None: endless data
    gradient_bytes: int  # of all parameters
    steps: tuple[TimedSteps, ...]  # by number of workers, ascending
    state_bytes: int = 0  # of an element-wise optimizer's tensors


def measure_steps(
    program: Program,
    counts: Sequence[int],
    limits: Limits,
    environ: Mapping[str, str],
    say: Callable[[str], None],
) -> Measured:
    """Time a program on each number of workers, ascending, as long as there are enough shards."""
    found: dict[int, list[Seconds]] = {}
    facts: dict[str, Any] = {}
    limits = replace(limits, module="unisono.tools.plan.timed_program")
    with trials_of(program, limits, environ) as trials:
        for turn in range(_TURNS):
            for count in counts:
                if count <= facts.get("num_shards", count):
                    say(f"timing steps on {plural(count, 'worker')}{', again' * bool(turn)}")
                    facts, times = _timed(trials.run(count, f"on-{count}-{turn}"))
                    found.setdefault(count, []).append(times)
    return Measured(**facts, steps=tuple(timed_steps(found[count]) for count in sorted(found)))


def timed_steps(turns: Sequence[Seconds]) -> TimedSteps:
    """Divide steps into phases, given the times that workers reported in each turn.

    Times have the shape (steps, workers, entries): the seconds between a step and the one before,
    then those of each phase.
    """
    times = np.concatenate(turns)
    own_s = times[..., Phase.LOADING : Phase.WAITING].sum(axis=2)
    slowest_s = float(own_s.max(axis=1).mean())
    updating_s = float(times[..., Phase.UPDATING].mean())
    return TimedSteps(
        times.shape[1],
        len(times),
        float(own_s.mean()),
        slowest_s,
        updating_s,
        float(times.sum(axis=2).mean()) - slowest_s - updating_s,
        tuple(float(turn.sum(axis=2).mean()) for turn in turns),
    )


def _timed(trial: Trial) -> tuple[dict[str, Any], Seconds]:
    """Return facts about a program that was run, and the times of its full, warm steps."""
    told = [_told(trial, trace) for trace in trial.traces]
    warm_rows, facts, first = told[0]
    of_ranks = [{step: times for step, _, times in rows} for *_, rows in told]
    common = [
        [one[step] for one in of_ranks]
        for step, is_full, _ in first[warm_rows:]
        if is_full and all(step in one for one in of_ranks)
    ]
    if not warm_rows or len(common) < _STEPS_AT_LEAST:
        raise ValueError(
            "SCRIPT must train for at least 15 steps or so with whole batches, so that they can be "
            f"timed, but ended after {len(first)}: let it go over more samples, for more epochs, "
            "or use a smaller `batch_size`."
        )
    return facts, without_pauses(np.array(common))


def _told(trial: Trial, trace: RankTrace) -> tuple[int, dict[str, Any], list[list[Any]]]:
    """Return a worker's warm-up steps, facts, and steps: number, whether full, times."""
    if trial.interrupted_by is not None:
        raise SystemExit(128 + trial.interrupted_by)
    if trial.failure:
        raise ValueError(
            f"SCRIPT must run until some of its steps were timed, but did not: {trial.failure}"
        )
    for warm_rows, facts, rows in trace.notes("timed"):
        return warm_rows, facts, rows
    raise ValueError(
        "SCRIPT must train with `unisono.Trainer` or `unisono.Run`, as its steps are timed there, "
        "but took no step with either: call `fit` or `steps` in it, outside of `unisono.launch`."
    )


_NO_LIMIT = 0.05  # of a step's time: what costs less is no limit
_BUSY = 0.3  # of a step's time: turns differ by it on a busy machine
_WORTH_BYTES = 64 << 20  # of memory, from which on there is advice
CAUSES = {
    "shards": "they do not divide evenly, so some workers compute more",
    "contention": "workers slow each other: they share cores, memory bandwidth, caches, clock",
    "stragglers": "each step waits for its slowest worker",
    "exchange": "sums, synchronization, transfers, and the time between steps",
    "update": "the optimizer, as far as workers do not divide it",
}
"""What makes a step longer than ideal, in words."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The speed of some number of workers."""

    num_workers: int  # N
    step_s: float  # of a step, on average
    turns_differ: float  # as a fraction; large if other programs use the machine
    samples_per_second: float
    epoch_s: float | None  # None: endless data
    speed_up: float  # over one worker
    efficiency: float  # the speed-up over the number of workers
    causes_s: dict[str, float]  # what each cause adds to the ideal time of a step

    @property
    def limit(self) -> str:
        """What limits the speed, in a sentence."""
        if self.num_workers == 1:
            return "Limit: not known, as one worker alone was timed."
        if self.turns_differ > _BUSY:
            return (
                f"Limit: cannot be told, as the machine is busy: turns of the same "
                f"{self.num_workers} workers differ by {percent(self.turns_differ)}. End other "
                f"programs and run it again."
            )
        ideal_s = self.step_s - sum(self.causes_s.values())
        took = (
            f"a step on {self.num_workers} workers takes {duration(self.step_s)}, ideally "
            f"{duration(ideal_s)}"
        )
        # Some causes may be negative: their sum is what a step takes beyond the ideal.
        cost_s, cause = max((cost_s, cause) for cause, cost_s in self.causes_s.items())
        cost_s = min(cost_s, self.step_s - ideal_s)
        if cost_s <= _NO_LIMIT * self.step_s:
            return f"Limit: none found; {took}."
        return f"Limit: {cause} ({CAUSES[cause]}), {duration(cost_s)}; {took}."


def efficiencies(measured: Measured) -> list[Efficiency]:
    """Compare each number of workers with one."""
    return [_efficiency(measured, measured.steps[0], steps) for steps in measured.steps]


def _efficiency(measured: Measured, alone: TimedSteps, steps: TimedSteps) -> Efficiency:
    number, num_shards = steps.num_workers, measured.num_shards
    rate, speed_up = measured.batch_size / steps.step_s, alone.step_s / steps.step_s
    each, most = num_shards / number, most_shards(num_shards, number)
    shard_s, shard_s_alone = steps.own_s / each, alone.own_s / num_shards
    return Efficiency(
        number,
        steps.step_s,
        max(steps.turns_s) / min(steps.turns_s) - 1,
        rate,
        None if measured.num_samples is None else measured.num_samples / rate,
        speed_up,
        speed_up / number,
        {
            "shards": shard_s * (most - each),
            "contention": (shard_s - shard_s_alone) * each,
            "stragglers": steps.slowest_s - shard_s * most,
            "exchange": steps.exchange_s - alone.exchange_s / number,
            "update": steps.updating_s - alone.updating_s / number,
        },
    )


def pays_from(measured: Measured, steps: TimedSteps) -> int | None:
    """Return the batch size from which these workers are faster than one; None: any size is.

    Passes take time in proportion to the batch; the rest of a step takes the same time.
    """
    alone, number = measured.steps[0], measured.num_shards
    part = most_shards(number, steps.num_workers) / number
    saved_s = alone.own_s * (1 - part)
    more_s = (steps.step_s - alone.own_s * part) - (alone.step_s - alone.own_s)
    if more_s <= saved_s or saved_s <= 0:
        return None
    return math.ceil(measured.batch_size * more_s / saved_s)


def most_shards(num_shards: int, num_workers: int) -> int:
    """Return the number of shards of the worker that has the most."""
    return -(-num_shards // num_workers)


_PAYLOAD = 1448 / 1538  # of a frame of 1,500 bytes


@dataclass(frozen=True, slots=True)
class OnHosts:
    """A step on several hosts."""

    hosts: int  # H
    workers_per_host: int  # W
    shards_of_worker: int  # m(H W)
    parts_of_host: int  # k
    bandwidth: float  # of each host's link in each direction, in bytes a second
    passes_s: float  # this and the next two add up to a step
    links_s: float
    update_s: float
    step_s: float
    speed_up: float  # over one worker


def on_hosts(measured: Measured, num_hosts: int, bandwidth: float) -> OnHosts:
    """Estimate a step on several hosts, each with the most workers that were timed and fit."""
    shards = measured.num_shards
    fit = [one for one in measured.steps if one.num_workers * num_hosts <= shards]
    if not fit:
        raise ValueError(
            f"`--hosts` must be at most the program's `shards` ({shards}), but is {num_hosts}: "
            "pass larger `shards` in the program."
        )
    steps, each = fit[-1], fit[-1].num_workers
    most = most_shards(shards, each * num_hosts)
    parts = max(parts_of_hosts(shards, [each] * num_hosts))
    sent_bytes = measured.gradient_bytes * (parts + 1) * (num_hosts - 1) / num_hosts
    passes_s = steps.slowest_s * most / most_shards(shards, each)
    links_s = sent_bytes / (bandwidth * _PAYLOAD)
    update_s = steps.updating_s + steps.exchange_s
    step_s = passes_s + links_s + update_s
    speed_up = measured.steps[0].step_s / step_s
    return OnHosts(
        num_hosts, each, most, parts, bandwidth, passes_s, links_s, update_s, step_s, speed_up
    )


_HEADS = (
    "workers", "ms a step", "turns differ", "samples/s", "an epoch", "speed-up", "efficiency"
)  # fmt: skip
_LEFT_OUT = (
    "None of this was run. Gradients that are sent during the last backward pass make a step "
    "shorter; latency, the cores' time for sending, and the slowest of more workers make it longer."
)


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    """The answer of `unisono plan`."""

    program: str  # the script
    measured: Measured
    most_asked: int  # the most workers that were to be measured
    on_hosts: OnHosts | None  # None: several hosts were not requested

    @property
    def as_json(self) -> dict[str, Any]:
        """The answer as plain JSON; times in seconds, sizes in bytes."""
        rows = efficiencies(self.measured)
        return {
            "program": self.program,
            **asdict(self.measured),
            "rows": [asdict(row) for row in rows],
            "limit": rows[-1].limit,
            "notes": list(self._notes()),
            "on_hosts": None if self.on_hosts is None else asdict(self.on_hosts),
        }

    def print(self, console: Console) -> None:
        """Print the answer."""
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        for head in _HEADS:
            table.add_column(head, justify="right", no_wrap=True)
        rows = efficiencies(self.measured)
        for row in rows:
            table.add_row(
                f"{row.num_workers:,}",
                _ms(row.step_s),
                percent(row.turns_differ),
                f"{row.samples_per_second:,.4g}",
                duration(row.epoch_s),
                f"{row.speed_up:.2f}",
                percent(row.efficiency),
            )
        console.print(table, "")
        for line in (rows[-1].limit, *self._notes(), *self._formula()):
            console.print(line, highlight=False, markup=False)

    def _notes(self) -> Iterator[str]:
        measured, most = self.measured, self.measured.steps[-1].num_workers
        yield (
            f"Timed on {measured.device}: a batch of {measured.batch_size:,} in "
            f"{measured.num_shards:,} shards; without validation, checkpoints and starting up."
        )
        state, sums = measured.state_bytes, measured.gradient_bytes
        kept = state // most
        saved = state - kept + sums
        if state and most > 1 and saved >= _WORTH_BYTES:
            yield (
                f"Where each worker has a replica, as on GPUs, UNISONO_EXCHANGE=zero saves each of "
                f"{most} workers {size(saved)}: it keeps {size(kept)} of "
                f"{size(state)} of optimizer state, and no sums of other workers' parameters, "
                f"{size(sums)}, unless `clip_norm` or `on_gradients` reads them."
            )
        steps = measured.steps[-1]
        is_quiet = max(steps.turns_s) <= (1 + _BUSY) * min(steps.turns_s)
        if is_quiet and (batch_size := pays_from(measured, steps)) is not None:
            yield (
                f"{most} workers are slower than one, as passes are short compared with what "
                f"sharing a step costs: they gain from a batch of about {batch_size:,}, or with a "
                f"larger model."
            )
        if self.most_asked > most:
            yield f"It ends at {most}: more workers need more `shards`, which give other results."

    def _formula(self) -> Iterator[str]:
        found = self.on_hosts
        if found is None:
            return
        hosts, each, rate = found.hosts, found.workers_per_host, found.bandwidth * 8 / 1e9
        gradients = size(self.measured.gradient_bytes)
        sent = f"({found.parts_of_host} + 1) · {hosts - 1}/{hosts} · {gradients} of gradients"
        yield f"\n{hosts} hosts like this one, {each} workers on each, by a formula, in ms a step:"
        for name, taken_s, inputs in (
            ("passes", found.passes_s, f"as timed, for {found.shards_of_worker} shards a worker"),
            ("links", found.links_s, f"{sent} at 94 % of {rate:,.4g} Gbit/s"),
            ("update", found.update_s, f"with sums and synchronization, as timed on {each}"),
            ("together", found.step_s, f"{found.speed_up:.2f} times as fast as one worker"),
        ):
            yield f"  {name:9}{_ms(taken_s):>9}  {inputs}"
        yield _LEFT_OUT


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.4g}"
