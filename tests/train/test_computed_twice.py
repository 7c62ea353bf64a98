"""A loss function or a model that goes on from shard to shard is refused in the first step.

On one worker as on several, with the same sentence, which names what goes on. What is stored, or
filled at first use, is welcome, and the comparison changes no bit.
"""

import collections
import functools
import itertools
import os
import time

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from tests.classified import by_sign, cross_entropy, taken
from tests.once import computed_once
from torch import nn

import unisono
from unisono.train import fit

GLOBAL = {"calls": 0}
EACH = "goes on from shard to shard, and each worker computes others:"
IN_TIME = f"{EACH} take the step from `unisono.progress()`, set a value"
OF_TENSORS = f"{EACH} keep a buffer of the model (`register_buffer`)"


def net():
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2)
    return nn.Sequential(*layers)


class Annealed:
    def __init__(self):
        self.calls = 0

    def __call__(self, model, batch):
        self.calls += 1
        return cross_entropy(model, batch) * min(1.0, self.calls / 1000)

    def bound(self, model, batch):
        return self(model, batch)


class Centres(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("centres", torch.zeros(2, 2))

    def forward(self, model, batch):
        outputs = model(batch[0])
        with torch.no_grad():
            self.centres.index_add_(0, batch[1], outputs)
        return F.cross_entropy(outputs, batch[1])


class Inner(nn.Module):
    """A net with something around it."""

    steps = 0

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.calls, self.seconds, self.last, self.cache = 0, 0.0, None, {}

    def forward(self, x):
        return self.inner(x)


def within(kind):
    """Have it among layers of torch."""
    return lambda: nn.Sequential(collections.OrderedDict(within=kind()))


class Counting(Inner):
    def forward(self, x):
        self.calls += 1
        return self.inner(x)


class Remembering(Inner):
    """Adds what it has computed before."""

    def forward(self, x):
        before, self.last = self.last, self.inner(x)
        return self.last if before is None else self.last + before.detach()


class OfTheClass(Inner):
    def forward(self, x):
        OfTheClass.steps += 1
        return self.inner(x)


class Stores(Inner):
    """Keeps its last output, a mask by shape, and how long it takes."""

    def forward(self, x):
        started = time.perf_counter()
        mask = self.cache.setdefault(x.shape, torch.ones(x.shape))
        self.last = self.inner(x * mask)
        self.num_rows, self.ended = len(x), time.time()
        self.seconds += time.perf_counter() - started
        return self.last


def nonlocal_calls():
    calls = 0

    def loss(model, batch):
        nonlocal calls
        calls += 1
        return cross_entropy(model, batch) if calls < 10_000 else model(batch[0]).mean()

    return loss


def seen():
    kept = []

    def loss(model, batch):
        value = cross_entropy(model, batch)
        kept.append(value.item())
        return value

    return loss


def queue():
    negatives = collections.deque(maxlen=100)

    def loss(model, batch):
        outputs = model(batch[0])
        more = sum((outputs.mean(0) - other).pow(2).sum() for other in negatives)
        negatives.append(outputs.mean(0).detach())
        return F.cross_entropy(outputs, batch[1]) + more

    return loss


def of_a_global(model, batch):
    GLOBAL["calls"] += 1
    return cross_entropy(model, batch)


def counts_in_c(model, batch, numbers=itertools.count()):  # noqa: B008
    return cross_entropy(model, batch) * (1 + next(numbers) // 10_000)


def hidden():
    """Nobody can see how far it is."""
    numbers = (number for number in range(1_000))
    return lambda model, batch: cross_entropy(model, batch) * (1 + next(numbers))


def by_rank(model, batch):
    return cross_entropy(model, batch) * (1 + unisono.world().rank)


def by_variable(model, batch):
    outputs = model(batch[0])
    by_itself = F.cross_entropy(outputs, batch[1])
    noticed = outputs.detach().mean() * int(os.environ.get("WORLD_SIZE", 1))
    return {"loss": by_itself, "noticed": noticed}


def table_of_centres():
    return functools.partial(centres_of, table={"centres": torch.zeros(2)})


def centres_of(model, batch, table):
    outputs = model(batch[0])
    table["centres"] = 0.9 * table["centres"] + outputs.detach().mean(0)
    return F.cross_entropy(outputs, batch[1])


REFUSED = {
    "object": (Annealed, net, f"`loss.calls` {IN_TIME}"),
    "bound": (lambda: Annealed().bound, net, f"`loss.calls` {IN_TIME}"),
    "closure": (nonlocal_calls, net, f"`loss.calls` {IN_TIME}"),
    "global": (lambda: of_a_global, net, f"`loss.GLOBAL['calls']` {IN_TIME}"),
    "default": (lambda: counts_in_c, net, "`loss.__defaults__[0]` goes on"),
    "list": (seen, net, f"`loss.kept` {OF_TENSORS}"),
    "queue": (queue, net, f"`loss.negatives` {OF_TENSORS}"),
    "centres": (Centres, net, f"`loss.centres` {OF_TENSORS}"),
    "partial": (table_of_centres, net, "`loss.keywords['table']['centres']` goes on"),
    "module": (lambda: cross_entropy, within(Counting), f"`model.within.calls` {IN_TIME}"),
    "last": (lambda: cross_entropy, within(Remembering), "computed twice, from the same samples"),
    "class": (lambda: cross_entropy, within(OfTheClass), "`model.within.OfTheClass.steps` goes on"),
    "hidden": (hidden, net, "computed twice, from the same samples, random numbers, parameters"),
    "rank": (lambda: by_rank, net, "`loss` is another one where RANK and WORLD_SIZE are another"),
    "size": (lambda: by_variable, net, "`noticed` is another one where RANK and WORLD_SIZE are"),
}


def train(loss, model, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4, **options)
    trainer.fit(by_sign(40), batch_size=16, steps=2)
    return trainer.digest()


def refusals():
    """Give what each program is refused with."""
    told = {}
    for name, (loss, model, _) in REFUSED.items():
        try:
            train(loss(), model())
        except RuntimeError as error:
            told[name] = str(error)
    return told


def test_what_goes_on_is_named_on_any_number_of_workers():
    told = refusals()
    for name, (_, _, words) in REFUSED.items():
        assert words in told.get(name, "nothing"), name
    assert unisono.launch(refusals, workers=2) == [told] * 2


def in_place(model, batch):
    batch[0].mul_(2)
    return cross_entropy(model, batch)


def rank_prints(model, batch):
    if unisono.world().rank == 0:
        print(len(batch[0]))
    return cross_entropy(model, batch)


@functools.lru_cache
def weights(count):
    return torch.ones(count)


WELCOME = {
    "plain": (cross_entropy, net, {}),
    "half": (cross_entropy, net, {"precision": "bf16"}),
    "stores": (cross_entropy, Stores, {}),
    "in place": (in_place, net, {}),
    "print": (rank_prints, net, {}),
    "cached": (
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1], weights(2)),
        net,
        {},
    ),
    "features": (
        lambda model, outputs: outputs.pow(2).mean(),
        net,
        {"embed": lambda m, b: m(b[0])},
    ),
}


