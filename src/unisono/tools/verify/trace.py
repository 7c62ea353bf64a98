"""What one rank did, as values for verdicts. Samples have the same name on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Vector = Sequence[float]
"""A sketch, see :mod:`unisono.tools.verify.digests`."""


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
class Micro:
    """One forward and backward pass."""

    samples: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()  # digests of each sample's inputs


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
    lr: tuple[float, ...] = ()  # of each group
    ticks: int = 0  # number of a schedule's steps since the step before
    # by parameter; empty in late steps
    gradients: Mapping[str, Gradient] = field(default_factory=dict)
    parameters: Mapping[str, Vector] = field(default_factory=dict)  # after the step
    micros: tuple[Micro, ...] = ()  # the passes since the step before
    state: ModelState | None = None  # None: no forward pass of a whole model was seen
    draws: bool = False  # whether a forward pass drew random numbers
    no_sync: bool = False  # whether some passes ran under DDP's `no_sync`

    @property
    def place(self) -> tuple[int, int]:
        """The optimizer, and the number of its step."""
        return self.optimizer, self.number

    @property
    def samples(self) -> tuple[str, ...]:
        """The samples of all passes."""
        return tuple(sample for micro in self.micros for sample in micro.samples)

    @property
    def rows(self) -> tuple[str, ...]:
        """The inputs of the model in all passes."""
        return tuple(row for micro in self.micros for row in micro.rows)


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration over one DataLoader."""

    loader: int = 0  # its number, in the order of creation
    epoch: int = 0  # number of earlier iterations
    role: str = "train"  # `"train"`, `"eval"`, or empty if nothing was computed
    plan: tuple[str, ...] | None = None  # the samples of the whole epoch, in order; None: unknown
    order: str = ""  # a digest of its indices
    is_sorted: bool = False  # its indices ascend
    is_sliced: bool = False  # forward passes got only a part of each batch
    num_batches: int | None = None  # of the whole epoch; None: not known
    num_left: int = 0  # batches at its end that nobody trained with, where it is over
    drop_last: bool = False  # of the loader
    replaces: bool = False  # of the loader
    has_set_epoch: bool = False  # of the loader
    sampler: str = "RandomSampler"  # of the loader

    @property
    def place(self) -> tuple[int, int]:
        """The loader, and the number of its iteration."""
        return self.loader, self.epoch


@dataclass(frozen=True, slots=True)
class Collective:
    """A call that combines what ranks have."""

    name: str  # torch's
    values: Sequence[float] = ()  # after it, if they are few
    given: Sequence[float] = ()  # before it, if they are few


@dataclass(frozen=True, slots=True)
class EvaluationPass:
    """Forward passes without gradients, up to the next training pass."""

    samples: tuple[str, ...] = ()  # of whole epochs, if they come from a loader
    seen: tuple[str, ...] = ()  # the computed ones; epochs are cut
    rows: tuple[str, ...] = ()  # digests of each sample's inputs
    collectives: tuple[Collective, ...] = ()  # since it began
    printed: tuple[str, ...] = ()  # numbers with a decimal point, since it began
    is_finished: bool = True  # something came after it, or the program ended well


@dataclass(frozen=True, slots=True)
class RankTrace:
    """Everything known about one rank."""

    rank: int = 0
    steps: tuple[OptimizerStep, ...] = ()
    iterations: tuple[Iteration, ...] = ()
    evaluations: tuple[EvaluationPass, ...] = ()
    collectives: tuple[Collective, ...] = ()  # those of a few numbers
    num_idle: int = 0  # loaders that were made, and that nothing was read from
    # how its program ended: `"ended"`, `"stopped"` by the verifier, or why it did not
    how: str = "ended"


@dataclass(frozen=True, slots=True)
class TwoRuns:
    """Two runs of one program."""

    ranks: tuple[RankTrace, ...]  # of the run on several
    one: RankTrace = RankTrace()  # of the run on one rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.ranks)

    def steps(self) -> list[tuple[OptimizerStep, ...]]:
        """Return the steps that all ranks took, each as one value per rank."""
        by_place = [{step.place: step for step in rank.steps} for rank in self.ranks]
        return [
            tuple(steps[place] for steps in by_place)
            for place in by_place[0]
            if all(place in steps for steps in by_place)
        ]

    def step_of_one(self, step: OptimizerStep) -> OptimizerStep | None:
        """Return the same step of the run on one rank."""
        return next((one for one in self.one.steps if one.place == step.place), None)

    def epochs(self, role: str) -> Iterator[tuple[tuple[Iteration, ...], Iteration | None]]:
        """Yield iterations over loaders of all ranks: one value per rank, and that of one rank."""
        for first in self.ranks[0].iterations:
            *found, one = (
                next((i for i in rank.iterations if i.place == first.place), None)
                for rank in (*self.ranks, self.one)
            )
            known = tuple(iteration for iteration in found if iteration is not None)
            if first.role == role and len(known) == self.world_size:
                yield known, one

    def rows_of_an_epoch(self) -> list[set[str]] | None:
        """Return what each rank trained with until it was repeated; None if it was not on one."""
        found = [_rows_until_again(rank.steps) for rank in self.ranks]
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
