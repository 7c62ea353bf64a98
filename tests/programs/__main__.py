"""Run the catalogue: ``python -m tests.programs [-k PATTERN] [--ways two,kill0] [--jobs 2]``.

A line for each program; with -v, the ends of what was printed too. Exits with 1 if any verdict is
not the expected one.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
from pathlib import Path

from tests.programs.matrix import CATALOGUE, all_tried, programs
from tests.programs.ways import WAYS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.programs")
    parser.add_argument("-k", default="", help="a pattern in row/name")
    parser.add_argument("--ways", default="", help=f"some of {','.join(WAYS)}")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--catalogue", type=Path, default=CATALOGUE)
    parser.add_argument("-v", action="store_true", help="print what each start has printed")
    parser.add_argument("--list", action="store_true", help="only name the programs")
    given = parser.parse_args()
    chosen = programs(given.catalogue, given.k)
    if given.list:
        print(*chosen, sep="\n")
        return 0
    ways = tuple(given.ways.split(",")) if given.ways else ()
    with tempfile.TemporaryDirectory() as folder:
        results = all_tried(chosen, Path(folder), ways, given.jobs)
    for result in results if given.v else ():
        for way, one in result.outcomes.items():
            print(f"\n=== {result.program} {way}: {one}\n{one.said[-3000:]}")
    verdicts = collections.Counter(result.verdict for result in results)
    wrong = [result for result in results if not result.is_expected]
    print(f"{len(results)} programs: {dict(verdicts)}; {len(wrong)} not as expected")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
