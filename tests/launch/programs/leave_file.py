"""Leaves files open at its end, as careless programs do, and says good-bye at exit.

One that only reads is being read by a thread that nobody waits for; of one in memory a view is
held. A socket is both read so and written to.
"""

import atexit
import gzip
import io
import os
import socket
import sys
import threading

held = open(os.path.join(sys.argv[1], os.environ["RANK"]), "w")  # noqa: SIM115
held.write("written")
zipped = gzip.open(os.path.join(sys.argv[1], os.environ["RANK"] + ".gz"), "wt")  # noqa: SIM115
zipped.write("zipped")
atexit.register(print, "bye")
view = io.BytesIO(b"x").getbuffer()
readable, _ = (os.fdopen(fd, mode) for fd, mode in zip(os.pipe(), ("rb", "wb"), strict=True))
ours, theirs = socket.socketpair()
raw = ours.makefile("rwb", buffering=0)
both = io.TextIOWrapper(io.BufferedRWPair(raw, raw))
both.write("sent")
for reader in (readable, both):
    threading.Thread(target=reader.read, daemon=True).start()
flush = sys.stdout.flush  # called last
sys.stdout.flush = lambda: (raw.closed and sys.stderr.write("closed while it is read"), flush())
atexit.register(lambda: both.flush() or print(theirs.recv(9).decode()))
threading.Thread(target=held.write, args=(" by a thread",)).start()
