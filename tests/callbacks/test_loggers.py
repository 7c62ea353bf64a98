"""One contract for all loggers: each step once, whatever happens to workers and runs."""

import csv
import fcntl
import functools
import importlib.util
import json
import shutil
import sqlite3
import struct
import warnings

import pytest
import torch
from tests.classified import by_sign as data
from tests.classified import cross_entropy as loss

import unisono
from unisono.callbacks import CSVLog, MLflow, TensorBoard, Trackio, WandB, logger_process, tracking
from unisono.callbacks.tracking import Tracker

STEPS, VALIDATIONS = list(range(12)), [2, 5, 8, 11]


def train(directory, make, epochs=4, **options):
    torch.manual_seed(1)
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
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


def trackio(directory):
    with sqlite3.connect(directory / "trackio" / "unisono.db") as database:
        curves = {}
        for step, values in database.execute("SELECT step, metrics FROM metrics ORDER BY id"):
            for name, value in json.loads(values).items():
                curves.setdefault(name, []).append((step, value))
        ((num_runs,),) = database.execute("SELECT count(DISTINCT run_id) FROM metrics")
        ((config,),) = database.execute("SELECT config FROM configs")
    database.close()
    return curves, num_runs, json.loads(config)


def tensorboard(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(directory / "tensorboard"), size_guidance={"scalars": 0})
    reader.Reload()
    tags = reader.Tags()["scalars"]
    return {tag: [(one.step, one.value) for one in reader.Scalars(tag)] for tag in tags}, 1, None


def table(directory):
    names = {"loss": "train/loss", "validation_loss": "validation/loss"}
    curves = {}
    with open(directory / "steps.csv", newline="") as file:
        for row in csv.DictReader(file):
            for name, value in row.items():
                if value and name not in ("step", "epoch"):
                    point = int(row["step"]), float(value)
                    curves.setdefault(names.get(name, name), []).append(point)
    return curves, 1, None


LOGGERS = {
    "wandb": (WandB, wandb),
    "mlflow": (MLflow, mlflow),
    "trackio": (Trackio, trackio),
    "tensorboard": (TensorBoard, tensorboard),
    "csv": (CSVLog, table),
}


@pytest.fixture(autouse=True)
def other_peoples_warnings(monkeypatch):
    # On a busy machine a package takes long to load.
    monkeypatch.setenv("UNISONO_LOGGER_TIMEOUT", "200")
    monkeypatch.setenv("UNISONO_STALL_TIMEOUT", "250")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.slow
@pytest.mark.timeout(300)  # each package is loaded by four processes
@pytest.mark.parametrize("name", LOGGERS)
def test_each_step_is_logged_once(tmp_path, monkeypatch, name):
    """The leader is killed, and the run stopped and resumed from before its last steps."""
    if name != "csv":
        pytest.importorskip(name)
    make, read = LOGGERS[name]
    make = functools.partial(make, config={"depth": 3}) if issubclass(make, Tracker) else make
    expected = train(tmp_path / "alone", CSVLog)
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=0,step=4,at=updated")
    fit = functools.partial(train, tmp_path / "run 1", make, checkpoint_every=2)
    unisono.launch(fit, 3, workers=2)
    monkeypatch.delenv("UNISONO_FAULTS")
    shutil.rmtree(max((tmp_path / "run 1" / "checkpoints").iterdir()))  # so steps come again
    assert fit(4) == expected
    curves, num_runs, config = read(tmp_path / "run 1")
    assert {name: [step for step, _ in curve] for name, curve in curves.items()} == {
        "train/loss": STEPS,
        "learning_rate": STEPS,
        "validation/loss": VALIDATIONS,
    }
    wanted, _, _ = table(tmp_path / "alone")
    for name, curve in wanted.items():
        assert [value for _, value in curves[name]] == pytest.approx([value for _, value in curve])
    assert num_runs == 1
    if config is not None:
        hyperparameters = {"batch_size": "8", "optimizer/momentum": "0.5", "depth": "3"}
        assert {name: str(config[name]) for name in hyperparameters} == hyperparameters


