"""Predictions: one row a sample, in dataset order, the same bits on any number of workers."""

import errno
import os
import signal

import pytest
import torch
from safetensors.torch import load_file
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


@pytest.mark.slow
def test_the_same_bits_on_one_to_four_workers(tmp_path):
    alone = predict_in_a_worker()
    for workers in (2, 3):
        path = tmp_path / f"with a space {workers}.safetensors"
        for given in (None, path):
            for rows in unisono.launch(predict_in_a_worker, given, workers=workers):
                assert torch.equal(rows, alone)
        assert torch.equal(load_file(path)["logits"], alone)
    for rows in unisono.launch(predict_in_a_worker, workers=4):
        assert torch.equal(rows, alone)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "with a space 2.safetensors",
        "with a space 3.safetensors",
    ]


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
        (lambda model, batch: {"__metadata__": batch[1]}, ValueError, "file can hold"),
        (lambda model, batch: batch[0].to_sparse(), TypeError, "float32, torch.sparse_coo"),
    ],
)
def test_what_is_no_prediction_is_refused(forward, kind, words):
    with pytest.raises(kind, match=words):
        make().predict(data(30), batch_size=10, forward=forward)


def unwanted(model, batch):
    raise AssertionError("nothing is to be computed")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no/rows.safetensors", "there is no folder .*no: make it first"),
        ("folder", "that is a folder: name a file in it"),
        ("pipe", "that is no file"),
    ],
)
def test_a_name_that_no_file_can_get_is_refused_before_anything_is_computed(tmp_path, name, words):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match=f"predictions must be written to .*{words}"):
        make().predict(data(30), batch_size=10, forward=unwanted, path=tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]


def test_rows_that_cannot_get_their_name_in_the_end_are_kept(tmp_path):
    path = tmp_path / "rows.safetensors"

    def forward(model, batch):
        path.mkdir(exist_ok=True)
        return batch[1]

    with pytest.raises(OSError, match=r"Is a directory.*every row is in ") as caught:
        make().predict(data(30), batch_size=10, forward=forward, path=path)
    (partial,) = tmp_path.glob("*.partial")
    assert str(partial) in str(caught.value)
    assert load_file(partial)["predictions"].tolist() == list(range(30))


def test_a_file_of_rows_that_was_taken_away_is_an_error(tmp_path):
    def forward(model, batch):
        for partial in tmp_path.glob("*.partial"):
            partial.unlink()
        return batch[1]

    with pytest.raises(OSError, match="removed or replaced meanwhile"):
        make().predict(data(30), batch_size=10, forward=forward, path=tmp_path / "rows")
    assert not list(tmp_path.iterdir())


class Unlucky(Exception):
    pass


def predict_again_after_failures(path):
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
            trainer.predict(data(30), batch_size=10, forward=forward, path=path)
        except Exception as error:
            caught.append((type(error).__name__, str(error)))
    return caught, trainer.predict(data(30), batch_size=10, path=path).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("in_a_file", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_one_worker_raises_all_raise_and_the_next_call_works(tmp_path, in_a_file):
    path = tmp_path / "rows.safetensors" if in_a_file else None
    alone = predict_again_after_failures(path)
    kinds = [kind for kind, _ in alone[0]]
    assert kinds == ["TypeError", "Unlucky", "Unlucky"]
    assert unisono.launch(predict_again_after_failures, path, workers=2) == [alone] * 2


def predict_where_rank_1_cannot_open(path):
    def deny(*where):
        raise PermissionError(errno.EACCES, "denied")

    if unisono.world().rank == 1:
        Team.memory_fd = deny
    try:
        make().predict(data(30), batch_size=10, path=path)
    except OSError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("in_a_file", [False, True])
def test_a_worker_that_cannot_open_the_file_is_named_by_all(tmp_path, in_a_file):
    path = tmp_path / "rows.safetensors" if in_a_file else None
    first, second = unisono.launch(predict_where_rank_1_cannot_open, path, workers=2)
    assert first == second
    assert f"written to {path or 'a file without a name'}, which rank 1 cannot open" in first
    assert first.endswith("[Errno 13] denied.")
    assert not list(tmp_path.iterdir())


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


def end_while_predicting(launcher, signum, path):
    def forward(model, batch):
        if (batch[1] > 200).any():
            if launcher is None or unisono.world().rank == 0:
                os.kill(launcher or os.getpid(), signum)
            signal.pause()
        return model(batch[0])

    make().predict(data(403), batch_size=16, forward=forward, path=path)


@pytest.mark.slow
def test_a_job_that_is_ended_leaves_no_file(tmp_path):
    path = tmp_path / "rows.safetensors"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        unisono.launch(end_while_predicting, os.getpid(), signal.SIGINT, path, workers=2)
    with pytest.raises(unisono.errors.WorkerError):
        unisono.launch(end_while_predicting, None, signal.SIGKILL, path, workers=2, restarts=0)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def train_and_predict(where, paths):
    """Predict outside of the loop, or after its third step, and train on."""
    trainer = make(shards=2)
    dataset = data(40)
    rows = []

    def number(shift):
        return lambda model, batch: batch[1] + shift

    def predict_all():
        for shift, path in enumerate(paths):
            rows.append(
                trainer.predict(dataset, batch_size=8, forward=number(100 * shift), path=path)
            )

    if where == "outside":
        predict_all()
    for step in trainer.run.steps(dataset, batch_size=8, steps=12):
        with step:
            for batch in step.shards:
                step.backward(trainer.run.model(batch[0]).square().mean())
        if where == "inside" and step.number == 3:
            predict_all()
    return [each[:2].tolist() for each in rows], trainer.digest()


def and_kill(monkeypatch, where, paths, rank=1):
    monkeypatch.setenv("UNISONO_FAULTS", f"kill:rank={rank},step=8")
    return unisono.launch(train_and_predict, where, paths, workers=2)


@pytest.mark.slow
def test_rows_within_a_loop_leave_recovery_as_it_was(monkeypatch, capfd):
    _, digest = unisono.launch(train_and_predict, "inside", [None], workers=1)[0]
    first, second = and_kill(monkeypatch, "inside", [None])
    assert first == ([[0, 1]], digest)
    assert second == ([], digest)  # the replacement came after the prediction
    assert "not replaced" not in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "names"), [(0, [None]), (1, ["one", "one"]), (0, ["first", "second"])]
)
def test_a_replacement_gets_the_rows_of_every_prediction(monkeypatch, tmp_path, rank, names, capfd):
    paths = [name and tmp_path / name for name in names]
    expected = unisono.launch(train_and_predict, "outside", paths, workers=1)[0]
    assert expected[0] == [[100 * shift, 100 * shift + 1] for shift in range(len(names))]
    assert and_kill(monkeypatch, "outside", paths, rank) == [expected, expected]
    assert "not replaced" not in capfd.readouterr().err
    assert sorted(os.listdir(tmp_path)) == sorted({name for name in names if name})
