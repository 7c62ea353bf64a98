"""What does a trainer call? Losses, `forward`, and their defaults.

Other forms are refused with a message that says what to write: a criterion takes outputs and
targets, a function of three takes a batch apart.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn
from torch.nn import functional
from torch.optim import Optimizer

Loss = Callable[[nn.Module, Any], Any]

_CRITERIA = nn.modules.loss.__name__
_WANTED = "`loss` must be a function of (model, batch)"


def check_loss(loss: object) -> None:
    """Raise TypeError unless `loss` is a function of (model, batch)."""
    if isinstance(loss, nn.Module) and type(loss).__module__ == _CRITERIA:
        raise _of_outputs(f"`nn.{type(loss).__name__}`", "criterion")
    name = getattr(loss, "__name__", "")
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise _of_outputs(f"the class `nn.{name}`", f"nn.{name}()")
    if name and getattr(functional, name, None) is loss:
        raise _of_outputs(f"`F.{name}`", f"F.{name}")
    if isinstance(getattr(loss, "__self__", None), nn.Module):
        parameters = list(inspect.signature(loss).parameters)  # type: ignore[arg-type]
        if parameters[:1] == ["batch"]:
            call = f"model.{name}({', '.join(['batch', *'0' * (len(parameters) - 1)])})"
            raise TypeError(
                f"{_WANTED}, but is a method that takes ({', '.join(parameters)}): pass "
                f"`lambda model, batch: {call}`, and return what it logs in a dict, beside "
                f'`"loss"`.'
            )
    check_function("loss", loss, ("model", "batch"), _apart(loss))


def check_forward(forward: object) -> None:
    """Raise TypeError unless `forward` is a function of (model, batch)."""
    check_function("forward", forward, ("model", "batch"))


def check_function(name: str, function: object, arguments: Sequence[str], advice: str = "") -> None:
    """Raise TypeError for an object that cannot be called with these arguments."""
    wanted = f"`{name}` must be a function of ({', '.join(arguments)})"
    if isinstance(function, Optimizer):
        raise TypeError(
            f"{wanted}, but is of type {type(function).__name__}: the optimizer comes before it, "
            f"`Trainer(model, optimizer, loss)`."
        )
    if not callable(function):
        raise TypeError(
            f"{wanted}, but is of type {type(function).__name__}: pass "
            f"`lambda {', '.join(arguments)}: …`, or a function."
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have none
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        takes = ", ".join(signature.parameters)
        raise TypeError(f"{wanted}, but takes ({takes}){advice}.") from None


def _of_outputs(what: str, call: str) -> TypeError:
    return TypeError(
        f"{_WANTED}, but is {what}, which takes outputs and targets: pass "
        f"`lambda model, batch: {call}(model(batch[0]), batch[1])`, where a batch is a pair "
        f"(inputs, targets)."
    )


def _apart(loss: object) -> str:
    """Return what to write for a function that takes a batch apart; empty for others."""
    try:
        parameters = inspect.signature(loss).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    given = [name for name, p in parameters.items() if p.default is p.empty]
    if len(given) < 3:
        return ""
    return (
        "; a batch is one argument: pass `lambda model, batch: loss(model, *batch)` if batches "
        "have as many parts"
    )


@final
@dataclass(frozen=True, slots=True)
class WholeBatch:
    """A loss over the whole global batch, such as a contrastive one.

    ``Trainer(model, optimizer, WholeBatch(embed, loss))``: each shard is embedded twice, so only
    one shard's graph is in memory at a time.

    Args:
        embed: a function of (model, batch of one shard) that returns features, a tensor with one
            row for each sample, or several in a tuple or dict.
        loss: a function of (model, features of the global batch), in the batch's order.

    Raises:
        TypeError: `embed` or `loss` is not such a function.
    """

    embed: Loss
    loss: Loss

    def __post_init__(self) -> None:
        check_function("embed", self.embed, ("model", "batch"))
        check_loss(self.loss)


def token_mean(
    model: nn.Module, batch: Any, *, shift: bool = True, ignore_index: int = -100
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a language model's cross-entropy, summed over tokens, with their number: a `loss`.

    The model is called as ``model(**batch)``. Means are over all tokens of the global batch that
    are not ignored, in training and in ``evaluate``, however they are divided among samples, shards
    and workers. A mean of the shards' means, as from the model's own ``.loss``, is a different
    number. For models of transformers, and others that are called like this and return ``logits``.

    Args:
        model: its output has ``.logits``, or ``["logits"]``, of shape (samples, tokens, classes).
        batch: a dict of tensors with ``"labels"`` of shape (samples, tokens).
        shift: whether the logits at a token are for the next one's label, as in causal models;
            False for masked and for encoder-decoder models:
            ``functools.partial(unisono.token_mean, shift=False)``.
        ignore_index: the label of tokens that are ignored.

    Returns:
        The sum, and the number of tokens in it.

    Raises:
        TypeError: the batch is not such a dict, or the output has no logits.
        ValueError: the shape of the labels does not match that of the logits.
    """
    if not isinstance(batch, Mapping) or "labels" not in batch:
        has = f"has {list(batch)}" if isinstance(batch, Mapping) else f"is a {type(batch).__name__}"
        raise TypeError(
            f'`token_mean` must be given batches that are dicts with "labels", but this one {has}: '
            f'let the dataset or `collate_fn` give them, for a causal model `"labels"` as a copy '
            f'of `"input_ids"` with {ignore_index} where it is padded.'
        )
    output, labels = model(**batch), batch["labels"]
    is_mapping = isinstance(output, Mapping)
    logits = output.get("logits") if is_mapping else getattr(output, "logits", None)
    if not isinstance(logits, torch.Tensor):
        raise TypeError(
            f"`token_mean` must find `logits` in the model's output, but that is of type "
            f"{type(output).__name__}: have the model return a dict, or write the loss as a "
            f"function of (model, batch) that returns (sum, number of tokens)."
        )
    if logits.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels must have the shape of the logits without their last dimension "
            f"{tuple(logits.shape[:-1])}, but have {tuple(labels.shape)}."
        )
    if shift:
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    total = functional.cross_entropy(
        logits.flatten(0, -2).float(),
        labels.flatten(),
        ignore_index=ignore_index,
        reduction="sum",
    )
    return total, (labels != ignore_index).sum()


