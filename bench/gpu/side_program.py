"""How is it trained? One function per side; this file is also the program each process runs.

=============  ============================================================================
bare           zero_grad, forward, backward, step; batches copied from pinned memory
ddp            the same on torch's DDP with one rank: NCCL on a GPU, gloo on the CPU
accelerate     a loop on Accelerate, which prepares model and optimizer
fabric         a loop on Lightning Fabric
lightning      Lightning's trainer without logger, checkpoints and progress bar
unisono        Unisono's trainer, one shard, as ``python train.py`` runs it
unisono-run    the same under ``unisono run -n 1``, which keeps snapshots for a replacement
unisono-loose  the same as ``unisono`` with ``exact=False``
shards         Unisono's trainer, two shards on one worker: what ``sharing`` is measured by
sharing        the same two shards on two workers that share the device
torch-two      the bare loop on torch's DataParallel, on two GPUs; on the CPU the model alone
two            the same on Unisono's DataParallel; on the CPU two chunks
=============  ============================================================================

All read batches from the same tensors in the host's memory with one indexing operation, so that
none is held up by a loader. Unisono's settings are its own; the others' are set before each block.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.gpu.clock import Clock
from bench.gpu.workloads import NAMES, PRECISION, SEED, Batch, GpuWorkload, workload

ENDLESS = 10**7


@dataclass(frozen=True)
class GpuTask:
    """What one process is to measure."""

    workload: GpuWorkload
    device: torch.device
    clock: Clock
    folder: Path

    def model(self) -> nn.Module:
        """Make the model where it is trained."""
        model = self.workload.model().to(self.device)
        if self.workload.channels_last:
            model.to(memory_format=torch.channels_last)
        return model

    def host_batches(self) -> Iterator[Batch]:
        """Give batches for ever, each epoch in an order of its own, pinned where that helps."""
        tensors, size = self.workload.dataset().tensors, self.workload.batch_size
        while True:
            order = torch.randperm(len(tensors[0]))
            for start in range(0, len(order) - size + 1, size):
                batch = tuple(
                    tensor.index_select(0, order[start : start + size]) for tensor in tensors
                )
                is_cuda = self.device.type == "cuda"
                yield tuple(part.pin_memory() for part in batch) if is_cuda else batch

    def laid_out(self, batch: Any) -> Batch:
        """Lay a batch out as the workload has it, where it already is."""
        if not self.workload.channels_last:
            return tuple(batch)
        last = torch.channels_last
        return tuple(
            part.contiguous(memory_format=last) if part.ndim == 4 else part for part in batch
        )

    def batches(self) -> Iterator[Batch]:
        """Give batches on the device."""
        for batch in self.host_batches():
            yield self.laid_out(part.to(self.device, non_blocking=True) for part in batch)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.workload.loss(model, batch)

    def amp(self) -> torch.autocast:
        return torch.autocast(self.device.type, PRECISION)


def bare(task: GpuTask) -> None:
    model = task.model()
    _train(task, model, task.workload.optimizer(model.parameters()))


def ddp(task: GpuTask) -> None:
    import torch.distributed as dist

    is_cuda = task.device.type == "cuda"
    store = dist.FileStore(str(task.folder / "store"), 1)
    more: dict[str, Any] = {"device_id": task.device} if is_cuda else {}
    dist.init_process_group(
        "nccl" if is_cuda else "gloo", store=store, rank=0, world_size=1, **more
    )
    model = nn.parallel.DistributedDataParallel(
        task.model(), device_ids=[task.device] if is_cuda else None
    )
    _train(task, model, task.workload.optimizer(model.parameters()))


def _train(task: GpuTask, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.train()
    task.clock.ready()
    for batch in task.batches():
        optimizer.zero_grad()
        with task.amp():
            loss = task.loss(model, batch)
        (loss.mean() if loss.dim() else loss).backward()  # a model on two GPUs gives two losses
        optimizer.step()
        task.clock.tick()


def torch_data_parallel(task: GpuTask) -> None:
    model = nn.DataParallel(task.model(), [0, 1] if task.device.type == "cuda" else None)
    _train(task, model, task.workload.optimizer(model.parameters()))


def data_parallel(task: GpuTask) -> None:
    from unisono import DataParallel

    model = DataParallel(task.model(), [0, 1] if task.device.type == "cuda" else ["cpu", "cpu"])
    _train(task, model, task.workload.optimizer(model.parameters()))


def accelerate(task: GpuTask) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=task.device.type == "cpu", mixed_precision="bf16")
    model = task.model()
    model, optimizer = accelerator.prepare(model, task.workload.optimizer(model.parameters()))
    model.train()
    task.clock.ready()
    for batch in task.batches():
        optimizer.zero_grad()
        with accelerator.autocast():
            loss = task.loss(model, batch)
        accelerator.backward(loss)
        optimizer.step()
        task.clock.tick()


def fabric(task: GpuTask) -> None:
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator=task.device.type, devices=1, precision="bf16-mixed")
    fabric.launch()
    model = task.model()
    model, optimizer = fabric.setup(model, task.workload.optimizer(model.parameters()))
    model.train()
    task.clock.ready()
    for batch in task.batches():
        optimizer.zero_grad()
        with fabric.autocast():
            loss = task.loss(model, batch)
        fabric.backward(loss)
        optimizer.step()
        task.clock.tick()


def lightning(task: GpuTask) -> None:
    import lightning as framework

    class Module(framework.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = task.model()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return task.loss(self.network, task.laid_out(batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return task.workload.optimizer(self.network.parameters())

    class Ticks(framework.Callback):
        def on_train_start(self, *_: Any) -> None:
            task.clock.ready()

        def on_train_batch_end(self, *_: Any) -> None:
            task.clock.tick()

    trainer = framework.Trainer(
        accelerator=task.device.type,
        devices=1,
        precision="bf16-mixed",
        max_steps=ENDLESS,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Ticks()],
        default_root_dir=str(task.folder),
    )
    trainer.fit(Module(), task.host_batches())


def unisono(task: GpuTask) -> None:
    _train_unisono(task, shards=1)


def unisono_loose(task: GpuTask) -> None:
    _train_unisono(task, shards=1, is_exact=False)


def shards(task: GpuTask) -> None:
    _train_unisono(task, shards=2)


def _train_unisono(task: GpuTask, *, is_exact: bool = True, **options: Any) -> None:
    from unisono import Precision, Trainer
    from unisono.callbacks import Callback

    model = task.workload.model()
    if task.workload.channels_last:
        model.to(memory_format=torch.channels_last)

    def loss(model: nn.Module, batch: Any) -> Any:
        return task.loss(model, task.laid_out(batch))

    class Ticks(Callback):
        def on_begin(self, fit: Any) -> None:
            if fit.rank == 0:
                task.clock.ready()

        def on_step_end(self, fit: Any, step: Any) -> None:
            if fit.rank == 0:
                task.clock.tick()

    trainer = Trainer(
        *(model, task.workload.optimizer(model.parameters()), loss),
        seed=SEED,
        precision=Precision("bf16", exact=is_exact),
        callbacks=[Ticks()],
        device=task.device.type,
        **options,
    )
    loader = torch.utils.data.DataLoader(
        task.workload.dataset(),
        task.workload.batch_size,
        shuffle=True,
        pin_memory=task.device.type == "cuda",
    )
    trainer.fit(loader, steps=ENDLESS)


@dataclass(frozen=True)
class GpuSide:
    """A way to train, and how its processes come about.

    Attributes:
        title: what the table calls it.
        train: goes on for ever, with a tick after each step.
        workers: how many workers of ``unisono run``; 0: plain ``python``.
        keeps_settings: whether it has settings of its own.
        package: what must be installed besides torch; empty: nothing.
        gpus: how many GPUs there must be, if it is measured on GPUs.
    """

    title: str
    train: Callable[[GpuTask], None]
    workers: int = 0
    keeps_settings: bool = False
    package: str = ""
    gpus: int = 1


BARE = "bare"
SIDES = {
    BARE: GpuSide("bare loop", bare),
    "unisono": GpuSide("Unisono", unisono, keeps_settings=True),
    "unisono-run": GpuSide("Unisono, unisono run -n 1", unisono, 1, keeps_settings=True),
    "unisono-loose": GpuSide("Unisono, exact=False", unisono_loose, keeps_settings=True),
    "ddp": GpuSide("torch DDP, one rank", ddp),
    "accelerate": GpuSide("Accelerate", accelerate, package="accelerate"),
    "fabric": GpuSide("Lightning Fabric", fabric, package="lightning"),
    "lightning": GpuSide("Lightning", lightning, package="lightning"),
    "shards": GpuSide("Unisono, 2 shards, 1 worker", shards, keeps_settings=True),
    "sharing": GpuSide("Unisono, 2 shards, 2 workers", shards, 2, keeps_settings=True),
    "torch-two": GpuSide("torch DataParallel, 2 GPUs", torch_data_parallel, gpus=2),
    "two": GpuSide("Unisono DataParallel, 2 GPUs", data_parallel, gpus=2),
}


def main() -> None:
    """Train one side in this process until it is killed."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--workload", choices=NAMES, required=True)
    parser.add_argument("--device", required=True, help="cuda or cpu")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--folder", type=Path, required=True, help="has the pipes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    side = SIDES[args.side]
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device(args.device)
    clock = Clock(args.folder, device, keeps_settings=side.keeps_settings)
    scratch = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        side.train(GpuTask(workload(args.workload, tiny=args.tiny), device, clock, scratch))
    except BaseException:
        traceback.print_exc()
        clock.say({"failed": traceback.format_exc()[-2000:]})
        os._exit(1)


if __name__ == "__main__":
    main()
