"""The examples run as they are copied, with the same digest on one worker and on two."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.warm import processes
from torch.utils.data import TensorDataset

from unisono.data import mnist
from unisono.world import num_devices

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLES = REPOSITORY / "examples"
DATA = REPOSITORY.parent / "shared" / "data"
MNIST = DATA / "mnist"
TEXT = DATA / "tinyshakespeare" / "input.txt"

needs_mnist = pytest.mark.skipif(not MNIST.is_dir(), reason=f"MNIST is not in {MNIST}")
needs_text = pytest.mark.skipif(not TEXT.is_file(), reason=f"tinyshakespeare is not {TEXT}")
needs_two_cores = pytest.mark.skipif(
    num_devices() < 2, reason="with one core one worker takes one shard, two workers take two"
)


def run(
    script: str,
    *args: object,
    workers: int | None = None,
    popen: type[subprocess.Popen[str]] = processes.start,
) -> str:
    """Run an example under plain python, or on workers; return what it printed."""
    program = [str(EXAMPLES / script), *map(str, args)]
    starter = [sys.executable]
    if workers is not None:
        starter += ["-m", "unisono", "run", "-n", str(workers)]
    done = processes.run([*starter, *program], popen=popen, timeout=280)
    assert done.returncode == 0, f"{script} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


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


@pytest.mark.slow
def test_several_devices_give_the_digest_of_one() -> None:
    names = [["cpu"], ["cpu"] * 3]
    outputs = [run("several_devices.py", "--devices", *each) for each in names]
    outputs.append(run("several_devices.py", "--devices", "cpu", "cpu", workers=2))
    assert len(set(map(digest, outputs))) == 1


@pytest.mark.long
@needs_two_cores
def test_callbacks_leave_the_same_on_two_workers(tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "two"]
    alone = run("callbacks.py", "--directory", folders[0])
    together = run("callbacks.py", "--directory", folders[1], workers=2)
    assert digest(alone) == digest(together)
    assert alone.splitlines()[-2:] == together.splitlines()[-2:]
    for name in ("best.safetensors", "averaged.safetensors", "epochs.csv"):
        one, two = ((folder / name).read_bytes() for folder in folders)
        assert one == two, name


@pytest.mark.slow
@needs_two_cores
@pytest.mark.parametrize(
    "script",
    [
        "contrastive.py",
        *(
            pytest.param(script, marks=pytest.mark.long)
            for script in (
                "actor_critic.py",
                "closures.py",
                "distillation.py",
                "gan.py",
                "gradients.py",
                "hidden_state.py",
                "metrics.py",
                "several_inputs.py",
                "slow_link.py",
                "streams.py",
                "tokens.py",
                "why_slow.py",
            )
        ),
    ],
)
def test_each_feature_has_one_digest(script: str) -> None:
    alone = run(f"by_feature/{script}")
    assert digest(alone) == digest(run(f"by_feature/{script}", workers=2))


def test_every_feature_is_listed_and_run() -> None:
    folder = EXAMPLES / "by_feature"
    shown, tests = (folder / "README.md").read_text(), Path(__file__).read_text()
    for script in folder.glob("*.py"):
        assert f"`{script.name}`" in shown
        assert f'"{script.name}"' in tests or f"by_feature/{script.name}" in tests


@pytest.mark.slow
def test_wrong_forms_are_refused_with_what_to_write() -> None:
    shown = run("by_feature/wrong_forms.py").split("\n\n")
    errors = [form for form in shown if re.search(r": (Type|Value|Checkpoint)Error: ", form)]
    assert len(errors) == 6
    assert all("must" in form for form in errors)


@pytest.mark.slow
@needs_mnist
def test_mnist_runs_on_a_few_real_samples_in_plain_files(tmp_path: Path) -> None:
    write_idx(mnist(MNIST), 500, tmp_path, "train")
    write_idx(mnist(MNIST, train=False), 100, tmp_path, "t10k")
    output = run("mnist.py", "--data", tmp_path, "--epochs", 2, workers=2)
    assert digest(output)


@pytest.mark.long
@pytest.mark.timeout(300)
@needs_mnist
def test_mnist_learns_in_three_epochs() -> None:
    output = run("mnist.py", "--data", MNIST, workers=num_devices())
    assert validation_accuracy(output) > 0.985


@pytest.mark.long
@needs_text
@needs_two_cores
def test_gpt_writes_the_same_text_on_two_workers() -> None:
    args = ("--data", TEXT, "--steps", 3)
    alone, together = run("gpt.py", *args), run("gpt.py", *args, workers=2)
    assert digest(alone) == digest(together)
    written = [output.split("per character")[1].strip() for output in (alone, together)]
    assert written[0] == written[1]
    assert len(written[0]) > 300
