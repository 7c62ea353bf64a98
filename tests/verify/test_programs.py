"""Real programs on two ranks and on one: correct ones, and each mistake in them.

UNISONO_PEERS names an environment with Accelerate, Lightning and transformers (`make test-peers`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest
from tests.verify.mistakes import MISTAKES, PROGRAMS

from unisono.tools.verify.recorder import Limits
from unisono.tools.verify.trials import Program
from unisono.tools.verify.verifier import verify

PEERS = os.environ.get("UNISONO_PEERS", "")
LIBRARIES = {
    "with_fabric": "lightning",
    "with_accelerate": "accelerate",
    "with_transformers": "accelerate",  # which its Trainer needs
}
CORRECT = sorted(path.stem for path in PROGRAMS.glob("*.py"))
# One of each style, and of each way in which checks work, for every day.
DAILY_CORRECT = ("tokens", "trained_with_unisono")
DAILY_MISTAKES = (
    "epoch-order-fixed-ddp",
    "mean-of-means-sharded_by_hand",
    "split-differs-averaged_by_hand",
)

pytestmark = [pytest.mark.timeout(300)]
slow, long = pytest.mark.slow, pytest.mark.long


def findings(source: str, program: str, folder: Path) -> list[tuple[str, str]]:
    """Verify a program and return checks and verdicts, cause first."""
    (folder / "train.py").write_text(source)
    library = LIBRARIES.get(program)
    if library is not None and importlib.util.find_spec(library) is None:
        if not PEERS:
            pytest.skip(f"{library} is not installed: `make test-peers`")
        return elsewhere(folder)
    verdict = verify(
        Program("script", "train.py", (), folder), 2, Limits(), os.environ, lambda line: None
    )
    assert verdict.trouble == ""
    return [(finding.check, finding.verdict) for finding in verdict.findings]


def elsewhere(folder: Path) -> list[tuple[str, str]]:
    command = [PEERS, "-m", "unisono", "verify", "--json", "train.py"]
    environ = {**os.environ, "ACCELERATE_USE_CPU": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True)
    assert done.returncode in (0, 1, 2), done.stderr
    return [(f["check"], f["verdict"]) for f in json.loads(done.stdout)["findings"]]


def marked(daily: tuple[str, ...], names: list[str]) -> list[object]:
    return [pytest.param(name, marks=slow if name in daily else long) for name in names]


@pytest.mark.parametrize("program", marked(DAILY_CORRECT, CORRECT))
def test_a_correct_program_has_no_mistake(program: str, tmp_path: Path) -> None:
    found = findings((PROGRAMS / f"{program}.py").read_text(), program, tmp_path)
    assert [check for check, verdict in found if verdict == "wrong"] == []
    # Something must have been verified, though batch norm and augmentation hide much.
    assert len([check for check, verdict in found if verdict == "ok"]) >= 14


@slow
def test_a_loss_that_depends_on_the_number_of_shards_is_told_of(tmp_path: Path) -> None:
    source = (PROGRAMS / "trained_with_unisono.py").read_text()
    uneven = source.replace("(model(x), y)", "(model(x), y) + model(x).var(0).sum()")
    for text, is_told in ((source, False), (uneven, True)):
        (tmp_path / "train.py").write_text(text)
        verdict = verify(
            Program("script", "train.py", (), tmp_path), 2, Limits(), os.environ, lambda line: None
        )
        assert verdict.status == 0
        (found,) = (one for one in verdict.findings if one.check == "mean-of-means")
        assert ("does not add up" in found.evidence) == is_told


@pytest.mark.parametrize("name", marked(DAILY_MISTAKES, list(map(str, MISTAKES))))
def test_a_mistake_is_named_first(name: str, tmp_path: Path) -> None:
    (mistake,) = (mistake for mistake in MISTAKES if str(mistake) == name)
    found = findings(mistake.source(), mistake.program, tmp_path)
    assert found[0] == (mistake.check, "wrong")


COUNTED_IN_A_FILE = """\
    with __import__("pathlib").Path(f"calls {__import__('os').getpid()}").open("a") as file:
        file.write("x")
        calls = file.tell()
"""


@slow
def test_state_that_a_worker_keeps_for_itself_is_found_in_a_program_of_ours(tmp_path: Path) -> None:
    source = (PROGRAMS / "trained_with_unisono.py").read_text()
    source = source.replace("    x, y = batch\n", f"    x, y = batch\n{COUNTED_IN_A_FILE}").replace(
        "F.cross_entropy(model(x), y)", "F.cross_entropy(model(x), y) * (calls // 4)"
    )
    (tmp_path / "train.py").write_text(source)
    verdict = verify(Program("script", "train.py", (), tmp_path), 3, Limits(), os.environ, print)
    assert verdict.world_sizes == (1, 2, 3)
    first = verdict.findings[0]
    assert (first.check, first.verdict) == ("gradients-not-averaged", "wrong")
    assert first.evidence.startswith("Step 0, shard 2: the gradient of `0.weight` on 2 workers")


AHEAD = """
def ahead(batches):
    batches = iter(batches)
    batch = next(batches)
    for following in batches:
        yield batch
        batch = following
    yield batch
"""


@slow
def test_inputs_by_name_from_a_loader_that_reads_ahead_are_seen(tmp_path: Path) -> None:
    """As transformers' Trainer gives them: the newest batch is not the one that is computed."""
    source = (PROGRAMS / "ddp.py").read_text()
    source = source.replace("model(x)", "model(input=x.clone())").replace(
        "def main", f"{AHEAD}\ndef main"
    )
    source = source.replace("in train_loader", "in ahead(train_loader)")
    found = dict(findings(source, "ddp", tmp_path))
    assert {check for check, verdict in found.items() if verdict != "ok"} == set()


def test_there_is_a_mistake_for_every_check_and_style() -> None:
    from unisono.tools.verify.findings import CAUSES_FIRST

    assert {mistake.check for mistake in MISTAKES} == set(CAUSES_FIRST)
    assert len(MISTAKES) >= 20
    assert len(CORRECT) >= 10
    programs = {mistake.program for mistake in MISTAKES}
    assert programs >= {"ddp", "averaged_by_hand", "with_fabric", "with_accelerate"}


def test_daily_ones_exist() -> None:
    assert set(DAILY_CORRECT) <= set(CORRECT)
    assert set(DAILY_MISTAKES) <= set(map(str, MISTAKES))
