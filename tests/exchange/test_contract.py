"""What every exchange promises, on each of them: ranks are threads, and die where a table says."""

import functools
import random
import time

import pytest
import torch
from tests.device.ranks import Normed
from tests.exchange.fake_hosts import HostsJob
from tests.exchange.new_parts import Mail, Server
from tests.promises import promise
from tests.workers.fake_launcher import MOMENTS, Death, Job
from torch import nn

from unisono.engine.exchange import group_carriage, lanes
from unisono.engine.exchange.exchange import Exchange, ExchangeKind
from unisono.engine.exchange.group_carriage import GroupCarriage
from unisono.engine.exchange.host_memory import HostMemoryCarriage
from unisono.engine.exchange.owned_pieces import OwnedPieces
from unisono.engine.exchange.replicas import Replicas
from unisono.engine.exchange.shared_copy import SharedCopy
from unisono.engine.state.contents import digest_of, place
from unisono.engine.state.optimizer_state import group_options, take_state
from unisono.engine.step.transforms import Clipping
from unisono.engine.step.update import LoopOptimizer
from unisono.plan.summation import tree_sum
from unisono.runtime.device import on_host
from unisono.runtime.workers import meeting_point

SHARED = ExchangeKind(HostMemoryCarriage, SharedCopy)
STAGED = ExchangeKind(HostMemoryCarriage, Replicas)
ZERO = ExchangeKind(HostMemoryCarriage, OwnedPieces)
GROUP = ExchangeKind(GroupCarriage, Replicas)
MAIL = ExchangeKind(Mail, Replicas)
KINDS = {
    "shared": SHARED,
    "staged": STAGED,
    "group": GROUP,
    "zero": ZERO,
    "a new carriage": MAIL,
    "a new ownership": ExchangeKind(HostMemoryCarriage, Server),
}
STEPS = 3  # in the first one no process group is connected yet


@pytest.fixture(autouse=True, scope="module")
def short_sleeps():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meeting_point, "SLEEP_AT_MOST_S", 0.005)
        patch.setattr(lanes, "_SLICE_BYTES", 1024)  # several buckets a lane
        yield


class Model(nn.Module):
    """Parameters of all kinds: cut in several pieces, transposed, a scalar, empty, fixed."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.large = nn.Parameter(torch.randn(70, 60, generator=generator))
        self.turned = nn.Parameter(torch.randn(9, 5, generator=generator).T)
        self.scalar = nn.Parameter(torch.randn((), generator=generator))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.rare = nn.Parameter(torch.randn(1500, generator=generator))
        self.fixed = nn.Parameter(torch.randn(4, generator=generator), requires_grad=False)
        self.register_buffer("count", torch.zeros(3))


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.1)


def normed(parameters):
    return Normed(parameters, lr=0.1)


def make(optimizer):
    model = Model()
    return model, optimizer([p for p in model.parameters() if p is not model.fixed])


def gradients_of(shard, step):
    """The gradients that a backward pass of this shard would leave, by parameter."""
    generator = torch.Generator().manual_seed(100 * step + shard)
    rare = shard in (1, 6) or (step > 0 and shard == 0)
    large = torch.randn(70, 60, generator=generator) * 10.0 ** (shard % 5)
    large[0] = -0.0
    return [
        large,
        torch.randn(5, 9, generator=generator),
        torch.randn((), generator=generator),
        torch.zeros(0, 3),
        torch.randn(1500, generator=generator) if rare else None,
    ]


def add(left, right):
    return [b if a is None else a if b is None else a + b for a, b in zip(left, right, strict=True)]


def sum_of(shards, step):
    return tree_sum([gradients_of(shard, step) for shard in shards], add)


@functools.cache
def expected(optimizer, num_shards):
    """Sums of each step, and the digest at the end, with nothing of ours but the order."""
    model, updates = make(optimizer)
    sums = []
    for step in range(STEPS):
        sums.append(sum_of(range(num_shards), step))
        for parameter, gradient in zip(model.parameters(), sums[-1], strict=False):
            if gradient is not None:  # laid out as its parameter, as autograd does
                gradient = torch.empty_like(parameter).copy_(gradient).detach()
            parameter.grad = gradient
        updates.step()
    return sums, digest_of(model, updates)


def same_bits(here, there):
    if here is None or there is None:
        return here is there
    return here.shape == there.shape and torch.equal(
        here.contiguous().view(-1).view(torch.int32), there.contiguous().view(-1).view(torch.int32)
    )


def snapshot(exchange, team, step, optimizer):
    while True:
        exchange.publish_before_save()
        tensors, numbers = {}, {}
        if team.leads_host:
            tensors, numbers = take_state(optimizer, exchange.named_whole())
        facts = {"step": step, "numbers": numbers, "groups": group_options(optimizer)}
        slot = exchange.save(facts, tensors)
        if team.meet("snapshot"):
            exchange.memory.snapshots.complete(slot)
            return


def publish(exchange, parts, step):
    for part in parts:
        gradients = sum_of(range(part.lo, part.hi), step)
        if part is parts[-1] and exchange.takes_early:
            publish_early(exchange, part, gradients, step)
        exchange.publish(part, gradients)


def publish_early(exchange, part, gradients, step):
    """Publish some gradients of a worker's last part, in an order of its own, and not all right."""
    draw = random.Random(100 * step + part.lo)
    for index in draw.sample(range(len(gradients)), draw.randint(1, len(gradients))):
        if gradients[index] is not None:
            if step == STEPS - 1 and draw.random() < 0.3:
                wrong = gradients[index] + 1
                exchange.publish_early(part, index, wrong)
                if draw.random() < 0.5:
                    continue  # only the whole part is right
            exchange.publish_early(part, index, gradients[index])


