"""Programs that get stuck, each explained with the right rank, function and line."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from tests.hangs.planted import PROGRAMS, Planted, explain_all
from tests.promises import promise

pytestmark = pytest.mark.slow

SUM = "the sum of gradients"


@dataclass(frozen=True)
class Case:
    """One program, and what must be said of it.

    `where` is the function that the late rank is in, the file, and what its line holds.
    """

    program: str
    way: str
    goal: str
    where: tuple[str, str, str]
    remarks: str = ""
    late: str = "1"

    @property
    def pattern(self) -> str:
        function, file, text = self.where
        goal = re.escape(self.goal)
        where = rf"`{function}`, {place(file, text)}"
        remarks = rf" \({self.remarks}\)" if self.remarks else ""
        return (
            rf"has been waiting for \d+ s\. Rank {self.late} has not arrived at {goal}: "
            rf"it (is in|waits for its loader process \d+, which is in) {where}{remarks}\. "
        )


COMPUTING = "computing"
LOADING = {
    "asleep": ("sleep_long", "time.sleep(1000)", ""),
    "lock": ("take_lock", "with LOCK", ""),
    "c loop": ("spin_in_c", "sum(itertools", COMPUTING),
    "stopped": ("stop_itself", "os.kill", r"stopped by a signal; `kill -CONT \d+` continues it"),
    "debugger": ("debug", "breakpoint()", "at the prompt of a debugger"),
    "disk": ("wait_for_disk", "posix_spawn(", "waits for a disk or a network file system"),
}


def while_loading(program: str, way: str) -> Case:
    """Plant a way to get stuck while a sample is loaded."""
    function, text, remark = LOADING[way]
    remarks = rf"loading sample \d+{'; ' * bool(remark)}{remark}"
    return Case(program, way, SUM, (function, "ways.py", text), remarks)


SLEEP = ("sleep_long", "ways.py", "time.sleep(1000)")
CASES = [
    while_loading("trained", "lock"),
    while_loading("trained", "debugger"),
    while_loading("trained", "disk"),
    while_loading("plain", "asleep"),
    while_loading("plain", "lock"),
    while_loading("plain", "c loop"),
    while_loading("plain", "stopped"),
    Case("plain", "init", "`init_process_group`", ("connect", "plain.py", "sleep"), ""),
    Case("plain", "evaluates alone", "`barrier`", ("evaluate", "plain.py", ""), COMPUTING, "0"),
    Case("plain", "async", "`all_reduce`", SLEEP, ""),
]
# Where no rank is late, but all wait: what is said of each.
APART = {
    ("plain", "barrier"): (
        r"Rank 0 is in `barrier` \(`train`, {dist.barrier()  # alone}\); rank 1 is in the sum of "
        r"gradients \(`train`, {.backward()}\)\."
    ),
    ("plain", "batches"): (
        r"Rank 0 is in the sum of gradients \(`train`, {.backward()}\); rank 1 is in `barrier` "
        r"\(`train`, {dist.barrier()  # at the end}\)\."
    ),
    ("plain", "collectives"): (
        r"Rank 0 is in `all_reduce of float32 \[4\]` \(`total`, {dist.all_reduce(tensor)}\); "
        r"rank 1 is in `broadcast of float64 \[2, 3\]` \(`train`, {dist.broadcast(}\)\."
    ),
    ("plain", "leaves early"): (
        r"Rank 1 has not arrived at the sum of gradients: it has come to the end of its program, "
        r"and waits for its threads and exit handlers\. Rank 0 waits for it, in `train`, "
        r"{.backward()}\."
    ),
}


Explained = dict[tuple[str, str], Planted]


def name(case: Case) -> str:
    return f"{case.program}-{case.way}"


@pytest.fixture(scope="module")
def explained(tmp_path_factory: pytest.TempPathFactory) -> Explained:
    """Explain them, several at a time: each takes seconds in which nothing happens."""
    kinds = [*((case.program, case.way) for case in CASES), *APART]
    folder = tmp_path_factory.mktemp("planted programs")
    found = {(program, way): Planted(program, way, 2, folder) for program, way in kinds}
    explain_all(list(found.values()))
    return found


@promise("nothing-lost.3")
@pytest.mark.parametrize("case", CASES, ids=name)
def test_a_hang_is_explained(case: Case, explained: Explained) -> None:
    said = explained[case.program, case.way].said
    assert re.search(case.pattern, said), said


@pytest.mark.parametrize("kind", APART, ids="-".join)
def test_ranks_that_wait_for_each_other_are_told_of(
    kind: tuple[str, str], explained: Explained
) -> None:
    pattern = re.sub(r"\{(.+?)\}", lambda text: place("plain.py", text[1]), APART[kind])
    assert re.search(pattern, explained[kind].said), explained[kind].said


def place(file: str, text: str) -> str:
    """Make a pattern of the lines of a program that hold a text."""
    lines = (PROGRAMS / file).read_text().splitlines()
    numbers = [str(number) for number, line in enumerate(lines, 1) if text in line]
    assert numbers, (file, text)
    return rf"{re.escape(file)}:({'|'.join(numbers)})"
