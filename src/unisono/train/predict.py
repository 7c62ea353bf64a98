"""Predictions for a dataset: one row a sample, in dataset order.

The leader computes one batch to see what a row is, and makes the file (see ``rowsfile``); then
every worker writes the rows of its shards, each once (see ``predictions``). If the leader is lost
before the others have opened the file, the next leader makes it anew. On several hosts each host
has a leader and a file (see ``host_rows``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from unisono.errors import MismatchError
from unisono.plainfile import open_plain
from unisono.train.failures import heard_by_all
from unisono.train.host_rows import share_rows
from unisono.train.late_rows import LateRows
from unisono.train.ledger import Ledger
from unisono.train.predictions import Rows, form_of, header_of, put_together, taken_apart
from unisono.train.refused_operation import refusals_explained
from unisono.train.rowsfile import (
    check_path,
    finish_file,
    identity_of,
    make_file,
    open_file,
    partial_path,
    remove,
)
from unisono.train.sweep import Forward, PartsOf, Sweep
from unisono.workers.joint_calls import JointCalls
from unisono.workers.launcher_messages import KeepFile, RemoveAtEnd

Said = dict[str, Any]
"""What the leader says of the file: how rows are named and put together, and which file it is."""


class Predictor:
    """One prediction. Final.

    Args:
        sweep: the pass.
        forward, path: see :meth:`Trainer.predict`.
        say: tells the user something; called on one worker.
    """

    def __init__(
        self, sweep: Sweep, forward: Forward, path: Path | None, say: Callable[[str], None]
    ) -> None:
        self._sweep, self._forward, self._team, self._say = sweep, forward, sweep.team, say
        # A folder that has two names must be seen to be one, and a program may change its own.
        self._path = None if path is None else path.parent.resolve() / path.name

    def once(self, joint_calls: JointCalls) -> Any:
        """Compute every row; the replacement of a lost worker takes over the rows instead.

        Collective: every rank calls it. Returns and raises as :meth:`Trainer.predict`.
        """
        found: list[Any] = []

        def act() -> bytes:
            with ExitStack() as stack:
                said, fd = self._predict(stack)
                found.append(_take(said, fd))
                if not self._team.supervisor.can_replace:
                    return b""
                said["is_kept"], rows = self._keep(joint_calls, fd)
                return json.dumps(said).encode() + b"\n" + rows

        words, _, rows = joint_calls.together("predict", act).partition(b"\n")
        return found[0] if found else self._take_over(joint_calls, json.loads(words), rows)

    def _keep(self, joint_calls: JointCalls, fd: int) -> tuple[bool, bytes]:
        """Decide whether replacements can take over the rows, and what the launcher keeps."""
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

    def _take_over(self, joint_calls: JointCalls, said: Said, rows: bytes) -> Any:
        if self._path is not None:
            fd = _open_again(self._path, said["file"])
        elif said["is_kept"]:
            fd = make_file(None, rows, len(rows))
        else:
            raise MismatchError(
                "a replacement must be given what was predicted outside of loops, but these "
                "predictions were too large to be kept for it: pass `path=`, then they are in a "
                "file."
            )
        try:
            self._keep(joint_calls, fd)
            return _take(said, fd)
        finally:
            os.close(fd)

    def _predict(self, stack: ExitStack) -> tuple[Said, int]:
        """Compute every row. Collective.

        Returns:
            What is to be known of the file of rows, and its descriptor.
        """
        sweep, path = self._sweep, self._path
        sweep.agree("predict", **{"whether there is a `path`": path is not None})
        partial = None if path is None else Path(self._tell(lambda: self._begin(path))["partial"])
        try:
            with sweep.under_way() as parts_of:
                said, fd = self._agree_on_file(partial, parts_of, stack)
                rows = Rows(fd, said["names"], is_private=False)
                host_of = self._write(rows, parts_of)
            share_rows(rows, self._team, host_of, sweep.plan.order(0))
        except BaseException:
            if partial is not None:
                remove(partial)
            raise
        if path is not None and partial is not None:
            finishing = partial
            said |= self._tell(lambda: self._finish(fd, finishing, path))
        return said, fd

    def _write(self, rows: Rows, parts_of: PartsOf) -> dict[int, int]:
        """Write the rows of this worker's shards; gives the host of each shard. Collective."""
        plan = self._sweep.plan
        order, host = plan.order(0), b"%d" % self._team.host

        def write(shards: Sequence[int]) -> dict[int, bytes]:
            late = LateRows(rows, self._sweep.device)
            for part in parts_of(shards):
                output = self._forward(self._sweep.model, part.data)
                indices = plan.shard_indices(order, part.batch, part.shard)
                late.write(indices, taken_apart(output, part.num_samples))
            late.finish()
            return dict.fromkeys(shards, host)

        told = self._sweep.by_all_workers(write, "rows of predict")
        return {shard: int(host) for shard, host in told.items()}

    def _agree_on_file(
        self, partial: Path | None, parts_of: PartsOf, stack: ExitStack
    ) -> tuple[Said, int]:
        """Have the leader make the file and everybody open it; again if the leader is lost.

        Returns:
            How rows are named and put together, and this worker's own descriptor.

        Raises:
            OSError: the leader cannot make it, or somebody cannot open it.
        """

        def make() -> Said:
            # The order is that of the dataset, so its first sample is in the first shard.
            sweep = self._sweep
            try:
                first = next(parts_of([0]))
                with refusals_explained(sweep.model, sweep.is_deterministic):
                    output = self._forward(sweep.model, first.data)
            except RuntimeError as error:
                if (ours := sweep.explain(error)) is error:
                    raise
                raise ours from error
            rows = taken_apart(output, first.num_samples)
            content = header_of(rows, self._sweep.plan.num_samples)
            made.append(make_file(partial, *content))
            stack.callback(os.close, made[-1])
            place = [self._team.world.rank, os.getpid(), made[-1]]
            return {"names": list(rows), "form": form_of(output), "place": place}

        made: list[int] = []
        while True:
            told = self._tell_all(make)
            makers, said = tuple(each["place"][0] for each in told), told[self._team.host]
            _, pid, made_fd = said.pop("place")
            fd, trouble = -1, ""
            try:
                fd = os.dup(made[-1]) if made else open_file(partial, pid, made_fd)
                stack.callback(os.close, fd)
            except OSError as error:
                trouble = str(error)
            words = trouble.encode(errors="backslashreplace")
            answers = self._team.gather(words, "file of predict")
            troubles = {rank: answer.decode() for rank, answer in answers.items() if answer}
            if not troubles:
                return said, fd
            # Not the trouble that comes of a leader that was lost with what it had made.
            if makers == self._team.host_leaders:
                raise OSError(_cannot_open(troubles, partial))

    def _begin(self, path: Path) -> Said:
        check_path(path)
        partial = partial_path(path)
        # Workers that are ended in the midst of it cannot do it.
        self._team.supervisor.tell(RemoveAtEnd(str(partial)))
        return {"partial": str(partial)}

    def _finish(self, fd: int, partial: Path, path: Path) -> Said:
        try:
            finish_file(fd, partial, path)
        finally:
            # Rows that cannot get their name are whole, and stay.
            self._team.supervisor.tell(KeepFile(str(partial)))
        return {"file": identity_of(fd)}

    def _tell(self, act: Callable[[], Said]) -> Said:
        """Have the leader of this host do something with its file; gives the result. Collective."""
        return self._tell_all(act)[self._team.host]

    def _tell_all(self, act: Callable[[], Said]) -> list[Said]:
        """Have one worker of each host do something with its file; gives all results. Collective.

        Raises:
            OSError: it could not be written.
            Exception: what else a leader has raised.
        """

        def attempt() -> Said:
            try:
                return act()
            except OSError as error:
                where = "memory" if self._path is None else self._path
                seen = str(error).removesuffix(".")
                raise OSError(f"predictions must be written to {where}, but: {seen}.") from None

        return heard_by_all(
            lambda speak: self._team.hear_host_leaders(speak, "file of predict"),
            attempt,
            self._team.world.rank,
        )


def _take(said: Said, fd: int) -> Any:
    return put_together(said["form"], Rows(fd, said["names"], is_private=True).tensors)


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
