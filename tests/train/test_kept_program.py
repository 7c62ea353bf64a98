"""What a program changes between steps and keeps for itself goes on, and back, with its run.

In callbacks, optimizers, layers, closures.
"""

import builtins
import collections
import copy
import functools
import json
import math
import os
import pickle
import subprocess
import time
from collections import deque
from concurrent.futures import Future
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.promises import promise
from tests.replacements import wait_for_replacement
from torch.utils.data import TensorDataset

import unisono
from unisono.callbacks import Callback
from unisono.engine.state.packing import pack_state, unpacked_state
from unisono.errors import CheckpointError
from unisono.programs.account import Account
from unisono.programs.carry import Known, Unpacker
from unisono.programs.forms import FORMS, Opaque
from unisono.programs.kept import KeptProgram
from unisono.programs.live import names_in
from unisono.programs.walk import Walk


class Warming(Callback):
    """Counts steps, and sets the rate by that; its terminal is another one on each rank."""

    def __init__(self, base=0.05):
        self.count, self.base = 0, base

    def on_begin(self, fit):
        self.rank, self.writes = fit.rank, fit.is_leader

    def on_step_begin(self, fit):
        assert self.rank == fit.rank
        self.count += 1
        fit.optimizer.param_groups[0]["lr"] = self.base / self.count


class Meter:
    """A mean, as every program has one."""

    def __init__(self):
        self.sum, self.num = 0.0, 0


class Smoothing(Callback):
    """Keeps averages and lists of what it has seen, and computes with them."""

    def __init__(self):
        self.meter, self.losses, self.last = Meter(), [], deque(maxlen=3)

    def on_step_end(self, fit, step):
        loss = step.means["loss"]
        self.meter.sum += loss
        self.meter.num += 1
        self.losses.append(loss)
        self.last.append({"loss": loss, "epoch": step.epoch})
        mean = self.meter.sum / self.meter.num + sum(one["loss"] for one in self.last)
        fit.optimizer.param_groups[0]["lr"] = 0.01 * (mean + 0.01 * len(self.losses))


class Anchored(Callback):
    """Draws weights to where they were when training began, and to a mean of where they went."""

    def on_begin(self, fit):
        self.anchor = [p.detach().clone() for p in fit.model.parameters()]

    def on_step_end(self, fit, step):
        with torch.no_grad():
            if not hasattr(self, "mean"):
                self.mean = {name: p.clone() for name, p in fit.model.named_parameters()}
            for start, (name, p) in zip(self.anchor, fit.model.named_parameters(), strict=True):
                self.mean[name].lerp_(p, 0.3)
                p.lerp_(start, 0.1).lerp_(self.mean[name], 0.1)


