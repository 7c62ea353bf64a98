"""What one rank did, as values: verdicts are made of these. Samples have one name on all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Vector = tuple[float, ...]
"""A sketch, see :mod:`unisono.verify.sketches`."""


@dataclass(frozen=True, slots=True)
class Gradient:
    """One parameter's gradient in one step.

    Attributes:
        final: what the optimizer got.
        digest: of its bytes.
        passes: what each backward pass gave on this rank.
        clipped: what was given to the first call that clips; None: there was none.
        clipped_digest: of its bytes.
        size: how many elements.
    """

    final: Vector
    digest: str
    passes: tuple[Vector, ...] = ()
    clipped: Vector | None = None
    clipped_digest: str = ""
    size: int = 1

    @property
    def averaged(self) -> Vector:
        """What was there before it was clipped."""
        return self.final if self.clipped is None else self.clipped


@dataclass(frozen=True, slots=True)
class Micro:
    """One forward and backward pass.

    Attributes:
        samples: which, in order.
        rows: digests of what the model was given of each.
        num_counted: over how many targets the loss is a mean; None: not known.
    """

    samples: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    num_counted: int | None = None


@dataclass(frozen=True, slots=True)
class ModelState:
    """Digests of a model when the first forward pass of a step begins, by name.

    Attributes:
        rng: torch's generator.
        has_batch_norm: it takes statistics over this rank's samples.
        dtype: in which is computed.
    """

    parameters: Mapping[str, str] = field(default_factory=dict)
    buffers: Mapping[str, str] = field(default_factory=dict)
    rng: str = ""
    has_batch_norm: bool = False
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """One step of one optimizer.

    Attributes:
        number: counted from 0 for each optimizer.
        optimizer: which, in the order of their first steps.
        kind: its class.
        lr: of each group.
        ticks: how often a schedule stepped since the step before.
        gradients: by parameter; empty in late steps.
        parameters: sketch and digest of each after the step.
        micros: the passes since the step before.
        state: of the model; None: no forward pass of a whole model was seen.
        draws: whether a forward pass drew random numbers.
        no_sync: whether torch DDP was told not to average some of the passes.
        num_collectives: how often the program itself put results of ranks together since then.
    """

    number: int = 0
    optimizer: int = 0
    kind: str = "SGD"
    lr: tuple[float, ...] = ()
    ticks: int = 0
    gradients: Mapping[str, Gradient] = field(default_factory=dict)
    parameters: Mapping[str, tuple[Vector, str]] = field(default_factory=dict)
    micros: tuple[Micro, ...] = ()
    state: ModelState | None = None
    draws: bool = False
    no_sync: bool = False
    num_collectives: int = 0

    @property
    def samples(self) -> tuple[str, ...]:
        """Give the samples of all passes."""
        return tuple(sample for micro in self.micros for sample in micro.samples)

    @property
    def rows(self) -> tuple[str, ...]:
        """Give what the model was given in all passes."""
        return tuple(row for micro in self.micros for row in micro.rows)


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration over one DataLoader.

    Attributes:
        loader: which, in the order they were made.
        epoch: how many iterations came before.
        role: ``"train"``, ``"eval"`` or empty, where nothing was computed.
        plan: the samples of the whole epoch in order; None: not known.
        order: a digest of its indices.
        is_sorted: its indices ascend.
        is_sliced: forward passes got only a part of each batch.
        drop_last, replaces, has_set_epoch, sampler: of the loader.
    """

    loader: int = 0
    epoch: int = 0
    role: str = "train"
    plan: tuple[str, ...] | None = None
    order: str = ""
    is_sorted: bool = False
    is_sliced: bool = False
    drop_last: bool = False
    replaces: bool = False
    has_set_epoch: bool = False
    sampler: str = "RandomSampler"


@dataclass(frozen=True, slots=True)
class Collective:
    """A call that puts together what ranks have.

    Attributes:
        name: torch's.
        values: after it, if they are few.
        given: before it, if they are few.
    """

    name: str
    values: tuple[float, ...] = ()
    given: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class EvaluationPass:
    """Forward passes without gradients, up to the next training.

    Attributes:
        samples: of whole epochs, where a loader gave them.
        seen: those that were computed; epochs are cut.
        rows: digests of what the model was given of each.
        collectives: since it began.
        is_finished: something came after it, or the program ended well.
    """

    samples: tuple[str, ...] = ()
    seen: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    collectives: tuple[Collective, ...] = ()
    is_finished: bool = True


@dataclass(frozen=True, slots=True)
class DatasetRead:
    """A batch that a dataset was asked for.

    Attributes:
        place: dataset, number of the loader process or -1, and count there.
        samples: which.
        drawn: the states of the generators that the dataset drew from, before it did.
    """

    place: tuple[int, int, int]
    samples: tuple[str, ...]
    drawn: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankTrace:
    """All that is known of one rank.

    Attributes:
        how: how its program ended: ``"ended"``, ``"stopped"`` by the verifier, or why it did not.
    """

    rank: int = 0
    steps: tuple[OptimizerStep, ...] = ()
    iterations: tuple[Iteration, ...] = ()
    evaluations: tuple[EvaluationPass, ...] = ()
    fetches: tuple[DatasetRead, ...] = ()
    how: str = "ended"


@dataclass(frozen=True, slots=True)
class TwoRuns:
    """Two runs of one program.

    Attributes:
        ranks: of the run on several.
        one: of the run on one rank; None: it did not get far enough.
    """

    ranks: tuple[RankTrace, ...]
    one: RankTrace | None = None

    @property
    def world_size(self) -> int:
        """Count the ranks."""
        return len(self.ranks)

    def steps(self) -> list[tuple[OptimizerStep, ...]]:
        """Give the steps that all ranks took, each as one value a rank."""
        by_place = [{(s.optimizer, s.number): s for s in rank.steps} for rank in self.ranks]
        return [
            tuple(steps[place] for steps in by_place)
            for place in by_place[0]
            if all(place in steps for steps in by_place)
        ]

    def step_of_one(self, step: OptimizerStep) -> OptimizerStep | None:
        """Find the same step of the run on one rank."""
        for other in () if self.one is None else self.one.steps:
            if (other.optimizer, other.number) == (step.optimizer, step.number):
                return other
        return None
