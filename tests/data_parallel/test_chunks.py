"""How batches are cut and outputs joined: tables, on the CPU."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, namedtuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pack_sequence

from unisono.distributed.chunks import count_chunks, cut, join, places

CPU = torch.device("cpu")
Pair = namedtuple("Pair", "one other")


@pytest.mark.slow
@given(st.integers(1, 200), st.integers(1, 40))
def test_the_cut_is_that_of_torch_chunk(batch, shards):
    tensor = torch.arange(batch)
    count = count_chunks((tensor,), {}, shards, 0)
    chunks = [args[0] for args, _ in cut((tensor,), {}, [CPU] * count, 0)]
    assert [len(chunk) for chunk in chunks] == [len(chunk) for chunk in tensor.chunk(shards)]
    assert torch.cat(chunks).equal(tensor)


def test_devices_share_chunks_in_contiguous_ranges():
    devices = [torch.device("cuda", index) for index in range(3)]
    shared = [[device.index for device in places(chunks, devices)] for chunks in (1, 2, 3, 8)]
    assert shared == [[0], [0, 1], [0, 1, 2], [0, 0, 0, 1, 1, 1, 2, 2]]


def test_every_tensor_is_cut_and_the_rest_is_shared():
    x, thing = torch.arange(4), object()
    args = (x, [x, (x, None)], Pair(x, 3), "word", [], OrderedDict(a=x, b=thing))
    first, second = cut(args, {"mask": x, "flag": True}, [CPU] * 2, 0)
    assert first[1]["mask"].tolist() == [0, 1]
    assert first[1]["flag"] is True
    tensor, nested, pair, word, empty, mapping = second[0]
    assert tensor.tolist() == nested[0].tolist() == nested[1][0].tolist() == [2, 3]
    assert nested[1][1] is None
    assert type(pair) is Pair
    assert pair.one.tolist() == [2, 3]
    assert (pair.other, word, empty) == (3, "word", [])
    assert type(mapping) is OrderedDict
    assert mapping["b"] is thing


def test_other_dimensions_can_be_cut():
    args = (torch.arange(6).view(2, 3),)
    assert count_chunks(args, {}, 3, 1) == count_chunks(args, {}, 3, -1) == 3
    assert cut(args, {}, [CPU] * 3, 1)[2][0][0].tolist() == [[2], [5]]


def test_a_chunk_has_memory_of_its_own():
    x = torch.zeros(4)
    for args, _ in cut((x,), {}, [CPU] * 2, 0):
        args[0].add_(1)
    assert x.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("args", "kwargs", "count"),
    [((), {}, 1), ((3,), {}, 4), ((), {"flag": True}, 4), (([], {}), {}, 4)],
)
def test_what_cannot_be_cut_is_given_to_every_chunk(args, kwargs, count):
    assert count_chunks(args, kwargs, 4, 0) == count
    assert cut(args, kwargs, [CPU] * count, 0) == [(args, kwargs)] * count


REFUSED = {
    "sizes": (
        (torch.zeros(8), [torch.zeros(2)]),
        ValueError,
        r"`args\[0\]` has 8 in dimension 0, .* 4 of at most 4, and `args\[1\]\[0\]` has 2",
    ),
    "a number": ((torch.tensor(3.0),), ValueError, r"`args\[0\]` has shape \(\): pass a number"),
    "packed": (
        (pack_sequence([torch.zeros(3), torch.zeros(2)]),),
        TypeError,
        "one is a PackedSequence: pass padded",
    ),
}


@pytest.mark.parametrize("refused", REFUSED)
def test_inputs_that_do_not_chunk_are_refused(refused):
    args, error, message = REFUSED[refused]
    with pytest.raises(error, match=message):
        count_chunks(args, {}, 4, 0)


def test_equally_many_chunks_may_have_other_sizes():
    assert count_chunks((torch.zeros(8),), {"boxes": torch.zeros(16)}, 4, 0) == 4


def test_outputs_keep_their_form():
    def output(value):
        x = torch.full((1, 2), float(value))
        return {"a": x, "b": [x, (x, None)], "pair": Pair(x, x)}

    made = join([output(0), output(1), output(2)], CPU, 0)
    assert made["a"].tolist() == made["b"][1][0].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert made["b"][1][1] is None
    x = torch.zeros(1)
    assert [one.tolist() for one in join([(x, x), (x, x + 1)], CPU, 0)] == [[0, 0], [0, 1]]
    assert type(made["b"]) is list
    assert type(made["pair"]) is Pair
    assert join([torch.zeros(2, 1), torch.ones(2, 2)], CPU, 1).tolist() == [[0, 1, 1]] * 2
    assert join([defaultdict(list, a=torch.ones(1))] * 2, CPU, 0)["a"].tolist() == [1, 1]


def test_scalars_become_a_vector_with_torchs_warning():
    with pytest.warns(UserWarning, match="Was asked to gather along dimension 0, but all"):
        made = join([torch.tensor(1.0), torch.tensor(2.0)], CPU, 0)
    assert made.tolist() == [1, 2]


UNEVEN = {
    "shapes": (
        [torch.zeros(2, 4), torch.zeros(2, 5)],
        ValueError,
        r"but `output` has shape \(2, 4\) in chunk 0 and \(2, 5\) in chunk 1: pad .*total_length",
    ),
    "scalar among vectors": (
        [[torch.zeros(2)], [torch.tensor(0.0)]],
        ValueError,
        r"`output\[0\]` has shape \(2,\) in chunk 0 and \(\) in chunk 1",
    ),
    "keys": (
        [{"a": torch.zeros(1)}, {"a": torch.zeros(1), "b": torch.zeros(1)}],
        ValueError,
        r"the same keys and equally many values, but `output\['b'\]` is not in all of them",
    ),
    "lengths": ([(torch.zeros(1),), ()], ValueError, r"but `output\[0\]` is not in all"),
    "kinds": ([torch.zeros(1), None], TypeError, "`output` is of NoneType and Tensor"),
    "numbers": ([[3.0], [3.0]], TypeError, r"`output\[0\]` is of float: return a tensor"),
}


@pytest.mark.parametrize("uneven", UNEVEN)
def test_outputs_that_do_not_fit_are_refused(uneven):
    outputs, error, message = UNEVEN[uneven]
    with pytest.raises(error, match=message):
        join(outputs, CPU, 0)
