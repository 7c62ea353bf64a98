"""Programs as new users port them, each beside the plain loop that it comes from.

A row has a model, a loss and an update as the plain loop writes them, and what its port writes
instead. Batches are those of a torch DataLoader, in its order.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from tests.classified import by_sign, cross_entropy
from tests.everywhere import Waits
from tests.replacements import wait_for_replacement
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
)

import unisono
from unisono.callbacks import EMA, Callback
from unisono.plan.seeds import seed_of
from unisono.runtime.device import seed_generators
from unisono.runtime.workers.context import context

N, BATCH_SIZE = 34, 12
DATA = by_sign(N)
HELD_OUT = by_sign(20)


def numbers(model: Any, *more: Any) -> list[float]:
    """Read all weights and buffers of a model, and more."""
    tensors = [*model.state_dict().values(), *map(torch.as_tensor, more)]
    return torch.cat([one.detach().double().flatten() for one in tensors]).tolist()


class Row:
    """A linear layer that is trained with the mean cross-entropy; rows differ from it."""

    data: Any = DATA
    reading: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": False}
    options: dict[str, Any] = {}
    exchanges: tuple[str, ...] = ("auto",)

    def model(self) -> Any:
        return nn.Linear(4, 2)

    def optimizer(self, model: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=0.05)

    # The plain loop

    def batches(self) -> Iterator[Any]:
        while True:
            yield from DataLoader(self.data, BATCH_SIZE)

    def plain_loss(self, model: Any, batch: Any) -> Any:
        return self.loss(model, batch)

    def update(self, step: int, model: Any, optimizer: Any) -> None:
        optimizer.step()

    def plain_end(self, model: Any) -> list[float]:
        return numbers(model)

    def by_a_plain_loop(self, steps: int) -> list[float]:
        torch.manual_seed(0)
        model = self.model()
        optimizer = self.optimizer(model)
        for step, batch in enumerate(itertools.islice(self.batches(), steps)):
            optimizer.zero_grad()
            self.plain_loss(model, batch).backward()
            self.update(step, model, optimizer)
        return self.plain_end(model)

    # Its port

    def loss(self, model: Any, batch: Any) -> Any:
        return cross_entropy(model, batch)

    def port(self, model: Any) -> dict[str, Any]:
        """Make further options of the trainer."""
        return {}

    def end(self, trainer: Any, history: Any) -> list[float]:
        return numbers(trainer.run.model)

    def trained(self, shards: int, steps: int, directory: Any) -> list[float]:
        torch.manual_seed(0)
        model = self.model()
        given = {"loss": self.loss} | self.port(model)
        callbacks = [*given.pop("callbacks", ()), Waits()]
        trainer = unisono.Trainer(
            model,
            self.optimizer(model),
            shards=shards,
            directory=directory,
            callbacks=callbacks,
            **given,
        )
        history = trainer.fit(self.data, steps=steps, **self.reading, **self.options)
        return self.end(trainer, history)


class Sum(Row):
    """A loss that is a sum over the batch."""

    def plain_loss(self, model, batch):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")

    def loss(self, model, batch):
        return self.plain_loss(model, batch), None


class Resting(Row):
    """A layer that rests in every other step."""

    def update(self, step, model, optimizer):
        if step % 2 == 0:
            model.bias.grad = None
        optimizer.step()

    def port(self, model):
        return {
            "on_gradients": lambda step, found: None if step % 2 else {"weight": found["weight"]}
        }


class RestingInPlace(Row):
    """A last layer that rests, whose gradients the port takes out of the dict."""

    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def optimizer(self, model):
        return torch.optim.Adafactor(model.parameters(), lr=0.02)

    def update(self, step, model, optimizer):
        if step % 2 == 0:
            model[2].weight.grad = model[2].bias.grad = None
        optimizer.step()

    def rest(self, step, gradients):
        if step % 2 == 0:
            del gradients["2.weight"]
            gradients["2.bias"] = None

    def port(self, model):
        return {"on_gradients": self.rest}


class Skipping(Row):
    """Leaves out the updates whose gradients are large."""

    def update(self, step, model, optimizer):
        if model.weight.grad.norm() < 0.55:
            optimizer.step()

    def port(self, model):
        return {"on_gradients": lambda step, found: found if found["weight"].norm() < 0.55 else {}}


class OfTheWholeBatch(Row):
    """Variances and covariances of the batch, as VICReg has them; a centre as DINO moves it."""

    def model(self):
        model = nn.Linear(4, 2)
        model.register_buffer("centre", torch.zeros(2))
        return model

    def of_features(self, model, features):
        centred = features - features.mean(0)
        covariance = centred.T @ centred / (len(centred) - 1)
        spread = F.relu(1 - (centred.var(0) + 1e-4).sqrt()).mean()
        away = (features - model.centre).square().mean()
        model.centre.lerp_(features.detach().mean(0), 0.1)
        return spread + covariance.triu(1).square().sum() + away

    def plain_loss(self, model, batch):
        return self.of_features(model, model(batch[0]))

    def port(self, model):
        return {"loss": unisono.WholeBatch(lambda model, b: model(b[0]), self.of_features)}


class Queue(Row):
    """A queue of negatives, as MoCo keeps it, in a loop of the program's own."""

    def model(self):
        model = nn.Linear(4, 2)
        model.register_buffer("queue", torch.randn(2 * BATCH_SIZE, 2))
        return model

    def of_features(self, model, features):
        keys = F.normalize(features, dim=1)
        loss = torch.logsumexp(keys @ model.queue.clone().T, 1).mean()
        model.queue.copy_(torch.cat([keys.detach(), model.queue])[: len(model.queue)])
        return loss

    def plain_loss(self, model, batch):
        return self.of_features(model, model(batch[0]))

    def trained(self, shards, steps, directory):
        torch.manual_seed(0)
        model = self.model()
        run = unisono.Run(model, self.optimizer(model), shards=shards, directory=directory)
        for step in run.steps(self.data, steps=steps, **self.reading):
            wait_for_replacement(context().team())
            with step:
                step.gather(lambda b: model(b[0]), lambda rows: self.of_features(model, rows))
        return numbers(model)


