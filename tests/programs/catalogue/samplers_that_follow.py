# promises: one-result.4

# %% weights_of_a_weighted_sampler: SAME
sampler = torch.utils.data.WeightedRandomSampler(torch.ones(96, dtype=torch.double), 96)


def each(m, b):
    found = F.cross_entropy(m(b[0]), b[1], reduction="none")
    return {"loss": found.mean(), "per_sample": {"loss": found.detach()}}


class Follows(Callback):
    def on_step_end(self, fit, step):
        sampler.weights[step.indices] = 0.1 + step.per_sample["loss"].double()


t = trainer(net(), each, callbacks=[Follows()])
fit(t, sampler=sampler)


# %% hardest_first: SAME
class HardestFirst(torch.utils.data.Sampler):
    def __init__(self):
        self.losses = [0.0] * 96

    def __len__(self):
        return 96

    def __iter__(self):
        return iter(sorted(range(96), key=lambda index: -self.losses[index]))


def each(m, b):
    found = F.cross_entropy(m(b[0]), b[1], reduction="none")
    return {"loss": found.mean(), "per_sample": {"loss": found.detach()}}


sampler = HardestFirst()


class Follows(Callback):
    def on_step_end(self, fit, step):
        for index, found in zip(step.indices, step.per_sample["loss"].tolist(), strict=True):
            sampler.losses[index] = found


t = trainer(net(), each, callbacks=[Follows()])
fit(t, sampler=sampler)


# %% pool_that_grows: SAME
class Pool:
    size = 32

    def __call__(self, epoch, seed):
        generator = torch.Generator().manual_seed(seed + epoch)
        return torch.randint(self.size, (96,), generator=generator)


pool = Pool()


class Grows(Callback):
    def on_step_end(self, fit, step):
        if step.means["loss"] < 0.7:
            pool.size = min(96, pool.size + 3)


t = trainer(net(), callbacks=[Grows()])
fit(t, sampler=pool)

# %% classes_balanced_by_their_errors: SAME
shares = torch.tensor([0.5, 0.5])


def balanced(epoch, seed):
    return torch.multinomial(shares[Y], 96, replacement=True)


class Balances(Callback):
    def on_epoch_end(self, fit):
        with torch.no_grad():
            wrong = fit.model(X).argmax(1) != Y
        for label in (0, 1):
            shares[label] = 0.1 + wrong[Y == label].float().mean()


t = trainer(net(), callbacks=[Balances()])
fit(t, sampler=balanced)

# %% a_loop_that_sets_the_order: SAME
order = list(range(96))
run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
for step in run.steps(data, batch_size=16, epochs=4, sampler=lambda epoch, seed: list(order)):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch))
    order.sort(key=lambda index: float(m(X[index])[0].detach()))
