"""What is in an IDX file? The format of MNIST and its relatives, packed with gzip or not.

::

    0  0  type  d │ size of dimension 1 │ … │ size of dimension d │ values, last index fastest
    ── bytes ──── │ 4 bytes each, big-endian                      │ big-endian

A file is untrusted: nothing is allocated on the word of its header. A plain file must have exactly
the size that the header asks for; a packed one is unpacked piece by piece, never further than one
byte past that size, and never beyond ``max_unpacked_bytes``.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch

from unisono.errors import DataFormatError

MAX_UNPACKED_BYTES = 4 << 30

_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP_MAGIC = b"\x1f\x8b"
_MAX_DIMENSIONS = 64  # torch computes with no more
_PIECE_BYTES = 1 << 20
_AGAIN = "copy or download the file again."


def read_idx(
    path: str | os.PathLike[str], *, max_unpacked_bytes: int = MAX_UNPACKED_BYTES
) -> torch.Tensor:
    """Read one IDX file, unpacking it first if its first bytes are gzip's, whatever its name.

    Args:
        path: the file.
        max_unpacked_bytes: the most that a packed file may unpack to, since a small one may hold
            a thousand times its size.

    Returns:
        A tensor of the file's shape and type: uint8, int8, int16, int32, float32 or float64.

    Raises:
        FileNotFoundError: there is no such file.
        DataFormatError: the file is not IDX, is truncated, too long, damaged or too large.
    """
    path = Path(path)
    with path.open("rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        is_packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        file.seek(0)
        if not is_packed:
            return _read(file, path, size_bytes=size_bytes, max_values_bytes=None)
        try:
            with gzip.GzipFile(fileobj=file) as unpacked:
                stream = cast(BinaryIO, unpacked)
                return _read(stream, path, size_bytes=None, max_values_bytes=max_unpacked_bytes)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise DataFormatError(
                f"{path}: a packed file must unpack without errors, but gzip says “{error}”: "
                f"{_AGAIN}"
            ) from error


def _read(
    file: BinaryIO, path: Path, *, size_bytes: int | None, max_values_bytes: int | None
) -> torch.Tensor:
    """Read header and values; ``size_bytes`` is the true size, None where only the end tells."""
    code, shape = _read_header(file, path)
    dtype = np.dtype(_DTYPES[code])
    values_bytes = math.prod(shape) * dtype.itemsize
    header_bytes = 4 + 4 * len(shape)
    wanted_bytes = header_bytes + values_bytes
    must = f"{path}: an IDX file of shape {shape} must be {wanted_bytes:,} bytes long"
    if size_bytes is not None and size_bytes != wanted_bytes:
        seen = "is" if size_bytes > wanted_bytes else "ends after"
        raise DataFormatError(f"{must}, but {seen} {size_bytes:,}: {_AGAIN}")
    if max_values_bytes is not None and values_bytes > max_values_bytes:
        raise DataFormatError(
            f"{path}: a packed file may hold at most {max_values_bytes:,} bytes, but its header "
            f"announces {values_bytes:,}: unpack it with gunzip, or pass `max_unpacked_bytes`."
        )
    values = _read_at_most(file, values_bytes + 1)
    if len(values) != values_bytes:
        is_cut = len(values) < values_bytes
        seen = f"ends after {header_bytes + len(values):,}" if is_cut else "goes on after that"
        raise DataFormatError(f"{must}, but {seen}: {_AGAIN}")
    array = np.frombuffer(values, dtype).astype(dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(array).reshape(shape)


def _read_header(file: BinaryIO, path: Path) -> tuple[int, tuple[int, ...]]:
    """Return the code of the type and the shape, both checked."""
    magic = _read_at_most(file, 4)
    if len(magic) < 4:
        raise DataFormatError(
            f"{path}: an IDX file must begin with 4 bytes of type and dimensions, "
            f"but ends after {len(magic)}: {_AGAIN}"
        )
    zero, code, num_dimensions = magic[:2], magic[2], magic[3]
    if zero != b"\0\0" or code not in _DTYPES or not 1 <= num_dimensions <= _MAX_DIMENSIONS:
        raise DataFormatError(
            f"{path}: an IDX file must begin with two zero bytes, a type "
            f"({', '.join(f'{known:02x}' for known in _DTYPES)}) and 1 … {_MAX_DIMENSIONS} "
            f"dimensions, but begins with {magic.hex(' ')}: check that this is the right file."
        )
    sizes = _read_at_most(file, 4 * num_dimensions)
    if len(sizes) < 4 * num_dimensions:
        raise DataFormatError(
            f"{path}: the header must hold the sizes of {num_dimensions} dimensions in "
            f"{4 * num_dimensions} bytes, but ends after {len(sizes)}: {_AGAIN}"
        )
    shape = tuple(int(size) for size in np.frombuffer(sizes, ">u4"))
    if 0 in shape:
        raise DataFormatError(
            f"{path}: every dimension must be at least 1, but the shape is {shape}, "
            f"so the file is empty or damaged: {_AGAIN}"
        )
    return code, shape


def _read_at_most(file: BinaryIO, num_bytes: int) -> bytearray:
    """Read up to ``num_bytes``, holding no more memory than the file has really given."""
    data = bytearray()
    while piece := file.read(min(num_bytes - len(data), _PIECE_BYTES)):
        data += piece
    return data
