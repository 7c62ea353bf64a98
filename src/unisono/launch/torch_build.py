"""Is the torch that workers will load built for GPUs? Read from its files, without loading it.

A machine may have GPUs and a torch for CPUs alone; its workers then compute on the CPU.
"""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path


def torch_for_cpus_alone() -> str:
    """Return the version of a torch that cannot use GPUs; empty if it can, or nobody knows."""
    try:
        spec = importlib.util.find_spec("torch")
        if spec is None or spec.origin is None:
            return ""
        facts = runpy.run_path(str(Path(spec.origin).with_name("version.py")))
    except Exception:  # whatever is wrong with it is told when workers load it
        return ""
    if "cuda" not in facts or facts["cuda"] or facts.get("hip"):
        return ""
    return str(facts.get("__version__", "without a version"))
