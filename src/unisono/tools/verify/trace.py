"""What one rank did: records, which hooks write as lines of JSON, and which verdicts are made from.

A record looks the same in the process, in the file and in a check. :mod:`reading` adds only what
takes the records of all ranks to know, such as names of samples; those fields come last.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, final

Kind = TypeVar("Kind")
Place = Sequence[int]
"""A loader, an iteration over it, and a batch in the iteration, each counted from 0."""

Vector = Sequence[float]
"""A sketch, see :mod:`unisono.tools.verify.digests`."""

_KIND = "kind."  # a key that no parameter has as its name, since none ends with a dot


def line_of(record: Any) -> str:
    """Return a record as a line of JSON."""

    def plain(one: Any) -> dict[str, Any]:
        values = {of.name: getattr(one, of.name) for of in fields(one)}
        known = {of.name for of in fields(one) if values[of.name] == of.default}
        return {_KIND: type(one).__name__} | {k: v for k, v in values.items() if k not in known}

    return json.dumps(record, default=plain) + "\n"


def read_trace(folder: Path, rank: int) -> RankTrace:
    """Return the trace of one rank, without the half line of a process that was killed."""

    def made(values: dict[str, Any]) -> Any:
        return _RECORDS[values.pop(_KIND)](**values) if _KIND in values else values

    path = folder / f"rank{rank}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    whole = [line for line in lines if line.endswith("\n")]
    return RankTrace(rank, [json.loads(line, object_hook=made) for line in whole])


@dataclass(frozen=True, slots=True)
class LoaderFacts:
    """A DataLoader that was created."""

    number: int = 0  # in the order of creation
    dataset: int = 0  # number of the one behind all ``Subset``; -1: it has no length
    length: int | None = None  # of that dataset
    batch_size: int | None = None


@dataclass(frozen=True, slots=True)
class Contents:
    """Hashes of a dataset's first samples, as far as they could be read."""

    dataset: int
    length: int
    hashes: Sequence[str]


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration over one DataLoader; indices are those of the dataset behind all ``Subset``."""

    loader: int = 0  # its number
    epoch: int = 0  # number of earlier iterations
    dataset: int = 0
    indices: Sequence[int] | None = None  # of the whole epoch, in order; None: unknown
    kept: Sequence[Sequence[int]] = ()  # indices of the batches to which the iteration was cut
    order: str = ""  # a digest of its indices
    is_sorted: bool = False  # its indices ascend
    num_batches: int | None = None  # of the whole epoch; None: not known
    drop_last: bool = False  # of the loader, as the following
    replaces: bool = False
    has_set_epoch: bool = False
    sampler: str = "RandomSampler"
    role: str = "train"  # `"train"`, `"eval"`, or empty if nothing was computed
    plan: Sequence[str] | None = None  # the samples of the whole epoch, in order; None: unknown
    is_sliced: bool = False  # forward passes got only a part of each batch
    num_left: int = 0  # batches at its end that nobody trained with, where it is over

    @property
    def place(self) -> tuple[int, int]:
        """The loader, and the number of its iteration."""
        return self.loader, self.epoch


@dataclass(frozen=True, slots=True)
class Forward:
    """An outermost forward pass of a module with parameters."""

    number: int = -1  # -1: a loss was differentiated that no such pass led to
    at: Place | None = None  # the batch that its inputs are from
    rows: Sequence[str] = ()  # digests of each sample's inputs
    is_training: bool = True  # the module is
    may_train: bool = True  # it is, and autograd records; otherwise it evaluates, most likely
    samples: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Backward:
    """A backward pass."""

    forward: int  # number of the first forward pass that it follows
    draws: bool = False  # whether one of those drew random numbers
    no_sync: bool = False  # whether DDP's `no_sync` was entered since the pass before


@dataclass(frozen=True, slots=True)
class Gradient:
    """One parameter's gradient in one step."""

    final: Vector  # for the optimizer
    passes: Sequence[Vector] = ()  # of each backward pass on this rank
    # the argument of the first call that clips; None: there was none
    clipped: Vector | None = None
    size: int = 1  # number of elements

    @property
    def averaged(self) -> Vector:
        """The gradient before it was clipped."""
        return self.final if self.clipped is None else self.clipped


