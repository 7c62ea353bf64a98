"""The event file of a run: what it says, how it is followed, what makes steps slow."""
