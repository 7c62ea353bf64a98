"""Mistakes as people make them: each a small change of a correct program, and the check it trips.

Most programs are functions or bare scripts, ``averaged_by_hand.py`` is a class, ``with_fabric.py``
and ``with_accelerate.py`` use libraries.
"""
# Lines of programs stay whole.
# ruff: noqa: E501

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs" / "correct"


@dataclass(frozen=True)
class Mistake:
    """A change of a program.

    Attributes:
        check: the first thing that `unisono verify` must name.
        program: what is changed.
        changes: texts and what takes their places.
        name: tells mistakes of one kind apart.
    """

    check: str
    program: str
    changes: tuple[tuple[str, str], ...]
    name: str = ""

    def __str__(self) -> str:
        return f"{self.check}-{self.program}{self.name and '-' + self.name}"

    def source(self) -> str:
        """Return the program with its mistake."""
        text = (PROGRAMS / f"{self.program}.py").read_text()
        for old, new in self.changes:
            assert text.count(old) == 1, (old, text.count(old))
            text = text.replace(old, new)
        return text


MISTAKES = [
    Mistake(
        "samples-same-on-all-ranks",
        "ddp",
        (("batch_size=8, sampler=sampler)", "batch_size=8, shuffle=True)"),),
        "no-sampler",
    ),
    Mistake(
        "samples-same-on-all-ranks",
        "averaged_by_hand",
        (
            ("args.batch_size // self.world_size, sampler=self.sampler", "args.batch_size, True"),
            ("self.model = Net()", "self.model = Net()\n        torch.manual_seed(self.rank)"),
        ),
        "each-its-own-shuffle",
    ),
    Mistake(
        "samples-same-on-all-ranks",
        "with_fabric",
        (
            (
                "fabric.setup_dataloaders(train_loader, test_loader)",
                "fabric.setup_dataloaders(\n"
                "        train_loader, test_loader, use_distributed_sampler=False\n    )",
            ),
            ("    fabric.seed_everything(3 + fabric.global_rank)\n", ""),
            ("nn.Dropout(0.1)", "nn.Dropout(0.0)"),
        ),
    ),
    Mistake("epoch-order-fixed", "ddp", (("        sampler.set_epoch(epoch)\n", ""),)),
    Mistake(
        "epoch-order-fixed", "averaged_by_hand", (("        self.sampler.set_epoch(epoch)\n", ""),)
    ),
    Mistake(
        "samples-lost",
        "sharded_by_hand",
        (
            (
                "    mine = TensorDataset(train_x[rank::world_size], train_y[rank::world_size])\n",
                "    size = len(train_x) // world_size\n"
                "    part = slice(rank * size, (rank + 1) * size)\n"
                "    mine = TensorDataset(train_x[part], train_y[part])\n",
            ),
        ),
    ),
    Mistake(
        "samples-lost",
        "ddp",
        (
            (
                "    sampler = DistributedSampler(train_set)\n",
                "    per_rank = len(train_set) // dist.get_world_size()\n"
                "    begin = dist.get_rank() * per_rank\n"
                "    train_set = Subset(train_set, range(begin, begin + per_rank))\n",
            ),
            ("batch_size=8, sampler=sampler)", "batch_size=8, shuffle=True)"),
            ("        sampler.set_epoch(epoch)\n", ""),
            ("Subset(data, range(100)), ", "Subset(data, range(99)), "),
        ),
        "subset",
    ),
    Mistake(
        "evaluation-counts-twice",
        "ddp",
        (("range(100, 120)", "range(100, 119)"), ("Points(120)", "Points(119)")),
    ),
    Mistake(
        "evaluation-counts-twice",
        "with_fabric",
        (("randn(110, 8", "randn(109, 8"),),
    ),
    Mistake("evaluation-partial", "ddp", (("    dist.all_reduce(sums)\n", ""),)),
    Mistake(
        "evaluation-partial",
        "with_accelerate",
        (
            (
                "            predictions, references = accelerator.gather_for_metrics((predictions, y))\n"
                "            right.append((predictions == references).float())\n",
                "            right.append((predictions == y).float())\n",
            ),
        ),
    ),
    Mistake(
        "split-differs",
        "averaged_by_hand",
        (
            ("torch.manual_seed(args.seed)", "torch.manual_seed(args.seed + self.rank)"),
            (
                "        x = torch.randn(130, 12)\n",
                "        x = torch.randn(130, 12, generator=torch.Generator().manual_seed(0))\n",
            ),
            (
                "        self.model = Net()\n",
                "        self.model = Net()\n"
                "        for parameter in self.model.parameters():\n"
                "            dist.broadcast(parameter.data, 0)\n",
            ),
        ),
    ),
    Mistake(
        "split-differs",
        "ddp",
        (
            ("import os\n", "import os\nimport random\n"),
            (
                "    train_set, test_set = Subset(data, range(100)), Subset(data, range(100, 120))\n",
                "    order = list(range(120))\n"
                "    random.shuffle(order)\n"
                "    train_set, test_set = Subset(data, order[:100]), Subset(data, order[100:])\n",
            ),
        ),
        "random-shuffle",
    ),
    Mistake(
        "mean-of-means",
        "sharded_by_hand",
        (
            (
                "parameter.grad.mul_(num_samples / total)\n",
                "parameter.grad /= dist.get_world_size()\n",
            ),
        ),
    ),
    Mistake(
        "mean-of-means",
        "averaged_by_hand",
        (
            ("right = torch.zeros(1)", "losses = []"),
            (
                "            right += self.model(x[None]).argmax(1) == y\n",
                "            losses.append(F.cross_entropy(self.model(x[None]), y[None]))\n",
            ),
            (
                "        dist.all_reduce(right)\n"
                "        return right.item() / len(self.test_set)\n",
                "        loss = torch.stack(losses).mean()\n"
                "        dist.all_reduce(loss)\n"
                "        return loss.item() / self.world_size\n",
            ),
            ("random_split(data, [100, 30])", "random_split(data, [100, 29, 1])[:2]"),
        ),
        "of-an-evaluation",
    ),
    Mistake(
        "mean-of-means",
        "ddp",
        (
            ("range(100, 120)", "range(100, 119)"),
            (
                "test_sampler = DistributedSampler(test_set, shuffle=False)",
                "test_sampler = range(dist.get_rank(), 19, dist.get_world_size())",
            ),
            (
                "    dist.all_reduce(sums)\n",
                "    accuracy = sums[0] / sums[1]\n    dist.all_reduce(accuracy)\n",
            ),
            (
                "return (sums[0] / sums[1]).item()",
                "return accuracy.item() / dist.get_world_size()",
            ),
        ),
        "of-an-evaluation",
    ),
    Mistake(
        "mean-of-means",
        "averaged_by_hand",
        (
            (
                "        self.sampler = DistributedSampler(self.train_set, self.world_size, self.rank)\n",
                "        first = 0 if self.rank == 0 else 60\n"
                "        last = 100 if self.rank == self.world_size - 1 else 60\n"
                "        self.train_set = torch.utils.data.Subset(self.train_set, range(first, last))\n"
                "        size = (last - first) * args.batch_size // 100\n",
            ),
            (
                "args.batch_size // self.world_size, sampler=self.sampler",
                "size",
            ),
            ("        self.sampler.set_epoch(epoch)\n", ""),
        ),
        "larger-part",
    ),
    Mistake(
        "weights-of-tokens",
        "tokens",
        (
            (
                '                logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum"\n',
                "                logits.flatten(0, 1), targets.flatten(), ignore_index=PAD\n",
            ),
            ("loss = total * world_size / num_tokens", "loss = total"),
        ),
    ),
    Mistake(
        "weights-of-tokens",
        "tokens",
        (
            (
                "            total = F.cross_entropy(\n"
                '                logits.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum"\n'
                "            )\n"
                "            loss = total * world_size / num_tokens\n",
                "            mask = targets != PAD\n"
                "            scores = logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])\n"
                "            loss = -(scores.squeeze(-1) * mask).sum() / mask.sum()\n",
            ),
        ),
        "masked-by-hand",
    ),
    Mistake(
        "gradient-times-n",
        "averaged_by_hand",
        (("            parameter.grad /= self.world_size\n", ""),),
    ),
    Mistake(
        "gradient-times-n",
        "sliced_global_batch",
        ((".sum() / len(inputs)", ".mean()"),),
    ),
    Mistake(
        "gradient-over-n",
        "ddp",
        (
            (
                "loss_fn(model(x), y).backward()",
                "(loss_fn(model(x), y) / dist.get_world_size()).backward()",
            ),
        ),
    ),
    Mistake(
        "gradient-over-n",
        "with_fabric",
        (("F.cross_entropy(model(x), y) / 2", "F.cross_entropy(model(x), y) / 2 / world_size"),),
    ),
    Mistake(
        "gradients-not-averaged",
        "averaged_by_hand",
        (("            self.average_gradients()\n", ""),),
    ),
    Mistake(
        "gradients-not-averaged",
        "ddp",
        (("loss_fn(model(x), y).backward()", "loss_fn(model.module(x), y).backward()"),),
        "around-ddp",
    ),
    Mistake(
        "parameter-not-averaged",
        "averaged_by_hand",
        (
            (
                "for parameter in self.model.parameters():\n            dist",
                "for parameter in self.model.body.parameters():\n            dist",
            ),
        ),
    ),
    Mistake(
        "parameter-not-averaged",
        "ddp",
        (
            (
                "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)\n",
                "    bias = nn.Parameter(torch.zeros(3))\n"
                "    parameters = [*model.parameters(), bias]\n"
                "    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)\n",
            ),
            ("loss_fn(model(x), y).backward()", "loss_fn(model(x) + bias, y).backward()"),
        ),
        "outside-of-ddp",
    ),
    Mistake(
        "accumulation-not-synced",
        "accumulation",
        (
            (
                "is_last = (number + 1) % ACCUMULATE == 0\n            with contextlib.nullcontext() if is_last else model.no_sync():",
                "is_last = (number + 1) % ACCUMULATE == 0\n            with model.no_sync():",
            ),
        ),
    ),
    Mistake(
        "accumulation-not-synced",
        "with_fabric",
        (("enabled=is_accumulating)", "enabled=True)"),),
    ),
    Mistake(
        "clip-before-average",
        "averaged_by_hand",
        (
            (
                "            self.average_gradients()\n"
                "            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)\n",
                "            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)\n"
                "            self.average_gradients()\n",
            ),
        ),
    ),
    Mistake(
        "schedule-too-fast",
        "ddp",
        (
            (
                "T_max=3 * len(train_loader))",
                "T_max=3 * len(train_loader) // dist.get_world_size())",
            ),
        ),
        "divided-twice",
    ),
    Mistake(
        "schedule-too-fast",
        "averaged_by_hand",
        (
            (
                "            self.schedule.step()\n",
                "            for _ in range(self.world_size):\n"
                "                self.schedule.step()\n",
            ),
        ),
    ),
    Mistake(
        "schedule-too-fast",
        "with_accelerate",
        (
            ("    num_steps = EPOCHS * len(train_loader)\n", ""),
            (
                "    schedule = torch.optim.lr_scheduler.LinearLR("
                "optimizer, 1.0, 0.0, total_iters=num_steps)\n",
                "",
            ),
            ("train_loader, eval_loader, schedule = ", "train_loader, eval_loader = "),
            (
                "train_loader, eval_loader, schedule\n    )\n",
                "train_loader, eval_loader\n    )\n"
                "    num_steps = EPOCHS * len(train_loader)\n"
                "    schedule = accelerator.prepare(\n"
                "        torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=num_steps)\n"
                "    )\n",
            ),
        ),
        "prepared-length",
    ),
    Mistake(
        "learning-rate-scaled",
        "ddp",
        (("lr=0.1, momentum", "lr=0.1 * dist.get_world_size(), momentum"),),
    ),
    Mistake(
        "learning-rate-scaled",
        "with_accelerate",
        (('lr=config["lr"])', 'lr=config["lr"] * accelerator.num_processes)'),),
    ),
    Mistake(
        "parameters-differ",
        "averaged_by_hand",
        (
            (
                "        self.model = Net()\n",
                "        torch.manual_seed(args.seed + self.rank)\n        self.model = Net()\n",
            ),
        ),
        "seed-by-rank",
    ),
    Mistake(
        "buffers-differ",
        "averaged_by_hand",
        (("nn.Linear(12, 24), nn.Tanh()", "nn.Linear(12, 24), nn.BatchNorm1d(24), nn.Tanh()"),),
    ),
    Mistake(
        "buffers-differ",
        "batch_norm",
        (("model = DDP(net)", "model = DDP(net, broadcast_buffers=False)"),),
    ),
    Mistake(
        "randomness-same-on-all-ranks",
        "tokens",
        (("    torch.manual_seed(1000 + rank)\n", ""),),
    ),
    Mistake(
        "randomness-same-on-all-ranks",
        "with_fabric",
        (("    fabric.seed_everything(3 + fabric.global_rank)\n", ""),),
    ),
    Mistake(
        "loader-randomness-same",
        "batch_norm",
        (("np.random.seed(torch.initial_seed() % 2**32)", "np.random.seed(number)"),),
    ),
    Mistake(
        "loader-randomness-same",
        "batch_norm",
        (
            ("    torch.manual_seed(1 + dist.get_rank())\n", ""),
            ("num_workers=1, worker_init_fn=seed_worker, persistent_workers=True", "num_workers=0"),
            ("np.random.rand() < 0.5", "torch.rand(()) < 0.5"),
        ),
        "one-seed",
    ),
]
