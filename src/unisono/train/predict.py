"""Predictions for a dataset, one row a sample, in dataset order, whoever computed them.

The lead computes one batch to see what a row is, and makes the memory; then every worker writes
the rows of its shards, each once (see ``predictions``). A lead that is lost before the others have
found the memory is followed by another one, which makes it anew.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unisono.comm.history import History
from unisono.comm.team import Team
from unisono.data.fetch import Collate
from unisono.plan.samples import SamplePlan
from unisono.train.predictions import (
    Field,
    Rows,
    fields_of,
    finish_file,
    form_of,
    make_file,
    make_memory,
    partial_path,
    put_together,
)
from unisono.train.sweep import Part, by_all_workers, sweep

_TOLD_AT_MOST_BYTES = 1 << 22  # kept by the launcher for a replacement
Forward = Callable[[nn.Module, Any], Any]


def forward_inputs(model: nn.Module, batch: Any) -> Any:
    """Call the model with a batch, or with the first part of one that has several."""
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


class Predictor:
    """One prediction. Collective: every rank makes one and calls :meth:`predict`. Final.

    Args:
        model: in whatever mode.
        forward: (model, batch) → a tensor, or a tuple or dict of tensors, one row a sample.
        dataset: map-style.
        plan: of the dataset, without shuffling.
        team: the workers.
        path: the safetensors file to write; None: memory.
        loader_workers, collate_fn: as for training.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        dataset: Any,
        plan: SamplePlan,
        team: Team,
        path: Path | None,
        *,
        loader_workers: int = 0,
        collate_fn: Collate | None = None,
    ) -> None:
        self._model, self._forward, self._dataset = model, forward, dataset
        self._plan, self._team, self._path = plan, team, path
        self._loader_workers, self._collate_fn = loader_workers, collate_fn

    def once(self, history: History) -> Any:
        """Compute every row, or, in the place of a lost worker, take over what came of it.

        Collective: every rank calls it.

        Returns:
            What `forward` returns, with a row for every sample; this worker's own.

        Raises:
            TypeError, ValueError: `forward` returns something else than rows.
            OSError: the file cannot be made.
        """
        found: list[Any] = []

        def act() -> bytes:
            said, fd = self._predict()
            found.append(self._take(said, fd))
            if self._path is None:
                num_bytes = os.fstat(fd).st_size
                if num_bytes > _TOLD_AT_MOST_BYTES and self._team.host.can_replace:
                    self._team.host.give_up_recovery(
                        f"{num_bytes:,} bytes of predictions are held by the workers alone (with "
                        f"`path=` they are in a file)"
                    )
                told = os.pread(fd, num_bytes, 0) if num_bytes <= _TOLD_AT_MOST_BYTES else b""
            else:
                told = b""
            os.close(fd)
            return json.dumps(said).encode() + b"\n" + told

        words, _, told = history.together("predict", act).partition(b"\n")
        return found[0] if found else self._take_over(json.loads(words), told)

    def _take(self, said: dict[str, Any], fd: int) -> Any:
        fields = [Field.from_json(field) for field in said["fields"]]
        rows = Rows(os.dup(fd), fields, self._plan.num_samples, is_private=True)
        return put_together(said["form"], rows)

    def _take_over(self, said: dict[str, Any], told: bytes) -> Any:
        if self._path is not None:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        else:
            fd = os.memfd_create("unisono-predictions", os.MFD_CLOEXEC)
            with open(os.dup(fd), "wb") as file:
                file.write(told)
        try:
            return self._take(said, fd)
        finally:
            os.close(fd)

    def _predict(self) -> tuple[dict[str, Any], int]:
        """Compute every row. Collective.

        Returns:
            What a row is, and a descriptor of the file with the rows.
        """
        plan, team = self._plan, self._team
        reading = (self._model, self._dataset, plan, self._loader_workers, self._collate_fn)
        with sweep(*reading) as parts_of:
            said, fd = self._agree_on_memory(parts_of)
            try:
                fields = [Field.from_json(field) for field in said["fields"]]
                rows = Rows(os.dup(fd), fields, plan.num_samples, is_private=False)

                def write(shards: Sequence[int]) -> bytes:
                    for part in parts_of(shards):
                        output = self._forward(self._model, part.data)
                        rows.write(self._indices(part), fields_of(output, part.num_samples))
                    return b""

                for _ in by_all_workers(write, plan.shards, team, "predict"):
                    pass
                if self._path is not None:
                    self._tell(_finish)
            except BaseException:
                os.close(fd)
                if self._path is not None and team.is_lead:
                    with contextlib.suppress(OSError):
                        partial_path(self._path).unlink()
                raise
        return said, fd

    def _agree_on_memory(
        self, parts_of: Callable[[Sequence[int]], Iterator[Part]]
    ) -> tuple[dict[str, Any], int]:
        """Have the lead make the memory and everybody open it; again if the lead is lost.

        Returns:
            What a row is, and this worker's own descriptor.
        """

        def make(path: Path | None) -> dict[str, Any]:
            # The order is that of the dataset, so its first sample is in the first shard.
            first = next(parts_of([0]))
            output = self._forward(self._model, first.data)
            fields = list(fields_of(output, first.num_samples))
            num_samples = self._plan.num_samples
            made.append(
                make_memory(fields, num_samples)
                if path is None
                else make_file(path, fields, num_samples)
            )
            said = [field.as_json() for field in fields]
            return {"fields": said, "form": form_of(output), "fd": [os.getpid(), made[-1]]}

        made: list[int] = []
        try:
            while True:
                said = self._tell(make)
                fd = _open(said["fd"])
                answers = self._team.gather(b"" if fd < 0 else b"found", "predict")
                if all(answers.values()):
                    return said, fd
                if fd >= 0:
                    os.close(fd)
        finally:
            for descriptor in made:
                os.close(descriptor)

    def _tell(self, act: Callable[[Path | None], dict[str, Any]]) -> dict[str, Any]:
        """Have the lead do something with the file and tell all what came of it. Collective."""

        def speak() -> bytes:
            try:
                return json.dumps(act(self._path)).encode()
            except OSError as error:
                return json.dumps({"error": str(error)}).encode()

        said: dict[str, Any] = json.loads(self._team.hear_lead(speak, "predict"))
        if "error" in said:
            raise OSError(f"predictions must be written to {self._path}, but: {said['error']}.")
        return said

    def _indices(self, part: Part) -> torch.Tensor:
        order = torch.arange(self._plan.num_samples)
        return self._plan.shard_indices(order, part.batch, part.shard)


def _finish(path: Path | None) -> dict[str, Any]:
    assert path is not None
    finish_file(path)
    return {}


def _open(where: Sequence[int]) -> int:
    """Open what the lead has made; -1 if the lead has gone with it."""
    pid, fd = where
    try:
        return os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return -1
