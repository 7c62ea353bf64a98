"""Predictions for a dataset: one row a sample, in dataset order.

The leader computes one batch to see what a row is. All workers of a host then open one file, and
each writes the rows of its shards, each once (see ``predictions``)::

    with a path      rows.safetensors.3f9c02d1a7b4e856.partial ──► rows.safetensors
    without          a file without a name, or memory where nobody needs the rows later

So two jobs that predict to one path do not touch each other's rows; the later one's file stays. The
launcher removes a partial file when its job ends early; one is left only by a job that is killed as
a whole, or that has no launcher of ours. Of predictions outside of loops the launcher keeps the
file open as long as the job: whoever replaces a lost worker gets the rows from it.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from unisono.runtime.plainfile import check_plain, is_at, open_plain
from unisono.runtime.workers.launcher_messages import (
    ROW_KEYS,
    KeepFile,
    MemoryReleased,
    RemoveAtEnd,
)
from unisono.runtime.workers.replicated_calls import ReplicatedCalls
from unisono.training.failing_step import refusals_explained
from unisono.training.failures import heard_by_all
from unisono.training.predictions import (
    LateRows,
    Rows,
    form_of,
    header_of,
    put_together,
    share_rows,
    taken_apart,
)
from unisono.training.sweep import Forward, PartsOf, Sweep

_RELEASED_KEYS = 1 << 61  # the first key of predictions that nobody needs later
_NUM_KEYS = 1 << 61  # from each of the two on

Said = dict[str, Any]
"""What the leader says of the file: how rows are named and put together, and which file it is."""


class Predictor:
    """One prediction. Final."""

    def __init__(self, sweep: Sweep, forward: Forward, path: Path | None) -> None:
        self._sweep, self._forward, self._team = sweep, forward, sweep.team
        # A folder that has two names must be seen to be one, and a program may change its own.
        self._path = None if path is None else path.parent.resolve() / path.name

    def once(self, replicated_calls: ReplicatedCalls) -> Any:
        """Compute every row; the replacement of a lost worker takes over the rows instead.

        Collective: every rank calls it. Returns and raises as :meth:`Trainer.predict`.
        """
        found: list[Any] = []
        is_kept = replicated_calls.is_told and self._team.supervisor.can_replace

        def act() -> bytes:
            with ExitStack() as stack:
                said, fd = self._predict(is_kept, stack)
                found.append(_taken(said, fd))
            return json.dumps(said).encode()

        said = json.loads(replicated_calls.together("predict", act))
        if found:
            return found[-1]
        fd = self._team.memory_fd(said["key"], said["num_bytes"])
        try:
            return _taken(said, fd)
        finally:
            os.close(fd)

    def _predict(self, is_kept: bool, stack: ExitStack) -> tuple[Said, int]:
        """Compute every row. Collective.

        Returns:
            What is to be known of the file of rows, and its descriptor.
        """
        sweep, path = self._sweep, self._path
        sweep.agree("predict", **{"whether there is a `path`": path is not None})
        partial = "" if path is None else self._tell(lambda: self._begin(path))
        with _removed_on_failure(partial), sweep.under_way() as parts_of:
            said = self._tell(lambda: self._make(partial, parts_of, is_kept))
            fd = self._write(said, partial, parts_of, stack)
        if path is not None:
            self._tell(lambda: self._finish(fd, Path(partial), path))
        return said, fd

    def _make(self, partial: str, parts_of: PartsOf, is_kept: bool) -> Said:
        """Compute a batch to see what a row is, and make the file if it has a name."""
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
        header, num_bytes = header_of(rows, sweep.plan.num_samples)
        if partial:
            make_file(Path(partial), num_bytes)
        key = secrets.randbelow(_NUM_KEYS) + (ROW_KEYS if is_kept else _RELEASED_KEYS)
        form = {"form": form_of(output), "names": list(rows), "header": header.hex()}
        return {**form, "num_bytes": num_bytes, "key": key}

    def _write(self, said: Said, partial: str, parts_of: PartsOf, stack: ExitStack) -> int:
        """Write the rows of this worker's shards; gives the file's descriptor. Collective."""
        plan, host = self._sweep.plan, b"%d" % self._team.host
        order, opened = plan.order(0), list[tuple[int, Rows]]()

        def write(shards: Sequence[int]) -> dict[int, bytes]:
            if not opened:
                fd = self._open(said, partial, stack)
                opened.append((fd, _rows(said, fd, is_private=False)))
            late = LateRows(opened[0][1], self._sweep.device)
            for part in parts_of(shards):
                output = self._forward(self._sweep.model, part.data)
                indices = plan.shard_indices(order, part.batch, part.shard)
                late.write(indices, taken_apart(output, part.num_samples))
            late.finish()
            return dict.fromkeys(shards, host)

        told = self._sweep.by_all_workers(write, "rows of predict")
        (fd, rows), *_ = opened
        share_rows(rows, self._team, {shard: int(host) for shard, host in told.items()}, plan)
        return fd

    def _open(self, said: Said, partial: str, stack: ExitStack) -> int:
        """Open the file that all workers of this host share. Collective."""
        try:
            fd = self._team.memory_fd(said["key"], said["num_bytes"], partial)
        except OSError as error:
            raise self._trouble(
                error, f", which rank {self._team.world.rank} cannot open"
            ) from None
        stack.callback(os.close, fd)
        if said["key"] < ROW_KEYS:
            stack.callback(self._team.supervisor.tell, MemoryReleased(said["key"]))
        os.pwrite(fd, bytes.fromhex(said["header"]), 0)  # everybody the same
        return fd

    def _begin(self, path: Path) -> str:
        check_path(path)
        partial = str(partial_path(path))
        # Workers that are ended in the midst of it cannot do it.
        self._team.supervisor.tell(RemoveAtEnd(partial))
        return partial

    def _finish(self, fd: int, partial: Path, path: Path) -> None:
        try:
            finish_file(fd, partial, path)
        finally:
            # Rows that cannot get their name are whole, and stay.
            self._team.supervisor.tell(KeepFile(str(partial)))

    def _tell(self, act: Callable[[], Any]) -> Any:
        """Have one worker of each host do something for its file; gives what this host's has said.

        Collective. The key, which all hosts use, is that of the first.
        """

        def attempt() -> Any:
            try:
                return act()
            except OSError as error:
                raise self._trouble(error) from None

        told = heard_by_all(
            lambda speak: self._team.hear_host_leaders(speak, "file of predict"),
            attempt,
            self._team.world.rank,
        )
        mine = told[self._team.host]
        return {**mine, "key": told[0]["key"]} if isinstance(mine, dict) else mine

    def _trouble(self, error: OSError, whose: str = "") -> OSError:
        where = "a file without a name" if self._path is None else self._path
        seen = str(error).removesuffix(".")
        return OSError(f"predictions must be written to {where}{whose}, but: {seen}.")


def _rows(said: Said, fd: int, *, is_private: bool) -> Rows:
    return Rows(fd, bytes.fromhex(said["header"]), said["names"], is_private=is_private)


def _taken(said: Said, fd: int) -> Any:
    return put_together(said["form"], _rows(said, fd, is_private=True).tensors)


@contextmanager
def _removed_on_failure(partial: str) -> Iterator[None]:
    try:
        yield
    except BaseException:
        if partial:
            _remove(Path(partial))
        raise


def check_path(path: Path) -> None:
    """Find out, before anything is computed, whether a file can get this name.

    Raises:
        OSError: the folder does not exist or cannot be written, or something else has the name.
    """
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent}: make it first")
    if path.is_dir():
        example = path / "predictions.safetensors"
        raise IsADirectoryError(f"that is a folder: name a file in it, such as {example}")
    if path.exists() and not path.is_file():
        raise FileExistsError("that is no file, but a device, pipe or socket: name another file")
    check_plain(path, is_replaced=True)
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise PermissionError(f"the folder {path.parent} cannot be written: name another one")


def partial_path(path: Path) -> Path:
    """Choose a name for the file that is not whole yet: another one each time."""
    return path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")


def make_file(partial: Path, num_bytes: int) -> None:
    """Make the file in which predictions are collected.

    Raises:
        OSError: the folder cannot be written, or has not that much room.
    """
    with contextlib.suppress(FileNotFoundError):
        partial.unlink()  # of a leader that was lost
    fd = open_plain(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        # Now, where an error can be told: a mapped file on a full disk ends the process.
        os.posix_fallocate(fd, 0, num_bytes)
    except BaseException:
        partial.unlink()
        raise
    finally:
        os.close(fd)


def finish_file(fd: int, partial: Path, path: Path) -> None:
    """Give the file its name, once every row is on the disk; nothing if that has been done.

    Raises:
        OSError: the rows cannot be written, and are gone; or the file cannot be renamed, and they
            lie under its old name.
    """
    try:
        os.fsync(fd)
    except OSError:
        _remove(partial)
        raise
    if not is_at(partial, fd):
        if is_at(path, fd):
            return  # by a leader that was lost right afterwards
        raise FileNotFoundError(
            f"the file {partial} with the rows was removed or replaced meanwhile: leave such files "
            f"alone while a prediction goes on, and predict again"
        )
    try:
        os.replace(partial, path)
    except OSError as error:
        raise OSError(
            f"the file cannot get that name ({error.strerror}); every row is in {partial}: rename "
            f"that file yourself"
        ) from error


def _remove(partial: Path) -> None:
    with contextlib.suppress(OSError):
        partial.unlink()
