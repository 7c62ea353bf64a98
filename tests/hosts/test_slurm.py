"""Under a real Slurm, and under Open MPI in its jobs (`make test-clusters`)."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.hosts.conftest import MakeHosts
from tests.hosts.slurm import Job, Slurm, missing_tools, wait_for
from tests.hosts.test_hosts import CLUSTER, FIT, TRAIN, digests, trained
from tests.hosts.virtual_hosts import Host

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(300)]

MakeSlurm = Callable[[int], Slurm]
SUBMITTED = "tests/hosts/programs/submitted.py"
LONG = (TRAIN, "cnn", "--steps", "16", "--pause", "0.3")
MPI = "salloc -N2 mpirun --oversubscribe"
TORCHRUN = "srun torchrun --nnodes 2 --rdzv-backend c10d --rdzv-endpoint host0:29500 --rdzv-id 7"


@pytest.fixture
def make_slurm(make_hosts: MakeHosts, tmp_path: Path) -> MakeSlurm:
    if missing := missing_tools():
        pytest.skip(f"Slurm's {', '.join(missing)} are missing: install slurm-wlm and munge")
    return lambda number: Slurm(make_hosts(number), tmp_path)


@pytest.fixture
def slurm(make_slurm: MakeSlurm) -> Slurm:
    return make_slurm(2)


def undisturbed(slurm: Slurm, *program: str) -> set[str]:
    return trained(slurm.hosts[:1], [2], *(program or LONG)[1:4])


def test_tasks_need_no_variables_and_have_the_same_bits(slurm: Slurm) -> None:
    one = trained(slurm.hosts[:1], [3], "cnn")
    # The second has two tasks on one node and one on the other.
    for tasks in ("-N1 -n3", "-N2 -n3 --distribution=block", "-N2 -n2 --distribution=cyclic"):
        output = slurm.start(f"srun {tasks}", "python", TRAIN, "cnn")
        output.has_ended_well()
        assert digests([output]) == one, tasks
    output = slurm.start("srun -N2", "python", TRAIN, "cnn", "--steps", "10", "--pause", "0.3")
    output.await_line("rank 0 step 3")
    places = [place.rsplit(":", 1) for place in slurm.hosts[0].listening()]
    ours = {address for address, port in places if 15_000 <= int(port) < 30_000}
    assert ours == {slurm.hosts[0].address}  # rank 0, at that address alone
    output.has_ended_well()
    told = slurm.start("srun -N2 -n4 --distribution=cyclic", "python", TRAIN, "cnn").end()
    assert "ranks on one host must be neighbours" in told


def test_four_nodes_have_the_same_bits(make_slurm: MakeSlurm) -> None:
    slurm = make_slurm(4)
    output = slurm.start("srun -N4 unisono run -n 2", TRAIN, "cnn")
    output.has_ended_well()
    assert digests([output]) == trained(slurm.hosts[:1], [4], "cnn")


def test_open_mpi_in_a_job_needs_no_variables(slurm: Slurm) -> None:
    if missing := missing_tools("mpirun"):
        pytest.skip(f"Open MPI's {', '.join(missing)} is missing: install openmpi-bin")
    one = trained(slurm.hosts[:1], [2], "cnn")
    ways = ("-n 2 --map-by node python", "-N 2 python", "-N 1 unisono run -n 2")
    for way in ways:
        output = slurm.start(f"{MPI} {way}", TRAIN, "cnn")
        output.has_ended_well()
        assert digests([output]) == one, way
        assert output.text.count("digest") == (2 if way == ways[0] else 4)
    told = slurm.start(f"{MPI} -N 2 unisono run -n 2", TRAIN, "cnn").end()
    assert "must be started once on each host" in told
    assert "digest" not in told


def test_a_node_that_has_a_loopback_address_for_its_own_name(slurm: Slurm) -> None:
    one = trained(slurm.hosts[:1], [2], "cnn")
    first, names = slurm.hosts[0], "/dev/shm/names"
    hosts = first.run("cat", names).replace(f"{first.address} host0", "127.0.1.1 host0")
    first.run("sh", "-c", f"printf '{hosts}' > {names}")  # as Debian's installer has it
    interface = f"UNISONO_INTERFACE={Host.interface}"
    output = slurm.start("srun -N2", "env", interface, sys.executable, TRAIN, "cnn")
    output.has_ended_well()
    assert digests([output]) == one


def test_evaluation_and_prediction_are_the_same(slurm: Slurm) -> None:
    found = []
    for tasks in ("-N1 -n3", "-N2 -n3 --distribution=block"):
        text = slurm.start(f"srun {tasks}", "python", FIT).has_ended_well()
        found.append(set(re.findall("digest .* of .*|rows .*", text)))
    assert found[0] == found[1]
    assert len(found[0]) == 2


def test_one_launcher_a_node_finds_the_others_and_starts_workers_again(slurm: Slurm) -> None:
    one = trained(slurm.hosts[:1], [2], "cnn")
    command = ("UNISONO_FAULTS=kill:rank=3,step=2", "unisono", "run", "-n", "2", TRAIN, "cnn")
    output = slurm.start("srun -N2", "env", *command, "--pause", "0.1")
    told = "a worker of another host was lost; all workers start again"
    assert told in output.has_ended_well()
    assert digests([output]) == one


EXAMPLE = CLUSTER / "train.sbatch"
WAYS = {
    "the example": ("--nodes=2 --ntasks-per-node=1", EXAMPLE),
    "tasks of one node": ("--nodes=1 --ntasks=2", "srun --kill-on-bad-exit=1 python"),
    "a launcher a node": ("--nodes=2", "srun unisono run -n 2"),
    "one launcher": ("--nodes=1", "srun unisono run -n 2"),
    "torchrun": ("--nodes=2", f"{TORCHRUN} --nproc-per-node 1"),
}


def kept(folder: Path, *program: str, every: int = 999) -> list[str]:
    return [*(program or LONG), "--directory", str(folder / "a run"), "--every", str(every)]


@pytest.mark.parametrize("way", WAYS)
def test_a_job_that_is_requeued_loses_no_step(slurm: Slurm, tmp_path: Path, way: str) -> None:
    job = Job.submit(slurm, tmp_path, *WAYS[way], *kept(tmp_path))
    job.await_step(4)
    slurm.run("scontrol", "requeue", job.number)
    job.await_state("PENDING")
    assert "digest" not in job.text
    assert job.end() == undisturbed(slurm)
    job.check_each_step_was_done_once()


@pytest.mark.parametrize("way", [way for way in WAYS if way != "torchrun"])
def test_a_signal_of_the_users_loses_no_step(slurm: Slurm, tmp_path: Path, way: str) -> None:
    job = Job.submit(slurm, tmp_path, *WAYS[way], *kept(tmp_path))
    job.await_step(4)
    slurm.run("scancel", "--signal=USR1", job.number)
    wait_for(lambda: job.state in ("", "PENDING"))  # the example requeues itself
    assert "digest" not in job.text
    if not job.state:
        job = Job.submit(slurm, tmp_path, *WAYS[way], *kept(tmp_path))
    assert job.end() == undisturbed(slurm)
    job.check_each_step_was_done_once()


def test_a_job_that_is_cancelled_is_kept_and_stays_so(slurm: Slurm, tmp_path: Path) -> None:
    job = Job.submit(slurm, tmp_path, *WAYS["the example"], *kept(tmp_path))
    job.await_step(4)
    slurm.run("scancel", job.number)
    assert not job.end()
    again = Job.submit(slurm, tmp_path, *WAYS["tasks of one node"], *kept(tmp_path))
    assert again.end() == undisturbed(slurm)
    again.check_each_step_was_done_once()


def test_a_job_of_higher_priority_costs_no_step(slurm: Slurm, tmp_path: Path) -> None:
    job = Job.submit(slurm, tmp_path, *WAYS["the example"], *kept(tmp_path))
    job.await_step(4)
    assert slurm.run("srun", "-p", "urgent", "-N2", "hostname").count("host") == 2
    assert "digest" not in job.text
    assert job.end() == undisturbed(slurm)
    job.check_each_step_was_done_once()


def test_a_job_on_a_node_that_is_lost_goes_on_elsewhere(
    make_slurm: MakeSlurm, tmp_path: Path
) -> None:
    slurm = make_slurm(3)
    job = Job.submit(slurm, tmp_path, *WAYS["the example"], *kept(tmp_path, every=2))
    job.await_step(4)
    slurm.hosts[1].kill()
    job.await_state("PENDING")
    assert "digest" not in job.text
    assert job.end() == undisturbed(slurm)
    assert job.text.count("resuming from checkpoint") == 1


def test_a_time_limit_costs_no_step(slurm: Slurm, tmp_path: Path) -> None:
    program = (TRAIN, "cnn", "--steps", "120", "--pause", "0.5")
    how, script = WAYS["the example"]
    how += " --time=1 --signal=TERM@20"
    job = Job.submit(slurm, tmp_path, how, script, *kept(tmp_path, *program))
    job.await_step(2)
    job.await_state("PENDING")
    assert "digest" not in job.text
    assert job.end() == undisturbed(slurm, *program)
    job.check_each_step_was_done_once()


def test_submitit_requeues_a_job_once_its_checkpoint_is_written(
    slurm: Slurm, tmp_path: Path
) -> None:
    if importlib.util.find_spec("submitit") is None:
        pytest.skip("submitit is missing")
    number = slurm.run("python", SUBMITTED, str(tmp_path), *kept(tmp_path)).splitlines()[-1]
    job = Job(slurm, number, tmp_path)
    job.await_step(4)
    slurm.run("scancel", "--signal=USR2", number)
    job.await_state("PENDING")
    assert "digest" not in job.text
    assert job.end() == undisturbed(slurm)
    job.check_each_step_was_done_once()
