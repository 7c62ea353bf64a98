"""Make programs at random and run each in many ways; all must come to the same bits.

python -m tests.chaos.programs --programs 30 --seed 700    programs 700 … 729
python -m tests.chaos.programs --seed 1234                 just that one
python -m tests.chaos.programs --seed 1234 --show          what it is
python -m tests.chaos.programs --programs 30 --against ../older/.venv/bin/python

The last one compares with another version of Unisono, the one that this interpreter imports: each
program must come to the same bits with both, also where it is stopped with the other version and
resumed with this one.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.programs.choices import choose
from tests.chaos.programs.runner import KILLS, Way, run, run_against


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="of the first program; drawn by default")
    parser.add_argument("--programs", type=int, default=1, help="how many, one seed each")
    parser.add_argument("--kills", type=int, default=KILLS, help="of workers of each program")
    parser.add_argument("--against", metavar="PYTHON", help="the other version's interpreter")
    parser.add_argument("--show", action="store_true", help="print the choices, run nothing")
    args = parser.parse_args()
    first = random.SystemRandom().randrange(10**6) if args.seed is None else args.seed
    seeds = range(first, first + args.programs)
    if args.show:
        print(*map(choose, seeds), sep="\n")
        return 0
    if args.against is not None and package_of(args.against) == package_of(sys.executable):
        parser.error(
            f"--against must name another version's Python, but {args.against} has this one"
        )
    print(f"programs {seeds[0]} to {seeds[-1]}", flush=True)
    start_s = time.monotonic()
    failed = [seed for seed in seeds if not is_well(seed, args.kills, args.against)]
    word = "NOT EQUAL" if failed else "equal"
    seconds = time.monotonic() - start_s
    print(f"{len(seeds)} programs in {seconds:.0f} s, results {word}")
    for seed in failed:
        print(f"again: {sys.executable} -m tests.chaos.programs --seed {seed}")
    return 1 if failed else 0


def package_of(python: str) -> str:
    """Find the Unisono that an interpreter imports."""
    command = [python, "-c", "import unisono; print(unisono.__file__)"]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def ways_of(seed: int, folder: Path, num_kills: int, against: str | None) -> Iterator[Way]:
    """Run one program in all ways, or with another version."""
    if against is not None:
        return run_against(seed, folder, against)
    return run(seed, folder, num_kills=num_kills)


def is_well(seed: int, num_kills: int, against: str | None) -> bool:
    """Run one program in all ways and print what came of it; returns whether all is well."""
    start_s = time.monotonic()
    num_disturbed = 0
    with tempfile.TemporaryDirectory(prefix="unisono-program-") as name:
        for way in ways_of(seed, Path(name), num_kills, against):
            num_disturbed += way.num_disturbed
            if way.trouble:
                print(f"program {seed}: {choose(seed)}\n{way.name}: NOT EQUAL\n{way.trouble}")
                return False
    seconds = time.monotonic() - start_s
    print(f"program {seed}: equal, {num_disturbed} times disturbed, {seconds:.1f} s", flush=True)
    return True


if __name__ == "__main__":
    raise SystemExit(main())
