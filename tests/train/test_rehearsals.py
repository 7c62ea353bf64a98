"""A loss or a model that goes on from shard to shard is refused in the first step, by name."""

import collections
import io
import itertools
import math
import os
import time
import types

import pytest
import torch
import torch.nn.functional as F
from tests.classified import by_sign, cross_entropy, taken
from tests.loaders import loader_of
from tests.once import computed_once
from tests.promises import promise
from torch import nn
from torch.utils.data import DataLoader

import unisono
from unisono.training.step import is_due

GLOBAL = {"calls": 0}
CARRIES = "carries over from one shard to the next, and `loss` depends on it, but each worker"
IN_TIME = f"{CARRIES} computes different shards: take the step from `unisono.progress()`, set a"
OF_TENSORS = f"{CARRIES} computes different shards: keep a buffer of the model (`register_buffer`)"


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
        return F.cross_entropy(outputs, batch[1]) + (outputs - self.centres[batch[1]]).norm()


class Inner(nn.Module):
    steps = 0

    def __init__(self):
        super().__init__()
        self.inner = net()
        self.calls, self.seconds, self.last, self.cache = 0, 0.0, None, {}

    def forward(self, x):
        return self.inner(x)


def within(kind):
    return lambda: nn.Sequential(collections.OrderedDict(within=kind()))


class Counting(Inner):
    def forward(self, x):
        self.calls += 1
        return self.inner(x) * self.calls


class Remembering(Inner):
    def forward(self, x):
        before, self.last = self.last, self.inner(x)
        return self.last if before is None else self.last + before.detach()


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
        return value - sum(kept) / len(kept)

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
    return cross_entropy(model, batch) * GLOBAL["calls"]


def by_rank(model, batch):
    return cross_entropy(model, batch) * (1 + unisono.world().rank)


def by_variable(model, batch):
    outputs = model(batch[0])
    by_itself = F.cross_entropy(outputs, batch[1])
    noticed = outputs.detach().mean() * int(os.environ.get("WORLD_SIZE", 1))
    return {"loss": by_itself, "noticed": noticed}


class Least:
    """Weighs a loss by the least one so far, which the same shard leaves as it is."""

    def __init__(self):
        self.least, self.last, self.seconds = [math.inf], None, 0.0

    def __call__(self, model, batch):
        loss = cross_entropy(model, batch)
        self.last, self.seconds = loss.item(), time.perf_counter()
        self.least[0] = min(self.least[0], self.last)
        return loss * (1 if self.last <= self.least[0] else 1.1)


class Drawing(Inner):
    matrix = None

    def forward(self, x):
        if self.matrix is None:
            self.matrix = torch.randn(4, 4)
        return self.inner[0](x @ self.matrix)


class OfTheClass(Inner):
    def forward(self, x):
        OfTheClass.steps += 1
        return self.inner(x) * OfTheClass.steps


def counts_in_c(model, batch, numbers=itertools.count()):  # noqa: B008
    return cross_entropy(model, batch) * (1 + next(numbers) / 10_000)


def hidden():
    """Nobody can put it back."""
    numbers = (number for number in range(1_000))
    return lambda model, batch: cross_entropy(model, batch) * (1 + next(numbers))


def samples_seen():
    numbers = set()

    def loss(model, batch):
        numbers.update(batch[0][:, 0].tolist())
        return cross_entropy(model, batch) * (1 + len(numbers) / 1000)

    return loss


def features_of_the_first():
    def loss(model, batch, kept={}):  # noqa: B006
        outputs = model(batch[0])
        if "mean" not in kept:
            kept["mean"] = outputs.detach().mean(0)
        return F.cross_entropy(outputs - kept["mean"], batch[1])

    return loss


