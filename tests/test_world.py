"""Who am I? One row for each thing that launchers say, and each that is refused."""

import pytest

from unisono.runtime.world import World, world

OURS = {"RANK": "1", "WORLD_SIZE": "3", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3"}
MPI = {
    "OMPI_COMM_WORLD_RANK": "2",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
JOB = {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "4"}
TASK = {**JOB, "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_LOCALID": "2", "SLURM_NODEID": "0"}
UNEVEN = {"SLURM_STEP_TASKS_PER_NODE": "3,1"}
FIRST = {**TASK, "SLURM_LOCALID": "0"}  # of its host
LAST = {**FIRST, "SLURM_STEP_NUM_TASKS": "7", "SLURM_PROCID": "6", "SLURM_NODEID": "3"}


def without(variables, *names):
    return {name: value for name, value in variables.items() if name not in names}


@pytest.mark.parametrize(
    ("environ", "expected", "started_by"),
    [
        ({}, World(), "nobody"),
        ({**OURS, "UNISONO_LINK": "5"}, World(1, 3, 1, 3), "unisono"),
        ({**OURS, "TORCHELASTIC_RUN_ID": "x"}, World(1, 3, 1, 3), "torchrun"),
        (OURS, World(1, 3, 1, 3), "somebody"),
        ({"RANK": "1", "WORLD_SIZE": "3"}, World(1, 3, 1, 3), "somebody"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, World(), "somebody"),
        ({**OURS, "RANK": "5", "WORLD_SIZE": "6"}, World(5, 6, 1, 3), "somebody"),
        ({"LOCAL_RANK": "1"}, World(), "nobody"),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, World(), "nobody"),
        # Open MPI
        (MPI, World(2, 4, 0, 2), "Open MPI"),
        ({**MPI, "PMIX_RANK": "2"}, World(2, 4, 0, 2), "Open MPI"),
        (without(MPI, *list(MPI)[2:]), World(2, 4, 2, 4), "Open MPI"),
        # its daemon is a task of Slurm, whose variables it hands on
        (
            {**TASK, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", **MPI},
            World(2, 4, 0, 2),
            "Open MPI",
        ),
        # Slurm
        (TASK, World(2, 4, 2, 4), "Slurm"),
        ({**TASK, "SLURM_STEP_NUM_TASKS": "3"}, World(2, 3, 2, 3), "Slurm"),
        ({**TASK, "PMIX_RANK": "2"}, World(2, 4, 2, 4), "Slurm"),
        ({**TASK, "SLURM_STEP_TASKS_PER_NODE": "4"}, World(2, 4, 2, 4), "Slurm"),
        ({**FIRST, "SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, World(2, 4, 0, 2), "Slurm"),
        ({**LAST, "SLURM_STEP_TASKS_PER_NODE": "2(x3),1"}, World(6, 7, 0, 1), "Slurm"),
        # in an allocation, but a single process
        (JOB, World(), "nobody"),
        ({**JOB, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, World(), "nobody"),
        ({**JOB, "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"}, World(), "nobody"),
        ({**JOB, "SLURM_PROCID": "0", "SLURM_STEP_ID": "batch"}, World(), "nobody"),
        # the inner launcher counts
        ({**TASK, **OURS, "TORCHELASTIC_RUN_ID": "x"}, World(1, 3, 1, 3), "torchrun"),
        ({**TASK, **MPI, **OURS, "UNISONO_LINK": "5"}, World(1, 3, 1, 3), "unisono"),
        ({**TASK, "RANK": "2", "WORLD_SIZE": "4"}, World(2, 4, 2, 4), "somebody"),
        ({**TASK, "RANK": "0", "WORLD_SIZE": "1"}, World(), "somebody"),
        # one of two, which the launcher confirms
        ({**TASK, "WORLD_SIZE": "4"}, World(2, 4, 2, 4), "Slurm"),
        ({**MPI, "RANK": "2"}, World(2, 4, 0, 2), "Open MPI"),
    ],
)
def test_a_place_is_found(environ, expected, started_by):
    found = world(environ)
    assert found == expected
    assert found.started_by == started_by


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANK": "1"}, "only RANK is .1.: set WORLD_SIZE too"),
        ({"WORLD_SIZE": "3"}, "only WORLD_SIZE is .3.: set RANK too"),
        ({**JOB, "SLURM_PROCID": "0", "WORLD_SIZE": "4"}, "only WORLD_SIZE is"),
        ({**TASK, "WORLD_SIZE": "5"}, "agree with Slurm, but is 5 instead of 4"),
        ({**MPI, "RANK": "1"}, "agree with Open MPI, but is 1 instead of 2"),
        ({**OURS, "RANK": "3"}, "`rank` must be .* is 3 of 3"),
        ({**OURS, "RANK": "-1"}, "`rank` must be .* is -1 of 3"),
        ({**OURS, "RANK": "first"}, "`RANK` must be a whole number, but is 'first'"),
        ({**OURS, "WORLD_SIZE": ""}, "`WORLD_SIZE` must be a whole number, but is ''"),
        ({**OURS, "LOCAL_RANK": "3"}, "`local_rank` must be .* is 3 of 3"),
        ({**OURS, "LOCAL_WORLD_SIZE": "4"}, "at most the number of all workers .3., but is 4"),
        (
            without({**OURS, "LOCAL_RANK": "0"}, "LOCAL_WORLD_SIZE"),
            "`LOCAL_WORLD_SIZE` must be set",
        ),
        (without({**OURS, "LOCAL_WORLD_SIZE": "2"}, "LOCAL_RANK"), "`LOCAL_RANK` must be set"),
        (without(MPI, "OMPI_COMM_WORLD_SIZE"), "`OMPI_COMM_WORLD_SIZE` must be set"),
        (without(MPI, "OMPI_COMM_WORLD_RANK"), "`OMPI_COMM_WORLD_RANK` must be set"),
        (without(MPI, "OMPI_COMM_WORLD_LOCAL_SIZE"), "`OMPI_COMM_WORLD_LOCAL_SIZE` must be set"),
        ({"PMIX_RANK": "2"}, "start it with `mpirun`"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "`PMI_SIZE` is 2"),
        (without(TASK, "SLURM_STEP_NUM_TASKS"), "`SLURM_STEP_NUM_TASKS` must be set"),
        (without(TASK, "SLURM_STEP_ID"), "`SLURM_STEP_ID` must be set"),
        (FIRST, "`SLURM_STEP_TASKS_PER_NODE` must be set"),
        ({**TASK, "SLURM_STEP_TASKS_PER_NODE": "2,1(y3)"}, "must be like `2.x3.,1`"),
        (without({**TASK, **UNEVEN}, "SLURM_NODEID"), "`SLURM_NODEID` must be set"),
        ({**TASK, **UNEVEN, "SLURM_NODEID": "2"}, "one of the 2 hosts .* but is 2"),
    ],
)
def test_what_is_missing_or_disagrees_is_refused(environ, words):
    with pytest.raises(ValueError, match=words):
        world(environ)
