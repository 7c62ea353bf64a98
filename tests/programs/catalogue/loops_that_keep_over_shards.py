# promises: one-result.8

# %% in_an_element_of_a_list: REFUSED
run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
scale = [1.0]
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            found = loss(m, batch)
            scale[0] = 0.9 * scale[0] + 0.1 * found.item()
            step.backward(found / scale[0])

# %% in_an_array: REFUSED
import numpy as np


def main():
    run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    means = np.ones(2)
    for step in run.steps(data, batch_size=16, epochs=4):
        with step:
            for x, y in step.shards:
                each = F.cross_entropy(m(x), y, reduction="none")
                for label in (0, 1):
                    if (y == label).any():
                        means[label] = 0.5 * means[label] + 0.5 * each[y == label].mean().item()
                step.backward((each / torch.from_numpy(means)[y]).mean())
    return run


run = main()

# %% by_a_method_of_a_dataclass: REFUSED
import dataclasses


@dataclasses.dataclass
class Baseline:
    value: float = 0.0

    def advantage(self, reward):
        self.value += 0.2 * (reward.mean().item() - self.value)
        return reward - self.value


run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
baseline = Baseline()
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for x, y in step.shards:
            chosen = m(x).log_softmax(1)
            reward = (chosen.argmax(1) == y).float()
            step.backward(-(chosen.amax(1) * baseline.advantage(reward)).mean())

# %% by_a_function_that_has_a_global: REFUSED
total = 1.0


def normalised(found):
    global total
    total += found.item()
    return found / total


run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            step.backward(normalised(loss(m, batch)))

# %% beside_a_counter_in_a_zip: REFUSED
import itertools

run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch, weight in zip(step.shards, itertools.count(1)):
            step.backward(loss(m, batch) * weight)

# %% a_hidden_state_from_shard_to_shard: REFUSED
cell = nn.GRUCell(8, 4)
head = nn.Linear(4, 2)
m = nn.ModuleList([cell, head])


class Memory:
    hidden = torch.zeros(4)


run = unisono.Run(m, Adam(m.parameters(), 0.01), shards=6, directory=DIR)
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for x, y in step.shards:
            hidden = cell(x, Memory.hidden.expand(len(x), 4))
            Memory.hidden = hidden.detach().mean(0)
            step.backward(F.cross_entropy(head(hidden), y))

# %% sums_for_a_printed_line: SAME
run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
totals = {"loss": 0.0, "samples": 0}
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for at, batch in enumerate(step.shards):
            found = loss(m, batch)
            totals["loss"] += found.item()
            totals["samples"] += len(batch[0])
            step.backward(found)
    if step.number % 6 == 5:
        print(totals["loss"] / totals["samples"])
        totals = {"loss": 0.0, "samples": 0}
