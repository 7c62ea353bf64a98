"""The way of a batch through an accelerator, in seconds: what notices whatever is taken out of it.

For processes in which the accelerator is installed; each function raises what it finds.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from unittest import mock

import torch
from tests.accelerator import sim
from tests.device import ranks, unusual
from tests.device import waits as _waits
from tests.parity import cases
from tests.workers.desk import Death
from tests.workers.forked import Job
from torch.utils.data import TensorDataset

import unisono
from unisono.device import Device
from unisono.errors import NonFiniteLossError
from unisono.step import crossings
from unisono.workers.control_block import ControlBlock

# Once a step, before the workers first meet: losses are there then, and parts on the host.
ALONE = ["pending.py:PendingLosses.read"]
# And once more before they meet again: each has added up a slice then.
TOGETHER = [*ALONE, "staged.py:StagedExchange.add_up"]
PROGRAMS = (
    "parameters_that_the_model_does_not_have",
    "an_optimizer_with_state_already",
    "batches_that_can_be_moved",
    "buffers_replaced_in_forward",
    "weights_loaded_between_fits",
    "parameters_frozen_and_thawed_between_fits",
)


@contextlib.contextmanager
def control_of(world_size: int) -> Iterator[ControlBlock]:
    control = ControlBlock.create(world_size)
    try:
        yield control
    finally:
        control.close()


def train(world_size: int, *deaths: Death, **options: object) -> dict[int, object]:
    """Train with threads; raises what any of them raised."""
    with control_of(world_size) as control:
        results = ranks.run(control, *deaths, **options)  # type: ignore[arg-type]
    assert results.keys() | {death.rank for death in deaths} == set(range(world_size))
    for result in results.values():
        if isinstance(result, BaseException):
            raise result
    return results


def bits_of_one_worker_on_the_cpu() -> None:
    for optimizer, clip_norm in (("adam", None), ("normed", 0.5)):
        options: dict[str, object] = {"optimizer": optimizer, "clip_norm": clip_norm}
        expected = train(1, kind="cpu", **options)[0]
        for world_size in (1, 2, 3):
            for result in train(world_size, **options).values():
                assert result == expected, (world_size, options)
        for result in train(4, hosts=((0, 1), (2, 3)), **options).values():
            assert result == expected, options


def losses_on_the_host() -> None:
    expected = train(1, kind="cpu")[0]
    assert all(result == expected for result in train(2, on_host=True).values())


def workers_lost_at_meetings_of_a_step() -> None:
    expected = train(1, kind="cpu")[0]
    for rank, meeting, moment in ((0, 5, "before"), (1, 6, "before"), (0, 6, "after")):
        for result in train(2, Death(rank, meeting, moment)).values():
            assert result == expected, (rank, meeting, moment)


def a_loss_that_is_not_finite() -> None:
    with control_of(2) as control:
        for result in ranks.run(control, bad=(2, 3)).values():
            assert isinstance(result, NonFiniteLossError), result
            assert (result.step, result.shard) == (2, 3)


def one_wait_a_step() -> None:
    for loss in ("mean", "sums"):
        assert _waits.waits_of_trainer(loss) == [ALONE] * _waits.WATCHED


def programs() -> None:
    for name in PROGRAMS:
        (expected,), (found,) = (unusual.run_all([name], one) for one in ("cpu", "sim"))
        assert found == expected, name


def memory_that_is_copied_is_not_given_to_others() -> None:
    device = Device(torch.device("sim", 0))
    copies, host = device.copies(), torch.zeros(1000).pin_memory()
    copies.to_host(host, torch.ones(1000, device=device.torch))
    torch.zeros(1000, device=device.torch)  # raises where it could be the same memory
    copies.wait()
    assert host.all()


def two_processes_wait_twice_a_step() -> None:
    """Before the accelerator is installed: processes that are forked later cannot use it."""
    (alone,) = _in_processes(lambda rank: unusual.fitted("cpu"), 1)
    assert _in_processes(lambda rank: unusual.fitted("cpu"), 2) == [alone] * 2
    found = _in_processes(lambda rank: _waits.waits_of_trainer(), 2)
    assert found == [[TOGETHER] * _waits.WATCHED] * 2


def _in_processes(work: Callable[[int], object], world_size: int) -> list[object]:
    """Do `work(rank)` in processes that nobody launched, on the staged exchange."""
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{os.getpid()}2"}  # only its name
    said = Job({**address, "UNISONO_EXCHANGE": "staged"}).run(work, world_size)
    assert not any(one.error for one in said), said
    return [one.value for one in said]


def several_devices_in_one_process() -> None:
    """In an epoch's last batch two of them, or the first, have no samples."""
    inputs, labels = cases.images().tensors
    data = TensorDataset(inputs[:50], labels[:50])

    def digest(shards: int, batch_size: int, **where: object) -> str:
        torch.manual_seed(1)
        model = cases.Cnn(norm=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
        trainer = unisono.Trainer(model, optimizer, cases.classify, shards=shards, **where)
        trainer.fit(data, batch_size=batch_size, steps=10)
        return trainer.digest()

    with mock.patch.object(crossings, "SMALL_BYTES", 200):  # some travel alone, some together
        for sizes in ((4, 8), (5, 12)):
            expected = digest(*sizes, device="cpu")
            assert digest(*sizes, devices=["sim"] * 4) == expected
            assert digest(*sizes, devices=["cpu"] * 2) == expected


def nothing_is_under_way_when_a_loop_fails() -> None:
    def loss(model, batch):
        if len(calls) == 2:
            raise KeyError("a loss that fails")
        calls.append(1)
        return unusual.loss_of(model, batch)

    calls: list[int] = []
    with contextlib.suppress(KeyError):
        unusual.make("sim", loss=loss).fit(unusual.data(40), **unusual.FIT)
    assert sim.pending_copies(0) == 0


CHECKS = (
    bits_of_one_worker_on_the_cpu,
    one_wait_a_step,
    losses_on_the_host,
    programs,
    several_devices_in_one_process,
    nothing_is_under_way_when_a_loop_fails,
    a_loss_that_is_not_finite,
    memory_that_is_copied_is_not_given_to_others,
    workers_lost_at_meetings_of_a_step,
)


def check() -> None:
    """Do all of it."""
    torch.set_num_threads(1)
    two_processes_wait_twice_a_step()
    sim.install()
    for one in CHECKS:
        one()
