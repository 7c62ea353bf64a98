"""What the ranks learn when somebody calls something else, is late, leaves or dies."""

import gc
import re
import signal
import sys
import threading
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.c10d.options import options
from tests.descriptors import none_stay_open
from tests.warm.processes import run

from unisono.errors import MismatchError, PeerLostError, WaitTimeoutError
from unisono.runtime.workers import meeting_point


def all_reduce(numel=8, dtype=torch.float32, op=dist.ReduceOp.SUM):
    return lambda group: group.allreduce(
        [torch.ones(numel, dtype=dtype)], options(dist.AllreduceOptions, op=op)
    )


def broadcast(root):
    return lambda group: group.broadcast([torch.ones(8)], options(dist.BroadcastOptions, root))


def barrier(group):
    return group.barrier()


def all_gather(numel=8, dtype=torch.float32):
    return lambda group: group.all_gather_single(
        torch.ones(numel * group.size(), dtype=dtype), torch.ones(numel, dtype=dtype)
    )


def reduce_scatter(numel=8, dtype=torch.float32):
    return lambda group: group.reduce_scatter_single(
        torch.ones(numel, dtype=dtype), torch.ones(numel * group.size(), dtype=dtype)
    )


def all_to_all(dtype=torch.float32):
    return lambda group: group.all_to_all_single(
        torch.ones(4 * group.size(), dtype=dtype), torch.ones(4 * group.size(), dtype=dtype)
    )