class Tally(Callback):
    """Counts what each class was chosen, and weighs samples by their last loss."""

    def __init__(self):
        self.load, self.weights = torch.zeros(2), torch.ones(N)

    def on_step_end(self, fit, step):
        self.count(step.means["chosen"], step.num_samples)
        self.weights[step.indices] = 0.5 + step.per_sample["each"]

    def count(self, chosen, num_samples):
        self.load += torch.tensor([num_samples - chosen, chosen])

    def state_dict(self):
        return {"load": self.load, "weights": self.weights}

    def load_state_dict(self, state):
        self.load, self.weights = state["load"].clone(), state["weights"].clone()


class Tallied(Row):
    """Counts in a loss's dict, and rows of samples that a callback keeps."""

    data = TensorDataset(*DATA.tensors, torch.arange(N))

    def parts(self, tally, model, batch):
        inputs, labels, at = batch
        outputs = model(inputs)
        each = F.cross_entropy(outputs, labels, reduction="none")
        return (each * tally.weights[at]).mean(), outputs.argmax(1).sum(), each.detach()

    def plain_loss(self, model, batch):
        loss, chosen, each = self.parts(self.tally, model, batch)
        self.tally.count(int(chosen), len(each))
        self.tally.weights[batch[2]] = 0.5 + each
        return loss

    def by_a_plain_loop(self, steps):
        self.tally = Tally()
        return super().by_a_plain_loop(steps)

    def plain_end(self, model):
        return numbers(model, self.tally.load, self.tally.weights)

    def port(self, model):
        tally = Tally()

        def loss(model, batch):
            mean, chosen, each = self.parts(tally, model, batch)
            return {"loss": mean, "chosen": chosen, "per_sample": {"each": each}}

        return {"loss": loss, "callbacks": [tally]}

    def end(self, trainer, history):
        (tally,) = (one for one in trainer.callbacks if isinstance(one, Tally))
        return numbers(trainer.run.model, tally.load, tally.weights)


class Pairs(Row):
    """Two loaders at once, the shorter one cycled."""

    few = Subset(by_sign(10), [index % 10 for index in range(N)])
    data = StackDataset(few, DATA)

    def batches(self):
        while True:
            yield from zip(
                DataLoader(self.few, BATCH_SIZE), DataLoader(DATA, BATCH_SIZE), strict=True
            )

    def loss(self, model, batch):
        return sum(cross_entropy(model, one) for one in batch)


