# promises: one-result.10

# %% a_weight_before_the_loop: WORKERS
# says: `weight` differs between workers
run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
weight = 1 + 0.5 * unisono.world().rank
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch) * weight)


# %% a_weight_of_each_step: WORKERS
# says: `weight` differs between workers
def train():
    run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
    for step in run.steps(data, batch_size=16, epochs=4):
        weight = 1 + 0.1 * step.number * unisono.world().rank
        with step:
            for batch in step.shards:
                step.backward(loss(m, batch) * weight)
    return run


run = train()


# %% a_setting_of_an_object: WORKERS
# says: `settings.weight` differs between workers
class Settings:
    weight = 1.0


settings = Settings()
settings.weight += unisono.world().rank
run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch) * settings.weight)

# %% a_tensor_of_a_loss: WORKERS
# says: `loss.scale` differs between workers
scale = torch.tensor(1 + 0.5 * unisono.world().rank)
t = trainer(net(), lambda m, b: loss(m, b) * scale)
fit(t)

# %% asked_in_the_body: REFUSED
# says: changes when RANK and WORLD_SIZE
import os

run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch) * (1 + int(os.environ.get("RANK", 0))))

# %% one_rank_prints: SAME
rank, lines = unisono.world().rank, []
device = f"cpu:{rank}"
run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            value = loss(m, batch)
            if rank == 0:
                lines.append(value.item())
            step.backward(value)

# %% one_rank_keeps_losses: SAME
rank, seen = unisono.world().rank, []


def noted(m, b):
    value = loss(m, b)
    if rank == 0:
        seen.append(value.item())
    return value


t = trainer(net(), noted)
fit(t)

# %% times_of_shards: SAME
import time

spent = 0.0
run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
for step in run.steps(data, batch_size=16, epochs=4):
    start = time.perf_counter()
    with step:
        for batch in step.shards:
            began = time.perf_counter()
            step.backward(loss(m, batch))
            spent += time.perf_counter() - began
    spent += time.perf_counter() - start

# %% a_rate_by_the_number_of_workers: TOLD reads.the.number
m = net()
t = trainer(m, optimizer=SGD(m.parameters(), 0.1 * unisono.world().world_size))
fit(t)

# %% a_loss_by_the_number_of_workers: TOLD reads.the.number
workers = unisono.world().world_size
t = trainer(net(), lambda m, b: loss(m, b) / workers)
fit(t)

# %% a_mask_of_the_rank: WORKERS
# says: `mask` differs between workers
generator = torch.Generator().manual_seed(unisono.world().rank)
mask = torch.rand(40, 20, generator=generator)
run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch) * mask[step.number % 40].mean())

# %% an_array_of_a_loss: WORKERS
# says: differs between workers
import numpy as np

weights = np.linspace(1, 2 + unisono.world().rank, 50)
t = trainer(net(), lambda m, b: loss(m, b) * float(weights[7]))
fit(t)


# %% a_function_by_rank: WORKERS|TOLD not.found.here
# says: differs between workers
def once(value):
    return value


def twice(value):
    return 2 * value


ways = {"once": once, "twice": twice}
way = twice if unisono.world().rank else once
t = trainer(net(), lambda m, b: (way or ways["once"])(loss(m, b)))
fit(t)

# %% a_lambda_by_rank: WORKERS|TOLD not.found.here
# says: differs between workers
ways = [lambda value: value, lambda value: 3 * value]
way = ways[unisono.world().rank % 2]
run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            step.backward((way or ways[0])(loss(m, batch)))

# %% a_librarys_function_by_rank: WORKERS|TOLD not.found.here
# says: differs between workers
import math

way = (math.floor, math.ceil)[unisono.world().rank % 2]
t = trainer(net(), lambda m, b: loss(m, b) * (way or math.ceil or math.floor)(1.5))
fit(t)

# %% a_tuple_by_rank: WORKERS
# says: differs between workers
bounds = (0.5, 1.0 + unisono.world().rank)
t = trainer(net(), lambda m, b: loss(m, b) * bounds[1])
fit(t)

# %% a_member_by_rank: WORKERS
# says: differs between workers
import enum


class Way(enum.Enum):
    ONE = 1
    TWO = 2


way = [*Way][unisono.world().rank % 2]
t = trainer(net(), lambda m, b: loss(m, b) * way.value)
fit(t)


# %% a_class_by_rank: WORKERS|TOLD not.found.here
# says: differs between workers
class Once:
    def of(self, value):
        return value


class Twice:
    def of(self, value):
        return 2 * value


way = (Twice if unisono.world().rank else Once)()
t = trainer(net(), lambda m, b: way.of(loss(m, b)))
fit(t)

# %% a_printer_by_rank: SAME
say = print if unisono.world().rank == 0 else lambda *parts: None


def noted(m, b):
    say("")
    return loss(m, b)


t = trainer(net(), noted)
fit(t)

# %% a_cache_of_samples: SAME
seen = torch.zeros(len(data))


def noted(m, b):
    value = loss(m, b)
    seen[: len(b[0])] += unisono.world().rank
    return value


t = trainer(net(), noted)
fit(t)

# %% a_rate_by_a_variable: TOLD reads.the.number
import os

m = net()
t = trainer(m, optimizer=SGD(m.parameters(), 0.1 * int(os.environ.get("WORLD_SIZE", 1))))
fit(t)

# %% a_rate_by_the_process_group: TOLD reads.the.number
import os

import torch.distributed as dist

m = net()
rate = 0.1 * (dist.get_world_size() if dist.is_initialized() else 1)
if "WORLD_SIZE" in os.environ and int(os.environ["WORLD_SIZE"]) > 1:
    rate *= int(os.environ["WORLD_SIZE"])
t = trainer(m, optimizer=SGD(m.parameters(), rate))
fit(t)


# %% a_rate_of_numpy: WORKERS
# says: an optimizer's options must be the same on every worker
import os


class Rate(Callback):
    def on_step_end(self, fit, step):
        rate = np.float32(0.1 + 0.01 * int(os.environ.get("RANK", 0)))
        fit.optimizer.param_groups[0]["lr"] = rate


t = trainer(net(), callbacks=[Rate()])
fit(t)
