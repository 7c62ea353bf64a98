"""What does this machine offer for training, and what is wrong with it? `unisono doctor`.

What cannot be read is said; no check can end the others.
"""
