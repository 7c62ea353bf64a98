"""Pages whose commands are run: programs go into a folder, and what they print is compared.

``python -m tests.shown_runs`` writes what the commands print now into the pages (`make pictures`).
A line that is ``…`` on a page stands for any number of lines.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
import tempfile
from pathlib import Path

from tests.warm import processes

REPOSITORY = Path(__file__).resolve().parents[1]
README = REPOSITORY / "README.md"
INDEX = REPOSITORY / "docs" / "index.md"
START = REPOSITORY / "docs" / "start.md"
PAGES = [README, INDEX, START, *sorted((REPOSITORY / "docs" / "problems").glob("*.md"))]
HOME = "/home/you"
MODULES = {"python": [], "unisono": ["-m", "unisono"], "torchrun": ["-m", "torch.distributed.run"]}


def programs_of(page: Path) -> dict[str, str]:
    """Return a page's programs by the name that stands above them."""
    found = re.findall(r'^```python title="(\S+)"\n(.*?)^```$', page.read_text(), re.S | re.M)
    return dict(found)


def runs_of(page: Path) -> list[tuple[str, list[str]]]:
    """Return each command below which a page shows what it prints, with those lines."""
    found = []
    for block in re.findall(r"^```console\n(.*?)^```$", page.read_text(), re.S | re.M):
        parts = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.M)
        if any(lines for _, lines in parts):
            found += [(command, lines.splitlines()) for command, lines in parts]
    return found


def printed(command: str, folder: Path, *, quickly: bool = False) -> list[str]:
    """Run a command and return its lines, without what only a busy machine adds.

    Quickly: ranks are forks with torch loaded, and have the variables that torchrun sets.
    """
    if quickly:
        command = command.replace("torchrun --nproc-per-node", "unisono run -n")
    name, *arguments = shlex.split(command, comments=True)
    words = [sys.executable, *MODULES[name], *arguments]
    # Threads of OpenMP wait for each other by computing: on a busy machine, for minutes.
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = processes.run(words, cwd=folder, timeout=100, env=environ)
    lines = done.stdout.replace(str(folder), HOME).splitlines()
    assert lines, done.stderr
    timed = r"% of the time|^epoch \d+, step|are slower than one would be"
    return [line for line in lines if not re.search(timed, line)]


def agree(shown: list[str], lines: list[str]) -> bool:
    """Whether lines are those shown; numbers with a point need only be close to them."""
    if not shown or not lines:
        return shown in ([], ["…"]) and not lines
    if shown[0] == "…":
        return any(agree(shown[1:], lines[start:]) for start in range(len(lines) + 1))
    return _are_close(shown[0], lines[0]) and agree(shown[1:], lines[1:])


def _are_close(shown: str, line: str) -> bool:
    number = r"(?<![\d,])(\d+\.\d+)"
    ours, theirs = re.split(number, _timeless(shown)), re.split(number, _timeless(line))
    values = zip(ours[1::2], theirs[1::2], strict=False)
    return ours[::2] == theirs[::2] and all(
        math.isclose(float(one), float(other), rel_tol=0.03) for one, other in values
    )


def _timeless(line: str) -> str:
    return re.sub(r"in [\d.]+ s: [\d,]+ samples/s|digest [0-9a-f]{16}", "", line)


def digests(lines: list[str]) -> list[int]:
    """Number the digests in the order in which they come first: processors have different ones."""
    found = re.findall(r"digest ([0-9a-f]{16})", "\n".join(lines))
    return [list(dict.fromkeys(found)).index(digest) for digest in found]


def run_page(
    page: Path, folder: Path, *, quickly: bool = False
) -> list[tuple[str, list[str], list[str]]]:
    """Return each command, the lines shown below it, and those that it prints."""
    for name, program in programs_of(page).items():
        (folder / name).write_text(program)
    return [
        (command, shown, printed(command, folder, quickly=quickly))
        for command, shown in runs_of(page)
    ]


def write(page: Path) -> None:
    """Put what the commands print below them; what is left out stays left out."""
    with tempfile.TemporaryDirectory() as folder:
        done = run_page(page, Path(folder))
    before, text = "", page.read_text()
    for command, shown, lines in done:
        if "…" in shown:
            at, after = shown.index("…"), len(shown) - shown.index("…") - 1
            lines = [*lines[:at], "…", *lines[len(lines) - after :]]
        old, new = ("\n".join([f"$ {command}", *part, ""]) for part in (shown, lines))
        ahead, _, text = text.partition(old)
        before += ahead + new
    page.write_text(before + text)


if __name__ == "__main__":
    for name in sys.argv[1:] or PAGES:
        write(Path(name))
