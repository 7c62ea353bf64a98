"""`unisono doctor`, also on odd machines: it always ends, and says what it saw."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from unisono.tools.doctor.machine_checks import machine_probes, observe, summary
from unisono.tools.verify.findings import Finding

COMMAND = [sys.executable, "-m", "unisono", "doctor"]
SEEN = [
    Finding("cores", "ok", "4 cores."),
    Finding("load", "warning", "Busy.", "Wait."),
    Finding("memory", "unknown", "This could not be read (x)."),
    Finding("torch", "wrong", "torch [cannot] be loaded.", "Install it."),
]


def run(
    command: list[str], environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=environ)


def test_a_probe_that_fails_ends_none_of_the_others() -> None:
    def breaks() -> list[Finding]:
        raise PermissionError(13, "Permission denied", "/proc/x")

    first, second = observe({"load": breaks, "cores": lambda: SEEN[:1]})
    assert (first.check, first.verdict) == ("load", "unknown")
    assert first.evidence.startswith(
        "This could not be read (PermissionError: [Errno 13] Permission"
    )
    assert second == SEEN[0]


def test_all_is_summed_up() -> None:
    assert summary(SEEN) == "1 wrong: torch; 1 to look at: load; 1 could not be read: memory."
    assert summary(SEEN[:1]) == "Nothing is wrong with this machine."


def test_a_machine_that_says_nothing_is_examined_to_the_end(tmp_path: Path) -> None:
    verdicts = {one.check: one.verdict for one in observe(machine_probes(tmp_path))}
    assert [check for check, found in verdicts.items() if found == "unknown"] == ["shared-memory"]
    assert "wrong" not in verdicts.values()


@pytest.mark.slow
def test_it_prints_json_also_in_the_environment_of_a_worker() -> None:
    environ = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "UNISONO_FAULTS": "kill:rank=0"}
    done = run([*COMMAND, "--json"], environ)
    checks = json.loads(done.stdout)["checks"]
    assert {*checks[0]} == {"check", "verdict", "evidence", "remedy"}
    names = {one["check"] for one in checks}
    assert names >= {"torch", "gpus", "cores", "memory", "settings", "stacks"}
    assert any("has workers fail on purpose" in one["evidence"] for one in checks)
    assert done.returncode == 1


@pytest.mark.slow
def test_on_one_core_with_few_files_it_ends_and_says_so() -> None:
    program = f"ulimit -n 64; exec taskset -c 0 {shlex.join(COMMAND)}"
    done = run(["bash", "-c", program])
    assert done.returncode == 1
    assert "✗ open-files" in done.stdout
    assert "of which this process may use 1." in " ".join(done.stdout.split())
    assert done.stdout.splitlines()[-1].startswith("1 wrong: open-files")
    assert done.stderr == ""
