"""The event file holds what happened, each step once, whatever becomes of the workers."""

import contextlib
import errno
import functools
import json
import math
import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.classified import with_accuracy as loss
from torch.utils.data import TensorDataset

import unisono
from unisono.callbacks import Callback, EventLog, Times
from unisono.tools.report.run_progress import RunProgress
from unisono.training.callbacks import event_log, journal
from unisono.training.callbacks.event_log import encode, place_of, step_line
from unisono.training.callbacks.journal import Journal
from unisono.training.events.events import read_event
from unisono.training.events.follow import EventReader
from unisono.training.fit import FitUnderWay

ODD = st.sampled_from([*sys.float_info, math.nan, -math.inf, 10**400, -1, 2**63, "\ud800\0", True])
NESTED = st.recursive(
    st.none() | ODD | st.floats() | st.text(max_size=5),
    lambda said: (
        st.lists(said, max_size=4)
        | st.dictionaries(
            st.sampled_from(
                ["event", "step", "format", "ranks", "means", "why", "pids", "command"]
            ),
            said | st.sampled_from(["step", "start", "workers", "failure", "end", "evaluation"]),
        )
    ),
)
OF_A_STEP = st.fixed_dictionaries({"event": st.sampled_from(["step", "end"]), "step": ODD | NESTED})
PHASES = [name for name in Times._fields if name != "begun_s"]


def as_line(said):
    return json.dumps(said).encode()


def data(num_samples=40):
    x = torch.randn(num_samples, 6, generator=torch.Generator().manual_seed(num_samples))
    return TensorDataset(x, (x[:, 0] > 0).long())


def make(directory, **options):
    torch.manual_seed(4)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    options = {"shards": 3, "directory": directory, **options}
    optimizer = options.pop("optimizer", functools.partial(torch.optim.AdamW, lr=0.05))
    optimizer = optimizer(model.parameters())
    return unisono.Trainer(model, optimizer, options.pop("loss", loss), **options)


def train(directory, epochs=3, **options):
    trainer = make(directory, **options)
    trainer.fit(data(), batch_size=10, epochs=epochs, validate=data(31))
    return trainer.digest()


def events(directory, *kinds, name="events.jsonl"):
    lines = (directory / name).read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [event for event in found if not kinds or event["event"] in kinds]


def numbers(directory):
    return [event["step"] for event in events(directory, "step")]


def test_a_run_writes_what_happened(tmp_path):
    digest = train(tmp_path, checkpoint=5, clip_norm=1.0)
    kinds = [event["event"] for event in events(tmp_path)]
    assert kinds == [
        "start",
        *["step"] * 4, "evaluation", "step", "checkpoint",
        *["step"] * 3, "evaluation", "step", "step", "checkpoint",
        *["step"] * 2, "evaluation", "checkpoint", "end",
    ]  # fmt: skip
    start, end = events(tmp_path, "start", "end")
    assert start["format"] == 1
    assert (start["step"], start["end_step"], start["steps_per_epoch"]) == (0, 12, 4)
    assert (start["num_samples"], start["batch_size"], start["shards"]) == (40, 10, 3)
    assert start["identity"]["clip_norm"] == 1.0
    assert start["ranks"] == [0]
    assert start["pids"] == [os.getpid()]
    assert start["versions"]["torch"] == torch.__version__
    assert start["num_parameters"] == 74
    assert end["step"] == 12
    assert end["digest"] == digest
    assert end["stopped_early"] is False
    for number, step in enumerate(events(tmp_path, "step")):
        assert (step["step"], step["epoch"], step["num_samples"]) == (number, number // 4, 10)
        assert set(step["means"]) == {"loss", "accuracy"}
        assert step["learning_rates"] == [0.05]
        assert step["gradient_norm"] > 0
        assert step["ranks"] == [0]
        spent = sum(step[phase][0] for phase in PHASES)
        assert 0 < spent <= step["seconds"] + 0.01
    evaluations = events(tmp_path, "evaluation")
    assert [(event["step"], event["epoch"]) for event in evaluations] == [(4, 1), (8, 2), (12, 3)]


def test_nothing_is_written_without_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(None)
    assert list(tmp_path.iterdir()) == []


class Fails(unisono.callbacks.Callback):
    def on_step_end(self, fit, step):
        if step.number == 6:
            raise KeyError("what is missing")


def test_a_run_that_is_taken_up_holds_each_step_once(tmp_path):
    with pytest.raises(unisono.errors.CallbackError):
        train(tmp_path, checkpoint=5, callbacks=[Fails()])
    (failure,) = events(tmp_path, "failure")
    assert failure["error"] == "CallbackError"
    assert "Fails" in failure["message"]
    assert (failure["rank"], failure["step"]) == (0, 7)
    train(tmp_path, checkpoint=5)
    assert numbers(tmp_path) == list(range(12))
    assert [event["step"] for event in events(tmp_path, "start", "failure")] == [0, 7, 7]


def test_a_worker_that_is_alone_has_written_each_step_when_the_next_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "_HELD_S", 0.0)  # as if each took long

    class Looks(EventLog):  # one of a class of its own: there is no second one beside it
        def on_step_begin(self, fit):
            seen.append(numbers(tmp_path)[-1:])

    seen = []
    train(tmp_path, epochs=1, callbacks=[Looks()])
    assert seen == [[], [0], [1], [2]]
    assert numbers(tmp_path) == [0, 1, 2, 3]


