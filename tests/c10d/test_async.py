"""Calls with ``async_op=True``: nobody is held up by a rank that comes late, and order is kept."""

import functools
import random
import sys
import tempfile
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from tests.c10d.options import options
from tests.promises import promise
from tests.warm.processes import run
from torch._C._distributed_c10d import AllgatherOptions

from unisono.errors import MismatchError, PeerLostError, WaitTimeoutError
from unisono.runtime.c10d import execution, group_member
from unisono.runtime.c10d.execution import GroupWork
from unisono.runtime.c10d.group import Group


def all_reduce(group, tensor, *, is_async):
    return group.allreduce([tensor], options(dist.AllreduceOptions, is_async=is_async))


def broadcast(group, tensor, root, *, is_async):
    return group.broadcast([tensor], options(dist.BroadcastOptions, is_async=is_async, root=root))


def barrier(group, *, is_async):
    return group.barrier(options(dist.BarrierOptions, is_async=is_async))


def tell(group, other):
    group.send([torch.ones(1)], other, 0)


def be_told(group, other):
    group.recv([torch.ones(1)], other, 0).wait()


def with_rank_1_late(group, rank, call):
    """Make a call that goes on: rank 1 makes it once rank 0 has; gives what rank 0 can wait for."""
    if rank == 1:
        be_told(group, 0)
    going_on = call()
    if rank == 0:
        tell(group, 1)
    return going_on


def refused_barrier(group):
    """Come late, and to another call than rank 0; gives the error."""
    be_told(group, 0)
    with pytest.raises(MismatchError) as caught:
        barrier(group, is_async=False)
    return caught.value


def total(group, rank):
    """See that the group lives on."""
    tensor = torch.tensor([1.0 + rank])
    all_reduce(group, tensor, is_async=True).wait()
    return tensor.item()


def until_done(work):
    """Look, without being told of a failure, until it is done."""
    end = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("numel", [3, 300_000, 1_000_000])
def test_a_call_goes_on_while_somebody_waits_for_us_elsewhere(as_ranks, numel):
    def work(group, rank):
        tensor = torch.full((numel,), 1.0 + rank)
        if rank == 0:
            going_on = all_reduce(group, tensor, is_async=True)
            assert isinstance(going_on, GroupWork)
            assert not going_on.is_completed()
            assert not going_on.is_success()
            with pytest.raises(WaitTimeoutError, match=r"in the 0\.05 s that you wait for it"):
                going_on.wait(timedelta(seconds=0.05))
            tell(group, 1)
            assert going_on.wait()
            assert going_on.is_completed()
            assert going_on.is_success()
        else:
            be_told(group, 0)
            all_reduce(group, tensor, is_async=False)
        return tensor.unique().tolist()

    assert as_ranks(2, work) == [[3.0], [3.0]]


def test_two_groups_may_be_called_in_either_order(as_ranks):
    store = dist.HashStore()

    def work(group, rank):
        groups = [group, Group(store, rank, [20, 21], 30.0)]
        tensors = [torch.tensor([1.0 + rank]), torch.tensor([10.0 + rank])]
        order = [0, 1] if rank == 0 else [1, 0]
        works = [all_reduce(groups[which], tensors[which], is_async=True) for which in order]
        for one in works:
            one.wait()
        groups[1].shutdown()
        return torch.cat(tensors).tolist()

    assert as_ranks(2, work) == [[3.0, 21.0]] * 2


