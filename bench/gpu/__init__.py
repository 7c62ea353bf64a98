"""Unisono on one GPU beside a bare loop and its peers: ``make bench-gpu``."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def find_package() -> None:
    """Have this process and those that it starts find Unisono, where it is not installed."""
    if importlib.util.find_spec("unisono") is None:
        source = str(Path(__file__).resolve().parents[2] / "src")
        sys.path.insert(0, source)
        given = filter(None, [os.environ.get("PYTHONPATH")])
        os.environ["PYTHONPATH"] = os.pathsep.join([source, *given])