def test_times_stand_by_phase_and_a_lost_worker_has_none():
    rows = [Times(1234.5, 0.1, 0.2, 0.3, 1e-7, 0.0, 2.25e-6), None]
    facts = {
        "time_unix_s": 1.7e9,
        "step": 7,
        "epoch": 0,
        "num_samples": 3,
        "seconds": 0.25,
        "means": {"loss": math.nan, 'a "b"\n': 1e-9, "c": -math.inf},
        "learning_rates": [0.1, 1e-30],
        "gradient_norm": None,
        "ranks": (0, 2),
    }
    text = step_line(facts, rows)
    line = json.loads(text, parse_constant=pytest.fail)
    assert line.items() >= json.loads(encode("step", **facts)).items()
    assert [line[name] for name in Times._fields] == [
        [seconds, None] for seconds in (1234.5, 0.1, 0.2, 0.3, 0.0, 0.0, 0.000002)
    ]


def test_what_belongs_to_a_step_is_ordered():
    kinds = [("step", 6), ("evaluation", 7), ("checkpoint", 7), ("end", 7), ("step", 7)]
    places = [place_of(encode(kind, step=step)) for kind, step in kinds]
    assert places == sorted(places)
    assert len(set(places)) == 5
    assert places[0] == 6
    assert places[3] < 7


def test_a_run_goes_on_in_a_file_of_hostile_lines(tmp_path):
    train(tmp_path, epochs=1)
    with open(tmp_path / "events.jsonl", "ab") as file:
        file.write(b"[" * 60_000 + b'\n{"event":"step","step":1e999}\n\xff\0 torn')
    train(tmp_path, epochs=2)
    lines = (tmp_path / "events.jsonl").read_bytes().splitlines()
    steps = [place_of(line) for line in lines if line.startswith(b'{"event":"step"')]
    assert [step for step in steps if step is not None] == list(range(8))


@pytest.mark.slow
@given(st.one_of(st.binary(max_size=60), st.one_of(NESTED, OF_A_STEP).map(as_line)))
def test_no_line_makes_anybody_fall(line):
    place = place_of(line)
    assert place is None or math.isfinite(place)
    with contextlib.suppress(ValueError):
        read_event(line)


def test_learning_rates_that_are_tensors_are_numbers(tmp_path):
    fit = SimpleNamespace(optimizer=SimpleNamespace(param_groups=[{"lr": torch.tensor(0.5)}]))
    log, fit.ranks, fit.is_leader = EventLog(), (0, 1), False
    log._journal = Journal(tmp_path / "events.jsonl", place_of, fit)
    log.on_step_end(fit, done(0))
    assert log._pending[1]["learning_rates"] == [0.5]


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"pace": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["pace"] * parameter.grad