class Ensemble(Row):
    """A bare dict of tensors, the members of an ensemble by vmap."""

    def members(self):
        nets = [nn.Linear(4, 2) for _ in range(3)]
        self.net = nets[0]
        return torch.func.stack_module_state(nets)[0]

    def of_members(self, tensors, batch):
        def one(parameters, rows):
            return torch.func.functional_call(self.net, parameters, (rows,))

        outputs = torch.vmap(one, in_dims=(0, None))(tensors, batch[0])
        return sum(F.cross_entropy(each, batch[1]) for each in outputs)

    def by_a_plain_loop(self, steps):
        torch.manual_seed(0)
        tensors = self.members()
        optimizer = torch.optim.Adam(tensors.values(), lr=0.05)
        for batch in itertools.islice(self.batches(), steps):
            optimizer.zero_grad()
            self.of_members(tensors, batch).backward()
            optimizer.step()
        return numbers(nn.ParameterList(tensors.values()))

    def model(self):
        tensors = self.members()
        self.names = list(tensors)
        return nn.ParameterList(tensors.values())

    def loss(self, model, batch):
        return self.of_members(dict(zip(self.names, model, strict=True)), batch)


class ActNorm(Row):
    """A trained scale that the first batch sets; in the port a pass before the trainer."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.scale = nn.Linear(4, 2), nn.Parameter(torch.ones(4))
            self.register_buffer("is_set", torch.zeros((), dtype=torch.bool))

        def forward(self, rows):
            if not self.is_set:
                self.scale.data.copy_(1 / rows.std(0))
                self.is_set.fill_(True)
            return self.linear(rows * self.scale)

    def model(self):
        return self.Net()

    def port(self, model):
        model(DATA[:BATCH_SIZE][0])
        return {}


class Endless(Row):
    """A sampler without an end."""

    class Sampler(torch.utils.data.Sampler):
        def __iter__(self):
            while True:
                yield from torch.randperm(N).tolist()

    def batches(self):
        seed_generators(seed_of("sampler", 0, 0))
        order = list(itertools.islice(self.Sampler(), 12 * BATCH_SIZE))
        return iter([DATA[order[at : at + BATCH_SIZE]] for at in range(0, len(order), BATCH_SIZE)])

    reading = {"batch_size": BATCH_SIZE, "sampler": Sampler()}


class Keys(Row):
    """A sampler whose keys are tuples."""

    class Scaled(Dataset):
        def __len__(self):
            return N

        def __getitem__(self, key):
            index, scale = key
            return DATA[index][0] * scale, DATA[index][1]

    data = Scaled()

    @staticmethod
    def order(epoch, seed):
        generator = random.Random(seed + 7 * epoch)
        return [(index, generator.choice([0.5, 1.0])) for index in generator.sample(range(N), N)]

    def batches(self):
        for epoch in itertools.count():
            yield from DataLoader(self.data, BATCH_SIZE, sampler=self.order(epoch, 0))

    reading = {"batch_size": BATCH_SIZE, "sampler": order}


class Stream(Row):
    """A stream that has fewer shards than the run, as those of Hugging Face may."""

    class Rows(IterableDataset):
        num_shards = 2

        def __iter__(self):
            return iter(by_sign(10 * BATCH_SIZE))

        def shard(self, index, num_shards):
            assert num_shards <= self.num_shards
            return itertools.islice(self, index, None, num_shards)

    data = Rows()
    reading = {"batch_size": BATCH_SIZE}


class Best(Row):
    """Copies the model where its loss is the smallest so far, which the first step's stays."""

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=40.0)

    def by_a_plain_loop(self, steps):
        torch.manual_seed(0)
        model, best, smallest = self.model(), None, float("inf")
        optimizer = self.optimizer(model)
        for batch in itertools.islice(self.batches(), steps):
            optimizer.zero_grad()
            loss = self.loss(model, batch)
            loss.backward()
            optimizer.step()
            if loss.item() < smallest:
                smallest, best = loss.item(), copy.deepcopy(model)
        return numbers(model) + numbers(best)

    def trained(self, shards, steps, directory):
        torch.manual_seed(0)
        model, best, smallest = self.model(), None, float("inf")
        run = unisono.Run(model, self.optimizer(model), shards=shards, directory=directory)
        for step in run.steps(self.data, steps=steps, **self.reading):
            wait_for_replacement(context().team())
            with step:
                for batch in step.shards:
                    step.backward(self.loss(model, batch))
            if step.loss < smallest:
                smallest, best = step.loss, copy.deepcopy(model)
        return numbers(model) + numbers(best)


