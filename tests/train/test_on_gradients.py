"""Gradients in the program's hands: between the sum and the update, the same on every worker."""

import pytest
import torch
from tests.classified import by_sign
from tests.classified import cross_entropy as loss_of
from torch import nn

import unisono


def data():
    return by_sign(30, 6, seed=5)


def noisy(step, gradients):
    """Clip each layer by itself, add noise, and log nothing."""
    for gradient in gradients.values():
        gradient.mul_(min(1.0, 0.2 / float(gradient.norm() + 1e-6)))
        gradient.add_(torch.randn_like(gradient), alpha=0.01 / (1 + step))


def replaced(step, gradients):
    """Put new weights' gradients in the dict, and leave those of biases as they are."""
    for name, gradient in gradients.items():
        if "weight" in name:
            gradients[name] = gradient.sign()


def skipping(step, gradients):
    """Skip the updates whose gradients are large."""
    return {} if step in (0, 3) else None


HOOKS = {each.__name__: each for each in (noisy, replaced, skipping)}


def make(hook, shards, optimizer="adam", **options):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
    kinds = {"adam": torch.optim.Adam, "adafactor": torch.optim.Adafactor}
    made = kinds[optimizer](model.parameters(), lr=0.02)
    return unisono.Trainer(
        model, made, loss_of, shards=shards, on_gradients=HOOKS.get(hook, hook), **options
    )


def train(hook, shards=4, steps=6, optimizer="adam", **options):
    trainer = make(hook, shards, optimizer, **options)
    trainer.fit(data(), batch_size=12, steps=steps, shuffle=False)
    return trainer.digest()


@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_one_shard_has_the_bits_of_a_plain_loop(clip_norm):
    plain = make("replaced", 1)
    model, optimizer = plain.run.model, plain.run.optimizer
    dataset = data()
    for step in range(6):
        start = step * 12 % 36
        optimizer.zero_grad()
        loss_of(model, dataset[start : start + 12]).backward()
        for name, parameter in model.named_parameters():
            if "weight" in name:
                parameter.grad.sign_()
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
    trainer = make("replaced", 1, clip_norm=clip_norm)
    trainer.fit(dataset, batch_size=12, steps=6, shuffle=False)
    for mine, theirs in zip(trainer.run.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    "exchange",
    [
        lambda step, g: {"a": g["b"], "b": g["a"]},
        lambda step, g: {"a": -g["b"], "b": g["a"]},
        lambda step, g: {"b": g["a"].view(-1), "a": -g["b"]},
        lambda step, g: g.update(a=g["b"], b=g["a"]),
    ],
)
def test_gradients_may_be_exchanged(exchange):
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))

        def forward(self, inputs):
            return inputs * self.a + 2 * inputs * self.b

    model = Two()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = unisono.Trainer(
        model, optimizer, lambda model, x: model(x).mean(), shards=1, on_gradients=exchange
    )
    trainer.fit([torch.ones(3)], batch_size=1, steps=1)
    sign = exchange(0, {"a": torch.ones(1), "b": torch.ones(1)}) or {"a": torch.ones(1)}
    assert torch.allclose(model.a, 1 - sign["a"] * 2 / 3)
    assert torch.allclose(model.b, torch.full((3,), 1 - 1 / 3))


def test_an_update_that_is_skipped_moves_no_count():
    trainer = make("skipping", 3, clip_norm=1.0)
    trainer.fit(data(), batch_size=12, steps=6, shuffle=False)
    assert {float(state["step"]) for state in trainer.run.optimizer.state.values()} == {4.0}


def test_it_sees_mean_gradients_by_name_once_a_step():
    seen = []

    def see(step, gradients):
        seen.append((step, {name: gradient.clone() for name, gradient in gradients.items()}))
        assert not torch.is_grad_enabled()

    trainer = make(see, 3)
    dataset = data()
    loss_of(trainer.run.model, dataset[:12]).backward()
    expected = {name: p.grad.clone() for name, p in trainer.run.model.named_parameters()}
    trainer.fit(dataset, batch_size=12, steps=4, shuffle=False)
    assert [step for step, _ in seen] == [0, 1, 2, 3]
    assert seen[0][1].keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.allclose(seen[0][1][name], gradient, atol=1e-6), name


def test_seeing_alone_changes_no_bit():
    assert train(lambda step, gradients: None) == train(None)


def test_it_is_not_called_in_a_step_that_is_skipped():
    seen = []
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)

    def loss(model, batch):
        # In float16 that overflows until the scale has come down.
        return loss_of(model, batch) * 64.0

    torch.manual_seed(3)
    model = nn.Linear(6, 2)
    trainer = unisono.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        loss,
        shards=2,
        precision=unisono.Precision("fp16", scaler=scaler),
        on_gradients=lambda step, gradients: seen.append(
            all(bool(gradient.isfinite().all()) for gradient in gradients.values())
        ),
    )
    trainer.fit(data(), batch_size=12, steps=8, shuffle=False)
    assert seen
    assert all(seen)


@pytest.mark.parametrize(
    ("returned", "kind", "words"),
    [
        (3, TypeError, "must return None or gradients by name, but returned a int"),
        ({"nobody": torch.zeros(1)}, ValueError, "returned 'nobody'"),
        ({"0.weight": torch.zeros(1)}, ValueError, r"returned torch.Size\(\[1\]\) for '0.weight'"),
        ({"0.weight": 3.0}, ValueError, "returned float for '0.weight'"),
    ],
)
def test_what_is_no_gradient_is_refused(returned, kind, words):
    with pytest.raises(kind, match=words):
        train(lambda step, gradients: returned)


def test_what_does_not_fit_is_refused_before_training(monkeypatch):
    with pytest.raises(TypeError, match="`on_gradients` must be a function"):
        make(3, 2)
    with pytest.raises(TypeError, match=r"of \(step, gradients\), but takes \(g\)"):
        make(lambda g: None, 2)
    monkeypatch.setenv("UNISONO_EXCHANGE", "shared")
    with pytest.raises(ValueError, match="`on_gradients` needs one for each"):
        make("noisy", 2)
