# %% while_there_is_a_next_one: SAME
def main():
    run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
    steps, weight = run.steps(data, batch_size=16, epochs=4), 1.0
    while (step := next(steps, None)) is not None:
        with step:
            for batch in step.shards:
                step.backward(weight * loss(m, batch))
        weight = 0.5 * weight + step.loss
    return run


run = main()

# %% folded_by_reduce: TOLD starts.over
import functools

run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)


def train(weight, step):
    with step:
        for batch in step.shards:
            step.backward(weight * loss(m, batch))
    return 0.5 * weight + step.loss


result = functools.reduce(train, run.steps(data, batch_size=16, epochs=4), 1.0)

# %% one_function_calls_itself: TOLD starts.over
run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)


def go(steps, weight):
    step = next(steps, None)
    if step is None:
        return weight
    with step:
        for batch in step.shards:
            step.backward(weight * loss(m, batch))
    return go(steps, 0.5 * weight + step.loss)


result = go(run.steps(data, batch_size=16, epochs=4), 1.0)

# %% a_list_comprehension_over_steps: TOLD starts.over
run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)


def train(step, weight):
    with step:
        for batch in step.shards:
            step.backward(weight * loss(m, batch))
    return step.loss


weight = 1.0
losses = [
    weight := 0.5 * weight + train(step, weight)
    for step in run.steps(data, batch_size=16, epochs=4)
]
result = round(sum(losses), 12)

# %% enumerate_and_zip: TOLD|WORKERS|MIXED starts.over
import itertools

run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
steps = run.steps(data, batch_size=16, epochs=4)
for (i, step), weight in zip(enumerate(steps), itertools.cycle([1.0, 0.5, 2.0, 1.5, 0.1])):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch) * weight * (1 + 0.1 * i))

# %% losses_of_shards_for_the_next_step: TOLD|WORKERS worker.computed
run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
last = []
for step in run.steps(data, batch_size=16, epochs=4):
    weight = 1 + sum(last)
    last = []
    with step:
        for batch in step.shards:
            found = loss(m, batch)
            last.append(found.item())
            step.backward(found * weight)

# %% a_second_model_by_hand: SAME
run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
critic = nn.Linear(2, 1)
updates = Adam(critic.parameters(), 0.05)
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for x, y in step.shards:
            out = m(x)
            step.backward(F.cross_entropy(out, y) + 0.1 * critic(out).mean())
    updates.zero_grad()
    (critic(m(X).detach())[:, 0] - Y).square().mean().backward()
    updates.step()

# %% a_generator_of_each_step: REFUSED
run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
for step in run.steps(data, batch_size=16, epochs=4):
    draw = torch.Generator().manual_seed(step.number)
    with step:
        for x, y in step.shards:
            step.backward(loss(m, (x + torch.randn(x.shape, generator=draw), y)))
