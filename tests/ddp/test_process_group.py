"""Setting a process group up and tearing it down, with one rank and several, as real processes."""

import contextlib
import io
import os
import random
import signal
import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.train.elsewhere import listening
from tests.warm.processes import start
from tests.workers.forked import Job

import unisono
from unisono.distributed import process_group
from unisono.distributed.process_group import Choice, agreed_seed, choose, num_gpus, place_among
from unisono.errors import MismatchError
from unisono.runtime.workers import rendezvous
from unisono.runtime.workers.rendezvous import RankPlaces
from unisono.runtime.world import World

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.fixture
def alike(monkeypatch):
    """Workers that know nothing but who they are: they have a session in common."""
    session = os.getpid()  # another test that runs now has another one
    monkeypatch.setattr(os, "getsid", lambda pid: session)
    return Job({})


@pytest.fixture
def of_an_agent():
    """Workers whose launcher holds the store, as torchrun does.

    In a process of its own: its threads may hold locks, which workers forked from it would find
    taken for ever.
    """
    reading, writing = os.pipe()
    agent = os.fork()
    if agent == 0:
        try:
            store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
            os.write(writing, str(store.port).encode())
            signal.pause()
        finally:
            os._exit(1)
    os.close(writing)
    with open(reading) as file:
        port = os.read(file.fileno(), 16).decode()
    try:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        yield Job({**place, "TORCHELASTIC_USE_AGENT_STORE": "True"})
    finally:
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)


def total(rank):
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor)
    return tensor.item()


def draws():
    return [torch.rand(1).item(), random.random(), float(np.random.rand())]


def test_alone_there_is_a_group_of_one():
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()
    with unisono.distributed.init() as here:
        assert (here.rank, here.world_size, here.local_rank) == (0, 1, 0)
        assert (here.world, here.device, here.backend) == (World(), CPU, "unisono")
        assert total(0) == 1
        assert dist.get_world_size() == 1
    assert not dist.is_initialized()
    torch.set_rng_state(generators[0])
    random.setstate(generators[1])
    np.random.set_state(generators[2])


def in_a_launched_worker():
    said = []
    for _ in range(2):
        with unisono.distributed.init(seed=None) as here:
            said.append([total(here.rank), here.seed])
    return said


@pytest.mark.parametrize("place", [{}, {"MASTER_ADDR": "127.0.0.1"}])
def test_workers_of_our_launcher_need_no_port(monkeypatch, place):
    monkeypatch.delenv("MASTER_PORT", raising=False)
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    first, second = unisono.launch(in_a_launched_worker, workers=2)
    assert first == second
    assert [sum_of_ranks for sum_of_ranks, _ in first] == [3, 3]


@pytest.mark.parametrize("backend", [None, "gloo"])
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("workers", ["alike", "of_an_agent"])
def test_ranks_find_each_other_again_and_again(request, workers, world_size, backend):
    def work(rank):
        said, inherited = [], listening()
        for _ in range(3):
            with unisono.distributed.init(backend) as here:
                listens = listening() if backend is None else inherited
                listens = [row for row in listens if row not in inherited]
                said.append([total(rank), here.world.rank, here.backend, listens])
                group = dist.new_group([0, 1])  # needs the store once more
                if rank < 2:
                    dist.barrier(group)
            said.append([dist.is_initialized(), "GLOO_SOCKET_IFNAME" in os.environ])
        return said

    said = request.getfixturevalue(workers).run(work, world_size)
    for rank, one in enumerate(said):
        sum_of_ranks = world_size * (world_size + 1) / 2
        once = [[sum_of_ranks, rank, backend or "unisono", []], [False, False]]
        assert one.value == once * 3, one


def test_who_has_nothing_to_do_waits_for_nobody_at_the_end(alike):
    def work(rank):
        unisono.distributed.init()
        return rank

    for _ in range(2):
        said = alike.run(work, 3)
        assert [(one.value, one.exit_code) for one in said] == [(0, 0), (1, 0), (2, 0)], said


def test_all_ranks_draw_the_same_at_first_and_then_apart(alike):
    def work(rank):
        with unisono.distributed.init(seed=np.int64(5)) as here:
            return [draws(), here.seed_apart(), draws()]

    first, second = (alike.run(work, 2) for _ in range(2))
    (same, _, zero), (also, _, one) = (said.value for said in first)
    assert same == also
    assert not set(zero) & set(one)
    assert [said.value for said in first] == [said.value for said in second]


