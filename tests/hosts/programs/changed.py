"""Train programs that change parameters themselves, in callbacks and passes; say their digests."""

import tempfile

from tests.programs.together import CHANGED, run_all

with tempfile.TemporaryDirectory() as folder:
    found = run_all([program.body for program in CHANGED], folder, {})
for program, one in zip(CHANGED, found, strict=True):
    print(f"{program}: digest {one['digests']}\n", end="", flush=True)
