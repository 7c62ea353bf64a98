"""Processes: workers, their launcher, process groups, checkpoint files, and hangs."""

__version__ = "0.1.0"  # as in pyproject.toml
