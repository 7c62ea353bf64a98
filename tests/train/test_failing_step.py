"""A loss, or gradients, that are not finite: where that began is found and told, by all alike."""

import math
from pathlib import Path

import pytest
import torch
from tests.once import computed_once
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.training.finiteness import FinitenessHooks

HERE = Path(__file__)
NAN, INF = math.nan, math.inf


def line_of(comment):
    return next(n for n, text in enumerate(HERE.read_text().splitlines(), 1) if comment in text)


class Log(nn.Module):
    def forward(self, x):
        return torch.log(x - x.amin(1, keepdim=True))


class Root(nn.Module):
    def forward(self, x):
        return (x * 0).abs().sqrt() + x  # line of the root


class Model(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.norm, self.first = nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.middle, self.last = middle, nn.Linear(3, 1)

    def forward(self, x):
        x = self.first(self.norm(x))
        return self.last(self.middle(x))  # line of the middle


def mean(model, batch):
    return model(batch[0]).mean()


def data(**bad):
    torch.manual_seed(1)
    x = torch.randn(24, 3)
    for name, value in bad.items():
        x[int(name.removeprefix("sample"))] = value
    return TensorDataset(x)


def failing(middle=None, loss=mean, dataset=None, prepare=None, device="cpu", **options):
    torch.manual_seed(0)
    model = Model(middle or nn.Identity())
    if prepare is not None:
        prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = unisono.Trainer(model, optimizer, loss, shards=2, seed=0, device=device, **options)
    with pytest.raises(unisono.errors.NonFiniteLossError) as caught:
        trainer.fit(dataset or data(), batch_size=8, epochs=1, shuffle=False)
    return caught.value, model


def spoil(model):
    with torch.no_grad():
        model.first.weight[0, 0] = NAN
        model.last.bias[0] = INF


def test_the_first_module_whose_output_is_not_finite_is_named():
    error, _ = failing(Log())
    place = f"{HERE.relative_to(Path.cwd())}, line {line_of('# line of the middle')}"
    assert str(error) == (
        f"the loss must be finite, but is {error.value} in step 0 for shard 0: the first output "
        f"that is not finite is that of `middle` of the model (Log), {place}, "
        f"`return self.last(self.middle(x))  # line of the middle`, whose input is finite; the "
        f"parameters are still those before step 0: look there for a division by zero or the "
        f"logarithm or square root of zero or an overflow, or lower the learning rate."
    )
    assert (error.module, error.file) == ("middle", str(HERE))
    assert error.line == line_of("# line of the middle")


def test_the_innermost_of_several_modules_is_named():
    error, _ = failing(nn.Sequential(nn.ReLU(), nn.Sequential(Log(), nn.Identity())))
    assert error.module == "middle.1.0"


def test_samples_that_are_not_finite_are_named():
    error, _ = failing(dataset=data(sample9=NAN, sample11=-INF, sample12=INF))
    assert (error.step, error.shard, error.module) == (1, 0, "norm")
    assert "whose input is not finite already, as sample 12 has such values; the" in str(error)
    assert str(error).endswith("look at that data.")
    error, _ = failing(dataset=data(sample9=NAN, sample11=INF))
    assert "as samples 9, 11 have such values" in str(error)


def test_a_module_that_takes_bad_samples_away_is_not_blamed_for_them():
    class Cleaned(Model):
        def forward(self, x):
            return super().forward(torch.nan_to_num(x))

    def prepare(model):
        model.__class__ = Cleaned

    error, _ = failing(Log(), dataset=data(sample1=NAN), prepare=prepare)
    assert (error.module, "input is finite" in str(error)) == ("middle", True)


def test_the_loss_function_is_named_where_every_output_is_finite():
    error, _ = failing(loss=lambda model, batch: (model(batch[0]) * 0).mean().log())
    assert "is -inf in step 0 for shard 0: the output of every module is finite, so" in str(error)
    assert error.module is None


def test_parameters_that_are_not_finite_before_are_named():
    error, _ = failing(prepare=spoil)
    assert error.parameters == ("first.weight", "last.bias")
    assert "`first.weight` and 1 more parameter or buffer are not finite as the step" in str(error)
    assert "pass `clip_norm=math.inf`" in str(error)


@computed_once()
def test_a_loss_that_is_finite_the_second_time_is_told_of():
    values = iter([1.0, NAN, 3.5])
    error, _ = failing(loss=lambda model, batch: model(batch[0]).mean() * 0 + next(values, 1.0))
    assert "computed once more, from the same samples and random numbers, it is 3.5;" in str(error)


@computed_once()
def test_a_program_that_fails_the_second_time_is_told_of_the_first():
    calls = []

    def loss(model, batch):
        calls.append(batch)
        if len(calls) == 3:
            raise ArithmeticError("not again")
        return model(batch[0]).mean() * NAN

    error, _ = failing(loss=loss)
    assert (error.step, error.shard, len(calls)) == (0, 0, 3)
    assert error.__suppress_context__


def test_the_second_pass_leaves_nothing_behind():
    _, model = failing(Log())
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert model.norm.num_batches_tracked == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not torch.is_anomaly_enabled()


def test_parameters_whose_gradients_are_not_finite_are_named():
    error, _ = failing(Root(), clip_norm=1.0)
    assert "is nan in step 0, though every loss is: the gradients of 4 parameters" in str(error)
    assert "and `first.bias` is the last of them in the model; the" in str(error)
    assert "look at what comes after `first.bias` in the model's forward pass" in str(error)
    assert (error.module, error.shard) == (None, None)
    assert error.parameters == ("norm.weight", "norm.bias", "first.weight", "first.bias")


def steps_of(model, loss, **options):
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=2, **options)
    for step in run.steps(data(), batch_size=8, epochs=1):
        with step:
            for batch in step.shards:
                step.backward(loss(model, batch))


