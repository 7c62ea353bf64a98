"""Second derivatives: of a shard by autograd, of the batch by a buffer; all else says the way."""

import functools

import pytest
import torch
from tests.classified import by_sign, cross_entropy
from tests.everywhere import Waits, one_result
from torch import nn

import unisono


class Curved(nn.Linear):
    """Keeps an estimate of the Hessian's diagonal for its optimizer."""

    def __init__(self):
        super().__init__(4, 2)
        self.register_buffer("diagonal", torch.zeros(2, 4))
        self.steps = 0


def signs(step):
    generator = torch.Generator().manual_seed(step)  # the same for all shards of a step
    return torch.randint(2, (2, 4), generator=generator) * 2.0 - 1


def hutchinson(model, batch, step):
    loss = cross_entropy(model, batch)
    (gradient,) = torch.autograd.grad(loss, model.weight, create_graph=True)
    z = signs(step)
    (product,) = torch.autograd.grad((gradient * z).sum(), model.weight, retain_graph=True)
    model.diagonal.copy_((z * product).detach())
    return loss


def of_shard(model, batch):
    return hutchinson(model, batch, unisono.progress().step)


class Newtonian(torch.optim.SGD):
    """Divides by the diagonal that its model has kept in the same step."""

    def __init__(self, model, lr):
        super().__init__(model.parameters(), lr=lr)
        self.model = model

    @torch.no_grad()
    def step(self, closure=None):
        self.model.weight.grad.div_(self.model.diagonal.abs() + 0.1)
        super().step()


def train(shards, steps, directory=None):
    torch.manual_seed(0)
    model = Curved()
    options = {"directory": directory, "callbacks": [Waits()], "buffers": {"diagonal": "mean"}}
    trainer = unisono.Trainer(model, Newtonian(model, 0.1), of_shard, shards=shards, **options)
    trainer.fit(by_sign(36), batch_size=12, steps=steps, shuffle=False)
    return {name: value.tolist() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("shards", [1, 6])
def test_an_optimizer_reads_what_all_shards_have_left_in_a_buffer(shards):
    torch.manual_seed(0)
    model = Curved()
    optimizer = Newtonian(model, 0.1)
    for step in range(6):
        start = step * 12 % 36
        optimizer.zero_grad()
        hutchinson(model, by_sign(36)[start : start + 12], step).backward()
        optimizer.step()
    found = train(shards, 6)
    for name, expected in model.state_dict().items():
        mine = torch.tensor(found[name])
        assert torch.allclose(mine, expected, atol=1e-5), name
        assert shards > 1 or torch.equal(mine, expected), name


@pytest.mark.slow
def test_it_is_the_same_in_every_way(monkeypatch, tmp_path):
    one_result(functools.partial(train, 6), monkeypatch, tmp_path)


def test_gradients_in_the_programs_hands_see_the_buffers_of_the_step():
    seen = {}
    for shards in (1, 3):
        torch.manual_seed(0)
        model = Curved()
        seen[shards] = []

        def look(step, gradients, model=model, seen=seen[shards]):
            seen.append(model.diagonal.clone())

        options = {"buffers": {"diagonal": "mean"}, "on_gradients": look}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = unisono.Trainer(model, optimizer, of_shard, shards=shards, **options)
        trainer.fit(by_sign(36), batch_size=12, steps=3, shuffle=False)
    for one, three in zip(seen[1], seen[3], strict=True):
        assert one.any()
        assert torch.allclose(one, three, atol=1e-6)


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


class ActNorm(nn.Module):
    """Sets its trained scale from the first batch."""

    def __init__(self):
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 2), nn.Parameter(torch.ones(4))
        self.register_buffer("is_set", torch.zeros((), dtype=torch.bool))

    def forward(self, rows):
        if not self.is_set:
            self.scale.data.copy_(1 / rows.std(0))
            self.is_set.fill_(True)
        return self.linear(rows * self.scale)


def test_parameters_set_from_the_first_batch_are_set_before():
    def fit(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = unisono.Trainer(model, optimizer, cross_entropy, shards=2)
        trainer.fit(by_sign(36), batch_size=12, steps=1)

    with pytest.raises(RuntimeError, match="as ActNorm does, run the model once on one batch"):
        fit(ActNorm())
    model = ActNorm()
    model(by_sign(36)[:12][0])
    fit(model)


def test_a_dict_of_tensors_is_registered():
    data = by_sign(36)

    def members():
        torch.manual_seed(0)
        nets = [nn.Linear(4, 2) for _ in range(3)]
        return nets[0], torch.func.stack_module_state(nets)[0]

    def loss_of(net, tensors, batch):
        def one(parameters, rows):
            return torch.func.functional_call(net, parameters, (rows,))

        outputs = torch.vmap(one, in_dims=(0, None))(tensors, batch[0])
        return sum(nn.functional.cross_entropy(each, batch[1]) for each in outputs)

    net, tensors = members()
    optimizer = torch.optim.SGD(tensors.values(), lr=0.1)
    for make in (unisono.Trainer, lambda model, optimizer, _: unisono.Run(model, optimizer)):
        with pytest.raises(TypeError, match=r"nn.ParameterList\(tensors.values\(\)\)`"):
            make(tensors, optimizer, cross_entropy)
    for start in (0, 12, 24):
        optimizer.zero_grad()
        loss_of(net, tensors, data[start : start + 12]).backward()
        optimizer.step()
    net, names = members()
    model = nn.ParameterList(names.values())

    def loss(model, batch):
        return loss_of(net, dict(zip(names, model, strict=True)), batch)

    trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, shards=1)
    trainer.fit(data, batch_size=12, steps=3, shuffle=False)
    for mine, theirs in zip(model, tensors.values(), strict=True):
        assert torch.equal(mine, theirs)


class Detector(nn.Linear):
    """Returns losses in training, and boxes else."""

    def __init__(self):
        super().__init__(4, 2)

    def forward(self, rows, labels=None):
        outputs = super().forward(rows)
        if self.training:
            return {"loss": nn.functional.cross_entropy(outputs, labels)}
        return [{"boxes": row} for row in outputs]


def test_a_detector_is_told_of_its_evaluation():
    def loss(model, batch):
        return sum(model(*batch).values())

    def guarded(model, batch):
        return loss(model, batch) if model.training else torch.zeros(())

    def fit(loss, **options):
        model = Detector()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = unisono.Trainer(model, optimizer, loss, shards=2)
        return trainer.fit(by_sign(36), batch_size=12, steps=3, validate=by_sign(12), **options)

    with pytest.raises(AttributeError) as caught:
        fit(loss)
    assert "in an evaluation, with the model in `eval()`" in caught.value.__notes__[0]
    assert "`validate_metrics` and `validate_forward`" in caught.value.__notes__[0]

    def forward(model, batch):
        return torch.stack([found["boxes"] for found in model(batch[0])]), batch[1]

    metrics = {"accuracy": lambda boxes, labels: (boxes.argmax(1) == labels).float().mean()}
    found = fit(guarded, validate_metrics=metrics, validate_forward=forward)
    assert 0 <= found.validation["accuracy"] <= 1
