"""What a program changes between steps and keeps for itself goes on, and back, with its run."""

import functools

import pytest
import torch
from tests.train import keeping

import unisono
from unisono.engine.state.attributes import Attributes
from unisono.errors import CheckpointError

ALL = list(keeping.PROGRAMS)
IN_AN_UPDATE = "kill:rank=0,step=6,at=update"


@functools.cache
def undisturbed():
    return keeping.train(ALL)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(workers, tmp_path):
    unisono.launch(keeping.train, ALL, (4, 6), tmp_path, workers=workers)
    found = unisono.launch(keeping.train, ALL, (4, 9), tmp_path, workers=2)
    assert found == [undisturbed()] * 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "faults", "names"),
    [
        ("auto", IN_AN_UPDATE, ALL),
        ("auto", "kill:rank=0,step=0,at=update", ["anchored"]),
        ("auto", "kill:rank=1,step=2", ["warming"]),
        ("staged", IN_AN_UPDATE, ["counted", "enclosed", "scheduled"]),
        ("gloo", "kill:rank=0,step=6", ["smoothing", "ticking"]),
    ],
)
def test_lost_workers_change_nothing(exchange, faults, names, monkeypatch):
    whole = undisturbed()
    monkeypatch.setenv("UNISONO_FAULTS", faults)
    monkeypatch.setenv("UNISONO_EXCHANGE", exchange)
    for name in names:
        found = unisono.launch(keeping.train, [name], (4, 9), workers=2)
        assert found == [{name: whole[name]}] * 2


def test_what_a_program_gives_anew_counts_where_the_run_has_not_changed_it(tmp_path):
    def rate(base, steps):
        model = torch.nn.Linear(3, 1)
        callback = keeping.Warming(base)
        options = {"directory": tmp_path, "callbacks": [callback], "shards": 2}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = unisono.Trainer(model, optimizer, loss, **options)
        trainer.fit(torch.utils.data.TensorDataset(torch.ones(8, 3)), batch_size=4, steps=steps)
        return callback.count, optimizer.param_groups[0]["lr"]

    assert rate(0.4, 2) == (2, 0.2)
    assert rate(0.8, 4) == (4, 0.2)


def test_a_checkpoint_without_attributes_is_resumed(tmp_path, monkeypatch):
    monkeypatch.setitem(keeping.PROGRAMS, "any", (keeping.plain, None))
    keeping.train_one("any", (2,), tmp_path)
    monkeypatch.setitem(keeping.PROGRAMS, "any", (keeping.plain, keeping.Smoothing))
    keeping.train_one("any", (4,), tmp_path)


def loss(model, batch):
    return model(batch[0]).square().mean()


class Thing:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def watched(**attributes):
    model = torch.nn.Linear(2, 1)
    kept = Attributes(model, torch.optim.SGD(model.parameters(), lr=0.1))
    thing = Thing(**attributes)
    kept.watch({"thing": thing})
    kept.has_begun(1, None)
    return model, kept, thing


def test_values_of_all_kinds_go_back_and_what_came_later_is_gone():
    _, kept, thing = watched(
        number=1,
        items=[1, {"a": (2.0,)}],
        seen={1, 2},
        mean=torch.zeros(2),
        file=None,
        part=Thing(),
    )
    thing.mean += 1
    thing.items.append(5)
    thing.part.number = 3
    items, mean, state = thing.items, thing.mean, kept.state_dict()
    state["values"] |= {"thing: items": [*items], "thing: mean": mean.clone()}
    thing.number, thing.seen, thing.later, thing.part.number = 2, {3}, "x", 4
    thing.items.append(6)
    thing.mean += 1
    kept.load_state_dict(state)
    assert (thing.number, thing.seen, thing.part.number) == (1, {1, 2}, 3)
    assert items == [1, {"a": (2.0,)}, 5]
    assert thing.items is items
    assert (thing.mean is mean, mean.tolist()) == (True, [1, 1])
    assert not hasattr(thing, "later")


def test_what_belongs_to_the_model_or_cannot_be_kept_stays_where_it_is():
    model, kept, thing = watched()
    thing.weight, thing.data, thing.all = model.weight, model.weight.data, [*model.parameters()]
    thing.call, thing.keys, thing.number = print, {object(): 1}, 1
    said = kept.state_dict()
    assert said["values"] == {"thing: number": 1}
    assert said["rest"] == [f"thing: {name}" for name in ("all", "call", "data", "keys", "weight")]
    kept.load_state_dict(kept.state_dict())
    assert thing.weight is model.weight


def test_what_is_set_before_the_first_step_comes_back_with_the_first_snapshot():
    _, kept, thing = watched(number=1)
    before = {"loop": 0, "values": {}, "rest": [], "own": [], "moved": []}
    thing.number, thing.later = 2, 3
    kept.load_state_dict(before)
    assert vars(thing) == {"number": 1}


def test_what_was_damaged_in_a_checkpoint_is_refused():
    model = torch.nn.Linear(2, 1)
    whole = {"loop": 1, "values": {}, "rest": [], "own": [], "moved": []}
    for damaged in ({"loop": 1}, whole | {"values": 3}, whole | {"rest": None}, whole | {"own": 1}):
        attributes = Attributes(model, torch.optim.SGD(model.parameters()))
        attributes.watch({"a": Holder()})
        with pytest.raises(CheckpointError, match="must be as they were saved"):
            attributes.load_state_dict(damaged)


class Holder:
    def __init__(self):
        self.number = 1
