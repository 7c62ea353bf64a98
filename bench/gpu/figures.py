"""Where do all figures go? Into one JSON file, which is written anew whenever one is found.

So what was found is there, whatever becomes of the rest: a side that hangs, a limit of time, a
machine that is taken away.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from bench import machine

RESULTS = machine.REPOSITORY / "bench" / "results"
MACHINE, TESTS = "machine", "tests"
BLOCKS, ROWS, KILLS, TARGETS = "blocks", "rows", "kills", "targets"
FAILURES, NOTES = "failures", "notes"
PACKAGES = ("triton", "accelerate", "lightning", "transformers", "numpy")


class Figures:
    """The file, and what is in it. Final.

    Args:
        path: where it is written; None: a name with the date in ``bench/results``.
        commit: what was measured, where git cannot tell.
        device: ``"cuda"`` or ``"cpu"``.
    """

    def __init__(self, path: Path | None, commit: str, device: str) -> None:
        self.path = path or RESULTS / f"{datetime.now():%Y-%m-%d-%H%M%S}-gpu.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        facts = machine.facts()
        self.content: dict[str, Any] = {
            MACHINE: {
                **facts,
                "commit": commit or facts["commit"],
                **device_facts(device),
                "packages": {name: machine.version(name) for name in PACKAGES},
            },
            **{name: [] for name in (NOTES, TESTS, ROWS, TARGETS, KILLS, FAILURES, BLOCKS)},
        }
        self._write()

    def add(self, section: str, *found: dict[str, Any]) -> None:
        """Put something into a section."""
        self.content[section] += found
        self._write()

    def replace(self, section: str, found: Iterable[dict[str, Any]]) -> None:
        """Have these alone in a section."""
        self.content[section] = list(found)
        self._write()

    def _write(self) -> None:
        beside = self.path.with_name(self.path.name + ".new")
        beside.write_text(
            json.dumps(self.content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
        )
        os.replace(beside, self.path)


def device_facts(device: str) -> dict[str, Any]:
    """Say what the device is; of a GPU also what the libraries are that compute on it."""
    if device != "cuda":
        return {"device": "cpu"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "gpu_memory_bytes": properties.total_memory,
        "gpus": torch.cuda.device_count(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "driver": _driver(),
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return told.stdout.strip().partition("\n")[0]