FAKE = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
class Run:
    run_id = "mine"
    def __init__(self, folder, settings):
        self.file, self.settings = open(folder + "/rows", "a"), settings
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
def begin(folder, settings, config, run_id):
    assert "torch" not in sys.modules
    os.makedirs(folder, exist_ok=True)
    run = Run(folder, settings)
    print("begin", run_id, config["batch_size"], file=run.file, flush=True)
    return run
import unisono.callbacks.logger_process as process
from types import SimpleNamespace
sys.modules["unisono.callbacks.fake"] = SimpleNamespace(begin=begin)
process.HOMES["json"] = "fake"
sys.exit(process.main())
"""


class Fake(Tracker):
    """A logger that does as it is told, in place of the package `json`."""

    product, module = "Fake", "json"

    def __init__(self, path=None, every=1, config=None, **settings):
        super().__init__(settings, config, path, every)


@pytest.fixture
def fake(monkeypatch):
    monkeypatch.setattr(logger_process, "_START", FAKE)
    return Fake


def lines(directory):
    return (directory / "json" / "rows").read_text().splitlines()


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


@pytest.mark.slow
def test_a_new_run_is_another_run(tmp_path, fake):
    train(tmp_path, fake, 1)
    train(tmp_path, fake, 2)
    train(tmp_path, fake, 1, resume="never")
    begun = [line for line in lines(tmp_path) if "begin" in line]
    assert begun == ["begin None 8", "begin mine 8", "begin None 8"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"raises_at": 1}, "No space left on device"),
        ({"dies_at": 1}, "its process has ended"),
        ({"hangs_at": 1}, "it has not sent all within 0.2 s"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_logger_that_fails_ends_no_run(tmp_path, fake, monkeypatch, capsys, settings, said):
    monkeypatch.setenv("UNISONO_LOGGER_TIMEOUT", "0.2" if "hangs_at" in settings else "100")
    expected = train(None, functools.partial(CSVLog, tmp_path / "log.csv"))
    assert train(tmp_path, functools.partial(fake, **settings)) == expected
    told = capsys.readouterr().out
    assert (told.count("training goes on"), said in told) == (1, True)


def test_a_logger_that_takes_nothing_is_switched_off(tmp_path, fake, monkeypatch):
    def is_full(fd, content):
        raise BlockingIOError

    monkeypatch.setattr(logger_process, "_STUCK_S", -1.0)
    process = logger_process.LoggerProcess(tmp_path / "run.json")
    with monkeypatch.context() as full, pytest.raises(OSError, match="it has taken nothing for"):
        full.setattr(logger_process.os, "write", is_full)
        process.send(["step", 0, {}])
    process.kill()


def test_an_exception_ends_the_loggers_run_as_failed(tmp_path, fake, monkeypatch):
    monkeypatch.setattr(tracking, "_FAIL_WITHIN_S", 100.0)

    class Raises(unisono.callbacks.Callback):
        def on_validation(self, fit, means, seconds):
            raise MemoryError("enough")

    with pytest.raises(unisono.CallbackError):
        train(tmp_path, lambda: [fake(), Raises()])
    assert lines(tmp_path)[-1] == "end failed"


@pytest.mark.parametrize("make", [WandB, MLflow, Trackio])
def test_without_its_package_there_is_a_sentence(monkeypatch, make):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=rf"pip install 'unisono\[{make.module}\]'"):
        make()


def test_what_cannot_be_json_is_refused(fake):
    with pytest.raises(TypeError, match="`config` must be what JSON can hold"):
        fake(config={"model": object()})
    with pytest.raises(ValueError, match="`mode` must be one of"):
        WandB(mode="of line")


def test_nothing_goes_over_the_network_unless_asked(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    if not all(map(importlib.util.find_spec, ("wandb", "mlflow", "trackio"))):
        pytest.skip("wandb, mlflow and trackio are not all installed")  # to load them takes seconds
    assert WandB()._settings["mode"] == "offline"
    assert MLflow()._settings["tracking_uri"] is None
    assert not {"space_id", "server_url"} & Trackio()._settings.keys()


def test_the_first_process_has_the_run_before_the_next_one(tmp_path):
    """However long it takes to start: the leader itself locks the file."""
    process = logger_process.LoggerProcess(tmp_path / "run.json")
    with open(tmp_path / "run.json") as again:
        with pytest.raises(BlockingIOError):
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
        process.kill()
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