def test_an_optimizer_without_learning_rates_has_none(tmp_path):
    trainer = make(tmp_path, optimizer=WithoutRate)
    trainer.fit(data(), batch_size=10, epochs=1)
    assert [step["learning_rates"] for step in events(tmp_path, "step")] == [[]] * 4


class Interrupts(unisono.callbacks.Callback):
    def __init__(self, pid):
        self._pid = pid

    def on_step_end(self, fit, step):
        if step.number == 5 and fit.is_leader:
            os.kill(self._pid, signal.SIGINT)


@pytest.mark.parametrize(
    ("signum", "ends_with"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]
)
def test_a_run_that_nobody_launched_says_that_it_was_interrupted(tmp_path, signum, ends_with):
    class Asks(unisono.callbacks.Callback):
        def on_step_end(self, fit, step):
            if step.number == 5:
                os.kill(os.getpid(), signum)

    with pytest.raises(ends_with):
        train(tmp_path, callbacks=[Asks()])
    last = events(tmp_path)[-1]
    assert (last["event"], last["by"]) == ("interrupted", signum.name)
    assert last["step"] == 7  # asked for in step 5, planned in step 6
    assert events(tmp_path, "failure") == []


def test_a_program_that_ends_itself_is_not_interrupted(tmp_path):
    class Leaves(unisono.callbacks.Callback):
        def on_step_end(self, fit, step):
            sys.exit(3)

    with pytest.raises(SystemExit):
        train(tmp_path, callbacks=[Leaves()])
    assert events(tmp_path)[-1]["error"] == "SystemExit"


def train_until_interrupted(directory, pid):
    train(directory, epochs=10_000, callbacks=[Interrupts(pid)])


