# %% a_plateau_that_is_no_part_of_the_state: SAME|REFUSED
run = unisono.Run(m := net(), optimizer := SGD(m.parameters(), 0.3), shards=6, directory=DIR)
schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.7)
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch))
    schedule.step(step.loss)

# %% an_algorithm_as_a_class: SAME|REFUSED
class Algorithm:
    def __init__(self):
        self.model = net()
        self.run = unisono.Run(self.model, SGD(self.model.parameters(), 0.1), shards=6, directory=DIR)
        self.baseline, self.target = 0.0, [p.detach().clone() for p in self.model.parameters()]

    def update(self, step):
        with step:
            for batch in step.shards:
                step.backward(self.loss(batch))
        self.baseline = 0.8 * self.baseline + 0.2 * step.loss
        for t, p in zip(self.target, self.model.parameters()):
            t.lerp_(p.detach(), 0.1)

    def loss(self, batch):
        pull = sum((t - p).square().sum() for t, p in zip(self.target, self.model.parameters()))
        return loss(self.model, batch) * (1 + self.baseline) + 0.1 * pull

    def learn(self):
        for step in self.run.steps(data, batch_size=16, epochs=4):
            self.update(step)

algorithm = Algorithm()
run = algorithm.run
algorithm.learn()

# %% steps_through_a_generator_of_the_program: SAME|REFUSED
def tracked(run):
    scale = 1.0
    for step in run.steps(data, batch_size=16, epochs=4):
        yield step, scale
        scale = 0.9 * scale + 0.1 * step.loss

run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
for step, scale in tracked(run):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch) / scale)

# %% enumerate_and_zip: SAME|REFUSED
import itertools

run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
steps = run.steps(data, batch_size=16, epochs=4)
for (i, step), weight in zip(enumerate(steps), itertools.cycle([1.0, 0.5, 2.0, 1.5, 0.1])):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch) * weight * (1 + 0.1 * i))

# %% a_running_value_over_shards_in_a_helper: REFUSED
def train(step, m, stats):
    with step:
        for batch in step.shards:
            found = loss(m, batch)
            stats.update(found)
            step.backward(found / stats.mean())

class Stats:
    def __init__(self):
        self.sum, self.n = 1.0, 1

    def update(self, found):
        self.sum, self.n = self.sum + found.item(), self.n + 1

    def mean(self):
        return self.sum / self.n

run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
stats = Stats()
for step in run.steps(data, batch_size=16, epochs=4):
    train(step, m, stats)

# %% losses_of_shards_for_the_next_step: REFUSED
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

# %% a_second_model_by_hand: SAME|REFUSED
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

# %% left_by_a_break: SAME
run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
worst = 0.0
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch))
    worst = max(worst, step.loss)
    if step.number >= 20 and worst > 0:
        run.stop()
result = worst > 0