def take_step(exchange, optimizer, step):
    """Take one step; None if the run has to go back."""
    if exchange.division.is_outdated:
        exchange.divide()
    more = exchange.division.mine
    while more is not None:
        publish(exchange, more, step)
        # While nobody updates: it reads how far the optimizer has counted.
        member = LoopOptimizer("", optimizer, Clipping(), None)
        member.follow(exchange)
        update = member.update
        more = exchange.gather(f"gradients of {step}")
    if exchange.is_lost:
        return None
    present = exchange.add_up("sums")
    votes = exchange.agree(b"yes", "vote")
    if votes is None or not exchange.all_sums("sums"):
        return None
    assert set(votes) == {b"yes"}
    sums = [
        on_host(total.clone()) if here else None
        for total, here in zip(exchange.whole, present, strict=True)
    ]
    if not exchange.are_read("read"):
        return None
    update.apply(present)
    if not exchange.share("update"):
        return None
    update.commit()
    return sums


def bound(team, kind, optimizer, num_shards, device=None):
    model, updates = make(optimizer)
    if device is not None:
        place(model, updates, device)
    exchange = Exchange(
        kind, model, updates, shards=num_shards, team=team, device=device, new_key=1
    )
    return model, updates, exchange


def on_devices(shard, step, original=gradients_of):
    """The same gradients on the current device of the test accelerator."""
    there = f"sim:{torch.accelerator.current_device_index()}"
    return [one if one is None else one.to(there) for one in original(shard, step)]


def go_back(exchange, model):
    """Return to the newest snapshot, and change something behind a lost step."""
    exchange.load()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(1)
    exchange.discard_changes()
    return exchange.memory.newest()[0]["step"]


def train(team, kind, optimizer, num_shards, device=None):
    model, updates, exchange = bound(team, kind, optimizer, num_shards, device)
    seen, step = {}, 0
    snapshot(exchange, team, 0, updates)
    while step < STEPS:
        sums = take_step(exchange, updates, step)
        if sums is None:
            step = go_back(exchange, model)
        else:
            seen[step] = sums
            step += 1
            if exchange.is_lost:
                step = go_back(exchange, model)
    exchange.trust_leader()
    if not exchange.have_all:
        snapshot(exchange, team, step, updates)
        exchange.hand_out()
    exchange.unbind()
    return seen, digest_of(model, updates)


