"""Mistakes as people make them: a small change of a correct program, and the check it trips."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs" / "correct"
CHANGE = re.compile(r"((?:^-.*\n)+)((?:^\+.*\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class Mistake:
    """A change of a program."""

    check: str  # the first thing that `unisono verify` must name
    program: str
    changes: tuple[tuple[str, str], ...]  # texts and what takes their places
    name: str = ""  # tells mistakes of one kind apart

    def __str__(self) -> str:
        return f"{self.check}-{self.program}{self.name and '-' + self.name}"

    def source(self) -> str:
        text = (PROGRAMS / f"{self.program}.py").read_text()
        for old, new in self.changes:
            assert text.count(old) == 1, (old, text.count(old))
            text = text.replace(old, new)
        return text


def read(table: str) -> Iterator[Mistake]:
    """Read a line with check, program and name, and texts after `-` with what comes after `+`."""
    for block in table.strip().split("\n\n"):
        head, _, lines = block.partition("\n")
        check, program, *name = head.split()
        changes = tuple(tuple(map(text_of, found)) for found in CHANGE.findall(f"{lines}\n"))
        yield Mistake(check, program, changes, *name)  # type: ignore[arg-type]


def text_of(lines: str) -> str:
    return "\n".join(line[2:] for line in lines.splitlines())


TABLE = """
samples-same-on-all-ranks ddp no-sampler
- batch_size=8, sampler=sampler)
+ batch_size=8, shuffle=True)

samples-same-on-all-ranks averaged_by_hand each-its-own-shuffle
- args.batch_size // self.world_size, sampler=self.sampler
+ args.batch_size, True
- self.model = Net()
+ self.model = Net()
+         torch.manual_seed(self.rank)

epoch-order-fixed ddp
-         sampler.set_epoch(epoch)
+

samples-lost sharded_by_hand
-     mine = TensorDataset(train_x[rank::world_size], train_y[rank::world_size])
+     size = len(train_x) // world_size
+     part = slice(rank * size, (rank + 1) * size)
+     mine = TensorDataset(train_x[part], train_y[part])

samples-lost ddp steps-of-all-ranks
-         for x, y in train_loader:
+         num_steps = len(train_set) // (8 * dist.get_world_size())
+         for _, (x, y) in zip(range(num_steps), train_loader):

