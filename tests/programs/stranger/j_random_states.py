# %% a_state_that_is_saved_and_restored: SAME|REFUSED
class Same(Callback):
    state = None

    def on_step_end(self, fit, step):
        if step.number == 3:
            self.state = torch.get_rng_state()
        if self.state is not None:
            torch.set_rng_state(self.state)
            with torch.no_grad():
                fit.model[2].bias.add_(torch.randn(2), alpha=0.05)
            self.state = torch.get_rng_state() if step.number % 4 == 3 else self.state

t = trainer(net(), callbacks=[Same()])
fit(t)

# %% a_callback_that_seeds: SAME
import random

class Seeds(Callback):
    def on_step_begin(self, fit):
        torch.manual_seed(7)
        random.seed(7)

    def on_step_end(self, fit, step):
        with torch.no_grad():
            fit.model[2].bias.add_(torch.randn(2) * random.random(), alpha=0.05)

m = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Linear(8, 2))
t = trainer(m, callbacks=[Seeds()])
fit(t)

# %% a_python_state_kept_as_a_tuple: SAME
import random

class Walks(Callback):
    def __init__(self):
        self.state = random.Random(1).getstate()

    def on_step_begin(self, fit):
        own = random.Random()
        own.setstate(self.state)
        fit.optimizer.param_groups[0]["lr"] = own.uniform(0.01, 0.2)
        self.state = own.getstate()

t = trainer(net(), callbacks=[Walks()])
fit(t)

# %% a_generator_as_a_loops_variable: SAME|REFUSED
import numpy as np

run = unisono.Run(m := net(), optimizer := SGD(m.parameters(), 0.1), shards=6, directory=DIR)
rng = np.random.default_rng(4)
for step in run.steps(data, batch_size=16, epochs=4):
    optimizer.param_groups[0]["lr"] = float(rng.uniform(0.01, 0.2))
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch))

# %% a_sequence_of_sobol: SAME|REFUSED
class Quasi(Callback):
    def __init__(self):
        self.engine = torch.quasirandom.SobolEngine(1, scramble=True, seed=3)

    def on_step_begin(self, fit):
        fit.optimizer.param_groups[0]["lr"] = 0.01 + 0.2 * float(self.engine.draw(1))

t = trainer(net(), callbacks=[Quasi()])
fit(t)

# %% a_distribution_that_draws: SAME
m = net()
m.noise = torch.zeros(8)

class Draws(Callback):
    normal = torch.distributions.Normal(0.0, 0.3)

    def on_step_begin(self, fit):
        m.noise = self.normal.sample((8,))

t = trainer(m, lambda m, b: loss(m, (b[0] + m.noise, b[1])), callbacks=[Draws()])
fit(t)
