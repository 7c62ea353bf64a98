"""Which tests prove what docs/guarantees.md promises, and how each of them ended last.

A row of the page begins with an anchor, ``<a id="one-result.3"></a>``, and a test that proves it
carries ``@promise("one-result.3")``. ``python -m tests.promises`` prints row → tests → results, and
exits with 1 where a row has no test.
"""

from __future__ import annotations

import collections
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = REPOSITORY / "docs" / "guarantees.md"
CACHED = "unisono/promises"
ANCHOR = re.compile(r'<a id="([\w.-]+)"></a>')
promise = pytest.mark.promise


@dataclass(frozen=True)
class Proof:
    """A test, the rows that it names, and the markers that it carries."""

    name: str
    ids: tuple[str, ...]
    markers: frozenset[str] = frozenset()


def rows_of(page: str) -> list[tuple[str, str]]:
    """Return the ids of a page in order, each with the beginning of its row."""
    found = []
    for line in page.splitlines():
        if match := ANCHOR.search(line):
            text = line[match.end() :].removesuffix(" |").replace(" | ", ": ")
            found.append((match[1], re.sub(r"\]\([^)]*\)|[*`\[]", "", text)))
    return found


def without_id(page: str) -> list[str]:
    """Return rows of tables and items of lists that no test can name."""
    lines = page.splitlines()
    heads = {n - 1 for n, line in enumerate(lines) if re.fullmatch(r"\|[-|]+\|", line)}
    rows = [n for n, line in enumerate(lines) if line.startswith(("| ", "* ")) and n not in heads]
    return [lines[n] for n in rows if not ANCHOR.match(lines[n][2:])]


def left_out_of_make_test() -> set[str]:
    """Return the markers whose tests ``make test`` does not run."""
    makefile = (REPOSITORY / "Makefile").read_text()
    (chosen,) = re.findall(r"^test:.*\n\t.* -m \"(.*)\"$", makefile, re.M)
    return set(re.findall(r"not (\w+)", chosen))


def troubles(page: str, proofs: Sequence[Proof], left_out: Collection[str]) -> list[str]:
    """Return what is wrong between a page and its tests."""
    ids = [one for one, _ in rows_of(page)]
    found = [f"no id: {line}" for line in without_id(page)]
    found += [f"{one}: two rows have this id" for one in sorted(set(ids)) if ids.count(one) > 1]
    for one in ids:
        own = [proof for proof in proofs if one in proof.ids]
        if not own:
            found.append(f"{one}: no test proves it")
        elif all(proof.markers.intersection(left_out) for proof in own):
            found.append(f"{one}: none of its tests is part of `make test`")
    for proof in proofs:
        found += [f"{proof.name}: no row is {one}" for one in proof.ids if one not in ids]
    return found


@dataclass(eq=False)  # pytest hashes its plugins
class Collected:
    """A plugin of pytest that notes the tests that it collects, before any is deselected."""

    proofs: list[Proof] = field(default_factory=list)
    results: Mapping[str, Any] = field(default_factory=dict)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        self.results = config.cache.get(CACHED, {})
        for item in items:
            ids = [one for mark in item.iter_markers("promise") for one in mark.args]
            if ids:
                markers = frozenset(mark.name for mark in item.iter_markers())
                self.proofs.append(Proof(item.nodeid, tuple(dict.fromkeys(ids)), markers))


def collected() -> Collected:
    """Collect the marked tests with pytest, in the files that name a promise."""
    files = [str(one) for one in sorted((REPOSITORY / "tests").rglob("test_*.py"))]
    marked = [one for one in files if re.search(r"\bpromises?\b", Path(one).read_text())]
    found, output, shown = Collected(), os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(shown, 1)
    try:
        status = pytest.main(["--collect-only", "-qq", *marked], plugins=[found])
    finally:
        sys.stdout.flush()
        os.dup2(output, 1)
        os.close(output)
        os.close(shown)
    assert status == 0, f"the tests cannot be collected: `pytest --collect-only` ends with {status}"
    return found


@dataclass(eq=False)  # pytest hashes its plugins
class Results:
    """A plugin of pytest that keeps how each marked test ended, for ``make promises``."""

    config: pytest.Config
    ended: dict[str, str] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if "promise" not in report.keywords:
            return
        if report.when == "call" or report.outcome != "passed":
            self.ended[report.nodeid] = report.outcome

    def pytest_sessionfinish(self) -> None:
        if self.ended:
            before = self.config.cache.get(CACHED, {})
            self.config.cache.set(CACHED, {**before, **self.ended})


def lines_of(
    page: str, proofs: Sequence[Proof], results: Mapping[str, str], left_out: Collection[str]
) -> Iterator[str]:
    """Yield a line for each row, and below it one for each of its tests."""
    for one, row in rows_of(page):
        yield f"{one}  {row if len(row) < 84 else row[:80] + ' …'}"
        ends: dict[str, collections.Counter[str]] = {}
        for proof in (proof for proof in proofs if one in proof.ids):
            marks = ", ".join(sorted(proof.markers.intersection(left_out)))
            end = results.get(proof.name, "not run") + (f" ({marks})" if marks else "")
            ends.setdefault(proof.name.partition("[")[0], collections.Counter())[end] += 1
        for name, counts in ends.items():
            yield f"    {name}: " + ", ".join(f"{counts[end]} {end}" for end in sorted(counts))


def main() -> int:
    found, page, left_out = collected(), PAGE.read_text(), left_out_of_make_test()
    print(*lines_of(page, found.proofs, found.results, left_out), sep="\n")
    wrong = troubles(page, found.proofs, left_out)
    ends = [found.results.get(one.name, "not run") for one in found.proofs]
    said = ", ".join(f"{ends.count(end)} {end}" for end in sorted(set(ends)))
    print(f"\n{len(rows_of(page))} promises, {len(found.proofs)} tests: {said}")
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
