"""Runs with a URL for a directory: wiped machines, and stores that are slow or hang.

The slow store is a package of its own, as file systems are that fsspec finds by entry points.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from tests.promises import promise

from unisono.runtime.checkpoint.remote import local_folder
from unisono.runtime.checkpoint.run_directory import RunDirectory

pytestmark = pytest.mark.slow
PROGRAM = Path(__file__).with_name("resumable.py")
LAUNCHED = (sys.executable, "-m", "unisono", "run", "-n", "2")

SLOW = """
import os, time
from fsspec.implementations.local import LocalFileSystem

class Slow(LocalFileSystem):
    protocol = "slow"

    def put_file(self, path, there, **options):
        time.sleep(float(os.environ["STORE_SECONDS"]))
        super().put_file(path, there.removeprefix("slow://"), **options)

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(str(path).removeprefix("slow://"))
"""


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    site = tmp_path / "site"
    facts = site / "slow-1.dist-info"
    facts.mkdir(parents=True)
    (site / "slow_store.py").write_text(SLOW)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: slow\nVersion: 1\n")
    (facts / "entry_points.txt").write_text("[fsspec.specs]\nslow = slow_store:Slow\n")
    monkeypatch.setenv("PYTHONPATH", f"{site}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "disk"))
    return dict(os.environ)


def start(url: str, *starter: str, **environ: str) -> subprocess.Popen[str]:
    command = [*(starter or (sys.executable,)), str(PROGRAM), url]
    return subprocess.Popen(
        command, env={**os.environ, **environ}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    output, said = process.communicate(timeout=100)
    assert process.returncode == 0, said
    return str(json.loads(output)), said


def kill_all(process: subprocess.Popen[str]) -> None:
    """End every process of a run at once, as a machine that is gone does."""
    family = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for one in family:
        one.suspend()
    for one in family:
        one.kill()
    process.communicate()
    psutil.wait_procs(family)


def wipe_and_go_on(
    url: str, seed: int, disk: Path, starter: tuple[str, ...], there: Path | None = None
) -> tuple[int, str]:
    """Kill a run at a random moment, wipe its disk and start it again with another one.

    Args:
        there: what must have a checkpoint before; None: the disk.

    Returns:
        The step that it resumed from, and the digest.
    """
    process = start(url, *starter, XDG_CACHE_HOME=str(disk / "first"))
    begun = there or disk / "first" / "unisono" / local_folder(url).name
    while not RunDirectory(begun).ends() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(random.Random(seed).uniform(0.0, 6.0))
    kill_all(process)
    shutil.rmtree(disk / "first")
    digest, said = ended(start(url, *starter, XDG_CACHE_HOME=str(disk / "second")))
    step = said.partition("checkpoint step-")[2].partition(" ")[0]
    return int(step or 0), digest


@promise("nothing-lost.12")
@pytest.mark.parametrize("starter", [(), LAUNCHED], ids=["python", "unisono run"])
def test_a_run_whose_machine_is_wiped_goes_on_elsewhere(
    environ: dict[str, str], tmp_path: Path, starter: tuple[str, ...]
) -> None:
    plain, _ = ended(start(str(tmp_path / "plain")))
    there = tmp_path / "there"
    step, digest = wipe_and_go_on(f"file://{there}", 1, tmp_path / "disk", starter, there)
    assert digest == plain
    assert step > 0


def test_no_step_waits_for_a_store_that_hangs_and_the_end_does_for_a_known_time(
    environ: dict[str, str], tmp_path: Path
) -> None:
    plain, _ = ended(start(str(tmp_path / "plain")))
    url = f"slow://{tmp_path}/there"
    process = start(url, *LAUNCHED, STORE_SECONDS="1000", UNISONO_REMOTE_TIMEOUT="3")
    digest, said = ended(process)
    assert digest == plain
    assert (
        f"{url} lacks the checkpoints of steps 98, 99, 100, events.jsonl: it takes too long" in said
    )
    # The same folder has what is missing; at the next start it is copied.
    digest, said = ended(start(url, STORE_SECONDS="0"))
    assert digest == plain
    assert "lacks" not in said
    assert 100 in RunDirectory(tmp_path / "there").ends()


def test_a_second_job_is_refused_and_a_wrong_url_too(
    environ: dict[str, str], tmp_path: Path
) -> None:
    url = f"slow://{tmp_path}/there"
    first = start(url, STORE_SECONDS="1000")
    while not (tmp_path / "there" / "owner.json").exists():
        time.sleep(0.05)
    second = start(url, STORE_SECONDS="0")
    assert "a run directory must belong to one job at a time, but" in second.communicate()[1]
    kill_all(first)
    wrong = start("nothing://bucket/run")
    assert "nothing://bucket/run cannot: ValueError: Protocol not known" in wrong.communicate()[1]
    assert second.returncode == wrong.returncode == 1
