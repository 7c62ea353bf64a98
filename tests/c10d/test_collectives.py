"""The backend as torch's programs use it, in real processes."""

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_every_collective_gives_gloos_bits_or_the_trees(run_ranks, world_size):
    for rank, ended in enumerate(run_ranks("against_gloo.py", world_size)):
        assert ended.returncode == 0, f"rank {rank}: {ended.stdout}"


@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 3])
def test_ddp_fsdp_meshes_and_pipelines_run_on_it(run_ranks, world_size):
    for rank, ended in enumerate(run_ranks("torch_on_top.py", world_size)):
        assert ended.returncode == 0, f"rank {rank}: {ended.stdout}"
