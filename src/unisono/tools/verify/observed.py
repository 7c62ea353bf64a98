"""The program in each process, watched.

It gets what ``torchrun`` would give it: variables, torch's generator as in any new process, and
Python's and numpy's in a different state on each rank. Its output goes to a file.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from unisono.runtime.launch.program import run_module, run_script
from unisono.tools.verify.loader_hooks import LoaderHooks
from unisono.tools.verify.module_hooks import ModuleHooks
from unisono.tools.verify.optimizer_hooks import CollectiveHooks, ExactHooks, OptimizerHooks
from unisono.tools.verify.print_hooks import PrintHooks
from unisono.tools.verify.recorder import Limits, Recorder, copy_before_writing

_SEED_OF_A_NEW_PROCESS = 67280421310721  # c10's default_rng_seed_val


def main(install: Callable[[Recorder], None]) -> None:
    """Run ``OPTIONS script|module TARGET ARGS…``."""
    _, options_path, kind, target, *args = sys.argv
    limits = Limits(**json.loads(Path(options_path).read_text()))
    recorder = Recorder(limits, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
    _redirect(recorder)
    install(recorder)
    copy_before_writing(os.getcwd())
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
    """Install all hooks that compare ranks."""
    modules = ModuleHooks(recorder)
    for hooks in (
        modules,
        OptimizerHooks(recorder, modules),
        LoaderHooks(recorder),
        CollectiveHooks(recorder),
        PrintHooks(recorder),
        ExactHooks(recorder),
    ):
        hooks.install()


def _redirect(recorder: Recorder) -> None:
    """Redirect the program's output to a file, and its input from nothing."""
    path = os.path.join(recorder.options.folder, f"rank{recorder.rank}.log")
    with open(path, "ab") as output, open(os.devnull, "rb") as nothing:
        for fd, file in enumerate((nothing, output, output)):
            os.dup2(file.fileno(), fd)


if __name__ == "__main__":
    main(install_hooks)
