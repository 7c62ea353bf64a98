"""A job on several hosts, as :class:`tests.chaos.jobs.Job` is one on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path

import psutil
from tests.chaos.jobs import PROGRAM
from tests.chaos.phases import read_phase
from tests.chaos.training import Options
from tests.hosts.virtual_hosts import virtual_hosts

_TO_FILE = ("sh", "-c", 'exec "$@" > "$0" 2>&1')


class HostsJob:
    """``unisono run --nnodes`` of the chaos tests' program, with `workers` on each host. Final."""

    def __init__(self, folder: Path, options: Options, workers: Sequence[int]) -> None:
        self._stack = ExitStack()
        self._hosts = self._stack.enter_context(virtual_hosts(len(workers)))
        self._outputs = [folder / f"output-{host.number}.txt" for host in self._hosts]
        self._phases = [Path(options.phases, str(host.number)) for host in self._hosts]
        self._servers: dict[int, psutil.Process] = {}
        self._host_of: dict[int, int] = {}  # by process
        self._pids: dict[int, int] = {}  # as their hosts know them
        place = ["--nnodes", str(len(workers)), "--rendezvous", f"{self._hosts[0].address}:29400"]
        for host, count in zip(self._hosts, workers, strict=True):
            self._phases[host.number].mkdir()
            own = replace(options, phases=str(self._phases[host.number]))
            run = [sys.executable, "-m", "unisono", "run", *place, "--node-rank", str(host.number)]
            flags = ["-n", str(count), "--restarts", "100000"]
            program = [str(PROGRAM), json.dumps(asdict(own))]
            host.start(*_TO_FILE, str(self._outputs[host.number]), *run, *flags, *program)

    @property
    def process(self) -> subprocess.Popen[str]:
        """What has been started on the first host, or on one that has failed."""
        started = [host.processes[0] for host in self._hosts]
        return next((one for one in started if one.poll()), started[0])

    @property
    def err(self) -> str:
        """All that was said."""
        return "\n".join(path.read_text() for path in self._outputs if path.exists())

    @property
    def results(self) -> list[dict[str, object]]:
        """What the workers that came to their end have found; none if torchrun began again."""
        if "PeerLostError" in self.err or "RendezvousError" in self.err:
            return []
        lines = (line.partition("result: ") for line in self.err.splitlines())
        return [json.loads(found) for before, word, found in lines if word and not before]

    def workers(self) -> list[psutil.Process]:
        """The processes of workers."""
        found = []
        for host in self._hosts:
            try:
                here = self._server(host.number).children()
                for one in here:
                    self._pids[one.pid] = _pid_on_host(one.pid)
                    self._host_of[one.pid] = host.number
                found += here
            except (psutil.Error, ValueError, OSError):
                continue
        return found

    def phase(self, process: psutil.Process) -> tuple[str, int]:
        """Tell the phase and the step of a worker."""
        return read_phase(self._phases[self._host_of[process.pid]], self._pids[process.pid])

    def wait(self, timeout_s: float) -> int:
        """Wait for the end on all hosts; returns an exit status."""
        deadline_s = time.monotonic() + timeout_s
        try:
            for host in self._hosts:
                host.processes[0].wait(max(0.0, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(f"it hangs:\n{self.err}") from None
        status = self.process.returncode
        self.end()
        return status

    def end(self) -> None:
        """End the hosts and all that runs there."""
        self._stack.close()

    def _server(self, host: int) -> psutil.Process:
        """Find the process that makes workers."""
        if host not in self._servers:
            started = psutil.Process(self._hosts[host].processes[0].pid)
            for one in started.children(recursive=True):
                if any("unisono.runtime.launch.forkserver" in word for word in one.cmdline()):
                    self._servers[host] = one
                    return one
            raise ValueError("there is none yet")
        return self._servers[host]


def _pid_on_host(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (pids,) = (line.split() for line in lines if line.startswith("NSpid:"))
    return int(pids[-1])
