"""The event file of a run: its contents, how to follow it, and what makes steps slow."""
