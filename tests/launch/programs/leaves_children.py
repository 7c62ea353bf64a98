"""Each worker starts processes that never end by themselves, then ends, or fails, or waits.

Arguments: a folder, in which each process has a file with its number; how the workers end.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

folder, end = Path(sys.argv[1]), sys.argv[2]


def note(name):
    part = folder / f".{name}"
    part.write_text(str(os.getpid()))
    part.rename(folder / name)


def waits(number, rank):
    note(f"spawned-{rank}-{number}")
    time.sleep(600)


if __name__ == "__main__":
    rank = os.environ["RANK"]
    note(f"worker-{rank}")
    multiprocessing.get_context("spawn").Process(target=waits, args=(0, rank)).start()
    # A daemon, which gives itself a parent and a session of its own.
    code = "import os, sys, time; os.fork() and os._exit(0); os.setsid(); "
    code += "open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    subprocess.run([sys.executable, "-S", "-c", code, str(folder / f"daemon-{rank}")], check=True)
    while len([one for one in folder.glob("[a-z]*") if one.read_text()]) < 6:
        time.sleep(0.01)
    if end == "raises":
        raise RuntimeError("on purpose")
    if end == "waits":
        time.sleep(600)
    os._exit(0) if end == "leaves" else None
