"""Places that may have changed are found, by whatever way they did, and others are not read."""

from __future__ import annotations

import random
import threading
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unisono.programs import holders
from unisono.programs.account import Account
from unisono.programs.holders import Content, Holder, Kind
from unisono.programs.unchanged import Unchanged
from unisono.programs.walk import Walk


class Node:
    def __init__(self, number: int) -> None:
        self.number, self.others = number, [number + 0.5]


class Other(Node):
    pass


def _many(number: int = 300) -> list[Any]:
    return [thing for n in range(number) for thing in _of_each_kind(n)]


def _of_each_kind(n: int) -> list[Any]:
    things = [[n], {"row": n, "tags": [str(n)]}, Node(n), deque([n]), {n}, np.full(2, n), (n, [n])]
    if n == 0:
        things[6] = local = threading.local()
        local.number = n
    return things


def _places(things: list[Any]) -> list[Holder]:
    return Walk({"things": things}).holders


def _replace_attributes(node: Node) -> None:
    node.__dict__ = dict(node.__dict__)
    node.__dict__["number"] = -1


CHANGES = {
    "an item": lambda things: things[7].__setitem__(0, 3.25),
    "a longer list": lambda things: things[7].append(1),
    "two items that swap": lambda things: things[1]["tags"].__setitem__(0, things[8]["tags"][0]),
    "a value": lambda things: things[8].__setitem__("row", -1),
    "a key": lambda things: things[8].__setitem__("more", 0),
    "another order of keys": lambda things: things[8].update(row=things[8].pop("row")),
    "an attribute": lambda things: setattr(things[9], "number", -1),
    "a new attribute": lambda things: setattr(things[9], "more", 0),
    "no attribute": lambda things: delattr(things[9], "others"),
    "a class": lambda things: setattr(things[9], "__class__", Other),
    "other attributes": lambda things: _replace_attributes(things[9]),
    "a deque": lambda things: things[10].append(1),
    "a set": lambda things: things[11].add(-1),
    "an array": lambda things: things[12].fill(5),
    "an attribute of this thread": lambda things: setattr(things[6], "number", -1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_found_and_put_back(change: str) -> None:
    things = _many()
    places = _places(things)
    before = Account(places)
    assert before.changes() == []
    CHANGES[change](things)
    assert len(before.changes()) == 1
    again = Account(places, like=before)
    assert again.changes() == []
    before.put_back()
    assert before.changes() == []
    assert len(again.changes()) == 1


def test_a_set_with_equal_elements_has_not_changed() -> None:
    elements, locks = {"one-0", 2.5, None}, {object(), object()}
    before = Account(_places([elements, locks]))
    assert before.changes() == []
    elements.clear()
    elements |= {"-".join(("one", "0")), 5.0 / 2, None}
    locks |= {*locks}
    assert before.changes() == []
    locks.add(object())
    elements |= {2, -0.0}
    assert len(before.changes()) == 2


@settings(max_examples=25)
@given(st.integers(0, 2**32))
def test_an_account_like_another_is_that_of_a_new_reading(seed: int) -> None:
    drawn, things = random.Random(seed), _many(40)
    places = _places(things)
    account = Account(places)
    for _ in range(3):
        for _ in range(drawn.randrange(4)):
            node = things[drawn.randrange(40) * 7 + 2]
            node.others.append(drawn.random())
            things[drawn.randrange(40) * 7][0] = drawn.random()
        account, read = Account(places, like=account), Account(places)
        assert [account.content(one) for one in read.holders] == [
            read.content(one) for one in read.holders
        ]
        assert [one.key for one in account.holders] == [one.key for one in read.holders]
        assert account.changes() == []


def test_what_could_not_be_read_is_read_once_it_can_be() -> None:
    late: list[int] = []

    def read(owner: Any, names: Any) -> Content:
        return (), (owner[0],)  # raises as long as it is empty

    places = [Holder("late", Kind("late", read), late, key="late")]
    before = Account(places)
    late.append(1)
    again = Account(places, like=before)
    late[0] = 2
    assert [change.holder for change in again.changes()] == places


def test_only_what_may_have_changed_is_read() -> None:
    things = [[n] for n in range(2000)]
    unchanged = Unchanged({each.key: (each, each.read()) for each in _places(things)})
    assert len([*unchanged.rest()]) <= 1
    things[300][0] = -1
    assert 0 < len([*unchanged.rest()]) <= 300


def test_a_list_that_has_grown_beyond_what_is_read_whole_is_compared() -> None:
    things = [[0], [1]]
    places = _places(things)
    before = Account(places)
    things[0].extend(range(1 << 17))
    again = Account(places, like=before)
    assert len(before.changes()) == 1
    assert again.changes() == []
    things[0][0] = -1
    assert len(again.changes()) == 1


VALUES = {
    "an array": lambda: np.arange(6.0),
    "an array across memory": lambda: np.arange(6.0).reshape(2, 3).T,
    "an array without elements": lambda: np.zeros((0, 3)),
    "texts": lambda: np.array(["a", "bc"]),
    "a tensor": lambda: torch.arange(6.0),
    "a tensor across memory": lambda: torch.arange(6.0).reshape(2, 3).T,
    "one without elements": lambda: torch.zeros(0, 3),
    "a truth": lambda: torch.tensor([True, False]),
    "a half": lambda: torch.ones(3, dtype=torch.bfloat16),
    "a complex one": lambda: torch.ones(3, dtype=torch.complex64),
    "not a number": lambda: torch.tensor([float("nan")]),
    "one to be trained": lambda: torch.ones(3, requires_grad=True),
}


@pytest.mark.parametrize("value", VALUES)
def test_what_is_as_its_copy_is_not_hashed(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    things = [VALUES[value]()]
    account = Account(_places(things))
    monkeypatch.setattr(holders, "hashed", lambda *_: pytest.fail("it was hashed"))
    assert not account.changes()


UNLIKE = {
    "a sign of zero": (torch.zeros(3), lambda one: one.neg_()),
    "another not-a-number": (
        torch.tensor([float("nan")]),
        lambda one: one.view(torch.int32).add_(1),
    ),
    "one that is trained now": (torch.zeros(3), lambda one: one.requires_grad_()),
    "another shape": (torch.zeros(6), lambda one: one.resize_(2, 3)),
    "another dtype": (torch.zeros(6), lambda one: setattr(one, "data", one.data.int())),
    "a conjugate": (torch.ones(3, dtype=torch.complex64) * 1j, lambda one: one.conj_physical_()),
    "a sign in an array": (np.zeros(3), lambda one: np.negative(one, out=one)),
    "another shape of an array": (np.zeros(6), lambda one: one.resize(2, 3, refcheck=False)),
    "a text": (np.array(["a"]), lambda one: one.__setitem__(0, "b")),
}


@pytest.mark.parametrize("change", UNLIKE)
def test_any_other_bits_are_a_change(change: str) -> None:
    value, change_it = UNLIKE[change]
    account = Account(_places([value]))
    again = Account(account._walked, like=account)
    change_it(value)
    assert [each.holder.owner is value for each in account.changes()] == [True]
    assert [each.holder.owner is value for each in again.changes()] == [True]
    again.put_back()
    if "trained" not in change:
        assert not account.changes()