def test_calls_are_carried_out_in_their_order_whoever_is_late(as_ranks):
    """Random programs: the same calls on all ranks, each late and patient as chance wants it."""
    num_ranks, num_calls = 3, 60

    def expected(number):
        kind, root, numel = plan[number]
        values = [number + 100.0 * rank for rank in range(num_ranks)]
        return torch.full((numel,), sum(values) if kind == "all_reduce" else values[root])

    plan_of = random.Random(7)
    plan = [
        (
            plan_of.choice(["all_reduce", "broadcast"]),
            plan_of.randrange(3),
            plan_of.choice([1, 999]),
        )
        for _ in range(num_calls)
    ]

    def work(group, rank):
        chance = random.Random(rank)
        going_on, tensors = [], []
        for number, (kind, root, numel) in enumerate(plan):
            if chance.random() < 0.15:
                time.sleep(0.02)
            tensors.append(torch.full((numel,), number + 100.0 * rank))
            is_async = chance.random() < 0.7
            if kind == "all_reduce":
                made = all_reduce(group, tensors[-1], is_async=is_async)
            else:
                made = broadcast(group, tensors[-1], root, is_async=is_async)
            if not is_async:
                assert made.is_completed()
            going_on.append(made)
            if chance.random() < 0.2:
                going_on.pop(chance.randrange(len(going_on))).wait()
        for one in going_on:
            one.wait()
        return tensors

    for tensors in as_ranks(num_ranks, work):
        for number, tensor in enumerate(tensors):
            assert torch.equal(tensor, expected(number)), number


def test_a_call_that_waits_for_its_turn_sees_what_the_one_before_has_written(as_ranks):
    def work(group, rank):
        tensor = torch.full((4, 3), 1.0 + rank).t()
        gathered = torch.zeros(2, 3, 4).transpose(1, 2)
        parts = [gathered[0].t(), gathered[1].t()]
        if rank == 1:
            be_told(group, 0)
        works = [
            all_reduce(group, tensor, is_async=True),
            all_reduce(group, tensor, is_async=True),
            group.allgather([parts], [tensor], options(AllgatherOptions, is_async=True)),
        ]
        if rank == 0:
            tell(group, 1)
        for one in works:
            one.wait()
        return tensor.unique().tolist(), gathered.unique().tolist()

    assert as_ranks(2, work) == [([6.0], [6.0])] * 2


@pytest.mark.parametrize("made_while", ["the one before runs", "the helper ends it"])
def test_a_copy_is_made_when_it_is_the_turn_of_its_call(as_ranks, monkeypatch, made_while):
    """Whether a call has to wait for its turn may change after it was made."""
    carry_out, late = execution.Execution.carry_out, threading.local()

    def once_the_helper_is_idle(self, call, *, is_async):
        if getattr(late, "calls", 0):
            late.calls = 0
            self.finish(20.0)
        return carry_out(self, call, is_async=is_async)

    monkeypatch.setattr(execution.Execution, "carry_out", once_the_helper_is_idle)

    def work(group, rank):
        tensor = torch.full((4, 3), 1.0 + rank).t()  # its elements do not lie in order
        if rank == 1:
            be_told(group, 0)
        first = all_reduce(group, tensor, is_async=True)
        if rank == 0:
            tell(group, 1)
            late.calls = made_while == "the helper ends it"
        second = all_reduce(group, tensor, is_async=True)
        first.wait()
        second.wait()
        return tensor.unique().tolist()

    assert as_ranks(2, work) == [[6.0], [6.0]]


@pytest.mark.parametrize("shape", [(4,), (2, 2)])
def test_data_that_a_tensor_is_given_meanwhile_is_left_alone(as_ranks, shape):
    def work(group, rank):
        tensor, other = torch.full(shape, 1.0 + rank), torch.full(shape, 100.0)

        def call():
            going_on = all_reduce(group, tensor, is_async=True)
            tensor.data, other.data = other.data, tensor.data
            return going_on

        with_rank_1_late(group, rank, call).wait()
        return tensor.unique().tolist(), other.unique().tolist()

    assert as_ranks(2, work) == [([100.0], [3.0])] * 2


def test_denormals_are_treated_as_where_the_call_was_made(as_ranks):
    tiny = torch.tensor([0x000FFFFF], dtype=torch.int32)

    def work(group, rank):
        found = []
        try:
            for flushes in (False, True, False):
                torch.set_flush_denormal(flushes)
                tensor = tiny.clone().view(torch.float32)
                call = functools.partial(all_reduce, group, tensor, is_async=True)
                with_rank_1_late(group, rank, call).wait()
                found.append(tensor.view(torch.int32).item())
        finally:
            torch.set_flush_denormal(False)
        return found

    assert as_ranks(2, work) == [[2097150, 0, 2097150]] * 2


