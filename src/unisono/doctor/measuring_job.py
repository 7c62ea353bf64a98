"""``python -m unisono.doctor.measuring_job``: starts two workers, and prints what rank 0 measures.

In a process of its own: nothing that workers do, or fail to do, ends the others' checks.
"""

from __future__ import annotations

import json

from unisono.doctor.measuring import WORKERS, measure
from unisono.launch.api import launch


def main() -> None:
    """Start the workers, and print JSON."""
    first, _ = launch(measure, workers=WORKERS, gpus="none", threads=1, restarts=0)
    print(json.dumps(first))


if __name__ == "__main__":
    main()
