"""IDX files: every type comes back, every kind of damage is named, no header is believed."""

from __future__ import annotations

import contextlib
import gzip
import struct
import tempfile
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unisono.data.idx import read_idx
from unisono.errors import DataFormatError

TYPES = {
    0x08: (">u1", torch.uint8),
    0x09: (">i1", torch.int8),
    0x0B: (">i2", torch.int16),
    0x0C: (">i4", torch.int32),
    0x0D: (">f4", torch.float32),
    0x0E: (">f8", torch.float64),
}


def header(code: int, *shape: int) -> bytes:
    return bytes([0, 0, code, len(shape)]) + struct.pack(f">{len(shape)}I", *shape)


def idx(values: np.ndarray, code: int = 0x08) -> bytes:
    return header(code, *values.shape) + values.astype(TYPES[code][0]).tobytes()


SMALL = idx(np.arange(12).reshape(3, 2, 2))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "file"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("code", TYPES)
def test_every_type_comes_back(file: Path, code: int, packed: bool) -> None:
    values = np.array([[0, 1, 2], [100, 101, 127]])
    file.write_bytes(gzip.compress(idx(values, code)) if packed else idx(values, code))
    tensor = read_idx(file)
    assert tensor.dtype == TYPES[code][1]
    assert tensor.tolist() == values.tolist()


def test_wide_values_keep_their_byte_order(file: Path) -> None:
    file.write_bytes(idx(np.array([-2, 70_000, 2**31 - 1]), 0x0C))
    assert read_idx(file).tolist() == [-2, 70_000, 2**31 - 1]


def test_the_tensor_may_be_written_to(file: Path) -> None:
    file.write_bytes(SMALL)
    assert read_idx(file).add_(1).flatten().tolist() == list(range(1, 13))


def test_gzip_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    (tmp_path / "plain.gz").write_bytes(SMALL)
    (tmp_path / "packed").write_bytes(gzip.compress(SMALL))
    assert torch.equal(read_idx(tmp_path / "plain.gz"), read_idx(tmp_path / "packed"))


def test_a_file_of_several_gzip_members_is_read(file: Path) -> None:
    file.write_bytes(gzip.compress(SMALL[:9]) + gzip.compress(SMALL[9:]))
    assert read_idx(file).shape == (3, 2, 2)


def test_a_missing_file_is_named(file: Path) -> None:
    with pytest.raises(FileNotFoundError, match="file"):
        read_idx(file)


def not_refused(file: Path, contents: Iterable[bytes], words: str) -> list[bytes]:
    """Find the contents that are read, or refused in other words."""

    def is_refused(content: bytes) -> bool:
        file.write_bytes(content)
        try:
            read_idx(file)
        except DataFormatError as error:
            return words in str(error)
        return False

    return [content for content in contents if not is_refused(content)]


CUT = [SMALL[:num_bytes] for num_bytes in range(len(SMALL))]


def test_truncation_at_every_byte_is_an_error(file: Path) -> None:
    assert not_refused(file, CUT, "ends after") == []
    assert not_refused(file, [SMALL], "ends after") == [SMALL]


def test_truncation_of_a_packed_file_at_every_byte_is_an_error(file: Path) -> None:
    packed = gzip.compress(SMALL)
    cut = [packed[:num_bytes] for num_bytes in range(2, len(packed))]
    assert not_refused(file, cut, "again") == []


def test_truncation_before_packing_is_an_error(file: Path) -> None:
    assert not_refused(file, map(gzip.compress, CUT), "ends after") == []


@given(content=st.binary(max_size=64))
def test_arbitrary_bytes_give_a_tensor_or_the_one_error(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "file")
        path.write_bytes(content)
        with contextlib.suppress(DataFormatError):
            assert read_idx(path).numel() > 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        pytest.param(SMALL + b"\0", "must be 28 bytes long, but is 29", id="plain"),
        pytest.param(gzip.compress(SMALL + b"\0"), "but goes on after that", id="packed"),
    ],
)
def test_a_file_that_is_too_long_is_an_error(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    with pytest.raises(DataFormatError, match=message):
        read_idx(file)


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"<!DOCTYPE html>" * 4, id="a web page"),
        pytest.param(b"\0\1" + SMALL[2:], id="second byte not zero"),
        pytest.param(header(0x0A, 1) + b"\0", id="no such type"),
        pytest.param(bytes([0, 0, 8, 0, 0]), id="no dimensions"),
        pytest.param(header(0x08, *[1] * 65) + b"\0", id="65 dimensions"),
    ],
)
def test_what_is_not_idx_is_refused(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    with pytest.raises(DataFormatError, match="must begin with two zero bytes"):
        read_idx(file)


def test_an_empty_dimension_is_refused(file: Path) -> None:
    file.write_bytes(header(0x08, 0, 2**32 - 1, 2**32 - 1))
    with pytest.raises(DataFormatError, match="every dimension must be at least 1"):
        read_idx(file)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("shape", [(2**30,), (2**32 - 1,) * 3])
def test_nothing_is_allocated_on_the_word_of_a_header(
    file: Path, shape: tuple[int, ...], packed: bool
) -> None:
    lie = header(0x08, *shape) + bytes(100)
    file.write_bytes(gzip.compress(lie) if packed else lie)
    tracemalloc.start()
    with pytest.raises(DataFormatError):
        read_idx(file)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 8 << 20


@pytest.mark.slow
def test_a_gzip_bomb_is_unpacked_no_further_than_its_header_says(file: Path) -> None:
    file.write_bytes(gzip.compress(header(0x08, 5) + bytes(64 << 20)))
    tracemalloc.start()
    with pytest.raises(DataFormatError, match="goes on after that"):
        read_idx(file)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 8 << 20


def test_a_packed_file_has_a_largest_size(file: Path) -> None:
    file.write_bytes(gzip.compress(SMALL))
    assert read_idx(file, max_unpacked_bytes=12).numel() == 12
    with pytest.raises(DataFormatError, match="at most 11 bytes, but its header announces 12"):
        read_idx(file, max_unpacked_bytes=11)


@pytest.mark.parametrize("position", [3, 10, 15, -6, -1])
def test_a_damaged_gzip_file_is_an_error(file: Path, position: int) -> None:
    packed = bytearray(gzip.compress(SMALL))
    packed[position] ^= 0xFF
    file.write_bytes(packed)
    with pytest.raises(DataFormatError, match="file"):
        read_idx(file)


def test_garbage_behind_a_gzip_file_is_an_error(file: Path) -> None:
    file.write_bytes(gzip.compress(SMALL) + b"garbage")
    with pytest.raises(DataFormatError, match="gzip says"):
        read_idx(file)
