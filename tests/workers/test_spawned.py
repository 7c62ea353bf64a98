"""Trainers in processes that torch has spawned, and in others that a program starts."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tests.promises import promise
from torch import nn

import unisono

REFUSED = r"\(index 1 of `torch.multiprocessing.spawn`\) has neither RANK nor WORLD_SIZE, and would"


def make_a_run(*_):
    model = nn.Linear(2, 2)
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return run._context.team.world.world_size


def make_a_run_alone(_):
    os.environ.update(RANK="0", WORLD_SIZE="1")
    make_a_run()


def make_a_run_in_a_group_of_one(index, folder):
    dist.init_process_group("gloo", f"file://{folder}/{index}", rank=0, world_size=1)
    make_a_run()
    dist.destroy_process_group()


def make_a_run_in_a_child(_):
    process = multiprocessing.get_context("fork").Process(target=make_a_run)
    process.start()
    process.join()
    assert process.exitcode == 0


@pytest.fixture(autouse=True, scope="module")
def torch_is_loaded_to_the_end():
    make_a_run()  # what torch loads late is loaded once, and not in each fork


def start(work, *args, nprocs=2):
    mp.start_processes(work, args, nprocs=nprocs, start_method="fork")


@promise("one-result.14")
def test_one_of_several_spawned_processes_is_refused_with_the_way_out():
    with pytest.raises(mp.ProcessRaisedException, match=REFUSED) as caught:
        start(make_a_run)
    assert "call `unisono.launch(fn, workers=…)` instead of `mp.spawn`" in str(caught.value)


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "x"},
        {"RANK": "0", "WORLD_SIZE": "1", "UNISONO_LINK": "3", "UNISONO_PID": "1"},
    ],
)
def test_what_a_launcher_says_of_one_task_does_not_hold_for_what_it_spawns(monkeypatch, environ):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(mp.ProcessRaisedException, match=r"instead of `mp\.spawn`"):
        start(make_a_run)


def test_a_process_that_is_spawned_alone_trains():
    start(make_a_run, nprocs=1)


@pytest.mark.slow
@pytest.mark.parametrize("work", [make_a_run_alone, make_a_run_in_a_child])
def test_spawned_processes_that_say_who_they_are_train(work):
    start(work)


def test_spawned_processes_with_groups_of_their_own_train(tmp_path):
    start(make_a_run_in_a_group_of_one, str(tmp_path))


def test_a_pool_trains_in_each_of_its_processes():
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        assert list(pool.map(make_a_run, range(4))) == [1] * 4
