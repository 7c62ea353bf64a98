"""Programs that call ``init_process_group`` themselves: they run, and every wait ends."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.launch.conftest import COMMAND, PROGRAMS, Run
from tests.promises import promise
from tests.warm import processes

import unisono
from unisono.runtime.launch import job, sign_of_life
from unisono.runtime.launch.job import ADDRESS, reserved_port

pytestmark = pytest.mark.slow

CLASSICS = "plain,none,env,overwrite,tcp,again,groups"


def run_script(name: str, *arguments: str) -> str:
    """Run a program as its worker would, and return what it prints."""
    sys.argv = [name, *arguments]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(PROGRAMS / name), run_name="__main__")
    return printed.getvalue()


@pytest.mark.parametrize("backend", ["gloo", "unisono"])
def test_programs_run_as_they_are(backend: str) -> None:
    done = unisono.launch(run_script, "groups.py", CLASSICS, backend, workers=2)
    assert done == ["done\n"] * 2


@pytest.mark.parametrize("backend", ["gloo", "unisono"])
def test_ranks_may_meet_in_a_file_also_in_one_that_was_left_over(
    tmp_path: Path, backend: str
) -> None:
    file = tmp_path / "a new file"
    for _ in range(2):
        done = unisono.launch(run_script, "groups.py", "file", backend, str(file), workers=2)
        assert done == ["done\n"] * 2
        file.write_bytes(left_over(file))


def left_over(file: Path) -> bytes:
    """Build what a rank 0 that was killed would have left behind in a file."""
    import torch.distributed as dist

    store = dist.FileStore(str(file), 3)
    for key in ("default_pg/0//0", "default_pg/0//rank_0", "default_pg/unisono"):
        store.set(key, "not what is here")
    return file.read_bytes()


def test_a_program_may_have_a_store_of_its_own_at_the_port_it_was_given() -> None:
    done = unisono.launch(run_script, "groups.py", "own store", "gloo", workers=2)
    assert done == ["done\n"] * 2


def test_without_a_network_ranks_meet_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (job, sign_of_life):
        monkeypatch.setattr(module, "ADDRESS", "192.0.2.1")
    with reserved_port(job.ADDRESS) as port:
        assert port.getsockname()[1] == 0
    done = unisono.launch(run_script, "groups.py", CLASSICS, "unisono", workers=2)
    assert done == ["done\n"] * 2


# What listens.


def listening(root: int) -> list[str]:
    """List the addresses at which a process or any below it listens."""
    found = []
    for process in (psutil.Process(root), *psutil.Process(root).children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):  # another worker may end meanwhile
            found += process.net_connections(kind="inet")
    return [one.laddr.ip for one in found if one.status == psutil.CONN_LISTEN]


def listening_in_a_group(root: int, backend: str) -> tuple[list[str], list[str], list[str]]:
    import torch
    import torch.distributed as dist

    before = listening(root)
    wait_for_all()
    dist.init_process_group(backend)
    dist.all_reduce(torch.ones(5))
    during = listening(root)
    dist.barrier()
    environment = [os.environ["MASTER_ADDR"], os.environ["GLOO_SOCKET_IFNAME"]]
    dist.destroy_process_group()
    return before, during, environment


def wait_for_all() -> None:
    from unisono.runtime.workers.context import context

    context().team().meet("test")


@promise("open-ports.5")
@pytest.mark.parametrize("backend", ["gloo", "unisono"])
def test_while_there_is_a_group_only_gloo_listens_and_on_loopback(backend: str) -> None:
    for before, during, environment in unisono.launch(
        listening_in_a_group, os.getpid(), backend, workers=2
    ):
        assert before == []
        assert set(during) == ({ADDRESS} if backend == "gloo" else set())
        assert environment == [ADDRESS, "lo"]


def train_and_look(root: int) -> list[str]:
    import torch

    def loss(model: Any, batch: Any) -> Any:
        assert listening(root) == []
        return model(batch[0]).pow(2).mean()

    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, loss, shards=2, seed=0)
    data = torch.utils.data.TensorDataset(torch.arange(24.0).reshape(8, 3))
    trainer.fit(data, batch_size=4, epochs=1)
    return listening(root)


@promise("open-ports.1")
def test_while_a_trainer_trains_nothing_listens() -> None:
    for seen in unisono.launch(train_and_look, os.getpid(), workers=2):
        assert seen == []


# What goes wrong.


@pytest.mark.parametrize(
    ("way", "error", "words"),
    [
        ("killed", unisono.errors.WorkerError, "worker 2 of 3 was killed by SIGKILL"),
        ("raised", KeyError, "the original"),
        ("killed before", unisono.errors.WorkerError, "worker 2 of 3 was killed by SIGKILL"),
        ("raised before", KeyError, "the original"),
        (
            "finished before",
            unisono.errors.PeerLostError,
            "worker 2 has ended, so that not all of them",
        ),
        ("vanished before", unisono.errors.WorkerError, "worker 2 of 3 left with exit status 0"),
        (
            "late",
            unisono.errors.WaitTimeoutError,
            r"\(port \d+\) within 1 s, but rank 2 has not",
        ),
        ("wrong size", ValueError, "`rank` must be below `world_size`, but is 2 of 2"),
    ],
)
def test_every_wait_for_the_others_of_a_group_ends_and_no_failure_is_hidden(
    way: str, error: type[BaseException], words: str
) -> None:
    for backend in ("gloo", "unisono") if way in ("killed", "raised") else ("gloo",):
        with pytest.raises(error, match=words):
            unisono.launch(run_script, "group_faults.py", way, backend, workers=3)


@promise("where-it-ends.6")
def test_a_group_makes_a_loss_final_and_that_is_said() -> None:
    def train_in_a_group() -> None:
        import torch.distributed as dist

        assert unisono.Trainer is not None  # from now on a lost worker is made up for
        dist.init_process_group("gloo")
        wait_for_all()
        if unisono.world().rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()

    with pytest.raises(unisono.errors.WorkerError) as raised:
        unisono.launch(train_in_a_group, workers=2)
    assert "they use a process group of torch.distributed, which no replacement" in str(
        raised.value
    )


# By the command, with processes of the program's own.


def test_one_that_leaves_a_group_early_is_named(unisono_run: Run) -> None:
    done = unisono_run("-n", 3, PROGRAMS / "group_faults.py", "finished", "gloo")
    assert "Worker 2 had come to the end of the program by then" in done.stderr
    done = unisono_run("-n", 3, PROGRAMS / "group_faults.py", "finished", "unisono")
    assert "worker 2 of 3 finished its program while workers 0, 1 waited" in done.stderr
    assert done.returncode == 1


def test_two_jobs_may_name_the_same_port_at_once() -> None:
    command = [*COMMAND, "-n", "2", str(PROGRAMS / "groups.py"), "overwrite", "gloo"]
    jobs = [
        processes.start(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    assert [job.communicate(timeout=60)[0] for job in jobs] == ["done\ndone\n"] * 2


@pytest.mark.long
def test_a_worker_may_start_ranks_of_its_own(unisono_run: Run) -> None:
    with own_ports(2) as ports:
        done = unisono_run("-n", 1, PROGRAMS / "spawning.py", "inherit gloo,env gloo", ports)
    assert (done.stdout.count("done"), done.stderr) == (2 * 2 * 2, "")


def test_plain_python_spawns_ranks_with_either_backend(tmp_path: Path) -> None:
    ways = ["env gloo", "tcp gloo", "file gloo", "env unisono", "tcp unisono", "file unisono"]
    with own_ports(len(ways)) as ports:
        command = [sys.executable, PROGRAMS / "spawning.py", ",".join(ways), ports]
        done = processes.run([*command, str(tmp_path / "a file")], timeout=100)
    assert (done.stdout.count("done"), done.stderr) == (2 * len(ways), "")


@contextlib.contextmanager
def own_ports(count: int) -> Iterator[str]:
    """Keep ports that a program may listen at and nobody else is given."""
    with contextlib.ExitStack() as stack:
        ports = [stack.enter_context(reserved_port()) for _ in range(count)]
        yield ",".join(str(port.getsockname()[1]) for port in ports)


# Models that end with their group.


@pytest.mark.parametrize("whose", ["torch", "unisono"])
def test_a_ddp_model_over_gloo_may_end_with_the_function_that_made_it(
    unisono_run: Run, whose: str
) -> None:
    # torch frees the group with the model and holds the GIL, for which gloo's threads may wait.
    done = unisono_run("-n", 2, PROGRAMS / "short_lived_models.py", whose, timeout=60)
    assert (done.stdout, done.returncode) == ("done\n" * 2, 0), done.stderr
