"""Early stopping: decided once, by what validations found, on any number of workers."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import unisono
from unisono.train.stopping import decide


@pytest.mark.parametrize(
    ("options", "means", "stops_after"),
    [
        ({"patience": 1}, [3.0, 2.0, 2.0, 1.0], 3),
        ({"patience": 2}, [3.0, 4.0, 2.0, 2.5, 2.0, 1.0], 5),
        ({"patience": 2}, [3.0, 4.0, 2.0, 2.5, 1.0], None),
        ({"patience": 1, "better": "higher"}, [1.0, 2.0, 1.5], 3),
        ({"patience": 1, "min_delta": 0.5}, [3.0, 2.4, 2.0], 3),
        ({"patience": 2}, [float("nan"), 3.0, float("nan"), 2.0], None),
        ({"patience": 2}, [1.0, float("nan"), float("nan")], 3),
        ({"patience": 2}, [float("nan"), float("nan"), float("nan")], 3),
    ],
)
def test_patience(options, means, stops_after):
    rule, last = unisono.EarlyStopping(**options), {}
    stopped = [n for n, mean in enumerate(means, 1) if decide(rule, {"loss": mean}, last)]
    assert (stopped[0] if stopped else None) == stops_after


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"patience": 0}, ValueError, "`patience`"),
        ({"patience": 1.5}, TypeError, "`patience`"),
        ({"better": "small"}, ValueError, "`better` must be one of"),
        ({"min_delta": -1.0}, ValueError, "`min_delta` must be at least 0"),
    ],
)
def test_wrong_options_are_refused(options, kind, words):
    with pytest.raises(kind, match=words):
        unisono.EarlyStopping(**options)


def data(num_samples):
    x = torch.randn(num_samples, 6, generator=torch.Generator().manual_seed(num_samples))
    labels = torch.randint(2, (num_samples,), generator=torch.Generator().manual_seed(5))
    return TensorDataset(x, labels)  # nothing to be learned


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


RULE = {"patience": 2, "min_delta": 0.02}


def train(epochs=40, rule=RULE, **options):
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    trainer = unisono.Trainer(model, optimizer, loss, shards=3, **options)
    trainer.fit(
        data(40),
        batch_size=10,
        epochs=epochs,
        validate=data(31),
        stop_early=unisono.EarlyStopping(**rule) if rule else None,
    )
    return trainer.run.position.epoch, trainer.digest()


def test_a_run_ends_when_validations_get_no_better(capsys):
    epoch, _ = train()
    assert 2 < epoch < 40
    assert capsys.readouterr().out.count("stopping early: loss was") == 1


@pytest.mark.slow
def test_workers_and_losses_of_them_change_nothing(monkeypatch):
    alone = train()
    assert unisono.launch(train, workers=3) == [alone] * 3
    for fault in (f"kill:rank=0,step={4 * alone[0] - 1},at=update", "kill:rank=1,step=5"):
        monkeypatch.setenv("UNISONO_FAULTS", fault)
        assert unisono.launch(train, workers=3) == [alone] * 3


def test_a_stopped_run_stays_stopped_and_goes_on_if_wanted(tmp_path):
    undisturbed = train()
    train(epochs=2, directory=tmp_path)
    assert train(directory=tmp_path) == undisturbed
    assert train(directory=tmp_path) == undisturbed
    assert train(directory=tmp_path, rule=None)[0] == 40


def test_a_name_that_no_mean_has_is_refused():
    with pytest.raises(ValueError, match=r"`monitor` must be one of .*\['loss'\], but is 'f1'"):
        train(rule={"monitor": "f1"})


def test_it_needs_validation():
    model = torch.nn.Linear(6, 2)
    trainer = unisono.Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, shards=1)
    with pytest.raises(ValueError, match="`validate` must be given for `stop_early`"):
        trainer.fit(data(10), batch_size=5, epochs=1, stop_early=unisono.EarlyStopping())