@pytest.fixture
def run(control_of):
    def run_with(world_size, job, kind, optimizer, num_shards, *deaths):
        threads = job(control_of(world_size), deaths)
        return threads.run(lambda team: train(team, kind, optimizer, num_shards))

    return run_with


def check(results, optimizer, num_shards):
    sums, digest = expected(optimizer, num_shards)
    for rank, result in results.items():
        assert not isinstance(result, BaseException), (rank, result)
        seen, found = result
        for step in range(STEPS):
            for here, there in zip(seen[step], sums[step], strict=True):
                assert same_bits(here, there), (rank, step)
        assert found == digest, rank


def on_each(*cases):
    """Cases of an optimizer and more, of kinds that take it: not all take whole updates."""
    return [
        pytest.param(kind, *case, marks=marks, id="-".join([name, *map(as_id, case)]))
        for name, kind in KINDS.items()
        for *case, marks in cases
        if case[0] is adam or kind is not ZERO
    ]


def as_id(value):
    return getattr(value, "__name__", str(value))


each_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
each_job = pytest.mark.parametrize("job", [Job, HostsJob], ids=["one host", "hosts"])


@each_job
@pytest.mark.parametrize(("kind", "optimizer"), on_each((adam, ()), (normed, ())))
@pytest.mark.parametrize(
    ("world_size", "num_shards"), [(1, 1), (1, 3), (1, 8), (2, 3), (2, 8), (3, 3), (3, 8)]
)
def test_sums_and_updates_are_those_of_the_tree(run, job, kind, optimizer, world_size, num_shards):
    results = run(world_size, job, kind, optimizer, num_shards)
    assert len(results) == world_size
    check(results, optimizer, num_shards)


@each_kind
@pytest.mark.parametrize("num_shards", [5, 8])
@pytest.mark.parametrize(
    "hosts", [((0, 1), (2, 3)), ((0,), (1,), (2, 3)), ((0, 1, 2), (3,))], ids=str
)
def test_hosts_have_as_many_lanes_as_the_smallest_has_workers(control_of, kind, hosts, num_shards):
    job = HostsJob(control_of(4), ranks_of_host=hosts)
    results = job.run(lambda team: train(team, kind, adam, num_shards))
    assert len(results) == 4
    check(results, adam, num_shards)


class OnFastNetwork(GroupCarriage):
    """All sums are there before others have told which parameters have gradients."""

    def gather(self, purpose):
        if (communicator := self._connected()) is not None:
            assert self._pipeline.finish(communicator)
        return super().gather(purpose)


@pytest.mark.parametrize("hosts", [((0,), (1,)), ((0, 1), (2,))], ids=str)
def test_sums_that_come_before_what_is_told_of_them_are_right(control_of, hosts):
    size = sum(map(len, hosts))
    job = HostsJob(control_of(size), ranks_of_host=hosts)
    # Shard 0 is a worker's own: it has one more gradient from the second step on.
    kind = ExchangeKind(OnFastNetwork, Replicas)
    results = job.run(lambda team: train(team, kind, adam, size))
    check(results, adam, size)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS[1:3])
@pytest.mark.parametrize(
    ("kind", "optimizer", "rank"),
    on_each(
        *((adam, 0, ()), (adam, 1, ()), (adam, 2, ()), (normed, 1, ())),
        *((normed, 0, pytest.mark.long), (normed, 2, pytest.mark.long)),
    ),
)
def test_a_worker_may_be_lost_at_every_meeting(monkeypatch, run, kind, optimizer, moment, rank):
    monkeypatch.setattr(group_carriage, "_PATIENCE_S", 0.02)
    for meeting in range(5, 16):  # behind the first snapshot
        results = run(3, Job, kind, optimizer, 8, Death(rank, meeting, moment))
        assert results.keys() | {rank} == {0, 1, 2}
        check(results, optimizer, 8)


