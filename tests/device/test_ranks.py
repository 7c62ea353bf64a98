"""A step on several accelerators, to its last bit, with workers lost wherever they meet."""

import functools

import pytest
from tests.device import ranks
from tests.workers.fake_launcher import MOMENTS, Death

from unisono.engine.exchange import host_memory, lanes
from unisono.errors import NonFiniteLossError
from unisono.runtime.workers import meeting_point
from unisono.runtime.workers.control_block import ControlBlock

pytestmark = pytest.mark.slow

FIRST_OF_A_STEP = 4  # meetings come before it


@pytest.fixture(autouse=True, scope="module")
def short_sleeps():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting_point, "SLEEP_AT_MOST_S", 0.005)
        yield


@functools.cache
def expected(optimizer, clip_norm=None):
    """What one worker comes to on the CPU."""
    control = ControlBlock.create(1)
    try:
        return ranks.run(control, kind="cpu", optimizer=optimizer, clip_norm=clip_norm)[0]
    finally:
        control.close()


def check(results, optimizer, clip_norm=None):
    for rank, result in results.items():
        if isinstance(result, BaseException):
            raise result
        assert result == expected(optimizer, clip_norm), rank


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("optimizer", ranks.OPTIMIZERS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_step_has_the_bits_of_one_worker_on_the_cpu(
    accelerator, control_of, world_size, optimizer, clip_norm
):
    results = ranks.run(control_of(world_size), optimizer=optimizer, clip_norm=clip_norm)
    assert len(results) == world_size
    check(results, optimizer, clip_norm)


@pytest.mark.parametrize(
    ("hosts", "optimizer"), [(((0,), (1, 2)), "adam"), (((0, 1), (2, 3)), "normed")], ids=str
)
def test_hosts_have_the_bits_of_one_worker_on_the_cpu(
    accelerator, monkeypatch, control_of, hosts, optimizer
):
    monkeypatch.setattr(host_memory, "BUCKET_BYTES", 512)
    monkeypatch.setattr(lanes, "_SLICE_BYTES", 1024)
    results = ranks.run(control_of(sum(map(len, hosts))), optimizer=optimizer, hosts=hosts)
    check(results, optimizer)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("hosts", [(), ((0,), (1, 2))], ids=str)
def test_divided_state_has_the_bits_of_one_worker_on_the_cpu(
    accelerator, monkeypatch, control_of, hosts, clip_norm
):
    monkeypatch.setattr(host_memory, "BUCKET_BYTES", 512)
    monkeypatch.setattr(lanes, "_SLICE_BYTES", 1024)
    results = ranks.run(control_of(3), clip_norm=clip_norm, hosts=hosts, is_sharded=True)
    check(results, "adam", clip_norm)


@pytest.mark.parametrize("moment", MOMENTS[1:3])
@pytest.mark.parametrize(("rank", "world_size"), [(0, 3), (2, 3), (0, 2), (1, 2)])
def test_a_worker_may_be_lost_at_every_meeting(accelerator, control_of, rank, world_size, moment):
    for meeting in range(FIRST_OF_A_STEP, FIRST_OF_A_STEP + 6):
        results = ranks.run(control_of(world_size), Death(rank, meeting, moment))
        assert results.keys() | {rank} == set(range(world_size))
        check(results, "adam")


def test_a_loss_that_is_not_finite_is_named_by_all(accelerator, control_of):
    results = ranks.run(control_of(2), bad=(2, 3))
    for result in results.values():
        assert isinstance(result, NonFiniteLossError), result
        assert (result.step, result.shard) == (2, 3)
