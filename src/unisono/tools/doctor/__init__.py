"""What does this machine offer for training, and what is wrong with it? `unisono doctor`.

Checks report what they cannot read; a check that fails does not stop the others.
"""
