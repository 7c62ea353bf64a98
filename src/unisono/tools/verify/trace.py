"""What one rank did, as values: verdicts are made of these. Samples have one name on all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

Vector = Sequence[float]
"""A sketch, see :mod:`unisono.tools.verify.digests`."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """One parameter's gradient in one step."""

    final: Vector  # what the optimizer got
    passes: Sequence[Vector] = ()  # what each backward pass gave on this rank
    # what was given to the first call that clips; None: there was none
    clipped: Vector | None = None
    size: int = 1  # how many elements

    @property
    def averaged(self) -> Vector:
        """What was there before it was clipped."""
        return self.final if self.clipped is None else self.clipped


@dataclass(frozen=True, slots=True)
class Micro:
    """One forward and backward pass."""

    samples: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()  # digests of what the model was given of each


@dataclass(frozen=True, slots=True)
class ModelState:
    """Digests of a model when the first forward pass of a step begins, by name."""

    parameters: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, str] = field(default_factory=dict)
    rng: str = ""  # torch's generator
    has_batch_norm: bool = False  # it takes statistics over this rank's samples
    dtype: str = "float32"  # in which is computed


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One step of one optimizer."""

    number: int = 0  # counted from 0 for each optimizer
    optimizer: int = 0  # which, in the order of their first steps
    lr: tuple[float, ...] = ()  # of each group
    ticks: int = 0  # how often a schedule stepped since the step before
    # by parameter; empty in late steps
    gradients: Mapping[str, Gradient] = field(default_factory=dict)
    parameters: Mapping[str, Vector] = field(default_factory=dict)  # after the step
    micros: tuple[Micro, ...] = ()  # the passes since the step before
    state: ModelState | None = None  # of the model; None: no forward pass of a whole model was seen
    draws: bool = False  # whether a forward pass drew random numbers
    no_sync: bool = False  # whether torch DDP was told not to average some of the passes

    @property
    def place(self) -> tuple[int, int]:
        """Which optimizer, and which step of that."""
        return self.optimizer, self.number

    @property
    def samples(self) -> tuple[str, ...]:
        """Return the samples of all passes."""
        return tuple(sample for micro in self.micros for sample in micro.samples)

    @property
    def rows(self) -> tuple[str, ...]:
        """Return what the model was given in all passes."""
        return tuple(row for micro in self.micros for row in micro.rows)


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration over one DataLoader."""

    loader: int = 0  # which, in the order they were made
    epoch: int = 0  # how many iterations came before
    role: str = "train"  # `"train"`, `"eval"` or empty, where nothing was computed
    plan: tuple[str, ...] | None = None  # the samples of the whole epoch in order; None: not known
    order: str = ""  # a digest of its indices
    is_sorted: bool = False  # its indices ascend
    is_sliced: bool = False  # forward passes got only a part of each batch
    num_batches: int | None = None  # of the whole epoch; None: not known
    num_left: int = 0  # batches at its end that nobody trained with, where it is over
    drop_last: bool = False  # of the loader
    replaces: bool = False  # likewise
    has_set_epoch: bool = False  # likewise
    sampler: str = "RandomSampler"  # likewise

    @property
    def place(self) -> tuple[int, int]:
        """Which loader, and which iteration."""
        return self.loader, self.epoch


@dataclass(frozen=True, slots=True)
class Collective:
    """A call that puts together what ranks have."""

    name: str  # torch's
    values: Sequence[float] = ()  # after it, if they are few
    given: Sequence[float] = ()  # before it, if they are few


@dataclass(frozen=True, slots=True)
class EvaluationPass:
    """Forward passes without gradients, up to the next training."""

    samples: tuple[str, ...] = ()  # of whole epochs, where a loader gave them
    seen: tuple[str, ...] = ()  # those that were computed; epochs are cut
    rows: tuple[str, ...] = ()  # digests of what the model was given of each
    collectives: tuple[Collective, ...] = ()  # since it began
    printed: tuple[str, ...] = ()  # numbers with a decimal point, likewise
    is_finished: bool = True  # something came after it, or the program ended well


@dataclass(frozen=True, slots=True)
class RankTrace:
    """All that is known of one rank."""

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
        """Count the ranks."""
        return len(self.ranks)

    def steps(self) -> list[tuple[OptimizerStep, ...]]:
        """Return the steps that all ranks took, each as one value a rank."""
        by_place = [{step.place: step for step in rank.steps} for rank in self.ranks]
        return [
            tuple(steps[place] for steps in by_place)
            for place in by_place[0]
            if all(place in steps for steps in by_place)
        ]

    def step_of_one(self, step: OptimizerStep) -> OptimizerStep | None:
        """Find the same step of the run on one rank."""
        return next((one for one in self.one.steps if one.place == step.place), None)

    def epochs(self, role: str) -> Iterator[tuple[tuple[Iteration, ...], Iteration | None]]:
        """Yield iterations over loaders of all ranks: one value a rank, and one rank's own."""
        for first in self.ranks[0].iterations:
            *found, one = (
                next((i for i in rank.iterations if i.place == first.place), None)
                for rank in (*self.ranks, self.one)
            )
            known = tuple(iteration for iteration in found if iteration is not None)
            if first.role == role and len(known) == self.world_size:
                yield known, one

    def rows_of_an_epoch(self) -> list[set[str]] | None:
        """Return what each rank trained with until it came again; None if on one nothing has."""
        found = [_rows_until_again(rank.steps) for rank in self.ranks]
        known = [rows for rows in found if rows is not None]
        return known if len(known) == len(found) else None

    @property
    def ended(self) -> bool:
        """Whether the program ended by itself on all ranks, so that all of it was seen."""
        return all(rank.how == "ended" for rank in self.ranks)


def _rows_until_again(steps: Sequence[OptimizerStep]) -> set[str] | None:
    """Return what the model was given until it is given only what it had; None: it never is."""
    seen: set[str] = set()
    for step in steps:
        rows = set(step.rows)
        if rows and rows <= seen:
            return seen
        seen |= rows
    return None
