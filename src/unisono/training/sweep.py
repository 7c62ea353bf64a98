"""One pass over a dataset without training: what evaluation and prediction have in common.

The dataset is cut into batches, without shuffling, and one worker computes each batch in one pass:
as in a plain loop, the batch of a sample does not depend on the number of workers or shards.
Workers divide the shards; those of a lost worker are computed again by the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from unisono.data.fingerprint import REMEDY
from unisono.data.loader import ShardPosition
from unisono.engine.state.contents import buffers_put_back, digest_of_weights
from unisono.engine.state.modes import evaluating
from unisono.engine.state.run_state import Position
from unisono.plan.seeds import seed_of
from unisono.programs.generators import OwnGenerators
from unisono.programs.unlike import values_unlike
from unisono.runtime.device import num_threads
from unisono.runtime.forbidden import IN_A_PASS, collectives_watched, forbid
from unisono.runtime.training_progress import now
from unisono.runtime.world import threads_per_worker
from unisono.training.begun_alike import check_begun_alike
from unisono.training.computing import deterministic_kernels, every_shape_compiled
from unisono.training.failing_step import refusals_explained
from unisono.training.failures import failure, raised
from unisono.training.loop_plan import LoopPlan
from unisono.training.out_of_memory import memory_explained
from unisono.training.rehearsals import Rehearsals
from unisono.training.run_context import RunContext, samples_now
from unisono.training.sampler_order import facts_of_order

_COMPARED = 64  # the first calls of a program, and every 64th, compare what its functions read


class Part(NamedTuple):
    """A shard's part of a batch, already read, with generators and buffers ready for its pass."""

    batch: int
    shard: int
    num_samples: int
    data: Any


PartsOf = Callable[[Sequence[int]], Iterator[Part]]
Forward = Callable[[nn.Module, Any], Any]


