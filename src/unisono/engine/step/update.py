"""Update parameters from summed gradients: in pieces by all workers, or whole.

Both use the optimizer that the user made, with its hooks and schedules; during ``step()`` its
parameters and state are those of this worker.
"""

from __future__ import annotations

import json
import operator
import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import torch
from torch.optim import Optimizer

from unisono.engine.exchange.exchange import Exchange
from unisono.engine.exchange.shared_optimizer_state import PiecesOfState
from unisono.engine.state.optimizers import bare_step, is_surrounded
from unisono.engine.step.loss_scaling import LossScaling
from unisono.engine.step.transforms import Clipping
from unisono.plan.shards import Piece

_PLAIN = (bool, int, float, str, tuple)
_IMMUTABLE = (bool, int, float, str, type(None))


def pass_for_stepped(optimizer: Optimizer) -> None:
    """Mark an optimizer as stepped, which schedules check."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


@final
class Options:
    """The options of an optimizer's groups, which must be the same on all workers."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer, self._number = optimizer, 0
        self._seen: list[dict[str, Any]] = []
        # names and values of each group, if no value can change by itself
        self._objects: list[tuple[list[str], list[Any]]] = []
        self._kinds = self._now(_kind_of)

    def note(self) -> int:
        """Record the options before passes; return 32 bits that are equal if the options are."""
        if self._are_same_objects():
            return self._number
        now = self._now(_comparable)
        if now != self._seen:
            self._check_kinds()
            self._seen = now
            plain = [
                {name: value for name, value in group.items() if isinstance(value, _PLAIN)}
                for group in now
            ]
            text = json.dumps(plain, skipkeys=True, default=lambda _: None)
            self._number = zlib.crc32(text.encode())
        groups = self._optimizer.param_groups
        options = (v for group in groups for name, v in group.items() if name != "params")
        are_fixed = all(map(_is_immutable, options))
        self._objects = [([*each], [*each.values()]) for each in groups] if are_fixed else []
        return self._number

    def check(self) -> None:
        """Raise RuntimeError if passes have changed options since they were recorded."""
        if self._are_same_objects() or (now := self._now(_comparable)) == self._seen:
            return
        changed = (
            name
            for group, noted in zip(now, self._seen, strict=False)
            for name in {**noted, **group}
            if group.get(name, ...) != noted.get(name, ...)
        )
        name = next(changed, "param_groups")
        raise RuntimeError(
            f"the loss function and the model must depend on the shard alone, but they set "
            f"`{name}` of the optimizer, whose options must be the same on all workers: pass "
            f"`schedule=`, or set it before the step, as in a callback's `on_step_begin`."
        )

    def _are_same_objects(self) -> bool:
        """Compare what costs little in every step: whether the same objects have the same names."""
        groups = self._optimizer.param_groups
        return len(groups) == len(self._objects) and all(
            [*group] == names and all(map(operator.is_, group.values(), values))
            for group, (names, values) in zip(groups, self._objects, strict=True)
        )

    def _check_kinds(self) -> None:
        """Raise RuntimeError if numbers have become tensors, or the other way round."""
        for before, now in zip(self._kinds, self._now(_kind_of), strict=False):
            for name in before.keys() & now.keys():
                if before[name] != now[name]:
                    raise RuntimeError(
                        f"an option of an optimizer must stay a number, or a tensor of one dtype, "
                        f"while a loop is under way, as the run keeps its value alone, but "
                        f"`{name}` was {before[name]} and is {now[name]}: set it to `float(…)`, or "
                        f"change the tensor in place (`fill_`)."
                    )

    def _now(self, as_what: Callable[[Any], Any]) -> list[dict[str, Any]]:
        return [
            {name: as_what(value) for name, value in group.items() if name != "params"}
            for group in self._optimizer.param_groups
        ]


def _kind_of(value: Any) -> str:
    if isinstance(value, (list, tuple)) and value:
        return " and ".join(sorted({*map(_kind_of, value)}))
    return str(value.dtype) if isinstance(value, torch.Tensor) else "no tensor"


def _is_immutable(value: Any) -> bool:
    is_plain = type(value) in _IMMUTABLE
    return is_plain or (type(value) is tuple and all(map(_is_immutable, value)))


def _comparable(value: Any) -> Any:
    """Return an option as a value of its own: a tensor as dtype and numbers, a list as a tuple."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, torch.Tensor):
        value = str(value.dtype), value.tolist()
    return tuple(map(_comparable, value)) if isinstance(value, (list, tuple)) else value


@dataclass(slots=True)
class LoopOptimizer:
    """One of a run's optimizers in the steps of one loop."""

    name: str
    optimizer: Optimizer
    clipping: Clipping
    scaling: LossScaling | None
    # by their positions in the exchange
    parameters: dict[int, torch.nn.Parameter] = field(init=False)
    update: SlicedUpdate | WholeUpdate = field(init=False)

    def check_reached(self, present: Sequence[bool], step: int) -> None:
        """Raise ValueError if an update has no gradients for its parameters."""
        if not any(present[index] for index in self.parameters):
            raise ValueError(
                f"the loss of an update must depend on the parameters that it changes, but in "
                f"step {step} none of {self.name!r} has a gradient: compute it with them, without "
                f"`detach()` or `torch.no_grad()`, or name another optimizer."
            )

    def follow(self, exchange: Exchange) -> None:
        """Prepare to update the pieces that this worker has now."""
        own = {id(one) for group in self.optimizer.param_groups for one in group["params"]}
        each = enumerate(exchange.parameters)
        self.parameters = {index: parameter for index, parameter in each if id(parameter) in own}
        if exchange.optimizer_state is None:
            self.update = WholeUpdate(self, exchange)
        else:
            self.update = SlicedUpdate(
                self, exchange.pieces, exchange.totals, exchange.optimizer_state
            )


