"""Under a real Slurm: its controller and a daemon on each of the virtual hosts."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.hosts.conftest import MakeHosts
from tests.hosts.test_hosts import CLUSTER, FIT, TRAIN, Output, digests, trained
from tests.hosts.virtual_hosts import Host

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]

TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
WITHIN_S = 60.0
# As Debian's packages slurm-wlm and munge have it, without what needs a service manager.
CONFIGURATION = """
ClusterName=test
SlurmctldHost=host0
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/%n.pid
SelectType=select/linear
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SlurmdParameters=config_overrides
NodeName=host[0-{last}] CPUs=4
PartitionName=main Nodes=ALL Default=YES
"""
# The first process of a virtual host reaps nobody, and Slurm waits until a job's have gone.
REAPING = """
import ctypes, os, subprocess, sys
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
subprocess.Popen(sys.argv[1:])
while True:
    os.wait()
"""


class Slurm:
    """A cluster of virtual hosts; it ends with them. Final."""

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self.hosts, configuration = hosts, folder / "slurm.conf"
        configuration.write_text(CONFIGURATION.format(folder=folder, last=len(hosts) - 1))
        (folder / "state").mkdir()
        (folder / "key").write_bytes(os.urandom(1024))
        (folder / "key").chmod(0o400)
        # Python's folder is first, as a batch script calls `python`.
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environ = {"SLURM_CONF": str(configuration), "PATH": path}
        names = {"key-file": "key", "socket": "munge", "pid-file": "pid", "seed-file": "seed"}
        told = [f"--{option}={folder / name}" for option, name in names.items()]
        self._start(
            hosts[0], "munged", "--foreground", "--force", *told, f"--log-file={folder}/log"
        )
        wait_for((folder / "munge").exists)
        self._start(hosts[0], "slurmctld", "-D")
        for host in hosts:
            self._start(host, sys.executable, "-c", REAPING, "slurmd", "-D", "-N", host.name)
        wait_for(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D") == str(len(hosts)))

    def _start(self, host: Host, *command: str) -> Output:
        return Output(host.start(*command, environ=self.environ))

    def run(self, *command: str) -> str:
        """Run a command on the first host; give what it prints."""
        return self._start(self.hosts[0], *command).end().strip()

    def srun(self, tasks: str, *program: str) -> Output:
        """Start tasks; `tasks` are options of `srun`."""
        return self._start(self.hosts[0], "srun", *tasks.split(), *program)


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture
def slurm(make_hosts: MakeHosts, tmp_path: Path) -> Slurm:
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        pytest.skip(f"Slurm's {', '.join(missing)} are missing: install slurm-wlm and munge")
    return Slurm(make_hosts(2), tmp_path)


def test_tasks_need_no_variables_and_have_the_same_bits(slurm: Slurm) -> None:
    one = trained(slurm.hosts[:1], [3], "cnn")
    # The second has two tasks on one node and one on the other.
    for tasks in ("-N1 -n3", "-N2 -n3 --distribution=block", "-N2 -n2 --distribution=cyclic"):
        output = slurm.srun(tasks, "python", TRAIN, "cnn")
        output.has_ended_well()
        assert digests([output]) == one, tasks
    output = slurm.srun("-N2 -n2", "python", TRAIN, "cnn", "--steps", "10", "--pause", "0.3")
    output.await_line("rank 0 step 3")
    places = [place.rsplit(":", 1) for place in slurm.hosts[0].listening()]
    ours = {address for address, port in places if 15_000 <= int(port) < 30_000}
    assert ours == {slurm.hosts[0].address}  # rank 0, at that address alone
    output.has_ended_well()
    told = slurm.srun("-N2 -n4 --distribution=cyclic", "python", TRAIN, "cnn").end()
    assert "ranks on one host must be neighbours" in told


def test_a_node_that_has_a_loopback_address_for_its_own_name(slurm: Slurm) -> None:
    one = trained(slurm.hosts[:1], [2], "cnn")
    first, names = slurm.hosts[0], "/dev/shm/names"
    hosts = first.run("cat", names).replace(f"{first.address} host0", "127.0.1.1 host0")
    first.run("sh", "-c", f"printf '{hosts}' > {names}")  # as Debian's installer has it
    interface = f"UNISONO_INTERFACE={Host.interface}"
    output = slurm.srun("-N2 -n2", "env", interface, sys.executable, TRAIN, "cnn")
    output.has_ended_well()
    assert digests([output]) == one


def test_evaluation_and_prediction_are_the_same(slurm: Slurm, tmp_path: Path) -> None:
    found = []
    for tasks in ("-N1 -n3", "-N2 -n3 --distribution=block"):
        rows = str(tmp_path / "rows.safetensors")
        text = slurm.srun(tasks, "python", FIT, rows).has_ended_well()
        found.append(set(re.findall("digest .* of .*|rows .*", text)))
    assert found[0] == found[1]
    assert len(found[0]) == 2


def test_one_launcher_a_node_finds_the_others_and_replaces_workers(slurm: Slurm) -> None:
    one = trained(slurm.hosts[:1], [2], "cnn")
    command = ("UNISONO_FAULTS=kill:rank=3,step=2", "unisono", "run", "-n", "2", TRAIN, "cnn")
    output = slurm.srun("-N2 -n2", "env", *command, "--pause", "0.1")
    assert "rank 3 is replaced" in output.has_ended_well()
    assert digests([output]) == one


def test_a_job_that_is_requeued_loses_no_step(slurm: Slurm, tmp_path: Path) -> None:
    one = trained(slurm.hosts[:1], [2], "cnn", "--steps", "16")
    log, run = tmp_path / "log", tmp_path / "a run"
    options = ["--ntasks-per-node=1", f"--output={log}", str(CLUSTER / "train.sbatch")]
    program = [TRAIN, "cnn", "--steps", "16", "--pause", "0.3"]
    job = slurm.run(
        *("sbatch", "--parsable", "--nodes=2", *options, *program),
        *("--directory", str(run), "--every", "99"),
    )
    wait_for(lambda: log.exists() and "rank 1 step 4" in log.read_text())
    slurm.run("scontrol", "requeue", job)
    wait_for(lambda: slurm.run("squeue", "-h", "-o", "%T") == "PENDING")
    before = log.read_text()
    newest = max(map(int, re.findall(r"rank \d step (\d+)", before)))
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert int(checkpoint.name.partition("-")[2]) == newest < 16
    slurm.run("scontrol", "update", f"JobId={job}", "StartTime=now")  # else in two minutes
    wait_for(lambda: not slurm.run("squeue", "-h"))
    after = log.read_text()[len(before) :]
    assert set(re.findall(r"digest (\w+)", after)) == one
    assert min(map(int, re.findall(r"rank \d step (\d+)", after))) == newest + 1
