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
from torch.utils.data import DistributedSampler, TensorDataset

import unisono
from unisono.data import mnist

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).resolve().parents[1]
EXAMPLES = REPOSITORY / "examples" / "ddp"
MNIST = REPOSITORY.parent / "shared" / "data" / "mnist"

needs_mnist = pytest.mark.skipif(not MNIST.is_dir(), reason=f"MNIST is not in {MNIST}")


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


@pytest.mark.slow
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
    for length in (20, 21):
        for epoch, title in ((0, "shuffled"), (1, "shuffled, set_epoch(1)")):
            assert blocks[f"arange({length}), {title}"].startswith(torchs_samples(length, epoch))
    assert blocks["arange(20), shuffled, exact"] == blocks["arange(20), shuffled"]
    assert blocks["arange(20), as it is, exact"] == blocks["arange(20), as it is"]
    assert "twice: none" in blocks["arange(21), shuffled, exact"]


def torchs_samples(length: int, epoch: int) -> str:
    lines = []
    for rank in range(2):
        sampler = DistributedSampler(range(length), 2, rank)
        sampler.set_epoch(epoch)
        lines.append(f"  rank {rank}: {' '.join(map(str, sampler))}\n")
    return "".join(lines)


def counts_right(script_names: dict[str, Any], path: Path, test_set: TensorDataset) -> int:
    """Load the file into the bare model and test it here, in one process."""
    model = script_names["Net"]()
    model.load_state_dict(torch.load(path, weights_only=True))
    images, labels = test_set.tensors
    with torch.no_grad():
        return int((model(images).argmax(1) == labels).sum())


@pytest.mark.slow
def test_mnist_spawned_on_made_up_images_saves_what_it_has_tested(tmp_path: Path) -> None:
    path = tmp_path / "mnist.pt"
    output = start(EXAMPLES / "mnist_spawn.py", "--epochs", 1, "--workers", 2, "--out", path)
    right, count = map(int, re.findall(r"epoch 1: (\d+) of (\d+) right", output)[0])
    names = names_of("mnist_spawn.py")
    assert count == 501  # which two ranks do not divide
    assert right > 450
    assert right == counts_right(names, path, names["made_up"](501, seed=1))


@pytest.mark.long
@needs_mnist
def test_mnist_spawned_on_real_images_learns(tmp_path: Path) -> None:
    write_first(mnist(MNIST), 800, tmp_path, "train")
    write_first(mnist(MNIST, train=False), 301, tmp_path, "t10k")
    path = tmp_path / "mnist.pt"
    output = start(
        *(EXAMPLES / "mnist_spawn.py", "--data", tmp_path, "--out", path),
        *("--workers", 2, "--epochs", 2, "--batch-size", 16),
    )
    tested = [tuple(map(int, pair)) for pair in re.findall(r"(\d+) of (\d+) right", output)]
    assert [count for _, count in tested] == [301, 301]
    assert tested[-1][0] > 0.8 * 301
    right = counts_right(names_of("mnist_spawn.py"), path, mnist(tmp_path, train=False))
    assert right == tested[-1][0]


def write_first(dataset: TensorDataset, count: int, folder: Path, prefix: str) -> None:
    """Write the first samples back as two plain IDX files."""
    pixels, labels = (tensor[:count] for tensor in dataset.tensors)
    sizes = [size.to_bytes(4, "big") for size in (count, 28, 28)]
    (folder / f"{prefix}-images-idx3-ubyte").write_bytes(
        b"\0\0\x08\x03" + b"".join(sizes) + pixels.mul(255).round().byte().numpy().tobytes()
    )
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(
        b"\0\0\x08\x01" + sizes[0] + labels.byte().numpy().tobytes()
    )


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
    expected = losses_in_one_process(num_steps=10)
    assert expected == sorted(expected, reverse=True)
    assert losses_of(basic) == pytest.approx((expected[0], expected[4]), abs=1e-4)
    assert losses_of(goes_on) == pytest.approx((expected[5], expected[9]), abs=1e-4)
    assert losses_of(two_devices) == losses_of(basic)
    assert names == "checkpoint: first.weight first.bias second.weight second.bias"
    for line in (basic, goes_on, two_devices):
        assert line.endswith("the same weights on every rank")


def losses_in_one_process(num_steps: int) -> list[float]:
    """Train the tutorial's model on the samples of both ranks together."""
    torch.manual_seed(0)
    model = names_of("tutorial.py")["Toy"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generators = [torch.Generator().manual_seed(rank) for rank in range(2)]
    inputs = torch.cat([torch.randn(20, 10, generator=one) for one in generators])
    targets = torch.cat([torch.randn(20, 5, generator=one) for one in generators])
    losses = []
    for _ in range(num_steps):
        loss = F.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def losses_of(line: str) -> tuple[float, float]:
    ((first, last),) = re.findall(r"loss ([\d.]+) → ([\d.]+)", line)
    return float(first), float(last)


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