class Graphs(Row):
    """Batches that torch cannot divide: nodes of all graphs, and the graph of each."""

    graphs = [(DATA[index][0].expand(1 + index % 3, 4), DATA[index][1]) for index in range(N)]

    @staticmethod
    def collate(graphs):
        sizes = torch.tensor([len(nodes) for nodes, _ in graphs])
        of_node = torch.arange(len(graphs)).repeat_interleave(sizes)
        nodes = torch.cat([nodes for nodes, _ in graphs])
        return {"x": nodes, "of": of_node, "y": torch.tensor([int(y) for _, y in graphs])}

    @property
    def data(self):
        return DataLoader(self.graphs, BATCH_SIZE, collate_fn=self.collate)

    reading = {}

    def batches(self):
        while True:
            yield from self.data

    def loss(self, model, batch):
        outputs = torch.zeros(len(batch["y"]), 2).index_add(0, batch["of"], model(batch["x"]))
        return F.cross_entropy(outputs, batch["y"])


class Detector(Row):
    """Losses in `train()`, boxes in `eval()`."""

    class Net(nn.Linear):
        def forward(self, rows, labels=None):
            outputs = super().forward(rows)
            if self.training:
                return {"loss": F.cross_entropy(outputs, labels)}
            return [{"boxes": row} for row in outputs]

    def model(self):
        return self.Net(4, 2)

    def plain_loss(self, model, batch):
        return sum(model(*batch).values())

    def plain_end(self, model):
        boxes, labels = self.forward(model.eval(), HELD_OUT.tensors)
        return numbers(model, (boxes.argmax(1) == labels).float().mean())

    def loss(self, model, batch):
        return self.plain_loss(model, batch) if model.training else torch.zeros(())

    @staticmethod
    def forward(model, batch):
        return torch.stack([found["boxes"] for found in model(batch[0])]), batch[1]

    options = {
        "validate": HELD_OUT,
        "validate_forward": forward,
        "validate_metrics": {"right": lambda boxes, y: (boxes.argmax(1) == y).float().mean()},
    }

    def end(self, trainer, history):
        return numbers(trainer.run.model, history.validation["right"])


class ByTask(Row):
    """Gradients of two tasks, each without what opposes the other, as PCGrad has them."""

    def model(self):
        model = nn.Linear(4, 2)
        for task in ("first", "second"):
            model.register_buffer(task, torch.zeros(2, 4), persistent=False)
        return model

    def differentiate(self, model, batch):
        outputs = model(batch[0])
        tasks = F.cross_entropy(outputs, batch[1]), (outputs - 1).square().mean()
        for loss, there in zip(tasks, (model.first, model.second), strict=True):
            there.copy_(torch.autograd.grad(loss, model.weight, retain_graph=True)[0])
        return sum(tasks)

    def plain_loss(self, model, batch):
        return self.differentiate(model, batch)

    def combined(self, model):
        first, second = model.first, model.second
        overlap = (first * second).sum().clamp(max=0)
        return (first - overlap / second.square().sum() * second) + (
            second - overlap / first.square().sum() * first
        )

    def update(self, step, model, optimizer):
        model.weight.grad = self.combined(model)
        optimizer.step()

    def loss(self, model, batch):
        return self.differentiate(model, batch)

    def port(self, model):
        def combine(step, gradients):
            return gradients | {"weight": self.combined(model)}

        return {"on_gradients": combine, "buffers": {"first": "mean", "second": "mean"}}


class Penalty(Row):
    """A penalty of the slope at each sample, differentiated twice."""

    def model(self):
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def loss(self, model, batch):
        inputs = batch[0].clone().requires_grad_()
        outputs = model(inputs)
        (slope,) = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        return F.cross_entropy(outputs, batch[1]) + slope.square().sum(1).mean()


