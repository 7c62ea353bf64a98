"""What people write from habit with other libraries, and what to write instead.

One table answers every unknown argument, in place of Python's message.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

_LEAVE_OUT = "leave it out, as"

# What to write, and the corresponding arguments of other libraries.
_INSTEAD = {
    "write `trainer.fit(…, epochs=3)`": "epochs max_epochs num_epochs num_train_epochs nb_epoch "
    "n_epochs",
    "write `trainer.fit(…, steps=1000)`": "steps max_steps num_steps total_steps steps_per_epoch",
    "write `trainer.fit(…, steps=20)` for a quick try": "fast_dev_run limit_steps "
    "limit_train_batches overfit_batches",
    "write `trainer.fit(…, batch_size=64)`, the batch of all workers together": "batch_size "
    "train_batch_size per_device_train_batch_size",
    "write `trainer.evaluate(test_set, batch_size=64)`": "eval_batch_size validation_batch_size "
    "per_device_eval_batch_size",
    "write `trainer.fit(train_set, …)`": "data train_set train_data train_dataset train_loader "
    "train_dataloader train_dataloaders datamodule",
    "write `trainer.fit(TensorDataset(x, y), …)`": "x y X Y inputs targets",
    "write `trainer.fit(…, validate=test_set)`": "validate validation_data val_data val_set "
    "val_dataset val_loader val_dataloader val_dataloaders valid_set eval_set eval_dataset",
    "write `trainer.fit(…, validate=part)`, with a part of `torch.utils.data.random_split`": ""
    "validation_split",
    "write `trainer.fit(…, validate=Subset(test_set, range(1000)))`": "limit_val_batches "
    "limit_test_batches validation_steps",
    'write `trainer.fit(…, validate_every=500)`, in steps, or `"1 epoch"`': "validate_every "
    "val_check_interval check_val_every_n_epoch validation_freq eval_steps eval_strategy "
    "evaluation_strategy",
    "write `trainer.evaluate(test_set, metrics={…})`, or let the loss return a dict with further "
    "scalars": "metrics compute_metrics",
    "write `Trainer(model, optimizer, loss)`, with a function of (model, batch)": "loss_fn "
    "loss_function criterion compute_loss",
    "give it to the optimizer, as in `torch.optim.Adam(model.parameters(), lr=1e-3)`": "lr "
    "learning_rate weight_decay momentum optimizers",
    "write `Trainer(…, schedule=scheduler)`": "scheduler lr_scheduler lr_scheduler_type "
    "warmup_steps warmup_ratio",
    "write `Trainer(…, clip_norm=1.0)`": "gradient_clip_val grad_clip clip_grad_norm max_grad_norm "
    "max_norm",
    "write a `batch_size` that many times as large, and `Trainer(…, shards=…)`: more shards than "
    "workers are gradient accumulation": "accumulate_grad_batches gradient_accumulation_steps",
    "write `Trainer(…, shards=8)`": "shards",
    'write `Trainer(…, precision="bf16")`, or "fp16"; a `Run` has losses under torch.autocast': ""
    "precision fp16 bf16 amp use_amp mixed_precision dtype torch_dtype",
    "start the program with `unisono run -n 2 train.py`, or write `unisono.launch(main, "
    "workers=2)`": "devices gpus num_gpus n_gpu num_nodes num_processes nprocs nproc_per_node "
    "strategy world_size rank local_rank sync_batchnorm",
    f"{_LEAVE_OUT} each worker has a GPU if there are any; or write "
    '`Trainer(…, device="cpu")`': "accelerator use_cpu no_cuda",
    'write `Trainer(…, directory="runs/mnist")`': "directory default_root_dir output_dir save_dir "
    "log_dir logdir logging_dir project_dir",
    'write `Trainer(…, directory="runs/mnist", checkpoint="10min")`': "checkpoint save_steps "
    "save_strategy save_freq enable_checkpointing",
    "write `Trainer(…, checkpoint=unisono.Checkpoint(keep=3))`": "save_total_limit",
    f"{_LEAVE_OUT} a run with a `directory` resumes; "
    '`checkpoint=unisono.Checkpoint(resume="never")` begins anew': "resume ckpt_path resume_from "
    "resume_from_checkpoint initial_epoch",
    "write `Trainer(…, callbacks=[…])`, with some of `unisono.callbacks`": "callbacks logger "
    "loggers log_with report_to",
    f"{_LEAVE_OUT} progress is always shown": "verbose progress_bar enable_progress_bar "
    "disable_tqdm enable_model_summary log_every_n_steps logging_steps",
    f"{_LEAVE_OUT} every run has the same bits": "deterministic benchmark",
    'write `Schedule(scheduler, every="step")`, or "epoch"': "interval frequency",
    "pass a `DataLoader` as data, such as `DataLoader(train_set, 64, num_workers=2)`": ""
    "num_workers collate_fn data_collator pin_memory use_multiprocessing dataloader_num_workers",
    "write `Trainer(…, seed=0)`": "seed random_seed random_state",
    "let the loss return `(sum, weight)`": "class_weight sample_weight",
    'write `better="lower"`, or "higher"': "mode greater_is_better metric_for_best_model",
    "use `unisono.callbacks.BestCheckpoint()`": "restore_best_weights load_best_model_at_end "
    "save_best_only",
    f"{_LEAVE_OUT} `BestCheckpoint` keeps the best weights alone; the newest states: "
    "`Trainer(…, checkpoint=unisono.Checkpoint(keep=3))`": "save_top_k save_last",
    'write `BestCheckpoint("best.safetensors")`': "dirpath filename filepath",
    "see `unisono plan`, `top` and `report` for where the time goes": "profiler",
    f"{_LEAVE_OUT} the workers divide the samples themselves": "use_distributed_sampler "
    "num_sanity_val_steps find_unused_parameters ddp_find_unused_parameters",
    "let `collate_fn` of the `DataLoader` pad, and call `remove_columns` of the dataset": ""
    "tokenizer processing_class remove_unused_columns",
    "write `trainer.fit(…, validate_forward=…)`": "preprocess_logits_for_metrics",
    "call `model.compile()` before": "compile torch_compile jit_compile",
    "write the arguments behind the function, as in `unisono.launch(main, 1, 2)`; what "
    "`TrainingArguments` has are arguments of `Trainer` and `fit`": "args",
}

# What to write instead of a missing attribute.
_NAMES = {
    "call `torch.manual_seed(0)` before the model is made, and write `Trainer(…, seed=0)`": ""
    "seed_everything set_seed",
    "a plain `nn.Module` is trained, with a loss that is a function of (model, batch)": ""
    "LightningModule",
    'write `Trainer(…, directory="runs/mnist")`, which resumes, and '
    "`unisono.callbacks.BestCheckpoint()`": "ModelCheckpoint",
    "`unisono.callbacks` has `EarlyStopping`, `BestCheckpoint`, loggers, and `Callback`, of which "
    "to derive others": "BestCheckpoint Callback EMA EarlyStopping MLflow TensorBoard "
    "WandB EarlyStoppingCallback TrainerCallback TensorBoardLogger WandbLogger MLFlowLogger "
    "loggers logger",
    "leave it out, as the event file of a run with a `directory` has that": "LearningRateMonitor "
    "DeviceStatsMonitor TQDMProgressBar RichProgressBar ModelSummary CSVLog CSVLogger",
    "it is in `unisono.distributed`, where `init` makes the process group": "init_process_group "
    "DistributedDataParallel DistributedSampler",
    "leave it out, as `fit` and `evaluate` keep the workers together": "barrier wait_for_everyone "
    "Accelerator prepare",
    "write `unisono.load_weights(path, model)`": "load_from_checkpoint load_state_dict load_model",
    "its arguments are those of `Trainer` and `fit`": "TrainingArguments TrainingArgs",
    "write `trainer.fit(…)`": "train",
    "your program has it, as has `trainer.run`": "model optimizer",
    "`fit` returns it": "history logged_metrics callback_metrics",
    "write `trainer.evaluate(test_set, batch_size=64)`": "test validate",
    "write `trainer.save(path)`, or `Trainer(…, directory=…)`": "save_model save_checkpoint",
    'return it in the dict of the loss: `{"loss": loss, "accuracy": right}`': "log log_dict",
    "ask `unisono.progress()` in a loss, and `fit.step` and `fit.epoch` in callbacks": ""
    "global_step current_epoch state",
    "`evaluate` and `predict` find the values of all samples": "all_gather gather "
    "gather_for_metrics",
    "`unisono.world()` has rank and world size": "is_global_zero is_world_process_zero "
    "is_main_process local_rank global_rank world world_size get_rank get_world_size",
}


_LISTED_AT_MOST = 8  # attributes

# What a `Run` does not have.
_OF_A_TRAINER = ("callbacks", "precision", "schedule", "validate")


def habits_met(example: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Return a decorator that answers unknown arguments with what to write, as in `example`."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            __tracebackhide__ = True
            try:
                signature.bind(*args, **kwargs)
            except TypeError as error:
                unknown = [name for name in kwargs if name not in signature.parameters]
                raise TypeError(_told(example, signature, unknown, error, args)) from None
            return function(*args, **kwargs)

        return call

    return decorate


def missing(where: str, name: str, names: Sequence[str] = ()) -> AttributeError:
    """Return the error for a missing attribute, with what to write instead; `names` exist."""
    ways = [f"{way}." for way, habits in _NAMES.items() if name in habits.split()]
    ways = [way for way in ways if not way.startswith(where)]
    whole = sorted((one for one in names if name in one.split("_")), key=len)
    parts = sorted((one for one in names if one in name), key=len, reverse=True)
    close = whole or parts or difflib.get_close_matches(name, names, 1, cutoff=0.75)
    ways += [f"did you mean `{one}`?" for one in close]
    if len(names) <= _LISTED_AT_MOST:
        ways += [f"it has {', '.join(names[:-1])} and {names[-1]}." for _ in names[:1]]
    remedy = f": {ways[0]}" if ways else ""
    return AttributeError(f"{where} has no attribute {name!r}{remedy}")


def attributes_met(where: str) -> Callable[[type[T]], type[T]]:
    """Make objects of a class answer for an attribute that they lack."""

    def decorate(kind: type[T]) -> type[T]:
        def absent(self: T, name: str) -> Any:
            if hasattr(kind, name):  # a property has failed: once more, for its own error
                return object.__getattribute__(self, name)
            # Python itself looks for those that begin with _.
            names = [] if name.startswith("_") else [n for n in dir(self) if not n.startswith("_")]
            raise missing(where, name, names)

        kind.__getattr__ = absent  # type: ignore[attr-defined]
        return kind

    return decorate


def class_habits_met(example: str) -> Callable[[type[T]], type[T]]:
    """Return a decorator like :func:`habits_met` for a class."""

    def decorate(kind: type[T]) -> type[T]:
        kind.__init__ = habits_met(example)(kind.__init__)  # type: ignore[method-assign]
        return kind

    return decorate


def _told(
    example: str, signature: inspect.Signature, unknown: list[str], error: TypeError, args: Any
) -> str:
    name, others = example.partition("(")[0], [*signature.parameters]
    if not unknown:
        advice = ""
        if "too many" in str(error) and "dataset" in others:
            advice = "; inputs and targets are one dataset, `TensorDataset(x, y)`"
            if hasattr(args[1], "parameters"):
                advice = "; the model is `Trainer(model, …)`'s, and each trainer has one"
            elif not hasattr(args[2], "shape"):
                advice = "; what to validate on is `validate=test_set`"
        return f"`{name}` must be called as in `{example}`, but: {error}{advice}."
    remedies = [way for way, names in _INSTEAD.items() if unknown[0] in names.split()]
    close = difflib.get_close_matches(unknown[0], others, 1)
    remedies += [f"did you mean `{close[0]}`"] if close else [f"write `{example}`, for example"]
    remedy = remedies[0]
    if name in ("Run", "steps") and not any(of in remedy for of in _OF_A_TRAINER):
        remedy = remedy.replace("trainer.fit(", "run.steps(").replace("Trainer(", "Run(")
    return f"`{name}` has no argument `{unknown[0]}`: {remedy}."
