"""A stopped run goes on as if it had not stopped: same samples, same bits, whatever W is."""

import functools
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests.parity import cases
from tests.parity.plain import made
from tests.promises import promise
from tests.warm.processes import run, start

import unisono
from unisono.errors import CheckpointError
from unisono.runtime.checkpoint import folder
from unisono.runtime.checkpoint.run_directory import lock_directory
from unisono.training.resume import _is_shared, newest_common

PROGRAM = Path(__file__).with_name("resumable.py")


def fit(directory, steps, *, model="cnn with norm and dropout", optimizer="adam", **options):
    """Train up to `steps` in this worker; returns (steps of this call, digest)."""
    import torch

    make_model, make_data, loss = cases.MODELS[model]
    torch.manual_seed(11)
    module = make_model()
    made = (cases.OPTIMIZERS | cases.OTHER_OPTIMIZERS)[optimizer](module)
    settings = {"shards": 4, "seed": 5, "directory": directory} | options
    batch_size = settings.pop("batch_size", cases.BATCH_SIZE)
    trainer = unisono.Trainer(module, made, loss, **settings)
    summary = trainer.fit(make_data(), batch_size=batch_size, steps=steps)
    return summary.steps, summary.digest


@functools.cache
def fit_at_once(optimizer):
    return fit(None, 17, optimizer=optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "stop"),
    [  # an epoch has 7 steps: in the middle, at the end
        ("adam", 1),
        ("adam", 14),
        ("own", 7),
        *itertools.product(("sgd with momentum", "adafactor"), (1, 7, 14)),
    ],
)
def test_a_run_that_stopped_ends_with_the_same_bits(tmp_path, optimizer, stop):
    whole = fit_at_once(optimizer)
    assert fit(tmp_path, stop, optimizer=optimizer)[0] == stop
    assert fit(tmp_path, 17, optimizer=optimizer) == (17 - stop, whole[1])


@pytest.mark.slow
def test_checkpoints_come_at_their_interval_and_at_the_end(tmp_path, capsys):
    fit(tmp_path, 8, checkpoint=unisono.Checkpoint(3, keep=9))
    names = sorted(os.listdir(tmp_path / "checkpoints"))
    assert names == [f"step-{step:012}" for step in (3, 6, 8)]
    fit(tmp_path, 8)
    assert "resuming from checkpoint step-000000000008" in capsys.readouterr().out


def test_a_directory_that_is_a_file_is_refused_in_words(tmp_path):
    (tmp_path / "a file").touch()
    with pytest.raises(
        unisono.errors.CheckpointError, match="`directory` must be a folder that can be"
    ):
        fit(tmp_path / "a file", 1)


@promise("nothing-lost.14")
@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(tmp_path, capsys):
    whole = fit(None, 12)
    fit(tmp_path, 8, checkpoint=3)
    (tmp_path / "checkpoints" / "step-000000000008" / "run.json").write_bytes(b"{}")
    assert fit(tmp_path, 12) == (6, whole[1])
    out = capsys.readouterr().out
    assert "checkpoint step-000000000008 is skipped: run.json must have" in out
    assert "resuming from checkpoint step-000000000006" in out


@pytest.mark.slow
def test_never_resuming_begins_anew(tmp_path):
    fit(tmp_path, 5)
    assert fit(tmp_path, 3, checkpoint=unisono.Checkpoint(resume="never"))[0] == 3
    names = ["aside-1-step-000000000005", "step-000000000003"]
    assert sorted(os.listdir(tmp_path / "checkpoints")) == names
    shutil.rmtree(tmp_path / "checkpoints" / names[0])  # as the page on checkpoints allows
    assert fit(tmp_path, 4)[0] == 1


