"""What does this machine offer for training, and what is wrong with it? `unisono doctor`.

Each check reads, and a pure function judges what was read. What cannot be read is said; no check
can end the others.
"""
