"""Predictions for a dataset, one row a sample, in dataset order, whoever computed them.

The leader computes one batch to see what a row is, and makes the file (see ``rowsfile``); then
every worker writes the rows of its shards, each once (see ``predictions``). A leader that is lost
before the others have opened the file is followed by another one, which makes it anew.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import nn

from unisono.data.collating import Collate
from unisono.errors import MismatchError
from unisono.plainfile import open_plain
from unisono.plan.samples import SamplePlan
from unisono.train.failures import failure, raised
from unisono.train.ledger import Ledger
from unisono.train.predictions import Field, Rows, fields_of, form_of, put_together
from unisono.train.rowsfile import (
    check_path,
    finish_file,
    identity_of,
    make_file,
    make_memory,
    open_file,
    open_memory,
    partial_path,
    remove,
)
from unisono.train.sweep import Part, agree_on, by_all_workers, sweep
from unisono.workers.joint_calls import JointCalls
from unisono.workers.launcher_messages import KeepFile, RemoveAtEnd
from unisono.workers.team import Team

PartsOf = Callable[[Sequence[int]], Iterator[Part]]
Forward = Callable[[nn.Module, Any], Any]


def forward_inputs(model: nn.Module, batch: Any) -> Any:
    """Call the model with a batch, or with the first part of one that has several."""
    return model(batch[0] if isinstance(batch, (tuple, list)) else batch)


class Predictor:
    """One prediction. Collective: every rank makes one and calls :meth:`predict`. Final.

    Args:
        model: in whatever mode.
        forward: (model, batch) → a tensor, or a tuple or dict of tensors, one row a sample.
        dataset: as for training.
        plan: of the dataset, without shuffling.
        team: the workers.
        path: the safetensors file to write; None: memory.
        say: tells the user something; called on one worker.
        loader_workers, collate_fn, pin_memory: as for training.
    """

    def __init__(
        self,
        model: nn.Module,
        forward: Forward,
        dataset: Any,
        plan: SamplePlan,
        team: Team,
        path: Path | None,
        say: Callable[[str], None],
        *,
        loader_workers: int = 0,
        collate_fn: Collate | None = None,
        pin_memory: bool = False,
        facts: Mapping[str, object] = MappingProxyType({}),
    ) -> None:
        self._model, self._forward, self._dataset = model, forward, dataset
        self._plan, self._team, self._say = plan, team, say
        # A folder that has two names must be seen to be one, and a program may change its own.
        self._path = None if path is None else path.parent.resolve() / path.name
        self._reading = loader_workers, collate_fn, pin_memory
        self._facts = facts

    def once(self, joint_calls: JointCalls) -> Any:
        """Compute every row, or, in the place of a lost worker, take over what came of it.

        Collective: every rank calls it.

        Returns:
            What `forward` returns, with a row for every sample; this worker's own.

        Raises:
            TypeError, ValueError: `forward` returns something else than rows.
            OSError: the file cannot be made or found by all workers.
            MismatchError: a replacement cannot have the rows any more.
        """
        found: list[Any] = []

        def act() -> bytes:
            said, fd = self._predict()
            try:
                found.append(self._take(said, fd))
                if not self._team.supervisor.can_replace:
                    return b""
                said["is_kept"], rows = self._keep(joint_calls, fd)
                return json.dumps(said).encode() + b"\n" + rows
            finally:
                os.close(fd)

        words, _, rows = joint_calls.together("predict", act).partition(b"\n")
        return found[0] if found else self._take_over(joint_calls, json.loads(words), rows)

    def _keep(self, joint_calls: JointCalls, fd: int) -> tuple[bool, bytes]:
        """Say whether replacements can take over the rows, and what the launcher keeps of them."""
        ledger = Ledger.of(joint_calls)
        if self._path is not None:
            ledger.note_file(self._path, self._say_once, is_kept=joint_calls.is_told)
            return True, b""
        num_bytes = os.fstat(fd).st_size
        if not joint_calls.is_told or not ledger.keep_rows(num_bytes, self._say_once):
            return False, b""
        return True, os.pread(fd, num_bytes, 0)

    def _say_once(self, line: str) -> None:
        if self._team.position == 0:
            self._say(line)

    def _take(self, said: dict[str, Any], fd: int) -> Any:
        fields = [Field.from_json(field) for field in said["fields"]]
        rows = Rows(os.dup(fd), fields, self._plan.num_samples, is_private=True)
        return put_together(said["form"], rows)

    def _take_over(self, joint_calls: JointCalls, said: dict[str, Any], rows: bytes) -> Any:
        fd = -1
        try:
            if self._path is not None:
                fd = _open_again(self._path, said["file"])
            elif said["is_kept"]:
                fd = os.memfd_create("unisono-predictions", os.MFD_CLOEXEC)
                with open(os.dup(fd), "wb") as file:
                    file.write(rows)
            else:
                raise MismatchError(
                    "a replacement must be given what was predicted outside of loops, but these "
                    "predictions were too large to be kept for it: pass `path=`, then they are in "
                    "a file."
                )
            self._keep(joint_calls, fd)
            return self._take(said, fd)
        finally:
            if fd >= 0:
                os.close(fd)

    def _predict(self) -> tuple[dict[str, Any], int]:
        """Compute every row. Collective.

        Returns:
            What a row is and in which file they are, and a descriptor of that.
        """
        path = self._path
        facts = {"whether there is a `path`": path is not None, **self._facts}
        agree_on(self._dataset, self._plan, self._team, self._reading[0], "predict", **facts)
        partial = None if path is None else Path(self._tell(lambda: self._begin(path))["partial"])
        reading = (self._model, self._dataset, self._plan, *self._reading)
        try:
            with sweep(*reading) as parts_of:
                said, fd = self._agree_on_file(partial, parts_of)
                try:
                    self._write(fd, said, parts_of)
                except BaseException:
                    os.close(fd)
                    raise
        except BaseException:
            if partial is not None:
                remove(partial)
            raise
        try:
            if path is not None and partial is not None:
                finishing = partial
                said |= self._tell(lambda: self._finish(fd, finishing, path))
        except BaseException:
            os.close(fd)
            raise
        return said, fd

    def _write(self, fd: int, said: dict[str, Any], parts_of: PartsOf) -> None:
        fields = [Field.from_json(field) for field in said["fields"]]
        rows = Rows(os.dup(fd), fields, self._plan.num_samples, is_private=False)
        order = self._plan.order(0)

        def write(shards: Sequence[int]) -> bytes:
            for part in parts_of(shards):
                output = self._forward(self._model, part.data)
                indices = self._plan.shard_indices(order, part.batch, part.shard)
                rows.write(indices, fields_of(output, part.num_samples))
            return b""

        for _ in by_all_workers(write, self._plan.shards, self._team, "rows of predict"):
            pass

    def _agree_on_file(self, partial: Path | None, parts_of: PartsOf) -> tuple[dict[str, Any], int]:
        """Have the leader make the file and everybody open it; again if the leader is lost.

        Returns:
            What a row is, and this worker's own descriptor.

        Raises:
            OSError: the leader cannot make it, or somebody cannot open it.
        """

        def make() -> dict[str, Any]:
            # The order is that of the dataset, so its first sample is in the first shard.
            first = next(parts_of([0]))
            output = self._forward(self._model, first.data)
            fields = list(fields_of(output, first.num_samples))
            num_samples = self._plan.num_samples
            made.append(
                make_memory(fields, num_samples)
                if partial is None
                else make_file(partial, fields, num_samples)
            )
            place = [self._team.world.rank, os.getpid(), made[-1]]
            said = [field.as_json() for field in fields]
            return {"fields": said, "form": form_of(output), "place": place}

        def open_it(pid: int, made_fd: int) -> int:
            if made:
                return os.dup(made[-1])
            return open_memory(pid, made_fd) if partial is None else open_file(partial)

        made: list[int] = []
        try:
            while True:
                said = self._tell(make)
                maker, *where = said.pop("place")
                fd, trouble = -1, ""
                try:
                    fd = open_it(*where)
                except OSError as error:
                    trouble = str(error)
                answers = self._team.gather(
                    trouble.encode(errors="backslashreplace"), "file of predict"
                )
                troubles = {rank: answer.decode() for rank, answer in answers.items() if answer}
                if not troubles:
                    return said, fd
                if fd >= 0:
                    os.close(fd)
                # Not the trouble that comes of a leader that was lost with what it had made.
                if maker == self._team.membership.leader:
                    raise OSError(_cannot_open(troubles, partial))
        finally:
            for descriptor in made:
                os.close(descriptor)

    def _begin(self, path: Path) -> dict[str, Any]:
        check_path(path)
        partial = partial_path(path)
        # Workers that are ended in the midst of it cannot do it.
        self._team.supervisor.tell(RemoveAtEnd(str(partial)))
        return {"partial": str(partial)}

    def _finish(self, fd: int, partial: Path, path: Path) -> dict[str, Any]:
        try:
            finish_file(fd, partial, path)
        finally:
            # Rows that cannot get their name are whole, and stay.
            self._team.supervisor.tell(KeepFile(str(partial)))
        return {"file": identity_of(fd)}

    def _tell(self, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Have the leader do something with the file and tell all what came of it. Collective.

        Raises:
            OSError: it could not be written.
            Exception: what else the leader has raised.
        """
        caught: Exception | None = None

        def speak() -> bytes:
            nonlocal caught
            try:
                return json.dumps(act()).encode()
            except OSError as error:
                return json.dumps({"error": str(error).removesuffix(".")}).encode()
            except Exception as error:
                caught = error
                return b"\n" + failure(error, self._team.world.rank)

        heard = self._team.hear_leader(speak, "file of predict")
        if heard.startswith(b"\n"):
            raise raised(heard[1:]) if caught is None else caught
        said: dict[str, Any] = json.loads(heard)
        if "error" in said:
            where = "memory" if self._path is None else self._path
            raise OSError(f"predictions must be written to {where}, but: {said['error']}.")
        return said


def _open_again(path: Path, identity: Sequence[int]) -> int:
    """Open the file that the others have written, and no other one.

    Raises:
        MismatchError: there is none, or another one.
    """
    seen = "it cannot be opened"
    try:
        fd = open_plain(path, os.O_RDONLY)
    except OSError as error:
        seen = f"{seen} ({error.strerror or error})"
    else:
        if identity_of(fd) == list(identity):
            return fd
        os.close(fd)
        seen = "another file is there now, or it was changed"
    raise MismatchError(
        f"a replacement must be given what was predicted outside of loops, and the others have "
        f"that from {path}, but {seen}: let each call of `predict` have a `path=` of its own, and "
        f"leave its file alone while the job runs."
    )


def _cannot_open(troubles: Mapping[int, str], partial: Path | None) -> str:
    rank = min(troubles)
    what, advice = f"the file {partial}", "look at this file system and at the limit of open files"
    if partial is None:
        what = "the memory for predictions"
        advice = (
            "pass `path=`, then it is a file, or see that /proc is mounted and shows the processes "
            "of this user, through which the memory is opened, and look at the limit of open files"
        )
    return (
        f"every worker must be able to open {what}, but rank {rank} cannot: {troubles[rank]}: "
        f"{advice}."
    )
