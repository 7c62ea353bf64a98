"""How do ranks wait for each other at a store? Each stores a value and waits for the others'.

    rank 0   set "what/0" ─ check "what/0 … what/n−1" ─ see who is missing ─ … ─ all are there
    rank 1   set "what/1" ─ …                                a rank that gives up stores why

A rank that can tell that the others will never all arrive stores its error, so that all ranks raise
the same one. No wait happens inside of the store, where signals would not be handled.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, final

from unisono import errors
from unisono.runtime.notices import listed, say
from unisono.runtime.timeouts import NOTICE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Called with the values so far, by rank, the missing ranks, and the seconds waited.
Look = Callable[[Mapping[int, Any], Sequence[int], float], None]

_REFUSED = "refused"
_PAUSE_S = 5e-3
_LOOK_EVERY_S = 0.1
# torch's store looks for its file for up to this long.
_STORE_ANSWERS_WITHIN_S = 5.0
_STAYS_AT_MOST_S = 10.0
_FIELDS = ("rank", "missing", "waited_s")
_KINDS = (errors.PeerLostError, errors.WaitTimeoutError, errors.MismatchError)
_ERRORS: Mapping[str, Callable[..., errors.UnisonoError]] = {
    kind.__name__: kind for kind in (*_KINDS, errors.RendezvousError)
}


@final
@dataclass
class Gathering:
    """Gathers values from all ranks, once or several times."""

    store: Store  # torch's, with keys that nothing else uses
    rank: int  # this rank
    world_size: int  # the number of ranks
    _: KW_ONLY
    where: str  # what the ranks wait in, for messages
    timeout_s: float  # the limit of each gather, in seconds
    # called regularly; raises if a rank will never arrive
    check: Look = lambda heard, missing, waited_s: None
    # what to do about a rank that did not arrive
    advice: str = "check whether it was started, and what it does there."
    speaks: bool = True  # whether to report a long wait
    is_held: bool = False  # whether rank 0 hosts the store, which ends with it

    def gather(self, what: str, mine: object) -> list[Any]:
        """Gather a JSON value of every rank, in rank order. Collective: every rank calls it.

        If rank 0 hosts the store, it returns once all ranks have read all values.
        """
        try:
            self.store.set_timeout(timedelta(seconds=_STORE_ANSWERS_WITHIN_S))
            self.store.set(f"{what}/{self.rank}", json.dumps(mine))
            heard = self._wait_for(what)
            if self.is_held:
                self._stay(f"{what} read")
        except RuntimeError as error:
            self.check({}, range(self.world_size), 0.0)
            raise errors.RendezvousError(
                f"the store must be there until all ranks have come to {self.where}, but does not "
                f"answer rank {self.rank} ({error}): check what happened to rank 0, or to the "
                f"process that hosts the store."
            ) from error
        finally:
            self.store.set_timeout(timedelta(seconds=self.timeout_s))
        return heard

    def _stay(self, what: str) -> None:
        """Keep rank 0 until the others have read everything, up to a limit."""
        self.store.set(f"{what}/{self.rank}", "")
        until_s = time.monotonic() + _STAYS_AT_MOST_S
        keys = [f"{what}/{rank}" for rank in range(self.world_size)]
        while self.rank == 0 and not self.store.check(keys) and time.monotonic() < until_s:
            time.sleep(_PAUSE_S)

    def _wait_for(self, what: str) -> list[Any]:
        keys = [f"{what}/{rank}" for rank in range(self.world_size)]
        begun_s = look_at_s = time.monotonic()
        heard: dict[int, Any] = {}
        while not self.store.check(keys):
            now_s = time.monotonic()
            if now_s >= look_at_s:
                self._check_missing(keys, heard, now_s - begun_s)
                look_at_s = time.monotonic() + _LOOK_EVERY_S
            time.sleep(_PAUSE_S)
        return [heard[rank] if rank in heard else self._value(key) for rank, key in enumerate(keys)]

    def _value(self, key: str) -> Any:
        return json.loads(self.store.get(key))

    def _check_missing(self, keys: Sequence[str], heard: dict[int, Any], waited_s: float) -> None:
        """Raise if a rank will never arrive, or is too late."""
        missing = self._missing(keys, heard)
        try:
            if self.store.check([_REFUSED]):
                raise _error_of(self._value(_REFUSED))
            self.check(heard, missing, waited_s)
            if waited_s >= self.timeout_s:
                raise too_late(self.world_size, self.where, self.timeout_s, missing, self.advice)
        except errors.UnisonoError as error:
            # Values that a rank stored before it ended count.
            if self._missing(keys, heard) != missing:
                return
            self._refuse(error)
            raise
        if self.speaks and waited_s >= NOTICE.in_s() and self.rank == min(heard):
            self.speaks = False
            ranks = listed("rank", missing, " and ")
            say(f"rank {self.rank} has waited {waited_s:.0f} s in {self.where} for {ranks}.")

    def _missing(self, keys: Sequence[str], heard: dict[int, Any]) -> list[int]:
        for rank, key in enumerate(keys):
            if rank not in heard and self.store.check([key]):
                heard[rank] = self._value(key)
        return [rank for rank in range(self.world_size) if rank not in heard]

    def _refuse(self, error: errors.UnisonoError) -> None:
        """Make all other ranks raise this error as well."""
        fields = {name: value for name, value in vars(error).items() if name in _FIELDS}
        with contextlib.suppress(RuntimeError):  # the store may be gone
            self.store.set(_REFUSED, json.dumps([type(error).__name__, str(error), fields]))


def too_late(
    world_size: int, where: str, timeout_s: float, missing: Sequence[int], advice: str
) -> errors.WaitTimeoutError:
    """Return the error for ranks that did not arrive in time."""
    have = "has" if len(missing) == 1 else "have"
    return errors.WaitTimeoutError(
        f"all {world_size} ranks must come to {where} within {timeout_s:g} s, but "
        f"{listed('rank', missing)} {have} not: {advice}",
        missing=tuple(missing),
        waited_s=timeout_s,
    )


def _error_of(refused: Sequence[Any]) -> errors.UnisonoError:
    name, text, fields = refused
    if "missing" in fields:
        fields["missing"] = tuple(fields["missing"])
    error: errors.UnisonoError = _ERRORS[name](text, **fields)
    return error
