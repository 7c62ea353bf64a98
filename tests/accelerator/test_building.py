"""The accelerator is compiled once, and where it cannot be, tests are skipped with the reason."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.accelerator import building
from tests.accelerator.building import CannotBuild

ROOT = Path(__file__).parents[2]
library = building.library.__wrapped__  # it is asked once per process

COMPILES = """#!/bin/sh
echo started >> "$0.log"
cat > /dev/null
while [ "$1" != -o ]; do shift; done
echo compiled > "$2"
"""
FAILS = """#!/bin/sh
echo started >> "$0.log"
echo 'Python.h: note: nothing' >&2
echo 'tensor.h:3: error: no such thing' >&2
exit 1
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "a cache"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return folder / "unisono-tests"


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    """Make a compiler of a script, and tell how often it was started."""

    def make(script):
        path = tmp_path / "compiler"
        path.write_text(script)
        path.chmod(0o755)
        monkeypatch.setenv("CXX", str(path))
        return lambda: len(Path(f"{path}.log").read_text().splitlines())

    return make


def test_many_processes_compile_once(cache, compiler, monkeypatch):
    starts = compiler(COMPILES)
    with ThreadPoolExecutor(3) as threads:
        found = set(threads.map(lambda _: library(), range(3)))
    assert found == {cache / f"accelerator-{building.key()}.so"}
    assert [path.read_text() for path in found] == ["compiled\n"]
    assert starts() == 1
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".so"]
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    assert library() in found  # which needs no compiler any more


def test_without_a_compiler_the_reason_is_said(cache, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(CannotBuild, match=r"needs a compiler of C\+\+"):
        library()


def test_a_failure_is_said_and_not_repeated(cache, compiler):
    starts = compiler(FAILS)
    for _ in range(2):
        with pytest.raises(CannotBuild, match=r"does not compile: tensor\.h:3: error: no such"):
            library()
    assert starts() == 1
    assert not list(cache.glob("*.so"))
    compiler(COMPILES)
    failed = next(cache.glob("*.failed"))
    os.utime(failed, (0, 0))
    assert library().exists()


@pytest.mark.slow
def test_tests_are_skipped_with_the_reason(cache, tmp_path):
    environ = dict(os.environ, PATH="", TMPDIR=str(tmp_path))
    test = "tests/accelerator/test_accelerator.py::test_there_are_four_devices"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test],
        env=environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 skipped" in done.stdout
    assert "needs a compiler of C++" in done.stdout
