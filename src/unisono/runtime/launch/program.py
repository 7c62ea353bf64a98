"""Runs a script, a module or a function as ``__main__`` of a worker.

Invariants: the program finds ``__main__``, ``sys.argv`` and ``sys.path`` as ``python SCRIPT ARGS``
or ``python -m MODULE ARGS`` sets them. After :func:`open_standard_fds` no new descriptor is 0, 1 or
2, where a channel would become a worker's standard output.
"""

from __future__ import annotations

import io
import os
import pkgutil
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from unisono.runtime.launch.call import pack_result, register_sources, set_modes, start_generators
from unisono.runtime.launch.job import FUNCTION, MODULE, Job


def run_program(job: Job) -> bytes:
    """Run the job's program to its end and return its pickled result; empty for a script."""
    if job.kind == FUNCTION:
        return _call_function(job)
    start_generators({}, job.seed)
    if job.kind == MODULE:
        run_module(job.target, job.argv)
    else:
        run_script(job.target, job.argv)
    return b""


def run_script(script: str, args: Sequence[str]) -> None:
    """Run a script as ``python SCRIPT ARGS`` does."""
    path = os.path.abspath(script)
    sys.argv = [script, *args]
    if pkgutil.get_importer(path) is not None:  # a folder or a ZIP file with `__main__.py`
        sys.path.insert(0, path)
        _fresh_main()
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
        return
    _prepend_to_path(os.path.dirname(os.path.realpath(script)))
    main = _fresh_main()
    main.__file__ = path
    main.__dict__.update(__cached__=None, __annotations__={})
    main.__loader__ = SourceFileLoader("__main__", path)
    with io.open_code(path) as file:
        source = file.read()
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def run_module(name: str, args: Sequence[str]) -> None:
    """Run a module as ``python -m NAME ARGS`` does."""
    sys.argv = ["-m", *args]
    _prepend_to_path(os.getcwd())
    _fresh_main()
    # `python -m` calls this too: it sets sys.argv[0] and the attributes of __main__.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _call_function(job: Job) -> bytes:
    from unisono.runtime.launch.pickling import load

    sys.path[:] = job.sys_path
    sys.argv = list(job.argv)
    main = _fresh_main()
    call: dict[str, Any] = load(job.payload, job.buffers)
    main.__dict__.update(call["main"])  # processes that a worker spawns import it again
    register_sources(call["sources"])
    _know_by_name(main.__dict__, call["of_main"])
    start_generators(call["states"], job.seed)
    set_modes(call["modes"])
    return pack_result(call["function"](*call["args"]))


def _know_by_name(main: dict[str, Any], of_main: dict[str, Any]) -> None:
    """Copy values of the caller's ``__main__`` into this one, where pickle looks them up."""
    for value in of_main.values():
        names = getattr(value, "__globals__", {})
        # A decorator of another module gives its function that module's globals.
        if names.get("__name__") == "__main__":
            main.update({k: v for k, v in names.items() if not k.startswith("__")})
    for name, value in of_main.items():
        if name.isidentifier():
            main.setdefault(name, value)


def _fresh_main() -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    sys.modules["__mp_main__"] = main  # its name in what comes back from a spawned process
    return main


def _prepend_to_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def open_standard_fds() -> None:
    """Open ``/dev/null`` if descriptors 0 to 2, or Python's streams of them, are closed."""
    for fd, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(fd)
        except OSError:
            # The lowest free descriptor is this one, as those below it are open.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        # Python's stream is None if it was closed at start; `print(file=None)` prints to stdout.
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(fd, mode, closefd=False))
