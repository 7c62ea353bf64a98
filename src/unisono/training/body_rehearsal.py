"""Does the body of a loop over `step.shards` depend on earlier shards?

The body belongs to the program and cannot be called, but it can be given a batch again: after a
worker's last shard its first one is yielded again, with the same random numbers and buffers, and
must give the same loss although the body has continued since. What the body keeps of the repetition
(sums, counts, lists, its variables) is restored.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

from unisono.engine.step.loss import read_loss
from unisono.programs.account import Account
from unisono.programs.holders import drawn_by
from unisono.programs.rehearsal import Dependence, carried
from unisono.programs.unlike import Unlike, as_there, depends_on_unlike
from unisono.runtime.workers.other_rank import RankReads

Numbers = dict[str, str]

_MADE_IN_LOOP = (
    "shards draw one after the other from `{}`, a generator that was made while the loop runs, but "
    "each worker computes only some of them: make it before the loop, as it is seeded for each "
    "shard then, or draw from the default generators"
)


@final
class BodyRehearsal:
    """Repeats the first shard of one loop over `step.shards`.

    Args:
        look: returns an account of what the program keeps now.
        copy: copies a batch; returns None if it cannot.
        refuse: returns an error for a finding.
        note_stored: receives the account from before the shards.
        elsewhere: returns a block in which this is another worker.
        unlike: returns those plain values that differ between workers.
    """

    def __init__(
        self,
        look: Callable[[], Account],
        copy: Callable[[Any], Any],
        refuse: Callable[[Dependence], Exception],
        note_stored: Callable[[Account], None],
        elsewhere: Callable[[], AbstractContextManager[None]],
        unlike: Callable[[Account], Sequence[Unlike]],
    ) -> None:
        self._look, self._copy = look, copy
        self._elsewhere = elsewhere
        self._refuse, self._note_stored = refuse, note_stored
        self._before = look()
        self._unlike = unlike(self._before)
        self._reads = RankReads()
        self._first: tuple[int, int, Any] | None = None
        self._numbers: Numbers = {}
        self._drawn: dict[str, tuple[Any, Any]] = {}  # by generators without a seed per shard

    def watch(self, generators: Mapping[str, Any]) -> None:
        """Raise later if shards draw from these random number generators, given by path."""
        self._drawn = {path: (one, drawn_by(one)) for path, one in generators.items()}

    def note(self, shard: int, num_samples: int, batch: Any) -> None:
        """Store the first batch that is yielded."""
        if self._first is None:
            self._first = shard, num_samples, self._copy(batch)

    def note_loss(self, shard: int, returned: Any) -> None:
        """Store the loss of the first batch."""
        if self._first is not None and not self._numbers and shard == self._first[0]:
            self._numbers = _numbers(returned, self._first[1])

    def once_more(
        self, start: Callable[[int, Callable[[Any], None]], None], *, is_within: bool
    ) -> Iterator[Any]:
        """Yield the first batch again, if the result may depend on the worker or on its shards.

        `start` prepares its passes and receives the loss; `is_within`: the program passes batches
        through an iterator, which may count them.
        """
        self._reads.end()
        for path, (generator, drawn) in self._drawn.items():
            if drawn_by(generator) != drawn:
                raise RuntimeError(_MADE_IN_LOOP.format(path))
        is_changed, unlike = is_within or bool(self._before.changes()), self._unlike
        if is_changed:
            self._note_stored(self._before)
        if self._first is None or self._first[2] is None:
            return
        if not (is_changed or unlike or self._reads.are_any):
            return
        left = self._look()
        if is_changed and (differs := (yield from self._again(start, left, nullcontext()))):
            raise self._refuse(carried(self._before, left, differs))
        asks = self._reads.are_any
        if asks and (differs := (yield from self._again(start, left, self._elsewhere()))):
            raise self._refuse(Dependence("", differs, is_of_rank=True))
        if unlike and (differs := (yield from self._again(start, left, as_there(unlike)))):
            for each in unlike:
                if (yield from self._again(start, left, as_there([each]))):
                    raise depends_on_unlike(each, differs)
            raise depends_on_unlike(unlike[0], differs)

    def _again(
        self,
        start: Callable[[int, Callable[[Any], None]], None],
        left: Account,
        block: AbstractContextManager[None],
    ) -> Generator[Any, None, str | None]:
        """Yield the first batch within a block; return the name of a number that differs then.

        If none does, what the body has changed meanwhile is undone.
        """
        assert self._first is not None
        again = Numbers()
        shard, num_samples, batch = self._first
        start(shard, lambda returned: again.update(_numbers(returned, num_samples)))
        with block:
            yield self._copy(batch)
        differs = next((n for n, one in self._numbers.items() if again.get(n, one) != one), None)
        if differs is None:
            left.put_back()
        return differs


def _numbers(returned: Any, num_samples: int) -> Numbers:
    """Return a loss's numbers as text, so that NaN equals NaN."""
    numbers = read_loss(returned, num_samples).numbers()
    return {f"`{name}`": repr(each) for name, each in numbers.items()}
