"""Every recipe runs as `unisono new` writes it, with one result on any number of workers."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tests.warm import processes

from unisono.tools.cli import main
from unisono.tools.cli.first_commands import recipes

# How a recipe is made short enough for a test that runs it three times.
SHORT = {
    "classifier": {"epochs=6": "steps=6"},
    "regression": {"FOLDS = 5": "FOLDS = 2", "epochs=10": "steps=6"},
    "language_model": {"64, 300": "16, 6", "every=100": "every=3", "num_layers=3": "num_layers=1"},
    "speech": {"epochs=EPOCHS": "steps=6", "(600, 1)": "(100, 1)", "(100, 2)": "(20, 2)"},
    "fine_tuning": {"epochs=EPOCHS": "steps=6"},
    "gan": {"epochs=EPOCHS": "steps=6"},
    "contrastive": {"epochs=10": "steps=6"},
    "byol": {"epochs=20": "steps=6"},
    "distillation": {"epochs=EPOCHS": "steps=6", "epochs=5": "steps=6"},
    "dqn": {"1_500": "60"},
    "search": {"= 4, 8,": "= 2, 1,"},
    "split": {"epochs=5": "steps=6", "num_layers=4": "num_layers=2"},
}
AT_ONCE = ("classifier", "dqn")  # the others: `make test-pages`
NEEDED = {"fine_tuning": "transformers", "search": "optuna"}  # each takes seconds to load
# Updates that are undone, so that the run returns to its newest snapshot.
KILL = {"UNISONO_FAULTS": "kill:rank=1,step=4,at=update"}


def written(name: str, folder: Path) -> Path:
    """Write a recipe as a user does, but shorter."""
    file = folder / f"my {name}.py"
    done = CliRunner().invoke(main, ["new", name, str(file)])
    assert done.exit_code == 0, done.output
    text = file.read_text()
    for long, short in SHORT.get(name, {}).items():
        assert text.count(long) >= 1, f"{name} has no {long!r}"
        text = text.replace(long, short)
    file.write_text(text)
    return file


def run(*command: object, folder: Path, environ: dict[str, str] | None = None) -> str:
    folder.mkdir()
    done = processes.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=os.environ | (environ or {}),
        timeout=100,
    )
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def results(output: str) -> list[tuple[str, str]]:
    """Find the digests and the validations that a program has printed."""
    return re.findall(
        r"digest:? ([0-9a-f]{16})|^((?:epoch|step) \d+: validation .*)$", output, re.M
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [name if name in AT_ONCE else pytest.param(name, marks=pytest.mark.long) for name in SHORT],
)
def test_a_recipe_has_one_result_on_any_number_of_workers_and_after_a_kill(
    name: str, tmp_path: Path
) -> None:
    if name in NEEDED and importlib.util.find_spec(NEEDED[name]) is None:
        pytest.skip(f"{name} needs {NEEDED[name]}")
    file = written(name, tmp_path)
    launches = name == "search"  # it starts workers itself
    outputs = []
    for workers, environ in ((1, {}), (2, KILL), (3, {})):
        unisono = ("-m", "unisono", "run", "-n", workers)
        started = () if launches or workers == 1 else unisono
        given = (workers,) if launches else ()
        folder = tmp_path / str(workers)
        output = run(*started, file, *given, folder=folder, environ=environ)
        assert ("was killed by SIGKILL" in output) == (workers == 2), output
        outputs.append(results(output))
    assert any(digest for digest, _ in outputs[0])
    assert outputs[1:] == outputs[:1] * 2


@pytest.mark.slow
def test_the_ddp_recipe_learns_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    """Up to rounding, since each rank takes the mean of its own part of a batch."""
    file = written("ddp", tmp_path)
    found = []
    for workers in (1, 2, 3, 4):  # 4 do not divide the samples
        folder = tmp_path / str(workers)
        output = run("-m", "unisono", "run", "-n", workers, file, folder=folder)
        assert sorted(torch.load(folder / "model.pt")) == [
            "1.bias",
            "1.weight",
            "3.bias",
            "3.weight",
        ]
        said = re.findall(r"epoch \d: validation loss ([\d.]+), accuracy ([\d.]+)", output)
        found.append([float(value) for pair in said for value in pair])
    assert len(found[0]) == 10
    assert found[0][-1] > 0.9
    assert found[1:] == [pytest.approx(found[0], abs=3e-3)] * 3


@pytest.mark.slow
def test_the_language_model_recipe_reads_a_text_of_any_encoding(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes("na\xefve\r\n".encode("latin-1") * 100)
    output = run(written("language_model", tmp_path), text, folder=tmp_path / "alone")
    assert "6 steps" in output


def test_the_contrastive_recipe_has_the_loss_of_simclr() -> None:
    """Algorithm 1 of Chen et al. (2020), in its loops."""
    path, _ = recipes()["contrastive"]
    recipe = runpy.run_path(str(path))
    first, second = (torch.nn.functional.normalize(torch.randn(5, 4), dim=1) for _ in range(2))
    views = torch.stack([first, second], 1).flatten(0, 1)
    like = (views @ views.T / recipe["TEMPERATURE"]).exp()
    each = [like[i].sum() - like[i, i] for i in range(10)]
    expected = sum(-(like[i, i ^ 1] / each[i]).log() for i in range(10)) / 10
    torch.testing.assert_close(recipe["contrast"](None, (first, second))["loss"], expected)


def test_the_dqn_recipe_learns_from_moves_that_were_made() -> None:
    path, _ = recipes()["dqn"]
    main = runpy.run_path(str(path))["main"]
    names, memories = main.__globals__, []

    class Watched(names["Memory"]):
        def __init__(self) -> None:
            super().__init__()
            memories.append(self)

    def loss(values: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        assert memories[0].moves[: names["GAMES"]].any(1).all()
        return torch.nn.functional.smooth_l1_loss(values, wanted)

    names |= {"Memory": Watched, "STEPS": 2, "F": types.SimpleNamespace(smooth_l1_loss=loss)}
    main()


def test_each_recipe_is_tested_and_short() -> None:
    found = recipes()
    elsewhere = {"ddp", "notebook", "cluster"}  # here, test_notebook.py, test_examples_cluster.py
    assert found.keys() == SHORT.keys() | elsewhere
    folder = found["ddp"][0].parent
    assert {path.name for path, _ in found.values()} == {
        path.name for path in folder.iterdir() if path.name not in ("README.md", "__pycache__")
    }
    for path, _ in found.values():
        assert path.suffix != ".py" or path.read_text().count("\n") < 80


def test_a_folder_is_written_with_its_own_name(tmp_path: Path) -> None:
    file = tmp_path / "my jobs"
    said = CliRunner().invoke(main, ["new", "cluster", str(file)]).output
    assert said == f"{file} is written. See '{file}'/README.md.\n"
    source, _ = recipes()["cluster"]
    for path in source.iterdir():
        text = (file / path.name).read_text()
        assert text.replace(f"'{file}'", "examples/cluster") == path.read_text()
    assert f"sbatch '{file}'/train.sbatch '{file}'/train.py" in (file / "README.md").read_text()
