from __future__ import annotations

import os
from pathlib import Path

import pytest

from unisono.tools.verify.bit_checks import (
    KINDS,
    Resumption,
    check_resumptions,
    compare,
)
from unisono.tools.verify.recorder import Limits
from unisono.tools.verify.trials import Program
from unisono.tools.verify.verifier import verify

PROGRAMS = Path(__file__).parent / "programs" / "resuming"


def bits(first, last, **changes):
    """Make the steps of two ranks; `changes` are made in the last step of rank 1."""
    made = {}
    for at in range(first, last):
        for rank in range(2):
            kinds = {
                "before": {"w": f"w {at}"},
                "inputs": {"the batch": f"sample {at} of {rank}"},
                "parameters": {"w": f"w {at + 1}"},
                "optimizer": {"momentum of w": f"m {at}"},
                "generators": {"torch": f"g {at}"},
            }
            made |= {(at - first, kind, rank): found for kind, found in kinds.items()}
    return made | {(last - first - 1, kind, 1): found for kind, found in changes.items()}


@pytest.mark.parametrize("first", [0, 2, 4])
def test_equal_steps_from_the_one_it_begins_with(first):
    assert compare(bits(0, 8), bits(first, 8), 4) == Resumption(4, first, {}, 8 - first)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"parameters": {"w": "other"}}, "resume-parameters"),
        ({"optimizer": {"momentum of w": "other"}}, "resume-optimizer"),
        ({"optimizer": {}}, "resume-optimizer"),
        ({"generators": {"torch": "other"}}, "resume-generators"),
        ({"inputs": {"the batch": "other"}}, "resume-samples"),
    ],
)
def test_what_differs_is_named_with_step_and_rank(changes, kind):
    found = compare(bits(0, 8), bits(3, 8, **changes), 4)
    assert list(found.differences) == [kind]
    assert found.differences[kind].startswith("step 7, rank 1")


def test_parameters_that_were_never_there_are_no_resumption():
    begun = bits(3, 8) | {(0, "before", 0): {"w": "other"}}
    found = compare(bits(0, 8), begun, 4)
    assert (found.first, list(found.differences)) == (None, ["resume-parameters"])


def test_a_run_cannot_begin_behind_its_stop():
    assert compare(bits(0, 8), bits(6, 8), 4).first is None


def test_of_steps_with_the_same_parameters_it_begins_with_the_one_that_fits():
    still = {(at, "before", rank): {"w": "w 0"} for at in range(3) for rank in range(2)}
    assert compare(bits(0, 8) | still, bits(0, 8) | still, 4) == Resumption(4, 0, {}, 8)


END = {(0, "end", rank): {} for rank in range(2)}


@pytest.mark.parametrize(
    ("undisturbed", "resumed", "is_found"),
    [
        (bits(0, 8) | END, bits(3, 8) | END, False),
        (bits(0, 8) | END, bits(3, 9), True),  # trains all epochs again
        (bits(0, 8) | END, bits(3, 7) | END, True),
        (bits(0, 8), bits(3, 7) | END, True),
        (bits(0, 8), bits(3, 9) | END, False),  # the undisturbed run was stopped after 8 steps
        (bits(0, 8), bits(3, 11), False),
    ],
)
def test_a_resumed_run_ends_where_the_undisturbed_one_does(undisturbed, resumed, is_found):
    assert ("resume-samples" in compare(undisturbed, resumed, 4).differences) == is_found


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
from pathlib import Path

factor = 1.001 if [*Path("run").glob("checkpoints/step-*/commit.json")] else 1

def bend(step, gradients):
    for gradient in gradients.values():
        gradient.mul_(factor)
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