class Averaged(Row):
    """Validates averaged weights; its epochs have a training loss, and a ratio of two counts."""

    def counted(self, model, inputs, labels):
        found = model(inputs).argmax(1)
        return 2 * (found & labels).sum(), found.sum() + labels.sum()

    def by_a_plain_loop(self, steps):
        self.losses = []
        return super().by_a_plain_loop(steps)

    def plain_loss(self, model, batch):
        loss = cross_entropy(model, batch)
        self.losses.append(loss.item() * len(batch[0]))
        return loss

    def update(self, step, model, optimizer):
        optimizer.step()
        if step == 0:
            self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        self.average.update_parameters(model)

    def plain_end(self, model):
        average = self.average.module
        twice, both = self.counted(average, *HELD_OUT.tensors)
        epochs = [sum(self.losses[at : at + 3]) / N for at in (0, 3)]
        # Over batches: a mean over all at once is rounded differently on some processors.
        batches = DataLoader(HELD_OUT, BATCH_SIZE)
        loss = sum(cross_entropy(average, each).item() * len(each[0]) for each in batches)
        return numbers(model, loss / len(HELD_OUT), twice / both, epochs)

    def loss(self, model, batch):
        return {"loss": cross_entropy(model, batch), "dice": self.counted(model, *batch)}

    def port(self, model):
        self.ema = EMA(0.5)
        return {"callbacks": [self.ema]}

    @property
    def options(self):
        return {"validate": HELD_OUT, "validate_model": self.ema.model}

    def end(self, trainer, history):
        found, epochs = history.validation, [row["loss"] for row in history][:2]
        return numbers(trainer.run.model, found["loss"], found["dice"], epochs)


class AfterUpdates(Callback):
    """Does between steps what a row does there."""

    def __init__(self, row):
        self.row = row

    def on_step_end(self, fit, step):
        self.row.between(fit.model, fit.optimizer)


class Between:
    """Does something between steps: in the plain loop after the update, in the port a callback."""

    def update(self, step, model, optimizer):
        optimizer.step()
        self.between(model, optimizer)

    def port(self, model):
        return {"callbacks": [AfterUpdates(self)]}


class ReplacedBuffers(Between, Row):
    """Replaces buffers by `.data = new`: in passes, and between steps from what is trained."""

    exchanges = ("shared", "staged")

    class Net(nn.Linear):
        def __init__(self):
            super().__init__(4, 2)
            self.register_buffer("centre", torch.zeros(4))
            self.register_buffer("scale", torch.ones(()))

        def forward(self, inputs):
            if self.training:
                self.scale.data = self.scale * 0.9
            return super().forward((inputs - self.centre) * self.scale)

    def model(self):
        return self.Net()

    def between(self, model, optimizer):
        model.centre.data = 0.9 * model.centre + 0.1 * model.weight.detach().mean(0)

    def end(self, trainer, history):
        assert not any(value.is_shared() for value in trainer.run.model.state_dict().values())
        return super().end(trainer, history)


class KeptByOptimizer(Between):
    """Pulls the weights towards what an optimizer keeps that Unisono does not know."""

    def kept(self, model, optimizer):
        names = ("slow", "exp_avg")
        state = [optimizer.state[parameter] for parameter in model.parameters()]
        return sum(float(one[name].abs().sum()) for one in state for name in names if name in one)

    def between(self, model, optimizer):
        self.seen = self.kept(model, optimizer)
        with torch.no_grad():
            model.bias.add_(0.001 * self.seen)

    def plain_end(self, model):
        return numbers(model, self.seen)

    def end(self, trainer, history):
        return numbers(trainer.run.model, self.kept(trainer.run.model, trainer.run.optimizer))


class ScheduleFree(KeptByOptimizer, Row):
    """An average of the weights in the optimizer's state, and a count of its own."""

    class SGD(torch.optim.SGD):
        count = 0

        @torch.no_grad()
        def step(self, closure=None):
            super().step()
            self.count += 1
            for parameter in self.param_groups[0]["params"]:
                state = self.state[parameter]
                slow = state.setdefault("slow", parameter.clone())
                state["slow"] = slow.lerp(parameter, 1 / self.count)

    def optimizer(self, model):
        return self.SGD(model.parameters(), lr=0.1)


class Hooked(KeptByOptimizer, Row):
    """An optimizer with a hook."""

    def optimizer(self, model):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        optimizer.register_step_post_hook(lambda *_: None)
        return optimizer


