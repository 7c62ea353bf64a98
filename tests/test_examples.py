"""Every example runs as it is copied, with one digest on 1, 2 and 3 workers."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.nn.functional as F
from tests.warm import processes
from torch.utils.data import TensorDataset

from unisono.data import digits
from unisono.runtime.world import num_devices

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLES = REPOSITORY / "examples"
DOCS = REPOSITORY / "docs"
DATA = REPOSITORY.parent / "shared" / "data"
MNIST = DATA / "mnist"

needs_mnist = pytest.mark.skipif(not MNIST.is_dir(), reason=f"MNIST is not in {MNIST}")

PROGRAMS = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.py"))
_DDP = "torch.distributed, where the batch is the program's affair: tests/test_examples_ddp.py"
_DEVICES = "one process: tests/test_examples_devices.py has one result on several devices"
WITHOUT_DIGEST = {
    "by_feature/wrong_forms.py": "what it shows is refused",
    **{script: _DDP for script in PROGRAMS if script.startswith("ddp/")},
    "devices/choosing.py": "what the other examples there have in common",
    "devices/data_parallel.py": _DEVICES,
    "devices/large_classifier.py": _DEVICES,
    "devices/two_layers.py": _DEVICES,
}
# Few steps, where an example has a switch for it.
ARGUMENTS = {
    "complete/finetune_transformers.py": ("--quick",),
    "complete/hydra_app.py": ("fit.epochs=1",),
    "complete/images.py": ("--quick",),
    "complete/optuna_search.py": ("--quick",),
    "complete/text.py": ("--quick",),
    "devices/gpt_in_two.py": ("--steps", 5),
    "mnist.py": ("--data", "mnist", "--epochs", 1),
}
# Those that start workers themselves, and how they are told how many.
LAUNCHING = {
    "by_feature/launch.py": ("--workers", "{}"),
    "complete/hydra_app.py": ("workers={}",),
    "complete/optuna_search.py": ("--workers", "{}"),
}
NEEDED = {
    "complete/finetune_transformers.py": "datasets",
    "complete/hydra_app.py": "hydra",
    "complete/optuna_search.py": "optuna",
}
# In `make test`, on 1 and 2 workers; `make chaos` runs all, on 3 as well.
IN_MAKE_TEST = {
    "by_feature/contrastive.py",
    "complete/images.py",
}


def run(
    script: str,
    *args: object,
    workers: int | None = None,
    folder: Path | None = None,
    popen: type[subprocess.Popen[str]] = processes.start,
) -> str:
    """Run an example under plain python, or on workers; return what it printed."""
    program = [str(EXAMPLES / script), *map(str, args)]
    starter = [sys.executable]
    if workers is not None:
        starter += ["-m", "unisono", "run", "-n", str(workers)]
    done = processes.run([*starter, *program], popen=popen, cwd=folder, timeout=280)
    assert done.returncode == 0, f"{script} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


def results(output: str) -> list[tuple[str, str]]:
    """Find the digests and the validations that a program has printed."""
    return re.findall(
        r"digest:? ([0-9a-f]{16})|^((?:epoch|step) \d+: validation .*)$", output, re.M
    )


def digest(output: str) -> str:
    (found,) = re.findall(r"digest:? ([0-9a-f]+)", output)
    return found


def validation_accuracy(output: str) -> float:
    """Return the accuracy that `fit` printed after the last epoch."""
    return float(re.findall(r"validation .*accuracy ([\d.]+)", output)[-1])


def write_idx(dataset: TensorDataset, num_samples: int, folder: Path, prefix: str) -> None:
    """Write the first samples back as two plain IDX files."""
    pixels, labels = (tensor[:num_samples] for tensor in dataset.tensors)
    count = num_samples.to_bytes(4, "big")
    side = (28).to_bytes(4, "big")
    images = pixels.mul(255).round().byte().numpy().tobytes()
    (folder / f"{prefix}-images-idx3-ubyte").write_bytes(
        b"\0\0\x08\x03" + count + side + side + images
    )
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(
        b"\0\0\x08\x01" + count + labels.byte().numpy().tobytes()
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a working folder with a data set that has MNIST's shape."""
    (tmp_path / "mnist").mkdir()
    for train, prefix in ((True, "train"), (False, "t10k")):
        images, labels = digits(train=train).tensors
        large = TensorDataset(F.interpolate(images, size=(28, 28)), labels)
        write_idx(large, 300, tmp_path / "mnist", prefix)
    return tmp_path


