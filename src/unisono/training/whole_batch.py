"""A loss over the features of the whole global batch, as contrastive losses are.

::

    every shard     embed ── rows of features, without their graph ── gathered by all
    every worker    loss of all rows, in the order of the batch ── its gradient for each row
    every shard     embed again, with the same random numbers ── that gradient ── parameters

So a worker holds the graph of one shard at a time and the features of all. The gradient is that of
the loss of all rows at once (gradient caching, Gao et al. 2021); parameters that the loss itself
uses, such as a temperature, count once, with the first shard that has samples.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import torch
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors
from torch import nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from unisono.engine.state.contents import buffers_noted
from unisono.engine.step.engine import StepEngine
from unisono.engine.step.loss import PER_SAMPLE, check_differentiable, is_count, is_pair, read_loss
from unisono.errors import MismatchError
from unisono.plan.samples import SamplePlan
from unisono.runtime.device import Device, host, on_host
from unisono.runtime.workers.team import Team
from unisono.training.run_context import RunContext

Embed = Callable[[Any], Any]
"""Maps a batch to a tensor with a row for each sample, or to several in a tuple, list or dict."""


Features = dict[int, list[torch.Tensor]]
"""The tensors that `embed` returned, in order, by shard."""


def _written(features: Features) -> bytes:
    """Write tensors for the other workers; raise TypeError for a dtype that cannot be written."""
    for leaf in itertools.chain.from_iterable(features.values()):
        if leaf.dtype == torch.complex128:
            raise TypeError(
                f"rows that workers exchange must have a dtype of safetensors, but are of "
                f"{leaf.dtype}: use `torch.view_as_real`, or `.to(torch.complex64)`."
            )
    tensors = {
        f"{shard}/{at}": on_host(leaf).resolve_conj().resolve_neg().contiguous()
        for shard, leaves in features.items()
        for at, leaf in enumerate(leaves)
    }
    head = json.dumps({shard: len(leaves) for shard, leaves in features.items()})
    return head.encode() + b"\n" + to_safetensors(tensors)


def _read(told: bytes, device: Device) -> Features:
    head, _, data = told.partition(b"\n")
    tensors = from_safetensors(data)
    return {
        int(shard): [tensors[f"{shard}/{at}"].to(device.torch) for at in range(count)]
        for shard, count in json.loads(head).items()
    }


@final
class BatchRows:
    """The rows of one global batch, by the shards that have samples."""

    def __init__(self, plan: SamplePlan, batch: int) -> None:
        start, _ = plan.bounds(batch)
        self.num_samples = plan.num_batch_samples(batch)
        self.shards = [shard for shard, size in enumerate(plan.shard_sizes(batch)) if size]
        self._rows = {shard: plan.shard_positions(batch, shard) - start for shard in self.shards}

    def joined(self, features: Mapping[int, Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Return the rows of all shards in the order of the batch."""
        order = torch.cat([self._rows[shard] for shard in self.shards]).argsort()
        each = zip(*(features[shard] for shard in self.shards), strict=True)
        return [torch.cat(leaves)[order.to(leaves[0].device)] for leaves in each]

    def of_shard(self, rows: torch.Tensor, shard: int) -> torch.Tensor:
        """Return one shard's rows."""
        return rows[self._rows[shard].to(rows.device)]


@final
class WholeBatchLoss:
    """Computes one step's loss and its gradients."""

    def __init__(self, whole: BatchRows, embed: Embed, loss: Callable[[Any], Any]) -> None:
        self._whole, self._embed, self._loss = whole, embed, loss
        self.shards = whole.shards
        self._spec: TreeSpec | None = None
        self._is_differentiated = False

    def features_of(self, batch: Any, num_samples: int) -> list[torch.Tensor]:
        """Embed a batch; raise TypeError if the result is not rows of features."""
        leaves, self._spec = tree_flatten(self._embed(batch))
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor) or not leaf.ndim or len(leaf) != num_samples:
                seen = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
                raise TypeError(
                    f"`embed` must return tensors with one row for each of the {num_samples} "
                    f"samples of a batch, but returned {seen}: take sums and means in the loss."
                )
        return leaves

    def _differentiate(self, features: Features, model: nn.Module) -> None:
        """Compute the loss of all rows, and its gradients, once a batch has been embedded."""
        rows = [leaf.detach() for leaf in self._whole.joined(features)]
        for leaf in rows:
            leaf.requires_grad_(leaf.is_floating_point() or leaf.is_complex())
        assert self._spec is not None
        with torch.enable_grad():
            returned = self._loss(tree_unflatten(rows, self._spec))
            check_differentiable(read_loss(returned, self._whole.num_samples))
            values = dict(returned) if isinstance(returned, Mapping) else {"loss": returned}
            value = _mean(values.pop("loss"))
            self._per_sample = dict(values.pop(PER_SAMPLE, {}))
            direct = [parameter for parameter in model.parameters() if parameter.requires_grad]
            wanted = [*(leaf for leaf in rows if leaf.requires_grad), *direct]
            gradients = list(torch.autograd.grad(value, wanted, allow_unused=True))
        of_rows = gradients[: len(wanted) - len(direct)]
        self._gradients = [of_rows.pop(0) if leaf.requires_grad else None for leaf in rows]
        found = zip(direct, gradients[len(wanted) - len(direct) :], strict=True)
        self._direct = [(parameter, one) for parameter, one in found if one is not None]
        self._value = value.detach()
        others = {name: _mean(other) for name, other in values.items()}
        self._others = {n: v.detach() if hasattr(v, "detach") else v for n, v in others.items()}

    def of_shard(
        self, shard: int, leaves: Sequence[torch.Tensor], features: Features, engine: StepEngine
    ) -> Any:
        """Return what :meth:`Step.backward` takes for a shard whose features have a graph."""
        if not self._is_differentiated:
            self._is_differentiated = True
            with engine.passes.seeded("whole batch"):
                self._differentiate(features, engine.model)
        inputs: list[torch.Tensor] = []
        gradients: list[torch.Tensor] = []
        for leaf, gradient in zip(leaves, self._gradients, strict=True):
            if gradient is not None and leaf.requires_grad:
                inputs.append(leaf)
                gradients.append(self._whole.of_shard(gradient, shard).to(leaf.device))
        is_first = shard == self._whole.shards[0]
        if is_first:
            for parameter, gradient in self._direct:
                inputs.append(parameter)
                gradients.append(gradient)
        device = inputs[0].device if inputs else self._value.device
        value = self._value.to(device) if is_first else torch.zeros_like(self._value, device=device)
        weight = float(is_first)
        others: dict[str, Any] = {
            name: v * is_first if is_count(v) else (v * weight, weight)
            for name, v in self._others.items()
        }
        if self._per_sample:
            rows = self._per_sample.items()
            others[PER_SAMPLE] = {name: self._whole.of_shard(row, shard) for name, row in rows}
        return {"loss": (_Known.apply(value, gradients, *inputs), weight), **others}  # type: ignore[no-untyped-call]


