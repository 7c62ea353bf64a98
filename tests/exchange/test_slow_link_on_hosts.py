"""A slow link between hosts has the bits that it has between groups of one host."""

import pytest
import torch
from tests.exchange.fake_hosts import HostsJob
from tests.exchange.test_contract import adam, make, short_sleeps, sum_of  # noqa: F401
from tests.workers.desk import Job
from tests.workers.test_barrier import control_of  # noqa: F401

from unisono.exchange.hosts_exchange import HostsExchange
from unisono.exchange.link_state import LinkState
from unisono.exchange.shared import SharedExchange
from unisono.exchange.slow_link import Bf16Gradients, DiLoCo, PowerSGD
from unisono.state.digest import digest_of
from unisono.step.clipping import Clipping
from unisono.step.update import Member

LINKS = [
    Bf16Gradients(groups=2),
    Bf16Gradients(groups=4),
    PowerSGD(rank=2, start_step=1, groups=2),
    DiLoCo(local_steps=2, groups=2),
]
STEPS, SHARDS = 4, 8


def take_step(exchange, optimizer, step):
    for part in exchange.division.mine:
        exchange.publish(part, sum_of(range(part.lo, part.hi), step))
    member = Member("", optimizer, Clipping(), None)
    member.follow(exchange)
    assert exchange.gather("gradients") is None
    exchange.link.begin_sum(step, None)
    present = exchange.add_up("sums")
    member.update.apply(present)
    if exchange.local is not None:
        exchange.local.end_update()
    assert exchange.share("update")
    member.update.commit()


def train(team, cls, link):
    model, optimizer = make(adam)
    state = LinkState(link)
    exchange = cls(model, optimizer, shards=SHARDS, team=team, new_key=1, link=state)
    for step in range(STEPS):
        take_step(exchange, optimizer, step)
    exchange.collect()
    kept = {
        f"{label}/{name}": value.clone()
        for label, values in state.state_dict().items()
        for name, value in values.items()
    }
    team.meet("kept")
    exchange.unbind()
    return digest_of(model, optimizer), kept


def check(results, expected):
    digest, kept = expected
    assert any(value.any() for value in kept.values())
    for rank, result in results.items():
        assert not isinstance(result, BaseException), (rank, result)
        assert result[0] == digest, rank
        for name, value in kept.items():
            assert torch.equal(result[1][name], value), (rank, name)


@pytest.mark.parametrize("link", LINKS, ids=str)
def test_hosts_have_the_bits_and_the_state_of_one(control_of, link):  # noqa: F811
    alone = Job(control_of(1)).run(lambda team: train(team, SharedExchange, link))
    for hosts in (((0,), (1,)), ((0,), (1, 2)), ((0, 1), (2, 3)), ((0,), (1,), (2,))):
        if len(hosts) > link.groups:
            continue
        job = HostsJob(control_of(sum(map(len, hosts))), ranks_of_host=hosts)
        check(job.run(lambda team: train(team, HostsExchange, link)), alone[0])


@pytest.mark.parametrize("hosts", [((0,), (1, 2)), ((0, 1), (2, 3)), ((0,), (1,), (2,))], ids=str)
def test_hosts_bring_each_other_what_each_has(control_of, hosts):  # noqa: F811
    def work(team):
        model, optimizer = make(adam)
        exchange = HostsExchange(model, optimizer, shards=SHARDS, team=team, new_key=1)
        memory = team.memory(7, 4096)
        places = [(start, start + 5 * (1 + start // 1024)) for start in range(0, 4096, 512)]
        spans = [places[at :: len(hosts)] for at in range(len(hosts))]
        if team.leads_host:
            for start, stop in spans[team.host]:
                memory.write(start, bytes([start // 512]) * (stop - start))
        team.meet("written")
        of_host = [[memory.view(start, stop - start) for start, stop in own] for own in spans]
        exchange.bring(of_host)
        found = [bytes(memory.view(start, stop - start)) for start, stop in places]
        team.meet("read")
        exchange.unbind()
        return found == [bytes([at]) * (stop - start) for at, (start, stop) in enumerate(places)]

    num_ranks = sum(map(len, hosts))
    job = HostsJob(control_of(num_ranks), ranks_of_host=hosts)
    assert job.run(work) == dict.fromkeys(range(num_ranks), True)
