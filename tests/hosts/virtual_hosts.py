"""Several hosts on one machine, made of Linux namespaces; everything ends with this process.

::

    host 0 ── eth0 ═══════ h0 ┐
    host 1 ── eth0 ═══════ h1 ├ bridge, in namespaces of its own
    host 2 ── eth0 ═══════ h2 ┘

Each host has its own network, host name, processes, mounts and /dev/shm, so nothing but its link
connects it to the others: shared memory, pidfds and loopback end at its border. Files are shared,
as on a cluster's file system. The links are veth pairs, or cables that delay and lose packets
(``cable.py``); tc shapes what leaves a host.

No namespace has a name and no interface is in the machine's own network: when the process that
holds a namespace ends, so does all that is in it. The kernel ends those when this process ends.
"""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

TOOLS = ("unshare", "nsenter", "ip", "tc", "ss", "mount")
_NETWORK = "10.77.0"
_NAMES = "127.0.0.1 localhost\\n" + "".join(
    f"{_NETWORK}.{number + 1} host{number}\\n" for number in range(9)
)
_READY_S = 10.0
_PR_SET_PDEATHSIG = 1
_CABLE = os.path.join(os.path.dirname(__file__), "cable.py")
# What a host would not have from this machine.
_OWN = {
    "TMPDIR": "/dev/shm/tmp",
    # The tests, and the package that they are to test where that is not the installed one.
    "PYTHONPATH": os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH")))),
    "OMP_NUM_THREADS": "1",
}
_UNSHARE = ("unshare", "--fork", "--kill-child=KILL", "--mount-proc")
_SET_UP = (
    "mount --make-rprivate / && mount -t tmpfs tmpfs /dev/shm && mkdir -m 700 "
    "/dev/shm/tmp && printf '{names}' > /dev/shm/names && mount --bind /dev/shm/names /etc/hosts "
    "&& hostname {name} && ip link set lo up && exec sleep infinity"
)