class Reptile(Row):
    """Gradients given by name: the way that a copy goes on one task; some are left out."""

    exchanges = ("shared", "staged")

    def given(self, model, number):
        """Rest the bias in every third step, and skip the fourth."""
        inner, task = copy.deepcopy(model), by_sign(12, seed=number)[:12]
        optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            cross_entropy(inner, task).backward()
            optimizer.step()
        pairs = zip(model.named_parameters(), inner.parameters(), strict=True)
        gradients = {name: (here - there).detach() for (name, here), there in pairs}
        if number == 3:
            return {}
        return gradients if number % 3 else {"weight": gradients["weight"]}

    def by_a_plain_loop(self, steps):
        torch.manual_seed(0)
        model = self.model()
        optimizer = self.optimizer(model)
        for number in range(steps):
            gradients = self.given(model, number)
            for name, parameter in model.named_parameters():
                parameter.grad = gradients.get(name)
            optimizer.step()
        return numbers(model)

    def trained(self, shards, steps, directory):
        torch.manual_seed(0)
        model = self.model()
        run = unisono.Run(model, self.optimizer(model), shards=shards, directory=directory)
        for step in run.steps(self.data, steps=steps, **self.reading):
            wait_for_replacement(context().team())
            gradients = self.given(model, step.number)
            with step:
                step.update(gradients=gradients)
        return numbers(model)


class Hutchinson(Row):
    """An optimizer that divides by the Hessian's diagonal, which losses estimate in a buffer."""

    class SGD(torch.optim.SGD):
        def __init__(self, model, lr):
            super().__init__(model.parameters(), lr=lr)
            self.model = model

        @torch.no_grad()
        def step(self, closure=None):
            self.model.weight.grad.div_(self.model.diagonal.abs() + 0.1)
            super().step()

    def model(self):
        model = nn.Linear(4, 2)
        model.register_buffer("diagonal", torch.zeros(2, 4))
        return model

    def optimizer(self, model):
        return self.SGD(model, 0.1)

    def of_step(self, model, batch, step):
        loss = cross_entropy(model, batch)
        (gradient,) = torch.autograd.grad(loss, model.weight, create_graph=True)
        generator = torch.Generator().manual_seed(step)  # the same for all shards of a step
        z = torch.randint(2, (2, 4), generator=generator) * 2.0 - 1
        (product,) = torch.autograd.grad((gradient * z).sum(), model.weight, retain_graph=True)
        model.diagonal.copy_((z * product).detach())
        return loss

    def by_a_plain_loop(self, steps):
        self.steps = itertools.count()
        return super().by_a_plain_loop(steps)

    def plain_loss(self, model, batch):
        return self.of_step(model, batch, next(self.steps))

    def loss(self, model, batch):
        return self.of_step(model, batch, unisono.progress().step)

    def port(self, model):
        return {"buffers": {"diagonal": "mean"}}


class Counting(Row):
    """Buffers that passes count or average in, each with a word that says how shards add up."""

    exchanges = ("shared", "staged")
    ways = {"seen": "sum", "centre": "mean", "highest": "max", "*.load": "sum", "calls": "first"}

    class Expert(nn.Linear):
        """Counts how often each class was chosen, in float as mixtures of experts do."""

        def __init__(self):
            super().__init__(4, 2)
            self.register_buffer("load", torch.zeros(2))

        def forward(self, inputs):
            outputs = super().forward(inputs)
            if self.training:
                self.load += F.one_hot(outputs.detach().argmax(1), 2).sum(0)
            return outputs

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.expert = Counting.Expert()
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.register_buffer("centre", torch.zeros(4))
            self.register_buffer("highest", torch.full((4,), -torch.inf))

        def forward(self, inputs):
            centre = self.centre  # the step's: what a shard makes of it is the shard's own
            if self.training:
                self.seen += len(inputs)
                self.calls += 1
                self.centre = 0.9 * self.centre + 0.1 * inputs.mean(0)
                self.highest.copy_(torch.maximum(self.highest, inputs.amax(0)))
            return self.expert(inputs - 0.1 * centre)

    def model(self):
        return self.Net()

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    def port(self, model):
        return {"buffers": self.ways}


ROWS = {row.__name__: row for row in Row.__subclasses__()}
"""By name, as workers look them up."""


def trained(name: str, shards: int, steps: int, directory: Any) -> list[float]:
    """Train a row's port in this worker."""
    return ROWS[name]().trained(shards, steps, directory)
