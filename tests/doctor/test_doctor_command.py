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
from rich.console import Console

from unisono.cli import main
from unisono.doctor import examination
from unisono.doctor.child_process import ChildFailedError, answer_of
from unisono.doctor.diagnoses import (
    Diagnosis,
    as_json,
    observe,
    print_diagnoses,
    status_of,
    summary,
)
from unisono.doctor.examination import examine, of_nobody
from unisono.doctor.machine_probes import machine_probes
from unisono.doctor.measured_checks import judge_measured

COMMAND = [sys.executable, "-m", "unisono.cli", "doctor"]
SEEN = [
    Diagnosis("cores", "ok", "4 cores.", facts={"all": 4}),
    Diagnosis("load", "warning", "Busy.", "Wait."),
    Diagnosis("memory", "unknown", "This could not be read (x)."),
    Diagnosis("torch", "wrong", "torch [cannot] be loaded.", "Install it."),
]
MEASURED = {
    "meeting_s": 2e-5,
    "copy_s": [0.02, 0.04],
    "copy_bytes": 10**8,
    "pass_s": [0.010, 0.0125],
    "sum_s": {"100000": 0.0002, "8000000": 0.0075},
}


def run(
    command: list[str], environ: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=110, env=environ)


def test_a_probe_that_fails_ends_none_of_the_others() -> None:
    def breaks() -> list[Diagnosis]:
        raise PermissionError(13, "Permission denied", "/proc/x")

    def sees() -> list[Diagnosis]:
        return SEEN[:1]

    first, second = observe({"clock": breaks, "cores": sees})
    assert (first.check, first.verdict) == ("clock", "unknown")
    assert first.evidence.startswith(
        "This could not be read (PermissionError: [Errno 13] Permission"
    )
    assert second == SEEN[0]


def test_the_exit_status_is_that_of_what_is_wrong() -> None:
    assert [status_of(SEEN), status_of(SEEN[:3]), status_of([])] == [1, 0, 0]
    assert summary(SEEN) == "1 wrong: torch; 1 to look at: load; 1 could not be read: memory."
    assert summary(SEEN[:1]) == "Nothing is wrong with this machine."


def test_json_has_all_of_it() -> None:
    checks = json.loads(as_json(SEEN))["checks"]
    assert checks[0] == {
        "check": "cores",
        "verdict": "ok",
        "evidence": "4 cores.",
        "remedy": "",
        "facts": {"all": 4},
    }
    assert [one["verdict"] for one in checks] == ["ok", "warning", "unknown", "wrong"]


@pytest.mark.parametrize(("encoding", "marks"), [("utf-8", "✓!?✗"), ("ascii", "o!?W")])
def test_the_table_has_a_line_for_each(tmp_path: Path, encoding: str, marks: str) -> None:
    path = tmp_path / "out"
    with path.open("w", encoding=encoding) as file:
        assert print_diagnoses(Console(file=file, width=100), iter(SEEN)) == SEEN
    lines = [line.rstrip() for line in path.read_text(encoding=encoding).splitlines()]
    tops = [line for line in lines if not line.startswith(" ")]
    assert "".join(line[0] for line in tops) == marks
    assert any("torch [cannot] be loaded." in line for line in lines)
    assert any(line.endswith("Install it.") for line in lines)


def test_a_machine_that_says_nothing_is_examined_to_the_end(tmp_path: Path) -> None:
    seen = list(observe(machine_probes(tmp_path)))
    verdicts = {one.check: one.verdict for one in seen}
    assert {"load", "memory"} == {check for check, found in verdicts.items() if found == "unknown"}
    assert verdicts["shared-memory"] == "warning"
    assert "wrong" not in verdicts.values()


def test_measurements_say_what_to_expect() -> None:
    found = list(judge_measured(MEASURED, 2))
    assert [(one.check, one.verdict) for one in found] == [
        ("meetings", "ok"),
        ("memory-bandwidth", "ok"),
        ("passes", "ok"),
        ("sums", "ok"),
    ]
    assert found[0].evidence == "Two workers meet in 20 µs."
    assert "moves 5.0 GB/s of memory alone, and 2.5 GB/s while another" in found[1].evidence
    assert (
        "takes 10 ms alone, and 12.5 ms while another worker computes one: 80%" in found[2].evidence
    )
    # 100 ms / 2 × 1.25 + 7.5 ms
    assert "expect a step of 100 ms on one worker to take about 70 ms on two." in found[3].evidence


