"""Arrays come back of their parts, whatever their dtype; what no element uses does not count."""

import operator

import numpy as np
import pytest
import torch

from unisono.programs.arrays import array_of, bits, dtype_of, parts_of_array, parts_of_dtype
from unisono.programs.forms import FORMS

ALIGNED = np.dtype([("a", "i1"), ("b", "f8"), ("c", "i2", (3,))], align=True)
DTYPES = [
    *map(np.dtype, ("f4", ">f4", "U3", "S0", "V4", "M8[ns]", "O", "g", "G", "?")),
    ALIGNED,
    np.dtype([("a", ALIGNED), ("b", "O"), ("c", ">g")]),
    np.dtype((np.record, [("a", "i1"), ("b", "f8")])),
    np.dtype({"names": ["w", "l"], "formats": ["u4", "u2"], "offsets": [0, 0], "itemsize": 24}),
    np.dtype([(("a title", "a"), "f4")]),
    np.dtype([]),
    np.dtypes.StringDType(),
    np.dtypes.StringDType(coerce=False),
]


def again(value):
    """Take a dtype apart and make it, with those in it."""
    if isinstance(value, np.dtype):
        return dtype_of(*map(again, parts_of_dtype(value)))
    if isinstance(value, dict):
        return {key: again(part) for key, part in value.items()}
    return [*map(again, value)] if isinstance(value, list) else value


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_dtype_and_its_arrays_come_back(dtype):
    made = again(dtype)
    assert made == dtype
    assert made.type is dtype.type
    assert (made.itemsize, made.isalignedstruct) == (dtype.itemsize, dtype.isalignedstruct)
    for array in (np.zeros((2, 3), dtype), np.zeros((), dtype), np.zeros((0, 2), dtype)):
        copy = array_of(*parts_of_array(array))
        assert (copy.dtype, copy.shape) == (array.dtype, array.shape)
        assert repr(copy) == repr(array)


def test_objects_stay_the_objects():
    array = np.empty((2, 2), object)
    array[0, 0], array[0, 1], array[1, 0] = [1, 2], (3, 4), np.ones(3)
    copy = array_of(*parts_of_array(array))
    assert all(map(operator.is_, copy.flat, array.flat))


def test_a_dtype_that_has_no_text_is_refused():
    with pytest.raises(TypeError, match="text"):
        parts_of_dtype(np.dtypes.StringDType(na_object=None))


@pytest.mark.parametrize("dtype", [np.dtype("g"), np.dtype("G"), ALIGNED], ids=str)
def test_bytes_that_no_element_uses_do_not_count(dtype):
    arrays = []
    for junk in (0, 255):
        array = np.frombuffer(bytearray([junk] * 3 * dtype.itemsize), dtype)
        for name in dtype.names or [...]:
            array[name] = 1 / 3
        arrays.append(array)
    one, other = arrays
    assert bits(one) == bits(other)
    assert bits(one[::2]) == bits(other[:2])
    assert bits(one[0:1].reshape(())) == bits(other[1:2])
    assert repr(np.frombuffer(bits(one), dtype)) == repr(one)


def test_another_element_has_other_bits():
    one, other = np.zeros(2, ALIGNED), np.zeros(2, ALIGNED)
    other["c"][1, 2] = 1
    assert bits(one) != bits(other)
    assert bits(np.array([0.0])) != bits(np.array([-0.0]))


@pytest.mark.parametrize(
    "parts",
    [
        (np.dtype("f4"), (10**13,), b"1234"),
        (np.dtype("f4"), (10**13,), b""),
        (np.dtype("O"), (10**13,), [1]),
        (np.dtype([("a", "f4")]), (10**13,), np.zeros(3, "f4")),
        (np.dtype([("a", "f4")]), (2,)),
    ],
    ids=str,
)
def test_a_shape_without_its_elements_takes_no_memory(parts):
    with pytest.raises(ValueError, match=r"shape|buffer"):
        array_of(*parts)


class Poses(tuple):
    n_sequence_fields = 2


def test_only_classes_of_c_make_struct_sequences():
    make = FORMS["struct sequence"]
    found = torch.max(torch.ones(2, 3), 1)
    assert make.fits(found)
    assert type(make.make(*make.parts(found))) is type(found)
    assert not make.fits(Poses((1, 2)))
    with pytest.raises(ValueError, match="Poses"):
        make.make(Poses, (1, 2), {})
