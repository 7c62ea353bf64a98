"""`unisono doctor`, also on odd machines: it always ends, and says what it saw."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from unisono.tools.cli import main, views
from unisono.tools.doctor import machine_checks
from unisono.tools.doctor.machine_checks import machine_probes, observe, summary
from unisono.tools.verify.findings import Finding

SEEN = [
    Finding("cores", "ok", "4 cores."),
    Finding("load", "warning", "Busy.", "Wait."),
    Finding("memory", "unknown", "This could not be read (x)."),
    Finding("torch", "wrong", "torch [cannot] be loaded.", "Install it."),
]


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


def test_it_prints_a_line_for_each_and_sums_them_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "leave", sys.exit)
    monkeypatch.setattr(machine_checks, "examine", lambda environ: SEEN)
    done = CliRunner().invoke(main, ["doctor"])
    assert done.exit_code == 1
    assert "✗ torch  torch [cannot] be loaded." in done.stdout
    assert done.stdout.splitlines()[-1] == summary(SEEN)


@pytest.mark.slow
def test_on_one_core_with_few_files_in_a_workers_environment_it_ends_and_says_so() -> None:
    environ = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "UNISONO_FAULTS": "kill:rank=0"}
    command = shlex.join([sys.executable, "-m", "unisono", "doctor", "--json"])
    program = f"ulimit -n 64; exec taskset -c 0 {command}"
    done = subprocess.run(
        ["bash", "-c", program], capture_output=True, text=True, timeout=110, env=environ
    )
    checks = json.loads(done.stdout)["checks"]
    assert {*checks[0]} == {"check", "verdict", "evidence", "remedy"}
    found = {one["check"]: one for one in checks}
    assert found.keys() >= {"torch", "gpus", "cores", "memory", "settings", "stacks"}
    assert found["open-files"]["verdict"] == "wrong"
    assert "of which this process may use 1." in found["cores"]["evidence"]
    assert any("has workers fail on purpose" in one["evidence"] for one in checks)
    assert (done.returncode, done.stderr) == (1, "")
