"""Programs as their users write them, each in all ways, and the verdict on each.

`catalogue` has a file for each kind of thing that a program keeps or changes. A program there
begins with ``# %% name: what a user should get``, and after that what is special about it:

    # %% queue: SAME
    # %% pseudo_labels: SAME|LOADERS reads  run with loader processes too, and may be refused there
    # %% words: TOLD PYTHONHASHSEED cold    bits may differ if a line has this word; not forked
    # %% chain: SAME cpu<4                  takes less than four seconds of a processor
    # %% hooks: SAME open                   not so yet
    # %% rollouts: SAME stop=20 kill=23     the steps in which it is stopped, and somebody killed
    # %% centres: SAME everywhere           also run on every exchange and on the test accelerator
    # %% clipped: SAME everywhere kills     with kills before and after a change, in `make test`;
                                          commit: also before the last snapshot
    # %% phases: SAME crashes               also killed as a whole, without a last checkpoint
    # %% averages: SAME together            so, but undisturbed alone (`together`)
    # %% counts: REFUSED early              before the third step
    # says: `loss.calls` carries over       a pattern that is in every refusal

Before its programs a file names what they prove: ``# promises: one-result.4`` (`tests.promises`).
"""

from __future__ import annotations

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.programs.ways import KILLED, WAYS, Outcome, outcome
from tests.warm import processes

