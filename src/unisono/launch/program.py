"""What does a worker run? A script or module as ``__main__``, or a function, as Python would.

Invariant: the program finds ``__main__``, ``sys.argv`` and ``sys.path`` as ``python SCRIPT ARGS``
or ``python -m MODULE ARGS`` would have set them.
"""

from __future__ import annotations

import io
import os
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import SourceFileLoader
from types import ModuleType
from typing import Any

from unisono.launch.call import know_sources, pack_result
from unisono.launch.caller_state import set_modes, start_generators
from unisono.launch.job import FUNCTION, MODULE, Job


def run_program(job: Job) -> bytes:
    """Run the job's program to its end and return its pickled result; nothing for a script.

    Raises:
        BaseException: whatever the program raises, including ``SystemExit``.
    """
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
    # What `python -m` itself calls: it fills in sys.argv[0] and the names of __main__.
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def _call_function(job: Job) -> bytes:
    from unisono.launch.pickling import load

    sys.path[:] = job.sys_path
    sys.argv = list(job.argv)
    main = _fresh_main()
    call: dict[str, Any] = load(job.payload)
    know_sources(call["sources"])
    _know_by_name(main.__dict__, call["of_main"])
    start_generators(call["states"], job.seed)
    set_modes(call["modes"])
    return pack_result(call["function"](*call["args"]))


def _know_by_name(main: dict[str, Any], of_main: dict[str, Any]) -> None:
    """Put what came from the caller's ``__main__`` into this one: pickle looks there by name."""
    for value in of_main.values():
        names = getattr(value, "__globals__", {})
        # A decorator of some module gives its function another's name.
        if names.get("__name__") == "__main__":
            main.update({k: v for k, v in names.items() if not k.startswith("__")})
    for name, value in of_main.items():
        if name.isidentifier():
            main.setdefault(name, value)


def _fresh_main() -> ModuleType:
    main = ModuleType("__main__")
    main.__dict__["__builtins__"] = sys.modules["builtins"]
    sys.modules["__main__"] = main
    return main


def _prepend_to_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)
