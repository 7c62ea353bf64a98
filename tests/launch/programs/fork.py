"""Forks a child that ends in one of several ways, waits for it, and ends well itself."""

import os
import sys

end = sys.argv[1]
child = os.fork()
if child == 0:
    if end == "hook":
        sys.excepthook = lambda kind, error, trace: print("my hook:", error, file=sys.stderr)
    if end in ("raise", "hook"):
        raise RuntimeError("in the child")
    sys.exit(int(end) if end.isdecimal() else end)
print("ended with", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
