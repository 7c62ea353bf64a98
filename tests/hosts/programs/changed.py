"""Train programs that change parameters themselves, in callbacks and passes; say their digests."""

import sys

from tests.parity.test_changed_parameters import digests

for name, digest in digests(*sys.argv[1:]).items():
    print(f"{name}: digest {digest}\n", end="", flush=True)
