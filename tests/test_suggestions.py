"""Command lines that people write from habit are refused with what to write."""

import pytest
from click.testing import CliRunner

from unisono.cli import main


def said(*arguments):
    result = CliRunner().invoke(main, list(arguments))
    assert result.exit_code == 2, result.output
    return result.output.strip()


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["train.py"], "unisono run train.py"),
        (["train.py", "--lr", "0.1"], "unisono run train.py --lr 0.1"),
        (["a folder/train.py"], "unisono run 'a folder/train.py'"),
        (["-n", "2", "train.py"], "unisono run -n 2 train.py"),
        (["-n2", "train.py"], "unisono run -n2 train.py"),
        (["-m", "package"], "unisono run -m package"),
        (["--nproc-per-node=2", "train.py"], None),
        (["run", "--nproc-per-node", "2", "train.py"], "unisono run -n 2 train.py"),
        (["run", "--nproc_per_node=2", "train.py", "-n", "x"], "unisono run -n 2 train.py -n x"),
        (["run", "--num-processes", "4", "train.py"], "unisono run -n 4 train.py"),
    ],
)
def test_what_was_meant_is_said(arguments, meant):
    output = said(*arguments)
    if meant is None:
        assert "-n" in output
    else:
        assert output.endswith(f"use `{meant}`.")


@pytest.mark.parametrize(
    ("option", "words"),
    [("--standalone", "is not needed"), ("--nnodes", "is for several hosts")],
)
def test_what_has_no_meaning_here_is_said(option, words):
    assert f"`{option}` {words}" in said("run", option, "train.py")


@pytest.mark.parametrize("arguments", [["--nonsense"], ["nonsense"], ["run", "--nonsense", "a.py"]])
def test_everything_else_is_refused_as_ever(arguments):
    assert "nonsense" in said(*arguments)


def test_options_of_the_script_are_its_own():
    assert "nobody.py" in said("run", "-n", "1", "nobody.py", "--nproc-per-node", "2")
