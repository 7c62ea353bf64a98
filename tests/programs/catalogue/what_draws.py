# promises: one-result.9

# %% transforms_with_generators_of_their_own: SAME reads everywhere
class Jitter:
    __slots__ = ("own", "torchs")

    def __init__(self):
        self.own, self.torchs = random.Random(0), torch.Generator().manual_seed(1)

    def __call__(self, row, strength):
        return row * self.own.uniform(1, 1 + strength) + torch.rand(8, generator=self.torchs)


class Jittered(Rows):
    changes = {"first": [functools.partial(Jitter(), strength=0.5)]}

    def change(self, row, index):
        return self.changes["first"][0](row)


t = trainer(normed())
fit(t, Subset(Jittered(), range(95, -1, -1)))


# %% mixup_in_a_collate: SAME reads everywhere
def mixup():
    rng = np.random.RandomState(5)

    def collate(samples):
        rows, labels = torch.utils.data.default_collate(samples)
        return rows.lerp(rows.roll(1, 0), float(rng.beta(2, 2))), labels

    return collate


t = trainer(normed())
fit(t, collate=mixup())


# %% noise_drawn_by_a_loss: SAME everywhere
def noisy():
    generator = torch.Generator().manual_seed(3)

    def with_noise(model, batch):
        noise = torch.randn(batch[0].shape, generator=generator)
        return loss(model, (batch[0] + noise.to(batch[0].device), batch[1]))

    return with_noise


t = trainer(normed(), noisy())
fit(t)


# %% noise_drawn_by_a_model: SAME everywhere
class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = normed()
        self.rng, self.others = np.random.default_rng(2), {"dice": random.Random(4)}

    def forward(self, inputs):
        drawn = self.rng.normal(size=inputs.shape).astype("float32")
        return self.net(inputs * self.others["dice"].random() + torch.tensor(drawn).to(inputs))


t = trainer(Noisy())
fit(t)


# %% numbers_of_a_hidden_generator: REFUSED early everywhere
# says: `loss\.numbers` carries over from one shard to the next
def hidden():
    numbers = (one for one in np.random.default_rng(0).random(10_000))
    return lambda model, batch: loss(model, batch) * next(numbers)


t = trainer(normed(), hidden())
fit(t)


# %% langevin: SAME everywhere
class Langevin(SGD):
    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, lr)
        self.generator = torch.Generator().manual_seed(1)

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            noise = torch.randn(parameter.shape, generator=self.generator)
            parameter.add_((noise + torch.rand(parameter.shape)).to(parameter.device), alpha=0.01)


m = normed()
t = trainer(m, optimizer=Langevin(m.parameters()))
fit(t)


# %% noise_on_gradients_in_a_hook: SAME everywhere
m = normed()
adam, rng = Adam(m.parameters(), 0.01), np.random.default_rng(9)


def hook(*_):
    for parameter in adam.param_groups[0]["params"]:
        noise = rng.normal(size=parameter.shape).astype("float32")
        noise += torch.randn(parameter.shape).numpy()
        parameter.grad += torch.from_numpy(noise).to(parameter.device)


adam.register_step_pre_hook(hook)
t = trainer(m, optimizer=adam)
fit(t)


# %% drawn_around_calls: SAME everywhere
def three():
    return [random.random(), float(np.random.rand()), float(torch.rand(()))]


t = trainer(normed())
for seed in (random.seed, np.random.seed, torch.manual_seed):
    seed(3)
result = [three()]
fit(t)
result += [three(), dict(t.evaluate(data, batch_size=7)), three()]


# %% split_before_fit: SAME everywhere
t = trainer(normed())
ours, others = torch.utils.data.random_split(data, (64, 32))
fit(t, ours, validate=others)


# %% drawn_on_the_device_and_between_steps: SAME everywhere
def noised(model, batch):
    noise = torch.randn(batch[0].shape, device=batch[0].device)
    return loss(model, (batch[0] + 0.1 * noise, batch[1]))


def shaken(model, _):
    for parameter in model.parameters():
        parameter.data.add_(torch.randn(parameter.shape).to(parameter.device), alpha=0.01)


t = trainer(normed(), noised, callbacks=[Between(shaken)])
fit(t)
