"""One file of predictions, mapped and written by all workers of a host.

It holds the rows of one tensor after those of another. The worker that computed a row writes it
once, at its sample's index; with several hosts, one worker of each then sends its rows to the
others. The result is a private mapping: changes stay in the worker that makes them, and rows are
read when they are accessed.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping
from typing import Any, final

import torch
from safetensors.torch import load as from_safetensors
from safetensors.torch import save as to_safetensors

from unisono.plan.samples import SamplePlan
from unisono.runtime.device import on_host
from unisono.runtime.dtypes import CODES, dtype_name, dtype_of
from unisono.runtime.workers.memory import Memory
from unisono.runtime.workers.team import Team

_CHUNK_BYTES = 4 << 20  # of rows that a host sends at a time
_RESERVED = "__metadata__"  # by safetensors files

Output = Mapping[str, torch.Tensor]
"""A model's output as tensors by name, with one row per sample in each."""

Layout = dict[str, Any]
"""Each tensor's dtype, shape and first byte in the file, by name; as plain JSON."""


def form_of(output: Any) -> str:
    """Return what holds the tensors of a model's output, for :func:`put_together`."""
    if isinstance(output, Mapping):
        return "dict"
    return "tuple" if isinstance(output, (tuple, list)) else "tensor"


def put_together(form: str, output: Output) -> Any:
    """Return predictions in the form of the model's output: a tensor, a tuple or a dict."""
    if form == "dict":
        return dict(output)
    tensors = tuple(output.values())
    return tensors if form == "tuple" else tensors[0]


def taken_apart(output: Any, num_samples: int) -> Output:
    """Return a model's output as tensors by name; raise if one lacks a row for each sample."""
    form = form_of(output)
    if form == "dict":
        tensors = dict(output)
    elif form == "tuple":
        tensors = {str(number): tensor for number, tensor in enumerate(output)}
    else:
        tensors = {"predictions": output}
    for name, tensor in tensors.items():
        if not isinstance(name, str) or name == _RESERVED:
            raise TypeError(
                f"names of predictions in a dict must be strings other than {_RESERVED!r}, which "
                f"safetensors reserves, but one is {name!r}, of type {type(name).__name__}: "
                f"rename it."
            )
        is_tensor = isinstance(tensor, torch.Tensor)
        if not is_tensor or tensor.layout != torch.strided or str(tensor.dtype) not in CODES:
            kind = f"{tensor.dtype}, {tensor.layout}" if is_tensor else type(tensor).__name__
            raise TypeError(
                f"predictions must be a dense tensor, or a tuple or dict of them, of dtypes that a "
                f"safetensors file can hold, but {name!r} is of type {kind}: return such tensors "
                f"from `forward`."
            )
        if tensor.dim() == 0 or tensor.shape[0] != num_samples:
            raise ValueError(
                f"predictions must have one row for each sample, but for {num_samples} samples "
                f"{name!r} has the shape {tuple(tensor.shape)}: let `forward` keep the first "
                f"dimension."
            )
    return tensors


def layout_of(output: Output, num_samples: int) -> tuple[Layout, int]:
    """Return where the rows of all samples go in a file, and its size in bytes."""
    starts, end = {}, 0
    shapes = {name: [num_samples, *tensor.shape[1:]] for name, tensor in output.items()}
    # Wide elements first, so all are aligned.
    for name, tensor in sorted(output.items(), key=lambda item: -item[1].itemsize):
        starts[name], end = end, end + math.prod(shapes[name]) * tensor.itemsize
    codes = {name: CODES[str(tensor.dtype)] for name, tensor in output.items()}
    return {name: [codes[name], shapes[name], starts[name]] for name in output}, max(end, 1)


@final
class Rows:
    """The predictions for a whole dataset, in a file that is mapped in this process."""

    def __init__(self, fd: int, layout: Layout, *, is_private: bool) -> None:
        flags = mmap.MAP_PRIVATE if is_private else mmap.MAP_SHARED
        memory = Memory(mmap.mmap(fd, os.fstat(fd).st_size, flags=flags))
        self.tensors = {
            name: memory.tensor(start, shape, dtype_of(code), None)
            for name, (code, shape, start) in layout.items()
        }
        self._kinds = _kinds(self.tensors)

    def write(self, indices: torch.Tensor, output: Output) -> None:
        """Write the rows of some samples; raise if they do not match those of the first batch."""
        if _kinds(output) != self._kinds:
            raise ValueError(
                f"predictions must have the same names, dtypes and shapes for every batch, but "
                f"were {_in_words(self.tensors)} for the first and are {_in_words(output)} here: "
                f"pad rows to one length, for example."
            )
        for name, tensor in output.items():
            self.tensors[name][indices] = on_host(tensor)

    def read(self, indices: torch.Tensor) -> bytes:
        """Return the rows of some samples, for :meth:`take` on another host."""
        return to_safetensors({name: tensor[indices] for name, tensor in self.tensors.items()})

    def take(self, indices: torch.Tensor, data: bytes) -> None:
        """Write rows from :meth:`read` as those of some samples."""
        found = from_safetensors(data)
        self.write(indices, {name: found[name] for name in self.tensors})


def share_rows(
    rows: Rows, team: Team, host_of: Mapping[int, int], plan: SamplePlan, chunk: int = _CHUNK_BYTES
) -> None:
    """Send each host's rows to all others; `host_of` says who computed a shard. Collective."""
    if len(team.hosts) == 1:
        return
    indices = [plan.positions(0)[:0] for _ in team.hosts]
    for shard, host in sorted(host_of.items()):
        indices[host] = torch.cat([indices[host], plan.indices(0, shard)])
    row_bytes = sum(tensor[:1].nbytes for tensor in rows.tensors.values())
    num = max(1, chunk // max(1, row_bytes))
    for start in range(0, max(map(len, indices)), num):
        here = [some[start : start + num] for some in indices]
        while True:
            if team.leads_host:
                team.attach(rows.read(here[team.host]))
            all_came = team.meet("rows of predict")
            for rank, data in team.attached().items():
                host = next(at for at, ranks in enumerate(team.hosts) if rank in ranks)
                if team.leads_host:
                    rows.take(here[host], data)
            if all_came:
                break
    team.meet("rows of predict")  # before a neighbour reads what was written last


def _kinds(output: Output) -> list[tuple[str, torch.dtype, torch.Size]]:
    return [(name, tensor.dtype, tensor.shape[1:]) for name, tensor in output.items()]


def _in_words(output: Output) -> str:
    return ", ".join(
        f"{name} of {dtype_name(dtype)} {list(row)}" for name, dtype, row in _kinds(output)
    )
