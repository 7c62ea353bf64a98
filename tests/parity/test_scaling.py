"""Scaled losses in float16: torch's bits with one shard, skipped steps on all workers alike."""

import functools
import itertools
import math

import pytest
import torch
from tests.parity.plain import check_bits, one_weight, plain_loop, trained, update_by

import unisono

STEPS = 12
autocast = functools.partial(torch.autocast, "cpu", torch.float16)


def scaler():
    """Overflow at first, then grow often."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3)


def train(optimizer_name, shards, steps=STEPS, model_name="cnn", **options):
    grad_scaler = scaler()
    options["precision"] = unisono.Precision("fp16", scaler=grad_scaler)
    trainer = trained(model_name, optimizer_name, shards, steps, **options)
    return trainer, grad_scaler.state_dict()


def found_by(*args, **options):
    trainer, state = train(*args, **options)
    return trainer.digest(), state


def in_plain_torch(optimizer_name, clip_norm, model_name="cnn"):
    """Train as torch's recipe for GradScaler says."""
    grad_scaler, scales = scaler(), []

    def around():
        scales.append(grad_scaler.get_scale())
        return autocast()

    update = update_by(clip_norm=clip_norm, scaler=grad_scaler)
    model = plain_loop(model_name, optimizer_name, STEPS, around=around, update=update)
    return model, grad_scaler.state_dict(), scales


@pytest.mark.slow
@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("optimizer_name", ["adamw", "fused adam", "adafactor"])
def test_one_shard_has_the_bits_of_torchs_recipe(optimizer_name, clip_norm):
    expected, state, scales = in_plain_torch(optimizer_name, clip_norm)
    trainer, seen_state = train(optimizer_name, 1, clip_norm=clip_norm)
    check_bits(trainer, expected)
    assert seen_state == state
    assert min(scales) < scales[0]  # else no step was skipped
    assert any(a < b for a, b in itertools.pairwise(scales))  # else it never grew


@pytest.mark.slow
def test_buffers_are_those_of_skipped_steps_too():
    expected, _, _ = in_plain_torch("adamw", None, "cnn with norm")
    check_bits(train("adamw", 1, model_name="cnn with norm")[0], expected)


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 7])
@pytest.mark.parametrize("phase", ["gradients", "update", "updated"])
def test_a_worker_killed_meanwhile_changes_no_bit_and_no_scale(monkeypatch, phase, step):
    alone = found_by("adamw", 4)
    monkeypatch.setenv("UNISONO_FAULTS", f"kill:rank=1,step={step},at={phase}")
    assert unisono.launch(found_by, "adamw", 4, workers=3) == [alone] * 3


@pytest.mark.slow
def test_the_scale_goes_on_with_a_run_that_is_taken_up_again(tmp_path):
    undisturbed = found_by("adamw", 2)
    for steps in (2, 8):
        train("adamw", 2, steps, directory=tmp_path)
    assert found_by("adamw", 2, directory=tmp_path) == undisturbed


def own_loop(scale, loss):
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    said, _, steps = one_weight(loss, 3, clip_norm=1.0, scaler=grad_scaler)
    return said, grad_scaler.get_scale(), steps


def test_a_step_tells_that_it_was_skipped():
    def loss(output, number):
        return output.mean() * (math.inf if number == 1 else 1.0)

    said, scale, steps = own_loop(8.0, loss)
    assert [skipped for skipped, _, _ in said] == [False, True, False]
    assert [done for _, done, _ in said] == [True] * 3
    assert said[1][2] == math.inf
    assert said[0][2] == said[2][2] == pytest.approx(math.sqrt(3.0))
    assert (scale, steps) == (4.0, 3)


@pytest.mark.slow
def test_gradients_that_no_scale_makes_finite_are_an_error_everywhere():
    def fail():
        with pytest.raises(
            unisono.errors.NonFiniteLossError, match=r"step 1 .* \(the loss of shard 0 is nan\)"
        ) as caught:
            own_loop(2.0**-15, lambda output, number: output.mean() * math.nan)
        return caught.value.shard, caught.value.step

    assert unisono.launch(fail, workers=2) == [(0, 1)] * 2


@pytest.mark.slow
def test_the_user_is_told_once(capsys):
    train("adamw", 2)
    assert (
        capsys.readouterr().out.count("is skipped because its gradients overflow in float16") == 1
    )


@pytest.mark.parametrize(
    ("dtype", "scaler", "kind", "words"),
    [
        (torch.float32, 3, TypeError, "`scaler` must be a torch.amp.GradScaler"),
        (torch.float16, scaler(), ValueError, "must not be in float16"),
    ],
)
def test_what_cannot_be_scaled_is_refused(dtype, scaler, kind, words):
    model = torch.nn.Linear(2, 1, dtype=dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(kind, match=words):
        unisono.Run(model, optimizer, shards=1, scaler=scaler)


def test_the_default_dtype_has_no_part_in_scaling():
    def scaled_weights():
        torch.manual_seed(3)
        model = torch.nn.Linear(4, 2, dtype=torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = unisono.Run(model, optimizer, shards=2, scaler=scaler())
        for step in run.steps(torch.ones(8, 4, dtype=torch.float32), batch_size=4, steps=12):
            with step:
                for batch in step.shards:
                    with autocast():
                        loss = model(batch).float().square().mean()
                    step.backward(loss)
        return model.weight.detach().clone()

    expected = scaled_weights()
    torch.set_default_dtype(torch.float64)
    try:
        assert torch.equal(scaled_weights(), expected)
    finally:
        torch.set_default_dtype(torch.float32)