@pytest.mark.slow
def test_a_whole_checkpoint_is_never_given_up_for_a_damaged_one(tmp_path):
    fit(tmp_path, 8, checkpoint=4)
    (tmp_path / "checkpoints" / "step-000000000008" / "run.json").write_bytes(b"{}")
    fit(tmp_path, 6, checkpoint=unisono.Checkpoint(keep=1))
    assert fit(tmp_path, 7, checkpoint=unisono.Checkpoint(keep=1))[0] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 6}, "`seed` must be 5 as in the checkpoint, but is 6"),
        ({"shards": 2}, "`shards` must be 4 as in the checkpoint, but is 2"),
        ({"batch_size": 20}, "`batch_size` must be 16 as in the checkpoint, but is 20"),
        ({"optimizer": "sgd"}, "`optimizer` must be 'Adam' as in the checkpoint, but is 'SGD'"),
        ({"optimizer": "adamw"}, "`optimizer` must be 'Adam' as in the checkpoint, but is 'AdamW"),
        ({"model": "cnn"}, "must have the checkpoint's tensors"),
        ({"model": "tied"}, "must have the checkpoint's tensors"),
    ],
)
def test_another_run_is_refused_by_name(tmp_path, options, message):
    fit(tmp_path, 3)
    with pytest.raises(unisono.errors.CheckpointError, match=message):
        fit(tmp_path, 6, **options)


def grown(directory, *parts, options="program"):
    """Fit on more samples each time, as one program or as one that is started again."""
    import torch
    from tests.classified import by_sign, cross_entropy
    from torch.utils.data import Subset

    for num_samples, epochs, is_start in parts:
        if is_start:
            torch.manual_seed(0)
            model = torch.nn.Linear(4, 2)
            optimizer = torch.optim.Adam(model.parameters())
            checkpoint = directory and unisono.Checkpoint(3, options=options)
            how = {"shards": 2, "directory": directory, "checkpoint": checkpoint}
            trainer = unisono.Trainer(model, optimizer, cross_entropy, **how)
        data = Subset(by_sign(80), range(num_samples))
        found = trainer.fit(data, batch_size=16, epochs=epochs)
    return found, found.digest


def test_a_data_set_may_have_grown_between_two_epochs(tmp_path, capsys):
    whole = grown(None, (50, 1, True), (70, 2, False), (80, 3, False))
    assert [row["step"] for row in whole[0]] == [4, 9, 14]
    grown(tmp_path, (50, 1, True))
    assert grown(tmp_path, (70, 2, True), (80, 3, False)) == whole
    assert "`dataset length` was 50 in the checkpoint and is 70 now" in capsys.readouterr().out


def test_in_the_midst_of_an_epoch_no_data_set_grows(tmp_path):
    grown(tmp_path, (50, 1, True))
    with pytest.raises(CheckpointError, match=r'Checkpoint\(options="program"\)`'):
        grown(tmp_path, (70, 2, True), options="checkpoint")

    fit(tmp_path / "other", 5)
    options = unisono.Checkpoint(options="program")
    with pytest.raises(CheckpointError, match="the old value until epoch 1 has ended"):
        fit(tmp_path / "other", 9, batch_size=20, checkpoint=options)


def make_players(directory):
    """Make two trainers of two parts of one model, as for a GAN."""
    import torch

    parts = torch.nn.ModuleDict({"one": torch.nn.Linear(64, 10), "other": torch.nn.Linear(64, 10)})

    def player(name):
        def loss(model, batch):
            return torch.nn.functional.cross_entropy(parts[name](batch[0].flatten(1)), batch[1])

        optimizer = torch.optim.SGD(parts[name].parameters(), lr=0.1)
        return unisono.Trainer(parts, optimizer, loss, shards=2, directory=directory)

    return player("one"), player("other")


def test_trainers_that_take_turns_need_a_directory_each(tmp_path):
    one, other = make_players(tmp_path)
    one.fit(cases.images(), batch_size=16, steps=3)
    with pytest.raises(ValueError, match="after this one was created: give each its own directory"):
        other.fit(cases.images(), batch_size=16, steps=2)
    one.fit(cases.images(), batch_size=16, steps=4)
    again, _ = make_players(tmp_path)
    again.fit(cases.images(), batch_size=16, steps=5)
    assert again.run.position.step == 5
    with pytest.raises(ValueError, match="`directory` must belong to one trainer"):
        one.fit(cases.images(), batch_size=16, steps=6)


def fit_where_no_other_process_would(folder):
    return fit(folder / f"run of {os.getpid()}", 17, checkpoint=unisono.Checkpoint(2, keep=99))


