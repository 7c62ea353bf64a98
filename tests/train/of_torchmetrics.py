"""torchmetrics objects in an evaluation give what they give in a plain loop over the dataset.

It loads SciPy and transformers, so ``test_metrics.py`` runs these tests in a process of their own.
"""

import types

import pytest
import torch
from tests.classified import at_random
from tests.classified import cross_entropy as loss_of
from tests.splitting.models import CNN
from tests.train import test_split_model as split_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import unisono
from unisono.callbacks import EarlyStopping
from unisono.runtime.launch import forkserver
from unisono.training.callbacks.best_validation import monitored

torchmetrics = pytest.importorskip("torchmetrics")
forkserver._START = f"import torchmetrics; {forkserver._START}"  # once for all workers
of_classes, regression = torchmetrics.classification, torchmetrics.regression

NUM_CLASSES = 5


def data(num_samples=103):
    return at_random(num_samples, NUM_CLASSES, NUM_CLASSES, seed=1)


def make(loss=loss_of, shards=4):
    torch.manual_seed(2)
    model = nn.Linear(NUM_CLASSES, NUM_CLASSES)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, loss, shards=shards)


def as_they_are(model, batch):
    """The samples themselves, whose bits depend on no batch."""
    return batch


def numbers(model, batch):
    return batch[0][:, 0].clone(), batch[0][:, 1].clone()


def first_numbers(model, batch):
    return batch[0][:, 0].clone()


def of_one_process(metric, forward, dataset, batch_size=10):
    for batch in DataLoader(dataset, batch_size):
        found = forward(None, batch)
        metric.update(*(found if isinstance(found, (tuple, list)) else (found,)))
    return metric.compute()


COUNTS = [
    of_classes.MulticlassAccuracy(NUM_CLASSES),
    of_classes.MulticlassAccuracy(NUM_CLASSES, average="micro"),
    of_classes.MulticlassAccuracy(NUM_CLASSES, average=None),
    of_classes.MulticlassF1Score(NUM_CLASSES),
    of_classes.MulticlassConfusionMatrix(NUM_CLASSES),
    of_classes.MulticlassStatScores(NUM_CLASSES),
    of_classes.MulticlassAUROC(NUM_CLASSES),  # of all rows
    of_classes.MulticlassAveragePrecision(NUM_CLASSES, thresholds=20),
    of_classes.MulticlassCohenKappa(NUM_CLASSES),
]


ADDED = [
    (regression.PearsonCorrCoef(), numbers),
    (of_classes.MulticlassCalibrationError(NUM_CLASSES), as_they_are),
    (torchmetrics.MeanMetric(), first_numbers),
    (torchmetrics.CatMetric(), first_numbers),
    (regression.MeanSquaredError() / regression.MeanAbsoluteError(), numbers),
    (torchmetrics.MinMaxMetric(regression.MeanSquaredError()), numbers),
]


@pytest.mark.parametrize(
    ("metric", "forward"),
    [*((metric, as_they_are) for metric in COUNTS), *ADDED],
    ids=lambda value: type(value).__name__,
)
def test_a_metric_finds_what_it_finds_in_a_plain_loop(metric, forward):
    dataset = data()
    found = make().evaluate(dataset, batch_size=10, metrics={"it": metric}, forward=forward)
    assert metric.update_count == 0
    expected = of_one_process(metric.clone(), forward, dataset)
    if isinstance(expected, dict):
        expected = expected["raw"]
        found["it"] = found["raw"]
    assert found["it"] == expected.tolist()


def test_the_model_is_called_with_the_inputs_of_a_pair_by_default():
    trainer, dataset = make(), data()
    found = trainer.evaluate(dataset, batch_size=10, metrics={"accuracy": COUNTS[1]})
    hits = trainer.run.model(dataset.tensors[0]).argmax(1) == dataset.tensors[1]
    assert found["accuracy"] == pytest.approx(hits.sum().item() / 103)
    assert found["loss"] == trainer.evaluate(dataset, batch_size=10)["loss"]


def collection():
    return torchmetrics.MetricCollection(
        {
            "precision": of_classes.MulticlassPrecision(NUM_CLASSES),
            "recall": of_classes.MulticlassRecall(NUM_CLASSES),
            "classes": torchmetrics.ClasswiseWrapper(
                of_classes.MulticlassRecall(NUM_CLASSES, average=None)
            ),
        },
        prefix="val_",
    )


