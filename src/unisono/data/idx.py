"""What is in an IDX file? The format of MNIST and its relatives, packed with gzip or not.

::

    0  0  type  d │ size of dimension 1 │ … │ size of dimension d │ values, last index fastest
    ── bytes ──── │ 4 bytes each, big-endian                      │ big-endian

A file is untrusted: its header may ask for no more than the file can hold, and a packed file is
unpacked no further than one byte past what its header says, and never beyond a gigabyte.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import torch

from unisono.errors import DataFormatError

_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_DIMENSIONS = range(1, 65)  # torch computes with no more
_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_RATIO = 1032  # no byte unpacks to more
_MAX_UNPACKED_BYTES = 1 << 30


def read_idx(path: str | os.PathLike[str]) -> torch.Tensor:
    """Read one IDX file, unpacking it first if its first bytes are gzip's, whatever its name.

    Returns:
        A tensor of the file's shape and type: uint8, int8, int16, int32, float32 or float64.

    Raises:
        FileNotFoundError: there is no such file.
        DataFormatError: the file is not IDX, is truncated, too long, damaged or too large.
    """
    with Path(path).open("rb") as file:
        most_bytes = os.fstat(file.fileno()).st_size
        is_packed = file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
        file.seek(0)
        if is_packed:
            most_bytes = min(most_bytes * _GZIP_RATIO, _MAX_UNPACKED_BYTES)
        try:
            with gzip.GzipFile(fileobj=file) if is_packed else nullcontext(file) as content:
                return _read(cast(BinaryIO, content), most_bytes)
        except (gzip.BadGzipFile, EOFError, zlib.error, ValueError) as error:
            raise DataFormatError(
                f"{path} must be a whole IDX file, packed with gzip or not, but “{error}”: copy or "
                f"download it again."
            ) from error


def _read(file: BinaryIO, most_bytes: int) -> torch.Tensor:
    """Read header and values, of which there are some at most.

    Raises:
        ValueError: the file is not what its header says.
    """
    magic = file.read(4)
    if (
        len(magic) < 4
        or magic[:2] != b"\0\0"
        or magic[2] not in _DTYPES
        or magic[3] not in _DIMENSIONS
    ):
        raise ValueError(f"it begins with {magic.hex(' ')}, which is no type and dimensions")
    sizes = file.read(4 * magic[3])
    if len(sizes) < 4 * magic[3]:
        raise ValueError("it ends within the sizes of its dimensions")
    shape = [int(size) for size in np.frombuffer(sizes, ">u4")]
    dtype = np.dtype(_DTYPES[magic[2]])
    num_bytes = math.prod(shape) * dtype.itemsize
    if not 0 < num_bytes <= most_bytes:
        raise ValueError(
            f"its shape {shape} asks for {num_bytes:,} bytes of {most_bytes:,} at most"
        )
    values = file.read(num_bytes + 1)
    if len(values) != num_bytes:
        seen = "goes on" if len(values) > num_bytes else f"ends after {len(values):,}"
        raise ValueError(f"it {seen}, where its shape {shape} asks for {num_bytes:,} bytes")
    array = np.frombuffer(values, dtype).astype(dtype.newbyteorder("="))
    return torch.from_numpy(array).reshape(shape)