@pytest.mark.parametrize(
    ("changed", "num_cores", "check", "words"),
    [
        ({"meeting_s": 0.004}, 1, "meetings", "one core serves both"),
        ({"meeting_s": 0.004}, 2, "meetings", "something else takes the cores"),
        ({"pass_s": [0.01, 0.02]}, 1, "passes", "The workers have one core between them."),
        ({"pass_s": [0.01, 0.02]}, 2, "passes", "The cores share something"),
    ],
)
def test_slow_measurements_are_explained(
    changed: dict[str, object], num_cores: int, check: str, words: str
) -> None:
    found = {one.check: one for one in judge_measured({**MEASURED, **changed}, num_cores)}
    assert (found[check].verdict, words in found[check].remedy) == ("warning", True)


@pytest.mark.parametrize(
    ("program", "timeout_s", "words"),
    [
        ("raise ImportError('libfoo.so: no such file')", 60, "ImportError: libfoo.so: no such"),
        ("import os; os.kill(os.getpid(), 11)", 60, "killed by SIGSEGV"),
        ("import sys; sys.exit(3)", 60, "exit status 3"),
        ("print('no json')", 60, "exit status 0"),
        ("import time; time.sleep(100)", 1, "no answer within 1 s"),
    ],
)
def test_a_child_that_fails_says_why(
    tmp_path: Path, program: str, timeout_s: float, words: str
) -> None:
    (tmp_path / "odd.py").write_text(program)
    with pytest.raises(ChildFailedError, match=words):
        answer_of("odd", timeout_s, {**os.environ, "PYTHONPATH": str(tmp_path)})


@pytest.mark.slow
def test_a_torch_that_cannot_be_loaded_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise OSError('libtorch_cpu.so: bad ELF')")
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    monkeypatch.setattr(examination, "machine_probes", lambda root: {})
    seen = list(examine(environ, measures=False))
    assert (seen[0].check, seen[0].verdict) == ("torch", "wrong")
    assert "cannot be loaded: OSError: libtorch_cpu.so: bad ELF" in seen[0].evidence
    assert [one.check for one in seen][:2] == ["torch", "gpus"]


def test_workers_that_cannot_be_timed_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(module: str, timeout_s: float, environ: object) -> None:
        raise ChildFailedError(f"{module} failed")

    monkeypatch.setattr(examination, "machine_probes", lambda root: {})
    monkeypatch.setattr(examination, "answer_of", fails)
    seen = {one.check: one for one in examine({}, measures=True)}
    assert seen["measurement"].verdict == "unknown"
    assert (
        "could not be timed: unisono.doctor.measuring_job failed." in seen["measurement"].evidence
    )


def test_workers_are_timed_as_nobodys() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "UNISONO_FAULTS": "x", "SLURM_JOB_ID": "1", "A": "b"}
    assert of_nobody(environ) == {"A": "b"}


def test_wrong_options_are_refused() -> None:
    result = CliRunner().invoke(main, ["doctor", "--fast"])
    assert result.exit_code == 2


@pytest.mark.slow
def test_it_measures_and_prints_json() -> None:
    done = run([*COMMAND, "--json"])
    checks = {one["check"]: one for one in json.loads(done.stdout)["checks"]}
    assert {"torch", "gpus", "cores", "memory", "settings", "stacks"} <= checks.keys()
    assert {"meetings", "memory-bandwidth", "passes", "sums"} <= checks.keys(), checks
    assert checks["meetings"]["facts"]["seconds"] > 0
    assert done.returncode == any(one["verdict"] == "wrong" for one in checks.values())


@pytest.mark.slow
def test_on_one_core_with_few_files_it_ends_and_says_so() -> None:
    program = f"ulimit -n 64; exec taskset -c 0 {shlex.join(COMMAND)} --quick"
    done = run(["bash", "-c", program])
    assert done.returncode == 1
    assert "✗ open-files" in done.stdout
    assert "of which this process may use 1 (0)" in " ".join(done.stdout.split())
    assert done.stdout.splitlines()[-1].startswith("1 wrong: open-files")
    assert done.stderr == ""


@pytest.mark.slow
def test_in_the_environment_of_a_worker_it_measures_all_the_same() -> None:
    environ = {**os.environ, "RANK": "1", "WORLD_SIZE": "2", "UNISONO_FAULTS": "kill:rank=0"}
    done = run([*COMMAND, "--json"], environ)
    checks = [one["check"] for one in json.loads(done.stdout)["checks"]]
    assert "sums" in checks
    assert done.returncode == 1
