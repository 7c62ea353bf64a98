"""What a job is called: the same for all its workers, another for every other job."""

import itertools

import pytest

from unisono.runtime.workers.job_store import job_name, num_restarts, place_among_tasks, set_master
from unisono.runtime.world import OPEN_MPI, SLURM, SOMEBODY, TORCHRUN, World

TORCH = {
    "TORCHELASTIC_RUN_ID": "none",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
JOB = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
MASTER = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
NAMESPACE = {"PMIX_NAMESPACE": "prterun-host-1@1"}


def name_of(environ, started_by, world_size=3, rank=0, session=1):
    here = World(rank, world_size, rank, world_size, started_by)
    return job_name(environ, here, session=session).name


DIFFERENT = [
    (TORCH, TORCHRUN),
    ({**TORCH, "TORCHELASTIC_RUN_ID": "5"}, TORCHRUN),
    ({**TORCH, "MASTER_PORT": "29501"}, TORCHRUN),
    ({**TORCH, "TORCHELASTIC_RESTART_COUNT": "1"}, TORCHRUN),
    (JOB, SLURM),
    ({**JOB, "SLURM_JOB_ID": "8"}, SLURM),
    ({**JOB, "SLURM_STEP_ID": "1"}, SLURM),
    ({**JOB, "SLURM_RESTART_COUNT": "1"}, SLURM),
    (NAMESPACE, OPEN_MPI),
    ({"PMIX_NAMESPACE": "prterun-host-2@1"}, OPEN_MPI),
    ({"OMPI_MCA_ess_base_jobid": "99"}, OPEN_MPI),
    (MASTER, SOMEBODY),
    ({**MASTER, "MASTER_PORT": "1"}, SOMEBODY),
    ({**MASTER, "MASTER_ADDR": "127.0.0.1"}, SOMEBODY),
    ({}, SOMEBODY),
    ({}, SLURM),
]


def test_different_jobs_have_different_names():
    names = [name_of(*job) for job in DIFFERENT]
    names += [name_of(TORCH, TORCHRUN, world_size=4), name_of({}, SOMEBODY, session=2)]
    for one, other in itertools.combinations(names, 2):
        assert one != other


@pytest.mark.parametrize(("environ", "started_by"), [*DIFFERENT, (MASTER, SLURM)])
def test_all_workers_of_a_job_find_the_same_name_in_whatever_session(environ, started_by):
    own = {"RANK": "1", "SLURM_PROCID": "1", "SLURM_TASK_PID": "9", "PMIX_RANK": "1", "X": "y"}
    session = 2 if environ else 1  # which counts where nothing else is known
    there = name_of({**environ, **own}, started_by, rank=1, session=session)
    assert there == name_of(environ, started_by)


def test_a_name_says_what_it_was_made_of_and_is_fit_for_a_file():
    job = job_name({**MASTER, "MASTER_ADDR": "a/../b"}, World(0, 2, 0, 2, SOMEBODY), session=1)
    assert job.told == "MASTER_ADDR=a/../b, MASTER_PORT=29500"
    assert job.name.removeprefix("job-").isalnum()


def test_restarts_are_counted_by_the_launcher():
    counted = ({}, TORCH, {"TORCHELASTIC_RESTART_COUNT": "2"}, {"SLURM_RESTART_COUNT": "1"})
    assert list(map(num_restarts, counted)) == [0, 0, 2, 1]


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("gpu[09,12-14]-ib[1-2],cpu7", "gpu09-ib1"),
        ("cpu7,gpu[09,12-14]", "cpu7"),
        ("a-b.c,d", "a-b.c"),
        ("1.2.3.[089, 100-110]", "1.2.3.089"),
    ],
)
def test_tasks_of_slurm_meet_on_the_first_node_of_their_step(nodes, first):
    steps = [{"SLURM_JOB_ID": job, "SLURM_STEP_ID": step} for job in "12" for step in "01"]
    places = [place_among_tasks({**step, "SLURM_STEP_NODELIST": nodes}, SLURM) for step in steps]
    assert {node for node, _ in places} == {first}
    ports = {port for _, port in places}
    assert len(ports) == 4
    assert 15_000 <= min(ports) < max(ports) < 30_000


@pytest.mark.parametrize(
    ("uri", "address"),
    [
        ("463798272.0;tcp://192.0.2.2:57243;tcp6://[fd00::2]:52585", "192.0.2.2"),
        ("463798272.0;tcp://192.0.2.2,10.0.0.1:57243", "192.0.2.2"),
        ("463798272.0;tcp6://[fd00::2]:52585", "fd00::2"),
    ],
)
def test_tasks_of_open_mpi_meet_where_mpirun_is(uri, address):
    job = {"OMPI_MCA_orte_hnp_uri": uri, "PMIX_NAMESPACE": "463798273"}
    here, port = place_among_tasks(job, OPEN_MPI)
    assert here == address
    assert port != place_among_tasks({**job, "PMIX_NAMESPACE": "7"}, OPEN_MPI)[1]
    assert place_among_tasks({"PMIX_NAMESPACE": "7"}, OPEN_MPI) is None


@pytest.mark.parametrize(
    ("environ", "local_world_size", "is_set"),
    [
        ({"SLURM_STEP_NODELIST": "n[1-2]"}, 2, True),
        ({"SLURM_STEP_NODELIST": "n[1-2]"}, 4, False),
        ({"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_DISTRIBUTION": "arbitrary"}, 2, False),
        ({"SLURM_STEP_NODELIST": "n[1-2]", "MASTER_ADDR": "host"}, 2, False),
        ({"SLURM_STEP_NODELIST": "n1", "SLURM_HET_SIZE": "2"}, 2, False),
        ({}, 2, False),
    ],
)
def test_where_to_meet_is_set_where_it_is_known_and_needed(environ, local_world_size, is_set):
    seen = {**JOB, **environ}
    set_master(seen, World(1, 4, 1, local_world_size, SLURM))
    assert (seen != {**JOB, **environ}) is is_set
    assert not is_set or seen["MASTER_ADDR"] == "n1"
