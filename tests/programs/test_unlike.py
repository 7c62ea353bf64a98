"""Values of two workers are compared; each worker here is a thread."""

import threading
from types import SimpleNamespace

from unisono.programs.carry import Known
from unisono.programs.unlike import values_unlike
from unisono.programs.walk import Walk


class Pair:
    """Two workers that gather each other's messages."""

    size = 2

    def __init__(self):
        self.barrier, self.messages = threading.Barrier(2, timeout=20), {}

    def of(self, rank):
        def gather(message, purpose):
            self.messages[purpose, rank] = message
            self.barrier.wait()
            return {each: self.messages[purpose, each] for each in (0, 1)}

        return SimpleNamespace(size=2, gather=gather, world=SimpleNamespace(rank=rank))


def unlike_of(*values):
    """Return what each worker finds of a `thing` with such a value, and the lines."""
    pair, found, lines = Pair(), [None, None], []

    def find(rank):
        thing = SimpleNamespace(value=values[rank])
        walk = Walk({"thing": thing})
        places = walk.holders, Known(walk.things, walk.names, dict)
        found[rank] = values_unlike(pair.of(rank), lambda: places, lines.append)

    threads = [threading.Thread(target=find, args=(rank,)) for rank in (0, 1)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return [[(one.path, one.here, one.there) for one in each] for each in found], lines


def test_plain_values_and_tuples_are_exchanged():
    (here, there), lines = unlike_of((1, "a"), (2, "a"))
    assert here == [("thing.value", (1, "a"), (2, "a"))]
    assert there == [("thing.value", (2, "a"), (1, "a"))]
    assert unlike_of(3, 3) == ([[], []], [])
    assert not lines


def test_the_id_of_an_object_means_the_object_that_a_worker_has_there():
    some, others = SimpleNamespace(), SimpleNamespace()

    def by_id(first, second):
        gains = {id(first): 1.0, id(second): 2.0, 7: "a"}
        return {"objects": [first, second], "gains": gains, "newest": id(second)}

    assert unlike_of(by_id(some, others), by_id(others, some)) == ([[], []], [])
    (here, _), _ = unlike_of(by_id(some, others), by_id(some, others) | {"newest": id(some)})
    assert here == [("thing.value['newest']", id(others), id(some))]


def test_a_function_that_only_the_other_worker_can_find_is_reported():
    names = [{}, {}]
    for rank, space in enumerate(names):
        exec(f"def way(value):\n    return value * {rank}", space)
    _, lines = unlike_of(*(space["way"] for space in names))
    assert lines
    assert all("differs between workers, and what another" in line for line in lines)