def test_a_future_is_complete_when_one_has_it(as_ranks):
    def work(group, rank):
        if rank == 1:
            time.sleep(0.05)
        tensor = torch.tensor([1.0 + rank])
        threads = []

        def then(future):
            threads.append(threading.current_thread())
            more = future.value()[0].clone()
            all_reduce(group, more, is_async=True).wait()
            return more.item()

        future = all_reduce(group, tensor, is_async=True).get_future().then(then)
        assert threads == [threading.current_thread()]
        return future.wait()

    assert as_ranks(2, work) == [6.0, 6.0]


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_mismatch_is_told_to_whoever_waits_or_asks_and_the_group_lives_on(as_ranks, is_asked):
    def work(group, rank):
        if rank == 1:
            error = refused_barrier(group)
        else:
            going_on = all_reduce(group, torch.ones(3), is_async=True)
            tell(group, 1)
            if is_asked:
                until_done(going_on)
            else:
                with pytest.raises(MismatchError):
                    going_on.wait()
            assert going_on.is_completed()
            assert not going_on.is_success()
            error = going_on.exception()
            with pytest.raises(MismatchError) as caught:
                going_on.get_future()
            assert caught.value is error
        return str(error), total(group, rank)

    for message, found in as_ranks(2, work):
        assert "all_reduce(SUM) of 3 float32" in message
        assert "barrier" in message
        assert found == 3.0


def test_what_was_called_before_a_mismatch_was_heard_of_is_not_carried_out(as_ranks):
    def work(group, rank):
        if rank == 1:
            refused_barrier(group)
        else:
            going_on = [all_reduce(group, torch.ones(n), is_async=True) for n in (3, 4)]
            tell(group, 1)
            until_done(going_on[-1])
            with pytest.raises(MismatchError, match="of 3 float32"):
                all_reduce(group, torch.ones(5), is_async=True)
            for one in going_on:
                with pytest.raises(MismatchError, match="of 3 float32"):
                    one.wait()
        return total(group, rank)

    assert as_ranks(2, work) == [3.0, 3.0]


def test_refused_arguments_keep_their_place_among_calls_that_go_on(as_ranks):
    def work(group, rank):
        tensor = torch.tensor([1.0 + rank])
        if rank == 0:
            first = all_reduce(group, tensor, is_async=True)
            with pytest.raises(TypeError):
                all_reduce(group, torch.eye(3).to_sparse(), is_async=True)
            tell(group, 1)
            first.wait()
        else:
            be_told(group, 0)
            all_reduce(group, tensor, is_async=False)
            with pytest.raises(MismatchError, match="rank 10 to a call with wrong arguments"):
                all_reduce(group, torch.ones(3), is_async=False)
        barrier(group, is_async=False)
        return tensor.item()

    assert as_ranks(2, work) == [3.0, 3.0]


def test_a_call_after_refused_arguments_has_patience(as_ranks):
    def work(group, rank):
        tensor = torch.tensor([1.0 + rank])
        if rank == 0:
            with pytest.raises(TypeError):
                all_reduce(group, torch.eye(3).to_sparse(), is_async=False)
            going_on = all_reduce(group, tensor, is_async=True)
            tell(group, 1)
            going_on.wait()
        else:
            be_told(group, 0)
            with pytest.raises(MismatchError):
                all_reduce(group, torch.ones(3), is_async=False)
            all_reduce(group, tensor, is_async=False)
        return tensor.item()

    assert as_ranks(2, work) == [3.0, 3.0]


def test_a_lost_rank_is_told_to_whoever_waits_and_to_later_calls(as_ranks):
    def work(group, rank):
        if rank == 1:
            be_told(group, 0)
            return
        going_on = [all_reduce(group, torch.ones(3), is_async=True) for _ in range(3)]
        tell(group, 1)
        with pytest.raises(PeerLostError, match="rank 11 never will") as caught:
            going_on[0].wait()
        assert caught.value.rank == 11
        for one in going_on[1:]:
            with pytest.raises(PeerLostError, match="this one has ended"):
                one.wait()
        with pytest.raises(PeerLostError, match="this one has ended"):
            barrier(group, is_async=True)

    assert as_ranks(2, work) == [None, None]