@pytest.mark.parametrize("has_been_used", [False, True])
def test_a_collection_keeps_its_names(has_been_used):
    metrics, dataset = collection(), data()
    expected = of_one_process(collection(), as_they_are, dataset)
    if has_been_used:  # precision and recall share their states then
        before = of_one_process(metrics, as_they_are, data(7))
    found = make().evaluate(dataset, batch_size=10, metrics=metrics, forward=as_they_are)
    del found["loss"]
    assert found == {name: value.item() for name, value in expected.items()}
    if has_been_used:
        assert metrics.compute() == before


def test_what_metrics_take_may_be_named():
    metrics = {"error": regression.MeanSquaredError(), "rows": torchmetrics.CatMetric()}

    def forward(model, batch):
        return {"preds": batch[0], "target": batch[0] + 2, "value": batch[1], "more": batch[1]}

    found = make().evaluate(data(30), batch_size=10, metrics=metrics, forward=forward)
    assert found["error"] == pytest.approx(4)
    assert found["rows"] == data(30).tensors[1].tolist()


def test_metrics_that_agree_at_first_stay_apart():
    inputs = torch.tensor([[3.0, 2, 1, 0, 0]] * 4)
    dataset = TensorDataset(inputs, torch.tensor([0, 1, 1, 1]))
    metrics = {
        name: of_classes.MulticlassAccuracy(NUM_CLASSES, average="micro", ignore_index=ignored)
        for name, ignored in {"all": None, "some": 1}.items()
    }
    for given in (metrics, torchmetrics.MetricCollection(metrics)):
        found = make(shards=1).evaluate(dataset, batch_size=1, metrics=given, forward=as_they_are)
        assert (found["all"], found["some"]) == (0.25, 1.0)


class Draws(torchmetrics.Metric):
    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros(()), "sum")

    def update(self, outputs, targets):
        self.total += torch.rand(())

    def compute(self):
        return self.total + torch.rand(())


def measure():
    def forward(model, batch):
        return model(batch[0]).softmax(1), batch[1]

    trainer = make()
    trainer.digest()
    metrics = {
        "accuracy": of_classes.MulticlassAccuracy(NUM_CLASSES),
        "auroc": of_classes.MulticlassAUROC(NUM_CLASSES),
        "calibration": of_classes.MulticlassCalibrationError(NUM_CLASSES),
        "draws": Draws(),
    }
    return trainer.evaluate(data(1003), batch_size=30, metrics=metrics, forward=forward)


def test_the_same_bits_on_one_and_three_workers():
    alone = measure()
    assert alone.keys() == {"loss", "accuracy", "auroc", "calibration", "draws"}
    assert unisono.launch(measure, workers=3) == [alone] * 3


def test_a_shard_without_samples_has_no_part_in_it():
    metrics = {"rows": torchmetrics.CatMetric(), "largest": torchmetrics.MaxMetric()}
    found = make().evaluate(data(3), batch_size=4, metrics=metrics, forward=first_numbers)
    assert found["rows"] == data(3).tensors[0][:, 0].tolist()
    assert found["largest"] == max(found["rows"])


def other_metrics():
    metrics = (None, {"it": of_classes.MulticlassRecall(NUM_CLASSES)})[unisono.world().rank]
    make().evaluate(data(), batch_size=10, metrics=metrics)


def test_workers_with_other_metrics_are_told_so():
    with pytest.raises(
        unisono.errors.MismatchError,
        match=r"`metrics` must be the same .* None on rank 0 and {'it'",
    ):
        unisono.launch(other_metrics, workers=2)


def test_a_process_group_of_the_program_has_no_part_in_it():
    def unwanted(*arguments, **options):
        raise AssertionError("states are not exchanged twice")

    metric = torchmetrics.SumMetric(dist_sync_fn=unwanted, distributed_available_fn=lambda: True)
    metrics = {"it": metric, "in another": torchmetrics.MinMaxMetric(metric)}
    found = make().evaluate(data(30), batch_size=10, metrics=metrics, forward=first_numbers)
    assert found["it"] == pytest.approx(data(30).tensors[0][:, 0].sum().item(), rel=1e-5)