@pytest.mark.slow
def test_all_workers_use_the_directory_that_the_lead_has_named(tmp_path, monkeypatch):
    whole = fit_at_once("adam")
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=0,step=5; kill:rank=1,step=11")
    results = unisono.launch(fit_where_no_other_process_would, tmp_path, workers=2, restarts=9)
    assert [digest for _, digest in results] == [whole[1]] * 2
    (directory,) = tmp_path.iterdir()
    steps = {int(name[5:]) for name in os.listdir(directory / "checkpoints")}
    assert steps >= {*range(2, 17, 2), 17}
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    assert events[0]["event"] == "start"
    assert [event["step"] for event in events if event["event"] == "step"] == [*range(17)]


@pytest.mark.slow
def test_the_directory_that_the_lead_has_named_is_held(tmp_path):
    def begin_and_look(folder):
        fit_where_no_other_process_would(folder)
        if unisono.world().rank == 1:
            (directory,) = folder.iterdir()
            with pytest.raises(unisono.errors.CheckpointError, match="is in use by process"):
                lock_directory(directory)

    unisono.launch(begin_and_look, tmp_path, workers=2)


def train_in_phases(kind, directory, *, last=20):
    """Train a layer, then, after a change, the whole; returns the digest and what a phase did."""
    import torch
    from torch.utils.data import Subset

    torch.manual_seed(11)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8), torch.nn.Linear(8, 10))
    head = model[2] if kind == "another group" else model
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    trainer = unisono.Trainer(
        *(model, optimizer, cases.classify), shards=2, directory=directory, checkpoint=1
    )
    data, batch_size = cases.images(), cases.BATCH_SIZE
    first = Subset(data, range(30)) if kind == "other data" else data
    trainer.fit(first, batch_size=8 if kind == "other data" else batch_size, epochs=1)
    if kind == "another group":
        optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 1e-3})
    elif kind == "a new head":
        with torch.no_grad():
            model[2].weight.copy_(torch.eye(10, 8))
    optimizer.param_groups[0]["lr"] *= 0.5
    return trainer.fit(data, batch_size=batch_size, epochs=4, steps=last).digest


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 12])
@pytest.mark.parametrize("kind", ["other data", "another group", "a new head"])
def test_a_program_of_two_phases_is_taken_up_in_its_second(tmp_path, capsys, kind, stop):
    whole = train_in_phases(kind, tmp_path / "whole")
    capsys.readouterr()
    train_in_phases(kind, tmp_path / "parts", last=stop)
    assert "nothing to do" not in capsys.readouterr().out
    assert train_in_phases(kind, tmp_path / "parts") == whole
    out = capsys.readouterr().out
    assert ("nothing to do here: the run has already reached step 12" in out) == (stop == 12)
    assert out.count("resuming from checkpoint") == 1


@pytest.mark.slow
def test_calls_that_have_nothing_to_do_look_for_a_checkpoint_once(tmp_path, capsys):
    def fit_in_calls(until):
        model, data, loss, optimizer = made("cnn", "adam")
        trainer = unisono.Trainer(model, optimizer, loss, shards=2, directory=tmp_path)
        for steps in range(1, until + 1):
            summary = trainer.fit(data, batch_size=cases.BATCH_SIZE, steps=steps)
        return summary.steps, trainer.run.position.step

    fit_in_calls(4)
    capsys.readouterr()
    assert fit_in_calls(6) == (1, 6)
    out = capsys.readouterr().out
    assert (out.count("nothing to do here"), out.count("resuming from")) == (1, 1)


def test_another_seed_is_refused_where_there_is_nothing_to_do(tmp_path):
    fit(tmp_path, 5)
    assert fit(tmp_path, 3, batch_size=8)[0] == 0
    with pytest.raises(unisono.errors.CheckpointError, match="`seed` must be 5"):
        fit(tmp_path, 3, seed=6)


