"""A view of shared memory knows what this process has changed, by each way of finding out."""

import mmap
import os

import pytest
import torch

from unisono.exchange.arena import Region, lay_out
from unisono.exchange.private_view import PrivateView
from unisono.workers.memory import Memory
from unisono.workers.proc import create_memory
from unisono.workers.supervisor import SingleProcess
from unisono.workers.team import Team

PAGE = mmap.PAGESIZE
NUM_PAGES = 5000  # more ranges than one question to the kernel gives


@pytest.fixture
def shared():
    fd = create_memory("test", (NUM_PAGES + 1) * PAGE)
    memory = Memory.map(fd, (NUM_PAGES + 1) * PAGE)
    os.close(fd)
    return memory


@pytest.fixture(params=["_scan", "_look_at_pages", "_look_at_bytes"])
def view(request, shared, monkeypatch):
    values = {"first": torch.zeros(PAGE), "second": torch.zeros((NUM_PAGES - 4) * PAGE // 4)}
    region = Region(shared, PAGE, lay_out(values))
    view = PrivateView(shared, [region])
    assert view._look.__name__ in ("_scan", "_look_at_pages")
    try:
        getattr(view, request.param)()
    except OSError:
        pytest.skip("this kernel does not tell")
    view._look = getattr(PrivateView, request.param)
    return view


def test_it_shows_what_others_write_and_keeps_what_is_written_here(view, shared):
    here, there = view.regions[0].tensor(0), shared.flat(PAGE, PAGE, torch.float32)
    there[7] = 1.0
    assert here[7] == 1.0
    assert view.changed() == []
    here.numpy()[3] = 2.0
    here[2000] = 3.0
    assert (there[3], there[2000]) == (0.0, 0.0)
    assert view.changed() == [(0, 2 * PAGE)]
    assert [*view.names(view.changed())] == ["first"]


def test_changes_are_published_and_then_forgotten(view, shared):
    values, there = view.regions[0].tensor(1), shared.flat(5 * PAGE, 10, torch.float32)
    values[:: 2 * PAGE // 4] = 4.0
    changed = view.publish_changes(Team(SingleProcess()))
    assert len(changed) == (NUM_PAGES - 4) // 2
    view.forget(changed)
    assert view.changed() == []
    assert there[0] == 4.0
    there[0] = 5.0
    assert values[0] == 5.0