def from_the_same_buffers(loss: Callable[[nn.Module, Any], Any]) -> Callable[..., Any]:
    """Return a loss that starts every call in a step from the buffers that the first one found."""
    put_back: Callable[[], None] | None = None

    def computed(model: nn.Module, features: Any) -> Any:
        nonlocal put_back
        if put_back is None:
            put_back = buffers_noted(model)
        else:
            put_back()
        return loss(model, features)

    return computed


def gathered(
    missing: Sequence[int],
    run: RunContext,
    engine: StepEngine,
    embedded: Callable[[int], list[torch.Tensor]],
) -> Features:
    """Compute every shard's features on some worker, and gather them on all. Collective.

    `embedded` reads a shard and embeds it, with a graph, as torch may use other kernels without.
    """
    team, device, features = run.team, run.device, Features()
    mine = [shard for shard in missing if shard in engine.passes.shards]
    while missing:
        engine.begin_passes()
        found = {v: [leaf.detach().clone().to(device.torch) for leaf in embedded(v)] for v in mine}
        engine.end_passes()
        engine.exchange.buffers.restore()  # only a shard's second pass counts
        heard = team.gather(_written(found), "features of the global batch")
        for rank, told in heard.items():
            features |= found if rank == team.world.rank else _read(told, device)
        # The shards of a lost worker are divided among the others.
        missing = [shard for shard in missing if shard not in features]
        bounds = [len(missing) * part // team.size for part in range(team.size + 1)]
        mine = missing[bounds[team.position] : bounds[team.position + 1]]
    engine.check_passes()
    engine.begin_again()
    return features


def rows_of_batch(
    whole: BatchRows, mine: Mapping[int, Mapping[str, torch.Tensor]], team: Team, device: Device
) -> dict[str, torch.Tensor] | None:
    """Gather the per-sample values of all shards, by name; None if one was lost. Collective."""
    before, names = team.membership, sorted({name for rows in mine.values() for name in rows})
    told = {shard: [rows[name] for name in names if name in rows] for shard, rows in mine.items()}
    heard = team.gather(json.dumps(names).encode() + b"\n" + _written(told), "values per sample")
    if team.membership is not before:
        return None
    features: Features = {}
    told_names: set[str] = set()
    for message in heard.values():
        head, _, rest = message.partition(b"\n")
        features |= (found := _read(rest, device))
        told_names |= {*json.loads(head)} if found else set()
    names = sorted(told_names)
    if {len(rows) for rows in features.values()} != {len(names)}:
        raise MismatchError(
            f'`"{PER_SAMPLE}"` must have the same names for every shard, but shards of a step '
            f"differ in {names}: always return the same keys."
        )
    return dict(zip(names, whole.joined(features), strict=True))


def left_by_all(
    mine: Mapping[int, Sequence[torch.Tensor]], team: Team
) -> dict[int, list[torch.Tensor]] | None:
    """Gather tensors of all shards on the host; None if a worker was lost. Collective."""
    if team.size == 1:
        return {shard: [*tensors] for shard, tensors in mine.items()}
    before, told = team.membership, _written({shard: [*of] for shard, of in mine.items()})
    heard = team.gather(told, "buffers of all shards")
    if team.membership is not before:
        return None
    found: Features = {}
    for message in heard.values():
        found |= _read(message, host())
    return found


class _Known(torch.autograd.Function):
    """A number whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, gradients: Any, *inputs: torch.Tensor) -> Any:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return (None, None, *(known * gradient for known in ctx.gradients))


def _mean(value: Any) -> Any:
    if not is_pair(value):
        return value
    return value[0] if value[1] is None else value[0] / value[1]
