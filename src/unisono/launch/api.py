"""Starting workers from Python: ``launch(function, workers=4)``.

The workers are processes that a fork server makes; the function and what it returns travel with
cloudpickle over a local socket, so functions of a script or a notebook cell may be launched too.
Nothing is loaded here that the caller may not need: no torch, no cloudpickle until a call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from unisono.comm.link import is_worker
from unisono.errors import WorkerError
from unisono.launch.exceptions import unpack_exception
from unisono.launch.forkserver import server_pool
from unisono.launch.generators import caller_states
from unisono.launch.job import FUNCTION, Job
from unisono.launch.limit import too_many_workers
from unisono.launch.policy import JobState
from unisono.launch.report import failure_message
from unisono.launch.standard import open_standard_fds
from unisono.launch.supervise import supervise
from unisono.world import num_devices, threads_per_worker


def launch(
    fn: Callable[..., Any],
    *args: Any,
    workers: int | None = None,
    threads: int | None = None,
) -> list[Any]:
    """Call ``fn(*args)`` on every worker and return what they return, in rank order.

    Each worker starts from the caller's random generator states, working folder, environment
    variables and ``sys.path``, so one worker computes what ``fn(*args)`` itself would.

    Args:
        fn: what every worker calls. It, `args` and its result must be picklable by cloudpickle.
        workers: how many workers; one per device by default.
        threads: how many threads each computes with; ``UNISONO_THREADS`` by default, else 1.

    Raises:
        ValueError: `workers` or `threads` is below 1, or `workers` beyond all reason.
        TypeError: `fn` cannot be called, or cannot be pickled.
        RuntimeError: called inside a worker.
        WorkerError: a worker was killed or left; or the cause of the exception that follows.
        Exception: the exception of the worker that failed first, if it can be pickled.
    """
    workers = num_devices() if workers is None else _num_workers(workers)
    threads = threads_per_worker() if threads is None else _at_least_one("threads", threads)
    _refuse_inside_worker()
    job = _job(fn, args, workers, threads)
    open_standard_fds()
    server = server_pool().borrow(job.environ)
    try:
        ended = supervise(server, job, needs_result=True)
    except KeyboardInterrupt:
        server.close()
        raise
    if ended.server_is_usable:
        server_pool().give_back(server)
    else:
        server.close()
    if ended.state.cause is not None:
        _raise_cause(ended.state, workers)
    return [_unpack(ended.results[rank]) for rank in range(workers)]


def _job(fn: Callable[..., Any], args: tuple[Any, ...], workers: int, threads: int) -> Job:
    return Job(
        kind=FUNCTION,
        target=getattr(fn, "__qualname__", repr(fn)),
        argv=tuple(sys.argv),
        environ=dict(os.environ),
        folder=os.getcwd(),
        sys_path=tuple(sys.path),
        num_workers=workers,
        threads=threads,
        seed=int.from_bytes(os.urandom(7), "little"),
        payload=_pack(fn, args),
    )


def _pack(fn: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    if not callable(fn):
        raise TypeError(
            f"`fn` must be a function that every worker calls, but is {fn!r}: "
            "pass the function itself, as in `launch(main, workers=2)`."
        )
    import cloudpickle

    try:
        packed: bytes = cloudpickle.dumps({"function": fn, "args": args, "states": caller_states()})
    except Exception as error:
        raise TypeError(
            f"`fn` and its arguments must be picklable, but are not ({error}): open files, locks "
            "and the like inside the function instead of passing them in."
        ) from error
    return packed


def _unpack(result: bytes) -> Any:
    import cloudpickle

    return cloudpickle.loads(result)


def _raise_cause(state: JobState, workers: int) -> None:
    cause = state.cause
    assert cause is not None
    worker_error = WorkerError(
        failure_message(state, workers),
        rank=cause.rank,
        exit_code=cause.exit_code,
        remote_traceback=cause.traceback,
    )
    original = unpack_exception(cause.exception) if cause.exception else None
    # A SystemExit of a worker must not end the caller.
    if isinstance(original, Exception):
        raise original from worker_error
    raise worker_error


def _num_workers(count: int) -> int:
    count = _at_least_one("workers", count)
    if reason := too_many_workers("workers", count):
        raise ValueError(reason)
    return count


def _at_least_one(name: str, count: int) -> int:
    if not isinstance(count, int) or isinstance(count, bool):
        raise TypeError(f"`{name}` must be a whole number, but is {count!r}: pass `{name}=2`.")
    if count < 1:
        raise ValueError(f"`{name}` must be at least 1, but is {count}: pass `{name}=2`.")
    return count


def _refuse_inside_worker() -> None:
    if is_worker():
        raise RuntimeError(
            "`unisono.launch` must be called outside of workers, but this process is one "
            f"(rank {os.environ.get('RANK')}): call the function directly, without `launch`."
        )
