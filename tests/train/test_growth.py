"""Losses that are sums, and buffers that count, are told of in the first step, with a remedy."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from tests.classified import by_sign
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import unisono
from unisono.training.growth import Growth, PassResult, kind_of_change, loss_problem, parts_problem

SUM, PAIR, MEAN = "the loss grows with", "and whose weight, here", "as if it were a mean already"


def seen(loss, weight=None):
    return PassResult(loss, weight, {})


@pytest.mark.parametrize(
    ("once", "again", "twice", "words"),
    [
        (seen(2.0), seen(2.1), seen(2.05), ""),
        (seen(2.0), seen(2.1), seen(4.0), SUM),
        (seen(-2.0), seen(-2.0), seen(-4.0), SUM),
        (seen(2.0), seen(3.0), seen(4.0), ""),  # too noisy to tell
        (seen(0.0), seen(0.0), seen(0.0), ""),
        (seen(2.0, 4.0), seen(2.0, 4.0), seen(4.0, 8.0), ""),
        (seen(2.0, 1.0), seen(2.0, 1.0), seen(4.0, 1.0), PAIR),
        (seen(2.0, 4.0), seen(2.0, 4.0), seen(2.0, 8.0), MEAN),
        (seen(0.0, 4.0), seen(0.0, 4.0), seen(0.0, 8.0), ""),
    ],
)
def test_what_is_told_of_a_loss(once, again, twice, words):
    told = loss_problem(once, again, twice)
    assert words in told
    assert bool(words) == bool(told)


@pytest.mark.parametrize(
    ("seen_so", "is_told"),
    [
        ([seen(2.0), seen(2.0), seen(3.0), seen(2.5)], False),
        ([seen(2.0), seen(2.0), seen(3.0), seen(2.50001)], False),
        ([seen(2.0), seen(2.0), seen(3.0), seen(2.6)], True),
        ([seen(2.0), seen(2.1), seen(3.0), seen(2.6)], False),  # random numbers matter
        ([seen(2.0, 4.0), seen(2.0, 4.0), seen(3.0, 2.0), seen(5.0, 6.0)], False),
        ([seen(2.0, 4.0), seen(2.0, 4.0), seen(3.0, 2.0), seen(4.0, 6.0)], True),
        ([seen(2.0, 0.5), seen(2.0, 0.5), seen(3.0, 0.7), seen(2.4, 0.6)], False),  # no weight
        ([seen(0.0)] * 4, False),
        ([seen(float("inf"))] * 4, False),
    ],
)
def test_what_is_told_of_a_loss_that_does_not_add_up(seen_so, is_told):
    assert bool(parts_problem(*seen_so)) == is_told


def changes(*values):
    return [torch.tensor(value) for value in values]


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (changes([4.0, 0.0], [4.0, 0.0], [3.0, 1.0], [8.0, 0.0]), "sum"),
        (changes([4], [4], [4], [8]), "sum"),
        (changes([1], [1], [1], [1]), None),  # a count of calls
        (changes([0.2, 0.1], [0.3, 0.1], [0.2, 0.1], [0.2, 0.1]), None),  # spectral norms
        (changes([0.2, 0.1], [0.18, 0.09], [0.5, 0.3], [0.2, 0.1]), "mean"),
        (changes([0.4, 0.0], [0.36, 0.0], [0.3, 0.1], [0.8, 0.0]), ""),  # an average of sums
        (changes([1.0, 0.0], [0.5, 1.0], [0.7, 0.0], [1.0, 3.0]), ""),  # a queue
        (changes([0.0], [0.0], [0.0], [0.0]), None),
    ],
)
def test_what_kind_of_change_a_buffer_has(made, kind):
    assert kind_of_change(*made) == kind


class Net(nn.Linear):
    """Its buffers change in a way of each kind; nothing is to be said of the last three."""

    def __init__(self):
        super().__init__(4, 2)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("centre", torch.zeros(4))
        self.register_buffer("queue", torch.zeros(64, 4))
        self.register_buffer("at", torch.zeros((), dtype=torch.long))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("rate", torch.zeros(()))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, inputs):
        if self.training:
            self.seen += len(inputs)
            self.calls += 1
            self.rate.lerp_(torch.ones(()), 0.1)
            self.centre.lerp_(inputs.mean(0), 0.1)
            rows = (self.at + torch.arange(len(inputs))) % 64
            self.queue[rows] = inputs
        return super().forward(self.norm(inputs))


def fit(loss, shards=6, model=nn.Linear, epochs=1, capfd=None, **options):
    torch.manual_seed(0)
    made = Net() if model is Net else model(4, 2)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.01)
    trainer = unisono.Trainer(made, optimizer, loss, shards=shards, **options)
    trainer.fit(by_sign(48), batch_size=24, epochs=epochs, shuffle=False)
    return trainer


def mean(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def total(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


def of_classes(model, batch):
    """Take a mean by class weights."""
    return F.cross_entropy(model(batch[0]), batch[1], weight=torch.tensor([1.0, 9.0]))


def told(capfd):
    out, err = capfd.readouterr()
    return out + err


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (mean, ""),
        (total, SUM),
        (lambda model, batch: {"loss": total(model, batch)}, SUM),
        (lambda model, batch: (total(model, batch), 1), PAIR),
        (lambda model, batch: (total(model, batch), len(batch[0])), ""),
        (lambda model, batch: (total(model, batch), None), ""),
        (lambda model, batch: (mean(model, batch), len(batch[0])), MEAN),
        (lambda model, batch: mean(model, batch) + 0.1 * model.weight.square().sum(), ""),
    ],
)
def test_a_sum_is_told_of_at_the_first_step(loss, words, capfd):
    fit(loss)
    lines = [line for line in told(capfd).splitlines() if "the loss" in line]
    assert [words in line for line in lines] == [True] * bool(words)


class Usual(nn.Sequential):
    """Neither of its layers adds up in training."""

    def __init__(self, *_):
        super().__init__(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))


@pytest.mark.parametrize("model", [nn.Linear, Usual])
@pytest.mark.parametrize(
    ("loss", "is_told"),
    [
        (mean, False),
        (of_classes, True),
        (lambda model, batch: mean(model, batch) + model(batch[0]).var(0).sum(), True),
        (lambda model, batch: (total(model, batch), len(batch[0])), False),
        (lambda model, batch: (total(model, batch) + 1.0, len(batch[0])), True),
        (
            lambda model, batch: mean(model, batch) + 0.1 * model(batch[0] * 0).square().mean(),
            False,
        ),
        (lambda model, batch: of_classes(model, batch) if model.training else None, False),
    ],
)
def test_a_loss_that_does_not_add_up_is_told_of(loss, is_told, model, capfd):
    trainer = fit(loss, shards=3, model=model)
    assert told(capfd).count("does not add up") == is_told
    assert all(module.training for module in trainer.run.model.modules())


def test_with_one_shard_there_is_nothing_to_tell(capfd):
    fit(total, shards=1, model=Net)
    assert "the loss grows" not in (said := told(capfd))
    assert "forward passes change" not in said


def test_a_sum_over_the_global_batch_is_evaluated_as_one():
    """The remedy of the line, tried; it trains in the row `Sum`."""
    trainer = fit(lambda m, b: (total(m, b), None))
    with torch.no_grad():
        whole = total(trainer.run.model, by_sign(48)[:24])
    half = torch.utils.data.Subset(by_sign(48), range(24))
    assert trainer.evaluate(half, batch_size=24)["loss"] == pytest.approx(float(whole), rel=1e-5)


def test_buffers_that_count_are_told_of_by_name_with_the_word(capfd):
    fit(mean, model=Net)
    lines = [line for line in told(capfd).splitlines() if "forward passes change" in line]
    assert len(lines) == 3
    assert "`seen`, and a step" in lines[0]
    assert """`buffers={'seen': "sum"}`""" in lines[0]
    assert """`buffers={'centre': "mean"}`""" in lines[1]
    assert "`queue`, and a step" in lines[2]
    assert "`unisono.WholeBatch` or `step.gather`" in lines[2]
    fit(mean, model=Net, buffers={"seen": "sum", "centre": "mean", "queue": "first"})
    assert "forward passes change" not in told(capfd)


def test_a_loop_of_ones_own_is_told_of_its_buffers(capfd):
    torch.manual_seed(0)
    model = Net()
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=3)
    for step in run.steps(by_sign(48), batch_size=24, steps=2):
        with step:
            for batch in step.shards:
                step.backward(mean(model, batch))
        model.at += 1  # a change of the program's own, between steps
    (line,) = [line for line in told(capfd).splitlines() if "forward passes change" in line]
    assert "`seen` and 4 more" in line


class Graphs:
    """A batch of a class of its own, as those of graphs are."""

    def __init__(self, rows):
        self.rows = rows


def of_graphs(model, batch):
    rows = batch.rows if isinstance(batch, Graphs) else batch["rows"]
    inputs, labels = (torch.stack(one) for one in zip(*rows, strict=True))
    return F.cross_entropy(model(inputs), labels, reduction="sum")


def with_targets(samples):
    """Make a batch with all targets behind each other, and the length of each, as CTC has them."""
    inputs = torch.stack([one.expand(6, 4) for one, _ in samples])
    lengths = torch.tensor([1 + int(label) for _, label in samples])
    return inputs, torch.ones(int(lengths.sum()), dtype=torch.long), lengths


def ctc(model, batch, reduction="sum"):
    inputs, targets, lengths = batch
    outputs = model(inputs).log_softmax(2).transpose(0, 1)
    steps = torch.full_like(lengths, len(outputs))
    return F.ctc_loss(outputs, targets, steps, lengths, reduction=reduction)


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize(
    ("collate", "loss", "words"),
    [
        (lambda rows: {"rows": rows}, of_graphs, SUM),
        (Graphs, of_graphs, SUM),
        (with_targets, ctc, SUM),
        (with_targets, partial(ctc, reduction="mean"), ""),
        (with_targets, lambda model, batch: (ctc(model, batch), len(batch[2])), ""),
        (with_targets, lambda model, batch: ctc(model, batch) / batch[2].sum(), "does not add up"),
    ],
)
def test_a_loss_is_told_of_whatever_a_batch_is_made_of(collate, loss, words, num_workers, capfd):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    loader = torch.utils.data.DataLoader(
        by_sign(48), batch_size=24, collate_fn=collate, num_workers=num_workers
    )
    trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), loss, shards=4)
    trainer.fit(loader, epochs=1)
    lines = [line for line in told(capfd).splitlines() if "the loss" in line]
    assert [words in line for line in lines] == [True] * bool(words)


def test_what_is_read_for_the_line_costs_no_bit(monkeypatch):
    def digest():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
        loader = torch.utils.data.DataLoader(Noisy(), batch_size=24, collate_fn=with_targets)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return unisono.Trainer(model, optimizer, ctc, shards=4).fit(loader, epochs=2).digest

    looked = digest()
    monkeypatch.setattr(Growth, "check", lambda *args: None)
    assert digest() == looked


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.randn(4), index % 2


class Normalized(nn.Module):
    """Inputs less the mean of all that were seen, whose steps become smaller."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 3)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        with torch.no_grad():
            self.count += len(x)
            self.mean += (x - self.mean).sum(0) / self.count
        return self.layer(x - self.mean)


