"""What programs keep and change, in all ways of running them: the catalogue, a part of it or all.

``python -m tests.programs -k PATTERN`` runs a part by hand, and prints a line for each program.
"""

import re

import pytest
from tests.chaos.exchanges import EXCHANGES, skip_without
from tests.programs import together
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
        ({"alone": SAME, "two": NO}, "WORKERS"),
        ({"alone": SAME, "two": NO, "three": SAME}, "MIXED"),
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


FIRST = {one.row: one for one in reversed(ALL) if {"cold", "together"}.isdisjoint(one.options)}
REFUSED = [one for one in ALL if one.says and "|" not in one.expected]


@pytest.mark.slow
@pytest.mark.parametrize("program", [marked(one) for one in FIRST.values()])
def test_the_first_of_each_kind_comes_to_what_is_expected(program, tmp_path):
    result = tried(program, tmp_path, (*FEW, "loaders") if program.reads else FEW)
    assert result.is_expected, result


_alone = {}


def found_alone(chosen):
    """Return what programs come to on one worker."""
    if missing := [one for one in chosen if one not in _alone]:
        (found,) = together.results(missing, "shared", 1)
        assert all(one.get("digests") for one in found), found
        _alone.update(zip(missing, found, strict=True))
    return [_alone[one] for one in chosen]


def check(exchange, workers, is_chosen):
    skip_without(exchange)
    chosen = [one for number, one in enumerate(together.ALL) if is_chosen(number, one)]
    by_all = zip(*together.results(chosen, exchange, workers), strict=True)
    for program, alone, found in zip(chosen, found_alone(chosen), by_all, strict=True):
        assert [*found] == [alone] * workers, program  # after one that fails, others may, too


@promise("nothing-lost.2")
@pytest.mark.slow
@pytest.mark.parametrize("program", [marked(one) for one in ALL if "kills" in one.options])
def test_kills_before_and_after_changes_and_draws_change_nothing(program, tmp_path):
    undone = ("kill0", "stop12", *(("commit",) if "commit" in program.options else ()))
    ways = ("alone", "back", *(("loaderskill",) if program.reads else undone))
    result = tried(program, tmp_path, ways)
    assert result.is_expected, result


@promise("conditions.1")
@pytest.mark.slow
@pytest.mark.parametrize("program", [marked(one) for one in ALL if "crashes" in one.options])
def test_what_follows_the_last_checkpoint_is_repeated(program, tmp_path):
    result = tried(program, tmp_path, ("alone", "kill0", "stop12", "crash12"))
    assert result.is_expected, result


@pytest.mark.slow
def test_each_program_changes_something_and_ways_to_do_the_same_are_the_same():
    found = zip(together.CHANGED, found_alone(together.CHANGED), strict=True)
    digests = {program.name: str([*one["digests"].values()]) for program, one in found}
    assert digests["weights_clipped"] == digests["weights_clamped_in_a_loop"]
    assert digests["moved_by_data"] == digests["moved_by_numpy"]
    assert len(set(digests.values())) == len(digests) - 2


@promise("one-result.1")
@pytest.mark.slow
def test_programs_have_the_bits_of_the_cpu_on_the_test_accelerator():
    check("sim", 1, lambda number, program: True)


@promise("one-result.1", "one-result.4")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("exchange", "workers", "third"),
    [("shared", 3, 0), ("shared", 2, 1), ("staged", 2, 2), ("gloo", 2, 0), ("sim", 3, 1)],
)
def test_programs_have_one_result_on_every_exchange(exchange, workers, third):
    check(exchange, workers, lambda number, one: one in together.CHANGED or number % 3 == third)


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_all_programs_have_one_result_on_every_exchange(exchange, workers):
    check(exchange, workers, lambda number, program: True)


@promise("one-result.6", "one-result.8", "one-result.10")
@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["shared", "staged", "gloo", "sim"])
def test_programs_are_refused_in_words_on_every_exchange(exchange):
    skip_without(exchange)
    chosen = [one for one in REFUSED if one.runs_everywhere or exchange == "shared"]
    for program, *found in zip(chosen, *together.results(chosen, exchange, 2), strict=True):
        for one in found:
            assert re.search(program.says, one.get("error", "")), f"{program}: {one}"


BY_NAME = {one.name: one for one in ALL}
RARE = {
    "a_key_of_a_parameter_group": "back",
    "another_tensor_in_buffers": "back",
    "pruned_each_epoch": "back",
    "a_buffer_registered_late": "back",
    "a_state_dict_that_forgets_one": "back",
    "momentum_forgotten": "commit",
    "settings_in_a_namespace": "kill1",
    "a_loss_by_the_number_of_workers": "two",
}
"""Programs that were wrong in one way alone."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RARE)
def test_what_one_way_alone_had_shown_stays_right(name, tmp_path):
    result = tried(BY_NAME[name], tmp_path, ("alone", RARE[name]))
    assert result.verdict in ("SAME", "TOLD"), result


@pytest.mark.long
@pytest.mark.parametrize("program", [marked(one) for one in ALL])
def test_each_program_comes_to_what_is_expected_in_every_way(program, tmp_path):
    result = tried(program, tmp_path, tuple(WAYS))
    assert result.is_expected, result
