"""One contract for all loggers: each step once, whatever happens to workers and runs."""

import fcntl
import functools
import importlib.util
import json
import os
import shutil
import signal
import sqlite3
import struct
import warnings
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from tests.classified import by_sign as data
from tests.classified import cross_entropy as loss

import unisono
from unisono.callbacks import Callback, MLflow, TensorBoard, WandB
from unisono.errors import NotPlainFileError
from unisono.runtime.checkpoint.run_directory import file_id_of
from unisono.training.callbacks import logger, logger_feed, trackers
from unisono.training.callbacks.logger import Logger
from unisono.training.callbacks.logger_feed import Opening, Row, Sender, locked_run
from unisono.training.events.events import read_event

STEPS, VALIDATIONS = list(range(12)), [2, 5, 8, 11]


def train(directory, make, epochs=4, lr=0.1, **options):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.5)
    made = make()
    callbacks = made if isinstance(made, list) else [made]
    trainer = unisono.Trainer(
        model, optimizer, loss, shards=2, directory=directory, callbacks=callbacks, **options
    )
    trainer.fit(data(), batch_size=8, epochs=epochs, validate=data(7))
    return trainer.digest()


def wandb_records(path):
    """Read a file of W&B: blocks of 32 KiB with records, or parts of them (LevelDB's log)."""
    from wandb.proto import wandb_internal_pb2

    content, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(content):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # the whole, or its last part
            record = wandb_internal_pb2.Record()
            record.ParseFromString(whole)
            whole = b""
            yield record