REFUSED = {
    "samples": (samples_seen, net, f"`loss.numbers` {OF_TENSORS}"),
    "first": (features_of_the_first, net, f"`loss.__defaults__[0]['mean']` {CARRIES}"),
    "bound": (lambda: Annealed().bound, net, f"`loss.calls` {IN_TIME}"),
    "default": (lambda: counts_in_c, net, "`loss.__defaults__[0]` carries over"),
    "class": (lambda: cross_entropy, within(OfTheClass), "`model.within.OfTheClass.steps` carries"),
    "hidden": (hidden, net, f"`loss.numbers` {IN_TIME}"),
    "least": (Least, net, f"`loss.least[0]` {IN_TIME}"),
    "drawn": (lambda: cross_entropy, Drawing, f"`model.matrix` {CARRIES}"),
    "object": (Annealed, net, f"`loss.calls` {IN_TIME}"),
    "closure": (nonlocal_calls, net, f"`loss.calls` {IN_TIME}"),
    "global": (lambda: of_a_global, net, f"`loss.GLOBAL['calls']` {IN_TIME}"),
    "list": (seen, net, "`loss.kept["),
    "queue": (queue, net, "`loss.negatives["),
    "centres": (Centres, net, f"`loss.centres` {OF_TENSORS}"),
    "module": (lambda: cross_entropy, within(Counting), f"`model.within.calls` {IN_TIME}"),
    "last": (lambda: cross_entropy, within(Remembering), f"`model.within.last` {OF_TENSORS}"),
    "rank": (lambda: by_rank, net, "`loss` changes when RANK and WORLD_SIZE are those of another"),
    "size": (lambda: by_variable, net, "`noticed` changes when RANK and WORLD_SIZE are those of"),
}


def train(loss, model, data=None, steps=2):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, loss, shards=4)
    how = {} if isinstance(data, DataLoader) else {"batch_size": 16}
    data = by_sign(40) if data is None else data
    trainer.fit(data, steps=steps, **how)
    return trainer.digest(), trainer.evaluate(data)


@pytest.mark.parametrize("name", REFUSED)
def test_what_only_validations_keep_is_named(name):
    make_loss, make_model, words = REFUSED[name]
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, make_loss(), shards=4)
    with pytest.raises(RuntimeError) as caught:
        trainer.evaluate(by_sign(40), batch_size=8)
    said = str(caught.value).replace("result 0", "`loss`").replace("result 1", "`noticed`")
    assert words.replace("least[0]", "last").partition("carries")[0] in said


class Indexed:
    """A data set of (row, class, index), changed by what `weigh` gives for an index."""

    def __init__(self, weigh):
        self.data, self.weigh = by_sign(40), weigh

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        row, label = self.data[index]
        return row * self.weigh(index), label, index


def hard_examples():
    hard = set()

    def loss(model, batch):
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        hard.update(batch[2][losses > 0.1].tolist())
        return losses.mean()

    return loss, Indexed(lambda index: 2 if index in hard else 1)


def curriculum():
    level = 1.0

    def loss(model, batch):
        nonlocal level
        level = 2.0
        return cross_entropy(model, batch)

    return loss, Indexed(lambda index: level)


def guessed_labels():
    """Of a `TensorDataset`, whose tensor the loss writes to."""
    labels = torch.zeros(40, dtype=torch.long)
    tensors = zip(*by_sign(40), strict=True)

    def loss(model, batch):
        labels[batch[2]] = 1 - batch[1]
        return F.cross_entropy(model(batch[0]), batch[1])

    rows = torch.stack(list(next(tensors)))
    return loss, torch.utils.data.TensorDataset(rows, labels, torch.arange(40))


def read_alone():
    """Only read by the loss function; what that keeps in an object of both nobody reads."""
    weights, last = {"of": torch.ones(40), "last": 0.0, "cache": {}}, [torch.zeros(())]

    def loss(model, batch):
        weights["last"] = batch[0].mean().item()
        weights["cache"].setdefault(batch[0].shape, torch.ones(4))
        last[0] = F.cross_entropy(model(batch[0]), batch[1])
        return last[0] * weights["of"][batch[2]].mean()

    return loss, Indexed(lambda index: weights["of"][index])


def test_other_processes_read_what_the_loop_began_with():
    """What a loss stores would reach them at another moment, so it is named with them, too."""
    for make, words in ((curriculum, "`loss.level`, which the"), (hard_examples, "`loss.hard`, ")):
        loss, data = make()
        with pytest.raises(RuntimeError, match=f"but they change {words}"):
            train(loss, net(), loader_of(data, 16, num_workers=1))


class Views(torch.utils.data.Dataset):
    def __init__(self):
        self.rows, self.labels = by_sign(40).tensors[:2]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index], self.labels[index]


class AllViews(Views):
    def __getitems__(self, indices):
        step = indices[1] - indices[0] if len(indices) > 1 else 1
        return slice(indices[0], indices[-1] + 1, step)


def listed(model, batch):
    for row, _ in batch:
        row -= row.mean()
    rows, labels = map(torch.stack, zip(*batch, strict=True))
    return cross_entropy(model, (rows, labels))


