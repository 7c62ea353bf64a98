"""A model cut into stages, one worker each: the bits of one process, whoever is lost."""

import functools
import json
import os
import sys

import pytest
import torch
import torch.nn.functional as F
from tests.classified import taken
from tests.parity import cases
from tests.stages import cut_models
from tests.warm import processes
from torch import nn
from torch.utils.data import TensorDataset

import unisono

WHOLE_BLOCKS = {
    "0": ["embedding", "position", "blocks.0", "blocks.1"],
    "1": ["scale", "blocks.2", "blocks.3", "norm", "head"],
}
OPTIONS = {"recomputed": {"balance": WHOLE_BLOCKS}}
PARITY = [
    ("cnn with norm and dropout", "fused adam", 4),
    ("gpt", "two groups", 3),
    ("cnn with norm and dropout", "own", 4),
    ("mixed", "adamw", 4),
    ("sometimes unused", "sgd with momentum", 8),
    ("lstm with bag", "adam", 4),
    ("tied", "adamw", 3),
]
STEPS = 8


@functools.cache
def alone(name, **options):
    """What one process without stages makes of a model."""
    return cut_models.train(name, **options)


def in_stages(name, *, workers, stages, **options):
    options = OPTIONS.get(name, {}) | options
    call = functools.partial(cut_models.train, name, **options)
    return unisono.launch(call, workers=workers, stages=stages)


@pytest.mark.parametrize(
    "name", ["images", *(pytest.param(n, marks=pytest.mark.slow) for n in cut_models.NAMES[1:])]
)
def test_two_stages_have_the_bits_of_one_process(name):
    assert in_stages(name, workers=2, stages=2) == [alone(name)] * 2


# Each model and each form once; every pair of them is `long`.
PAIRS = [("images", 6, 3), ("gpt", 4, 2), ("unet", 3, 3)]
OTHER_PAIRS = [
    (name, *form)
    for name in ("images", "gpt", "unet")
    for form in ((4, 2), (3, 3), (6, 3))
    if (name, *form) not in PAIRS
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "workers", "stages"),
    [*PAIRS, *(pytest.param(*pair, marks=pytest.mark.long) for pair in OTHER_PAIRS)],
)
def test_more_stages_and_replicas_have_the_same_bits(name, workers, stages):
    assert in_stages(name, workers=workers, stages=stages) == [alone(name)] * workers


@pytest.mark.slow
def test_the_number_of_shards_in_flight_changes_no_bit():
    for in_flight in (1, 2, 7):
        assert in_stages("images", workers=3, stages=3, shards_in_flight=in_flight) == (
            [alone("images")] * 3
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"kind": "adafactor"},
        {"clip_norm": 0.5},
        {"precision": "bf16", "name": "images"},
        {"precision": "fp16", "name": "images"},
        {"channels_last": True, "name": "images"},
        {"shards": 4, "batch_size": 7},  # shards of different sizes, and none at all
    ],
)
def test_options_change_nothing(options):
    options = dict(options)
    name = options.pop("name", "gpt")
    assert in_stages(name, workers=2, stages=2, **options) == [alone(name, **options)] * 2


def train_cases():
    return cases.train_all(PARITY, STEPS)


@pytest.mark.slow
def test_parity_cases_have_the_bits_of_one_process():
    expected = train_cases()
    for digests in unisono.launch(train_cases, workers=2, stages=2):
        assert dict(zip(PARITY, digests, strict=True)) == dict(zip(PARITY, expected, strict=True))


