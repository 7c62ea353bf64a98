"""Reports a run to Ray Train: its metrics, and checkpoints that survive the loss of a node.

In Ray each report waits for all workers, so all report at the same places. The leader's report
includes a checkpoint once one is written; Ray copies it to its storage.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

from unisono.engine.state.saved import CheckpointData
from unisono.runtime.checkpoint.folder import read_folder
from unisono.runtime.checkpoint.run_directory import RunDirectory
from unisono.runtime.world import per_process
from unisono.training.callbacks.callback import Callback, DoneStep, Fit
from unisono.training.callbacks.summary import Summary


@final
class RayTrain(Callback):
    """Reports to Ray Train; needs ``pip install 'unisono[ray]'``.

    Create it in the function that ``ray.train.torch.TorchTrainer`` runs. It reports after each
    validation, epoch and checkpoint, and at the end: ``step`` and ``epoch`` done, ``train/loss``
    and so on of the last step, ``validation/loss`` and so on of the newest validation, at the end
    ``digest``. Ray's ``Result`` keeps the metrics of reports with a checkpoint, so pass a
    `directory`. Training waits while a checkpoint is written and copied to Ray's storage; if that
    fails, the run ends, and Ray's ``FailureConfig`` applies.

    If Ray has a newer checkpoint than `directory`, as on another node, it is copied there before
    ``fit`` resumes. So only one directory of the function may have this callback.

    Ray accepts a report every 2 s (``RAY_TRAIN_HEALTH_CHECK_INTERVAL_S``); training waits if they
    are more frequent. Ray counts a checkpoint once all workers have reported it. For Ray Tune,
    start a ``TorchTrainer`` in each trial, with ``TuneReportCallback()`` among the callbacks of its
    ``RunConfig``. ``CheckpointConfig(num_to_keep=2)`` deletes old copies.

    Raises:
        ModuleNotFoundError: Ray is not installed.
        RuntimeError: it is created outside of that function.
    """

    def __init__(self) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ModuleNotFoundError(
                "Ray must be installed to take reports, but is not: `pip install 'unisono[ray]'`."
            )
        self._ray: Any = importlib.import_module("ray.train")
        self._context = self._ray.get_context()
        self._means: Mapping[str, float] = {}
        self._validation: Mapping[str, Any] = {}
        self._is_due = self._has_kept = False

    def before_resume(self, directory: Path) -> None:
        """Copy Ray's newest checkpoint to the run directory, if it is newer than those there."""
        served, rank = per_process(_Served), self._context.get_world_rank()
        if served.directory is None:
            served.directory = directory
            # If all share the directory, the others find what rank 0 has copied.
            if rank == 0:
                self._fetch(directory)
            importlib.import_module("ray.train.collective").barrier()
            if rank and self._context.get_local_rank() == 0:
                self._fetch(directory)
        elif rank == 0 and served.directory != directory:  # its path counts for all
            raise ValueError(
                f"RayTrain must serve one directory, as Ray resumes from its newest checkpoint, "
                f"but {directory} comes after {served.directory}: leave it out of other trainers."
            )

    def on_step_begin(self, fit: Fit) -> None:
        """Report the results of the previous step, if a report is due."""
        if self._is_due:
            self._report(fit)

    def on_step_end(self, fit: Fit, step: DoneStep) -> None:
        """Store the means."""
        self._means = step.means

    def on_validation(self, fit: Fit, means: Mapping[str, Any], seconds: float) -> None:
        """Store the means of a validation, and make a report due."""
        self._validation, self._is_due = means, True

    def on_epoch_end(self, fit: Fit) -> None:
        """Make a report due."""
        self._is_due = True

    def on_checkpoint(self, fit: Fit, step: int) -> None:
        """Make a report due, with a checkpoint."""
        self._is_due = self._has_kept = True

    def on_end(self, fit: Fit, summary: Summary) -> None:
        """Report the final state of the run."""
        self._report(fit, digest=summary.digest)

    def _report(self, fit: Fit, **more: str) -> None:
        folder = fit.written_checkpoint() if self._has_kept and fit.is_leader else None
        self._is_due = self._has_kept = False
        named = {"train": self._means, "validation": self._validation}
        means = {f"{of}/{name}": mean for of, all in named.items() for name, mean in all.items()}
        checkpoint = None if folder is None else self._ray.Checkpoint.from_directory(folder)
        self._ray.report({"step": fit.step, "epoch": fit.epoch, **means, **more}, checkpoint)

    def _fetch(self, directory: Path) -> None:
        if (reported := self._ray.get_checkpoint()) is None:
            return
        with reported.as_directory() as folder:
            files = read_folder(Path(folder))
        step = CheckpointData.from_files(files).facts["position"]["step"]
        store = RunDirectory(directory, keep=sys.maxsize)
        if all(entry.step < step for entry in store.entries() if not entry.trouble):
            store.set_aside(step - 1)  # what is damaged
            store.write(step, files)


@final
class _Served:
    """The directory of this process whose checkpoints are Ray's."""

    directory: Path | None = None