def sliced(model, batch):
    batch[0].mul_(0.9)
    return cross_entropy(model, batch)


def of_views(data, loss):
    def collate(samples):
        if isinstance(samples, slice):
            return data.rows[samples], data.labels[samples]
        return samples

    return loss, net(), DataLoader(data, 16, shuffle=False, collate_fn=collate)


def with_net(make):
    loss, data = make()
    return loss, net(), data


READS = "but they change `loss.{}`, which the dataset reads, and each"
IN_PLACE = "but they change their batch in place, and with it the dataset"
PROGRAMS = {
    **{
        name: (lambda make_loss=loss, make_model=model: (make_loss(), make_model()), words)
        for name, (loss, model, words) in REFUSED.items()
    },
    "hard examples": (lambda: with_net(hard_examples), READS.format("hard")),
    "curriculum": (lambda: with_net(curriculum), READS.format("level")),
    "guessed labels": (lambda: with_net(guessed_labels), READS.format("labels")),
    "read alone": (lambda: with_net(read_alone), "nothing"),
    "listed views": (lambda: of_views(Views(), listed), IN_PLACE),
    "sliced views": (lambda: of_views(AllViews(), sliced), IN_PLACE),
}


def refusals():
    told = dict.fromkeys(PROGRAMS, "nothing")
    for name, (program, _) in PROGRAMS.items():
        try:
            train(*program(), steps=3)
        except RuntimeError as error:
            told[name] = str(error)
    return told


@promise("one-result.8")
def test_what_goes_on_is_named_on_any_number_of_workers():
    told = refusals()
    for name, (_, words) in PROGRAMS.items():
        assert words in told[name], name
    assert unisono.launch(refusals, workers=2) == [told] * 2


def in_place(model, batch):
    batch[0].mul_(2)
    return cross_entropy(model, batch)


def rank_prints(model, batch):
    if unisono.world().rank == 0:
        print(len(batch[0]))
    return cross_entropy(model, batch)


class Notes:
    """Keeps caches by shape and by content, its last loss, a flag, and when it was called."""

    last = began = mask = newest = None
    has_seen_many = False

    def __init__(self):
        self.by_content, self.times, self.shapes = {}, {}, set()

    def __call__(self, model, batch):
        self.began = self.began or time.time()
        self.times["last"] = time.perf_counter()
        self.newest = types.SimpleNamespace(time=time.perf_counter(), rows=len(batch[0]))
        if self.mask is None:
            self.mask = torch.ones(4)
        self.shapes.add(batch[0].shape)
        self.has_seen_many |= bool(batch[1].sum() > 2)
        key = hash(batch[0].numpy().tobytes())
        norm = self.by_content.setdefault(key, batch[0].norm().item())
        outputs = model(batch[0] * self.mask)
        self.last = outputs.detach() * norm
        return F.cross_entropy(outputs, batch[1]) * norm


def counts(model, batch, seen=[], numbers=itertools.count()):  # noqa: B006, B008
    GLOBAL["calls"] += 1
    seen.append(next(numbers))
    return cross_entropy(model, batch)


def noting_features(model, outputs, last=[None]):  # noqa: B006
    last[0] = outputs
    return outputs.pow(2).mean()


def noting_shapes(model, batch, sizes={}):  # noqa: B006
    return model(batch[0] * sizes.setdefault(batch[0].shape, 0.5))


WELCOME = {
    "notes": (Notes(), net),
    "notes of features": (unisono.WholeBatch(noting_shapes, noting_features), net),
    "counts": (counts, net),
    "plain": (cross_entropy, net),
    "stores": (cross_entropy, Stores),
    "in place": (in_place, net),
    "print": (rank_prints, net),
}


@promise("one-result.7")
@pytest.mark.parametrize("name", WELCOME)
def test_what_is_stored_is_welcome_and_no_bit_is_changed(name):
    loss, model = WELCOME[name]
    digest = train(loss, model())
    with computed_once():
        assert train(loss, model()) == digest


@promise("one-result.10")
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

    final = loss
    if use == "embed":
        final = unisono.WholeBatch(embed, lambda model, outputs: outputs.pow(2).mean())
    trainer = unisono.Trainer(model, optimizer, final, shards=2)
    words = (
        f"they set `{name}` of the optimizer, whose options must be the same on all workers: pass"
    )
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

    with pytest.raises(RuntimeError, match=r"`embed\.numbers` carries over"):
        train(unisono.WholeBatch(embed, lambda model, outputs: outputs.pow(2).mean()), net())


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


