"""The trainer: the step loop with a loss function, validation, progress and a summary."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from unisono.data.data_reading import Reading
from unisono.data.epoch_order import Sampler
from unisono.engine.splitting.split import check_casts, split_of
from unisono.engine.state.load import save_weights
from unisono.engine.state.optimizers import needs_closure
from unisono.engine.step.transforms import OnGradients
from unisono.runtime.device import AUTO
from unisono.runtime.habits import attributes_met, habits_met
from unisono.runtime.plainfile import weights_file
from unisono.training.callbacks.callback import Callback, Callbacks, check_moments
from unisono.training.callbacks.event_log import EventLog
from unisono.training.callbacks.logger import with_loggers
from unisono.training.callbacks.progress import Progress
from unisono.training.callbacks.summary import Summary
from unisono.training.computing import Computing, is_compiled
from unisono.training.evaluate import Passes, checked, model_to_validate
from unisono.training.fit import FitUnderWay
from unisono.training.loss_function import (
    Loss,
    WholeBatch,
    check_forward,
    check_function,
    check_loss,
    forward_inputs,
    outputs_and_targets,
)
from unisono.training.options import Checkpoint, Precision, Schedule, check_together
from unisono.training.predict import Predictor
from unisono.training.run import Run, context_of
from unisono.training.sample_planning import no_epochs
from unisono.training.schedule import KEY, ScheduleUnderWay, Validation, sets_by_name
from unisono.training.several_models import Optimizers, check_one_model
from unisono.training.sweep import Forward


@final
@attributes_met("`Trainer`")
class Trainer:
    """Trains a model, with the same result on any number of workers.

    Args:
        model: the plain model, on any device.
        optimizer: over the model's parameters; or several, by name, each over its own parameters,
            which all step after each batch. For several models, or updates that alternate as a
            GAN's do, use :class:`unisono.Run` and ``step.update``.
        loss: a function of (model, batch of one shard), or a :class:`unisono.WholeBatch`. It
            returns the mean loss, or ``(sum, weight)``, whose sum is differentiated and whose
            gradients are divided by the weight of the global batch (None: by nothing); or a dict
            with ``"loss"`` and further scalars, which are averaged in the same way (integers and
            booleans are added up; a mean of the batches' F1s is no F1: use `metrics` of
            :meth:`evaluate`), and ``"per_sample"``, a dict of tensors with a row for each sample.
        shards: S, the fixed number of parts of every global batch; at least the number of
            workers. None: the largest power of two, at most 8, that leaves 8 samples of the first
            loop's ``batch_size`` for each shard; at least 1.
        seed: for the order of samples and all random numbers in training; ≥ 0, < 2⁶⁴. Initial
            weights are drawn earlier: call ``torch.manual_seed`` before you create the model.
        device: where each worker computes: ``"auto"``: one GPU for each, or the CPU if there is
            none; or a torch device such as ``"cpu"``, ``"cuda"`` or ``"cuda:1"`` (the same one for
            all workers). The model is moved in place, now. Leave it out for a model that
            :func:`unisono.split` has placed on several devices.
        precision: ``"fp32"``, ``"bf16"`` or ``"fp16"``; or a :class:`unisono.Precision`.
        clip_norm: the maximum norm of the mean gradients, with the bits of torch's
            ``clip_grad_norm_`` over the optimizer's parameters in the model's order.
            ``math.inf`` computes the norm without clipping, for ``step.gradient_norm`` and the
            event file.
        clip_value: the maximum magnitude of each element of the mean gradients.
        on_gradients: a function of (step, mean gradients by name), called once a step before
            clipping. It changes gradients in place or in the dict, or returns others by name. A
            gradient that it omits is absent, as after ``.grad = None``; ``{}`` skips the update.
            It is called on every worker with the same bits and must do the same on each;
            generators are seeded.
        buffers: how to combine what the shards of a step leave in buffers, by their names in
            ``model.named_buffers()`` or patterns such as ``"*.counts"``: ``"sum"`` of what each
            adds, ``"mean"`` over samples, ``"max"``, ``"min"``, or ``"first"``, the default: what
            the first shard leaves.
        schedule: one of ``torch.optim.lr_scheduler``, which steps after each epoch; or a
            :class:`unisono.Schedule`.
        directory: where checkpoints and the event file are written; None: nowhere. If workers
            pass different ones, for example with a time in the name, rank 0's is used. A URL such
            as ``"s3://bucket/run"`` is copied to in the background, from a local folder.
        checkpoint: the interval, such as ``500`` (steps), ``"1 epoch"`` or ``"10min"``; or a
            :class:`unisono.Checkpoint`.
        callbacks: see `unisono.callbacks`. Progress is always shown, and with `directory` there
            is always an event file.

    Attributes:
        callbacks: a list; may be changed between calls of `fit`.
        run: the :class:`unisono.Run`: its position, and ``run.state``, which your program saves
            with it.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an argument is not valid; the message says what to do.
    """

    @habits_met("Trainer(model, optimizer, loss, shards=4)")
    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        loss: Loss | WholeBatch,
        *,
        shards: int | None = None,
        seed: int = 0,
        device: str | torch.device = AUTO,
        precision: str | Precision = "fp32",
        clip_norm: float | Mapping[str, float] | None = None,
        clip_value: float | Mapping[str, float] | None = None,
        on_gradients: OnGradients | None = None,
        buffers: Mapping[str, str] | None = None,
        schedule: LRScheduler | Schedule | None = None,
        directory: str | os.PathLike[str] | None = None,
        checkpoint: int | str | Checkpoint | None = None,
        callbacks: Callback | Iterable[Callback] = (),
    ) -> None:
        check_one_model(model)
        embed = None
        if isinstance(loss, WholeBatch):
            embed, loss = loss.embed, loss.loss
        check_loss(loss)
        if not isinstance(precision, Precision):
            precision = Precision(precision)
        if schedule is not None and not isinstance(schedule, Schedule):
            schedule = Schedule(schedule)
        self._computing = Computing(precision)
        scaler = self._computing.make_scaler()
        self.run = Run(
            model,
            optimizer,
            shards=shards,
            seed=seed,
            device=device,
            exact=precision.exact,
            scaler=scaler,
            clip_norm=clip_norm,
            clip_value=clip_value,
            on_gradients=on_gradients,
            buffers=buffers,
            directory=directory,
            checkpoint=checkpoint,
        )
        self._context = context_of(self.run)
        self.run.fixed.update(self._computing.fixed_by(model, self.run.device))
        if precision.name != "fp32":
            check_casts(model)
        check_together(
            closure=needs_closure(self.run.optimizer),
            whole_batch=embed is not None,
            one_loss=isinstance(optimizer, Mapping),
            scaler=scaler is not None,
            split=split_of(model) is not None,
            compiled=is_compiled(model),
        )
        self._schedule = ScheduleUnderWay(schedule, self.run.optimizer)
        self.run.fixed["schedule"] = self._schedule.name
        if schedule is not None:
            self.run.state[KEY] = schedule.scheduler
        is_one = isinstance(callbacks, Callback | type | str) or not isinstance(callbacks, Iterable)
        given: list[Any] = [callbacks] if is_one else list(callbacks)  # type: ignore[arg-type]
        self.callbacks = list(Callbacks(given, self.directory))
        Callbacks(self.callbacks).keep_states(self.run.state)
        self._passes = Passes(self._context, self._computing, loss, embed)
        self._reading: Reading | None = None  # of the newest `fit`

    @habits_met("fit(train_set, batch_size=64, epochs=3, validate=test_set)")
    def fit(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        epochs: int | None = None,
        steps: int | None = None,
        validate: Any = None,
        validate_every: int | str = "1 epoch",
        validate_metrics: Any = None,
        validate_forward: Forward = outputs_and_targets,
        validate_model: Callable[[nn.Module], nn.Module] | None = None,
        shuffle: bool | None = None,
        sampler: Sampler | None = None,
        drop_last: bool = False,
        batch_sampler: Sampler | None = None,
        groups: int = 1,
    ) -> Summary:
        """Train until the run has done `epochs` or `steps` in total; if it has, do nothing.

        Collective: every rank calls it, in the same order. Each layer trains in the mode in which
        the program, or the checkpoint that the run resumes from, left it. So a BatchNorm in
        ``eval()`` keeps its averages; if all layers are in ``eval()``, one line says so.

        A program may call it several times, with higher totals, other data or more parameters each
        time; for one more epoch than ``epochs=1``, pass ``epochs=2``. A program that is started
        again makes the same calls: the one in which the newest checkpoint was written resumes from
        it, and earlier ones do nothing. If a phase may end before its totals, give each phase its
        own trainer and directory.

        Args:
            dataset: the same on every worker. A map-style dataset; or an IterableDataset, which
                every worker reads from its beginning, unless it has a method ``shard(index,
                num_shards)`` that returns one shard's part; or a DataLoader, whose dataset, order
                (``shuffle=True``), batch size (as that of the global batch), `collate_fn` and
                `num_workers` (processes of each worker that read ahead; bits do not depend on them)
                are used. A dataset without a length has one epoch and needs `steps`.
            batch_size: samples of one global batch, all workers together; None: the loader's.
            epochs: how many epochs the run has in total.
            steps: how many steps the run has in total; with `epochs`, whichever comes first.
            validate: a dataset, read like `dataset`, to evaluate during training and at the end; or
                a DataLoader; or several of them by name, such as ``{"seen": a, "new": b}``, whose
                means are called ``"seen/loss"`` and so on, also as the `monitor` of a callback.
            validate_every: how often: ``500`` (steps) or ``"2 epochs"``.
            validate_metrics: what else to compute then, as `metrics` of :meth:`evaluate`.
            validate_forward: what metrics are given, as `forward` of :meth:`evaluate`.
            validate_model: returns the model to validate, given the one that is trained, such as
                ``ema.model``; `BestCheckpoint` saves its weights.
            shuffle: whether to shuffle samples again in each epoch; None: yes, unless there is a
                sampler.
            sampler: the order of samples: a function of (epoch, seed) that returns indices, equally
                many in each epoch and the same on every worker; or one of torch's samplers.
            drop_last: whether to leave out samples after the last full batch of an epoch.
            batch_sampler: the batches, of any sizes, instead of `batch_size` and an order: lists of
                indices, such as ``[[4, 0], [7, 2, 9]]``, as a list, as an object that yields new
                ones in each epoch, or as a function of (epoch, seed). Or pass a DataLoader that
                has one.
            groups: how many neighbours in the order of samples stay together in a shard, such as
                the answers to one prompt.

        Returns:
            The history of the run, a list with a dict for each epoch, which also says what this
            call did, such as ``history.digest``; its text is the summary line.

        Raises:
            TypeError: a dataset has no samples or no length, or the loss returned something else.
            ValueError: a number is not valid, or the loss is not a scalar.
            CallbackError: a callback raised an exception.
            NonFiniteLossError: the loss of a shard is NaN or infinite, or, with `clip_norm`, the
                norm of the gradients; in ``"fp16"``: gradients are, at every scale of the loss.
            NondeterministicError: on an accelerator, an operation has no deterministic kernel.
            LoadingError: a sample cannot be read, or a loader process has died.
            MismatchError: the workers do not run the same program.
            CheckpointError: the newest checkpoint belongs to another run.
        """
        run = self.run
        reading = Reading.of(
            dataset,
            batch_size,
            shuffle,
            sampler,
            drop_last=drop_last,
            batch_sampler=batch_sampler,
            groups=groups,
        )
        plan = self._context.plan_loop(reading, epochs, steps)
        if plan.samples.is_endless and self._schedule.counts_epochs:
            raise no_epochs("schedule")
        self._reading = reading.of_another(None)
        passes, find_means, sets = self._passes, None, sets_by_name(validate)
        measured = passes.metrics(validate_metrics, validate_forward)
        if measured is not None and not sets:
            raise ValueError(
                "`validate` must be given where `validate_metrics` say what to compute of it, but "
                "is None: pass a dataset, or leave `validate_metrics` out."
            )
        validated = None
        if validate_model is not None:
            check_function("validate_model", validate_model, ("model",))
            validated = functools.partial(model_to_validate, validate_model, run.model)
        if sets:
            find_means = passes.validation(reading, sets, measured, validated)
        callbacks = Callbacks(self._all_callbacks(), self.directory)
        check_moments(callbacks)
        callbacks.take_files(run, has_begun=run.position.step > 0)
        computed = () if measured is None else measured.names
        validation = Validation(run, find_means, validate_every, sets, computed)
        if self._schedule.needs_validation:
            validation.must_be("ReduceLROnPlateau", self._schedule.monitor)
        for callback in callbacks:
            if callback.needs_validation:
                validation.must_be(callback.name, callback.monitor)
        Callbacks(self.callbacks).forget_others(run.state if run.position.step else {})
        Callbacks(self.callbacks).keep_states(run.state)
        if (directory := self.directory) is not None:
            for callback in callbacks:
                callback.before_resume(directory)
        fit = FitUnderWay(
            run, plan, passes.loss, callbacks, validation, self._schedule, passes.embed, validated
        )
        return fit.go_through(self._computing.under_way(self.run.model))

    @habits_met("evaluate(test_set, batch_size=64)")
    def evaluate(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        metrics: Any = None,
        forward: Forward = outputs_and_targets,
        model: nn.Module | None = None,
    ) -> dict[str, Any]:
        """Compute the means of the loss and its scalars over a dataset, every sample once.

        Collective: every rank calls it, in the same order.

        Args:
            dataset: as for :meth:`fit`.
            batch_size: samples of one pass, as in a plain loop; workers take passes in turn. None:
                the loader's, or that of :meth:`fit`, whose `collate_fn` and `num_workers` are then
                used as well.
            metrics: further metrics by name. A function, such as ``lambda outputs, targets:
                roc_auc_score(targets, outputs)``, is called once, on one worker, with outputs and
                targets of the whole dataset in its order, as tensors on the CPU. torchmetrics
                objects and a ``MetricCollection`` are copied, and one worker updates the copies
                with the rows of each pass in turn. Metrics need a second forward pass.
            forward: for `metrics`: a function of (model, batch) that returns the arguments of the
                metrics as a tuple, or as a dict by name. By default the model is called with the
                first part of a pair (inputs, targets), and metrics get (outputs, targets).
            model: another model to evaluate, for example with averaged weights; the same on
                every worker. None: the one being trained.

        Returns:
            By name, the mean over all samples (or the true weight) and the result of each metric, a
            number, or lists or dicts of them; the same bits on every worker and for every number of
            workers. Sums are exact and rounded once, as ``math.fsum`` does.

        Raises:
            TypeError: `metrics` are neither functions nor torchmetrics objects, `forward` returns
                no rows, or the loss has the wrong type.
            ValueError: a metric has the name of a mean, or the loss is not a scalar.
        """
        reading = self._read_in_order(dataset, batch_size)
        other = None if model is None else lambda: model
        return self._passes.evaluate(reading, self._passes.metrics(metrics, forward), other)

    @habits_met("predict(test_set, batch_size=64)")
    def predict(
        self,
        dataset: Any,
        *,
        batch_size: int | None = None,
        forward: Forward = forward_inputs,
        model: nn.Module | None = None,
    ) -> Any:
        """Predict for every sample of a dataset; row i belongs to sample i.

        Collective: every rank calls it, in the same order.

        Args:
            dataset: as for :meth:`evaluate`.
            batch_size: as for :meth:`evaluate`.
            forward: a function of (model, batch) that returns a tensor, or a tuple or
                dict of tensors, with one row for each sample. By default the model is called with
                the batch, or with the first part of a tuple such as (inputs, targets).
            model: as for :meth:`evaluate`.

        Returns:
            What `forward` returns, with ``len(dataset)`` rows: the same bits on every worker and
            for every number of workers. Each worker may change its own copy.

        Outside of loops, the launcher keeps the rows for replacements of lost workers until the
        job ends, in an unnamed file in the folder for temporary files (``TMPDIR``).

        Raises:
            TypeError, ValueError: `forward` does not return rows.
            OSError: there is no room for the rows, or not every worker can open their file.
        """
        check_forward(forward)
        reading = self._read_in_order(dataset, batch_size)
        predictor = Predictor(
            self._passes.sweep("predict", reading, model, forward=forward),
            self._passes.rehearsed("forward", self._passes.prepared(forward)),
        )
        with self._computing.under_way(self.run.model):
            return predictor.once(self._context.replicated_calls)

    def save(self, path: str | os.PathLike[str], *, model: nn.Module | None = None) -> None:
        """Write the weights under the plain model's names.

        The file is safetensors, or a state dict of `torch.save` if `path` ends in .pt, .pth, .bin,
        .ckpt or .pkl. Any rank may call it between loops and in callbacks; on return, the file
        exists. If several ranks do, each writes the whole file, with the same bytes.

        Args:
            path: the file; a reader finds the old one or the whole new one. Its folder is created.
            model: see :meth:`evaluate`.

        Raises:
            OSError: the folder cannot be made or written.
            ValueError: there are weights that no such file can hold, or the name ends as one of
                another format does, such as .onnx.
        """
        whole = self.run.model if model is None else checked(model)
        save_weights(whole, weights_file(path))

    def digest(self) -> str:
        """Hash parameters, buffers and optimizer state; see :meth:`unisono.Run.digest`."""
        return self.run.digest()

    @property
    def directory(self) -> Path | None:
        """The folder of checkpoints, for a URL a local one; equal on all workers once `fit` ran."""
        checkpoints = self._context.checkpoints
        return None if checkpoints is None else checkpoints.directory

    def _read_in_order(self, dataset: Any, batch_size: int | None) -> Reading:
        """Return how a pass reads samples: as the newest `fit` did, if `batch_size` is None."""
        if batch_size is None and self._reading is not None:
            return self._reading.of_another(dataset).in_dataset_order()
        return Reading.of(dataset, batch_size).in_dataset_order()

    def _all_callbacks(self) -> list[Callback]:
        """Return the callbacks, with the usual ones unless one of the same kind is given."""
        usual: list[type[Callback]] = [Progress, EventLog]
        missing = [kind for kind in usual if not any(isinstance(c, kind) for c in self.callbacks)]
        return with_loggers([*(kind() for kind in missing), *self.callbacks], self.directory)