def test_fit_validates_with_metrics_and_stops_by_them(capsys):
    metrics = {"f1": of_classes.MulticlassF1Score(NUM_CLASSES), "matrix": COUNTS[4]}
    trainer = make()
    rule = EarlyStopping(2, monitor="f1", better="higher", min_delta=1.0)
    trainer.callbacks.append(rule)
    how = {"validate": data(30), "validate_metrics": metrics}
    summary = trainer.fit(data(), batch_size=10, epochs=9, **how)
    assert summary.steps == 3 * 11
    assert summary.validation.keys() == {"loss", "f1", "matrix"}
    assert summary.validation == trainer.evaluate(data(30), batch_size=10, metrics=metrics)
    said = capsys.readouterr().out
    assert f"f1 {summary.validation['f1']:.4f}" in said
    assert "matrix" not in said
    with pytest.raises(ValueError, match=r"one number, \['f1', 'loss'\], but is 'matrix'"):
        monitored(summary.validation, "matrix")


class Own:
    def update(self, outputs, targets):
        pass


class FindsWords(Draws):
    def compute(self):
        return "word"


@pytest.mark.parametrize(
    ("metrics", "kind", "words"),
    [
        ({"it": Own()}, TypeError, "'it' is of type Own: derive it from `torchmetrics.Metric`"),
        ({"it": torchmetrics.SumMetric}, TypeError, "'it' is of type ABCMeta"),
        (COUNTS[0], TypeError, "by name, such as .* is of type MulticlassAccuracy"),
        ([COUNTS[0]], TypeError, "is of type list"),
        ({"loss": COUNTS[0]}, ValueError, r"both have \['loss'\]"),
        ({"it": FindsWords()}, TypeError, "'it' is of type str"),
    ],
)
def test_what_cannot_be_measured_is_refused(metrics, kind, words):
    with pytest.raises(kind, match=words):
        make().evaluate(data(30), batch_size=10, metrics=metrics)


def test_wrong_metrics_are_refused_before_training():
    trainer = make()
    with pytest.raises(TypeError, match="is of type Own"):
        trainer.fit(
            data(), batch_size=10, epochs=1, validate=data(), validate_metrics={"it": Own()}
        )
    assert trainer.run.position.step == 0


@pytest.mark.parametrize("batch_of", [lambda x, y: x, lambda x, y: (x,), lambda x, y: (x, y, y)])
def test_a_batch_that_is_no_pair_needs_a_function(batch_of):
    dataset = [batch_of(*sample) for sample in data(8)]
    trainer = make(lambda model, batch: torch.zeros(()))
    with pytest.raises(TypeError, match=r"pair \(inputs, targets\) .* function `forward`"):
        trainer.evaluate(dataset, batch_size=4, metrics={"it": COUNTS[0]})


@pytest.mark.usefixtures("optimizers_are_imported")
def test_metrics_get_outputs_and_targets_on_one_device(accelerator):
    found = []
    for devices in (["sim:0"], ["sim:2", "sim:1"]):
        trainer = split_model.trainer_of(CNN, devices)
        metrics = {"f": of_classes.MulticlassAccuracy(10, average="micro")}
        found.append(trainer.evaluate(split_model.data(CNN), batch_size=16, metrics=metrics))
    assert found[0] == found[1]
    assert found[0]["f"] == pytest.approx(found[0]["accuracy"])


def calling(holder, *, trains):
    """Have a loss call an object that its model or somebody else holds, in one of both modes."""
    torch.manual_seed(2)
    model = nn.Linear(NUM_CLASSES, NUM_CLASSES)
    there = model if holder == "model" else types.SimpleNamespace()
    there.f1 = of_classes.MulticlassF1Score(NUM_CLASSES)

    def loss(model, batch):
        if model.training == trains:
            there.f1(model(batch[0]), batch[1])
        return loss_of(model, batch)

    trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, shards=2)
    trainer.fit(data(), batch_size=16, steps=2, validate=data(30))


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("holder", ["model", "loss.there"])
def test_an_object_that_a_loss_calls_is_refused(holder, trains):
    """It would keep what one worker computes, and `compute` would give another on each."""
    words = rf"`{holder}\.f1\._update_count` carries over .* to `fit\(validate_metrics=…\)`"
    with pytest.raises(RuntimeError, match=words):
        calling(holder, trains=trains)
