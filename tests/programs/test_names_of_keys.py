"""Keys of dicts are written as texts, and read back."""

import pytest

from unisono.programs.holders import key_of_name, name_of_key


@pytest.mark.parametrize(
    "key", ["a", "", 0, True, None, (1, "b"), 1.5, b"x", "\x01a", -3, ((1,), 2), 10**40, 2j]
)
def test_a_plain_key_comes_back(key):
    name = name_of_key(key)
    assert isinstance(name, str)
    assert repr(key_of_name(name)) == repr(key)


class Number(int):
    pass


@pytest.mark.parametrize(
    "key", [float("nan"), (float("inf"),), object(), frozenset([1]), Number(1)]
)
def test_other_keys_have_no_name(key):
    assert name_of_key(key) == ""


@pytest.mark.parametrize("name", ["\x01print(1)", "\x01(", "\x01x"])
def test_a_text_that_is_no_key_is_refused(name):
    with pytest.raises(ValueError, match=r"malformed|is no key"):
        key_of_name(name)
