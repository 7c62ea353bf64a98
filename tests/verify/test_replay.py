from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from unisono.tools.verify.bit_checks import (
    KINDS,
    Resumption,
    StepRecord,
    check_resumptions,
    compare,
    step_records,
)
from unisono.tools.verify.reading import RawTrace
from unisono.tools.verify.recorder import Limits
from unisono.tools.verify.trials import Program
from unisono.tools.verify.verifier import verify

PROGRAMS = Path(__file__).parent / "programs" / "resuming"


def records(first, last, **changes):
    """Make the steps of one rank; `changes` are made in the last of them."""
    made = [
        StepRecord(
            before={"w": f"w {at}"},
            samples=(f"sample {at}",),
            after={
                "parameters": {"w": f"w {at + 1}"},
                "optimizer": {"momentum of w": f"m {at}"},
                "generators": {"torch": f"g {at}"},
            },
        )
        for at in range(first, last)
    ]
    made[-1] = replace(made[-1], after={**made[-1].after, **changes})
    return made


@pytest.mark.parametrize("first", [0, 2, 4])
def test_equal_steps_from_the_one_it_begins_with(first):
    whole = records(0, 8)
    found = compare([whole, whole], [records(first, 8)] * 2, stopped_after=4)
    assert found == Resumption(4, first, {}, 8 - first)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"parameters": {"w": "other"}}, "resume-parameters"),
        ({"optimizer": {"momentum of w": "other"}}, "resume-optimizer"),
        ({"optimizer": {}}, "resume-optimizer"),
        ({"generators": {"torch": "other"}}, "resume-generators"),
    ],
)
def test_what_differs_is_named_with_step_and_rank(changes, kind):
    whole = [records(0, 8)] * 2
    found = compare(whole, [records(3, 8), records(3, 8, **changes)], stopped_after=4)
    assert list(found.differences) == [kind]
    assert found.differences[kind].startswith("step 7, rank 1")


def test_other_samples_are_named_too():
    whole = [records(0, 8)]
    read = records(3, 8)
    read[0] = replace(read[0], samples=("other",))
    found = compare(whole, [read], stopped_after=4)
    assert found.differences == {
        "resume-samples": "step 3, rank 0: the model is given other samples"
    }


def test_parameters_that_were_never_there_are_no_resumption():
    begun = records(3, 8)
    begun[0] = StepRecord(before={"w": "other"})
    found = compare([records(0, 8)], [begun], stopped_after=4)
    assert (found.first, list(found.differences)) == (None, ["resume-parameters"])


def test_a_run_cannot_begin_behind_its_stop():
    assert compare([records(0, 8)], [records(6, 8)], stopped_after=4).first is None


EQUAL = Resumption(4, 2, {}, 6)
DIFFERENT = Resumption(4, 2, {"resume-optimizer": "step 2, rank 0: `m` has other bits"}, 6)


@pytest.mark.parametrize(
    ("resumptions", "expected"),
    [
        ([EQUAL], dict.fromkeys(KINDS, "ok")),
        ([EQUAL, DIFFERENT], {"resume-optimizer": "wrong", "resume-samples": "ok"}),
        ([Resumption(4, 0, {}, 8)], dict.fromkeys(KINDS, "unknown")),
        ([EQUAL, Resumption(8, None, {}, 0)], dict.fromkeys(KINDS, "unknown")),
    ],
)
def test_verdicts(resumptions, expected):
    found = {f.check: f.verdict for f in check_resumptions(resumptions)}
    assert found.keys() == KINDS.keys()
    assert {check: found[check] for check in expected} == expected


def test_steps_are_gathered_from_events():
    trace = RawTrace(0)
    after = {"parameters": {"w": "1"}, "optimizer": {}, "generators": {}}
    trace.events = [
        {"t": "f", "grad": True, "training": True, "rows": ["a"]},
        {"t": "f", "grad": False, "training": False, "rows": ["validation"]},
        {"t": "f", "grad": True, "training": True, "rows": ["b"]},
        {"t": "step-bits", "before": {"w": "0"}, "bits": after},
        {"t": "shard-bits", "step": 1, "shard": 1, "bits": {"samples": {"the batch": "c"}}},
        {"t": "shard-bits", "step": 1, "shard": 1, "bits": {"gradients": {"w": "d"}}},
        {"t": "step-bits", "step": 1, "before": {"w": "1"}, "bits": after},
    ]
    first, second = step_records(trace)
    assert (first.before, first.samples, first.after) == ({"w": "0"}, ("a", "b"), after)
    assert (second.before, second.samples) == ({"w": "1"}, ("1: c",))


MISTAKES = {
    "as it is": ((), None),
    "optimizer": (('    optimizer.load_state_dict(saved["optimizer"])\n', ""), "resume-optimizer"),
    "generators": (('    torch.set_rng_state(saved["rng"])\n', ""), "resume-generators"),
    "position": (('    done = saved["done"]\n', ""), "resume-samples"),
    "nothing is loaded": (("if path.exists():", "if False:"), "unknown"),
}


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MISTAKES)
def test_what_a_program_forgets_to_save_is_found(name, tmp_path):
    change, check = MISTAKES[name]
    source = (PROGRAMS / "by_hand.py").read_text()
    if change:
        assert source.count(change[0]) == 1
        source = source.replace(*change)
    found = findings(source, 2, tmp_path)
    if check == "unknown":
        assert set(found.values()) == {"unknown"}
    else:
        assert (check is None) == ("wrong" not in found.values())
        assert check is None or found[check] == "wrong"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_program_of_ours_resumes_with_the_same_bits(tmp_path):
    found = findings((PROGRAMS / "with_unisono.py").read_text(), 2, tmp_path)
    assert set(found.values()) == {"ok"}


BEND = """
import os
was_there = os.path.exists("run")

def bend(step, gradients):
    for gradient in gradients.values():
        gradient.mul_(1.001 if was_there else 1)
"""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_gradients_that_are_a_thousandth_longer_after_a_stop_are_found(tmp_path):
    source = (PROGRAMS / "with_unisono.py").read_text()
    source = source.replace("torch.manual_seed(0)", f"{BEND}\ntorch.manual_seed(0)")
    source = source.replace("shards=4,", "shards=4, on_gradients=bend,")
    found = findings(source, 2, tmp_path)
    assert {check for check, verdict in found.items() if verdict == "wrong"} == {
        "resume-parameters",
        "resume-optimizer",
    }


def findings(source: str, world_size: int, folder: Path) -> dict[str, str]:
    (folder / "train.py").write_text(source)
    program = Program("script", "train.py", (), folder)
    verdict = verify(program, world_size, Limits(), os.environ, lambda line: None, resumes=True)
    assert verdict.trouble == ""
    assert os.listdir(folder) == ["train.py"]
    return {finding.check: finding.verdict for finding in verdict.findings}
