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
