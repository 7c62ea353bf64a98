"""What starts a program on a cluster: correct by the tools' own standards, and it really trains."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.warm import processes

from unisono.runtime.checkpoint.run_directory import RunDirectory

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "cluster"
SBATCH, MANIFEST = FOLDER / "train.sbatch", FOLDER / "trainjob.yaml"
LINTERS = {
    "shellcheck": [SBATCH],
    "yamllint": ["--strict", MANIFEST],
    "hadolint": [FOLDER / "Containerfile"],
}

SRUN = """#!/usr/bin/env python3
import os, subprocess, sys
at = sys.argv.index("python")
assert sys.argv[1:at] == ["--distribution=block", "--cpus-per-task=1", "--kill-on-bad-exit=1"]
step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
tasks = [
    subprocess.Popen(
        [os.environ["PYTHON"], *sys.argv[at + 1 :]],
        env={**os.environ, **step, "SLURM_PROCID": rank, "SLURM_LOCALID": rank},
    )
    for rank in "01"
]
sys.exit(max(task.wait() for task in tasks))
"""


@pytest.mark.parametrize("linter", LINTERS)
def test_a_linter_has_nothing_to_say(linter: str) -> None:
    command = Path(sys.executable).with_name(linter)
    done = subprocess.run([command, *LINTERS[linter]], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.slow  # to load the operator's models
def test_the_operator_knows_each_field_of_the_manifest() -> None:
    from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob

    _, found = yaml.safe_load_all(MANIFEST.read_text())
    job = TrainerV1alpha1TrainJob.from_dict(found)
    assert job.to_dict() == found  # a field that it does not know would be gone
    assert (job.api_version, job.spec.runtime_ref.name) == (
        "trainer.kubeflow.org/v1alpha1",
        "torch-distributed",
    )


def test_what_the_manifest_mounts_is_claimed_in_it() -> None:
    claim, job = yaml.safe_load_all(MANIFEST.read_text())
    text = str(job["spec"])
    assert claim["kind"] == "PersistentVolumeClaim"
    assert f"'claimName': '{claim['metadata']['name']}'" in text
    (mount,) = re.findall("'mountPath': '(.*?)'", text)
    assert f"--directory={mount}/" in text


def digests(output: str) -> set[str]:
    return set(re.findall(r"digest (\w+)", output))


@pytest.mark.slow
def test_the_batch_script_trains_with_tasks_of_slurm(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "1"}
    environ = {**os.environ, **slurm, "PYTHON": sys.executable}
    environ["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    options = [FOLDER / "train.py", "--epochs", "1", "--directory", tmp_path / "a run"]
    done = subprocess.run(
        ["bash", SBATCH, *options], env=environ, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    alone = processes.run([sys.executable, FOLDER / "train.py", "--epochs", "1"], check=True)
    assert digests(done.stdout) == digests(alone.stdout) != set()
    assert "on 2 workers" in done.stdout
    assert [entry.step for entry in RunDirectory(tmp_path / "a run").entries()] == [23]