@pytest.mark.slow
def test_a_run_that_is_interrupted_leaves_no_gap(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        unisono.launch(train_until_interrupted, tmp_path, os.getpid(), workers=2)
    (folder,) = (tmp_path / "checkpoints").iterdir()
    kept = int(folder.name.removeprefix("step-"))
    assert numbers(tmp_path) == list(range(kept))
    assert None not in events(tmp_path, "step")[-1]["updating_s"]
    last = events(tmp_path)[-1]
    assert (last["event"], last["by"], last["step"]) == ("interrupted", "SIGINT", kept)


class FailsAtFirst(Callback):
    def on_begin(self, fit):
        if fit.rank == 1:
            raise ValueError("on purpose")


def fail_before_the_lead_has_begun(directory):
    if unisono.world().rank == 0:
        begin = Journal.begin
        Journal.begin = lambda journal, step: (time.sleep(0.3), begin(journal, step))
    train(directory, checkpoint=unisono.Checkpoint(resume="never"), callbacks=[FailsAtFirst()])


@pytest.mark.slow
def test_a_failure_at_first_stands_in_its_own_file_behind_the_start(tmp_path):
    train(tmp_path)
    with pytest.raises(unisono.errors.CallbackError, match="on purpose"):
        unisono.launch(fail_before_the_lead_has_begun, tmp_path, workers=2)
    assert events(tmp_path, name="events-1.jsonl")[-1]["event"] == "end"
    start, failure = events(tmp_path)
    assert (start["event"], failure["event"], failure["rank"]) == ("start", "failure", 1)


@pytest.mark.slow
def test_who_replaces_the_only_worker_goes_on_in_its_file(tmp_path, monkeypatch):
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=0,step=0,at=update")
    unisono.launch(train, tmp_path, workers=1)
    assert numbers(tmp_path) == list(range(12))
    assert len(events(tmp_path, "start")) == 1
    (change,) = events(tmp_path, "workers")
    assert (change["lost"], change["joined"], change["ranks"]) == ([0], [0], [0])
    assert change["why"] == ["worker 0 was killed by SIGKILL"]
    assert change["pids"] != events(tmp_path, "start")[0]["pids"]
    assert not (tmp_path / "events-1.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["", "kill:rank=0,step=7,at=update", "kill:rank=1,step=7", "kill:rank=0,step=6"]
)
def test_workers_that_are_lost_leave_each_step_once(tmp_path, monkeypatch, fault):
    alone = train(tmp_path / "alone")
    monkeypatch.setenv("UNISONO_FAULTS", fault)
    (tmp_path / "both").mkdir()
    assert unisono.launch(train, tmp_path / "both", workers=2) == [alone] * 2
    assert events(tmp_path / "both", "start")[0]["command"] == ["python", *sys.orig_argv[1:]]
    assert numbers(tmp_path / "both") == list(range(12))
    assert len(events(tmp_path / "both", "evaluation")) == 3
    assert len(events(tmp_path / "both", "end")) == 1
    steps = events(tmp_path / "both", "step")
    assert all(step[phase][-1] is not None for step in steps[-2:] for phase in PHASES)
    changes = events(tmp_path / "both", "workers")
    if fault:
        rank = int(fault[10])
        assert changes[0]["lost"] == [rank]
        assert changes[0]["why"] == [f"worker {rank} was killed by SIGKILL"]
        assert changes[0]["ranks"] == [1 - rank]
    else:
        assert changes == []
    means = [step["means"] for step in steps]
    assert means == [step["means"] for step in events(tmp_path / "alone", "step")]


class Crew:
    """What the log sees of a run on workers 0 and 1, of which 1 has just come."""

    directory = None
    step, epoch, end_step, facts = 3, 0, 9, {}
    rank, ranks, is_leader, is_first, has_joined = 0, (0, 1), True, True, False
    optimizer = SimpleNamespace(param_groups=[{"lr": 0.1}])

    def pid(self, rank):
        return None

    def times(self, rank, step):
        return None

    def memory(self, rank):
        return None

    def say(self, line):
        raise AssertionError(line)

    def once(self, work, purpose):
        assert len(purpose) <= 24
        return work() if self.is_leader else ""


def done(number):
    facts = {"epoch": 0, "num_samples": 8, "means": {}, "gradient_norm": None}
    return SimpleNamespace(number=number, **facts)


def two_workers(tmp_path):
    """The logs of two workers, of which the first leads, with what each sees of the run."""
    fits = [Crew(), Crew()]
    fits[1].rank, fits[1].is_leader = 1, False
    return [EventLog(tmp_path / "events.jsonl") for _ in fits], fits


def test_a_lead_that_does_not_show_the_run_complains_all_the_same(tmp_path, capsys):
    (tmp_path / "file").touch()
    log, fit = EventLog(tmp_path / "file" / "events.jsonl"), Crew()
    fit.is_first = False  # rank 0 was lost and replaced, and rank 1 is the leader
    log.on_begin(fit)
    assert "training continues" in capsys.readouterr().err


def fail_together(tmp_path, *, is_told):
    """Have rank 1 fail, with a word or killed, and rank 0 miss it."""
    logs, fits = two_workers(tmp_path)
    for log, fit in zip(logs, fits, strict=True):
        log.on_begin(fit)
    if is_told:
        logs[1].on_error(fits[1], ValueError("what is wrong"))
    logs[0].on_error(fits[0], unisono.errors.PeerLostError("rank 1 has died", rank=1))
    return [(event["rank"], event["error"]) for event in events(tmp_path, "failure")]


def test_who_is_killed_is_told_of_by_the_first_of_those_who_miss_it(tmp_path):
    assert fail_together(tmp_path, is_told=False) == [(0, "PeerLostError")]


def test_who_fails_tells_of_itself_alone(tmp_path):
    assert fail_together(tmp_path, is_told=True) == [(1, "ValueError")]


def test_a_step_is_written_before_somebody_joins_who_knows_nothing_of_it(tmp_path):
    log, fit = EventLog(tmp_path / "events.jsonl"), Crew()
    log.on_begin(fit)
    log.on_step_end(fit, done(3))
    fit.step = 4
    log.on_workers_changed(fit, (0,), "worker 1 has joined")
    assert numbers(tmp_path) == [3]
    log.on_error(fit, RuntimeError())


def test_a_snapshot_has_what_a_lost_leader_has_held_back(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "_HELD_S", 1000.0)
    logs, fits = two_workers(tmp_path)
    for log, fit in zip(logs, fits, strict=True):
        log.on_begin(fit)
        for number in (3, 4):
            log.on_step_end(fit, done(number))
    assert numbers(tmp_path) == []
    fits[1].step = 5
    logs[1].on_workers_changed(fits[1], (0,), "worker 1 has joined")
    # The leader is killed; all are, after the snapshot that the next one takes.
    fits[1].is_leader = True
    logs[1].on_snapshot(fits[1])
    assert numbers(tmp_path) == [3, 4]
    for log, fit in zip(logs, fits, strict=True):
        log.on_error(fit, RuntimeError())


def hold_back(tmp_path, monkeypatch, told):
    """Have a log hold back a step, before another of which all or only this worker have told."""
    monkeypatch.setattr(journal, "_HELD_S", 1000.0)
    log, fit = EventLog(tmp_path / "events.jsonl"), Crew()
    fit.times = lambda rank, step: Times(*[0.5] * 7) if step == 3 or rank in told else None
    log.on_begin(fit)
    for number in (3, 4):
        log.on_step_end(fit, done(number))
    assert numbers(tmp_path) == []
    return log, fit


@pytest.mark.parametrize("told", [(0, 1), (0,)])
def test_what_is_held_back_is_written_before_a_snapshot(tmp_path, monkeypatch, told):
    log, fit = hold_back(tmp_path, monkeypatch, told)
    log.on_snapshot(fit)
    assert numbers(tmp_path) == [3, 4]
    assert events(tmp_path, "step")[-1]["forward_s"] == [0.5 if r in told else None for r in (0, 1)]
    log.on_error(fit, RuntimeError())


def test_a_failure_counts_before_the_lines_that_the_leader_held_back(tmp_path, monkeypatch):
    log, fit = hold_back(tmp_path, monkeypatch, (0, 1))
    other, there = EventLog(tmp_path / "events.jsonl"), Crew()
    there.rank, there.is_leader, there.times = 1, False, fit.times
    other.on_begin(there)
    for number in (3, 4):
        other.on_step_end(there, done(number))
    other.on_error(there, ValueError("what is wrong"))
    log.on_error(fit, unisono.errors.PeerLostError("rank 1 has failed", rank=1))
    assert numbers(tmp_path) == [3, 4]
    progress = RunProgress()
    for event in EventReader(tmp_path / "events.jsonl").new_events():
        progress.add(event)
    assert progress.ended.error == "ValueError"


def test_a_run_goes_on_whose_working_directory_is_gone(tmp_path, monkeypatch):
    def gone():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))

    trainer = make(tmp_path)
    monkeypatch.setattr(os, "getcwd", gone)
    trainer.fit(data(), batch_size=10, epochs=1)
    (start,) = events(tmp_path, "start")
    assert start["folder"] is None


@pytest.mark.slow
@pytest.mark.parametrize("method", ["on_begin", "on_step_end", "on_snapshot", "on_end"])
def test_an_event_file_that_fails_in_any_way_is_told_and_ends_no_run(
    method, tmp_path, monkeypatch, capsys
):
    def fail(self, *arguments):
        raise ZeroDivisionError("division by zero")

    expected = train(tmp_path / "sound")
    monkeypatch.setattr(EventLog, method, fail)
    assert train(tmp_path / "broken") == expected
    printed = capsys.readouterr().out
    assert printed.count("the callback EventLog failed") == 1
    assert f"`{method}`: ZeroDivisionError: division by zero; training continues" in printed


def test_what_fails_at_the_beginning_of_the_file_is_heard_by_all_workers(tmp_path, monkeypatch):
    heard = []

    def fail(*arguments):
        raise KeyError("host")

    def once(self, work, purpose):
        heard.append(work())
        return heard[-1]

    monkeypatch.setattr(event_log, "_start", fail)
    monkeypatch.setattr(FitUnderWay, "once", once)
    train(tmp_path)
    assert heard == ["KeyError: 'host'"]