def own_loop():
    model, loss, data = cut_models.make("images")
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    run = unisono.Run(model, optimizer, shards=4, seed=1)
    model.train()
    means = []
    for step in taken(run, loss, data, batch_size=16, steps=5):
        means.append(step.means)
    return means, {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.slow
def test_custom_loops_are_cut_too():
    assert unisono.launch(own_loop, workers=2, stages=2) == [own_loop()] * 2


def run_program(name, options=None, *, arguments=("-n", "2", "--stages", "2"), faults=""):
    # As a module: with PYTHONPATH set, no fork server could be a fork of what has loaded torch.
    program = ("-m", cut_models.__name__, name, json.dumps(options or {}))
    command = [sys.executable, "-m", "unisono", "run", *arguments, *program]
    environ = {**os.environ, "UNISONO_FAULTS": faults}
    return processes.run(command, timeout=120, env=environ, cwd=processes.REPOSITORY)


def result_of(done):
    lines = [line for line in done.stdout.splitlines() if line.startswith("result: ")]
    assert len(lines) == 1, done.stdout + done.stderr
    return json.loads(lines[0].removeprefix("result: "))


PLACES = ("begin", "shard", "backward", "gradients", "sums", "update", "updated", "commit")


# Each place once, on the stages by turns; the rest in `make chaos`.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("at", "rank"),
    [
        pytest.param(at, rank, marks=[pytest.mark.long] * (number % 2 != rank))
        for number, at in enumerate([*PLACES, "snapshot"])
        for rank in (0, 1)
    ],
)
def test_a_worker_killed_anywhere_is_replaced_and_changes_no_bit(at, rank, tmp_path):
    # A checkpoint has a snapshot taken before step 2, which time alone may not.
    options = {"directory": str(tmp_path), "checkpoint_every": 2} if at == "snapshot" else {}
    options = {"epochs": 3, **options}
    done = run_program("images", options, faults=f"kill:rank={rank},step=2,at={at}")
    assert result_of(done) == alone("images", epochs=3)
    assert "a replacement is starting" in done.stderr
    assert "joined" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("faults", "options"),
    [
        ("kill:rank=3,step=2,at=backward", {}),
        ("kill:rank=0,step=1,at=updated; kill:rank=2,step=4,at=shard", {}),
        ("kill:rank=1,step=2,at=update; kill:rank=2,step=2,at=update", {}),
        ("kill:rank=0,step=3,at=updated", {"kind": "adafactor"}),
    ],
)
def test_a_replica_that_is_whole_waits_for_the_other(faults, options):
    arguments = ("-n", "4", "--stages", "2")
    options = {"epochs": 3, **options}
    done = run_program("gpt", options, arguments=arguments, faults=faults)
    assert result_of(done) == alone("gpt", **options)


@pytest.mark.slow
def test_a_checkpoint_of_stages_goes_on_without_and_the_other_way_round(tmp_path):
    expected = alone("images", epochs=4)
    for first, second in ((2, 1), (1, 2)):
        options = {"directory": str(tmp_path / str(first))}
        for stages, epochs in ((first, 2), (second, 4)):
            arguments = ("-n", "2", "--stages", str(stages))
            done = run_program("images", {**options, "epochs": epochs}, arguments=arguments)
        assert result_of(done)["digest"] == expected["digest"]


@pytest.mark.slow
def test_the_bubble_is_told():
    done = run_program("images", {"epochs": 1})
    said = done.stdout + done.stderr
    assert "pipeline of 2 stages, 5 shards for each replica: they waited" in said
    assert "17% if all took equally long" in said


@pytest.mark.slow
def test_without_replacement_a_lost_stage_ends_the_job():
    arguments = ("-n", "2", "--stages", "2", "--no-replace")
    done = run_program("images", arguments=arguments, faults="kill:rank=1,step=2")
    assert done.returncode != 0
    assert "a stage of the model that nobody else has" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("-n", "3", "--stages", "2"), "`--stages` must divide the number of workers (3)"),
        (("-n", "2", "--stages", "0"), "`--stages` must be a whole number of at least 1"),
    ],
)
def test_the_command_line_refuses_what_does_not_fit(arguments, words):
    done = run_program("images", arguments=arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_launch_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match="`stages` must divide the number of workers"):
        unisono.launch(own_loop, workers=3, stages=2)


class Twice(nn.Module):
    """Two layers, and something in between. Final."""

    def __init__(self, between):
        super().__init__()
        self.first, self.last, self.between = nn.Linear(4, 4), nn.Linear(4, 4), between

    def forward(self, x):
        return self.between(self.first(x), self.last)


def fit(between, loss=None, **options):
    torch.manual_seed(0)
    model = Twice(between)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    data = TensorDataset(torch.randn(8, 4))
    options = {"shards": 2, **options}
    trainer = unisono.Trainer(
        model, optimizer, loss or (lambda m, b: m(b[0]).pow(2).mean()), **options
    )
    trainer.fit(data, batch_size=8, steps=3)
    return trainer.digest()


