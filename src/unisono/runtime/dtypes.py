"""What are the names of dtypes: in torch, in safetensors files, and in messages?

The table does not need torch: the launcher, which writes checkpoints, does not load it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_IN_FILES = {
    "torch.float64": ("F64", 8),
    "torch.float32": ("F32", 4),
    "torch.float16": ("F16", 2),
    "torch.bfloat16": ("BF16", 2),
    "torch.float8_e4m3fn": ("F8_E4M3", 1),
    "torch.float8_e4m3fnuz": ("F8_E4M3FNUZ", 1),
    "torch.float8_e5m2": ("F8_E5M2", 1),
    "torch.float8_e5m2fnuz": ("F8_E5M2FNUZ", 1),
    "torch.complex64": ("C64", 8),
    "torch.int64": ("I64", 8),
    "torch.int32": ("I32", 4),
    "torch.int16": ("I16", 2),
    "torch.int8": ("I8", 1),
    "torch.uint64": ("U64", 8),
    "torch.uint32": ("U32", 4),
    "torch.uint16": ("U16", 2),
    "torch.uint8": ("U8", 1),
    "torch.bool": ("BOOL", 1),
}
CODES = {name: code for name, (code, _) in _IN_FILES.items()}
"""safetensors' name for each dtype that its files can hold, by ``str(dtype)``."""

ITEM_BYTES = dict(_IN_FILES.values())
ITEM_BYTES_IN_MEMORY = ITEM_BYTES | {  # files cannot hold the last four, but slots can
    "torch.complex128": 16,
    "torch.complex32": 4,
    "torch.float8_e8m0fnu": 1,
    "torch.float4_e2m1fn_x2": 1,
}
_NAMES = {code: name for name, code in CODES.items()}


def code_of(dtype: torch.dtype) -> str:
    """Return safetensors' name for a dtype; torch's name if it has none."""
    return CODES.get(str(dtype), str(dtype))


def dtype_of(code: str) -> torch.dtype:
    """Return the dtype with a name from :func:`code_of` or :func:`dtype_name`."""
    import torch  # not above: the launcher imports this module without torch

    dtype: torch.dtype = getattr(torch, _NAMES.get(code, code).removeprefix("torch."))
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