samples-lost ddp epochs-by-rank
-     for epoch in range(3):
+     for epoch in range(4 // dist.get_world_size()):

samples-lost sharded_by_hand without-a-loader
-     mine = TensorDataset(train_x[rank::world_size], train_y[rank::world_size])
+     size = len(train_x) // world_size
+     part = slice(rank * size, (rank + 1) * size)
+     batches = train_x[part].split(16), train_y[part].split(16)
-     loader = DataLoader(mine, batch_size=32 // world_size)
+     loader = list(zip(*batches))

evaluation-counts-twice ddp gathered
-     dist.all_reduce(sums)
+     gathered = [torch.zeros(2) for _ in range(dist.get_world_size())]
+     dist.all_gather(gathered, sums)
+     sums = sum(gathered)
- range(100, 120)
+ range(100, 119)
- Points(120)
+ Points(119)

evaluation-counts-twice ddp gathered-objects
-     dist.all_reduce(sums)
+     gathered = [None] * dist.get_world_size()
+     dist.all_gather_object(gathered, {"right": sums[0].item(), "of": int(sums[1])})
+     sums = [torch.tensor(float(sum(one[name] for one in gathered))) for name in ("right", "of")]
- range(100, 120)
+ range(100, 119)
- Points(120)
+ Points(119)

evaluation-partial ddp all-together
-     test_sampler = DistributedSampler(test_set, shuffle=False)
+     size = 19 // dist.get_world_size()
+     test_sampler = range(dist.get_rank() * size, (dist.get_rank() + 1) * size)

evaluation-partial ddp last-ones-dropped
- DistributedSampler(test_set, shuffle=False)
+ DistributedSampler(test_set, shuffle=False, drop_last=True)
- range(100, 120)
+ range(100, 119)
- Points(120)
+ Points(119)

evaluation-counts-twice ddp
- range(100, 120)
+ range(100, 119)
- Points(120)
+ Points(119)

evaluation-partial ddp
-     dist.all_reduce(sums)
+

evaluation-partial with_accelerate
-             predictions, references = accelerator.gather_for_metrics((predictions, y))
-             right.append((predictions == references).float())
+             right.append((predictions == y).float())

split-differs averaged_by_hand
- torch.manual_seed(args.seed)
+ torch.manual_seed(args.seed + self.rank)
-         x = torch.randn(130, 12)
+         x = torch.randn(130, 12, generator=torch.Generator().manual_seed(0))
-         self.model = Net()
+         self.model = Net()
+         for parameter in self.model.parameters():
+             dist.broadcast(parameter.data, 0)

split-differs ddp random-shuffle
- import os
+ import os
+ import random
-     train_set, test_set = Subset(data, range(100)), Subset(data, range(100, 120))
+     order = list(range(120))
+     random.shuffle(order)
+     train_set, test_set = Subset(data, order[:100]), Subset(data, order[100:])

mean-of-means sharded_by_hand
- parameter.grad.mul_(num_samples / total)
+ parameter.grad /= dist.get_world_size()

mean-of-means ddp of-an-evaluation
- range(100, 120)
+ range(100, 119)
- test_sampler = DistributedSampler(test_set, shuffle=False)
+ test_sampler = range(dist.get_rank(), 19, dist.get_world_size())
-     dist.all_reduce(sums)
+     accuracy = sums[0] / sums[1]
+     dist.all_reduce(accuracy)
- return (sums[0] / sums[1]).item()
+ return accuracy.item() / dist.get_world_size()

mean-of-means averaged_by_hand larger-part
-         self.sampler = DistributedSampler(self.train_set, self.world_size, self.rank)
+         first = 0 if self.rank == 0 else 60
+         last = 100 if self.rank == self.world_size - 1 else 60
+         self.train_set = torch.utils.data.Subset(self.train_set, range(first, last))
+         size = (last - first) * args.batch_size // 100
- args.batch_size // self.world_size, sampler=self.sampler
+ size
-         self.sampler.set_epoch(epoch)
+

weights-of-tokens tokens
-                 logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum"
+                 logits.flatten(0, 1), targets.flatten(), ignore_index=PAD
- loss = total * world_size / num_tokens
+ loss = total

gradient-times-n averaged_by_hand
-             parameter.grad /= self.world_size
+

gradient-times-n sliced_global_batch
- .sum() / len(inputs)
+ .mean()

gradient-over-n ddp
- loss_fn(model(x), y).backward()
+ (loss_fn(model(x), y) / dist.get_world_size()).backward()

gradients-not-averaged averaged_by_hand
-             self.average_gradients()
+

gradients-not-averaged ddp around-ddp
- loss_fn(model(x), y).backward()
+ loss_fn(model.module(x), y).backward()

parameter-not-averaged averaged_by_hand
- for parameter in self.model.parameters():
-             dist
+ for parameter in self.model.body.parameters():
+             dist

parameter-not-averaged ddp outside-of-ddp
-     optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
+     bias = nn.Parameter(torch.zeros(3))
+     parameters = [*model.parameters(), bias]
+     optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
- loss_fn(model(x), y).backward()
+ loss_fn(model(x) + bias, y).backward()

accumulation-not-synced accumulation
- is_last = (number + 1) % ACCUMULATE == 0
-             with contextlib.nullcontext() if is_last else model.no_sync():
+ is_last = (number + 1) % ACCUMULATE == 0
+             with model.no_sync():

accumulation-not-synced with_fabric
- enabled=is_accumulating)
+ enabled=True)

clip-before-average averaged_by_hand
-             self.average_gradients()
-             nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
+             nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
+             self.average_gradients()

schedule-too-fast ddp divided-twice
- T_max=3 * len(train_loader))
+ T_max=3 * len(train_loader) // dist.get_world_size())

schedule-too-fast averaged_by_hand
-             self.schedule.step()
+             for _ in range(self.world_size):
+                 self.schedule.step()

schedule-too-fast with_accelerate prepared-length
-     num_steps = EPOCHS * len(train_loader)
+
-     schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=num_steps)
+
- train_loader, eval_loader, schedule =
+ train_loader, eval_loader =
- train_loader, eval_loader, schedule
-     )
+ train_loader, eval_loader
+     )
+     num_steps = EPOCHS * len(train_loader)
+     schedule = accelerator.prepare(
+         torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=num_steps)
+     )

learning-rate-scaled ddp
- lr=0.1, momentum
+ lr=0.1 * dist.get_world_size(), momentum

learning-rate-scaled with_accelerate
- lr=config["lr"])
+ lr=config["lr"] * accelerator.num_processes)

parameters-differ averaged_by_hand seed-by-rank
-         self.model = Net()
+         torch.manual_seed(args.seed + self.rank)
+         self.model = Net()

buffers-differ averaged_by_hand
- nn.Linear(12, 24), nn.Tanh()
+ nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Tanh()

buffers-differ batch_norm
- model = DDP(net)
+ model = DDP(net, broadcast_buffers=False)

randomness-same-on-all-ranks tokens
-     torch.manual_seed(1000 + rank)
+
"""
MISTAKES = list(read(TABLE))