def test_in_a_loop_of_ones_own_modules_and_parameters_are_named():
    with pytest.raises(unisono.errors.NonFiniteLossError) as caught:
        steps_of(Model(Log()), mean)
    assert caught.value.module == "middle"
    with pytest.raises(unisono.errors.NonFiniteLossError) as caught:
        steps_of(Model(Root()), mean, clip_norm=1.0)
    assert len(caught.value.parameters) == 4


def test_gradients_with_any_scale_are_explained_too():
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-16)
    error, _ = failing(Root(), precision=unisono.Precision("fp16", scaler=scaler))
    assert "though it has come down to" in str(error)
    assert error.parameters == ("norm.weight", "norm.bias", "first.weight", "first.bias")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**-16)
    error, _ = failing(Log(), precision=unisono.Precision("fp16", scaler=scaler))
    assert error.module == "middle"


class Mask(nn.Module):
    def forward(self, x):
        return torch.full_like(x, -INF)


class Masked(nn.Module):
    def forward(self, x, mask):
        return torch.softmax(torch.cat([x, mask], 1), 1)


class Attention(nn.Module):
    def __init__(self, is_bad):
        super().__init__()
        self.mask, self.attend, self.log, self.is_bad = Mask(), Masked(), Log(), is_bad

    def forward(self, x):
        x = self.attend(x, self.mask(x))
        return self.log(x) if self.is_bad else x


@pytest.mark.parametrize(("is_bad", "named"), [(False, None), (True, "log")])
def test_a_mask_is_not_blamed(is_bad, named):
    model = Attention(is_bad)
    look = FinitenessHooks(model)
    model(torch.randn(2, 3))
    look.close()
    assert (None if look.output is None else look.output.place.module) == named


def of_ranks(middle, **options):
    return str(failing(middle, **options)[0])


def rank_dependent(model, batch):
    return model(batch[0]).mean() * (NAN if unisono.world().rank == 1 else 1.0)


@pytest.mark.slow
def test_all_workers_say_what_one_of_them_has_found():
    def fail():
        with computed_once():
            return [
                of_ranks(Log()),
                of_ranks(Root(), clip_norm=1.0),
                of_ranks(None, dataset=data(sample9=NAN)),
                of_ranks(None, loss=rank_dependent) if unisono.world().world_size > 1 else "",
            ]

    alone = fail()
    first, second = unisono.launch(fail, workers=2)
    assert first == second
    assert first[:3] == alone[:3]
    assert "is nan in step 0 for shard 1: the output of every module is finite" in first[3]


@pytest.mark.slow
def test_on_a_device_the_same_is_found(accelerator):
    error, _ = failing(Log(), device="sim:0")
    assert (error.module, "whose input is finite" in str(error)) == ("middle", True)
    error, _ = failing(Root(), device="sim:0", clip_norm=1.0)
    assert len(error.parameters) == 4


def buffers_after(fails):
    torch.manual_seed(0)
    model = Model(nn.Identity())
    trainer = unisono.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        lambda model, batch: (
            fails(mean(model, batch)) if unisono.progress().step else 0 * mean(model, batch)
        ),
        shards=3,
    )
    with pytest.raises((KeyError, unisono.errors.NonFiniteLossError)):
        trainer.fit(data(), batch_size=12, epochs=1)
    return [buffer.tolist() for buffer in model.buffers()]


@pytest.mark.slow
@pytest.mark.parametrize("fails", [lambda loss: {}["none"], lambda loss: loss * NAN])
def test_a_program_that_catches_the_error_has_the_same_buffers_on_every_worker(fails):
    alone = buffers_after(fails)
    assert alone[-1] == 1  # batches
    assert unisono.launch(buffers_after, fails, workers=3) == [alone] * 3
