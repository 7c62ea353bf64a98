"""A view of shared memory knows what this process has changed, by each way of finding out."""

import itertools
import mmap
import os

import pytest
import torch

from unisono.engine.exchange.arena import Region, lay_out
from unisono.engine.exchange.private_view import PrivateView
from unisono.runtime.procfs import create_memory
from unisono.runtime.workers.memory import Memory
from unisono.runtime.workers.supervisor import SingleProcess
from unisono.runtime.workers.team import Team

PAGE = mmap.PAGESIZE
NUM_PAGES = 5000


@pytest.fixture
def shared():
    fd = create_memory("test", (NUM_PAGES + 1) * PAGE)
    memory = Memory.map(fd, (NUM_PAGES + 1) * PAGE)
    os.close(fd)
    return memory


@pytest.fixture(params=["_look_at_pages", "_look_at_bytes"])
def view(request, shared, monkeypatch):
    values = {"first": torch.zeros(PAGE), "second": torch.zeros((NUM_PAGES - 4) * PAGE // 4)}
    region = Region(shared, PAGE, lay_out(values))
    view = PrivateView(shared, [region])
    assert view._look.__name__ == "_look_at_pages"
    view._look = getattr(PrivateView, request.param)
    if request.param == "_look_at_bytes":
        view._num_faults = itertools.count().__next__
    return view


@pytest.mark.parametrize(
    ("like", "value"),
    [
        (torch.zeros(3, 5), torch.randn(3, 5)),
        (torch.zeros(3, 5), torch.nn.Parameter(torch.randn(3, 5))),
        (torch.zeros(3, 5), torch.randn(5, 3).T),
        (torch.zeros(5, 3).T, torch.randn(5, 3).T),
        (torch.zeros(3, 5), torch.randn(5).expand(3, 5)),
        (torch.zeros(3, 5), torch.randn(3, 5, dtype=torch.float64)),
        (torch.zeros(3), torch.randn(3, dtype=torch.complex64).conj().imag),
        (torch.zeros(3, dtype=torch.complex64), torch.randn(3, dtype=torch.complex64).conj()),
        (torch.zeros(()), torch.tensor(2.5)),
        (torch.zeros(0, 3), torch.randn(0, 3)),
        (torch.zeros(3, dtype=torch.bfloat16), torch.randn(3).bfloat16()),
    ],
)
def test_a_tensor_is_written_into_a_region_as_copy_does(shared, like, value):
    region = Region(shared, PAGE, lay_out({"before": torch.zeros(7), "it": like}))
    region.tensor(0).fill_(7)
    with torch.no_grad():
        region.put(1, value)
        assert torch.equal(region.tensor(1), like.copy_(value))
    assert region.tensor(0).tolist() == [7.0] * 7


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


def test_nothing_is_looked_at_where_no_page_has_faulted(view):
    values = view.regions[0].tensors()[0]
    assert values[0] == 0
    if view._look is PrivateView._look_at_bytes:
        pytest.skip("a page may have been written to with what it had")
    looks, look = [], view._look
    view._look = lambda view: looks.append(1) or look(view)
    assert [view.changed() for _ in range(20)] == [[]] * 20
    assert len(looks) < 20
    values[0] += 1
    assert [view.changed() for _ in range(2)] == [[(0, PAGE)]] * 2
    view.forget([(0, PAGE)])
    assert view.changed() == []
    values[1] += 1
    assert view.changed() == [(0, PAGE)]


def test_changes_are_found_after_the_garbage_collector_has_closed_the_page_map(view, tmp_path):
    view._closing()  # as where an abandoned loop is part of a cycle
    other = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    assert other <= view._pagemap  # the number may be another file's by now
    view.regions[0].tensors()[0][0] += 1
    assert view.changed() == [(0, PAGE)]
    os.close(other)