def test_a_seed_that_nobody_gives_is_rank_0s(alike):
    def work(rank):
        with unisono.distributed.init(seed=None) as here:
            return [here.seed, draws()]

    first, second = (alike.run(work, 3) for _ in range(2))
    assert first[0].value == first[1].value == first[2].value
    assert first[0].value != second[0].value


@pytest.mark.parametrize("seeds", [(1, 2, 1), (None, 0, 0)])
def test_different_seeds_are_refused_on_every_rank(alike, seeds):
    said = alike.run(lambda rank: unisono.distributed.init(seed=seeds[rank]), 3)
    for one in said:
        assert one.error == "MismatchError", one
        assert f"is {seeds[0]} on rank 0 and " in one.text


@pytest.mark.parametrize(
    ("sharing", "words"),
    [
        ("1", "ranks 0 and 1 have the same one (GPU-ab of cuda)"),
        ("2", "(UNISONO_WORKERS_PER_GPU=2)"),
    ],
)
def test_workers_that_see_one_gpu_between_them_are_refused(alike, sharing, words):
    def work(rank):
        process_group.num_gpus = lambda: 1
        process_group.name_of = lambda device: f"GPU-ab of {device.type}"
        os.environ["UNISONO_WORKERS_PER_GPU"] = sharing
        unisono.distributed.init()

    for one in alike.run(work, 2):
        assert one.error == "ValueError", one
        assert words in one.text


@pytest.mark.parametrize(
    ("choices", "error", "words"),
    [
        ([("nccl", 0), ("nccl", 0), ("unisono", 0)], MismatchError, "'unisono' on rank 2"),
        ([("nccl", 0, 0, "a"), ("nccl", 0, 0, "b"), ("nccl", 0, 0, "b")], ValueError, "1 and 2"),
    ],
)
def test_choices_that_do_not_fit_together_are_refused(choices, error, words):
    with pytest.raises(error, match=words):
        agreed_seed([Choice(*(*choice, 0)[:3], *choice[3:]) for choice in choices])


def test_choices_that_fit_give_one_seed():
    assert agreed_seed([Choice("nccl", None, 7, "a"), Choice("nccl", None, 8, "b")]) == 7
    assert agreed_seed([Choice("unisono", 5, 7), Choice("unisono", 5, 8)]) == 5
    assert process_group.name_of(CPU) == ""


BY_HAND = World(2, 4, 2, 4, "somebody")


@pytest.mark.parametrize(
    ("here", "networks", "environ", "expected"),
    [
        (BY_HAND, "aabb", {}, (0, 2)),
        (BY_HAND, "abab", {}, (1, 2)),
        (BY_HAND, "abcd", {}, (0, 1)),  # containers of one process each
        (BY_HAND, "aaaa", {}, (2, 4)),
        (BY_HAND, "aabb", {"LOCAL_RANK": "2"}, (2, 4)),  # somebody knows better
        (World(2, 4, 0, 2, "torchrun"), "aabb", {"LOCAL_RANK": "0"}, (0, 2)),
        (World(2, 4, 2, 4, "Slurm"), "aabb", {}, (2, 4)),
    ],
)
def test_ranks_are_counted_per_host_where_nobody_has(here, networks, environ, expected):
    place = place_among(here, RankPlaces.of(here.rank, networks), environ)
    assert (place.rank, place.world_size, place.started_by) == (2, 4, here.started_by)
    assert (place.local_rank, place.local_world_size) == expected


@pytest.mark.parametrize(("networks", "is_pinned"), [("aa", True), ("ab", False)])
def test_gloo_keeps_to_the_loopback_only_on_one_host(of_an_agent, networks, is_pinned):
    def work(rank):
        rendezvous.network_name = lambda: networks[rank]
        process_group.dist.init_process_group = lambda *_, **__: (
            None
        )  # other hosts are not to be had
        here = unisono.distributed.init("gloo")
        return os.environ.get("GLOO_SOCKET_IFNAME"), here.local_rank

    said = [one.value for one in of_an_agent.run(work, 2)]
    assert said == ([["lo", 0], ["lo", 1]] if is_pinned else [[None, 0], [None, 0]])


