"""What stands in the way of a run's directory is said before training, in one sentence."""

import os
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono.engine.state.load import save_weights
from unisono.errors import CheckpointError
from unisono.tools.cli import main

pytestmark = pytest.mark.slow


def fit(directory, steps=2, width=4, **checkpoint):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 1))
    trainer = unisono.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: model(batch[0]).square().mean(),
        shards=2,
        directory=directory,
        checkpoint=unisono.Checkpoint(1, **checkpoint) if directory else None,
    )
    trainer.fit(TensorDataset(torch.randn(16, 3)), batch_size=4, steps=steps)
    return trainer


def damage(directory):
    for one in (directory / "checkpoints").glob("step-*/run.json"):
        one.write_bytes(b"{}")


def test_all_checkpoints_damaged_is_refused_in_one_line(tmp_path, capsys):
    fit(tmp_path, 3)
    damage(tmp_path)
    capsys.readouterr()
    with pytest.raises(CheckpointError) as caught:
        fit(tmp_path, 4)
    assert "the newest in" in str(caught.value)
    assert "step-000000000003, cannot be used (run.json must have" in str(caught.value)
    assert "nor can the 2 older ones" in str(caught.value)
    assert "is skipped" not in "".join(capsys.readouterr())
    # Both remedies.
    assert fit(tmp_path, 4, resume="never").run.position.step == 4
    (tmp_path / "empty").mkdir()
    assert fit(tmp_path / "empty", 4).run.position.step == 4


def test_one_error_lists_what_of_another_model_differs(tmp_path, capsys):
    fit(tmp_path, 2, width=4)
    capsys.readouterr()
    with pytest.raises(CheckpointError) as caught:
        fit(tmp_path, 4, width=5)
    said = str(caught.value)
    assert "`0.weight` is torch.float32 of shape (4, 3) in the checkpoint and" in said
    assert "torch.float32 of shape (5, 3) now; `0.bias` is" in said
    assert "`2.weight` is" in said
    assert "training continues" not in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("more_layers", "optimizer", "said"),
    [
        ((nn.Linear(1, 1),), torch.optim.SGD, "but `3.bias`, `3.weight` are only in the model"),
        ((), torch.optim.Adam, "`optimizer` must be 'SGD' as in the checkpoint, but is 'Adam'"),
    ],
    ids=["a further layer", "another optimizer"],
)
def test_one_error_tells_of_what_else_is_another(tmp_path, capsys, more_layers, optimizer, said):
    fit(tmp_path, 2)
    capsys.readouterr()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1), *more_layers)
    trainer = unisono.Trainer(
        *(model, optimizer(model.parameters(), lr=0.1)),
        lambda model, batch: model(batch[0]).square().mean(),
        shards=2,
        directory=tmp_path,
    )
    with pytest.raises(CheckpointError) as caught:
        trainer.fit(TensorDataset(torch.randn(16, 3)), batch_size=4, steps=4)
    assert said in str(caught.value)
    assert "the run continues" not in "".join(capsys.readouterr())


def test_a_directory_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    if os.getuid():
        (tmp_path / "run").mkdir(mode=0o500)
        with pytest.raises(CheckpointError, match="`directory` must be a folder that can be"):
            fit(tmp_path / "run")
        return
    # Root may write anywhere, but not to a file system that is mounted to be read only.
    code = (
        "import sys, tests.train.test_run_directory as here\n"
        "from pathlib import Path\n"
        "try:\n    here.fit(Path(sys.argv[1]))\n"
        "except here.CheckpointError as error:\n    print(error)\n"
    )
    (tmp_path / "run").mkdir()
    words = f"mount -t tmpfs -o ro none {tmp_path}/run && exec {sys.executable} -c '{code}' $0"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", words, tmp_path / "run"], capture_output=True, text=True
    )
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr}")
    assert "`directory` must be a folder that can be read and written, or" in done.stdout, done
    assert "Read-only file system" in done.stdout


@pytest.mark.parametrize("name", ["m.pt", "new/dir/m.pth", "new/dir/m.safetensors", "m"])
def test_weights_are_saved_in_the_format_of_the_name_and_folders_are_made(tmp_path, name):
    trainer = fit(None)
    trainer.save(tmp_path / name)
    other = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    unisono.load_weights(tmp_path / name, other)
    assert torch.equal(other[0].weight, trainer.run.model[0].weight)
    if ".pt" in name:
        other = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
        other.load_state_dict(torch.load(tmp_path / name, weights_only=True))
        assert torch.equal(other[2].bias, trainer.run.model[2].bias)


def test_weights_under_names_that_a_hook_has_changed_are_refused(tmp_path):
    """`load_state_dict` takes none of them, and torch is asked to say nothing."""
    model = torch.nn.Linear(1, 1)
    model._register_state_dict_hook(
        lambda module, state, prefix, local: state.update(other=state.pop("weight"))
    )
    save_weights(model, tmp_path / "m.pt")
    with pytest.raises(CheckpointError, match="takes no `other`"):
        unisono.load_weights(tmp_path / "m.pt", model)


def test_tied_weights_have_both_names_in_a_file_of_torchs(tmp_path):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight
    trainer = unisono.Trainer(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).sum()
    )
    trainer.save(tmp_path / "tied.pt")
    model.load_state_dict(torch.load(tmp_path / "tied.pt", weights_only=True))
    assert (tmp_path / "tied.pt").stat().st_size < 4000


def test_a_tilde_is_the_home_folder_everywhere(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    trainer = fit("~/run")
    trainer.save("~/weights/m.safetensors")
    trainer.callbacks += [
        unisono.callbacks.BestCheckpoint("~/best/b.safetensors"),
        unisono.callbacks.EventLog("~/events/e.jsonl"),
    ]
    tracker = unisono.callbacks.TensorBoard("~/board")
    assert tracker.writes_to(None) == tmp_path / "board"
    data = TensorDataset(torch.randn(16, 3))
    trainer.fit(data, batch_size=4, steps=4, validate=data)
    unisono.load_weights("~/weights/m.safetensors", trainer.run.model)
    unisono.load_weights("~/run", trainer.run.model)
    found = sorted(one.name for one in tmp_path.iterdir())
    assert found == ["best", "events", "run", "weights"]
    command = [sys.executable, "-m", "unisono", "checkpoints", "~/run"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "step-000000000004  whole" in done.stdout, done


def test_a_tilde_is_the_home_folder_for_commands(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    fit("~/run")
    for line in (
        *("top --once ~/run", "report ~/run", "report ~/run -o ~/page.html", "checkpoints ~/run"),
        *("compare ~/run ~/run -o ~/both.html", "new ~/train.py", "new gan ~/gan.py"),
    ):
        done = CliRunner().invoke(main, line.split())
        assert done.exit_code == 0, done.output
    found = sorted(one.name for one in tmp_path.iterdir())
    assert found == ["both.html", "gan.py", "page.html", "run", "train.py"]


@pytest.mark.parametrize("name", ["m.onnx", "new/m.h5", "m.GGUF"])
def test_a_suffix_of_another_format_is_refused_before_training(tmp_path, name):
    for take in (unisono.callbacks.BestCheckpoint, fit(None).save):
        with pytest.raises(ValueError, match=r"must end in .safetensors, or in .pt .* export the"):
            take(tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_home_that_is_not_known_is_named(monkeypatch):
    with pytest.raises(ValueError, match="`~` must stand for a home folder that is known here"):
        fit("~nobody-of-this-name/run")