CATALOGUE = Path(__file__).parent / "catalogue"
COLD = ("alone", "two", "stop12")  # as torch is loaded in each start
NO_LIMIT_S = 60.0  # of a processor
_OF_ZERO = re.compile("leave `zero` out of UNISONO_EXCHANGE")
_HEAD = re.compile(r"^# %% (?P<name>\w+): (?P<expected>[A-Z|]+)(?P<options>.*)$", re.MULTILINE)
_SAYS = re.compile(r"^# says: (.*)$", re.MULTILINE)
_PROMISES = re.compile(r"^# promises: (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Program:
    """A script, and what its user should get."""

    row: str
    name: str
    body: str
    expected: str
    options: tuple[str, ...] = ()
    promises: tuple[str, ...] = ()
    says: str = ""  # a pattern that every refusal has

    @property
    def runs_everywhere(self) -> bool:
        """Whether it runs on every exchange, and with others in one process."""
        return not {"everywhere", "together"}.isdisjoint(self.options)

    @property
    def reads(self) -> bool:
        return "reads" in self.options

    @property
    def cpu_s(self) -> float:
        """How much of a processor it may take."""
        return self._number("cpu<", NO_LIMIT_S)

    @property
    def words(self) -> str:
        """What a line says where results may differ."""
        return self.options[0] if "TOLD" in self.expected else ""

    @property
    def stopped(self) -> int | None:
        """In which step it is stopped, if not where all are."""
        return int(self._number("stop=", 0)) or None

    @property
    def killed(self) -> int:
        """In which step a worker is killed."""
        return int(self._number("kill=", KILLED))

    def _number(self, option: str, otherwise: float) -> float:
        given = (one for one in self.options if one.startswith(option))
        return next((float(one[len(option) :]) for one in given), otherwise)

    def ways(self, names: tuple[str, ...] = ()) -> list[str]:
        """Name the ways in which it is run, of those given."""
        own = [name for name, way in WAYS.items() if self.reads or not way.loaders]
        if not self.runs_everywhere:
            own = [name for name in own if not WAYS[name].is_everywhere]
        if "together" in self.options:
            own = [name for name in own if not WAYS[name].is_disturbed]
        own = [name for name in own if WAYS[name].can_be]
        if "crashes" not in self.options:
            own = [name for name in own if not WAYS[name].is_crashed]
        if "cold" in self.options:
            own = [name for name in own if name in COLD]
        return [name for name in own if not names or name in names]

    def __str__(self) -> str:
        return f"{self.row}/{self.name}"


@dataclass(frozen=True)
class Result:
    """What came of a program in each way."""

    program: Program
    outcomes: dict[str, Outcome] = field(default_factory=dict)

    @property
    def verdict(self) -> str:
        """Judge all outcomes together.

        SAME: one result. REFUSED: one refusal. SILENT: results differ, and nobody says so. TOLD:
        they differ, and a line says so. LOADERS: one result, and one refusal where there are loader
        processes. WORKERS: one result alone, and one refusal where there are several workers.
        MIXED: here one, there another. SLOW: one result, too late. LATE: refused too late.
        TROUBLE: a trial proves nothing.
        """
        counted = self._counted
        all_of_them = list(counted.values())
        digests = {one.digest for one in all_of_them if one.digest}
        refusals = {self._refusal(one) for one in all_of_them if one.refusal}
        if any("|" in one for one in digests) or len(digests) > 1:
            words = self.program.words
            is_told = words and all(re.search(words, one.said) for one in all_of_them if one.digest)
            return "TOLD" if is_told else "SILENT"
        if any(one.trouble for one in all_of_them):
            return "TROUBLE"
        if "early" in self.program.options and any(one.step > 2 for one in all_of_them):
            return "LATE"
        if self._is_refused_alone_where([bool(WAYS[way].loaders) for way in counted]):
            return "LOADERS"
        if self._is_refused_alone_where([WAYS[way].has_several for way in counted]):
            return "WORKERS"
        if len(digests) + len(refusals) > 1:
            return "MIXED"
        if refusals:
            return "REFUSED"
        return "SLOW" if self.cpu_s > self.program.cpu_s else "SAME"

    @property
    def _counted(self) -> dict[str, Outcome]:
        """Leave out a refusal that is of `zero` alone, where workers lack the optimizer's state."""
        return {way: one for way, one in self.outcomes.items() if not _OF_ZERO.search(one.words)}

    @property
    def cpu_s(self) -> float:
        """How much of a processor its dearest worker has taken."""
        return max((one.cpu_s for one in self.outcomes.values()), default=0.0)

    def _refusal(self, outcome: Outcome) -> str:
        """Take a refusal in short where it says what it should."""
        says = self.program.says
        return says if says and re.search(says, outcome.words) else outcome.refusal

    def _is_refused_alone_where(self, is_there: list[bool]) -> bool:
        found: dict[bool, set[str]] = {True: set(), False: set()}
        for here, one in zip(is_there, self._counted.values(), strict=True):
            found[here].add(self._refusal(one))
        return found[False] == {""} and len(found[True]) == 1 and "" not in found[True]

    @property
    def is_expected(self) -> bool:
        # What is told where bits differ may as well have the same ones.
        expected = self.program.expected.split("|")
        refusals = [one.words for one in self._counted.values() if one.refusal]
        if not all(re.search(self.program.says, one) for one in refusals):
            return False
        return self.verdict in expected or (self.verdict == "SAME" and "TOLD" in expected)

    def __str__(self) -> str:
        """Give a line, in which ways that came to the same stand together."""
        together: dict[str, list[str]] = {}
        for way, one in self.outcomes.items():
            together.setdefault(str(one), []).append(way)
        seen = "; ".join(f"{','.join(ways)}: {one}" for one, ways in together.items())
        mark = "  " if self.is_expected else "✗ "
        expected = "" if self.is_expected else f" (should be {self.program.expected})"
        slow = f" ({self.cpu_s:.1f} s)" if self.program.cpu_s < NO_LIMIT_S else ""
        return f"{mark}{self.program}: {self.verdict}{expected}{slow}: {seen}"


def programs(folder: Path = CATALOGUE, pattern: str = "") -> list[Program]:
    """Read the programs of a folder whose names have a pattern in them."""
    found = []
    for path in sorted(folder.glob("*.py")):
        text = path.read_text()
        heads = list(_HEAD.finditer(text))
        promises = tuple(" ".join(_PROMISES.findall(text)).split())
        ends = [head.start() for head in heads[1:]] + [len(text)]
        for head, end in zip(heads, ends, strict=True):
            body = text[head.end() : end].strip() + "\n"
            options = tuple(head["options"].split())
            says = "".join(_SAYS.findall(body))
            made = (path.stem, head["name"], body, head["expected"], options, promises, says)
            found.append(Program(*made))
    return [one for one in found if re.search(pattern, str(one))]


def tried(program: Program, folder: Path, ways: tuple[str, ...] = ()) -> Result:
    """Run a program in all ways, or in those given."""
    when = {"killed": program.killed, "stopped": program.stopped}
    result = Result(program)
    for name in program.ways(ways):
        at = folder / program.row / program.name / name
        is_cold = "cold" in program.options
        result.outcomes[name] = outcome(program.body, WAYS[name], at, is_cold=is_cold, **when)
    return result


def all_tried(
    chosen: list[Program], folder: Path, ways: tuple[str, ...], jobs: int
) -> list[Result]:
    """Try programs, some at a time, and print a line for each when it is done."""
    results = []
    processes.run([sys.executable, "-c", ""])  # what all are forked from is made once
    with ThreadPoolExecutor(jobs) as pool:
        for result in pool.map(lambda one: tried(one, folder, ways), chosen):
            print(result, flush=True)
            results.append(result)
    return results