def test_a_store_that_outlives_a_program_is_used_by_the_next_one(of_an_agent):
    def work(rank, seed):
        with unisono.distributed.init(seed=seed, timeout_s=20) as here:
            return here.seed, total(rank)

    for seed in (1, 2, 2):
        said = of_an_agent.run(lambda rank, seed=seed: work(rank, seed), 2)
        assert [one.value for one in said] == [[seed, 3]] * 2, said


@pytest.mark.parametrize("absent", [0, 1])
def test_a_job_that_is_started_again_waits_for_nobody_of_the_first_attempt(of_an_agent, absent):
    def work(rank, attempt):
        if (rank, attempt) == (absent, 0):
            return None
        with unisono.distributed.init(timeout_s=20 if attempt else 0.5):
            return total(rank)

    for attempt, error in enumerate(["WaitTimeoutError", "", ""]):
        said = of_an_agent.run(
            lambda rank, attempt=attempt: work(rank, attempt),
            2,
            TORCHELASTIC_RESTART_COUNT=str(attempt),
        )
        assert said[1 - absent].error == error, said
        if attempt:
            assert [one.value for one in said] == [3, 3], said


@pytest.mark.parametrize("dying", [0, 1])
def test_who_dies_while_the_others_wait_in_init_is_named(alike, dying):
    def work(rank):
        if rank == dying:
            process_group.choose = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        unisono.distributed.init()

    said = alike.run(work, 3)
    for rank in {0, 1, 2} - {dying}:
        assert said[rank].error == "PeerLostError", said
    assert any(f"rank {dying} has ended while rank" in one.text for one in said)


@pytest.mark.parametrize("workers", ["alike", "of_an_agent"])
def test_who_waits_long_says_for_whom(request, workers):
    workers = request.getfixturevalue(workers)
    reading, writing = os.pipe()

    def late(rank):
        os.environ["UNISONO_NOTICE_AFTER"] = "0.3"
        if rank == 0:
            told = io.StringIO()
            told.flush = lambda: os.write(writing, b"x") if told.getvalue() else None
            with contextlib.redirect_stderr(told), unisono.distributed.init():
                return told.getvalue()
        process_group.choose = lambda *args: (os.read(reading, 1), choose(*args))[1]  # not before
        with unisono.distributed.init():
            return ""

    said = workers.run(late, 2)
    os.close(reading)
    os.close(writing)
    assert [one.error for one in said] == ["", ""], said
    (line,) = said[0].value.splitlines()
    assert line.startswith("unisono: rank 0 has waited ")
    assert line.endswith("in `unisono.distributed.init` for rank 1.")


def test_a_second_one_is_refused_until_the_first_is_closed():
    def in_a_fork(rank):
        here = unisono.distributed.init()
        with pytest.raises(RuntimeError, match="there is one already"):
            unisono.distributed.init()
        here.close()
        here.close()
        with unisono.distributed.init() as again:
            again.close()
        assert not dist.is_initialized()
        with unisono.distributed.init():
            dist.destroy_process_group()
        with unisono.distributed.init():
            return total(0)

    (said,) = Job({}).run(in_a_fork, 1)
    assert said.value == 1, said


@pytest.mark.parametrize("backend", ["unisono", "gloo"])
@pytest.mark.parametrize("form", ["block", "call"])
def test_a_rank_that_fails_ends_and_the_others_learn_it(alike, backend, form):
    def program(rank):
        for _ in range(3):
            total(rank)
        if rank == 1:
            raise ValueError("mine")
        total(rank)

    def work(rank):
        if form == "call":
            here = unisono.distributed.init(backend)
            program(rank)
            return here.rank
        with unisono.distributed.init(backend):
            program(rank)
        return rank

    said = alike.run(work, 3)
    assert (said[1].error, said[1].text) == ("ValueError", "mine")
    for rank in (0, 2):
        assert said[rank].error in {"PeerLostError", "RuntimeError"}, said
    assert [one.exit_code for one in said] == [1, 1, 1]


def test_a_rank_that_is_killed_does_not_keep_the_others(alike):
    def work(rank):
        with unisono.distributed.init():
            total(rank)
            if rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            total(rank)

    said = alike.run(work, 3)
    for one in said[1:]:
        assert one.error == "PeerLostError", said
        assert "rank 0" in one.text


