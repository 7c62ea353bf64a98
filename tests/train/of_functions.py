"""Metrics that are plain functions get the rows of the whole dataset, once, in its order.

It loads scikit-learn, so ``test_metrics.py`` runs these tests in a process of their own.
"""

import os
import signal

import pytest
import sklearn.metrics
import torch
from tests.classified import cross_entropy as loss_of
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.runtime.launch import forkserver

forkserver._START = f"import sklearn.metrics; {forkserver._START}"  # once for all workers


def data(num_samples=103):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num_samples, 5, generator=generator)
    return TensorDataset(inputs, (inputs[:, 0] > 0.3).long())


def make(shards=4, loss=None):
    torch.manual_seed(2)
    model = nn.Linear(5, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, loss or loss_of, shards=shards)


def auc(outputs, targets):
    return sklearn.metrics.roc_auc_score(targets, outputs[:, 1])


def all_at_once(trainer, dataset):
    with torch.no_grad():
        return trainer.run.model(dataset.tensors[0]), dataset.tensors[1]


@pytest.mark.parametrize("batch_size", [4, 10, 103])
def test_what_scikit_learn_finds_of_all_rows_is_found(batch_size):
    dataset, trainer = data(), make()
    found = trainer.evaluate(dataset, batch_size=batch_size, metrics={"auc": auc})
    assert found["auc"] == auc(*all_at_once(trainer, dataset))
    assert set(found) == {"loss", "auc"}


def test_a_function_is_called_once_with_rows_in_dataset_order():
    dataset, seen = data(23), []

    def keep(inputs, targets):
        seen.append((inputs, targets))
        return 0

    make().evaluate(dataset, batch_size=5, metrics={"n": keep}, forward=lambda model, batch: batch)
    [(inputs, targets)] = seen
    assert torch.equal(inputs, dataset.tensors[0])
    assert torch.equal(targets, dataset.tensors[1])


@pytest.mark.parametrize(
    ("result", "plain"),
    [
        (3, 3.0),
        (torch.tensor(2.5), 2.5),
        (torch.tensor([1, 2]), [1, 2]),
        ([torch.tensor(1.0), 2], [1.0, 2.0]),
        (float("inf"), float("inf")),
    ],
)
def test_results_are_plain_numbers(result, plain):
    found = make().evaluate(data(8), batch_size=8, metrics={"it": lambda *_: result})
    assert found["it"] == plain


def test_arrays_become_lists():
    dataset, trainer = data(), make()

    def confused(outputs, targets):
        return sklearn.metrics.confusion_matrix(targets, outputs.argmax(1))

    found = trainer.evaluate(dataset, batch_size=10, metrics={"confused": confused})
    assert found["confused"] == confused(*all_at_once(trainer, dataset)).tolist()


def test_rows_that_have_names_are_given_by_name():
    def compare(*, wanted, given):
        return (wanted == given.argmax(1)).sum()

    dataset, trainer = data(), make()
    found = trainer.evaluate(
        dataset,
        batch_size=10,
        metrics={"right": compare},
        forward=lambda model, batch: {"given": model(batch[0]), "wanted": batch[1]},
    )
    given, wanted = all_at_once(trainer, dataset)
    assert found["right"] == (given.argmax(1) == wanted).sum()


def fails(outputs, targets):
    raise KeyError("no such class")


@pytest.mark.parametrize(
    ("metric", "forward", "kind", "words"),
    [
        (auc, lambda m, b: m(b[0]).mean(), TypeError, r"one row for each of the \d+ samples"),
        (auc, lambda m, b: (m(b[0]), b[1][:1]), TypeError, r"part 2 of .* shape \(1,\)"),
        (auc, lambda m, b: ("text", b[1]), TypeError, "part 1 of what it returns is a str"),
        (
            *(auc, lambda m, b: (m(b[0]).repeat(1, int(b[1].sum())), b[1]), ValueError),
            r"part '0' has rows of \(\d+,\) and \(\d+,\), as from batches padded to",
        ),
        (lambda *_: "text", None, TypeError, "'it' is of type str"),
        (fails, None, KeyError, "no such class"),
    ],
)
def test_what_is_no_row_or_no_number_is_refused(metric, forward, kind, words):
    options = {} if forward is None else {"forward": forward}
    with pytest.raises(kind, match=words):
        make().evaluate(data(30), batch_size=10, metrics={"it": metric}, **options)


def measured(marker=None):
    """Evaluate; with a marker, rank 1 is killed in the midst of it, once."""

    def loss(model, batch):
        if marker is not None and not marker.exists() and os.environ["RANK"] == "1":
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return loss_of(model, batch)

    return make(loss=loss).evaluate(data(), batch_size=10, metrics={"auc": auc})


def test_results_are_the_same_on_any_number_of_workers_also_if_one_is_killed(tmp_path):
    alone, marker = measured(), tmp_path / "killed"
    assert unisono.launch(measured, workers=3) == [alone] * 3
    assert unisono.launch(measured, marker, workers=2) == [alone] * 2
    assert marker.exists()


class Smoothed:
    """Counts its calls, and keeps an average of its values."""

    def __init__(self, *, uses_average):
        self.num_calls, self.average, self.uses_average = 0, None, uses_average

    def __call__(self, outputs, targets):
        self.num_calls += 1
        now = float((outputs.argmax(1) == targets).float().mean())
        self.average = now if self.average is None else 0.5 * (self.average + now)
        return self.average if self.uses_average else now


def test_a_metric_that_depends_on_earlier_calls_is_refused():
    trainer, smoothed = make(), Smoothed(uses_average=True)
    trainer.evaluate(data(), batch_size=8, metrics={"smoothed": smoothed})
    trainer.fit(data(), batch_size=8, epochs=1)
    with pytest.raises(RuntimeError, match=r"changes itself \(.*`smoothed\.average`\)"):
        trainer.evaluate(data(), batch_size=8, metrics={"smoothed": smoothed})


def test_a_metric_may_count_its_calls():
    trainer, counted = make(), Smoothed(uses_average=False)
    for _ in range(3):
        trainer.evaluate(data(), batch_size=8, metrics={"accuracy": counted})
    assert counted.num_calls == 3
