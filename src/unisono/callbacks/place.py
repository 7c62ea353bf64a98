"""May a callback write at a path now? Not where the run directory has become another job's."""

from __future__ import annotations

from pathlib import Path

from unisono.callbacks.callback import Fit


def trouble_at(fit: Fit, path: Path) -> str:
    """Say why nothing may be written at a path; empty where it may, or it is no place of the run's.

    A run directory that was removed while the run goes on is made the run's own again first.
    """
    if fit.directory is None or not path.is_relative_to(fit.directory):
        return ""
    return fit.check_directory()
