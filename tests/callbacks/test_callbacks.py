"""When the methods of callbacks run, and what becomes of what they raise."""

import collections
import json
import shutil
import threading

import pytest
import torch
from torch.utils.data import TensorDataset

import unisono
from unisono.callbacks import BestCheckpoint, Callback, EarlyStopping, EventLog
from unisono.errors import CallbackError
from unisono.runtime.workers.membership import Membership
from unisono.tools.report.history import gather


def data(num_samples=12):
    x = torch.randn(num_samples, 3, generator=torch.Generator().manual_seed(num_samples))
    return TensorDataset(x, x.sum(1, keepdim=True))


def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def make(*callbacks, **options):
    torch.manual_seed(4)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    options = {"shards": 2, "loss": loss, **options}
    return unisono.Trainer(model, optimizer, options.pop("loss"), callbacks=callbacks, **options)


class Notes(collections.UserList, threading.Event):
    """A list that does not go back with the run, as it belongs to the process."""

    def __reduce__(self):
        return list, (list(self),)


class Seen(Callback):
    """Writes down what it sees."""

    def __init__(self):
        self.seen = Notes()

    def __getattribute__(self, name):
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def note(fit, *arguments):
            about = [getattr(a, "number", a) for a in arguments if not isinstance(a, (dict, float))]
            about = [type(a).__name__ if isinstance(a, BaseException) else a for a in about]
            about = [a for a in about if isinstance(a, (int, str, tuple))]
            self.seen.append(" ".join(map(str, [name[3:], fit.step, *about])))

        return note


def test_the_moments_of_a_run(tmp_path):
    seen = Seen()
    trainer = make(seen, directory=tmp_path, checkpoint=3)
    trainer.fit(data(), batch_size=6, epochs=2, validate=data(5), validate_every=3)
    assert seen.seen == [
        "begin 0",
        "snapshot 0",  # of what it may have changed
        "step_begin 0", "step_end 1 0",
        "step_begin 1", "step_end 2 1", "epoch_end 2",
        "step_begin 2", "step_end 3 2", "validation 3",
        "snapshot 3", "checkpoint 3 3",
        "step_begin 3", "step_end 4 3", "epoch_end 4",
        "snapshot 4", "validation 4",
        "checkpoint 4 4",
        "end 4",
    ]  # fmt: skip


def test_a_loop_of_the_programs_own_is_none_of_the_callbacks_affair():
    seen = Seen()
    trainer = make(seen)
    trainer.fit(data(), batch_size=6, epochs=1)
    before = list(seen.seen)
    for step in trainer.run.steps(data(), batch_size=6, epochs=2):
        with step:
            for batch in step.shards:
                step.backward(loss(trainer.run.model, batch))
    assert (seen.seen, trainer.run.position.step) == (before, 4)


class Brings(Callback):
    """Brings a checkpoint of another folder, and finds the newest one in the end."""

    def before_resume(self, directory):
        shutil.copytree(directory.with_name("other"), directory)

    def on_end(self, fit, summary):
        self.name_in_the_end = fit.written_checkpoint().name


def test_a_run_resumes_from_what_a_callback_has_put_into_its_directory(tmp_path):
    make(directory=tmp_path / "other").fit(data(), batch_size=6, epochs=1)
    brings = Brings()
    summary = make(brings, directory=tmp_path / "one").fit(data(), batch_size=6, epochs=2)
    assert (summary.steps, brings.name_in_the_end) == (2, "step-000000000004")


def test_a_call_with_nothing_to_do_calls_nothing():
    seen = Seen()
    trainer = make(seen)
    trainer.fit(data(), batch_size=6, epochs=1)
    before = list(seen.seen)
    trainer.run._context.observer.before_pause()  # as a custom loop does, after `fit`
    trainer.fit(data(), batch_size=6, epochs=1)
    assert seen.seen == before


def test_callbacks_are_called_in_order():
    called = []

    class Named(Callback):
        def __init__(self, name):
            self._name = name

        def on_step_end(self, fit, step):
            called.append(self._name)

    make(Named("first"), Named("second")).fit(data(), batch_size=12, epochs=2)
    assert called == ["first", "second"] * 2


MOMENTS = [
    "on_begin", "on_step_begin", "on_step_end", "on_validation", "on_epoch_end", "on_checkpoint",
    "on_end",
]  # fmt: skip