@dataclass(frozen=True, slots=True)
class ModelState:
    """Digests of a model when the first forward pass of a step begins, by name."""

    parameters: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, str] = field(default_factory=dict)
    rng: str = ""  # torch's generator
    has_batch_norm: bool = False  # with statistics over this rank's samples
    dtype: str = "float32"  # of computations


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One step of one optimizer."""

    number: int = 0  # counted from 0 for each optimizer
    optimizer: int = 0  # its number, in the order of first steps
    lr: Sequence[float] = ()  # of each group
    ticks: int = 0  # number of a schedule's steps since the step before
    # by parameter; empty in late steps
    gradients: Mapping[str, Gradient] = field(default_factory=dict)
    parameters: Mapping[str, Vector] = field(default_factory=dict)  # after the step
    state: ModelState | None = None  # None: no forward pass of a whole model was seen
    backwards: tuple[int, int] = (
        0,
        0,
    )  # passes since its step before: the first, and behind the last
    passes: Sequence[Forward] = ()  # what they differentiated
    draws: bool = False  # whether a forward pass drew random numbers
    no_sync: bool = False  # whether some passes ran under DDP's `no_sync`

    @property
    def place(self) -> tuple[int, int]:
        """The optimizer, and the number of its step."""
        return self.optimizer, self.number

    @property
    def samples(self) -> tuple[str, ...]:
        """The samples of all passes."""
        return tuple(sample for one in self.passes for sample in one.samples)

    @property
    def rows(self) -> tuple[str, ...]:
        """The inputs of the model in all passes."""
        return tuple(row for one in self.passes for row in one.rows)


@dataclass(frozen=True, slots=True)
class Collective:
    """A call that combines what ranks have."""

    name: str  # torch's
    values: Sequence[float] = ()  # after it, if they are few
    given: Sequence[float] = ()  # before it, if they are few


@dataclass(frozen=True, slots=True)
class EvaluationPass:
    """Forward passes without gradients, up to the next training pass."""

    samples: Sequence[str] = ()  # of whole epochs, if they come from a loader
    seen: Sequence[str] = ()  # the computed ones; epochs are cut
    rows: Sequence[str] = ()  # digests of each sample's inputs
    collectives: Sequence[Collective] = ()  # since it began
    printed: Sequence[str] = ()  # numbers with a decimal point, since it began
    is_finished: bool = True  # something came after it, or the program ended well


@dataclass(frozen=True, slots=True)
class Bits:
    """Digests of what was computed in a step, by name."""

    step: int  # counted from 0, of all optimizers
    kind: str
    place: int  # a shard, or a rank
    digests: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Note:
    """A fact: `what` is one of these words.

    ``"unisono"``: the program trains with Unisono. ``"loss"``: what Unisono says of the loss.
    ``"printed"``: numbers in printed text. ``"timed"``: times, for ``unisono plan``. ``"trouble"``:
    the traceback of what could not be recorded. ``"end"``: how the program ended: ``"ended"``,
    ``"stopped"`` by the verifier, or why it did not.
    """

    what: str
    value: Any = None


_RECORDS = {
    kind.__name__: kind
    for kind in (
        *(LoaderFacts, Contents, Iteration, Forward, Backward, Gradient, ModelState, OptimizerStep),
        *(Collective, Bits, Note),
    )
}


@final
@dataclass(frozen=True)
class RankTrace:
    """Everything known about one rank."""

    rank: int = 0
    records: Sequence[Any] = ()  # in order

    def of(self, kind: type[Kind]) -> list[Kind]:
        """Return the records of a kind."""
        return [record for record in self.records if isinstance(record, kind)]

    def notes(self, what: str) -> list[Any]:
        """Return what was noted, by one of the words of :class:`Note`."""
        return [note.value for note in self.of(Note) if note.what == what]

    @property
    def num_steps(self) -> int:
        """The number of steps, of any kind of program."""
        in_bits = sum(bits.kind == "parameters" for bits in self.of(Bits))
        return max(len(self.of(OptimizerStep)), in_bits)

    @property
    def rows(self) -> set[str]:
        """The inputs of the model in all steps."""
        return {row for step in self.of(OptimizerStep) for row in step.rows}

    @property
    def how(self) -> str:
        """How the program ended; empty if it was killed."""
        return next(iter(self.notes("end")), "")


@dataclass(frozen=True, slots=True)
class TwoRuns:
    """Two runs of one program."""

    ranks: Sequence[RankTrace]  # of the run on several
    one: RankTrace = RankTrace()  # of the run on one rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def steps(self) -> list[tuple[OptimizerStep, ...]]:
        """Return the steps that all ranks took, each as one value per rank."""
        by_place = [{step.place: step for step in rank.of(OptimizerStep)} for rank in self.ranks]
        return [
            tuple(steps[place] for steps in by_place)
            for place in by_place[0]
            if all(place in steps for steps in by_place)
        ]

    def step_of_one(self, step: OptimizerStep) -> OptimizerStep | None:
        """Return the same step of the run on one rank."""
        return next((one for one in self.one.of(OptimizerStep) if one.place == step.place), None)

    def epochs(self, role: str) -> Iterator[tuple[list[Iteration], Iteration | None]]:
        """Yield iterations over loaders of all ranks: one value per rank, and that of one rank."""
        *ranks, of_one = ({i.place: i for i in t.of(Iteration)} for t in (*self.ranks, self.one))
        for place, first in ranks[0].items():
            if first.role == role and all(place in rank for rank in ranks):
                yield [rank[place] for rank in ranks], of_one.get(place)

    def rows_of_an_epoch(self) -> list[set[str]] | None:
        """Return what each rank trained with until it was repeated; None if it was not on one."""
        found = [_rows_until_again(rank.of(OptimizerStep)) for rank in self.ranks]
        known = [rows for rows in found if rows is not None]
        return known if len(known) == len(found) else None

    @property
    def ended(self) -> bool:
        """Whether the program ended by itself on all ranks, so that all of it was observed."""
        return all(rank.how == "ended" for rank in self.ranks)


def _rows_until_again(steps: Sequence[OptimizerStep]) -> set[str] | None:
    """Return the model's inputs until only earlier ones follow; None if that never happens."""
    seen: set[str] = set()
    for step in steps:
        rows = set(step.rows)
        if rows and rows <= seen:
            return seen
        seen |= rows
    return None
