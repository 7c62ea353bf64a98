"""Rank 1 ends in the way that its argument names, while the others wait for it."""

import os
import sys

from unisono.runtime.workers.context import context


def deep():
    raise KeyError("the original")


way = sys.argv[1]
if os.environ["RANK"] == "1":
    if way == "raise":
        deep()
    elif way == "message":
        sys.exit("out of beer")
    elif way == "kill":
        os.kill(os.getpid(), 9)
    elif way == "leave":
        sys.exit()
context().team().meet("test")
