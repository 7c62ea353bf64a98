"""Programs that a reviewer broke the promise with are refused, or do what they should."""

import io

import pytest
import torch
from tests.classified import at_random, taken
from tests.classified import cross_entropy as loss_of
from torch import nn

import unisono
from unisono.engine.state.contents import check_contents
from unisono.runtime.device import host


def data(num_samples=43):
    return at_random(num_samples, 8, 4, seed=3)


class Counting(nn.Module):
    """Counts its forward passes in every mode, and lets the count matter."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 150), nn.ReLU(), nn.Linear(150, 4))
        self.register_buffer("count", torch.zeros(()))
        self.alias = [self.count]

    def forward(self, inputs):
        self.alias[0] += 1
        return self.net(inputs) + 0.01 * self.count


def make(model=None, optimizer=torch.optim.Adam, loss=loss_of, shards=4, **options):
    torch.manual_seed(0)
    model = Counting() if model is None else model()
    made = optimizer(model.parameters(), lr=0.01)
    return unisono.Trainer(model, made, loss, shards=shards, **options)


def clip_around_step(trainer):
    """Put clipping around the optimizer's step, as recipes do."""
    optimizer = trainer.run.optimizer
    inner = optimizer.step

    def step(closure=None):
        nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.1)
        inner(closure)
        optimizer.zero_grad()

    optimizer.step = step


def loop(trainer, after, steps=3, loss=loss_of):
    for _ in taken(trainer.run, loss, data(), batch_size=10, steps=steps):
        after(trainer)


def add_a_group(trainer):
    trainer.run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def register_a_hook(trainer):
    trainer.run.optimizer.register_step_pre_hook(lambda *_: None)


@pytest.mark.parametrize(
    ("after", "message"),
    [
        (register_a_hook, "must be in place before a loop"),
        (clip_around_step, "must be in place before a loop"),
        (add_a_group, "must keep its parameter groups"),
    ],
)
def test_what_would_depend_on_the_workers_is_refused_in_a_loop(after, message):
    with pytest.raises(RuntimeError, match=message):
        loop(make(), after)


def test_clipping_around_step_has_the_bits_of_clip_norm():
    wrapped, clipped = make(), make(clip_norm=0.1)
    clip_around_step(wrapped)
    for trainer in (wrapped, clipped):
        trainer.fit(data(), batch_size=10, steps=3)
    assert wrapped.digest() == clipped.digest()


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.Adafactor])
def test_clearing_gradients_between_steps_or_in_the_loss_does_no_harm(optimizer):
    plain, clearing = make(optimizer=optimizer), make(optimizer=optimizer)

    def clear(trainer):
        trainer.run.optimizer.zero_grad()
        trainer.run.model.zero_grad(set_to_none=False)

    def loss(model, batch):
        clear(clearing)
        return loss_of(model, batch)

    loop(plain, lambda _: None)
    loop(clearing, clear, loss=loss)
    assert plain.digest() == clearing.digest()


def gradients_of_the_inputs(clears):
    """Adversarial samples and a gradient penalty, which recipes find in either way."""
    trainer = make(lambda: nn.Linear(8, 4))

    def loss(model, batch):
        inputs = batch[0].requires_grad_()
        outputs = model(inputs).square().mean()
        if clears:
            outputs.backward()
            gradient = inputs.grad
            trainer.run.optimizer.zero_grad()
        else:
            (gradient,) = torch.autograd.grad(outputs, inputs)
        (slope,) = torch.autograd.grad(model(inputs).sum(), inputs, create_graph=True)
        return loss_of(model, (inputs.detach() + gradient.sign(), batch[1])) + slope.norm()

    loop(trainer, lambda _: None, loss=loss)
    return trainer.digest()


def test_gradients_of_inputs_may_be_found():
    assert gradients_of_the_inputs(clears=True) == gradients_of_the_inputs(clears=False)


class Remaking(nn.Linear):
    """Puts something else in the place of a buffer."""

    def __init__(self, there, change):
        super().__init__(8, 4)
        self.register_buffer("mean", there)
        self.change = change

    def forward(self, inputs):
        self.change(self, inputs)
        return super().forward(inputs)


def fill(model, inputs):
    model.mean = inputs.mean(0)


def shrink(model, inputs):
    model.mean = inputs.mean()


def forget(model, inputs):
    if hasattr(model, "mean"):
        del model.mean