def arguments(script: str, workers: int) -> list[object]:
    own = (word.format(workers) for word in LAUNCHING.get(script, ()))
    return [*own, *ARGUMENTS.get(script, ())]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("script", "numbers"),
    [
        *(
            pytest.param(script, (1, 2, 3), marks=pytest.mark.long, id=script)
            for script in PROGRAMS
            if script not in WITHOUT_DIGEST
        ),
        *(
            pytest.param(script, (1, 2), marks=pytest.mark.slow, id=f"{script}, 1 and 2")
            for script in sorted(IN_MAKE_TEST)
        ),
    ],
)
def test_an_example_has_one_digest_on_every_number_of_workers(
    script: str, numbers: tuple[int, ...], folder: Path
) -> None:
    if script in NEEDED and importlib.util.find_spec(NEEDED[script]) is None:
        pytest.skip(f"{script} needs {NEEDED[script]}: README.md says which extra has it")
    outputs = []
    for workers in numbers:
        here = folder / str(workers)
        here.mkdir()
        (here / "mnist").symlink_to(folder / "mnist")
        started = None if workers == 1 or script in LAUNCHING else workers
        output = run(script, *arguments(script, workers), workers=started, folder=here)
        outputs.append(results(output))
    assert any(digest for digest, _ in outputs[0])
    assert outputs[1:] == outputs[:1] * (len(numbers) - 1)


def test_tables_of_examples_name_files_that_are_there() -> None:
    tables = (WITHOUT_DIGEST, ARGUMENTS, LAUNCHING, NEEDED, IN_MAKE_TEST)
    assert set().union(*tables) <= set(PROGRAMS)


def shown_by(page: Path) -> set[str]:
    """Find the examples that a page leads to."""
    return set(re.findall(r"\(\.\./examples/([^)]*)\)", page.read_text()))


def test_every_feature_is_listed_and_shown_by_a_page() -> None:
    index = (EXAMPLES / "by_feature" / "README.md").read_text()
    shown = set().union(*map(shown_by, DOCS.glob("*.md")))
    features = [script for script in PROGRAMS if script.startswith("by_feature/")]
    assert len(features) >= 20
    assert [script for script in features if f"`{Path(script).name}`" not in index] == []
    assert [script for script in features if script not in shown] == []


def test_every_page_on_how_to_do_something_shows_an_example() -> None:
    nav = (REPOSITORY / "mkdocs.yml").read_text()
    pages = re.findall(r": (\S+\.md)", nav.split("- Train:")[1].split("- Reference:")[0])
    about_commands = {"hosts.md", "failures.md", "hangs.md", "plan.md"}
    assert {page for page in pages if not shown_by(DOCS / page)} <= about_commands


@pytest.mark.long
def test_loggers_change_no_digest(tmp_path: Path) -> None:
    alone = run("by_feature/loggers.py", "--directory", tmp_path / "alone")
    loggers = ("--loggers", "csv", "wandb")
    two = run("by_feature/loggers.py", "--directory", tmp_path / "two", *loggers, workers=2)
    assert digest(alone) == digest(two)
    assert (tmp_path / "alone" / "steps.csv").read_text().count("\n") == 47


@pytest.mark.slow
def test_wrong_forms_are_refused_with_what_to_write() -> None:
    shown = run("by_feature/wrong_forms.py").split("\n\n")
    errors = [form for form in shown if re.search(r": (Type|Value|Checkpoint)Error: ", form)]
    assert len(errors) == 5
    assert all("must" in form for form in errors)


@pytest.mark.long
@pytest.mark.timeout(300)
@needs_mnist
def test_mnist_learns_in_three_epochs() -> None:
    output = run("mnist.py", "--data", MNIST, workers=num_devices())
    assert validation_accuracy(output) > 0.985
