# promises: nothing-lost.1 conditions.1

# %% one_step_everywhere: SAME stop=10 kill=10 everywhere crashes
def main():
    m = net()
    run = unisono.Run(m, Adam(m.parameters(), 0.02), shards=6, directory=DIR, device=DEVICE)
    baseline, seen = 0.0, []
    for episode in range(20):
        gen = torch.Generator().manual_seed(episode)
        rows = torch.randint(0, 96, (12,), generator=gen)
        reward = (X[rows, 0] > 0).float() - baseline
        for step in run.steps(
            TensorDataset(X[rows], Y[rows], reward), batch_size=12, epochs=episode + 1
        ):
            with step:
                for x, y, r in step.shards:
                    step.backward((F.cross_entropy(m(x), y, reduction="none") * r).mean())
        baseline = 0.9 * baseline + 0.1 * step.loss
        seen.append(round(baseline, 9))
    return run, seen


run, result = main()


# %% one_fit_step_validated: SAME stop=10 kill=10 crashes
t = trainer(m := net(), shards=4)
history = []
for i in range(20):
    done = t.fit(Subset(data, range(i, i + 16)), batch_size=16, epochs=i + 1, validate=data)
    history.append((round(done.means["loss"], 9), round(done.validation["loss"], 9)))
result = history


# %% fewer_samples_fixed_batch: SAME stop=10 kill=10
def main():
    m = net()
    run = unisono.Run(m, Adam(m.parameters(), 0.02), shards=8, directory=DIR)
    seen = []
    for episode in range(20):
        gen = torch.Generator().manual_seed(episode)
        length = int(torch.randint(3, 14, (), generator=gen))
        rows = torch.randint(0, 96, (length,), generator=gen)
        for step in run.steps(TensorDataset(X[rows], Y[rows]), batch_size=16, epochs=episode + 1):
            with step:
                for x, y in step.shards:
                    step.backward(F.cross_entropy(m(x), y))
        seen.append(round(step.loss, 9))
    return run, seen


run, result = main()


# %% dqn_with_a_sampler: SAME stop=12 kill=12 crashes
import collections
from torch.utils.data import RandomSampler


class Replay(Dataset):
    def __init__(self, size):
        self.rows = collections.deque(maxlen=size)

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


def main():
    q, target = net(), net()
    target.load_state_dict(q.state_dict())
    run = unisono.Run(q, Adam(q.parameters(), 0.02), shards=4, directory=DIR)
    memory, epsilon, log = Replay(48), 1.0, []
    rng = random.Random(5)
    for episode in range(8):
        for t in range(16):
            row = rng.randrange(96)
            if rng.random() < epsilon:
                a = rng.randrange(2)
            else:
                with torch.no_grad():
                    a = q(X[row : row + 1]).argmax(1).item()
            memory.rows.append((X[row], a, float(a == Y[row])))
        epsilon = max(0.1, epsilon * 0.8)
        sampler = RandomSampler(memory, num_samples=16)
        for step in run.steps(memory, batch_size=8, sampler=sampler, epochs=episode + 1):
            with step:
                for x, a, r in step.shards:
                    with torch.no_grad():
                        goal = r.float() + 0.5 * target(x).max(1).values
                    now = q(x).gather(1, a[:, None])[:, 0]
                    step.backward(F.smooth_l1_loss(now, goal))
        if episode % 2:
            target.load_state_dict(q.state_dict())
        log.append((round(step.loss, 8), round(epsilon, 8)))
    return run, log


run, result = main()


# %% ppo_minibatches_and_kl_stop: SAME stop=14 kill=14 crashes
def rollout(m, i):
    gen = torch.Generator().manual_seed(100 + i)
    rows = torch.randint(0, 96, (32,), generator=gen)
    with torch.no_grad():
        logp = m(X[rows]).log_softmax(1)
    a = torch.multinomial(logp.exp(), 1, generator=gen)[:, 0]
    return TensorDataset(X[rows], a, (a == Y[rows]).float() - 0.5, logp.gather(1, a[:, None])[:, 0])


def update(run, memory, epochs, clip):
    target = run.position.epoch + epochs
    for epoch in range(run.position.epoch + 1, target + 1):
        kls = []
        for step in run.steps(memory, batch_size=16, epochs=epoch):
            with step:
                for x, a, adv, old in step.shards:
                    new = run.model(x).log_softmax(1).gather(1, a[:, None])[:, 0]
                    ratio = (new - old).exp()
                    surr = torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
                    step.backward({"loss": -surr.mean(), "kl": (old - new).mean()})
            if step.is_done:
                kls.append(step.means["kl"])
        if sum(kls) / len(kls) > 0.02:
            break
    return epoch, round(step.means["kl"], 9), step.number