def behind_each_other(samples):
    """Make a batch with a tensor that has three rows for each sample, as CTC's targets."""
    inputs = torch.stack([one for one, _ in samples])
    return inputs, torch.tensor([label for _, label in samples]), torch.zeros(3 * len(samples))


class Stream(torch.utils.data.IterableDataset):
    """Cannot be read twice."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)

    def __len__(self):
        return len(self.rows)


@pytest.mark.parametrize("kind", [list, Stream])
@pytest.mark.parametrize("collate", [None, behind_each_other])
def test_a_mean_that_a_count_divides_is_told_of_with_any_batch(collate, kind, capfd):
    torch.manual_seed(0)
    data = kind([(torch.randn(8), index % 3) for index in range(64)])
    model = Normalized()
    trainer = unisono.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]),
        shards=4,
    )
    trainer.fit(torch.utils.data.DataLoader(data, 16, collate_fn=collate), epochs=1)
    lines = told(capfd)
    assert lines.count("forward passes change `mean`") == 1, lines
    in_words = "as `count` grows, keep the sum over samples instead"
    assert ("`mean` and 1 more" if collate and kind is Stream else in_words) in lines


def test_what_a_loss_stores_is_that_of_its_own_passes():
    stored = []

    def loss(model, batch):
        stored.append(len(batch[0]))
        return model(batch[0]).square().mean()

    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), 0.1), loss, shards=2)
    trainer.fit(torch.utils.data.TensorDataset(torch.randn(16, 4)), batch_size=8, epochs=1)
    assert stored == [4] * 4


def test_a_spectral_norm_iterates_once_in_a_step_of_a_custom_loop(capfd):
    def vectors(shards):
        torch.manual_seed(0)
        model = spectral_norm(nn.Linear(4, 2))
        run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=shards)
        for step in run.steps(by_sign(48), batch_size=24, steps=4):
            with step:
                for batch in step.shards:
                    step.backward(mean(model, batch))
        return [*model.buffers()]

    for one, six in zip(vectors(1), vectors(6), strict=True):
        assert torch.allclose(one, six, atol=1e-6)
    assert "forward passes change" not in told(capfd)