@pytest.mark.slow
def test_a_job_that_is_started_again_without_a_checkpoint_is_told(tmp_path, monkeypatch, capsys):
    fit(tmp_path / "first", 2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    fit(tmp_path / "first", 3)
    assert "anew" not in capsys.readouterr().out
    fit(tmp_path / "second", 3)
    assert f"{tmp_path / 'second'} contains no checkpoint" in capsys.readouterr().out


def test_a_run_that_updates_other_parameters_is_told(tmp_path, capsys):
    make_players(tmp_path)[0].fit(cases.images(), batch_size=16, steps=2)
    make_players(tmp_path)[1].fit(cases.images(), batch_size=16, steps=3)
    words = "updated parameters was '2 from `one.weight` to `one.bias`' in the checkpoint and is"
    assert words in capsys.readouterr().out


@pytest.mark.slow
def test_every_worker_is_told_of_a_refusal(tmp_path):
    fit(tmp_path, 3)
    with pytest.raises(unisono.errors.CheckpointError, match="`seed` must be 5"):
        unisono.launch(lambda: fit(tmp_path, 6, seed=6), workers=2)


@pytest.mark.slow
def test_a_full_disk_is_told_and_training_goes_on(tmp_path, monkeypatch, capsys):
    whole = fit(None, 6)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "_write_synced", full)
    assert fit(tmp_path, 6, checkpoint=2) == (6, whole[1])
    out = capsys.readouterr().out
    # After 2, 4, and 6, the end.
    assert out.count("no checkpoint: [Errno 28] No space left on device") == 3
    assert "training continues, and the next one is tried" in out


@pytest.mark.parametrize(
    "text", ["{}", "[]", '{"format": 1}', '{"format": 1, "position": {"step": -1}}']
)
def test_a_well_sealed_checkpoint_of_another_form_is_passed_over(tmp_path, text, capsys):
    fit(tmp_path, 2)
    path = tmp_path / "checkpoints" / "step-000000000002"
    files = folder.read_folder(path)
    folder.write_folder(path.with_name("step-000000000009"), files | {"run.json": text.encode()})
    assert fit(tmp_path, 3)[0] == 1
    assert "step-000000000009 is skipped: run.json must have" in capsys.readouterr().out


def checkpoints(directory):
    folder = directory / "checkpoints"
    return sorted(os.listdir(folder)) if folder.exists() else []


@promise("nothing-lost.9")
@pytest.mark.slow
def test_a_run_whose_launcher_is_killed_at_any_instant_loses_nothing(tmp_path):
    generator = random.Random(4)
    expected = json.loads(run([sys.executable, PROGRAM, tmp_path / "whole"], check=True).stdout)
    command = [sys.executable, "-m", "unisono", "run", "-n", "2", PROGRAM, tmp_path / "parts"]
    for is_training in (False, True, True, True, True):
        before = checkpoints(tmp_path / "parts")
        job = start(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while is_training and job.poll() is None and checkpoints(tmp_path / "parts") == before:
            time.sleep(0.001)
        time.sleep(generator.uniform(0, 0.05))
        job.send_signal(signal.SIGKILL)
        job.wait()
    assert json.loads(run(command, check=True).stdout.splitlines()[-1]) == expected


@pytest.mark.slow
def test_a_disk_that_keeps_training_waiting_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("UNISONO_NOTICE_AFTER", "0.05")
    write = folder._write_synced

    def slowly(*args):
        time.sleep(0.1)
        return write(*args)

    monkeypatch.setattr(folder, "_write_synced", slowly)
    assert fit(tmp_path, 4, checkpoint=1)[0] == 4
    assert "for the previous checkpoint to be written" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("held", "newest"),
    [
        ([{2: "a", 4: "b", 6: "c"}, {2: "a", 4: "b", 6: "c"}], 6),
        ([{2: "a", 4: "b"}, {4: "b", 6: "c"}], 4),
        ([{2: "a", 4: "b"}, {2: "a", 4: "of another past"}, {2: "a", 4: "b"}], 2),
        ([{2: "a"}, {4: "a"}], None),
        ([{2: "a"}, {}], None),
        ([{}, {}, {}], None),
    ],
)
def test_the_newest_checkpoint_that_all_have_with_the_same_contents(held, newest):
    assert newest_common(held) == newest
    assert newest_common(held[::-1]) == newest


def test_a_shared_folder_is_seen_whose_absence_was_remembered(monkeypatch, tmp_path):
    """A host that had looked for it before took it for another host's, on NFS."""
    remembered = {tmp_path}
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: path.parent not in remembered and exists(path))
    monkeypatch.setattr(Path, "mkdir", lambda path, **options: remembered.discard(path))
    (tmp_path / "mark").touch()
    team = Mock(hosts=[[0], [1]], size=2, is_leader=False)
    team.broadcast_from_leader.return_value = b"mark"
    team.gather.side_effect = lambda seen, purpose: {0: b"seen", 1: seen}
    assert _is_shared(team, tmp_path)