def reads_a_value(h, last):
    return last(h) * (2.0 if h.sum().item() > 0 else 1.0)


def draws_elsewhere(h, last):
    return last(h) + torch.rand(4, generator=torch.Generator().manual_seed(1))


def draws_for_a_stage(h, last):
    return last(h + torch.empty_like(h).normal_(generator=torch.Generator().manual_seed(1)))


def looks_at_an_old_view(h, last):
    row = h[0]
    h += last(h)
    return h + row


def hooks_late(h, last):
    out = last(h)
    h.register_hook(lambda gradient: 2 * gradient)
    return out + h


def penalizes(model, batch):
    out = model(batch[0])
    (gradient,) = torch.autograd.grad(out.sum(), [model.first.weight], create_graph=True)
    return out.pow(2).mean() + gradient.pow(2).mean()


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (reads_a_value, "`item` cannot be known without them"),
        (draws_for_a_stage, "random numbers must come from torch's default generator"),
        (looks_at_an_old_view, "must have no views from before"),
        (hooks_late, "a hook must be registered in the stage that computes the tensor"),
    ],
)
def test_what_cannot_be_cut_is_refused(between, words):
    with pytest.raises(RuntimeError, match=words):
        unisono.launch(functools.partial(fit, between), workers=2, stages=2)


def test_gradients_within_the_loss_function_are_refused():
    between = functools.partial(fit, lambda h, last: last(h), penalizes)
    with pytest.raises(RuntimeError, match="gradients must be left to the run"):
        unisono.launch(between, workers=2, stages=2)


def test_a_function_that_another_stage_begins_within_is_not_checkpointed():
    with pytest.raises(RuntimeError, match="a function that is checkpointed"):
        cut = {"0": ["embedding", "position", "blocks.0.norm", "blocks.0.after"], "1": [""]}
        unisono.launch(
            functools.partial(cut_models.train, "recomputed", balance=cut), workers=2, stages=2
        )


def changes_in_place(h, last):
    more = last(h * 1.5)
    h += more
    h *= 2
    return h


def noise_between(h, last):
    return last(h) + 0.1 * torch.rand(4) + 0.1 * torch.rand(4).mul_(2)


class Doubled(torch.autograd.Function):
    """A function of the program's own."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


def own_function(h, last):
    return last(Doubled.apply(h)) + Doubled.apply(last(h))


@pytest.mark.parametrize(
    "between", [changes_in_place, noise_between, own_function, draws_elsewhere]
)
def test_what_can_be_cut_has_the_bits_of_one_process(between):
    call = functools.partial(fit, between)
    assert unisono.launch(call, workers=2, stages=2) == [fit(between)] * 2


def not_finite(model, batch):
    out = model(batch[0]).pow(2).mean()
    return out * torch.where(batch[0][0, 0] > -99, float("nan"), 1.0)


def test_a_loss_that_is_not_finite_is_raised():
    call = functools.partial(fit, lambda h, last: last(h), not_finite)
    with pytest.raises(unisono.NonFiniteLossError, match="the loss must be finite"):
        unisono.launch(call, workers=2, stages=2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exchange": "staged"}, '`exchange` must be "shared"'),
        ({"devices": ["cpu", "cpu"], "shards": 4}, "`devices` must be left out"),
        ({"balance": "speed"}, '`balance` must be "memory" or the names of layers'),
        ({"balance": {0: ["first"]}}, "says nothing of `last`"),
        ({"audit_every": 1}, "`audit_every` must be left out where workers compute stages"),
        ({"closure": True}, "`closure` must be left out where workers compute stages"),
        ({"compile": True}, "`compile` must be left out where workers compute stages"),
        ({"shards_in_flight": 0}, "`shards_in_flight` must be at least 1"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, words):
    call = functools.partial(fit, lambda h, last: last(h), **options)
    with pytest.raises(ValueError, match=words):
        unisono.launch(call, workers=2, stages=2)


def not_scalar(model, batch):
    return F.relu(model(batch[0]))


def test_a_loss_that_is_no_scalar_is_refused():
    call = functools.partial(fit, lambda h, last: last(h), not_scalar)
    with pytest.raises(ValueError, match="must be a scalar"):
        unisono.launch(call, workers=2, stages=2)
