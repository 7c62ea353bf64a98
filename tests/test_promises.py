"""Each promise of the page on guarantees leads to the tests that prove it."""

import sys

import pytest
from tests.promises import REPOSITORY, Proof, left_out_of_make_test, lines_of, troubles
from tests.warm import processes

PAGE = """
| event | result |
|---|---|
| <a id="lost.1"></a>a worker | [replaced](hosts.md) |
* <a id="lost.2"></a>`all` of them
"""
HERE, THERE = Proof("here[2]", ("lost.1",)), Proof("there", ("lost.2",), frozenset({"long"}))


@pytest.mark.slow
def test_every_row_of_the_page_has_a_test():
    done = processes.run([sys.executable, "-m", "tests.promises"], cwd=REPOSITORY, timeout=110)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr


@pytest.mark.parametrize(
    ("page", "proofs", "expected"),
    [
        (PAGE, [HERE, Proof("there", ("lost.2",))], []),
        (PAGE, [HERE], ["lost.2: no test proves it"]),
        (PAGE, [HERE, THERE], ["lost.2: none of its tests is part of `make test`"]),
        (PAGE, [Proof("both", ("lost.1", "lost.2", "kept.1"))], ["both: no row is kept.1"]),
        (f"{PAGE}| more | rows |", [Proof("a", ("lost.1", "lost.2"))], ["no id: | more | rows |"]),
        (PAGE * 2, [Proof("a", ("lost.1", "lost.2"))], None),
    ],
)
def test_what_is_wrong_is_named(page, proofs, expected):
    twice = [f"lost.{number}: two rows have this id" for number in (1, 2)]
    assert troubles(page, proofs, {"long"}) == (twice if expected is None else expected)


def test_a_line_has_the_results_of_all_cases_of_a_test():
    proofs = [HERE, Proof("here[3]", ("lost.1",)), THERE]
    results = {"here[2]": "passed", "there": "failed"}
    assert list(lines_of(PAGE, proofs, results, {"long"})) == [
        "lost.1  a worker: replaced",
        "    here: 1 not run, 1 passed",
        "lost.2  all of them",
        "    there: 1 failed (long)",
    ]


def test_the_makefile_says_what_is_left_out():
    assert left_out_of_make_test() == {"long", "gpu", "hosts"}
