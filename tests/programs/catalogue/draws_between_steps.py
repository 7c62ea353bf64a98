# promises: one-result.9

# %% features_left_out_for_a_step: SAME
class Masked(nn.Sequential):
    mask = torch.ones(8)

    def forward(self, x):
        return super().forward(x * self.mask)


m = Masked(*net())


class Drops(Callback):
    def on_step_begin(self, fit):
        m.mask = torch.ones(8)
        m.mask[torch.randperm(8)[:3]] = 0


t = trainer(m, callbacks=[Drops()])
fit(t)

# %% dropout_by_numpy: SAME
import numpy as np

m = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Linear(8, 2))


class Varies(Callback):
    def on_step_begin(self, fit):
        m[1].p = float(np.random.uniform(0, 0.5))


t = trainer(m, callbacks=[Varies()])
fit(t)

# %% depth_drawn_in_a_loop: SAME
import random

layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
m = nn.ModuleDict({"layers": layers, "head": nn.Linear(8, 2)})
run = unisono.Run(m, SGD(m.parameters(), 0.1), shards=6, directory=DIR)
for step in run.steps(data, batch_size=16, epochs=4):
    kept = random.sample(range(4), 2)
    with step:
        for x, y in step.shards:
            for at in kept:
                x = x + layers[at](x).relu()
            step.backward(
                F.cross_entropy(m["head"](x), y) + 0 * sum(p.sum() for p in m.parameters())
            )


# %% projection_drawn_when_a_fit_begins: SAME
class Projects(Callback):
    def on_begin(self, fit):
        if not hasattr(self, "matrix"):
            self.matrix = torch.randn(2, 2)

    def on_step_end(self, fit, step):
        with torch.no_grad():
            fit.model[2].bias.copy_(self.matrix @ fit.model[2].bias).clamp_(-1, 1)


t = trainer(net(), callbacks=[Projects()])
fit(t)

# %% temperature_drawn_for_an_epoch: SAME
import random

m = net()
m.temperature = 1.0


def soft(m, b):
    return F.cross_entropy(m(b[0]) / m.temperature, b[1])


class Heats(Callback):
    def on_step_begin(self, fit):
        if fit.step % 6 == 0:
            m.temperature = random.lognormvariate(0, 0.5)


t = trainer(m, soft, callbacks=[Heats()])
fit(t)

# %% weights_shaken_between_two_loops: SAME
run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
for steps in (6, 18, 24):
    with torch.no_grad():
        for p in m.parameters():
            p.add_(torch.randn_like(p), alpha=0.05)
    for step in run.steps(data, batch_size=16, steps=steps):
        with step:
            for batch in step.shards:
                step.backward(loss(m, batch))

# %% a_schedule_that_draws: SAME
import random

random.seed(0)
m = net()
optimizer = SGD(m.parameters(), 0.1)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: random.uniform(0.5, 1.5))
t = trainer(m, optimizer=optimizer, schedule=unisono.Schedule(schedule, every="step"))
fit(t)
