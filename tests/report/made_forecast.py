"""A forecast made up for tests."""

from __future__ import annotations

from typing import Any

from tests.forecast.made import profile, timed

from unisono.forecast.cluster import Cluster
from unisono.forecast.facts import Forecast
from unisono.forecast.outlook import Failures, expectations

COUNTS = [1, 2, 8, 32, 1024]


def forecast(**options: Any) -> dict[str, Any]:
    found = profile(
        timed((8,), 0.01, spread=0.05), timed((4, 4), 0.011, spread=0.05), megabytes=100
    )
    cluster, failures = Cluster(cores=8, per_host=8), Failures(1e7, 10.0, 60.0, 600.0)
    rows = expectations(found, COUNTS, cluster, failures, epochs=10)
    return Forecast("train.py", "cpu", found, cluster, failures, 10, rows).as_json | options
