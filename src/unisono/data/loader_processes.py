"""Loader processes: forks of a worker that prefetch.

::

    worker   ── request k ──►  pipe  ──► process k mod N:  work(request)
             ◄── result k ───  pipe  ◄──

    message:  length │ pickle │ bytes of each tensor and array (``packed.py``)

Requests take a few bytes and each process has at most two, so sending never blocks; a result waits
in its pipe until it is needed. Each pipe has one writer: if that dies, the reader sees the end at
once. Invariant: no process outlives the worker (the kernel ensures that) or
:meth:`LoaderProcesses.close`.

torch's DataLoader is not used: it raises from a signal handler, possibly inside an update, when one
of its processes dies (without that handler it waits forever for one that dies while it writes),
and it needs shared memory and named sockets for tensors.

The worker may use a GPU when it forks. A fork of such a process cannot use the GPU, and need not:
it reads samples, and the worker moves batches to the GPU. Objects of the GPU (streams, events,
tensors) are never freed in a loader process, not even by its garbage collector.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
import struct
import sys
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, final

import numpy as np
import torch

from unisono.data.packed import is_plain, packed, tensor_apart, unpacked
from unisono.errors import LoadingError
from unisono.runtime.device import HOST, array_of, is_on_host
from unisono.runtime.procfs import die_with
from unisono.runtime.signals import ENDING_SIGNALS

# Requests per process: one being worked on, and one that is ready when that is done.
_AHEAD = 2
_GRACE_S = 1.0
_NO_GPU_HERE = (
    "A loader process cannot use a GPU: let the dataset return samples on the CPU, which are then "
    "moved, or set `num_workers=0` in its DataLoader to read in the worker itself."
)


class _Failed(NamedTuple):
    """The message of a process without a result: the error, and its traceback."""

    message: str
    indices: tuple[int, ...]
    traceback: str


class _Loader(NamedTuple):
    process: BaseProcess
    requests_fd: int
    results_fd: int


@final
class LoaderProcesses:
    """N processes that work ahead on requests, in the order of results.

    `work` maps a request to its result; both can be pickled. It is inherited, not pickled.

    Attributes:
        under_way: the requests whose results have not been taken, the next one first.
    """

    def __init__(
        self, work: Callable[[Any], Any], num_processes: int, requests: Iterator[Any]
    ) -> None:
        self._work, self._requests = work, requests
        self._loaders: list[_Loader] = []
        self.under_way: deque[Any] = deque()
        self._num_sent = 0
        try:
            for _ in range(num_processes):
                self._loaders.append(self._start())
            self._send()
        except BaseException:
            self.close()
            raise

    def take(self) -> Any:
        """Wait for the next result; raise LoadingError if the work raised or a process died."""
        loader = self._next_loader()
        try:
            result = read_message(loader.results_fd)
        except EOFError:
            raise _died(loader.process) from None
        self.under_way.popleft()
        if isinstance(result, _Failed):
            cause = Exception(f"in a loader process\n\n{result.traceback}")
            raise LoadingError(result.message, indices=result.indices) from cause
        self._send()
        return result

    def is_ready(self, within_s: float = 0.0) -> bool:
        """Return whether :meth:`take` need not wait: the result is ready, or the process died."""
        if not self.under_way:
            return False
        poll = select.poll()
        poll.register(self._next_loader().results_fd, select.POLLIN)
        return bool(poll.poll(within_s * 1000))

    def close(self, grace_s: float = _GRACE_S) -> None:
        """End all processes: those that wait, at once; the others after a second."""
        for loader in self._loaders:
            os.close(loader.requests_fd)
            os.close(loader.results_fd)
        for loader in self._loaders:
            loader.process.join(grace_s)
            if loader.process.is_alive():
                loader.process.kill()
            loader.process.join()
            loader.process.close()
        self._loaders.clear()

    def _next_loader(self) -> _Loader:
        num_taken = self._num_sent - len(self.under_way)
        return self._loaders[num_taken % len(self._loaders)]

    def _send(self) -> None:
        """Send as many requests as the processes may have."""
        room = _AHEAD * len(self._loaders) - len(self.under_way)
        for request in islice(self._requests, room):
            loader = self._loaders[self._num_sent % len(self._loaders)]
            # A dead process may have left earlier results: its death is reported after them.
            with suppress(BrokenPipeError):
                write_message(loader.requests_fd, request)
            self._num_sent += 1
            self.under_way.append(request)

    def _start(self) -> _Loader:
        requests_there, requests_here = os.pipe()
        results_here, results_there = os.pipe()
        not_its = [fd for other in self._loaders for fd in (other.requests_fd, other.results_fd)]
        parent_pid = os.getpid()

        def serve() -> None:
            if die_with(parent_pid):
                _take_over([*not_its, requests_here, results_here])
                _serve(self._work, requests_there, results_there)

        process = multiprocessing.get_context("fork").Process(
            target=serve, name="unisono-loader", daemon=True
        )
        try:
            with warnings.catch_warnings():
                # Python 3.12 warns about threads of numerical libraries; a loader has one.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            # multiprocessing calls this if the worker exits without closing the process.
            process._popen.terminate = process._popen.kill  # type: ignore[attr-defined]
        except BaseException:
            os.close(requests_here)
            os.close(results_here)
            raise
        finally:
            os.close(requests_there)
            os.close(results_there)
        return _Loader(process, requests_here, results_here)


def _serve(work: Callable[[Any], Any], requests_fd: int, results_fd: int) -> None:
    """Run a loader process, until no more requests come or results are wanted."""
    try:
        while True:
            request = read_message(requests_fd)
            try:
                result = work(request)
                write_message(results_fd, result)
            except BrokenPipeError:
                raise
            except Exception as error:
                write_message(results_fd, _failed(error))
    except (EOFError, BrokenPipeError):
        # The worker wants nothing more.
        return


def _take_over(not_mine: list[int]) -> None:
    gc.freeze()
    for fd in not_mine:
        os.close(fd)
    signal.set_wakeup_fd(-1)
    # Signals reach all processes of a terminal or a job, but the worker decides when it is over.
    for signum in ENDING_SIGNALS:
        signal.signal(signum, lambda signum, frame: None)
    # A progress bar wraps the streams, with a lock that its thread may have held.
    sys.stdout = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
    sys.stderr = getattr(sys.stderr, "rich_proxied_file", sys.stderr)
    torch.set_num_threads(1)


def _failed(error: Exception) -> _Failed:
    if isinstance(error, LoadingError):
        cause = error.__cause__ or error
        # torch's error for using a GPU in a fork, by its message or its class
        is_of_gpu = "in forked subprocess" in str(cause)
        is_of_gpu = is_of_gpu or isinstance(cause, torch.AcceleratorError)
        message = f"{error} {_NO_GPU_HERE}" if is_of_gpu else str(error)
        return _Failed(message, error.indices, _traceback_of(cause))
    name = type(error).__name__
    message = (
        f"a batch must be readable and must travel between processes, but that raised {name}: "
        f"{error}: set `num_workers=0` in its DataLoader to read in the worker itself."
    )
    return _Failed(message, (), _traceback_of(error))


def _traceback_of(error: BaseException) -> str:
    return "".join(traceback.format_exception(error)).rstrip("\n")


def _died(process: BaseProcess) -> LoadingError:
    process.join()
    code = process.exitcode or 0
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    return LoadingError(
        f"loader processes must live as long as the loop, but process {process.pid} {how}: "
        f"is there enough memory? Set fewer `num_workers` in its DataLoader, or 0 to read in the "
        f"worker itself."
    )


_LENGTH = struct.Struct("<q")


def write_message(fd: int, content: Any) -> None:
    """Write anything that can be pickled; block until it is read."""
    words, contents = packed(content, _apart)
    _write(fd, memoryview(_LENGTH.pack(len(words))))
    for each in (memoryview(words), *contents):
        _write(fd, each)


def read_message(fd: int) -> Any:
    """Read a message; block until it is complete. Raise EOFError if the writer has ended."""

    def take(num_bytes: int) -> np.ndarray[Any, Any]:
        # Memory from torch, aligned as usual.
        content = array_of(torch.empty(num_bytes, dtype=torch.uint8, device=HOST))
        _read(fd, content.data)
        return content

    length = bytearray(_LENGTH.size)
    _read(fd, memoryview(length))
    words = bytearray(_LENGTH.unpack(length)[0])
    _read(fd, memoryview(words))
    return unpacked(words, take)


def _apart(value: Any) -> Any:
    # torch and numpy pickle everything else: sparse tensors, subclasses, arrays of strings.
    if type(value) is torch.Tensor and is_on_host(value) and is_plain(value):
        return tensor_apart(value)
    if type(value) is np.ndarray and value.flags.writeable:
        with suppress(TypeError, ValueError):
            return array_of, (torch.from_numpy(value),)
    return NotImplemented


def _write(fd: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(fd, data) :]


def _read(fd: int, into: memoryview) -> None:
    while len(into):
        num_bytes = os.readv(fd, [into])
        if num_bytes == 0:
            raise EOFError
        into = into[num_bytes:]
