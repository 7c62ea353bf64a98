"""Leaves a file open at its end, as careless programs do, and says good-bye at exit."""

import atexit
import gzip
import os
import sys
import threading

held = open(os.path.join(sys.argv[1], os.environ["RANK"]), "w")  # noqa: SIM115
held.write("written")
zipped = gzip.open(os.path.join(sys.argv[1], os.environ["RANK"] + ".gz"), "wt")  # noqa: SIM115
zipped.write("zipped")
atexit.register(print, "bye")
threading.Thread(target=held.write, args=(" by a thread",)).start()
