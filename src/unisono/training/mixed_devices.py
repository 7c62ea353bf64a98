"""Do the devices of a run compute the same bits? If not, shards are divided by their speed.

With devices of several models a sum of gradients is exact to rounding alone, so it is as good on
any of them, and a slow one need not hold the others up. Speeds are measured in a few steps of the
first loop, which are divided evenly, from what every worker has told of its passes::

    start of the first loop   fingerprints are compared: all equal, or mixed
    steps of warm-up, then    seconds for a shard, of every worker, as all can read them
    from then on              speeds are in `run.last`, so in snapshots: who joins has the same

Invariant: whatever is decided follows from what is the same on every worker at that step.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from statistics import median

from unisono.engine.step.engine import StepEngine
from unisono.engine.step.records import Phase
from unisono.errors import MismatchError
from unisono.runtime.notices import listed
from unisono.training.identity import fingerprint_of
from unisono.training.run_context import RunContext

SPEEDS = "speeds"
"""Where they are in ``run.last``: by rank, as text, in shards a second."""
_WARMUP_STEPS, _TIMED_STEPS = 4, 5
_SHORTEST_S = 1e-9
_UNKNOWN = "unknown"  # of a worker that was lost before it could tell

Kinds = dict[int, str]
"""By rank, what computes the same bits."""


def compare_devices(run: RunContext) -> bytes:
    """Find out whether the workers' devices compute the same bits. Collective; once in a run.

    Returns:
        For :func:`read_kinds`, the same on every worker; nothing if they do.

    Raises:
        MismatchError: processors of several hosts do not: each host has a copy of the parameters,
            which would be another after each update.
    """
    if run.kinds is not None:
        return _write_kinds(run.kinds)
    if run.team.size == 1 or (run.device.is_host and len(run.team.hosts) == 1):
        return b""
    run.kept.last.pop(SPEEDS, None)  # of the devices of a run before
    mine = json.dumps([run.device.facts, fingerprint_of(run.device)]).encode()
    heard = {r: json.loads(m) for r, m in run.team.gather(mine, "comparing devices").items()}
    kinds = kinds_of(heard)
    if not kinds:
        return b""
    facts = {rank: said for rank, (said, _) in heard.items()}
    if run.device.is_host:
        raise MismatchError(
            f"the processors of all hosts must compute the same bits, but do not "
            f"({_who(kinds, facts)}): use hosts of one kind, or set ATEN_CPU_CAPABILITY, "
            f"ONEDNN_MAX_CPU_ISA and MKL_CBWR alike on all of them, to what each has."
        )
    if run.team.position == 0:
        run.say(told(kinds, facts))
    every_rank = range(run.team.world.world_size)
    return _write_kinds({rank: kinds.get(rank, _UNKNOWN) for rank in every_rank})


def kinds_of(heard: Mapping[int, tuple[str, str]]) -> Kinds:
    """Find out which devices compute the same bits.

    Args:
        heard: by rank, the facts of its device and its fingerprint; that is empty where a device
            had no memory for it, and then the facts alone are compared.

    Returns:
        Nothing if all do.
    """
    are_known = all(fingerprint for _, fingerprint in heard.values())
    kinds = {rank: said[1] if are_known else said[0] for rank, said in heard.items()}
    return kinds if len(set(kinds.values())) > 1 else {}


def read_kinds(payload: bytes) -> Kinds:
    """Read what :func:`compare_devices` has led to; nothing if all devices compute the same."""
    return {int(rank): kind for rank, kind in json.loads(payload or b"{}").items()}


def told(kinds: Kinds, facts: Mapping[int, str]) -> str:
    """Say which workers' devices compute other bits than the others', and what that means."""
    return (
        f"the workers' devices round differently ({_who(kinds, facts)}): gradients are exact to "
        f"rounding, but the result depends on which worker computes which shard; shards are "
        f"divided by speed"
    )


def _who(kinds: Kinds, facts: Mapping[int, str]) -> str:
    names = {rank: facts[rank].partition(",")[0] for rank in kinds}
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, kind in kinds.items():
        groups.setdefault((names[rank], kind), []).append(rank)
    is_plain = len({name for name, _ in groups}) == len(groups)
    return " and ".join(
        f"{name if is_plain else f'{name} ({kind})'} on {listed('rank', ranks)}"
        for (name, kind), ranks in groups.items()
    )


def speeds_of(timed: Sequence[Mapping[int, float]], kinds: Kinds) -> dict[str, float]:
    """Find the speed of each rank's device, the same for devices of one kind.

    Args:
        timed: of some steps, the seconds that a shard took, by rank; the ranks may differ.
        kinds: by rank; one that was never timed has the speed of its kind, or a middling one.

    Returns:
        In shards a second, by rank as text.
    """
    of_kind: dict[str, list[float]] = {}
    for step in timed:
        for rank, seconds in step.items():
            of_kind.setdefault(kinds[rank], []).append(max(seconds, _SHORTEST_S))
    every = [seconds for kind in of_kind.values() for seconds in kind]
    return {str(rank): 1 / median(of_kind.get(kind, every)) for rank, kind in kinds.items()}


class SpeedBalance:
    """Divides the shards of one loop by the speed of devices, if they are mixed. Final.

    Args:
        run: whose loop it is.
        engine: computes its steps.
        full_batch: the samples of a step that counts.

    Attributes:
        is_needed: whether there is anything to do.
    """

    def __init__(self, run: RunContext, engine: StepEngine, full_batch: int) -> None:
        self._run, self._engine, self._full_batch = run, engine, full_batch
        self._kinds: Kinds = run.kinds or {}
        self._timed: list[dict[int, float]] = []
        self._since: tuple[int, int] | None = None  # generation and step of the last step
        self.is_needed = bool(self._kinds)

    def before_step(self) -> None:
        """Have the next step divided by the speeds that the run has by now."""
        speeds = self._run.kept.last.get(SPEEDS)
        read = None if speeds is None else {int(rank): speed for rank, speed in speeds.items()}
        self._engine.exchange.division.use_speeds(read)

    def after_step(self, num_samples: int) -> None:
        """Look at the step before the one that has just been done, which all have told of.

        Args:
            num_samples: of the step that has been done.
        """
        run = self._run
        if SPEEDS in run.kept.last:
            return
        now = (run.team.membership.generation, run.kept.position.step)
        if self._since != (now[0], now[1] - 1) or num_samples != self._full_batch:
            self._timed, self._since = [], now
            return
        self._since = now
        seconds = self._seconds_of(now[1] - 2)
        if seconds is not None:
            self._timed.append(seconds)
        if len(self._timed) == _WARMUP_STEPS + _TIMED_STEPS:
            run.kept.last[SPEEDS] = speeds_of(self._timed[_WARMUP_STEPS:], self._kinds)
            self._timed = []

    def _seconds_of(self, step: int) -> dict[int, float] | None:
        """Give what a shard took in a step, by rank; None where somebody has not told."""
        team, found = self._run.team, {}
        for rank, parts in self._engine.exchange.division.parts_of.items():
            times = team.times(rank, step)
            if times is None:
                return None
            num_shards = sum(part.hi - part.lo for part in parts)
            found[rank] = (times[Phase.FORWARD] + times[Phase.BACKWARD]) / num_shards
        return found


def _write_kinds(kinds: Kinds) -> bytes:
    return json.dumps(kinds).encode() if kinds else b""
