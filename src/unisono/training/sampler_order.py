"""Whether a sampler returns the same order everywhere, and when a run resumes within an epoch."""

import itertools

from unisono.data.epoch_order import EpochOrder
from unisono.errors import MismatchError
from unisono.plan.samples import SamplePlan
from unisono.training.run_context import RunContext


def facts_of_order(samples: SamplePlan, epoch: int) -> dict[str, str]:
    """Return what identifies a sampler's order in an epoch; empty without a sampler.

    An endless sampler is read as far as the call needs it, and other calls read more or less, so
    prefixes of its order are compared.
    """
    if samples.sampler is None:
        return {}
    whole = f"the sampler's order of epoch {epoch}"
    if not samples.is_endless:
        return {whole: samples.digest(epoch)}
    order = samples.order(epoch)
    assert order is not None
    sizes = itertools.takewhile(
        len(order).__ge__, (samples.batch_size << power for power in itertools.count())
    )
    return {f"the first {size} of {whole}": samples.digest(epoch, size) for size in sizes}


def check_order(run: RunContext, samples: SamplePlan) -> None:
    """Raise MismatchError if a run resumes in mid-epoch, and the sampler's order has changed."""
    position = run.kept.position
    order, begun = facts_of_order(samples, position.epoch), run.kept.last.get("order", {})
    if position.batch and any(begun.get(name, told) != told for name, told in order.items()):
        raise MismatchError(
            f"`sampler` must return the order in which epoch {position.epoch} began, but "
            f"{samples.sampler} returns another: create it with the same arguments, or start over "
            f'with `Checkpoint(resume="never")`.'
        )
    order_of, goes_on = samples.order_of, position.batch and not run.has_joined
    if goes_on and isinstance(order_of, EpochOrder) and order_of.has_changed(position.epoch):
        run.say_once(
            f"{samples.sampler} would now return a different order from the one with which epoch "
            f"{position.epoch} began: this epoch continues in its order, and the new one applies "
            f"from the next epoch on"
        )


def begin_epoch(run: RunContext, samples: SamplePlan, *, is_agreed: bool) -> None:
    """Begin the epoch of the next step. Collective, unless the order is already agreed on."""
    order = facts_of_order(samples, run.kept.position.epoch)
    if order:
        if not is_agreed:
            run.team.agree(order, "order of an epoch")
        run.kept.last["order"] = order
