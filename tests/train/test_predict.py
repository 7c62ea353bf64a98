"""Predictions: one row a sample, in dataset order, the same bits on any number of workers."""

import errno
import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.runtime.workers.team import Team


def make(shards=4):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.5), nn.ReLU(), nn.Linear(7, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, lambda model, batch: None, shards=shards)


def data(num_samples):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_samples, 5, generator=generator)
    return TensorDataset(x, torch.arange(num_samples))


def test_row_i_belongs_to_sample_i():
    trainer, dataset = make(), data(103)
    rows = trainer.predict(
        dataset, batch_size=10, forward=lambda model, batch: (model(batch[0]), batch[1])
    )
    assert isinstance(rows, tuple)
    assert rows[1].tolist() == list(range(103))
    trainer.run.model.eval()
    assert torch.allclose(rows[0], trainer.run.model(dataset.tensors[0]).detach(), atol=1e-6)


def test_the_model_is_called_with_the_first_part_by_default():
    trainer, dataset = make(shards=1), data(8)
    trainer.run.model.eval()
    expected = trainer.run.model(dataset.tensors[0]).detach()
    trainer.run.model.train()
    assert torch.equal(trainer.predict(dataset, batch_size=8), expected)
    assert torch.equal(trainer.predict(dataset.tensors[0], batch_size=8), expected)
    assert trainer.run.model.training


def predict_in_a_worker():
    forward = {"logits": 0, "number": 1}
    rows = make().predict(
        data(10_007),
        batch_size=64,
        forward=lambda model, batch: {
            name: (model(batch[0]).double(), batch[1].int())[part] for name, part in forward.items()
        },
    )
    rows["number"][0] = -unisono.world().rank  # each worker's rows are its own
    assert rows["number"][0] == -unisono.world().rank
    assert rows["number"].tolist()[1:] == list(range(1, 10_007))
    return rows["logits"].clone()


@pytest.mark.slow
def test_the_same_bits_on_one_to_four_workers():
    alone = predict_in_a_worker()
    for workers in (2, 3, 4):
        for rows in unisono.launch(predict_in_a_worker, workers=workers):
            assert torch.equal(rows, alone)


@pytest.mark.parametrize(
    ("forward", "kind", "words"),
    [
        (lambda model, batch: model(batch[0]).sum(), ValueError, "one row for each sample"),
        (lambda model, batch: 3.0, TypeError, "tensor, or a tuple or dict"),
        (lambda model, batch: [model(batch[0]), None], TypeError, "'1' is of type NoneType"),
        (
            lambda model, batch: torch.zeros(len(batch[0]), int(batch[1].max())),
            ValueError,
            "same names, dtypes and shapes",
        ),
        (lambda model, batch: {0: batch[1], "0": batch[1]}, TypeError, "one is 0, of type int"),
        (lambda model, batch: {"__metadata__": batch[1]}, TypeError, "safetensors reserves"),
        (lambda model, batch: batch[0].to_sparse(), TypeError, "float32, torch.sparse_coo"),
    ],
)
def test_what_is_no_prediction_is_refused(forward, kind, words):
    with pytest.raises(kind, match=words):
        make().predict(data(30), batch_size=10, forward=forward)


class Unlucky(Exception):
    pass


def predict_again_after_failures():
    trainer, caught = make(), []

    def fail_at(sample):
        def forward(model, batch):
            if sample in batch[1]:
                raise Unlucky(f"sample {sample}")
            return model(batch[0])

        return forward

    wrong = lambda model, batch: model(batch[0]).to(torch.complex128)  # noqa: E731
    for forward in (wrong, fail_at(0), fail_at(29)):
        try:
            trainer.predict(data(30), batch_size=10, forward=forward)
        except Exception as error:
            caught.append((type(error).__name__, str(error)))
    return caught, trainer.predict(data(30), batch_size=10).tolist()


@pytest.mark.slow
def test_what_one_worker_raises_all_raise_and_the_next_call_works():
    alone = predict_again_after_failures()
    kinds = [kind for kind, _ in alone[0]]
    assert kinds == ["TypeError", "Unlucky", "Unlucky"]
    assert unisono.launch(predict_again_after_failures, workers=2) == [alone] * 2


def predict_where_rank_1_cannot_open():
    def deny(*where):
        raise PermissionError(errno.EACCES, "denied")

    if unisono.world().rank == 1:
        Team.memory_fd = deny
    try:
        make().predict(data(30), batch_size=10)
    except OSError as error:
        return str(error)
    return None


@pytest.mark.slow
def test_a_worker_that_cannot_open_the_file_is_named_by_all():
    first, second = unisono.launch(predict_where_rank_1_cannot_open, workers=2)
    assert first == second
    assert "rank 1 cannot open the unnamed temporary file" in first
    assert first.endswith("[Errno 13] denied.")


def die_while_predicting(victim):
    trainer = make()
    trainer.digest()

    def forward(model, batch):
        is_first = os.environ["UNISONO_INCARNATION"] == "0"
        if unisono.world().rank == victim and is_first and (batch[1] > 200).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return model(batch[0])

    return trainer.predict(data(403), batch_size=16, forward=forward).clone()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2])
def test_rows_of_a_worker_that_is_killed_are_computed_by_the_others(victim):
    expected = make().predict(data(403), batch_size=16)
    for rows in unisono.launch(die_while_predicting, victim, workers=3):
        assert torch.equal(rows, expected)


def train_and_predict(where, count):
    """Predict outside of the loop, or after its third step, and train on."""
    trainer = make(shards=2)
    dataset = data(40)
    rows = []

    def number(shift):
        return lambda model, batch: batch[1] + shift

    def predict_all():
        for shift in range(count):
            rows.append(trainer.predict(dataset, batch_size=8, forward=number(100 * shift)))

    if where == "outside":
        predict_all()
    for step in trainer.run.steps(dataset, batch_size=8, steps=12):
        with step:
            for batch in step.shards:
                step.backward(trainer.run.model(batch[0]).square().mean())
        if where == "inside" and step.number == 3:
            predict_all()
    return [each[:2].tolist() for each in rows], trainer.digest()


def and_kill(monkeypatch, where, count, rank=1):
    monkeypatch.setenv("UNISONO_FAULTS", f"kill:rank={rank},step=8")
    return unisono.launch(train_and_predict, where, count, workers=2)


@pytest.mark.slow
def test_rows_within_a_loop_leave_recovery_as_it_was(monkeypatch, capfd):
    _, digest = unisono.launch(train_and_predict, "inside", 1, workers=1)[0]
    first, second = and_kill(monkeypatch, "inside", 1)
    assert first == second == ([[0, 1]], digest)  # the replacement has the list of the others
    assert "not replaced" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "count"), [(0, 1), (1, 2)])
def test_a_replacement_gets_the_rows_of_every_prediction(monkeypatch, rank, count, capfd):
    expected = unisono.launch(train_and_predict, "outside", count, workers=1)[0]
    assert expected[0] == [[100 * shift, 100 * shift + 1] for shift in range(count)]
    assert and_kill(monkeypatch, "outside", count, rank) == [expected, expected]
    assert "not replaced" not in capfd.readouterr().err