@final
class Sweep:
    """One pass of all workers, in ``eval()`` mode."""

    def __init__(
        self,
        run: RunContext,
        name: str,
        loop: LoopPlan,
        model: nn.Module | None,
        functions: Mapping[str, Any],
    ) -> None:
        self._run, self._name, self._loop, self._functions = run, name, loop, functions
        self.plan, self.team, self.device = loop.samples, run.team, run.device
        self.is_deterministic = run.is_deterministic
        self.model = run.kept.model if model is None else model
        # A model other than the trained one may differ between workers.
        self._digest = None if model is None else digest_of_weights(model)
        self._own = OwnGenerators(**loop.program, loss=(*functions.values(),), model=self.model)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Explain errors of passes within a block: full memory, no deterministic kernel."""
        with (
            memory_explained(self._run, f"pass of `{self._name}`"),
            refusals_explained(self.model, self.is_deterministic),
        ):
            yield

    def seed(self, stream: str, number: int = 0) -> None:
        """Seed generators for one place in a stream of this pass."""
        now().at = self._run.kept.position.step, self._run.kept.position.epoch, 0, None
        word = seed_of(stream, self.plan.seed, number)
        self.device.seed(word)
        self._own.seed(word)

    def agree(self, purpose: str, **more: object) -> None:
        """Check that all workers pass over the same samples in the same batches. Collective."""
        plan = self.plan
        known: dict[str, object] = {"dataset length": plan.num_samples}
        if self.team.size > 1:
            known |= samples_now(self._loop, "evaluate")
        facts = {"`batch_size`": plan.pass_size, **facts_of_order(plan, 0), **more}
        if self._digest is not None:
            facts["the digest of `model`"] = self._digest
        self.team.agree(facts, purpose, known=known, remedy=REMEDY)
        calls = self._run.replicated_calls
        if calls.is_recorded:  # within a loop, what differs was compared when it began
            if self._digest is None:
                check_begun_alike(self._run)
            if calls.index < _COMPARED or calls.index % _COMPARED == 0:
                rehearsals = Rehearsals(self._run, self._functions, self.model)
                self._run.unlike = values_unlike(self.team, rehearsals.places, self._run.say_once)

    @contextmanager
    def under_way(self) -> Iterator[PartsOf]:
        """Switch the model to ``eval()`` without gradients, and restore everything afterwards.

        Yield a function of shards, which yields their parts that have samples, batch by batch, and
        raises if a pass changes a parameter.
        """
        plan, fetch, done = self.plan, self._loop.fetch("evaluate"), self._run.kept.position
        self._own.search()
        with evaluating(self.model) as modes:
            check_unchanged = _watching(self.model)
            with (
                torch.no_grad(),
                self.device.generators_put_back(),
                self._own.put_back(),
                now().put_back(),
                num_threads(threads_per_worker()),
                deterministic_kernels(self.is_deterministic),
                every_shape_compiled(),
                collectives_watched(),
                buffers_put_back(self.model) as put_buffers_back,
                self._loop.loader(fetch, Position(), self.device, done) as loader,
            ):

                def parts_of(shards: Sequence[int]) -> Iterator[Part]:
                    for batch in range(plan.steps_per_epoch):
                        for shard in shards:
                            num_samples = plan.shard_size(batch, shard)
                            if not num_samples:
                                continue
                            data = loader.batch(ShardPosition(0, batch, shard), shards)
                            number = batch * plan.shards + shard
                            self.seed("evaluate", number)
                            now().at = done.step, done.epoch, *plan.as_progress(batch, shard)
                            put_buffers_back()
                            modes.put_back()
                            before = forbid(IN_A_PASS)
                            try:
                                yield Part(batch, shard, num_samples, data)
                            finally:
                                forbid(before)
                            check_unchanged()

                yield parts_of

    def by_all_workers(
        self, compute: Callable[[Sequence[int]], Mapping[int, bytes]], purpose: str
    ) -> dict[int, bytes]:
        """Compute every shard on some worker; those of a lost one again. Collective.

        Return the results by shard, or raise on all workers what one of them has raised.
        """
        team, said = self.team, dict[int, bytes]()
        while missing := [shard for shard in range(self.plan.shards) if shard not in said]:
            bounds = [len(missing) * part // team.size for part in range(team.size + 1)]
            caught: Exception | None = None
            try:
                mine = missing[bounds[team.position] : bounds[team.position + 1]]
                with self.explained():
                    answer = _joined(compute(mine))
            except Exception as error:
                caught = error
                answer = b"\n" + failure(error, team.world.rank)
            answers = team.gather(answer, purpose)
            for rank, heard in answers.items():
                if heard.startswith(b"\n"):
                    if caught is not None and rank == team.world.rank:
                        raise caught
                    raise raised(heard[1:])
            for heard in answers.values():
                said |= _taken_apart(heard)
        return said


def _joined(said: Mapping[int, bytes]) -> bytes:
    sizes = [(shard, len(words)) for shard, words in said.items()]
    return json.dumps(sizes).encode() + b"\n" + b"".join(said.values())


def _taken_apart(heard: bytes) -> dict[int, bytes]:
    sizes, _, words = heard.partition(b"\n")
    said, start = {}, 0
    for shard, num_bytes in json.loads(sizes):
        said[shard] = words[start : start + num_bytes]
        start += num_bytes
    return said


def _watching(model: nn.Module) -> Callable[[], None]:
    """Record the versions of a model's parameters; return a function that compares them."""
    named = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not is_lazy(parameter) and not parameter.is_inference()
    }
    versions = [parameter._version for parameter in named.values()]

    def check() -> None:
        for (name, parameter), version in zip(named.items(), versions, strict=True):
            if parameter._version != version:
                raise RuntimeError(
                    f"a pass without training must leave parameters as they are, or they would "
                    f"depend on which worker has computed it, but `{name}` was changed in place: "
                    f"leave `max_norm` out of embeddings, or change a copy."
                )

    return check