def forward_inputs(model: nn.Module, batch: Any) -> Any:
    """Call the model with a batch, or with the first part of a tuple or list."""
    return _call(model, batch, batch[0] if isinstance(batch, (tuple, list)) else batch)


def outputs_and_targets(model: nn.Module, batch: Any) -> Any:
    """Call the model with the inputs of a pair (inputs, targets); return outputs and targets."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise TypeError(
            f"a batch must be a pair (inputs, targets) for metrics to get (outputs, targets), but "
            f"is {_told(batch)}: {_SAY}"
        )
    return _call(model, batch, batch[0]), batch[1]


_SAY = (
    "pass a function `forward` (in `fit`: `validate_forward`) that calls the model, such as "
    "`lambda model, batch: model(batch[0], batch[1])`, or for metrics "
    '`lambda model, batch: (model(batch["inputs"]), batch["labels"])`.'
)


def _call(model: nn.Module, batch: Any, given: Any) -> Any:
    try:
        return model(given)
    except (TypeError, AttributeError) as error:
        if _fits(model, given):
            raise
        raise TypeError(
            f"a batch must fit the model's `forward{inspect.signature(model.forward)}`, which was "
            f"called with ({type(given).__name__}) of {_told(batch)}, but: {error}; {_SAY}"
        ) from error


def _fits(model: nn.Module, given: Any) -> bool:
    try:
        inspect.signature(model.forward).bind(given)
    except TypeError:
        return False
    except ValueError:  # unknown
        return True
    return not isinstance(given, Mapping)


def _told(batch: Any) -> str:
    if isinstance(batch, Mapping):
        return f"a {type(batch).__name__} of {list(batch)}"
    parts = f" of {len(batch)}" if isinstance(batch, (tuple, list)) else ""
    return f"a {type(batch).__name__}{parts}"