def test_nobody_goes_on_from_a_snapshot_while_others_read_what_the_lost_step_left(control_of):
    seen = []

    def work(team):
        _, updates, exchange = bound(team, ZERO, adam, 3)
        snapshot(exchange, team, 0, updates)
        more = exchange.division.mine
        assert not exchange.is_lost
        while more is not None:
            publish(exchange, more, 0)
            more = exchange.gather("gradients")
        assert exchange.is_lost
        if team.world.rank == 1:
            time.sleep(0.1)
            seen.append("reads")
        exchange.load()
        seen.append("goes on")
        exchange.unbind()

    results = Job(control_of(3), [Death(2, 8, "before")]).run(work)
    assert results == {0: None, 1: None}
    assert seen == ["reads", "goes on", "goes on"]


def comes_twice(exchange, part, gradients):
    for index, gradient in enumerate(gradients):
        exchange.publish_early(part, index, gradient + 1)
        exchange.publish_early(part, index, gradient)


def is_replaced(exchange, part, gradients):
    for index, gradient in enumerate(gradients):
        exchange.publish_early(part, index, gradient + 1)


def changes_in_place(exchange, part, gradients):
    for index, gradient in enumerate(gradients):
        right = gradient.clone()
        exchange.publish_early(part, index, gradient.add_(1))
        gradient.copy_(right)


def is_taken_away(exchange, part, gradients):
    for index, gradient in enumerate(gradients):
        exchange.publish_early(part, index, gradient)
    gradients[4] = None


def sums_of_what_changes(team, kind, how, only_rank, device=None):
    """The sums of some steps in which gradients change after they were published early."""
    _, _, exchange = bound(team, kind, adam, team.world.world_size, device)
    found, took_early = [], []
    for _ in range(4):
        part = exchange.division.mine[0]
        gradients = gradients_of(part.lo % 2, 1)  # all parameters have one
        took_early.append(exchange.takes_early)
        if exchange.takes_early and only_rank in (None, team.world.rank):
            how(exchange, part, gradients)
            await_begun(exchange)
        exchange.publish(part, gradients)
        assert exchange.gather("gradients") is None
        present = exchange.add_up("sums")
        assert exchange.all_sums("sums")
        found.append([on_host(t.clone()) for t in exchange.whole])
        assert all(present[:4])
        assert exchange.share("update")
    took_early.append(exchange.takes_early)
    exchange.unbind()
    return found, took_early


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "kind"),
    [(Job, GROUP), *((HostsJob, kind) for kind in KINDS.values() if kind is not MAIL)],
)
# The last of three has no lane, as its neighbour has.
@pytest.mark.parametrize(("num_ranks", "only_rank"), [(2, None), (2, 1), (3, 2)])
@pytest.mark.parametrize("how", [comes_twice, is_replaced, changes_in_place, is_taken_away])
def test_what_comes_early_does_not_count_if_it_changes(
    control_of, job, kind, how, num_ranks, only_rank
):
    threads = job(control_of(num_ranks))
    results = threads.run(lambda team: sums_of_what_changes(team, kind, how, only_rank))
    check_changed(results, how, only_rank)


def check_changed(results, how, only_rank):
    for rank, result in results.items():
        assert not isinstance(result, BaseException), (rank, result)
        assert all(result[1][1:]), "the group was given up"
        for step, found in enumerate(result[0]):
            there = [gradients_of(shard % 2, 1) for shard in range(len(results))]
            if how is is_taken_away and result[1][step]:
                for shard in range(2) if only_rank is None else [only_rank]:
                    there[shard][4] = None
            for here, right in zip(found, functools.reduce(add, there), strict=True):
                assert right is None or same_bits(here, right), (rank, step)


def await_begun(exchange):
    """Wait until the buckets of a lane are on their way, where a thread sends them."""
    between = exchange._between
    if isinstance(between, lanes.Lanes) and between.lane and between._buckets:
        while len(between._pipeline._under_way) < len(between._buckets):
            time.sleep(0.001)


@promise("one-result.11")
@each_kind
def test_sparse_gradients_are_refused(kind, control_of):
    def work(team):
        _, _, exchange = bound(team, kind, adam, 1)
        gradients = gradients_of(1, 0)
        gradients[0] = gradients[0].to_sparse()
        exchange.publish(exchange.division.mine[0], gradients)

    error = Job(control_of(1)).run(work)[0]
    assert isinstance(error, TypeError)
    assert "gradients must be dense" in str(error)