@pytest.mark.parametrize("moment", MOMENTS)
def test_what_a_callback_raises_bears_its_name(tmp_path, moment):
    def fail(self, fit, *arguments):
        raise KeyError("seven")

    broken = type("Broken", (Callback,), {moment: fail})()
    seen = Seen()
    trainer = make(seen, broken, directory=tmp_path)
    words = f"the callback Broken failed in `{moment}`: KeyError: 'seven'"
    with pytest.raises(unisono.errors.CallbackError, match=words) as caught:
        trainer.fit(data(), batch_size=6, epochs=1, validate=data(5))
    assert isinstance(caught.value.__cause__, KeyError)
    assert seen.seen[-1].startswith("error")


def test_a_callback_that_fails_at_an_error_hides_nothing(capsys):
    class Broken(Callback):
        def on_step_end(self, fit, step):
            raise KeyError("the first")

        def on_error(self, fit, error):
            raise ValueError("the second")

    with pytest.raises(unisono.errors.CallbackError, match="the first"):
        make(Broken()).fit(data(), batch_size=6, epochs=1)
    assert "Broken failed in `on_error`: ValueError: the second" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (BestCheckpoint(), BestCheckpoint(monitor="accuracy")),
        (BestCheckpoint(), BestCheckpoint("run/best.safetensors")),
        (EventLog(), BestCheckpoint("run/events.jsonl")),
    ],
)
def test_two_that_would_write_one_file_are_refused(tmp_path, monkeypatch, first, second):
    monkeypatch.chdir(tmp_path)
    words = f"but {first.name} and {second.name} both write .*: give one of them another `path`"
    with pytest.raises(ValueError, match=words):
        make(first, second, directory="run")
    trainer = make(first, directory="run")
    trainer.callbacks.append(second)
    with pytest.raises(ValueError, match=words):
        trainer.fit(data(), batch_size=6, epochs=1, validate=data(5))


class Counts(Callback):
    """Has a state of its own."""

    def __init__(self):
        self.steps = 0

    def on_step_end(self, fit, step):
        self.steps += 1
        assert self.steps == fit.step

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def count(directory, epochs=6):
    first, second = Counts(), Counts()
    trainer = make(first, directory=directory)
    trainer.callbacks.append(second)
    trainer.fit(data(), batch_size=6, epochs=epochs)
    return first.steps, second.steps, trainer.digest()


def test_a_callback_with_a_state_goes_on_where_the_run_does(tmp_path):
    undisturbed = count(None)
    assert count(tmp_path, epochs=3)[:2] == (6, 6)
    assert count(tmp_path) == undisturbed
    folder = sorted((tmp_path / "checkpoints").iterdir())[-1]
    facts = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    kept = next(fact["state"] for fact in facts if "state" in fact)
    kept.pop("unisono.program")  # what callbacks change beside that; here nothing
    assert kept == {"Counts": {"steps": 12}, "Counts 2": {"steps": 12}}


def test_a_callback_that_comes_between_calls_is_kept_too(tmp_path):
    count(tmp_path, epochs=2)
    late = Counts()
    trainer = make(directory=tmp_path)
    trainer.fit(data(), batch_size=6, epochs=2)
    trainer.callbacks.append(late)
    trainer.fit(data(), batch_size=6, epochs=4)
    again = make(directory=tmp_path)
    again.callbacks.append(Counts())
    again.fit(data(), batch_size=6, epochs=6)
    assert (late.steps, again.callbacks[0].steps) == (8, 12)


class Tells(Callback):
    def __init__(self):
        self.told = Notes()

    def on_begin(self, fit):
        self.told.append(("begin", fit.step))

    def on_workers_changed(self, fit, before, why):
        self.told.append(("workers", tuple(before), fit.ranks, why))

    def on_went_back(self, fit, from_step):
        self.told.append(("back", from_step > fit.step))


def test_a_loss_is_told_though_its_replacement_is_there_before_the_next_step():
    told = Tells()

    class Joins(Callback):
        def on_step_end(self, fit, step):
            if step.number == 2:
                trainer.run._context.team.membership = Membership((0,), leader=0, generation=2)

    def losing(model, batch):
        if trainer.run.position.step == 2:
            trainer.run._context.team.membership = Membership(
                (0,), leader=0, generation=1, why="somebody was lost"
            )
        return loss(model, batch)

    trainer = make(told, Joins(), loss=losing)
    trainer.fit(data(), batch_size=6, epochs=2)
    changes = [("workers", (0,), (0,), why) for why in ("somebody was lost", "")]
    assert told.told == [("begin", 0), *changes]