@final
class SlicedUpdate:
    """Element-wise updates: each worker updates its pieces, and has their state."""

    def __init__(
        self,
        owner: LoopOptimizer,
        pieces: Sequence[Piece],
        totals: Sequence[torch.Tensor],
        shared: PiecesOfState,
    ) -> None:
        self._optimizer, self._parameters = owner.optimizer, owner.parameters
        self._bare_step = bare_step(owner.optimizer)
        self._shared, self._keys = shared, shared.keys
        each = zip(pieces, totals, strict=True)
        own = [(piece, total) for piece, total in each if piece.index in self._parameters]
        pieces = self._pieces = [piece for piece, _ in own]
        self._totals = [total for _, total in own]
        self._leaves = [torch.nn.Parameter(shared.parameter(piece)) for piece in pieces]
        self._state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        owners = [id(self._parameters[piece.index]) for piece in pieces]
        groups = [set(map(id, group["params"])) for group in self._optimizer.param_groups]
        self._groups = [
            [leaf for leaf, owner in zip(self._leaves, owners, strict=True) if owner in group]
            for group in groups
        ]
        self._strangers = {n for n, piece in enumerate(pieces) if self._keys[piece.index]}
        self._sizes: list[int] = []
        self._known = b""
        self._dense = False
        for position, piece in enumerate(pieces):  # whose state is known already
            if shared.known[piece.index]:
                self._state[self._leaves[position]] = shared.of_piece(piece)
                self._strangers.discard(position)
        self.commit()

    def check_step(self) -> None:
        """Raise RuntimeError if code was put around ``step()`` since the loop began."""
        if is_surrounded(self._optimizer):
            raise RuntimeError(
                "hooks and wrappers of an optimizer's `step` must be in place before a loop, but "
                "were added during one: add them before it, or between two loops."
            )

    def apply(self, present: Sequence[bool]) -> None:
        """Update this worker's pieces of parameters with a gradient."""
        if not (self._dense and all(present)):
            for leaf, piece, total in zip(self._leaves, self._pieces, self._totals, strict=True):
                leaf.grad = total if present[piece.index] else None
            self._dense = all(present)
        pass_for_stepped(self._optimizer)  # even if this worker has no pieces
        if self._leaves:
            self._step_in_place_of_the_whole()
            self._check_state()
        for position in sorted(self._strangers):
            self._adopt_new(position)

    def _check_state(self) -> None:
        """Raise RuntimeError for new state, which has no shared memory."""
        sizes = [len(state) for state in self._state.values()]
        if sizes == self._sizes:
            return
        self._sizes = sizes
        for leaf, piece in zip(self._leaves, self._pieces, strict=True):
            if len(self._state[leaf]) > len(self._keys[piece.index]) and any(
                isinstance(value, torch.Tensor) and name not in self._keys[piece.index]
                for name, value in self._state[leaf].items()
            ):
                raise RuntimeError(
                    f"an optimizer's options must not change which state it keeps while a loop is "
                    f"under way, but it has {sorted(self._state[leaf])} now: end the loop first."
                )

    def commit(self) -> None:
        """Publish the whole state of parameters that have new state in the user's optimizer."""
        known = bytes(self._shared.known)
        if known == self._known:
            return
        for index, parameter in self._parameters.items():
            if known[index] and self._known[index : index + 1] != b"\1":
                self._shared.show(self._optimizer, parameter, index)
        self._known = known

    def _step_in_place_of_the_whole(self) -> None:
        optimizer = self._optimizer
        whole = [group["params"] for group in optimizer.param_groups]
        state, step = optimizer.state, self._bare_step
        if torch.autograd.profiler._is_profiler_enabled:
            step = optimizer.step
        try:
            optimizer.state = self._state
            for group, leaves in zip(optimizer.param_groups, self._groups, strict=True):
                group["params"] = leaves
            with torch.no_grad():
                step()
        finally:
            optimizer.state = state
            for group, parameters in zip(optimizer.param_groups, whole, strict=True):
                group["params"] = parameters

    def _adopt_new(self, position: int) -> None:
        """Keep state that the optimizer has just created for a piece with the other state."""
        state = self._state[self._leaves[position]]
        if any(isinstance(value, torch.Tensor) for value in state.values()):
            self._shared.adopt(self._pieces[position], state)
            self._strangers.discard(position)


@final
class WholeUpdate:
    """Updates of whole parameters, by one worker for all or by each worker for its replica.

    The optimizer's state stays in the processes that update.
    """

    def __init__(self, owner: LoopOptimizer, exchange: Exchange) -> None:
        self._optimizer, self._parameters = owner.optimizer, owner.parameters
        self._exchange, self._acts = exchange, exchange.acts

    def apply(self, present: Sequence[bool]) -> None:
        """Update the parameters that have a gradient, once all workers have their sums."""
        if not self._acts:
            pass_for_stepped(self._optimizer)  # elsewhere it has
            return
        self._exchange.buffers.settle()
        # Now: where a worker was lost while all added up, the sums of those left lie elsewhere.
        sums = self._exchange.whole
        for index, parameter in self._parameters.items():
            parameter.grad = sums[index] if present[index] else None
        try:
            with self._exchange.updating():
                self._optimizer.step()
                self._exchange.references.take()  # it may have written to other memory
        finally:
            for parameter in self._parameters.values():
                parameter.grad = None

    def commit(self) -> None:
        """Load changes of fixed parameters that the update made on another worker."""
        self._exchange.load_fixed()