@pytest.mark.parametrize("name", WELCOME)
def test_what_is_stored_is_welcome_and_no_bit_is_changed(name):
    loss, model, options = WELCOME[name]
    digest = train(loss, model(), **options)
    with computed_once():
        assert train(loss, model(), **options) == digest


@pytest.mark.parametrize("use", ["fit", "embed", "steps"])
@pytest.mark.parametrize("name", ["lr", "momentum"])
def test_options_of_the_optimizer_that_a_pass_sets_are_named(name, use):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss(model, batch):
        optimizer.param_groups[0][name] = 0.01
        return cross_entropy(model, batch)

    def embed(model, batch):
        loss(model, batch)
        return model(batch[0])

    features = {"embed": embed} if use == "embed" else {}
    final = (lambda model, outputs: outputs.pow(2).mean()) if features else loss
    trainer = unisono.Trainer(model, optimizer, final, shards=2, **features)
    words = f"they set `{name}` of the optimizer, whose options all workers must have alike: pass"
    with pytest.raises(RuntimeError, match=words):
        if use != "steps":
            trainer.fit(by_sign(40), batch_size=16, steps=2)
        for _ in taken(trainer.run, loss, by_sign(40), batch_size=16, steps=2):
            pass


def test_options_may_be_set_before_the_shards_and_after_them():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = unisono.Run(model, optimizer, shards=2)
    for step in run.steps(by_sign(40), batch_size=16, steps=3):
        with step:
            optimizer.param_groups[0]["lr"] = 0.1 / (step.number + 1)
            for batch in step.shards:
                step.backward(cross_entropy(model, batch))
            optimizer.param_groups[0]["weight_decay"] = 0.5
    assert step.is_done


def test_features_that_differ_are_refused():
    numbers = (number for number in range(1_000))

    def embed(model, batch):
        return model(batch[0] + next(numbers))

    with pytest.raises(RuntimeError, match=r"computed twice, .*, result 0 is another one"):
        train(lambda model, outputs: outputs.pow(2).mean(), net(), embed=embed)


def test_metrics_count_each_shard_once():
    metric = torchmetrics.MeanMetric()

    def loss(model, batch):
        value = cross_entropy(model, batch)
        metric.update(value)
        return value

    train(loss, net())
    assert metric._update_count == 8


def own_loop(model, steps=3):
    """Count in the body, which is the program's own; gives the digest and the losses."""
    run, losses = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=4), []
    for step in run.steps(by_sign(64), batch_size=16, steps=steps):
        with step:
            for batch in step.shards:
                loss = cross_entropy(model, (batch[0] + torch.randn_like(batch[0]), batch[1]))
                losses.append(loss.item())
                step.backward(loss)
    return run.digest(), losses


def test_models_of_custom_loops_are_called_twice_but_not_the_body():
    digest, losses = own_loop(Stores())
    assert len(losses) == 12
    with computed_once():
        assert own_loop(Stores()) == (digest, losses)
    for kind, words in ((Counting, "`model.calls` goes on"), (Remembering, "computed twice, from")):
        with pytest.raises(RuntimeError, match=words):
            own_loop(kind())


def test_what_begins_later_is_found_later(monkeypatch):
    monkeypatch.setattr(fit, "EVERY", 16)

    class Late(Inner):
        def forward(self, x):
            self.calls += self.steps >= 5
            return self.inner(x)

    class Steps(unisono.callbacks.Callback):
        def on_step_begin(self, fit):
            Late.steps = fit.step

    model = Late()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, cross_entropy, shards=1, callbacks=[Steps()])
    with pytest.raises(RuntimeError, match=r"`model.calls` goes on"):
        trainer.fit(by_sign(40), batch_size=4, steps=40)
    assert trainer.run.position.step == 16
