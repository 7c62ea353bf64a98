"""Compiles the test accelerator: where is its library, or why is there none?

Once per source and version of torch, into a cache of the user's; whoever needs it meanwhile waits.
It takes about 25 seconds of a processor. torch's own way of building extensions would need ninja
and setuptools; here a compiler of C++ is enough.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

SOURCES = Path(__file__).with_name("device")
FLAGS = ("-std=c++20", "-O1", "-fPIC", "-w")
TORCH = Path(torch.__file__).parent


class CannotBuild(Exception):
    """Says why there is no test accelerator here. Final."""


@functools.cache
def library() -> Path:
    """Give the compiled library, and compile it where nobody has.

    Raises:
        CannotBuild: there is no compiler, it fails, or there is no folder to write to.
    """
    folder, name = cache_folder(), f"accelerator-{key()}"
    built = folder / f"{name}.so"
    if built.exists():
        return built
    compiler = find_compiler()
    with _alone(folder / f"{name}.lock"):
        if built.exists():
            return built
        build(compiler, built)
    return built


def key() -> str:
    """Name what a library is made from: sources, flags, torch and the kind of processor."""
    facts = [torch.__version__, str(torch.version.git_version), platform.machine(), *FLAGS]
    contents = [path.name.encode() + path.read_bytes() for path in sorted(SOURCES.iterdir())]
    return hashlib.sha256(repr((facts, contents)).encode()).hexdigest()[:16]


def cache_folder() -> Path:
    """Choose the first folder that can be written to: the user's cache, or one for this user."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    own = Path(tempfile.gettempdir()) / f"unisono-tests-{os.getuid()}"
    for folder in (caches / "unisono-tests", own):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError:
            continue
        # What others can write, this process should not load.
        if folder.stat().st_uid == os.getuid():
            return folder
    raise CannotBuild("no folder to write the test accelerator to: set XDG_CACHE_HOME")


def find_compiler() -> list[str]:
    """Find the command that compiles C++."""
    command = shlex.split(os.environ.get("CXX", "g++"))
    if not shutil.which(command[0]):
        raise CannotBuild(f"the test accelerator needs a compiler of C++, such as {command[0]}")
    return command


def build(compiler: list[str], built: Path) -> None:
    """Compile all sources as one, since torch's headers take longer than what is in them."""
    include, sources = TORCH / "include", sorted(SOURCES.glob("*.cpp"))
    flags = [*FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    for folder in (include, include / "torch/csrc/api/include"):
        flags += ["-isystem", str(folder)]
    libraries = [f"-L{TORCH / 'lib'}", "-ltorch_cpu", "-lc10"]
    with tempfile.TemporaryDirectory(dir=built.parent) as place:
        made = str(Path(place, built.name))
        command = [*compiler, *flags, "-shared", "-x", "c++", "-", "-o", made, *libraries]
        try:
            done = subprocess.run(
                command,
                input="".join(f'#include "{path}"\n' for path in sources),
                capture_output=True,
                text=True,
            )
        except OSError as error:
            raise CannotBuild(f"{compiler[0]} cannot be started: {error}") from error
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "error" in line]
            raise CannotBuild(f"the test accelerator does not compile: {errors[:3]}")
        os.replace(made, built)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Keep other processes out; the lock goes with the process, however that ends."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
