"""The programs of ``examples/ddp`` run as they are copied, and what they print is true."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.warm import processes
from torch.utils.data import TensorDataset

import unisono

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLES = REPOSITORY / "examples" / "ddp"


def run(script: str, *args: object, workers: int) -> str:
    """Run an example on workers of the fork server that all tests share; return what all print."""

    def program(path: str, argv: list[str]) -> str:
        output = io.StringIO()
        sys.argv = argv
        with warnings.catch_warnings(), contextlib.redirect_stdout(output):
            warnings.simplefilter("error")
            runpy.run_path(path, run_name="__main__")
        return output.getvalue()

    path = str(EXAMPLES / script)
    return "".join(unisono.launch(program, path, [path, *map(str, args)], workers=workers))


def start(*command: object) -> str:
    """Run a command as a user does; return what it printed."""
    words = [sys.executable, *map(str, command)]
    done = processes.run(words, timeout=100)
    assert done.returncode == 0, f"{words} failed:\n{done.stdout}\n{done.stderr}"
    assert "Warning" not in done.stderr
    return done.stdout


def names_of(script: str) -> dict[str, Any]:
    """Take an example's functions and classes without running it."""
    return runpy.run_path(str(EXAMPLES / script), run_name="example")


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("mnist_spawn.py", ["--workers", "0"]),
        ("mnist_spawn.py", ["--batch-size", "0"]),
        ("mnist_spawn.py", ["--out", "/not/there/mnist.pt"]),
        ("images.py", ["--batch-size", "0"]),
        ("images.py", ["--out", "/not/there/images.pt"]),
    ],
)
def test_what_cannot_be_is_refused_before_training(
    script: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    with pytest.raises(SystemExit) as ended:
        names_of(script)["main"]()
    assert ended.value.code == 2


def test_logistic_learns_and_its_names_have_no_prefix() -> None:
    output = run("logistic.py", workers=1)
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", output)]
    assert len(losses) == 20
    assert losses[-1] < losses[0] / 3
    assert float(re.findall(r"accuracy ([\d.]+)%", output)[0]) >= 95
    assert "names in the file: weight bias\n" in output
    assert f"splits a batch over: {torch.cuda.device_count()}\n" in output


def test_hello_is_heard_from_each_worker_of_unisono_run() -> None:
    output = start("-m", "unisono", "run", "-n", 2, EXAMPLES / "hello.py")
    assert sorted(output.splitlines()) == [
        f"rank {rank} of 2, on cpu with unisono: all ranks together make 1" for rank in range(2)
    ]


def test_sampler_shows_torchs_padding_and_each_sample_once() -> None:
    blocks = dict(re.findall(r"^(arange.*)\n((?:  .*\n)+)", run("sampler.py", workers=2), re.M))
    assert len(blocks) == 10
    assert blocks["arange(21), as it is"] == (
        "  rank 0: 0 2 4 6 8 10 12 14 16 18 20\n  rank 1: 1 3 5 7 9 11 13 15 17 19 0\n  twice: 0\n"
    )
    assert blocks["arange(21), as it is, exact"] == (
        "  rank 0: 0 2 4 6 8 10 12 14 16 18 20\n  rank 1: 1 3 5 7 9 11 13 15 17 19\n  twice: none\n"
    )
    assert blocks["arange(20), shuffled, exact"] == blocks["arange(20), shuffled"]
    assert blocks["arange(20), as it is, exact"] == blocks["arange(20), as it is"]
    assert "twice: none" in blocks["arange(21), shuffled, exact"]


def counts_right(script_names: dict[str, Any], path: Path, test_set: TensorDataset) -> int:
    """Load the file into the bare model and test it here, in one process."""
    model = script_names["Net"]()
    model.load_state_dict(torch.load(path, weights_only=True))
    images, labels = test_set.tensors
    with torch.no_grad():
        return int((model(images).argmax(1) == labels).sum())


def test_mnist_spawned_on_made_up_images_saves_what_it_has_tested(tmp_path: Path) -> None:
    path = tmp_path / "mnist.pt"
    output = start(EXAMPLES / "mnist_spawn.py", "--epochs", 1, "--workers", 2, "--out", path)
    right, count = map(int, re.findall(r"epoch 1: (\d+) of (\d+) right", output)[0])
    names = names_of("mnist_spawn.py")
    assert count == 501  # which two ranks do not divide
    assert right > 450
    assert right == counts_right(names, path, names["made_up"](501, seed=1))


def test_images_prints_exact_losses_and_saves_the_bare_model(tmp_path: Path) -> None:
    path = tmp_path / "images.pt"
    small = ("--pairs", 64, "--validation-pairs", 13, "--side", 16, "--batch-size", 8)
    output = run(
        "images.py", *small, "--epochs", 3, "--loader-workers", 1, "--out", path, workers=2
    )
    lines = re.findall(
        r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  epoch +(\d)/3  lr (\S+)  train (\S+)  validation (\S+)$",
        output,
        re.M,
    )
    assert [(epoch, lr) for epoch, lr, _, _ in lines] == [
        ("1", "1.00e-02"),
        ("2", "7.50e-03"),
        ("3", "2.50e-03"),
    ]
    assert float(lines[-1][2]) < 0.7 * float(lines[0][2])
    names = names_of("images.py")
    model = names["Net"]()
    model.load_state_dict(torch.load(path, weights_only=True))
    pairs = [names["Pairs"](13, 16, first=64)[index] for index in range(13)]
    first, second, brighter = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    with torch.no_grad():
        loss = F.l1_loss(model(first, second), brighter).item()
    assert float(lines[-1][3]) == pytest.approx(loss, abs=2e-6)


def test_tutorial_goes_on_from_its_checkpoint_and_spans_two_devices() -> None:
    basic, names, goes_on, two_devices = run("tutorial.py", workers=2).splitlines()
    losses = re.findall(r"loss ([\d.]+) → ([\d.]+)", f"{basic} {goes_on} {two_devices}")
    falling = [float(loss) for loss in (*losses[0], *losses[1])]
    assert falling == sorted(falling, reverse=True)
    assert losses[2] == losses[0]
    assert names == "checkpoint: first.weight first.bias second.weight second.bias"
    for line in (basic, goes_on, two_devices):
        assert line.endswith("the same weights on every rank")


def test_fsdp_agrees_with_the_unsharded_model(tmp_path: Path) -> None:
    path = tmp_path / "whole.pt"
    output = run("fsdp.py", "--width", 32, "--steps", 4, "--out", path, workers=2)
    losses = re.findall(r"loss (\S+)  unsharded (\S+)", output)
    assert len(losses) == 4
    for sharded, unsharded in losses:
        assert float(sharded) == pytest.approx(float(unsharded), rel=1e-4)
    held = re.findall(r"holds ([\d,]+) of ([\d,]+)", output)
    parts, wholes = zip(*(map(number, pair) for pair in held), strict=True)
    assert sum(parts) == wholes[0] == 3 * 33 * 32 + 33
    assert max(parts) < 0.6 * wholes[0]
    assert "sharded and unsharded agree: 0.0.weight" in output
    names_of("fsdp.py")["build"](32, 3).load_state_dict(torch.load(path, weights_only=True))


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_the_index_lists_every_program() -> None:
    index = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f"`{path.name}`" in index, path
