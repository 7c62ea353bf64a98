"""Clipped gradients: the bits of torch's functions with one shard, and the same on any workers."""

import math

import pytest
import torch
from tests.parity import cases
from tests.parity.plain import (
    check_bits,
    made,
    mean_of,
    one_weight,
    plain_loop,
    trained,
    update_by,
)
from tests.promises import promise

import unisono
from unisono.engine.state.contents import digest_of

CLIPS = {"norm": {"clip_norm": 0.05}, "value": {"clip_value": 0.003}}
OPTIMIZERS = ("adamw", "adafactor")  # in pieces, and whole by the leader
STEPS = 7


@promise("one-result.2")
@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("clip", CLIPS)
def test_one_shard_has_the_bits_of_torchs_own_clipping(optimizer_name, clip):
    clipped = trained("cnn", optimizer_name, 1, STEPS, **CLIPS[clip])
    update = update_by(**CLIPS[clip])
    check_bits(clipped, plain_loop("cnn", optimizer_name, STEPS, update=update))
    assert clipped.digest() != trained("cnn", optimizer_name, 1, STEPS).digest()


class Tempered(torch.nn.Module):
    """Float64 beside a temperature in float32, whose shape counts where the norm is float64."""

    def __init__(self, shape):
        super().__init__()
        self.linear = torch.nn.Linear(3, 2, dtype=torch.float64)
        self.temperature = torch.nn.Parameter(torch.ones(shape))

    def forward(self, x):
        return (self.linear(x) * self.temperature).square().mean()


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_temperature_without_dimensions_has_the_bits_of_torchs_clipping(shape):
    data = torch.randn(48, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def make():
        torch.manual_seed(11)
        model = Tempered(shape)
        return model, torch.optim.Adam(model.parameters(), lr=0.1)

    plain, plain_optimizer = make()
    for batch in data.split(4):
        plain_optimizer.zero_grad()
        plain(batch).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
        plain_optimizer.step()
    model, optimizer = make()
    run = unisono.Run(model, optimizer, shards=1, clip_norm=0.01)
    for step in run.steps(data, batch_size=4, epochs=1, shuffle=False):
        with step:
            for batch in step.shards:
                step.backward(model(batch))
    assert digest_of(model, optimizer) == digest_of(plain, plain_optimizer)


def steps_of(clip_norm, loss):
    said, weight, _ = one_weight(lambda output, _: loss(output), 2, clip_norm=clip_norm)
    return [norm for _, _, norm in said], weight


def test_a_step_tells_the_norm_before_it_was_clipped():
    norms, weight = steps_of(0.5, lambda output: 2.0 * output.mean())
    assert norms == pytest.approx([math.sqrt(12.0)] * 2)
    assert torch.allclose(weight, torch.full((1, 3), 1.0 - 2 * 0.5 / math.sqrt(3.0)))
    assert steps_of(None, torch.mean)[0] == [None, None]


def test_an_infinite_norm_is_only_looked_at():
    norms, weight = steps_of(math.inf, lambda output: 2.0 * output.mean())
    assert norms == pytest.approx([math.sqrt(12.0)] * 2)
    assert torch.equal(weight, steps_of(None, lambda output: 2.0 * output.mean())[1])


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"clip_norm": 0}, ValueError, "`clip_norm` must be above 0"),
        ({"clip_norm": float("nan")}, ValueError, "`clip_norm` must be above 0"),
        ({"clip_value": float("nan")}, ValueError, "`clip_value` must be above 0 and finite"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, ValueError, "in one way"),
    ],
)
def test_wrong_limits_are_refused(options, kind, words):
    model = torch.nn.Linear(2, 1)
    with pytest.raises(kind, match=words):
        unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def test_complex_parameters_are_clipped_by_their_norm_alone():
    model = torch.nn.Linear(2, 1, dtype=torch.complex64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    unisono.Run(model, optimizer, clip_norm=1.0)
    with pytest.raises(ValueError, match=r"real parameters alone.*of torch\.complex64.*clip_norm"):
        unisono.Run(model, optimizer, clip_value=1.0)


def test_the_norm_is_taken_in_the_models_order_whatever_that_of_the_groups():
    """A sum of norms depends on the order of its terms; a loop that clips by groups has another."""

    def grouped_parameters(model):
        parameters = list(model.parameters())
        return parameters[::-2], parameters[-2::-2]

    def loop(ordered):
        model, data, loss, _ = made("cnn", "sgd with momentum")
        mean_of(loss, model, data[list(range(cases.BATCH_SIZE))]).backward()
        return torch.nn.utils.clip_grad_norm_(ordered(model), 0.05).item()

    model, data, loss, _ = made("cnn", "sgd with momentum")
    groups = [{"params": parameters} for parameters in grouped_parameters(model)]
    optimizer, norms = torch.optim.SGD(groups, lr=0.1), []

    class Norms(unisono.callbacks.Callback):
        def on_step_end(self, fit, step):
            norms.append(step.gradient_norm)

    trainer = unisono.Trainer(
        model, optimizer, loss, shards=1, seed=5, clip_norm=0.05, callbacks=[Norms()]
    )
    trainer.fit(data, batch_size=cases.BATCH_SIZE, steps=1, shuffle=False)
    assert norms == [loop(lambda model: model.parameters())]
    by_groups = loop(lambda model: grouped_parameters(model)[0] + grouped_parameters(model)[1])
    assert norms == pytest.approx([by_groups])
