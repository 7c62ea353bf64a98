import json

import pytest

from unisono.verify.findings import (
    CAUSES_FIRST,
    as_json,
    in_order,
    ok,
    status_of,
    told,
    unknown,
    wrong,
)

# The names that issue, docs and programs rely on.
NAMES = {
    *("samples-same-on-all-ranks", "epoch-order-fixed", "samples-lost", "evaluation-counts-twice"),
    *("evaluation-partial", "split-differs", "mean-of-means", "weights-of-tokens"),
    *("gradient-times-n", "gradient-over-n", "gradients-not-averaged", "parameter-not-averaged"),
    *("accumulation-not-synced", "clip-before-average", "schedule-too-fast"),
    *("learning-rate-scaled", "parameters-differ", "buffers-differ"),
    *("randomness-same-on-all-ranks", "loader-randomness-same"),
}


def test_the_checks_are_these_twenty():
    assert set(CAUSES_FIRST) == NAMES
    assert len(CAUSES_FIRST) == 20


@pytest.mark.parametrize(
    ("findings", "status"),
    [
        ([], 2),
        ([ok("samples-lost", "")], 0),
        ([ok("samples-lost", ""), unknown("mean-of-means", "")], 2),
        ([wrong("samples-lost", "", ""), unknown("mean-of-means", "")], 1),
    ],
)
def test_the_exit_status(findings, status):
    assert status_of(findings) == status


def test_the_cause_comes_first_and_others_follow_from_it():
    found = in_order(
        [
            ok("mean-of-means", "fine"),
            wrong("parameters-differ", "apart", "do this"),
            unknown("samples-lost", "who knows"),
            wrong("gradients-not-averaged", "own ones", "do that"),
        ]
    )
    assert [f.check for f in found] == [
        "gradients-not-averaged",
        "parameters-differ",
        "samples-lost",
        "mean-of-means",
    ]
    assert [f.follows for f in found] == ["", "gradients-not-averaged", "", ""]
    assert told(found[1]).startswith("Follows from `gradients-not-averaged`")
    assert told(found[0]) == "own ones"


def test_json_has_these_fields_and_no_others():
    text = as_json("train.py", (1, 2), [wrong("samples-lost", "two", "keep them")])
    assert json.loads(text) == {
        "program": "train.py",
        "world_sizes": [1, 2],
        "findings": [
            {
                "check": "samples-lost",
                "verdict": "wrong",
                "evidence": "two",
                "remedy": "keep them",
            }
        ],
    }