def tell(directory):
    told, counts = Tells(), Counts()
    trainer = make(told, counts, directory=directory)
    trainer.fit(data(), batch_size=6, epochs=30)
    return told.told, counts.steps, trainer.digest()


@pytest.mark.slow
def test_a_lost_worker_is_told_of_and_states_go_back(tmp_path, monkeypatch):
    *_, alone = tell(None)
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=1,step=31,at=update")
    (told, steps, digest), (replaced, *_) = unisono.launch(tell, tmp_path, workers=2)
    assert (steps, digest) == (60, alone)
    assert told[:2] == [("begin", 0), ("workers", (0, 1), (0,), "worker 1 was killed by SIGKILL")]
    assert set(told[2:]) <= {("back", True), ("workers", (0,), (0, 1), "")}
    if replaced:  # it may come when all is over
        assert replaced[0][0] == "begin"
        assert replaced[0][1] > 0


def test_a_run_is_stopped_by_a_callback_and_stays_so_while_it_is_there(tmp_path, capsys):
    class Stops(Callback):
        def on_step_end(self, fit, step):
            if step.number == 2:
                fit.stop("that is enough")

    def fit(*callbacks):
        trainer = make(*callbacks, directory=tmp_path)
        trainer.fit(data(), batch_size=6, epochs=5)
        return trainer.run.position.step

    assert fit(Stops()) == 3
    assert "that is enough" in capsys.readouterr().out
    assert fit(Stops()) == 3
    assert "stays there" in capsys.readouterr().out
    assert fit() == 10


def test_each_fit_says_why_it_was_stopped(capsys):
    class Stops(Callback):
        def on_step_end(self, fit, step):
            fit.stop("that is enough")

    trainer = make(Stops())
    for _ in range(2):
        trainer.fit(data(), batch_size=6, epochs=5)
        trainer.run.go_on()
    assert capsys.readouterr().out.count("that is enough") == 2


def test_a_metric_of_several_numbers_by_name_is_left_out_where_one_number_is_wanted(tmp_path):
    """It ended training, and its line of the event file could not be read."""
    trainer = make(EarlyStopping(9), directory=tmp_path)
    metrics = {"errors": lambda outputs, targets: {"mean": (outputs - targets).mean()}}
    options = {"validate": data(5), "validate_metrics": metrics}
    summary = trainer.fit(data(), batch_size=6, epochs=1, **options)
    assert isinstance(summary.validation["errors"]["mean"], float)
    history = gather(tmp_path)
    assert ([*history.validation], history.num_unreadable) == (["loss"], 0)
    with pytest.raises(CallbackError, match=r"one number, \['loss'\], but is 'errors'"):
        make(EarlyStopping(monitor="errors")).fit(data(), batch_size=6, epochs=1, **options)


def test_a_fit_that_fails_before_its_loop_has_no_part_in_a_later_loop():
    begun = []

    class Begins(Callback):
        def on_begin(self, fit):
            begun.append(fit.step)

    model = torch.nn.Linear(1, 1).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.ones(4, 1))
    trainer = unisono.Trainer(
        model, optimizer, lambda model, batch: model(batch[0]).mean(), callbacks=[Begins()]
    )
    with pytest.raises(ValueError, match="parameters to train"):
        trainer.fit(data, batch_size=2, epochs=1)
    model.requires_grad_(True)
    for step in trainer.run.steps(data, batch_size=2, epochs=1):
        with step:
            for (x,) in step.shards:
                step.backward(model(x).mean())
    assert not begun


def test_an_exception_without_a_text_keeps_its_name():
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    class Fails(Callback):
        def on_step_end(self, fit, step):
            raise Odd

    with pytest.raises(CallbackError, match="Fails failed in `on_step_end`: Odd: "):
        make(Fails()).fit(data(), batch_size=4, epochs=1)


def test_a_run_does_not_continue_in_a_file_that_another_one_has_begun_since(tmp_path):
    """Steps of both stood there as those of one run, and loggers had half of each."""

    def made():
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        log = EventLog(tmp_path / "events.jsonl")
        return unisono.Trainer(model, optimizer, loss, shards=2, callbacks=[log])

    one, other = made(), made()
    one.fit(data(), batch_size=8, epochs=1)
    one.fit(data(), batch_size=8, epochs=2)
    other.fit(data(), batch_size=8, epochs=1)
    other.fit(data(), batch_size=8, epochs=2)
    with pytest.raises(ValueError, match="each run must write a separate file, but another one"):
        one.fit(data(), batch_size=8, epochs=3)
