"""What runs in each process: the program, watched.

The program finds what ``torchrun`` would give it: its variables, torch's generator as in any new
process, and Python's and numpy's in a state of its own on each rank. Its output goes to a file.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from unisono.runtime.launch.program import run_module, run_script
from unisono.tools.verify.loader_hooks import LoaderHooks
from unisono.tools.verify.module_hooks import ModuleHooks
from unisono.tools.verify.optimizer_hooks import CollectiveHooks, ExactHooks, OptimizerHooks
from unisono.tools.verify.recorder import Limits, Recorder, copy_before_writing, unlink_target, wrap

_SEED_OF_A_NEW_PROCESS = 67280421310721  # c10's default_rng_seed_val


def main(install: Callable[[Recorder], None]) -> None:
    """Run ``OPTIONS script|module TARGET ARGS…``."""
    _, options_path, kind, target, *args = sys.argv
    limits = Limits(**json.loads(Path(options_path).read_text()))
    recorder = Recorder(limits, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    _redirect(recorder)
    install(recorder)
    _protect_files(os.getcwd())
    random.seed(recorder.rank)
    np.random.seed(recorder.rank)
    torch.manual_seed(_SEED_OF_A_NEW_PROCESS)
    sys.argv = [target, *args]
    try:
        (run_module if kind == "module" else run_script)(target, args)
    except SystemExit as error:
        recorder.end("ended" if error.code in (None, 0) else f"left with {error.code!r}")
        raise
    except BaseException:
        traceback.print_exc()
        recorder.end("failed")
        raise
    recorder.end("ended")


def install_hooks(recorder: Recorder) -> None:
    """Put all hooks in place that compare ranks."""
    modules = ModuleHooks(recorder)
    for hooks in (
        modules,
        OptimizerHooks(recorder, modules),
        LoaderHooks(recorder),
        CollectiveHooks(recorder),
        ExactHooks(recorder),
    ):
        hooks.install()


def _protect_files(folder: str) -> None:
    """Leave the user's files as they are, where the working folder has links to them."""
    copy_before_writing(folder)

    def save(before: Callable[..., None], obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(f, str | os.PathLike):
            unlink_target(folder, os.fspath(f), keep=False)
        before(obj, f, *args, **kwargs)

    wrap(torch, "save", save, torch.serialization)


def _redirect(recorder: Recorder) -> None:
    """Send what the program prints to a file, and let it read nothing."""
    path = os.path.join(recorder.options.folder, f"rank{recorder.rank}.log")
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nothing)
    os.close(output)


if __name__ == "__main__":
    main(install_hooks)