class Making(nn.Linear):
    """Makes a buffer and a layer when it is called for the first time."""

    def __init__(self):
        super().__init__(8, 4)

    def forward(self, inputs):
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(8))
            self.scale = nn.Linear(8, 8)
        if self.training:
            self.mean.lerp_(inputs.mean(0), 0.1)
        return super().forward(self.scale(inputs) - self.mean)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: Remaking(None, fill), "`mean` of Remaking was None"),
        (lambda: Remaking(torch.zeros(8), shrink), "`mean` must stay .* but became"),
        (lambda: Remaking(torch.zeros(8), forget), "`mean` must stay .* but became None"),
        (Making, r"must keep its layers.*`scale\.weight` has been added.*run the model once"),
    ],
)
def test_models_that_change_their_form_are_refused(model, message):
    with pytest.raises(RuntimeError, match=message):
        make(model).fit(data(), batch_size=10, steps=2)


def train_after_making():
    model = Making()
    torch.manual_seed(0)
    model(torch.zeros(1, 8))
    trainer = make(lambda: model)
    trainer.fit(data(), batch_size=10, steps=2)
    model.pre = model.scale
    del model.scale
    model.scale = nn.Sequential(model.pre, nn.ReLU())
    trainer.fit(data(), batch_size=10, steps=4)
    return trainer.digest()


def test_a_model_that_has_been_run_once_may_be_trained_and_changed_between_fits():
    assert train_after_making()


class Masking(nn.Linear):
    """Makes a buffer when it is evaluated for the first time."""

    def __init__(self):
        super().__init__(8, 4)

    def forward(self, inputs):
        if not self.training and not hasattr(self, "mask"):
            self.register_buffer("mask", torch.ones(8), persistent=False)
        return super().forward(inputs)


def test_a_buffer_that_validation_makes_is_let_through():
    make(Masking).fit(data(), batch_size=10, steps=4, validate=data(), validate_every=2)


def test_a_buffer_keeps_its_identity():
    trainer = make(shards=1)
    model = trainer.run.model
    trainer.fit(data(), batch_size=10, steps=3)
    assert model.alias[0] is model.count
    assert model.count == 3


def a_view_of_a_buffer(model):
    model.register_buffer("history", torch.zeros(5, 3))
    model.register_buffer("newest", model.history[1])


def a_view_of_a_weight(model):
    model.register_buffer("first_row", model.weight.detach()[0])


@pytest.mark.parametrize(
    ("change", "names"),
    [(a_view_of_a_buffer, "`history` and `newest`"), (a_view_of_a_weight, "`first_row`")],
)
def test_buffers_over_the_memory_of_others_are_refused(change, names):
    model = nn.Linear(3, 3)
    change(model)
    with pytest.raises(ValueError, match=rf"must be the same object or lie apart, .*{names}"):
        check_contents(model, torch.optim.SGD(model.parameters()), host())


def test_buffers_that_are_the_same_or_lie_apart_are_taken():
    model = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)])
    mask, both = torch.ones(3), torch.zeros(2, 3)
    for number, layer in enumerate(model):
        layer.register_buffer("mask", mask)
        layer.register_buffer("row", both[number] if number < 2 else None)
        layer.register_buffer("empty", mask[:0])
    check_contents(model, torch.optim.SGD(model.parameters()), host())


def test_a_step_is_used_once():
    trainer = make()
    model = trainer.run.model
    with pytest.raises(RuntimeError, match="must be entered once"):
        for step in trainer.run.steps(data(), batch_size=10, steps=2):
            for _ in range(2):
                with step:
                    for batch in step.shards:
                        step.backward(loss_of(model, batch))


def turn_momentum_on(trainer):
    trainer.run.optimizer.param_groups[0]["momentum"] = 0.9


def test_an_optimizer_that_keeps_other_state_under_way_is_refused():
    with pytest.raises(RuntimeError, match="must not change which state it keeps"):
        loop(make(optimizer=torch.optim.SGD), turn_momentum_on)


def test_state_that_does_not_fit_the_options_is_refused():
    trainer = make()
    trainer.fit(data(), batch_size=10, steps=2)
    trainer.run.optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="state must fit its options"):
        trainer.fit(data(), batch_size=10, steps=4)


def saved_size(thing):
    out = io.BytesIO()
    torch.save(thing, out)
    return len(out.getvalue())


@pytest.mark.slow
def test_saving_a_state_dict_saves_no_more():
    trainer = make()
    model, optimizer = trainer.run.model, trainer.run.optimizer
    plain = saved_size(model.state_dict())
    sizes = []
    loop(trainer, lambda _: sizes.append(saved_size(model.state_dict())))
    assert max(sizes) < plain + 1000
    assert saved_size(optimizer.state_dict()) < 2 * plain + 10_000
