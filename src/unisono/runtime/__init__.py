"""Processes: workers and how they meet, the launcher, process groups, checkpoint files, hangs."""

__version__ = "0.1.0"  # as in pyproject.toml