@functools.cache
def why_not() -> str:
    """Say why hosts cannot be made here; empty if they can."""
    if os.geteuid():
        return "hosts are made of namespaces, which takes root"
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"hosts need the tools {', '.join(missing)}"
    command = (
        "ip link add name one type veth peer name two && ip link add bridge type bridge "
        "&& tc qdisc add dev one root tbf rate 1gbit burst 256kb latency 200ms"
    )
    tried = subprocess.run(
        ["unshare", "-n", "-m", "-u", "-i", "-p", "-f", "sh", "-c", command],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"namespaces do not work here: {tried.stderr.strip()}" if tried.returncode else ""


@dataclass(frozen=True, slots=True)
class Link:
    """How good each host's link is."""

    rate: str = ""  # of what the host sends, as tc has it; empty: as fast as the kernel
    delay_ms: float = 0.0  # what a packet takes over it, in each direction
    loss_percent: float = 0.0  # of the packets, in each direction


class Namespaces:
    """Namespaces of their own, held by a process that this one's end ends. Final."""

    def __init__(self, name: str) -> None:
        self.name = name
        kinds = ("--net", "--uts", "--ipc", "--mount", "--pid")
        self._holder = subprocess.Popen(
            [*_UNSHARE, *kinds, "sh", "-c", _SET_UP.format(name=name, names=_NAMES)],
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )
        self.pid = self._await_first()

    def command(self, *command: str) -> list[str]:
        """Say what to run to have a command run in here."""
        entering = ["-t", str(self.pid), "-n", "-u", "-i", "-m", "-p", f"--wdns={os.getcwd()}"]
        return ["nsenter", *entering, "--", *command]

    def run(self, *command: str) -> str:
        """Run a command in here; give what it prints."""
        done = subprocess.run(self.command(*command), capture_output=True, text=True, check=False)
        assert not done.returncode, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def kill(self) -> None:
        """End all that is in here, at once."""
        self._holder.kill()
        self._holder.wait()

    def _await_first(self) -> int:
        """Wait until the first process in here has set everything up."""
        children = f"/proc/{self._holder.pid}/task/{self._holder.pid}/children"
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            assert self._holder.poll() is None, f"{self.name} could not be set up"
            with open(children) as file:
                for pid in map(int, file.read().split()):
                    with open(f"/proc/{pid}/cmdline", "rb") as command:
                        if command.read().startswith(b"sleep\0"):
                            return pid
            time.sleep(0.01)
        raise AssertionError(f"{self.name} could not be set up in {_READY_S:.0f} s")


class Host(Namespaces):
    """One host, with an address on the network between the hosts. Final."""

    interface = "eth0"

    def __init__(self, number: int, switch: Namespaces, link: Link) -> None:
        super().__init__(f"host{number}")
        self.number, self._switch = number, switch
        self.address, self._port = f"{_NETWORK}.{number + 1}", f"h{number}"
        self.processes: list[subprocess.Popen[str]] = []
        self._cable: subprocess.Popen[str] | None = None
        if link.delay_ms or link.loss_percent:
            self._cable = self._long_cable(link)
        else:
            ends = ["name", self._port, "netns", str(switch.pid), "type", "veth"]
            ends += ["peer", "name", self.interface, "netns", str(self.pid)]
            subprocess.run(["ip", "link", "add", *ends], check=True, capture_output=True)
        switch.run("ip", "link", "set", self._port, "master", "bridge", "up")
        self.run("ip", "address", "add", f"{self.address}/24", "dev", self.interface)
        self.run("ip", "link", "set", self.interface, "up")
        if link.rate:
            shape = ["tbf", "rate", link.rate, "burst", "256kb", "latency", "200ms"]
            self.run("tc", "qdisc", "add", "dev", self.interface, "root", *shape)

    def start(
        self, *command: str, environ: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a program on this host; `environ` is what its environment has besides."""
        process = subprocess.Popen(
            self.command(*command),
            env={**os.environ, **_OWN, **(environ or {})},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def sent_bytes(self) -> int:
        """Count what this host has sent so far."""
        said = json.loads(self.run("ip", "-s", "-j", "link", "show", "dev", self.interface))
        count: int = said[0]["stats64"]["tx"]["bytes"]
        return count

    def listening(self) -> set[str]:
        """List where processes of this host listen, as ``address:port``."""
        lines = self.run("ss", "-ltnH").splitlines()
        return {line.split()[3] for line in lines}

    def cut(self) -> None:
        """Pull the cable."""
        self._switch.run("ip", "link", "set", self._port, "down")

    def restore(self) -> None:
        """Plug the cable in again."""
        self._switch.run("ip", "link", "set", self._port, "up")

    def _long_cable(self, link: Link) -> subprocess.Popen[str]:
        places = [str(self.pid), str(self._switch.pid), self.interface, self._port]
        cable = subprocess.Popen(
            [sys.executable, _CABLE, *places, str(link.delay_ms), str(link.loss_percent)],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=_end_with_parent,
        )
        assert cable.stdout is not None
        assert cable.stdout.readline() == "plugged in\n"
        return cable

    def close(self) -> None:
        """End the host and what runs on it."""
        self.kill()
        if self._cable is not None:
            self._cable.kill()
            self._cable.communicate()
        for process in self.processes:
            process.kill()
            process.communicate()


@contextmanager
def virtual_hosts(number: int, link: Link | None = None) -> Iterator[list[Host]]:
    """Make some hosts with a network between them, as long as a `with` block lasts."""
    with ExitStack() as stack:
        switch = Namespaces("switch")
        stack.callback(switch.kill)
        switch.run("ip", "link", "add", "bridge", "type", "bridge")
        switch.run("ip", "link", "set", "bridge", "up")
        hosts = []
        for one in range(number):
            hosts.append(Host(one, switch, link or Link()))
            stack.callback(hosts[-1].close)
        yield hosts


def torchrun(
    hosts: Sequence[Host],
    workers: Sequence[int],
    program: Sequence[str],
    *,
    elastic: str = "",
    environ: Mapping[str, str] | None = None,
) -> list[subprocess.Popen[str]]:
    """Start a program on hosts, so many workers on each, the way torch's users do.

    `elastic`: how many hosts may do, as ``"1:2"``; then torchrun starts the program again when some
    are lost.
    """
    torch_run = os.path.join(os.path.dirname(sys.executable), "torchrun")
    place = hosts[0].address
    common = ["--nnodes", str(len(hosts)), "--master-addr", place, "--master-port", "29500"]
    if elastic:
        common = ["--nnodes", elastic, "--rdzv-backend", "c10d", "--max-restarts", "3"]
        common += ["--rdzv-endpoint", f"{place}:29400", "--rdzv-id", "job"]
    return [
        host.start(
            torch_run,
            *common,
            f"--local-addr={host.address}",
            *([] if elastic else [f"--node-rank={host.number}"]),
            f"--nproc-per-node={count}",
            *program,
            environ=environ,
        )
        for host, count in zip(hosts, workers, strict=True)
    ]


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