def test_what_a_rank_forks_does_not_close_its_group(alike):
    def work(rank):
        here = unisono.distributed.init()
        fork = os.fork()
        if not fork:
            here.close()
            os._exit(0)
        os.waitpid(fork, 0)
        return total(rank)

    assert [one.value for one in alike.run(work, 2)] == [3, 3]


def test_who_does_not_come_is_named(of_an_agent):
    for said in of_an_agent.together(lambda: unisono.distributed.init(timeout_s=0.8), (0, 2), 3):
        assert said.error == "WaitTimeoutError"
        assert "within 0.8 s, but rank 1 has not" in said.text


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"backend": 1}, TypeError, "`backend` must be a name"),
        ({"seed": 1.5}, TypeError, "`seed` must be a whole number, but is 1.5"),
        ({"seed": True}, TypeError, "`seed` must be a whole number, but is True"),
        ({"seed": -1}, ValueError, "`seed` must be at least 0, but is -1"),
        ({"seed": 2**63}, ValueError, "`seed` must be below 9223372036854775808"),
        ({"timeout_s": 0}, ValueError, "seconds above 0"),
        ({"timeout_s": float("inf")}, ValueError, "seconds above 0"),
        ({"timeout_s": 1e300}, ValueError, "at most 1,000,000,000, but is 1e.300"),
        ({"timeout_s": "1"}, ValueError, "seconds above 0"),
        ({"backend": "nccl"}, ValueError, "must have its own GPU"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, words):
    if arguments.get("backend") == "nccl" and num_gpus():
        pytest.skip("there are GPUs")
    with pytest.raises(error, match=words):
        unisono.distributed.init(**arguments)
    assert not dist.is_initialized()


def test_a_backend_that_torch_does_not_know_leaves_nothing_behind():
    with pytest.raises(UserWarning, match="nonesuch"):  # which is an error in tests
        unisono.distributed.init("nonesuch")
    assert not dist.is_initialized()


HERE = World(5, 8, 1, 4)


@pytest.mark.parametrize(
    ("backend", "gpus", "expected"),
    [
        (None, 0, ("unisono", "cpu")),
        (None, 4, ("nccl", "cuda:1")),
        (None, 8, ("nccl", "cuda:1")),
        (None, 1, ("nccl", "cuda:0")),  # each task sees its own
        ("nccl", 4, ("nccl", "cuda:1")),
        ("cpu:gloo,cuda:nccl", 4, ("cpu:gloo,cuda:nccl", "cuda:1")),
        ("gloo", 4, ("gloo", "cpu")),
        ("unisono", 2, ("unisono", "cpu")),
    ],
)
def test_device_and_backend_fit_each_other(backend, gpus, expected):
    chosen, device = choose(HERE, backend, gpus)
    assert (chosen, str(device)) == expected


def test_several_hosts_have_a_backend_that_joins_them():
    assert choose(HERE, None, 0, 1, 2) == ("gloo", CPU)
    with pytest.raises(ValueError, match=r"must join several hosts \(2\).*backend='gloo'"):
        choose(HERE, "unisono", 0, 1, 2)


@pytest.mark.parametrize(("backend", "gpus"), [(None, 2), (None, 3), ("nccl", 0)])
def test_too_few_gpus_are_refused(backend, gpus):
    with pytest.raises(ValueError, match=rf"each of the 4 workers .* rank 5 sees {gpus}"):
        choose(HERE, backend, gpus)


def test_workers_that_share_gpus_have_no_nccl():
    with pytest.raises(ValueError, match=r"2 of them share each GPU .* `--workers-per-gpu`, or"):
        choose(HERE, None, 4, sharing=2)
    assert choose(HERE, "unisono", 4, sharing=2) == ("unisono", CPU)
    assert choose(World(), "nccl", 1, sharing=2) == ("nccl", torch.device("cuda", 0))


PROGRAM = """
import torch, unisono
from torch.nn.parallel import DistributedDataParallel
here = unisono.distributed.init("gloo")
model = DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(1, 2)).sum().backward()
torch.save  # the model lives to the very end
"""


def test_a_program_of_gloo_and_ddp_ends_in_order():
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{os.getpid()}3"}  # only its name
    for _ in range(3):
        ranks = [
            start(
                [sys.executable, "-c", PROGRAM],
                env=os.environ | {"RANK": str(rank), "WORLD_SIZE": "2", **address},
            )
            for rank in range(2)
        ]
        assert [rank.wait(timeout=60) for rank in ranks] == [0, 0]
