"""Predictions: one row a sample, in dataset order, the same bits on any number of workers."""

import os
import signal

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import TensorDataset

import unisono


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


def predict_in_a_worker(path=None):
    forward = {"logits": 0, "number": 1}
    rows = make().predict(
        data(10_007),
        batch_size=64,
        forward=lambda model, batch: {
            name: (model(batch[0]).double(), batch[1].int())[part] for name, part in forward.items()
        },
        path=path,
    )
    rows["number"][0] = -unisono.world().rank  # each worker's rows are its own
    assert rows["number"][0] == -unisono.world().rank
    assert rows["number"].tolist()[1:] == list(range(1, 10_007))
    return rows["logits"].clone()


def test_the_same_bits_on_one_two_and_three_workers(tmp_path):
    alone = predict_in_a_worker()
    for workers in (2, 3):
        path = tmp_path / f"with a space {workers}.safetensors"
        for given in (None, path):
            for rows in unisono.launch(predict_in_a_worker, given, workers=workers):
                assert torch.equal(rows, alone)
        assert torch.equal(load_file(path)["logits"], alone)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "with a space 2.safetensors",
        "with a space 3.safetensors",
    ]


def lose_one(path):
    trainer = make()
    dataset = TensorDataset(torch.randn(40, 5, generator=torch.Generator().manual_seed(1)))
    loss = lambda model, batch: model(batch[0]).square().mean()  # noqa: E731
    trainer = unisono.Trainer(trainer.run.model, trainer.run.optimizer, loss, shards=4)
    trainer.fit(dataset, batch_size=8, epochs=1)
    first = trainer.predict(dataset, batch_size=8, path=path).clone()
    trainer.fit(dataset, batch_size=8, epochs=3)
    return first, trainer.predict(dataset, batch_size=8), trainer.digest()


@pytest.mark.slow
@pytest.mark.parametrize("in_a_file", [False, True])
@pytest.mark.parametrize("fault", ["kill:rank=0,step=12", "kill:rank=1,step=3"])
def test_a_replacement_is_told_what_was_predicted(tmp_path, monkeypatch, fault, in_a_file):
    path = tmp_path / "rows.safetensors" if in_a_file else None
    expected = unisono.launch(lose_one, path, workers=3)
    monkeypatch.setenv("UNISONO_FAULTS", fault)
    for seen, wanted in zip(unisono.launch(lose_one, path, workers=3), expected, strict=True):
        assert torch.equal(seen[0], wanted[0])
        assert torch.equal(seen[1], wanted[1])
        assert seen[2] == wanted[2]


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
    ],
)
def test_what_is_no_prediction_is_refused(forward, kind, words):
    with pytest.raises(kind, match=words):
        make().predict(data(30), batch_size=10, forward=forward)


def test_a_folder_that_is_missing_is_an_error_and_leaves_nothing(tmp_path):
    with pytest.raises(OSError, match="predictions must be written to"):
        make().predict(data(30), batch_size=10, path=tmp_path / "no" / "rows.safetensors")


def test_a_failure_on_the_way_leaves_the_old_file(tmp_path):
    path = tmp_path / "rows.safetensors"
    path.write_bytes(b"old")

    def forward(model, batch):
        if 20 in batch[1]:
            raise RuntimeError("no such luck")
        return batch[1]

    with pytest.raises(RuntimeError, match="no such luck"):
        make().predict(data(30), batch_size=10, forward=forward, path=path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def die_while_predicting(victim, path):
    trainer = make()
    trainer.digest()

    def forward(model, batch):
        is_first = os.environ["UNISONO_INCARNATION"] == "0"
        if unisono.world().rank == victim and is_first and (batch[1] > 200).any():
            os.kill(os.getpid(), signal.SIGKILL)
        return model(batch[0])

    return trainer.predict(data(403), batch_size=16, forward=forward, path=path).clone()


@pytest.mark.slow
@pytest.mark.parametrize("in_a_file", [False, True])
@pytest.mark.parametrize("victim", [0, 2])
def test_rows_of_a_worker_that_is_killed_are_computed_by_the_others(tmp_path, victim, in_a_file):
    path = tmp_path / "rows.safetensors" if in_a_file else None
    expected = make().predict(data(403), batch_size=16)
    for rows in unisono.launch(die_while_predicting, victim, path, workers=3):
        assert torch.equal(rows, expected)
