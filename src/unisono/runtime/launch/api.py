"""Start workers: ``launch(function, workers=4)`` and ``unisono run``.

A fork server forks the workers. The function and what it returns are sent with cloudpickle over a
local socket, so functions of a script or a notebook cell can be launched too. This module does not
load torch, nor cloudpickle before the first call. A call returns once all workers are gone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from unisono.errors import WorkerError
from unisono.runtime.c10d.registration import GLOO, check_backend
from unisono.runtime.habits import habits_met
from unisono.runtime.launch.call import name_of, pack_call, unpack_result
from unisono.runtime.launch.cell import in_notebook
from unisono.runtime.launch.exceptions import name_cells, unpack_exception
from unisono.runtime.launch.forkserver import ForkServer, server_pool
from unisono.runtime.launch.job import FUNCTION, Job, launch_environment
from unisono.runtime.launch.placement import Machine, place_workers
from unisono.runtime.launch.policy import JobState
from unisono.runtime.launch.program import open_standard_fds
from unisono.runtime.launch.recovery import RESTARTS
from unisono.runtime.launch.report import exit_status, failure_message, interrupt_message
from unisono.runtime.launch.supervise import JobResult, supervise
from unisono.runtime.notices import say
from unisono.runtime.procfs import adopt_orphans, kill_below
from unisono.runtime.signals import ENDING_SIGNALS, interruption, interrupts, signals_as_bytes
from unisono.runtime.timeouts import STALL, check_seconds
from unisono.runtime.whole import check_flag, check_whole
from unisono.runtime.workers.supervisor import PID_VARIABLE, is_worker
from unisono.runtime.world import THREADS_AT_MOST, threads_per_worker, world


@habits_met("launch(main, workers=2)")
def launch(
    fn: Callable[..., Any],
    *args: Any,
    workers: int | None = None,
    threads: int | None = None,
    restarts: int = RESTARTS,
    replace: bool = True,
    stall_timeout_s: float | None = None,
    workers_per_gpu: int | None = None,
    backend: str = GLOO,
) -> list[Any]:
    """Call ``fn(*args)`` on every worker and return the results in rank order.

    A worker computes what ``fn(*args)`` would compute here: it starts from the caller's random
    generator states, working directory, environment variables and ``sys.path``, and from torch's
    modes: default dtype, recording of gradients, deterministic algorithms, precision of float32
    products, switches of cuDNN and oneDNN. Default devices and numbers of threads are not copied. A
    worker's output appears where the caller's does, such as in a notebook's cell.

    Args:
        fn: the function that every worker calls. cloudpickle must be able to pickle it, `args` and
            its result.
        workers: number of workers; by default one for each GPU that ``CUDA_VISIBLE_DEVICES`` shows,
            or without GPUs one for each core, at most 8. Worker 0 gets the first GPU, and so on; a
            function that chooses its GPU itself calls ``torch.cuda.set_device(LOCAL_RANK)``.
        threads: threads of each worker; ``UNISONO_THREADS`` by default, else 1.
        restarts: how many workers may be lost within a minute while `fn` trains with Unisono: the
            others continue, and a replacement calls `fn` again and joins them.
        replace: whether lost workers are replaced. Otherwise the others continue without them, and
            their results are None.
        stall_timeout_s: after how many seconds without progress Unisono replaces a worker that
            others wait for; ``UNISONO_STALL_TIMEOUT`` by default, else 60.
        workers_per_gpu: how many workers share each GPU; ``UNISONO_WORKERS_PER_GPU`` by default,
            else 1.
        backend: what runs the gloo process groups of `fn`: ``"gloo"``, or the backend
            ``"unisono"``, which torch then reports as gloo.

    Raises:
        ValueError: `backend` is neither ``"gloo"`` nor ``"unisono"``.
        ValueError: there are too few GPUs for the workers.
        ValueError: `workers`, `workers_per_gpu`, `threads`, `restarts` or `stall_timeout_s` is too
            small, or `workers` or `threads` is far too large.
        TypeError: `replace` is neither True nor False, `fn` cannot be called, or a value, which is
            named, cannot be pickled, or cannot be unpickled here.
        RuntimeError: called inside a worker, or by a spawned process that imports the program.
        WorkerError: a worker was killed or left; or the cause of the exception that follows.
        Exception: the exception of the worker that failed first, if it can be pickled.
        KeyboardInterrupt: Ctrl-C, or a notebook's stop button; if `fn` trains with a
            `directory`, a checkpoint is written first.
        SystemExit: the same for SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2, unless the program handles
            them. Either is raised from a WorkerError if a worker's own exception came first.
    """
    # IPython and pytest then show the caller's line instead of this function's.
    __tracebackhide__ = True
    if workers is not None:
        workers = check_whole("workers", workers, at_least=1)
    if workers_per_gpu is not None:
        workers_per_gpu = check_whole("workers_per_gpu", workers_per_gpu, at_least=1)
    placement = place_workers(workers, workers_per_gpu, os.environ, Machine.here())
    workers = placement.num_workers
    if threads is None:
        threads = threads_per_worker()
    threads = check_whole("threads", threads, at_least=1, below=THREADS_AT_MOST + 1)
    check_backend(backend)
    _refuse_inside_worker()
    restarts = check_whole("restarts", restarts, at_least=0)
    stall_timeout_s = STALL.in_s() if stall_timeout_s is None else stall_timeout_s
    check_seconds("stall_timeout_s", stall_timeout_s, STALL)
    check_flag("replace", replace)
    payload, buffers = pack_call(fn, args)
    job = Job(
        kind=FUNCTION,
        payload=payload,
        buffers=buffers,
        target=name_of(fn),
        argv=tuple(map(str, sys.argv)),
        environ=launch_environment(
            os.environ,
            ["python", *sys.orig_argv[1:]],
            placement.variables,
            launcher_draws=in_notebook(),
        ),
        sys_path=tuple(entry for entry in sys.path if isinstance(entry, str)),  # as Python does
        num_workers=workers,
        threads=threads,
        restarts=restarts,
        replaces=bool(replace),
        stall_timeout_s=stall_timeout_s,
        backend=backend,
    )
    open_standard_fds()
    ended = _supervised(job)
    if ended.state.interrupted_by is not None:
        raise interruption(ended.state.interrupted_by) from _failure_too(ended.state, workers)
    if ended.state.cause is not None:
        error, cause = _failure(ended.state, workers)
        raise error from cause
    return [unpack_result(ended.results.get(rank, b""), rank) for rank in range(workers)]


def run(job: Job) -> int:
    """Run a script or module on workers and return the exit status of the job."""
    adopt_orphans()  # those of the server too, if it is killed
    with signals_as_bytes(ENDING_SIGNALS) as signals:
        try:
            server = ForkServer.start(job.environ)
        except WorkerError as error:
            say(str(error))
            return 1
        try:
            ended = supervise(server, job, signals)
        finally:
            server.kill()
            kill_below(os.getpid())
    state = ended.state
    if state.interrupted_by is not None:
        say(interrupt_message(state, job.num_workers))
    if state.failed_by_itself or (state.interrupted_by is None and state.cause is not None):
        on_host = f"on host {job.host}, " if job.hosts else ""
        say(on_host + failure_message(state, job.num_workers))
    return exit_status(state, is_one_of_several=bool(job.hosts)) or int(not ended.is_saved)


def _supervised(job: Job) -> JobResult:
    with interrupts() as signals:
        server = server_pool().borrow(job.environ)
        try:
            ended = supervise(server, job, signals)
        except BaseException:
            server.kill()
            raise
        if ended.server_is_usable:
            server.kill_all_below()  # what workers left running
            server_pool().give_back(server)
        else:
            server.kill()
    return ended


def _failure(state: JobState, workers: int) -> tuple[Exception, WorkerError | None]:
    worker_error, cause = _worker_error(state, workers), state.cause
    assert cause is not None
    original = unpack_exception(cause.said.payload) if cause.said.payload else None
    # A worker's SystemExit must not end the caller.
    return (original, worker_error) if isinstance(original, Exception) else (worker_error, None)


def _failure_too(state: JobState, workers: int) -> WorkerError | None:
    """Return, and print if Python will not, what a worker raised after a signal to end the job."""
    if not state.failed_by_itself:
        return None
    error = _worker_error(state, workers)
    if state.interrupted_by != signal.SIGINT:  # Python prints nothing for a SystemExit
        say(str(error))
    return error


def _worker_error(state: JobState, workers: int) -> WorkerError:
    cause = state.cause
    assert cause is not None
    return WorkerError(
        name_cells(failure_message(state, workers)),
        rank=cause.rank,
        exit_code=cause.exit_code,
        remote_traceback=name_cells(cause.said.traceback),
    )


def _refuse_inside_worker() -> None:
    # As in multiprocessing, whose new processes import the program once more.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "`unisono.launch` must be called once, but this process, which was spawned, imports "
            'the program and comes to the same call: put it below `if __name__ == "__main__":`.'
        )
    here = world()
    if is_worker() or (here.world_size > 1 and PID_VARIABLE not in os.environ):
        raise RuntimeError(
            f"`unisono.launch` must be called outside of workers, but {here.started_by} has "
            f"started this process as rank {here.rank} of {here.world_size}: call the function "
            f"directly, without `launch`, or start the program once."
        )
