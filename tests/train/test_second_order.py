"""Second derivatives and programs beside them: what cannot be exact is told the way."""

import pytest
import torch
from tests.classified import by_sign, cross_entropy
from tests.parity.plain_rows import ActNorm, Detector
from torch import nn

import unisono


class Differentiates(torch.optim.SGD):
    """As AdaHessian does it in a plain loop."""

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            torch.autograd.grad(parameter.grad.sum(), parameter)


class Gathers(torch.optim.SGD):
    def step(self, closure=None):
        torch.distributed.all_reduce(torch.ones(1))


def test_an_optimizer_that_differentiates_or_gathers_is_told_the_way():
    for kind, words in ((Differentiates, 'buffers={name: "mean"}'), (Gathers, "no collectives")):
        model = nn.Linear(4, 2)
        trainer = unisono.Trainer(model, kind(model.parameters(), 0.1), cross_entropy, shards=2)
        with pytest.raises((RuntimeError, ValueError)) as caught:
            trainer.fit(by_sign(36), batch_size=12, steps=1)
        assert words in caught.value.__notes__[0]


def test_a_graph_of_the_sum_is_refused_with_the_way():
    model = nn.Linear(4, 2)
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=2)
    with pytest.raises(ValueError, match=r"before a shard's loss .* `torch.autograd.grad\(loss"):
        for step in run.steps(by_sign(36), batch_size=12, steps=1):
            with step:
                for batch in step.shards:
                    step.backward(cross_entropy(model, batch), create_graph=True)


def test_parameters_set_from_the_first_batch_are_set_before():
    """The remedy is the row `ActNorm`."""
    model = ActNorm.Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, cross_entropy, shards=2)
    with pytest.raises(RuntimeError, match="as ActNorm does, run the model once on one batch"):
        trainer.fit(by_sign(36), batch_size=12, steps=1)


def test_a_dict_of_tensors_is_registered():
    """The remedy is the row `Ensemble`."""
    tensors = torch.func.stack_module_state([nn.Linear(4, 2) for _ in range(3)])[0]
    optimizer = torch.optim.SGD(tensors.values(), lr=0.1)
    for make in (unisono.Trainer, lambda model, optimizer, _: unisono.Run(model, optimizer)):
        with pytest.raises(TypeError, match=r"nn.ParameterList\(tensors.values\(\)\)`"):
            make(tensors, optimizer, cross_entropy)


def test_a_detector_is_told_of_its_evaluation():
    """The remedy is the row `Detector`."""

    def loss(model, batch):
        return sum(model(*batch).values())

    model = Detector.Net(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, loss, shards=2)
    with pytest.raises(AttributeError) as caught:
        trainer.fit(by_sign(36), batch_size=12, steps=3, validate=by_sign(12))
    assert "in an evaluation, with the model in `eval()`" in caught.value.__notes__[0]
    assert "`validate_metrics` and `validate_forward`" in caught.value.__notes__[0]
