"""Run tests while threads take turns at every moment, and beside two processes that never rest.

``python -m tests.races [pytest's arguments]`` runs them three times, as a race is not lost always.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TIMES, BUSY = 3, 2
_LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: sum(range(100_000))"


def main(arguments: list[str]) -> int:
    """Run pytest with these arguments, again and again until it fails; return its status."""
    here = str(Path(__file__).parent)
    paths = [here, *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    busy = [subprocess.Popen([sys.executable, "-c", _LOOP]) for _ in range(BUSY)]
    try:
        for number in range(1, TIMES + 1):
            print(f"races: {number} of {TIMES}", flush=True)
            command = [sys.executable, "-m", "pytest", *arguments]
            if status := subprocess.run(command, env=environ, check=False).returncode:
                return status
        return 0
    finally:
        for process in busy:
            process.kill()
            process.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
