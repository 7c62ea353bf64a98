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
    assert not_refused(file, CUT, "again") == []
    assert not_refused(file, [SMALL], "again") == [SMALL]


def test_truncation_of_a_packed_file_at_every_byte_is_an_error(file: Path) -> None:
    packed = gzip.compress(SMALL)
    cut = [packed[:num_bytes] for num_bytes in range(len(packed))]
    assert not_refused(file, [*cut, *map(gzip.compress, CUT)], "again") == []


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
        pytest.param(SMALL + b"\0", "goes on, where its shape", id="too long"),
        pytest.param(
            gzip.compress(SMALL + b"\0"), "goes on, where its shape", id="packed too long"
        ),
        pytest.param(gzip.compress(SMALL) + b"garbage", "Not a gzipped file", id="garbage behind"),
        pytest.param(b"<!DOCTYPE html>" * 4, "begins with 3c 21 44 4f", id="a web page"),
        pytest.param(b"\0\1" + SMALL[2:], "begins with 00 01", id="second byte not zero"),
        pytest.param(header(0x0A, 1) + b"\0", "begins with 00 00 0a", id="no such type"),
        pytest.param(bytes([0, 0, 8, 0, 0]), "begins with 00 00 08 00", id="no dimensions"),
        pytest.param(header(0x08, *[1] * 65) + b"\0", "begins with 00 00 08 41", id="65 of them"),
        pytest.param(header(0x08, 0, 2**32 - 1), "asks for 0 bytes", id="empty dimension"),
        pytest.param(
            gzip.compress(header(0x08, 2**31) + bytes(1 << 22)), "at most", id="too large"
        ),
    ],
)
def test_what_is_not_idx_is_refused(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    with pytest.raises(DataFormatError, match=message):
        read_idx(file)


@pytest.mark.parametrize(
    "content",
    [
        header(0x08, 2**30) + bytes(100),
        header(0x08, *(2**32 - 1,) * 3) + bytes(100),
        gzip.compress(header(0x08, 2**30) + bytes(100)),
        gzip.compress(header(0x08, 5) + bytes(64 << 20)),
    ],
    ids=["a large count", "a count that overflows", "a large count in gzip", "a bomb"],
)
def test_no_more_is_allocated_than_the_file_can_hold(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    tracemalloc.start()
    with pytest.raises(DataFormatError):
        read_idx(file)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 8 << 20


@pytest.mark.parametrize("position", [3, 10, 15, -6, -1])
def test_a_damaged_gzip_file_is_an_error(file: Path, position: int) -> None:
    packed = bytearray(gzip.compress(SMALL))
    packed[position] ^= 0xFF
    file.write_bytes(packed)
    with pytest.raises(DataFormatError, match="file"):
        read_idx(file)