def main():
    m = net()
    run = unisono.Run(m, Adam(m.parameters(), 0.02), shards=4, directory=DIR)
    log = []
    for i in range(6):
        log.append(update(run, rollout(m, i), 3, 0.2 * (1 - i / 6)))
    return run, log


run, result = main()


# %% active_learning_with_a_trainer: SAME stop=10 kill=10 crashes
t = trainer(m := net(), shards=4)
known, pool, accs = list(range(16)), list(range(16, 96)), []
for i in range(6):
    out = t.fit(Subset(data, known), batch_size=8, epochs=2 * (i + 1))
    scores = t.evaluate(
        data, batch_size=32, metrics={"acc": lambda o, b: (o.argmax(1) == b[1]).float().mean()}
    )
    rows = t.predict(Subset(data, pool), batch_size=16)
    margin = (rows[:, 0] - rows[:, 1]).abs()
    picked = [pool[k] for k in margin.argsort()[:8].tolist()]
    known, pool = known + picked, [k for k in pool if k not in picked]
    accs.append((round(scores["acc"], 8), round(out.means["loss"], 8)))
result = accs


# %% curriculum_by_a_generator: SAME stop=10 kill=10 crashes
def curriculum(run, m):
    hard = 24
    while hard <= 96:
        order = (X.sum(1).abs()).argsort(descending=True)[:hard].tolist()
        epochs = run.position.epoch + 1
        for step in run.steps(Subset(data, order), batch_size=12, epochs=epochs):
            with step:
                for b in step.shards:
                    step.backward(loss(m, b))
            yield hard, step
        hard = hard + 24 if step.loss < 0.6 else hard + 12


def main():
    m = net()
    run = unisono.Run(m, SGD(m.parameters(), 0.1), shards=4, directory=DIR)
    log = []
    for hard, step in curriculum(run, m):
        if step.is_done:
            log.append((hard, round(step.loss, 8)))
    return run, log


run, result = main()


# %% fedavg_clients_in_turn: SAME stop=10 kill=10 crashes
class Server:
    def __init__(self, m):
        self.m = m
        self.run = unisono.Run(m, SGD(m.parameters(), 0.1), shards=4, directory=DIR)
        self.total = 0

    def client(self, rows, steps):
        self.total += steps
        for step in self.run.steps(Subset(data, rows), batch_size=8, steps=self.total):
            with step:
                for b in step.shards:
                    step.backward(loss(self.m, b))
        return {k: v.clone() for k, v in self.m.state_dict().items()}, step.loss

    def round(self, number):
        start = {k: v.clone() for k, v in self.m.state_dict().items()}
        states, losses = [], []
        for c in range(3):
            self.m.load_state_dict(start)
            state, last = self.client(list(range(c * 32, c * 32 + 16)), 2)
            states.append(state)
            losses.append(last)
        self.m.load_state_dict({k: sum(s[k] for s in states) / 3 for k in start})
        return round(sum(losses) / 3, 8)


server = Server(net())
result = [server.round(i) for i in range(4)]
run = server.run


# %% world_model_then_policy: SAME stop=8 kill=8 crashes
def loops(run, models, i):
    yield "world", run.steps(data, batch_size=32, epochs=2 * i + 1)
    yield "policy", run.steps(data, batch_size=48, epochs=2 * i + 2)


def main():
    world, policy = nn.Linear(8, 8), net()
    run = unisono.Run(
        {"world": world, "policy": policy},
        {"world": SGD(world.parameters(), 0.05), "policy": Adam(policy.parameters(), 0.01)},
        shards=4,
        directory=DIR,
    )
    errors = {"world": [], "policy": []}
    for i in range(4):
        for name, steps in loops(run, None, i):
            for step in steps:
                with step, step.update(name):
                    for x, y in step.shards:
                        if name == "world":
                            step.backward(F.mse_loss(world(x), x.roll(1, 1)))
                        else:
                            step.backward(F.cross_entropy(policy(world(x).detach()), y))
            errors[name].append(round(step.means["loss"], 8))
    return run, errors


run, result = main()