def test_models_of_custom_loops_are_rehearsed_but_not_the_body():
    digest, losses = own_loop(Stores())
    assert len(losses) == 12
    with computed_once():
        assert own_loop(Stores()) == (digest, losses)
    for kind, words in ((Counting, "`model.calls` carries"), (Remembering, "`model.last` carries")):
        with pytest.raises(RuntimeError, match=words):
            own_loop(kind())


@promise("one-result.15")
def test_what_begins_later_is_found_later():
    class Late(Inner):
        def forward(self, x):
            self.calls += self.steps >= 9
            return self.inner(x) * (1 + self.calls)

    class Steps(unisono.callbacks.Callback):
        def on_step_begin(self, fit):
            Late.steps = fit.step

    model = Late()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, cross_entropy, shards=1, callbacks=[Steps()])
    with pytest.raises(RuntimeError, match=r"`model.calls` carries"):
        trainer.fit(by_sign(40), batch_size=4, steps=40)
    assert trainer.run.position.step == 16


@promise("one-result.15")
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: int(os.environ.get("RANK", "0")), "RANK and WORLD_SIZE are those of another"),
        (lambda: time.perf_counter_ns() % 2**20 / 2**20, "computed twice"),
    ],
)
def test_what_begins_later_and_is_stored_nowhere_is_found_later(value, words):
    def late(model, batch):
        factor = value() if unisono.progress().step >= 6 else 0
        return cross_entropy(model, batch) * (1 + factor)

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, late, shards=2)
    with pytest.raises(RuntimeError, match=words):
        trainer.fit(by_sign(40), batch_size=4, steps=20)
    assert trainer.run.position.step == 8


@promise("one-result.15")
def test_passes_that_write_to_nothing_are_rehearsed_once_after_the_first_step():
    calls = []

    def loss(model, batch):
        print(end="", file=calls_of_steps)  # nothing of the program's can be seen to change
        return cross_entropy(model, batch)

    class Counts(io.TextIOBase):
        def write(self, text):
            calls.append(unisono.progress().step)
            return 0

    calls_of_steps = Counts()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, loss, shards=2)
    trainer.fit(by_sign(40), batch_size=4, steps=10)
    assert [calls.count(step) for step in range(1, 10)] == [3, 3, 2, 3, 2, 2, 2, 3, 3]


@promise("one-result.15")
@pytest.mark.parametrize("last_alike", [1000, 4])
def test_passes_of_evaluations_that_write_to_nothing_are_rehearsed_once_after_the_first(last_alike):
    class Counts(io.TextIOBase):
        total = 0

        def write(self, text):
            self.total += 1
            return self.total

    counts = Counts()

    def loss(model, batch):
        calls = counts.write("")  # nothing of the program's can be seen to change
        factor = time.perf_counter_ns() % 2**20 if calls > last_alike else 0
        return cross_entropy(model, batch) * (1 + factor)

    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, loss, shards=1)
    if last_alike == 4:  # the second call is rehearsed as the fourth, and is the fifth
        with pytest.raises(RuntimeError, match="computed twice"):
            trainer.evaluate(by_sign(32), batch_size=4)
        return
    trainer.evaluate(by_sign(32), batch_size=4)
    assert counts.total == 3 + 2 + 2 + 1 + 2 + 1 + 1 + 1


@promise("one-result.15")
def test_rehearsed_are_the_first_two_steps_powers_of_two_and_every_1024th():
    assert [step for step in range(3000) if is_due(2, step)] == [
        *(0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
    ]
    assert is_due(2, 3072)
    assert [is_due(looks, 5) for looks in (0, 1, 2)] == [True, True, False]


@promise("one-result.15")
@pytest.mark.parametrize("last", [7, 8])
def test_the_last_step_of_a_fit_is_rehearsed(last):
    class Late(Inner):
        def forward(self, x):
            self.calls += unisono.progress().step >= 6
            return self.inner(x) * (1 + self.calls)

    model = Late()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, cross_entropy, shards=1)
    with pytest.raises(RuntimeError, match=r"`model.calls` carries"):
        trainer.fit(by_sign(40), batch_size=4, steps=last)
    assert trainer.run.position.step == last - 1
