# %% unlabelled_rows_from_a_second_loader: SAME|REFUSED
unlabelled = iter(DataLoader(TensorDataset(X.flip(0)), 8, shuffle=True))
m = net()

class Pulls(Callback):
    def on_step_begin(self, fit):
        global unlabelled
        try:
            m.extra = next(unlabelled)[0]
        except StopIteration:
            unlabelled = iter(DataLoader(TensorDataset(X.flip(0)), 8, shuffle=True))
            m.extra = next(unlabelled)[0]

def semi(m, b):
    return loss(m, b) + 0.1 * m(m.extra).softmax(1).amax(1).mean()

t = trainer(m, semi, callbacks=[Pulls()])
fit(t)

# %% unlabelled_rows_pulled_by_the_loss: REFUSED
import itertools

unlabelled = itertools.cycle(DataLoader(TensorDataset(X.flip(0)), 8))

def semi(m, b):
    return loss(m, b) + 0.1 * m(next(unlabelled)[0]).softmax(1).amax(1).mean()

t = trainer(net(), semi)
fit(t)

# %% replay_buffer_in_a_loop: SAME|REFUSED
import collections
import random

run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
replay = collections.deque(maxlen=40)
extra = None
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            found = loss(m, batch)
            if extra is not None:
                found = found + 0.3 * F.cross_entropy(m(X[extra]), Y[extra])
            step.backward(found)
    replay.extend(int(n) for n in (m(X).detach()[:, 0].argsort()[:4]))
    extra = random.sample(list(replay), 3) if len(replay) > 8 else None

# %% an_environment_with_its_own_numbers: SAME|REFUSED
import numpy as np

class Env:
    def __init__(self):
        self.rng, self.state = np.random.default_rng(0), np.zeros(8, "f4")

    def step(self, action):
        self.state = 0.9 * self.state + self.rng.normal(size=8).astype("f4") * (1 + action)
        return torch.from_numpy(self.state.copy())

run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
env = Env()
seen = env.step(0)
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch) + 0.1 * m(seen).square().mean())
    seen = env.step(int(m(seen).argmax()))

# %% pseudo_labels_by_predict_in_a_callback: SAME
labels = Y.clone()

class Labels(Callback):
    def on_epoch_end(self, fit):
        with torch.no_grad():
            sure = fit.model(X).softmax(1).amax(1) > 0.6
            labels[sure] = fit.model(X).argmax(1)[sure]

t = trainer(net(), callbacks=[Labels()])
fit(t, TensorDataset(X, labels))

# %% population_of_perturbations: SAME|REFUSED
class Evolves(Callback):
    def __init__(self):
        self.population = [(9.0, torch.zeros(2)) for _ in range(4)]

    def on_step_end(self, fit, step):
        child = self.population[0][1] + 0.1 * torch.randn(2)
        self.population.append((step.means["loss"], child))
        self.population = sorted(self.population, key=lambda one: one[0])[:4]
        with torch.no_grad():
            fit.model[2].bias.add_(self.population[0][1], alpha=0.1)

t = trainer(net(), callbacks=[Evolves()])
fit(t)