def test_who_leaves_waits_for_calls_that_go_on(as_ranks):
    def work(group, rank):
        tensor = torch.tensor([1.0 + rank])
        if rank == 0:
            broadcast(group, tensor, 0, is_async=True)
            all_reduce(group, tensor, is_async=True)
        else:
            time.sleep(0.1)
            broadcast(group, tensor, 0, is_async=False)
            all_reduce(group, tensor, is_async=False)
        return tensor  # and the group is left

    assert [tensor.item() for tensor in as_ranks(2, work)] == [2.0, 2.0]


@pytest.mark.parametrize("is_failing", [True, False])
def test_who_leaves_does_not_wait_for_ever(as_ranks, is_failing, monkeypatch):
    monkeypatch.setattr(group_member, "LATE_AT_MOST_S", 20.0 if is_failing else 0.1)
    is_over = threading.Event()

    def work(group, rank):
        if rank == 1:
            is_over.wait(15)
            barrier(group, is_async=False)  # rank 0 has come to it, though it has not waited
            with pytest.raises(PeerLostError, match="it has destroyed the process group"):
                all_reduce(group, torch.ones(3), is_async=False)
            return
        barrier(group, is_async=True)
        all_reduce(group, torch.ones(3), is_async=True)
        try:
            if is_failing:
                raise ZeroDivisionError
        except ZeroDivisionError:
            group.shutdown()
        else:
            group.shutdown()
        assert not is_over.is_set()
        is_over.set()

    assert as_ranks(2, work) == [None, None]


def test_leaving_reaches_a_thread_that_waits_at_once(as_ranks, monkeypatch):
    monkeypatch.setattr(group_member, "LATE_AT_MOST_S", 20.0)
    is_over = threading.Event()

    def work(group, rank):
        if rank == 1:
            assert is_over.wait(15)
        else:
            threading.Timer(0.1, group.shutdown).start()
            with pytest.raises(PeerLostError, match="this one has ended"):
                barrier(group, is_async=False)
            is_over.set()

    assert as_ranks(2, work) == [None, None]


def test_the_helper_ends_when_it_has_nothing_to_do(as_ranks, monkeypatch):
    monkeypatch.setattr(execution, "_HELPER_STAYS_S", 0.05)

    def helpers():
        return [thread for thread in threading.enumerate() if thread.name == "unisono-c10d"]

    def work(group, rank):
        for _ in range(2):
            if rank == 1:
                be_told(group, 0)
                barrier(group, is_async=False)
            else:
                going_on = barrier(group, is_async=True)
                assert len(helpers()) == 1
                tell(group, 1)
                going_on.wait()
                end = time.monotonic() + 10
                while helpers() and time.monotonic() < end:
                    time.sleep(0.01)
                assert not helpers()

    assert as_ranks(2, work) == [None, None]


ONCE_IT_CALLS = """
import os, signal, sys, threading, time
def send_once_it_calls(signum):
    # A timer would send it before the call where the machine is busy.
    def send():
        path, main = "", threading.main_thread().ident
        while "/unisono/runtime/c10d/" not in path:
            time.sleep(0.01)
            frame, path = sys._current_frames()[main], ""
            while frame:
                path, frame = path + frame.f_code.co_filename, frame.f_back
        time.sleep(0.2)
        os.kill(os.getpid(), signum)
    threading.Thread(target=send, daemon=True).start()
"""


TWO_RANKS = f"""{ONCE_IT_CALLS}
import torch, torch.distributed as dist, unisono
torch.set_num_threads(1)
rank = 0 if os.fork() else 1
dist.init_process_group("unisono", init_method="file://" + sys.argv[1], rank=rank, world_size=2)
"""


def run_two(code):
    with tempfile.TemporaryDirectory() as folder:
        return run([sys.executable, "-c", TWO_RANKS + code, f"{folder}/store"])


@pytest.mark.slow
def test_an_interrupted_call_that_waits_for_its_turn_ends_the_group():
    code = """
if rank == 1:
    try:
        dist.recv(torch.ones(1), 0)
    except unisono.errors.PeerLostError:
        os._exit(0)
work = dist.all_reduce(torch.ones(1), async_op=True)
send_once_it_calls(signal.SIGINT)
try:
    dist.barrier()
except KeyboardInterrupt:
    print("interrupted")
try:
    work.wait()
except unisono.errors.PeerLostError as error:
    print(error)
dist.destroy_process_group()
os.wait()
"""
    ended = run_two(code)
    assert ended.returncode == 0, ended.stderr
    said = ended.stdout.splitlines()
    assert said[0] == "interrupted"
    assert "this one has ended, as a call failed half-way: KeyboardInterrupt" in said[1]