def wandb(directory):
    curves, ids, config = {}, set(), {}
    for path in sorted(directory.glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(path):
            if record.WhichOneof("record_type") == "run":
                ids.add(record.run.run_id)
                config |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
            if record.WhichOneof("record_type") != "history":
                continue
            for one in record.history.item:
                name = one.key or "/".join(one.nested_key)
                point = record.history.step.num, json.loads(one.value_json)
                curves.setdefault(name, []).append(point)
    own = {name: curve for name, curve in curves.items() if not name.startswith("_")}
    return own, len(ids), config


def mlflow(directory):
    with sqlite3.connect(directory / "mlflow" / "mlflow.db") as database:
        curves = {}
        for name, step, value in database.execute("SELECT key, step, value FROM metrics"):
            curves.setdefault(name, []).append((step, value))
        ((num_runs,),) = database.execute("SELECT count(*) FROM runs WHERE status = 'FINISHED'")
        config = dict(database.execute("SELECT key, value FROM params"))
    database.close()
    return curves, num_runs, config


def tensorboard(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    tags = reader.Tags()["scalars"]
    return {tag: [(one.step, one.value) for one in reader.Scalars(tag)] for tag in tags}, 1, None


def wanted(directory):
    """What the event file has, by the names that loggers use."""
    curves = {}
    for event in map(json.loads, (directory / "events.jsonl").read_text().splitlines()):
        if event["event"] == "step":
            curves.setdefault("train/loss", []).append(event["means"]["loss"])
            curves.setdefault("learning_rate", []).append(event["learning_rates"][0])
        elif event["event"] == "evaluation":
            curves.setdefault("validation/loss", []).append(event["means"]["loss"])
    return curves


LOGGERS = {
    "wandb": (WandB, wandb),
    "mlflow": (MLflow, mlflow),
    "tensorboard": (TensorBoard, tensorboard),
}


@pytest.fixture(autouse=True)
def other_peoples_warnings(monkeypatch):
    # On a busy machine a package takes long to load.
    monkeypatch.setenv("UNISONO_LOGGER_TIMEOUT", "200")
    monkeypatch.setenv("UNISONO_STALL_TIMEOUT", "250")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def one_of_each(names):
    """Make those that are installed."""
    takes_config = WandB, MLflow
    installed = [LOGGERS[name][0] for name in names if importlib.util.find_spec(name)]
    return [make(config={"depth": 3}) if make in takes_config else make() for make in installed]


@pytest.mark.slow
@pytest.mark.timeout(300)  # each package is loaded by three processes
@pytest.mark.parametrize(
    "names",
    [("tensorboard",), pytest.param(("wandb", "mlflow"), marks=pytest.mark.long)],
    ids="+".join,
)
def test_each_step_is_logged_once(tmp_path, monkeypatch, names):
    """The leader is killed, and the run stopped and resumed from before its last steps."""
    expected = train(tmp_path / "alone", list)
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=0,step=4,at=updated")
    make = functools.partial(one_of_each, names)
    fit = functools.partial(train, tmp_path / "run 1", make, checkpoint=2)
    unisono.launch(fit, 3, workers=2)
    monkeypatch.delenv("UNISONO_FAULTS")
    shutil.rmtree(max((tmp_path / "run 1" / "checkpoints").iterdir()))  # so steps come again
    assert fit(4) == expected
    for name in names:
        if importlib.util.find_spec(name):
            check(wanted(tmp_path / "alone"), *LOGGERS[name][1](tmp_path / "run 1"))


def check(expected, curves, num_runs, config):
    assert {name: [step for step, _ in curve] for name, curve in curves.items()} == {
        "train/loss": STEPS,
        "learning_rate": STEPS,
        "validation/loss": VALIDATIONS,
    }
    for name, values in expected.items():
        assert [value for _, value in curves[name]] == pytest.approx(values)
    assert num_runs == 1
    if config is not None:
        hyperparameters = {"batch_size": "8", "optimizer/momentum": "0.5", "depth": "3"}
        assert {name: str(config[name]) for name in hyperparameters} == hyperparameters


def test_mlflow_gets_a_name_that_it_refuses_in_other_letters(tmp_path):
    """It got nothing at all: `top@5` is a usual name, and MLflow refuses the whole batch."""
    run = object.__new__(trackers._MLflowRun)  # without MLflow, which takes seconds to load
    run.run_id, run._client = "mine", mock.Mock()
    run._entities = SimpleNamespace(Metric=lambda *metric: metric, Param=lambda *param: param)
    run.log([Row(3, 0.5, {"train/top@5": 1.0})])
    run._client.log_batch.assert_called_once_with("mine", metrics=[("train/top_5", 1.0, 500, 3)])
    run._created(Opening(tmp_path, 1, MLflow()._settings, {"a=b": 1}))
    assert run._client.log_batch.call_args.kwargs == {"params": [("a_b", "1")]}


def test_two_names_that_mlflow_would_take_for_one_are_refused():
    run = object.__new__(trackers._MLflowRun)
    with pytest.raises(ValueError, match="some become the same: rename one of them"):
        run.log([Row(3, 0.5, {"train/top@5": 1.0, "train/top_5": 2.0})])


def test_each_group_of_parameters_has_a_learning_rate():
    step = read_event(b'{"event": "step", "step": 0, "learning_rates": [0.1, 0.2]}')
    assert logger_feed._of_step(step) == {"learning_rate/0": 0.1, "learning_rate/1": 0.2}


@pytest.mark.slow
def test_tensorboard_forgets_another_run(tmp_path):
    pytest.importorskip("tensorboard")
    train(tmp_path, TensorBoard, 2)
    train(tmp_path, TensorBoard, 1, lr=0.2, checkpoint=unisono.Checkpoint(resume="never"))
    curves, _, _ = tensorboard(tmp_path)
    assert [step for step, _ in curves["train/loss"]] == [0, 1, 2]
    assert [rate for _, rate in curves["learning_rate"]] == pytest.approx([0.2] * 3)
    names = [path.name for path in (tmp_path / "tensorboard").glob("events.out.*")]
    assert len({name.rpartition(".")[2] for name in names}) == len(names) == 2
    assert all(len(name.rpartition(".")[2]) == 16 for name in names), "nobody can know a name"


FAKE = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
from unisono.training.callbacks import logger_feed
class Run:
    run_id = "mine"
    def __init__(self, opening):
        assert "torch" not in sys.modules
        self.file, self.settings = open(opening.path / "rows", "a"), opening.settings
        print("begin", opening.run_id, opening.config["batch_size"], file=self.file, flush=True)
    def log(self, rows):
        for row in rows:
            if row.step == self.settings.get("raises_at"):
                raise OSError(28, "No space left on device")
            if row.step == self.settings.get("hangs_at"):
                time.sleep(600)
            if row.step == self.settings.get("dies_at"):
                os.kill(os.getpid(), signal.SIGKILL)
            print(row.step, *row.values, file=self.file, flush=True)
            print("a line for the screen")
    def end(self, status):
        print("end", status, file=self.file, flush=True)
from types import SimpleNamespace
sys.modules["fake"] = SimpleNamespace(Fake=SimpleNamespace(opens=Run))
logger_feed.main()
"""


class Fake(Logger):
    """A logger that does as it is told, in place of the package `json`."""

    __module__ = "fake"  # as the process of the loggers finds it
    product, package = "Fake", "json"

    def __init__(self, path=None, every=1, config=None, **settings):
        super().__init__(settings, config, path, every)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(logger, "_START", FAKE)
    return Fake


def lines(directory):
    return (directory / "json" / "rows").read_text().splitlines()


@pytest.mark.slow
def test_what_it_gets(tmp_path, fake, capfd):
    train(tmp_path, functools.partial(fake, every=2), 1)
    assert lines(tmp_path) == [
        "begin None 8",
        "0 train/loss learning_rate",
        "2 train/loss learning_rate",
        "2 validation/loss",
        "end finished",
    ]
    assert "for the screen" not in "".join(capfd.readouterr())


def test_a_run_without_a_directory_has_an_event_file_beside_its_logger(tmp_path, fake):
    train(None, functools.partial(fake, path=tmp_path / "json"), 1)
    assert len(lines(tmp_path)) == 6
    assert sorted(os.listdir(tmp_path)) == ["json", "json.events.jsonl"]


@pytest.mark.slow
def test_a_new_run_is_another_run(tmp_path, fake):
    train(tmp_path, fake, 1)
    train(tmp_path, fake, 2)
    train(tmp_path, fake, 1, checkpoint=unisono.Checkpoint(resume="never"))
    begun = [line for line in lines(tmp_path) if "begin" in line]
    assert begun == ["begin None 8", "begin mine 8", "begin None 8"]


@pytest.mark.slow
@pytest.mark.parametrize("lr", [0.1, 0.2])
def test_other_numbers_of_steps_that_come_again_are_reported(tmp_path, fake, capsys, lr):
    saving = unisono.Checkpoint(2, options="program")
    train(tmp_path, fake, 4, checkpoint=saving)
    shutil.rmtree(max((tmp_path / "checkpoints").iterdir()))
    capsys.readouterr()
    train(tmp_path, fake, 4, lr=lr, checkpoint=saving)
    told = "a step that comes again must have the numbers that Fake got, but step 10 has others"
    assert capsys.readouterr().out.count(told) == (lr != 0.1)
    assert [line for line in lines(tmp_path) if "train" in line] == [
        f"{step} train/loss learning_rate" for step in STEPS
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"raises_at": 1}, "No space left on device"),
        ({"dies_at": 1}, "their process has ended"),
        ({"hangs_at": 1}, "it is not done within 5 s"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_logger_that_fails_ends_no_run_and_no_other_logger(
    tmp_path, fake, monkeypatch, capsys, settings, said
):
    monkeypatch.setenv("UNISONO_LOGGER_TIMEOUT", "5" if "hangs_at" in settings else "100")
    expected = train(None, list)
    capsys.readouterr()
    other = lambda: fake(tmp_path / "other" / "json")  # noqa: E731
    assert train(tmp_path, lambda: [fake(**settings), other()]) == expected
    told = capsys.readouterr().out
    assert (told.count("training continues"), said in told) == (1, True)
    if "dies_at" not in settings:
        assert len(lines(tmp_path / "other")) == 1 + 12 + 4 + 1


@pytest.mark.slow
@pytest.mark.parametrize("why", ["No space left", "was moved or removed"])
def test_it_is_told_while_the_run_goes_on(tmp_path, fake, monkeypatch, why):
    said = []
    monkeypatch.setattr(logger, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(logger, "say_alone", lambda fit, line: said.append(line))

    class Ends(Callback):
        def on_step_end(self, fit, step):
            if step.number == 1 and "moved" in why:
                (tmp_path / "run").rename(tmp_path / "moved")
            if said:
                fit.stop("told")

    settings = {} if "moved" in why else {"raises_at": 1}
    train(tmp_path / "run", lambda: [fake(tmp_path / "json", **settings), Ends()], 100_000)
    assert len(said) == 1
    assert f"{why}" in said[0]


@pytest.mark.slow
def test_a_process_that_the_leader_forks_does_not_keep_the_loggers(tmp_path, fake, monkeypatch):
    monkeypatch.setenv("UNISONO_LOGGER_TIMEOUT", "20")
    forked = []

    class Forks(Callback):
        def on_step_end(self, fit, step):
            if step.number == 1:
                forked.append(os.fork())
                if not forked[0]:
                    signal.pause()

    try:
        train(tmp_path, lambda: [fake(), Forks()])
    finally:
        os.kill(forked[0], signal.SIGKILL)
        os.waitpid(forked[0], 0)
    assert lines(tmp_path)[-1] == "end finished"


@pytest.mark.slow
def test_an_exception_ends_the_loggers_run_as_failed(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(logger, "_FAIL_WITHIN_S", 100.0)

    class Raises(Callback):
        def on_validation(self, fit, means, seconds):
            raise MemoryError("enough")

    with pytest.raises(unisono.errors.CallbackError):
        train(tmp_path, lambda: [fake(), Raises()])
    assert lines(tmp_path)[-1] == "end failed"


@pytest.mark.parametrize("make", [TensorBoard, WandB, MLflow])
def test_without_its_package_there_is_a_sentence(monkeypatch, make):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'unisono\[{make.package}\]'"):
        make()


def test_what_cannot_be_is_refused(tmp_path, fake):
    with pytest.raises(TypeError, match="`config` must be what JSON can hold"):
        fake(config={"model": object()})
    with pytest.raises(ValueError, match="`mode` must be one of"):
        WandB(mode="of line")
    with pytest.raises(unisono.errors.CallbackError, match="`path` must say where Fake writes"):
        train(None, fake)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "json").symlink_to(tmp_path)
    with pytest.raises(NotPlainFileError, match="must be a directory, but is a symbolic link"):
        train(tmp_path / "run", fake)


def test_nothing_goes_over_the_network_unless_asked(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if not all(map(importlib.util.find_spec, ("wandb", "mlflow"))):
        pytest.skip("wandb and mlflow are not both installed")  # to load them takes seconds
    assert WandB()._settings["mode"] == "offline"
    assert MLflow()._settings["tracking_uri"] is None


def test_one_process_has_the_run_at_a_time_and_the_next_one_continues_it(tmp_path):
    events = [read_event(b'{"event": "step", "step": %d, "means": {}}' % n) for n in range(4)]
    run = mock.Mock(run_id="mine")
    first_fd = locked_run(tmp_path)
    first = Sender(Opening(tmp_path, 1, {}, {}), lambda opening: run, first_fd)
    with open(tmp_path / "run.json") as again, pytest.raises(BlockingIOError):
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    for event in events[:2]:
        first.take(event)
    first.flush()
    os.close(first_fd)  # as its process ends
    begun, second_fd = [], locked_run(tmp_path)
    begin = lambda opening: begun.append(opening) or run  # noqa: E731
    second = Sender(Opening(tmp_path, 1, {}, {}), begin, second_fd)
    for event in events:
        second.take(event)
    second.flush()
    assert begun[0].run_id == "mine"
    assert [[row.step for row in call.args[0]] for call in run.log.call_args_list] == [
        [0, 1],
        [2, 3],
    ]
    os.close(second_fd)


@pytest.mark.parametrize("status", ["", "finished"])
def test_a_process_whose_leader_is_lost_before_it_has_begun_leaves_the_run_to_the_next_one(
    tmp_path, monkeypatch, status
):
    begun = []
    opens = mock.Mock(side_effect=lambda opening: begun.append(opening) or mock.Mock(run_id="mine"))
    monkeypatch.setattr(
        logger_feed.importlib, "import_module", lambda name: mock.Mock(opens=mock.Mock(opens=opens))
    )
    path = tmp_path / "events.jsonl"
    path.touch()
    feed = logger_feed._Feed({"events": str(path), "file": file_id_of(path), "loggers": []}, 1)
    feed._status = status
    feed._ends.set()
    opening = {"path": str(tmp_path), "every": 1, "settings": {}, "config": {}}
    feed._follow({"home": ["fake", "opens"], "opening": opening})
    assert len(begun) == bool(status)
