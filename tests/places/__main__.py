"""Trains in unfriendly places, and shows in one table what came of it: ``make test-places``.

A place is made with the shell (unshare, mount, ulimit, env), in a mount namespace of its own, so
nothing of it stays. In each, a run either ends with the digest of the undisturbed one, with or
without a line that says what is missing, or is refused in a sentence before the first step.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PROGRAM = Path(__file__).with_name("training.py")
REPOSITORY = Path(__file__).parents[2]
PYTHON = shlex.quote(sys.executable)
RUN = f"{PYTHON} -m unisono run -n 2 {PROGRAM}"
# Root has no limit on processes; Python may lie where root alone may read.
WITHOUT_RIGHTS = (
    "setpriv --reuid 54321 --clear-groups --inh-caps=-all,+dac_override --bounding-set "
    "-all,+dac_override --ambient-caps +dac_override"
)
TRAINS, REFUSED, UNSAVED = "trains", "is refused", "trains, and ends with 1"
LIMIT_S = 300.0


@dataclass(frozen=True)
class Place:
    """A place, and what has to come of a run there."""

    name: str
    script: str  # of the shell, in a folder of its own, below which `run` may be written
    outcome: str = TRAINS
    said: str = ""  # words that have to be there
    is_kept: bool = True  # whether there are checkpoints of the last step


def mounted(options: str, at: str = "run") -> str:
    """Mount memory at a folder."""
    return f"mkdir -p {at} && mount -t tmpfs {options} none {at} && "


PLACES = (
    Place("a folder", f"{RUN} run"),
    Place("one process", f"{PYTHON} {PROGRAM} run"),
    Place(
        "a read-only file system",
        f"{mounted('-o ro')}{RUN} run",
        REFUSED,
        "`directory` must be a folder that can be read and written",
        is_kept=False,
    ),
    Place(
        "a disk that becomes read-only",
        f"{RUN} run 'cd run && mount --bind checkpoints checkpoints && "
        "until mount -o remount,bind,ro checkpoints; do sleep 0.1; done'",  # one may be written
        UNSAVED,
        "the newest state, of step 6, is NOT on the disk",
        is_kept=False,
    ),
    Place(
        "a disk that becomes full",
        f"{mounted('-o size=4m')}{RUN} run 'head -c 8m /dev/zero > run/large || true'",
        UNSAVED,
        "the newest state, of step 6, is NOT on the disk",
        is_kept=False,
    ),
    Place(
        "a directory that is a file",
        f"touch run && {RUN} run",
        REFUSED,
        "`directory` must be a folder that can be read and written",
        is_kept=False,
    ),
    Place("64 MB of /dev/shm", f"{mounted('-o size=64m', '/dev/shm')}{RUN} run"),
    Place("a /dev/shm that is read-only", f"{mounted('-o ro', '/dev/shm')}{RUN} run"),
    Place("a /tmp that is read-only", f"{mounted('-o ro', '/mnt')}TMPDIR=/mnt {RUN} run"),
    Place("no HOME", f"env -u HOME {RUN} run"),
    Place("a HOME that is not there", f"HOME=/nowhere {RUN} run"),
    Place("another user, without rights", f"mkdir run && unshare --user {RUN} run"),
    Place(
        "a working folder that is read-only",
        f'here=$PWD; {mounted("-o ro", "/mnt")}cd /mnt && {RUN} "$here/run"',
    ),
    Place("no network", f"unshare --net {RUN} run"),
    Place("few open files", f"ulimit -n 192; {RUN} run"),
    Place(
        "fewer open files than workers need",
        f"ulimit -n 64; {RUN} run",
        REFUSED,
        "enter `ulimit -n 130`",
        is_kept=False,
    ),
    Place(
        "few processes",
        f"{WITHOUT_RIGHTS} bash -c 'ulimit -u 1; {RUN} run'",
        REFUSED,
        "`ulimit -u` must allow what a run needs",
        is_kept=False,
    ),
    Place(
        "little memory for a process",
        f"ulimit -v 300000; {RUN} run",
        REFUSED,
        "`ulimit -v` must allow what a run needs",
        is_kept=False,
    ),
    Place("python -O", f"{PYTHON} -O -m unisono run -n 2 {PROGRAM} run"),
    Place("python -I", f"{PYTHON} -I -m unisono run -n 2 {PROGRAM} run"),
    Place("python -W error", f"{PYTHON} -W error -m unisono run -n 2 {PROGRAM} run"),
    Place("LC_ALL=C, umlauts", f"LC_ALL=C PYTHONUTF8=0 {RUN} 'run/Übung ✓'"),
    Place("a long path", f"{RUN} run/{'/'.join(['a' * 200] * 15)}"),
    Place(
        "a path that is too long", f"{RUN} run/{'a' * 300}", REFUSED, "File name too long", False
    ),
    Place(
        "a store that is lost on the way",
        f"UNISONO_REMOTE_TIMEOUT=5 XDG_CACHE_HOME=$PWD/run {RUN} file://$PWD/store "
        "'mv store lost; touch store'",
        said="store",
    ),
    Place(
        "a store that is not there",
        f"AWS_ENDPOINT_URL=http://127.0.0.1:9 {RUN} s3://nowhere/run",
        REFUSED,
        "`directory` must be a URL that can be read and written when a run begins",
        is_kept=False,
    ),
)


def main(only: list[str]) -> int:
    """Try all places, or those whose names have one of these words in them."""
    chosen = [place for place in PLACES if not only or any(word in place.name for word in only)]
    troubles, rows = [], [("place", "outcome", "what was said")]
    expected = digest_of(tried(PLACES[0])[0])
    for place in chosen:
        done, is_kept = tried(place)
        outcome, said = seen(done, expected), line_with(place.said, done)
        rows.append((place.name, outcome, said[:100]))
        if outcome != place.outcome or (place.said and not said) or is_kept != place.is_kept:
            troubles.append(f"{place.name}: {place.outcome} expected\n{done.stdout}{done.stderr}")
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    for row in rows:
        print(f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}".rstrip())
    print("\n\n".join(["", *troubles]) if troubles else f"\n{len(chosen)} places, as expected")
    return int(bool(troubles))


def tried(place: Place) -> tuple[subprocess.CompletedProcess[str], bool]:
    """Run the program in a place; give what it said, and whether the last step is on the disk."""
    with tempfile.TemporaryDirectory(prefix="place-") as folder:
        # The mounts are seen by the last command alone, so it looks for the checkpoint, too.
        script = f"({place.script}); status=$?; cd {folder}; find run -name step-000000000006"
        done = subprocess.run(
            ["unshare", "--mount", "sh", "-c", f"{script} 2>/dev/null; exit $status"],
            cwd=folder,
            env={**_environ(), "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    return done, "step-000000000006" in done.stdout


def seen(done: subprocess.CompletedProcess[str], expected: str) -> str:
    """Put in two words what came of a run."""
    if done.returncode == 0:
        return TRAINS if digest_of(done) == expected else "trains to another digest"
    if done.returncode == 1 and digest_of(done) == expected:
        return UNSAVED
    in_sentence = "Traceback" not in done.stderr or "Error: `" in done.stderr
    return REFUSED if in_sentence and "digest" not in done.stdout else f"fails ({done.returncode})"


def digest_of(done: subprocess.CompletedProcess[str]) -> str:
    """Find the digest that the program has printed."""
    lines = [one for one in done.stdout.splitlines() if one.startswith("digest ")]
    return lines[-1] if lines else ""


def line_with(words: str, done: subprocess.CompletedProcess[str]) -> str:
    """Find the first line with some words; empty words are in none."""
    lines = f"{done.stderr}\n{done.stdout}".splitlines()
    return next((line for line in lines if words and words in line), "")


def _environ() -> dict[str, str]:
    import os

    return {name: value for name, value in os.environ.items() if not name.startswith("UNISONO")}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