@pytest.mark.slow
def test_a_call_of_a_handler_in_the_midst_of_another_is_refused_in_words():
    code = """
if rank == 1:
    try:
        dist.recv(torch.ones(1), 0)
    except unisono.errors.PeerLostError:
        os._exit(0)
def save(*_):
    dist.barrier()
signal.signal(signal.SIGUSR1, save)
send_once_it_calls(signal.SIGUSR1)
try:
    dist.all_reduce(torch.ones(3))
except RuntimeError as error:
    print(error)
os.wait()
"""
    ended = run_two(code)
    assert ended.returncode == 0, ended.stderr
    assert "let the handler set a flag" in ended.stdout


@promise("where-it-ends.10")
@pytest.mark.slow
@pytest.mark.parametrize("ends", ["well", "by an error"])
def test_a_program_may_end_while_calls_go_on(ends):
    code = f"""
tensors = [torch.ones(5_000_000) for _ in range(20)]
dist.barrier()
if rank == 1:
    time.sleep(0.05)
works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
if rank == 1:
    try:
        for work in works:
            work.wait()
    except unisono.errors.PeerLostError:
        pass
    os._exit(0)
time.sleep(0.1)
if {ends != "well"}:
    raise ZeroDivisionError
"""
    ended = run_two(code)
    assert ended.returncode == (0 if ends == "well" else 1), ended.stderr
    assert "terminate called" not in ended.stderr


@pytest.mark.slow
def test_a_forked_process_that_ends_meanwhile_leaves_its_parents_calls_alone():
    code = """
torch.set_default_dtype(torch.float64)
tensor = torch.ones(3)
if rank == 1:
    dist.recv(torch.ones(1), 0)
    dist.all_reduce(tensor)
else:
    work = dist.all_reduce(tensor, async_op=True)
    child = os.fork()
    if not child:
        sys.exit()
    assert os.waitpid(child, 0)[1] == 0
    dist.send(torch.ones(1), 1)
    work.wait()
    print(tensor.tolist())
dist.destroy_process_group()
if rank == 1:
    os._exit(0)
os.wait()
"""
    ended = run_two(code)
    assert (ended.returncode, ended.stdout) == (0, "[2.0, 2.0, 2.0]\n"), ended.stderr


def test_a_mismatch_that_the_helper_meets_while_one_asks_of_another_call_is_kept():
    run, error = execution.Execution(), MismatchError("another call has failed")

    def fail():
        with run._lock:
            run._unheard = error

    class Asked:
        @property
        def error(self):
            if helper.ident is None:
                helper.start()
                helper.join(0.2)

    helper = threading.Thread(target=fail)
    assert run.take_failure(Asked()) is None
    helper.join()
    with pytest.raises(MismatchError, match="another call has failed"):
        run.carry_out(Asked(), is_async=True)


def test_where_no_thread_can_be_started_the_group_ends_in_words(as_ranks, monkeypatch):
    def work(group, rank):
        group.barrier()
        if rank == 1:
            with pytest.raises(PeerLostError, match="can't start new thread"):
                group.recv([torch.ones(1)], 0, 0).wait()
            return

        class NoThread:
            def __init__(self, **_):
                pass

            def start(self):
                raise RuntimeError("can't start new thread")

        monkeypatch.setattr(execution.threading, "Thread", NoThread)
        try:
            with pytest.raises(RuntimeError, match="can't start new thread"):
                barrier(group, is_async=True)
        finally:
            monkeypatch.undo()
        with pytest.raises(PeerLostError, match="can't start new thread"):
            barrier(group, is_async=False)
        with pytest.raises(PeerLostError, match="can't start new thread"):
            group.recv([torch.ones(1)], 1, 0).wait()

    assert as_ranks(2, work) == [None, None]
