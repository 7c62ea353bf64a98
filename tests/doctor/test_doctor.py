"""`unisono doctor`, also on odd machines: it always ends, and says what it saw."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from unisono.runtime.launch.placement import DriverGpu
from unisono.tools.cli import main, views
from unisono.tools.doctor import machine_checks
from unisono.tools.doctor import machine_checks as checks
from unisono.tools.doctor.machine_checks import (
    container_cores,
    container_memory_left,
    judge_settings,
    machine_probes,
    observe,
    summary,
)
from unisono.tools.doctor.torch_checks import (
    TorchFailedError,
    facts_in_child,
    judge_gpus,
    judge_torch,
    torch_and_gpus,
)
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
    assert any("makes workers fail on purpose" in one["evidence"] for one in checks)
    assert (done.returncode, done.stderr) == (1, "")


GIB, MIB = 2**30, 2**20


def memory(total: int, available: int) -> Any:
    return SimpleNamespace(total=total, available=available)


TABLE: list[tuple[Any, tuple[Any, ...], str, str]] = [
    (checks.judge_cores, (4, 4, None), "ok", "4 cores."),
    (checks.judge_cores, (16, 4, None), "ok", "16 cores, of which this process may use 4."),
    (checks.judge_cores, (1, 1, None), "warning", "1 core. With one core"),
    (checks.judge_cores, (4, 4, 1.5), "warning", "the time of 1.5. Start at most 1 workers"),
    (checks.judge_cores, (2, 2, 2.0), "ok", "2 cores."),
    (checks.judge_memory, (memory(8 * GIB, 6 * GIB), None), "ok", "8 GiB, 6 GiB of it avail"),
    (checks.judge_memory, (memory(8 * GIB, 200 * MIB), None), "wrong", "too little for a worker"),
    (
        checks.judge_memory,
        (memory(64 * GIB, 60 * GIB), 124 * MIB),
        "wrong",
        "60 GiB of it available, 124 MiB to this container: too little",
    ),
    (checks.judge_memory, (memory(64 * GIB, 60 * GIB), 100 * GIB), "ok", "60 GiB of it available."),
    (checks.judge_shared_memory, (64 * MIB,), "warning", "(`docker run --shm-size=2g`)"),
    (checks.judge_shared_memory, (8 * GIB,), "ok", "/dev/shm has 8 GiB free."),
    (checks.judge_open_files, (-1,), "ok", "limit on open files is high enough."),
    (checks.judge_open_files, (1024,), "ok", "limit on open files is high enough."),
    (checks.judge_open_files, (64,), "wrong", "may have 64 files open"),
    (checks.judge_stacks, ("",), "ok", "can be read, for `unisono where`."),
    (checks.judge_stacks, ("no permission",), "warning", "(no permission), so `unisono"),
]


@pytest.mark.parametrize(("judge", "given", "verdict", "words"), TABLE)
def test_a_machine_is_judged(judge: Any, given: Any, verdict: str, words: str) -> None:
    one = judge(*given)
    assert (one.verdict, bool(one.remedy)) == (verdict, verdict != "ok")
    assert words in f"{one.evidence} {one.remedy}"


def limits_in(root: Path, files: dict[str, str]) -> tuple[int | None, float | None]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return container_memory_left(root), container_cores(root)


V2 = {
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/memory.max": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory.current": f"{GIB}\n",
    "sys/fs/cgroup/cpu.max": "150000 100000\n",
}
V1 = {
    "proc/self/cgroup": "4:memory:/docker/x\n3:cpuacct,cpu:/docker/x\n2:pids:/docker/x\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{GIB}\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
}
OF_NO_LIMIT = {
    "proc/self/cgroup": "4:memory:/\n1:cpu:/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.parametrize("files", [V2, V1], ids=["v2", "v1"])
def test_both_versions_of_control_groups_say_the_same(
    tmp_path: Path, files: dict[str, str]
) -> None:
    assert limits_in(tmp_path, files) == (3 * GIB, 1.5)


def test_the_smallest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slurm/job/step\n",
        "sys/fs/cgroup/slurm/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/slurm/job/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/slurm/job/step/memory.max": "max\n",
    }
    assert limits_in(tmp_path, files) == (2 * GIB, None)


@pytest.mark.parametrize(
    "files",
    [
        {},
        OF_NO_LIMIT,
        {"proc/self/cgroup": ""},
        {"proc/self/cgroup": "nonsense\n:::\n0::/../../etc\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 0\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max/a": "a folder\n"},
    ],
)
def test_what_makes_no_sense_is_no_limit(tmp_path: Path, files: dict[str, str]) -> None:
    assert limits_in(tmp_path, files) == (None, None)


GPUS = ("GPU-aaaa", "GPU-bbbb")
FINE = "No problematic environment variables."


def judged(environ: dict[str, str], gpus: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    found = judge_settings(environ, ["lo", "eth0"], gpus)
    return [(one.verdict, f"{one.evidence} {one.remedy}".strip()) for one in found]


@pytest.mark.parametrize(
    ("name", "value", "verdict", "words"),
    [
        ("UNISONO_FAULTS", "kill:rank=1", "wrong", "makes workers fail on purpose. Unset it "),
        ("CUDA_LAUNCH_BLOCKING", "1", "warning", "the host waits for every kernel"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "warning", "makes training slow"),
        ("NVIDIA_TF32_OVERRIDE", "0", "warning", "changes the bits of results"),
        ("MKL_CBWR", "AVX2", "warning", "changes the bits of results"),
        ("ATEN_CPU_CAPABILITY", "default", "warning", "changes the bits of results"),
        ("OMP_PROC_BIND", "close", "warning", "to the same cores"),
        ("MALLOC_PERTURB_", "165", "warning", "all memory is written twice"),
        ("NCCL_P2P_DISABLE", "1", "warning", "GPUs do not copy to each other"),
        ("NCCL_SOCKET_IFNAME", "ib0", "wrong", "names no interface of this machine (lo, eth0)"),
        ("GLOO_SOCKET_IFNAME", "ens3", "wrong", "so ranks cannot connect"),
        ("RANK", "1", "wrong", "`RANK` and `WORLD_SIZE` must be set together"),
        ("LD_SOMETHING", "1", "ok", FINE),
        ("TORCH_DISTRIBUTED_DEBUG", "OFF", "ok", FINE),
        ("CUDA_LAUNCH_BLOCKING", "0", "ok", FINE),
        ("OMP_PROC_BIND", "false", "ok", FINE),
        ("NCCL_SOCKET_IFNAME", "eth", "ok", FINE),
        ("NCCL_SOCKET_IFNAME", "=lo", "ok", FINE),
        ("NCCL_SOCKET_IFNAME", "^docker", "ok", FINE),
        ("CUDA_VISIBLE_DEVICES", "7", "ok", FINE),
    ],
)
def test_one_variable_is_judged(name: str, value: str, verdict: str, words: str) -> None:
    ((found, text),) = judged({name: value})
    assert (found, words in text) == (verdict, True), text


@pytest.mark.parametrize(
    ("value", "verdict", "words"),
    [
        ("0,1", "ok", FINE),
        ("1", "warning", "shows 1 of 2 GPUs. Unset it to see all"),
        ("", "warning", "shows 0 of 2 GPUs."),
        ("0,5", "wrong", "shows 1 of 2 GPUs, fewer than it names."),
        ("-1", "wrong", "shows 0 of 2 GPUs, fewer than it names."),
        ("GPU-bb", "warning", "shows 1 of 2 GPUs."),
    ],
)
def test_visible_gpus_are_judged(value: str, verdict: str, words: str) -> None:
    ((found, text),) = judged({"CUDA_VISIBLE_DEVICES": value}, GPUS)
    assert (found, words in text) == (verdict, True), text


def test_variables_of_a_job_that_is_not_there_are_told() -> None:
    ((verdict, text),) = judged({"RANK": "1", "WORLD_SIZE": "4"})
    assert verdict == "warning"
    assert "this is rank 1 of 4, so a program that is started here waits for the others" in text


def test_a_hostile_value_is_shown_harmlessly() -> None:
    ((_, text),) = judged({"MKL_CBWR": "\x1b[2J" + "a" * 500})
    assert "\x1b" not in text
    assert len(text) < 300


CPU = {"version": "2.13.0+cpu", "built_for": "CPUs alone"}
CUDA = {"version": "2.11.0+cu128", "built_for": "CUDA 12.8"}
H200 = DriverGpu("GPU-1", "H200", 141 * GIB)


@pytest.mark.parametrize(
    ("facts", "num_gpus", "verdict", "words"),
    [
        (CPU, 0, "ok", "torch 2.13.0+cpu, built for CPUs alone."),
        (CPU, 2, "wrong", "cannot use this machine's 2 GPUs. Install a torch for CUDA"),
        (CUDA, 2, "ok", "built for CUDA 12.8"),
        ({**CPU, "version": "2.9.1"}, 0, "wrong", "is too old. Install torch 2.11"),
    ],
)
def test_a_torch_is_judged(facts: Any, num_gpus: int, verdict: str, words: str) -> None:
    one = judge_torch(facts, num_gpus)
    assert (one.verdict, words in f"{one.evidence} {one.remedy}") == (verdict, True), one


@pytest.mark.parametrize(
    ("facts", "known", "expected"),
    [
        (CPU, [], [("ok", "No GPU: NVIDIA's driver knows of none here. Workers compute on the")]),
        (CUDA, [H200], [("ok", "0: H200 with 141 GiB.")]),
        ({**CUDA, "gpu_trouble": "too old"}, [H200], [("wrong", "says: too old")]),
        (
            {**CUDA, "without_kernels": ["H200"]},
            [H200],
            [("ok", "0: H200"), ("wrong", "torch has no kernels for H200.")],
        ),
        (
            CUDA,
            [H200, H200._replace(memory_used=100 * GIB)],
            [("ok", "1: H200"), ("warning", "100 GiB of GPU 1's 141 GiB are taken.")],
        ),
    ],
)
def test_gpus_are_judged(facts: Any, known: Any, expected: list[tuple[str, str]]) -> None:
    found = list(judge_gpus(facts, known))
    assert [one.verdict for one in found] == [verdict for verdict, _ in expected], found
    for one, (_, words) in zip(found, expected, strict=True):
        assert words in one.evidence


@pytest.mark.slow
@pytest.mark.parametrize(
    ("torch", "timeout_s", "words"),
    [
        ("raise OSError('libtorch_cpu.so: bad ELF')", 60, "OSError: libtorch_cpu.so: bad ELF"),
        ("import os; os.kill(os.getpid(), 11)", 60, "exit status -11"),
        ("import time; time.sleep(100)", 1, "no answer within 1 s"),
    ],
)
def test_a_torch_that_cannot_be_loaded_is_wrong(
    tmp_path: Path, torch: str, timeout_s: float, words: str
) -> None:
    (tmp_path / "torch.py").write_text(torch)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with pytest.raises(TorchFailedError, match=words):
        facts_in_child(environ, timeout_s)
    if timeout_s > 1:
        first, second = torch_and_gpus(environ, [])
        assert (first.check, first.verdict, second.check) == ("torch", "wrong", "gpus")
        assert f"torch cannot be loaded: {words}" in first.evidence


@pytest.mark.slow
def test_a_module_of_the_working_folder_does_not_make_torch_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "random.py").write_text("raise RuntimeError('imported')")
    monkeypatch.chdir(tmp_path)
    assert facts_in_child(os.environ)["version"]


def test_a_deleted_working_folder_is_not_called_a_wrong_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tmp_path.rmdir()
    first, _ = torch_and_gpus(os.environ, [])
    assert "the working directory has been deleted" in first.evidence
    assert "reinstall" not in first.remedy
