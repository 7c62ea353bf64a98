"""Runs whose `directory` is in a store of S3's protocol: moto's server, over s3fs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.train.test_remote_directory import ended, kill_all, start, wipe_and_go_on

PYTHON = os.environ.get("UNISONO_PEERS", "")
LAUNCHED = (PYTHON, "-m", "unisono", "run", "-n", "2")
URL = "s3://bucket/runs/a run"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not PYTHON, reason="moto and s3fs are heavy: `make test-peers`"),
]


class Server:
    """The store, in a process of its own; it keeps what it has while it is stopped."""

    def __init__(self) -> None:
        program = Path(__file__).parent / "programs" / "s3_server.py"
        self.environ = {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "a secret of tests",
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        self._process = subprocess.Popen(
            [PYTHON, program],
            env={**os.environ, **self.environ},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        self.environ["AWS_ENDPOINT_URL"] = self._process.stdout.readline().strip()

    def do(self, what: str) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "done\n"

    def names(self) -> list[str]:
        """List what is in the bucket."""
        code = "import s3fs; print(*s3fs.S3FileSystem().find('bucket'), sep=chr(10))"
        environ = {**os.environ, **self.environ}
        return subprocess.check_output([PYTHON, "-c", code], env=environ, text=True).splitlines()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    server = Server()
    for name, value in server.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "disk"))
    yield server
    server.close()


@pytest.mark.parametrize("starter", [(PYTHON,), LAUNCHED], ids=["python", "unisono run"])
def test_a_run_whose_machine_is_wiped_resumes_from_the_store(
    server: Server, tmp_path: Path, starter: tuple[str, ...]
) -> None:
    plain, _ = ended(start(str(tmp_path / "plain"), PYTHON))
    _, digest = wipe_and_go_on(URL, 3, tmp_path / "disk", starter)
    assert digest == plain
    assert sum(name.endswith("commit.json") for name in server.names()) == 3


def test_a_store_that_is_gone_for_a_while_gets_all_in_the_end(
    server: Server, tmp_path: Path
) -> None:
    process = start(URL, *LAUNCHED, SHARD_SECONDS="0.05")  # it is still under way then
    while not any("commit.json" in name for name in server.names()):
        time.sleep(0.1)
    server.do("stop")
    time.sleep(15.0)
    server.do("start")
    _, said = ended(process)
    assert said.count("cannot be written") == said.count("can be reached again") == 1
    assert "lacks" not in said.rpartition("can be reached again")[2]
    assert any("step-000000000100/commit.json" in name for name in server.names())


def test_a_store_that_is_gone_is_waited_for_and_told(server: Server) -> None:
    server.do("stop")
    process = start(URL, PYTHON, UNISONO_REMOTE_TIMEOUT="4")
    said = process.communicate(timeout=100)[1]
    assert process.returncode == 1
    assert "`directory` must be a URL that can be read and written when a run begins" in said


def test_half_an_upload_counts_for_nothing(server: Server, tmp_path: Path) -> None:
    _, _ = ended(start(URL, PYTHON))
    code = (
        "import s3fs; fs = s3fs.S3FileSystem(); at = 'bucket/runs/a run/checkpoints/step-%012d/';"
        "fs.rm(at % 100 + 'commit.json');"
        "fs.pipe(at % 99 + 'model.safetensors', fs.cat(at % 99 + 'model.safetensors')[:-1])"
    )
    subprocess.run([PYTHON, "-c", code], check=True)
    digest, said = ended(start(URL, PYTHON, XDG_CACHE_HOME=str(tmp_path / "other")))
    assert "step-000000000099 at s3://bucket/runs/a run is passed over: model.safetensors" in said
    assert "step-000000000098 was fetched" in said
    assert digest == ended(start(str(tmp_path / "plain"), PYTHON))[0]


def test_wrong_credentials_are_refused_at_once_and_shown_nowhere(server: Server) -> None:
    server.do("lock")
    process = start(URL, *LAUNCHED, AWS_SECRET_ACCESS_KEY="wrong and secret")
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 1
    assert "s3://bucket/runs/a run cannot: PermissionError" in said
    assert "wrong and secret" not in said
    without = {name: "" for name in server.environ if "KEY" in name}
    process = start(URL, PYTHON, AWS_EC2_METADATA_DISABLED="true", **without)
    assert "redential" in process.communicate(timeout=60)[1]


def test_a_second_job_on_another_machine_is_refused(server: Server, tmp_path: Path) -> None:
    first = start(URL, *LAUNCHED)
    while not any(server.names()):
        time.sleep(0.1)
    first.send_signal(signal.SIGSTOP)  # it does not end; the process that copies gives signs
    second = start(URL, PYTHON, XDG_CACHE_HOME=str(tmp_path / "other"))
    refusal = second.communicate(timeout=100)[1]
    kill_all(first)
    assert "a run directory must belong to one job at a time" in refusal


def test_no_bucket_is_made(server: Server) -> None:
    missing = start("s3://no-bucket/run", PYTHON)
    assert "s3://no-bucket/run cannot: FileNotFoundError" in missing.communicate(timeout=60)[1]
