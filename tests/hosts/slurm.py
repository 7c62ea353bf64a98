"""A real Slurm on virtual hosts: its controller, a daemon on each host, and jobs on them."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.hosts.test_hosts import Output
from tests.hosts.virtual_hosts import Host

TOOLS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
WITHIN_S = 100.0
_DONE = re.compile(r"rank (\d) step (\d+)")
# As Debian's packages slurm-wlm and munge have it, without what needs a service manager or cgroups.
# Like the latter, linuxproc sends signals to all descendants of a task.
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
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
SlurmdTimeout=10
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName=host[0-{last}] CPUs=4
PartitionName=main Nodes=ALL Default=YES PriorityTier=1
PartitionName=urgent Nodes=ALL PriorityTier=9
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
        as_root = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
        self.environ = {"SLURM_CONF": str(configuration), "PATH": path, **as_root}
        names = {"key-file": "key", "socket": "munge", "pid-file": "pid", "seed-file": "seed"}
        told = [f"--{option}={folder / name}" for option, name in names.items()]
        self._start(
            hosts[0], "munged", "--foreground", "--force", *told, f"--log-file={folder}/log"
        )
        wait_for((folder / "munge").exists)
        self._start(hosts[0], "slurmctld", "-D")
        for host in hosts:
            self._start(host, sys.executable, "-c", REAPING, "slurmd", "-D", "-N", host.name)
        idle = ("sinfo", "-h", "-p", "main", "-t", "idle", "-o", "%D")
        wait_for(lambda: self.run(*idle) == str(len(hosts)))

    def _start(self, host: Host, *command: str) -> Output:
        return Output(host.start(*command, environ=self.environ))

    def run(self, *command: str) -> str:
        """Run a command on the first host; give what it prints."""
        return self._start(self.hosts[0], *command).end().strip()

    def start(self, command: str, *program: str) -> Output:
        """Start a program by a command such as ``"srun -N2"``."""
        return self._start(self.hosts[0], *command.split(), *program)


class Job:
    """A batch job that trains and prints each step. Final."""

    def __init__(self, slurm: Slurm, number: str, folder: Path) -> None:
        self.slurm, self.number, self._folder = slurm, number, folder

    @classmethod
    def submit(cls, slurm: Slurm, folder: Path, how: str, script: Path | str, *program: str) -> Job:
        """Submit one; `script` may be what starts the program, such as ``"srun python"``."""
        if isinstance(script, str):
            text = f'#!/bin/bash\n#SBATCH --requeue --open-mode=append\nexec {script} "$@"\n'
            script = folder / "job.sh"
            script.write_text(text)
        told = f"sbatch --parsable --output={folder}/%j.out {how}".split()
        return cls(slurm, slurm.run(*told, str(script), *program), folder)

    @property
    def text(self) -> str:
        """What this job, and earlier ones, have printed."""
        return "".join(path.read_text() for path in sorted(self._folder.glob("*.out")))

    @property
    def state(self) -> str:
        return self.slurm.run("squeue", "-h", "-j", self.number, "-o", "%T")

    def await_step(self, step: int) -> None:
        wait_for(lambda: f"rank 1 step {step}\n" in self.text)

    def await_state(self, state: str) -> None:
        wait_for(lambda: self.state == state)

    def end(self) -> set[str]:
        """Wait for the end, also of later starts; give digests."""
        while self.state:
            wait_for(self._has_begun)
            wait_for(lambda: self.state in ("", "PENDING"))
        return set(re.findall(r"digest (\w+)", self.text))

    def _has_begun(self) -> bool:
        """Tell whether it has; one that was requeued does not have to wait for two minutes.

        But until what ran its script before has left: that script's end would be taken for its own.
        """
        if not self.slurm.run("sh", "-c", "pgrep slurmstepd; true"):
            self.slurm.run("scontrol", "update", f"JobId={self.number}", "StartTime=now")
        return self.state != "PENDING"

    def check_each_step_was_done_once(self) -> None:
        done = [(int(rank), int(step)) for rank, step in _DONE.findall(self.text)]
        ranks, steps = {rank for rank, _ in done}, {step for _, step in done}
        assert sorted(done) == [(r, s) for r in sorted(ranks) for s in range(1, max(steps) + 1)]


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def missing_tools(*more: str) -> list[str]:
    return [tool for tool in (*TOOLS, *more) if shutil.which(tool) is None]