MISMATCHES = {
    "collective": (all_reduce(), barrier, "all_reduce(SUM) of 8 float32 elements", "barrier"),
    "size": (all_reduce(8), all_reduce(9_000_000), "of 8 float32", "of 9,000,000 float32"),
    "dtype": (all_reduce(8), all_reduce(8, torch.int64), "8 float32", "8 int64"),
    "reduction": (all_reduce(), all_reduce(op=dist.ReduceOp.MAX), "(SUM)", "(MAX)"),
    "two of a kind": (
        all_gather(),
        reduce_scatter(),
        "all_gather of 8",
        "reduce_scatter(SUM) of 8",
    ),
    "size to gather": (all_gather(5), all_gather(7), "all_gather of 5", "all_gather of 7"),
    "size to scatter": (reduce_scatter(5), reduce_scatter(7), "of 5 float32", "of 7 float32"),
    "dtype to exchange": (all_to_all(), all_to_all(torch.int16), "of float32", "of int16"),
    "dtype to gather": (all_gather(), all_gather(dtype=torch.bool), "8 float32", "8 bool"),
    "shape": (
        all_reduce((2, 3)),
        all_reduce((3, 2)),
        "of 6 float32 elements in the shape (2, 3)",
        "of 6 float32 elements in the shape (3, 2)",
    ),
    "dimensions": (all_reduce((2, 3)), all_reduce(6), "in the shape (2, 3)", "6 float32 elements"),
    "a large shape": (
        all_reduce((1, 70_000)),
        all_reduce((70_000, 1)),
        "70,000 float32 elements in the shape (1, 70000)",
        "70,000 float32 elements in the shape (70000, 1)",
    ),
    "root": (broadcast(0), broadcast(1), "with root 10", "with root 11"),
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("difference", MISMATCHES)
def test_every_rank_learns_of_a_mismatch_and_the_group_lives_on(as_ranks, difference, world_size):
    first, second, one, other = MISMATCHES[difference]

    def work(group, rank):
        with pytest.raises(MismatchError) as caught:
            (second if rank == 1 else first)(group)
        tensor = torch.tensor([1.0 + rank])
        group.allreduce(tensor)
        return str(caught.value), tensor.item()

    for message, total in as_ranks(world_size, work):
        assert one in message
        assert other in message
        assert "rank 11" in message
        assert total == world_size * (world_size + 1) / 2


def test_the_others_learn_that_a_rank_s_arguments_were_refused(as_ranks):
    def work(group, rank):
        outputs = [torch.ones(8) for _ in range(3)]
        own = torch.ones(9 if rank == 1 else 8)
        with pytest.raises(ValueError if rank == 1 else MismatchError) as caught:
            group.allgather([outputs], [own])
        group.barrier()
        return str(caught.value)

    messages = as_ranks(3, work)
    assert "have 9 and 8" in messages[1]
    for message in (messages[0], messages[2]):
        assert "rank 11 to a call with wrong arguments" in message


def test_ranks_must_agree_on_what_goes_from_one_to_another(as_ranks):
    def work(group, rank):
        given = [torch.ones(3), torch.ones(4)]
        taken = [torch.ones(3), torch.ones(5 if rank == 1 else 3)]
        with pytest.raises(MismatchError) as caught:
            group.alltoall(taken, given)
        return str(caught.value)

    for message in as_ranks(2, work):
        assert "rank 10 sends 4 elements to rank 11, which expects 3" in message


@pytest.mark.parametrize("root", [-1, 2])
@pytest.mark.parametrize(
    "call",
    [
        lambda group, root: broadcast(root)(group),
        lambda group, root: group.reduce([torch.ones(8)], options(dist.ReduceOptions, root)),
        lambda group, root: group.gather([], [torch.ones(8)], options(dist.GatherOptions, root)),
        lambda group, root: group.scatter([torch.ones(8)], [], options(dist.ScatterOptions, root)),
        lambda group, root: group.send([torch.ones(8)], root, 0),
        lambda group, root: group.recv([torch.ones(8)], root, 0),
    ],
    ids=["broadcast", "reduce", "gather", "scatter", "send", "recv"],
)
def test_a_rank_that_the_group_does_not_have_is_refused(as_ranks, call, root):
    def work(group, rank):
        with pytest.raises(ValueError, match=f"one of the group's ranks, 0 to 1, but is {root}"):
            call(group, root)
        return group.barrier().wait()

    results = as_ranks(2, work)
    # Each tells the other; whoever comes second may learn that first.
    assert all(result is True or isinstance(result, MismatchError) for result in results), results


@pytest.mark.slow
def test_who_is_late_is_named_with_the_call_and_where_it_was_last_seen(as_ranks, monkeypatch):
    monkeypatch.setenv("UNISONO_NOTICE_AFTER", "0.5")
    said, is_over = [], threading.Event()
    monkeypatch.setattr(meeting_point, "say", said.append)
    monkeypatch.setattr(meeting_point, "SLEEP_AT_MOST_S", 0.01)

    def work(group, rank):
        group.barrier()
        if rank == 2:
            is_over.wait(20)
            return None
        try:
            group.allreduce(torch.ones(1024))
        except WaitTimeoutError as error:
            return error
        except PeerLostError as error:  # the other one gave up a moment earlier
            return error
        finally:
            is_over.set()

    errors = as_ranks(3, work, timeout_s=1.0)[:2]
    late = next(error for error in errors if isinstance(error, WaitTimeoutError))
    assert late.missing == (12,)
    assert re.search(
        r"in all_reduce\(SUM\) of 1,024 float32 elements \(call 3\) has waited .*"
        r"rank 12 \(last seen in barrier, call 2\)",
        str(late),
    )
    assert all("rank 12" in str(error) for error in errors)
    assert re.fullmatch(
        r"rank 10 in all_reduce\(SUM\) of 1,024 float32 elements \(call 3\) has waited "
        r"[\d.]+ s for rank 12 \(last seen in barrier, call 2\)\.",
        *[line for line in said if "(call 3)" in line],
    )


def test_a_call_may_have_a_time_limit_of_its_own(as_ranks):
    def work(group, rank):
        if rank == 0:
            limited = options(dist.BarrierOptions)
            limited.timeout = timedelta(seconds=0.05)
            with pytest.raises(WaitTimeoutError):
                group.barrier(limited)
            with pytest.raises(PeerLostError, match="half-way: every rank must come to barrier"):
                group.barrier()
        else:
            group.recv([torch.ones(1)], 0, 0).wait(timedelta(seconds=30))

    assert isinstance(as_ranks(2, work)[1], PeerLostError)


def test_a_monitored_barrier_names_who_has_not_come_in_its_time(as_ranks):
    is_over = threading.Event()

    def work(group, rank):
        if rank == 1:
            return is_over.wait(20)
        with pytest.raises(WaitTimeoutError) as failed:
            group.monitored_barrier(timedelta(seconds=0.05), wait_all_ranks=True)
        is_over.set()
        return failed.value.missing

    assert as_ranks(2, work) == [(11,), True]


def test_who_leaves_is_not_waited_for(as_ranks):
    def work(group, rank):
        if rank == 1:
            group.shutdown()
        else:
            group.barrier()

    error = as_ranks(2, work)[0]
    assert isinstance(error, PeerLostError)
    assert error.rank == 11
    assert "it has destroyed the process group" in str(error)


def test_an_error_on_one_rank_reaches_the_others_with_its_reason(as_ranks):
    def work(group, rank):
        if rank == 1:
            group.member.board.mine = None  # whatever goes wrong half-way
        group.allreduce(torch.ones(4))

    errors = as_ranks(3, work)
    assert isinstance(errors[1], TypeError)
    for error in (errors[0], errors[2]):
        assert isinstance(error, PeerLostError)
        assert "NoneType" in str(error)


def check_survivors(ended):
    assert ended[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        assert ended[rank].returncode == 0, ended[rank].stdout
        assert "rank 1" in ended[rank].stdout
        assert re.search(r"its process \d+ has ended", ended[rank].stdout)


@pytest.mark.slow
def test_survivors_of_a_kill_name_who_died(run_ranks):
    check_survivors(run_ranks("killed.py", 3, "elsewhere"))


@pytest.mark.slow
def test_the_file_that_a_crash_left_can_be_used_again(run_ranks):
    for _ in range(2):
        check_survivors(run_ranks("killed.py", 3, "together"))


@pytest.mark.slow
def test_a_program_that_forgets_to_destroy_its_group_ends_well():
    code = """
import unisono, torch, torch.distributed as dist
dist.init_process_group("unisono", store=dist.HashStore(), rank=0, world_size=1)
tensor = torch.ones(100_000)
dist.all_reduce(tensor)
work = dist.barrier(async_op=True)
"""
    ended = run([sys.executable, "-c", code])
    assert (ended.returncode, ended.stderr) == (0, "")


def test_abort_reaches_a_thread_that_waits(as_ranks):
    def work(group, rank):
        if rank == 0:
            threading.Timer(0.1, group.abort).start()
            with pytest.raises(PeerLostError, match="this one has ended"):
                group.barrier()
        else:
            with pytest.raises(PeerLostError, match="the process group was aborted"):
                group.recv([torch.ones(1)], 0, 0).wait()
            threading.Timer(0.1, group.abort).start()
            with pytest.raises(PeerLostError, match="this one has ended"):
                group.recv([torch.ones(1)], 1, 0).wait()

    assert as_ranks(2, work) == [None, None]


def test_only_dense_cpu_tensors_are_taken(as_ranks):
    def work(group, rank):
        with pytest.raises(TypeError, match="to_dense"):
            group.allreduce(torch.eye(3).to_sparse())
        with pytest.raises(TypeError, match="meta"):
            group.allreduce(torch.ones(3, device="meta"))
        with pytest.raises(TypeError, match=r"no AVG of torch.bool .* be moved but not reduced"):
            all_reduce(3, torch.bool, dist.ReduceOp.AVG)(group)
        for dtype in (torch.uint16, torch.float8_e5m2):
            with pytest.raises(TypeError, match=r"no SUM of .* be moved but not reduced"):
                all_reduce(3, dtype)(group)
        with pytest.raises(TypeError, match="one dtype"):
            group.all_gather_single(torch.ones(3), torch.ones(3).double())

    assert as_ranks(1, work) == [None]


def test_a_work_that_only_torchs_cpp_part_has_can_be_waited_for(as_ranks):
    def work(group, rank):
        tensor = torch.ones(1)
        done = weakref.ref(group.allreduce(tensor))
        gc.collect()
        assert done() is not None  # else waiting for what is left of it would never end

    assert as_ranks(2, work) == [None, None]


def mappings():
    with open("/proc/self/maps") as maps:
        return {line for line in maps if "unisono-c10d" in line}


def test_a_group_leaves_neither_mappings_nor_descriptors(as_ranks):
    def work(group, rank):
        group.allreduce(torch.ones(1000))
        group.send([torch.ones(10)], 1 - rank, 0)
        group.recv([torch.ones(10)], 1 - rank, 0).wait()
        assert mappings() - before

    gc.collect()  # what failures of other tests still hold
    before = mappings()
    with none_stay_open():
        assert as_ranks(2, work) == [None, None]
    assert not mappings() - before
