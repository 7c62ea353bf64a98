"""Checkpoints as files: write, verify, read, lock and copy them."""
