"""The commonest mistakes in evaluations and in dealing out files, in programs of other styles."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from unisono.tools.verify.recorder import Limits
from unisono.tools.verify.trials import Program
from unisono.tools.verify.verifier import verify

pytestmark = [pytest.mark.timeout(300)]
slow, long = pytest.mark.slow, pytest.mark.long

PLANTED = Path(__file__).parent / "planted"
NONE = ""


@pytest.mark.parametrize(
    ("name", "args", "mistake"),
    [
        pytest.param("metric_of_one_rank", (), "evaluation-partial", marks=long),
        pytest.param("f1_of_a_slice", (), "evaluation-partial", marks=long),
        pytest.param("metric_that_is_not_synced", (), "evaluation-partial", marks=long),
        pytest.param("files_of_different_sizes", (), "samples-lost", marks=long),
        pytest.param("fewest_steps_of_streams", (), "samples-lost", marks=long),
        pytest.param("fewest_batches_of_loaders", (), "samples-lost", marks=long),
        pytest.param("metric_over_padding", (), "evaluation-counts-twice", marks=long),
        pytest.param("predictions_that_are_gathered", (), "evaluation-counts-twice", marks=long),
        pytest.param("lists_that_are_gathered", (), "evaluation-counts-twice", marks=slow),
        pytest.param("lists_that_are_gathered", ("cut",), NONE, marks=long),
        pytest.param("no_evaluation", (), NONE, marks=long),
    ],
)
def test_the_mistake_is_the_first_that_is_named(name: str, args: tuple[str, ...], mistake: str):
    program = Program("script", f"{name}.py", args, PLANTED)
    verdict = verify(program, 2, Limits(), os.environ, lambda line: None)
    assert verdict.trouble == ""
    first = verdict.findings[0]
    assert (first.check, first.verdict) == (mistake or first.check, "wrong" if mistake else "ok")
    assert verdict.status == (1 if mistake else 0)
