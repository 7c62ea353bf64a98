"""Each row of the first promise, by programs that keep something in memory, in every way.

A program that works comes to one result, with the same files; one that is refused is refused with
the same sentence before its third step. ``-k counters`` or ``-k moco`` is a part.
"""

import json
import os
import re
import sys
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
from tests.chaos.exchanges import device_of, has_accelerator, variables_of
from tests.parity.keeping_programs import ROWS, STEPS, Way, files_of
from tests.warm import processes

from unisono.runtime.faults import PLACES

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
TIMEOUT_S = 90
AT = PLACES[: PLACES.index("commit") + 1]


@dataclass(frozen=True)
class Ranks:
    """Who computes; no workers are plain Python."""

    workers: int | None = None
    exchange: str = "shared"
    faults: str = ""


UNDISTURBED = [Ranks(), *(Ranks(n) for n in (1, 2, 3, 4))]
UNDISTURBED += [Ranks(2, "staged"), Ranks(3, "gloo"), Ranks(2, "sim")]
STOPPED = {3: Ranks(), 6: Ranks(3, "staged"), STEPS: Ranks(2)}


def run(way, ranks):
    """Run a program once; returns its exit status, what it printed, and what each worker found."""
    Path(way.folder).mkdir(exist_ok=True)
    starter = () if ranks.workers is None else ("-m", "unisono", "run", "-n", str(ranks.workers))
    given = asdict(replace(way, device=device_of(ranks.exchange), runs=[]))
    done = processes.run(
        [sys.executable, *starter, "-m", "tests.parity.keeping_programs", json.dumps(given)],
        timeout=TIMEOUT_S,
        cwd=processes.REPOSITORY,
        env={**os.environ, **variables_of(ranks.exchange), "UNISONO_FAULTS": ranks.faults},
    )
    files = sorted(Path(way.folder).glob(f"found-{way.start}-*.json"))
    return (
        done.returncode,
        done.stdout + done.stderr,
        [json.loads(one.read_text()) for one in files],
    )


def result(way, ranks):
    """Give what came of a program that works: the same of all workers, and its files."""
    status, said, found = run(way, ranks)
    assert status == 0, said[-1500:]
    assert len(found) == (ranks.workers or 1), "not all workers came to the end"
    results = [one["result"] for one in found]
    assert results == [results[0]] * len(results), "workers differ"
    return results[0], files_of(way)


def refusal(way, ranks):
    """Give the sentence with which a program is refused."""
    status, said, found = run(way, ranks)
    assert status > 0, said[-1500:]
    words = ROWS[way.row][way.program].refusal
    # Others may say that they wait for whoever was refused first.
    (told,) = {one["refusal"] for one in found if re.search(words, one.get("refusal", ""))}
    assert told in said, said[-1500:]
    assert all(one["step"] < 3 for one in found)
    return told


def killed(name):
    """Have rank 0 lost somewhere in step 3, and then another one in step 6."""
    drawn = zlib.crc32(name.encode())
    first, other = AT[drawn % len(AT)], AT[drawn // 16 % len(AT)]
    rank = 1 + drawn % 2
    return f"kill:rank=0,step=3,at={first}; kill:rank={rank},step=6,at={other}"


def ways(row, name, folder) -> Iterator[tuple[Way, Ranks]]:
    """Give all ways in which a program is run from its beginning to its end."""
    program = ROWS[row][name]
    for ranks in UNDISTURBED:
        if ranks.exchange != "sim" or has_accelerator():
            yield Way(row, name, f"{folder}/{ranks.exchange}-{ranks.workers}"), ranks
    if program.reads:
        for ranks in (Ranks(), Ranks(2)):
            yield Way(row, name, f"{folder}/loaders-{ranks.workers}", loader_workers=2), ranks
    if not program.refusal:
        for exchange in ("shared", "staged"):
            way = Way(row, name, f"{folder}/killed-{exchange}", is_killed=True)
            yield way, Ranks(3, exchange, killed(f"{row} {name} {exchange}"))


def stopped(row, name, folder):
    """Have a program started again and again, each time by others."""
    for start, (until, ranks) in enumerate(STOPPED.items()):
        way = Way(row, name, f"{folder}/stopped", until=until, start=start, is_kept=True)
        found = result(way, ranks)
    return found


@pytest.mark.parametrize(("row", "name"), [(row, name) for row in ROWS for name in ROWS[row]])
def test_a_program_has_one_result_or_is_refused_in_every_way(row, name, tmp_path):
    program = ROWS[row][name]
    found, trouble = {}, {}
    for way, ranks in ways(row, name, tmp_path):
        words = f"{Path(way.folder).name}: {ranks}"
        try:
            found[words] = (refusal if program.refusal else result)(way, ranks)
        except AssertionError as error:
            trouble[words] = error
    assert not trouble, "\n".join(f"{words}: {error}" for words, error in trouble.items())
    expected = next(iter(found.values()))
    assert {words: one for words, one in found.items() if one != expected} == {}
    if not program.refusal:
        assert stopped(row, name, tmp_path) == expected
