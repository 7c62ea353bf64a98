"""What programs keep and change, in all ways of running them: the catalogue, a part of it or all.

``python -m tests.programs -k PATTERN`` runs a part by hand, and prints a line for each program.
"""

import pytest
from tests.programs.matrix import Program, Result, programs, tried
from tests.programs.ways import WAYS, Outcome
from tests.promises import promise

pytestmark = pytest.mark.timeout(900)
ALL = programs()
FEW = ("alone", "kill1", "stop31")


def judged(expected="SAME", **outcomes):
    program = Program("row", "name", "", *expected.split(maxsplit=1)[:1], ("PYTHONHASHSEED",))
    return Result(program, outcomes)


SAME, OTHER = Outcome(digest="01"), Outcome(digest="02")
NO, NOT_SO = Outcome(refusal="no"), Outcome(refusal="not so")


@pytest.mark.parametrize(
    ("outcomes", "verdict"),
    [
        ({"alone": SAME, "two": SAME}, "SAME"),
        ({"alone": SAME, "two": OTHER}, "SILENT"),
        ({"alone": SAME, "two": NO, "kill0": OTHER}, "SILENT"),
        ({"alone": SAME, "two": Outcome(digest="01|02")}, "SILENT"),
        ({"alone": Outcome(digest="01|02")}, "SILENT"),
        ({"alone": NO, "two": NO}, "REFUSED"),
        ({"alone": NO, "two": NOT_SO}, "MIXED"),
        ({"alone": SAME, "two": NO}, "MIXED"),
        ({"alone": SAME, "loaders": NO, "loaders2": NO}, "LOADERS"),
        ({"alone": SAME, "loaders": NO, "loaders2": SAME}, "MIXED"),
        ({"alone": SAME, "kill0": Outcome(trouble="nobody has joined")}, "TROUBLE"),
        ({"alone": Outcome(digest="01", cpu_s=99.0)}, "SLOW"),
    ],
)
def test_a_verdict_is_that_of_all_ways_together(outcomes, verdict):
    assert judged(**outcomes).verdict == verdict


def test_results_that_differ_are_told_only_where_each_start_says_so():
    said = "set PYTHONHASHSEED=0"
    one, other = Outcome(digest="01", said=said), Outcome(digest="02", said=said)
    assert judged("TOLD", alone=one, two=other).verdict == "TOLD"
    assert judged("TOLD", alone=one, two=OTHER).verdict == "SILENT"
    assert judged("TOLD", alone=one, two=one).is_expected


def test_the_catalogue_has_four_programs_at_least_of_each_kind():
    rows = [one.row for one in ALL]
    assert len(set(map(str, ALL))) == len(ALL)
    assert {row: rows.count(row) for row in rows if rows.count(row) < 4} == {}


@pytest.mark.slow
def test_a_way_with_a_kill_proves_nothing_where_nobody_joins(tmp_path):
    short = Program("row", "short", "t = trainer(net())\nfit(t, epochs=1)\n", "SAME")
    result = tried(short, tmp_path, ("alone", "kill0"))
    assert result.verdict == "TROUBLE"
    assert "nobody has joined" in str(result)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "verdict"),
    [
        ("t = trainer(net())\nfit(t)\n", "SAME"),
        ("t = trainer(net(), lambda m, b: loss(m, b) * unisono.world().world_size)\n", "SAME"),
        ("torch.seed()\nt = trainer(net())\n", "SILENT"),
        ("t = trainer(net(), 3)\n", "REFUSED"),
    ],
)
def test_programs_are_judged_by_what_they_do(body, verdict, tmp_path):
    result = tried(Program("row", "name", body, verdict), tmp_path, ("alone", "two"))
    assert result.verdict == verdict, result


def marked(program):
    """Expect nothing yet of what is open, and name what the others prove."""
    if "open" in program.options:
        marks = [pytest.mark.xfail(reason="not carried yet")]
    else:
        marks = [promise(*program.promises)] if program.promises else []
    return pytest.param(program, id=str(program), marks=marks)


FIRST = {one.row: one for one in reversed(ALL) if "cold" not in one.options}


@pytest.mark.slow
@pytest.mark.parametrize("program", [marked(one) for one in FIRST.values()])
def test_the_first_of_each_kind_comes_to_what_is_expected(program, tmp_path):
    result = tried(program, tmp_path, (*FEW, "loaders") if program.reads else FEW)
    assert result.is_expected, result


@pytest.mark.long
@pytest.mark.parametrize("program", [marked(one) for one in ALL])
def test_each_program_comes_to_what_is_expected_in_every_way(program, tmp_path):
    result = tried(program, tmp_path, tuple(WAYS))
    assert result.is_expected, result
