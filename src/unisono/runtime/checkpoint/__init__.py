"""Checkpoints as files: write, verify, read, refuse."""