class Counted(torch.optim.Optimizer):
    """Counts its steps in an attribute."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})
        self.t = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.t += 1
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / self.t**0.5)


class Lazy(Counted):
    """Makes what it keeps in its first step."""

    @torch.no_grad()
    def step(self, closure=None):
        if not hasattr(self, "norms"):
            self.norms = torch.zeros(2)
        self.norms[0] += sum(p.grad.square().sum() for g in self.param_groups for p in g["params"])
        self.norms[1] += 1
        super().step()
        for group in self.param_groups:
            group["lr"] = 0.05 / float(self.norms[0] / self.norms[1] + 1)


class Teaching(Callback):
    """Draws a model to a teacher, its own mean over time."""

    teacher = None

    def on_begin(self, fit):
        if self.teacher is None:
            self.teacher = copy.deepcopy(fit.model)

    @torch.no_grad()
    def on_step_end(self, fit, step):
        for mean, p in zip(self.teacher.parameters(), fit.model.parameters(), strict=True):
            mean.lerp_(p, 0.2)
            p.lerp_(mean, 0.1)


def enclosed():
    """Make a callback whose teacher and count are in a closure."""
    teacher, count = torch.nn.Linear(3, 5), 0

    class Enclosed(Callback):
        @torch.no_grad()
        def on_step_end(self, fit, step):
            nonlocal count
            count += 1
            teacher.weight.lerp_(fit.model[0].weight, 1 / count)
            fit.model[0].weight.lerp_(teacher.weight, 0.1)

    return Enclosed()


TICKS = 0


class Ticking(Callback):
    """Counts in a global, in the class and in a torch layer, and sets the rate by that."""

    num = 0

    def __init__(self):
        global TICKS
        TICKS = Ticking.num = 0

    def on_step_end(self, fit, step):
        global TICKS
        TICKS += 1
        Ticking.num += 2
        fit.model.tau = getattr(fit.model, "tau", 1.0) * 0.9
        fit.model[1].p = getattr(fit.model[1], "p", 1.0) * 0.8
        rate = fit.model.tau + fit.model[1].p
        fit.optimizer.param_groups[0]["lr"] = 0.05 * rate / (TICKS + Ticking.num)


class Levels(TensorDataset):
    """Samples of a difficulty that grows."""

    level = 0.5

    def __getitem__(self, index):
        return tuple(value * self.level for value in super().__getitem__(index))


class Harder(Callback):
    def on_step_end(self, fit, step):
        self.data.level += 0.1


class Rows(TensorDataset):
    """Samples of rows, which lie in a list."""

    def __init__(self, rows):
        super().__init__(rows)
        self.rows = [(number, *row) for number, row in enumerate(rows.tolist())]

    def __getitem__(self, index):
        return (torch.tensor(self.rows[index][1:]),)


class Turning(Callback):
    """Turns the rows of a data set, and sets an attribute of a function."""

    def on_step_end(self, fit, step):
        self.data.rows.append(self.data.rows.pop(0))
        rate.of = getattr(rate, "of", 0.05) * 0.9
        fit.optimizer.param_groups[0]["lr"] = rate()


def rate():
    return rate.of


def counting(optimizer):
    """Make a schedule whose function counts its calls."""
    calls = 0

    def factor(epoch):
        nonlocal calls
        calls += 1
        return 1 / calls

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def plain(params):
    return torch.optim.SGD(params, lr=0.05, momentum=0.9)


PROGRAMS = {
    "warming": (plain, Warming),
    "smoothing": (plain, Smoothing),
    "anchored": (plain, Anchored),
    "counted": (Counted, None),
    "lazy": (Lazy, Warming),
    "teaching": (plain, Teaching),
    "enclosed": (plain, enclosed),
    "ticking": (plain, Ticking),
    "harder": (plain, Harder),
    "turning": (plain, Turning),
    "scheduled": (plain, None),
}


def train(names, totals=(4, 9), directory=None, lrs=0.05):
    """Train each of some programs; returns their digests."""
    return {name: train_one(name, totals, directory and f"{directory}/{name}") for name in names}


def train_one(name, totals, directory):
    make, callback = PROGRAMS[name]
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    generator = torch.Generator().manual_seed(1)

    def loss(model, batch):
        wait_for_replacement(trainer.run._context.team)
        return (model(batch[0]) - 1).square().mean()

    rows = torch.randn(24, 3, generator=generator)
    data = (Rows if name == "turning" else Levels)(rows)
    rate.of = 0.05
    callbacks = [callback()] if callback else []
    for each in callbacks:
        each.data = data if name in ("harder", "turning") else None
    optimizer = make(model.parameters())
    schedule = unisono.Schedule(counting(optimizer), every="step") if name == "scheduled" else None
    trainer = unisono.Trainer(
        model,
        optimizer,
        loss,
        shards=4,
        directory=directory,
        checkpoint=1 if directory else None,
        schedule=schedule,
        callbacks=callbacks,
    )
    for total in totals:
        trainer.fit(data, batch_size=8, steps=total)
    return trainer.digest()


ALL = list(PROGRAMS)
IN_AN_UPDATE = "kill:rank=0,step=6,at=update"


@functools.cache
def undisturbed():
    return train(ALL)


@promise("one-result.4")
@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_a_resumed_run_has_the_bits_of_one_that_never_stopped(workers, tmp_path):
    unisono.launch(train, ALL, (4, 6), tmp_path, workers=workers)
    found = unisono.launch(train, ALL, (4, 9), tmp_path, workers=2)
    assert found == [undisturbed()] * 2


@promise("one-result.4")
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
        found = unisono.launch(train, [name], (4, 9), workers=2)
        assert found == [{name: whole[name]}] * 2


def test_what_a_program_gives_anew_counts_where_the_run_has_not_changed_it(tmp_path):
    def rate(base, steps):
        model = torch.nn.Linear(3, 1)
        callback = Warming(base)
        options = {"directory": tmp_path, "callbacks": [callback], "shards": 2}
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = unisono.Trainer(model, optimizer, loss, **options)
        trainer.fit(torch.utils.data.TensorDataset(torch.ones(8, 3)), batch_size=4, steps=steps)
        return callback.count, optimizer.param_groups[0]["lr"]

    assert rate(0.4, 2) == (2, 0.2)
    assert rate(0.8, 4) == (4, 0.2)


def test_a_checkpoint_without_attributes_is_resumed(tmp_path, monkeypatch):
    monkeypatch.setitem(PROGRAMS, "any", (plain, None))
    train_one("any", (2,), tmp_path)
    monkeypatch.setitem(PROGRAMS, "any", (plain, Smoothing))
    train_one("any", (4,), tmp_path)


def loss(model, batch):
    return model(batch[0]).square().mean()


class Thing:
    def __init__(self, **attributes):
        vars(self).update(attributes)


def watched(**attributes):
    model = torch.nn.Linear(2, 1)
    kept = KeptProgram(model, list, {})
    thing = Thing(**attributes)
    kept.watch({}, {"thing": thing}, [])
    kept.has_begun(1, list, None)
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
    items, mean, state = thing.items, thing.mean, copied(kept.state_dict())
    thing.number, thing.seen, thing.later, thing.part.number = 2, {3}, "x", 4
    thing.items.append(6)
    thing.mean += 1
    kept.load_state_dict(state)
    assert (thing.number, thing.seen, thing.part.number) == (1, {1, 2}, 3)
    assert items == [1, {"a": (2.0,)}, 5]
    assert thing.items is items
    assert (thing.mean is mean, mean.tolist()) == (True, [1, 1])
    assert not hasattr(thing, "later")


def copied(state):
    """Go through the form that a checkpoint has."""
    packed, tensors = pack_state({"it": Stateful(state)})
    there = {name: tensor.clone() for name, tensor in tensors.items()}
    return unpacked_state(json.loads(json.dumps(packed)), there)["it"]


class Stateful:
    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state


def test_names_of_a_library_that_a_later_loop_reaches_in_another_order_have_not_changed():
    def one():
        return builtins.str(builtins.ValueError)

    def two():
        return builtins.AssertionError, builtins.str

    kept = KeptProgram(torch.nn.Linear(2, 1), list, {})
    for passes in ({"one": one, "two": two}, {"two": two, "one": one}):
        kept.watch(passes, {}, [])
        kept.has_begun(1, list, None)
        assert kept.state_dict()["values"] == {}


def test_what_belongs_to_the_model_is_named_and_not_copied():
    model, kept, thing = watched()
    thing.weight, thing.data, thing.all = model.weight, model.weight.data, [*model.parameters()]
    thing.number = 1
    state = copied(kept.state_dict())
    weight = model.weight
    thing.weight = thing.data = thing.all = None
    with torch.no_grad():
        weight += 1
    kept.load_state_dict(state)
    assert thing.weight is weight
    assert thing.all[0] is weight
    assert thing.data.data_ptr() == weight.data_ptr()


def test_what_two_places_share_stays_shared():
    _, kept, thing = watched(one=None, other=None)
    thing.one = thing.other = [1]
    state = copied(kept.state_dict())
    thing.one, thing.other = [], []
    kept.load_state_dict(state)
    assert thing.one == [1]
    assert thing.one is thing.other


@promise("one-result.5")
def test_what_cannot_be_carried_is_refused_by_name():
    _, kept, thing = watched()
    thing.numbers = (number for number in range(3))
    with pytest.raises(CheckpointError, match=r"`thing\.numbers` has changed between two steps"):
        kept.state_dict()


@promise("one-result.5")
def test_a_suspended_generator_is_refused_once_it_goes_on():
    _, kept, thing = watched(numbers=(number for number in range(3)))
    kept.state_dict()
    next(thing.numbers)
    with pytest.raises(CheckpointError, match=r"`thing\.numbers` .* a Python generator"):
        kept.state_dict()


def test_elements_of_an_array_of_objects_go_back_to_where_they_were():
    words = np.array(["a", [1], None], dtype=object)
    _, kept, thing = watched(words=words)
    words[0], words[1][0] = "b", 2
    state = copied(kept.state_dict())
    words[:] = ["c", [3], 0]
    kept.load_state_dict(state)
    assert thing.words is words
    assert words.tolist() == ["b", [2], None]


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", ["csr", "csc"])
def test_a_sparse_tensor_is_refused_once_it_changes(layout):
    tensor = getattr(torch.eye(3), f"to_sparse_{layout}")()
    _, kept, _ = watched(graph=tensor)
    kept.state_dict()
    tensor.values()[0] = 2
    with pytest.raises(CheckpointError, match=r"`thing\.graph` has .* a tensor of layout"):
        kept.state_dict()


def test_a_sparse_tensor_of_places_and_values_is_put_back():
    tensor = torch.eye(3).to_sparse_coo()
    _, kept, _ = watched(graph=tensor)
    tensor._values()[0] = 2
    state = copied(kept.state_dict())
    tensor._values()[:] = 3
    kept.load_state_dict(state)
    assert tensor.to_dense().diag().tolist() == [2, 1, 1]


@promise("one-result.16")
def test_one_line_says_that_a_program_leads_to_more_than_is_looked_at(monkeypatch, capsys):
    monkeypatch.setattr("unisono.programs.walk.VISITED_AT_MOST", 30)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    class Holds(Callback):
        def on_step_end(self, fit, step):
            pass

    seen = Holds()
    seen.all = [[n] for n in range(100)]
    trainer = unisono.Trainer(model, optimizer, loss, callbacks=[seen])
    trainer.fit(TensorDataset(torch.ones(8, 3)), batch_size=4, steps=2)
    assert capsys.readouterr().out.count("are not saved with the run, so keep what") == 1


@promise("one-result.7")
def test_of_what_passes_store_only_numbers_are_kept():
    _, kept, thing = watched(last=1.0, tau=1.0, name="", bank={})
    before = Account(Walk({"thing": thing}).holders)
    thing.last, thing.name, thing.bank[3] = 2.0, "mine", "new"
    kept.stored_in_passes(before.changes())
    thing.last, thing.tau, thing.bank[4] = 3.0, 4.0, "newer"
    (values,) = kept.state_dict()["values"].values()
    assert values == {"slots": {"last": 3.0, "tau": 4.0}, "gone": [], "rest": []}


def test_what_is_set_before_the_first_step_comes_back_with_the_first_snapshot():
    _, kept, thing = watched(number=1)
    before = {"loop": 0, "values": {}, "own": [], "drawn": [], "replaced": []}
    thing.number, thing.later = 2, 3
    kept.load_state_dict(before)
    assert vars(thing) == {"number": 1}


HOSTILE = [
    {"@": "name", "n": 0, "module": "os", "name": "system"},
    {"@": "module", "n": 0, "module": "subprocess"},
    {
        "@": "object",
        "n": 0,
        "base": "object",
        "class": {"@": "name", "module": "subprocess", "name": "Popen"},
    },
    {"@": "value", "n": 0, "made": "eval", "of": ["1"], "state": None},
    {"@": "function", "n": 0, "module": "os", "code": "x", "of": []},
    {"@": "at", "path": "nowhere"},
    {
        "@": "weak",
        "n": 0,
        "of": [
            {"@": "at", "path": "thing"},
            "ReferenceType",
            {"@": "partial", "n": 1, "of": [{"@": "at", "path": "thing"}, [], {}]},
        ],
    },
    {"@": "unheard of", "n": 0},
]


@promise("nothing-lost.15")
@pytest.mark.parametrize("packed", HOSTILE)
def test_a_hostile_checkpoint_gets_at_nothing_that_the_program_does_not_name(packed):
    _, kept, _ = watched(number=1)
    values = {"attributes thing": {"slots": {"number": packed}, "gone": []}}
    with pytest.raises(CheckpointError, match="restoring what the program had changed"):
        kept.load_state_dict({"loop": 1, "values": values, "own": [], "drawn": [], "replaced": []})


def names_a_lot(model, trainer):
    """Has names that are also those of functions that act on the system."""
    model.eval(), trainer.run(), os.system, pickle.loads, torch.load, torch.tanh, np.load
    kinds = KeyError, collections.OrderedDict
    return math.sqrt, np.tanh, F.gelu, subprocess, exec, open, setattr, len, kinds


@pytest.mark.parametrize(
    ("module", "name", "is_restored"),
    [
        ("builtins", "eval", False),
        ("builtins", "exec", False),
        ("builtins", "open", False),
        ("builtins", "setattr", False),
        ("builtins", "KeyError", True),
        ("os", "system", False),
        (__name__, "os.system", False),
        ("subprocess", "run", False),
        ("pickle", "loads", False),
        ("torch", "load", False),
        ("numpy", "load", False),
        ("shutil", "rmtree", False),
        ("torch.nn.functional", "gelu", True),
        ("torch", "tanh", True),
        ("numpy", "tanh", True),
        ("math", "sqrt", True),
        ("math", "FREXP".lower(), False),  # nothing names it
        ("builtins", "len", True),
        ("collections", "OrderedDict", True),
        (__name__, "names_a_lot", True),
    ],
)
@promise("nothing-lost.15")
def test_a_file_gets_at_functions_that_only_compute(module, name, is_restored):
    known = Known({"loss": names_a_lot}, {*names_in(names_a_lot.__code__)}, dict)
    unpacker = Unpacker(known, torch.device("cpu"))
    with nullcontext() if is_restored else pytest.raises(Opaque):
        unpacker.unpack({"@": "name", "n": 0, "module": module, "name": name})


def test_unpacking_calls_nothing():
    unpacker = Unpacker(Known({"loss": names_a_lot}, set(), dict), torch.device("cpu"))
    calling = {"@": "value", "n": 1, "of": ["iter", {"@": "at", "path": "loss"}, 0, None]}
    with pytest.raises(ValueError, match="iter"):
        unpacker.unpack({"@": "value", "n": 0, "of": ["bytearray", calling, None]})
    with pytest.raises(RuntimeError, match="index"):
        FORMS["sparse"].make(torch.tensor([[1 << 33]]), torch.ones(1), torch.Size([1]))


def test_what_was_damaged_in_a_checkpoint_is_refused():
    whole = {"loop": 1, "values": {}, "own": [], "drawn": [], "replaced": []}
    for damaged in ({"loop": 1}, whole | {"values": 3}, whole | {"own": 1}):
        _, kept, _ = watched(number=1)
        with pytest.raises(CheckpointError, match="restoring what the program had changed"):
            kept.load_state_dict(damaged)


class Keeps(Callback):
    """Has what cannot be kept with the run: a time in a row, and a result to come."""

    def __init__(self):
        self.rows, self.future = [], None

    def on_step_end(self, fit, step):
        self.rows.append((time.perf_counter(), step.means["loss"]))
        self.future = Future()


def keep():
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, loss, shards=2, callbacks=[Keeps()])
    trainer.fit(TensorDataset(torch.ones(8, 3)), batch_size=4, steps=8)


@promise("one-result.5", "one-result.6")
@pytest.mark.slow
def test_what_is_left_to_each_worker_is_told_once(capfd):
    unisono.launch(keep, workers=2)
    out = capfd.readouterr().out
    assert out.count("`Keeps.rows` differs from worker to worker") == 1
    assert out.count("`Keeps.future` (a concurrent.futures._base.Future) has changed since") == 1


def test_a_file_sets_nothing_of_the_process_that_the_program_never_sets(monkeypatch):
    monkeypatch.delenv("PATH_OF_OTHERS", raising=False)
    _, kept, _ = watched()
    state = kept.state_dict()
    here = os.getcwd()
    slots = {"os.environ PATH_OF_OTHERS": "x", "os.environ RANK": "7", "os.getcwd()": "/"}
    there = {"slots": slots, "gone": [], "rest": []}
    kept.load_state_dict({**state, "values": {**state["values"], "settings ": there}})
    assert os.getcwd() == here
    assert os.environ.keys().isdisjoint({"PATH_OF_OTHERS"})
    assert os.environ.get("RANK") != "7"
