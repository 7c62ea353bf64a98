"""Which program does a seed stand for? A pure function from a number to a table of choices.

Every choice is one that a user may make, and each is drawn for itself, so that thirty programs hold
pairs and triples of things that no test was written for. What does not fit together (a sequence
block on vectors, BatchNorm over a shard of one row) is never drawn.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

KINDS = ("vectors", "images", "tokens")
LOSSES = ("mean", "weighted", "dict", "weighted dict", "noisy", "label smoothing")
PRECISIONS = ("fp32", "fp32", "fp32", "bf16", "fp16")
DATASETS = ("tensors", "subset", "items", "many at once", "list", "stream", "parts", "collated")
DRAWING = ("none", "python", "numpy", "torch", "all")
SAMPLERS = ("none", "none", "in order", "function", "weighted", "with replacement")
OPTIMIZERS = (
    *("sgd", "momentum", "nesterov", "fused momentum", "foreach momentum"),
    *("adam", "fused adam", "foreach adam", "amsgrad", "adamw", "fused adamw"),
    *("rmsprop", "adagrad", "fused adagrad", "adadelta", "adamax", "nadam", "radam", "asgd"),
    *("rprop", "adafactor", "muon", "own", "clipped in a hook"),
)
SCHEDULES = (
    *("none", "none", "steps", "exponential", "cosine", "one cycle", "warm restarts", "lambda"),
    *("chained", "cyclic momentum", "plateau"),
)

_ON_ALL = ("layer norm", "dropout", "residual", "gate", "double", "counter", "scale", "frozen")
BLOCKS = {
    "vectors": (
        *_ON_ALL,
        *("linear", "group norm", "batch norm", "own batch norm", "bilinear", "sometimes"),
        *("alpha dropout", "weight norm", "spectral norm", "experts", "checkpointed", "shared"),
    ),
    "images": (
        *("conv", "batch norm 2d", "batch norm average", "group norm", "instance norm"),
        *("dropout 2d", "depthwise", "transposed", "residual conv", "counter", "scale", "frozen"),
    ),
    "tokens": (
        *_ON_ALL,
        *("lstm", "two lstms", "gru", "rnn", "attention", "transformer", "conv 1d", "batch norm"),
        *("places", "checkpointed"),
    ),
}
WITHOUT_PARAMETERS = frozenset({"dropout", "dropout 2d", "alpha dropout", "counter", "frozen"})
# torch has no kernel in float16 on the CPU, or none whose result is the same each time.
NOT_IN_FP16 = frozenset({"lstm", "two lstms", "gru", "rnn", "transposed"})


class Choices(SimpleNamespace):
    """A program, as one line of a table.

    `has_unused`: there is a parameter that nothing uses, and one that is fixed from the start;
    `clip` ``"look"``: an infinite norm; `freezes_at`, `thaws_at`, `evaluates_at`: steps before
    which the first layer is fixed, is not, and normalization is in ``eval()``; −1: never.
    """

    @property
    def steps_per_epoch(self) -> int:
        """Global batches of an epoch."""
        return -(-self.num_samples // self.batch_size)

    @property
    def num_steps(self) -> int:
        """Of the whole run, if nothing stops it."""
        return self.steps_per_epoch * self.epochs

    def __str__(self) -> str:
        told = {k: v for k, v in vars(self).items() if v not in ("none", -1, False)}
        return ", ".join(f"{name}={value!r}" for name, value in told.items())


def choose(seed: int) -> Choices:
    """Choose a program; nothing else is random in it."""
    draw = random.Random(seed)
    chosen: dict[str, Any] = {"seed": seed}
    chosen |= _what_is_computed(draw)
    chosen |= _how_it_is_updated(draw, chosen)
    chosen |= _what_is_read(draw)
    chosen |= _what_happens_on_the_way(draw, chosen)
    return Choices(**chosen)


def _what_is_computed(draw: random.Random) -> dict[str, Any]:
    kind = draw.choice(KINDS)
    precision = draw.choice(PRECISIONS)
    left_out = NOT_IN_FP16 if precision == "fp16" else frozenset()
    known = [block for block in BLOCKS[kind] if block not in left_out]
    return {
        "loop": draw.choice(("trainer", "trainer", "run")),
        "kind": kind,
        "precision": precision,
        "blocks": tuple(draw.choice(known) for _ in range(draw.randint(1, 4))),
        "is_tied": kind == "tokens" and draw.random() < 0.4,
        "has_unused": draw.random() < 0.3,
        "loss": draw.choice(LOSSES),
        "is_channels_last": kind == "images" and draw.random() < 0.3,
    }


def _how_it_is_updated(draw: random.Random, chosen: dict[str, Any]) -> dict[str, Any]:
    optimizer = draw.choice(OPTIMIZERS)
    schedule = draw.choice(SCHEDULES)
    if schedule == "cyclic momentum" and "momentum" not in optimizer:
        schedule = "cosine"
    each_step = ("one cycle", "cyclic momentum", "warm restarts")
    every = "step" if schedule in each_step else draw.choice(("step", "epoch"))
    clips = ("none", "none", "norm", "value", "look")
    if optimizer == "adafactor":
        # torch's divides by the number of elements, of which one parameter of `scale` has none.
        chosen["blocks"] = tuple(b if b != "scale" else "counter" for b in chosen["blocks"])
    return {
        "optimizer": optimizer,
        "num_groups": 1 if optimizer == "muon" else draw.choice((1, 1, 2)),
        "schedule": schedule,
        "schedule_every": "epoch" if schedule == "plateau" else every,
        "clip": draw.choice(clips),
    }


def _what_is_read(draw: random.Random) -> dict[str, Any]:
    shards = draw.randint(4, 9)
    batch_size = draw.randint(shards, 2 * shards + 4)
    # Most epochs end with a batch of so few samples that some shards are empty.
    rest = draw.randint(1, shards - 1) if draw.random() < 0.7 else draw.randint(0, batch_size - 1)
    dataset = draw.choice(DATASETS)
    is_stream = dataset in ("stream", "parts")
    sampler = "none" if is_stream else draw.choice(SAMPLERS)
    return {
        "shards": shards,
        "batch_size": batch_size,
        "num_samples": batch_size * draw.randint(2, 4) + rest,
        "dataset": dataset,
        "draws": "none" if dataset in ("tensors", "subset", "list") else draw.choice(DRAWING),
        "sampler": sampler,
        "shuffle": None if is_stream or sampler != "none" else draw.choice((None, True, False)),
        "loader_workers": draw.choice((0, 0, 2)),
    }


def _what_happens_on_the_way(draw: random.Random, chosen: dict[str, Any]) -> dict[str, Any]:
    epochs = draw.randint(2, 4)
    num_steps = epochs * -(-chosen["num_samples"] // chosen["batch_size"])
    freezes_at = draw.randrange(1, num_steps) if draw.random() < 0.4 else -1
    if chosen["is_tied"] and WITHOUT_PARAMETERS.issuperset(chosen["blocks"]):
        freezes_at = -1  # nothing would be left to train
    thaws = freezes_at >= 0 and draw.random() < 0.5
    evaluates_at = draw.randrange(1, num_steps) if draw.random() < 0.2 else -1
    return {
        "epochs": epochs,
        "fits": draw.choice((1, 1, 2)),
        "validate_every": draw.choice((0, 2, 3)),
        "freezes_at": freezes_at,
        "thaws_at": min(freezes_at + draw.randint(1, 4), num_steps) if thaws else -1,
        "evaluates_at": evaluates_at,
        "has_ema": draw.random() < 0.3,
        "has_early_stopping": draw.random() < 0.2,
        "predicts_in_between": draw.random() < 0.4,
        # Drawn last, so that seeds of before keep the rest; the tag `wide` has no batch samplers.
        "cuts_batches": draw.random() < 0.2 and chosen["dataset"] not in ("stream", "parts"),
    }
