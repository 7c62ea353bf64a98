# promises: one-result.9

# %% transforms_with_generators_of_their_own: SAME reads everywhere
class Jitter:
    __slots__ = ("draw", "own", "torchs")

    def __init__(self):
        self.own, self.torchs = random.Random(0), torch.Generator().manual_seed(1)
        self.draw = random.Random(2).random  # a bound method alone

    def __call__(self, row, strength):
        row = row * self.own.uniform(1, 1 + strength) + self.draw()
        return row + torch.rand(8, generator=self.torchs)


class Jittered(Rows):
    scale = torch.Generator()
    changes = {"first": [functools.partial(Jitter(), strength=0.5)]}

    def __init__(self):
        self.rng = np.random.default_rng(0)

    def change(self, row, index):
        row = row * float(self.rng.random()) * torch.rand((), generator=self.scale)
        return self.changes["first"][0](row)


t = trainer(normed())
fit(t, Subset(Jittered(), range(95, -1, -1)))


# %% parts_that_are_read_at_once_with_a_global_generator: SAME reads everywhere
GLOBAL = np.random.default_rng(5)


class Legacy(Rows):
    def __init__(self):
        self.rng = np.random.RandomState(3)

    def __getitems__(self, indices):
        shift = float(GLOBAL.normal() + self.rng.rand())
        return [(X[index] + shift, Y[index]) for index in indices]


t = trainer(normed())
parts = Subset(torch.utils.data.ConcatDataset([Rows(), Legacy()]), range(48, 144))
fit(t, parts)
other = trainer(normed(), directory=DIR and f"{DIR}-2")
fit(other, Legacy())


# %% a_generator_made_at_the_first_reading: SAME reads everywhere
class Lazy(Rows):
    rng = None

    def change(self, row, index):
        if self.rng is None:
            self.rng = np.random.default_rng()
        return row * float(self.rng.random())


t = trainer(normed())
fit(t, Lazy())


# %% a_stream_with_a_generator: SAME reads everywhere
class Stream(torch.utils.data.IterableDataset):
    def __init__(self):
        self.rng = np.random.Generator(np.random.Philox(2))

    def __len__(self):
        return 96

    def __iter__(self):
        for index in range(96):
            yield X[index] + float(self.rng.normal()), Y[index]


t = trainer(normed())
fit(t, Stream(), shuffle=False)


# %% a_method_of_an_object_that_draws: SAME everywhere
GLOBAL = np.random.default_rng(5)


class Shuffled:
    def __init__(self):
        self.rng = random.Random(2)

    def __call__(self, model, batch):
        return self.weighted(loss(model, batch)) * GLOBAL.uniform(0.5, 1.5)

    def weighted(self, loss):
        return loss * (1 + self.rng.random())


t = trainer(normed(), Shuffled().__call__)
fit(t)


# %% hooks_that_draw: SAME everywhere
m = normed()
rng, generator = np.random.default_rng(), torch.Generator()


def noisy(grad):
    return grad + torch.randn(grad.shape, generator=generator).to(grad.device)


t = trainer(m)
m[0].weight.register_hook(noisy)
m[0].register_forward_hook(lambda module, inputs, outputs: outputs + float(rng.normal()))
fit(t)
result = [t.predict(data, batch_size=16).tolist(), t.evaluate(data, batch_size=16)]


# %% a_loop_that_draws_in_its_body_and_in_a_function: SAME everywhere
m = normed()
r = unisono.Run(m, SGD(m.parameters(), lr=0.1), shards=6, directory=DIR, device=DEVICE)
rng, generator = np.random.default_rng(3), torch.Generator()


def noisy(inputs):
    return inputs + torch.randn(inputs.shape, generator=generator).to(inputs.device)


for step in r.steps(data, batch_size=16, steps=STEPS):
    with step:
        for inputs, labels in step.shards:
            step.backward(loss(m, (noisy(inputs) * rng.uniform(), labels)))


# %% mixup_in_a_collate: SAME reads everywhere kills
def mixup():
    rng = np.random.RandomState(5)

    def collate(generator_of, samples):
        rows, labels = torch.utils.data.default_collate(samples)
        return rows.lerp(rows.roll(1, 0), float(rng.beta(2, 2))) + generator_of[
            "it"
        ].random(), labels

    return functools.partial(collate, {"it": random.Random(9)})


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


# %% split_before_fit: SAME everywhere kill=8
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


# %% copies_of_a_generator_that_is_replaced: REFUSED
# says: a generator that the dataset has made after its first batch
class Mine(Rows):
    rng = random.Random(0)

    def change(self, row, index):
        return row + 0.1 * copy.deepcopy(self.rng).random()


d = Mine()


class Replaces(Callback):
    def on_step_end(self, fit, step):
        d.rng = random.Random(step.number)


t = trainer(net(), callbacks=[Replaces()])
fit(t, d)


# %% copies_of_a_generator_of_each_epoch: SAME
class Mine(Rows):
    rng = random.Random(0)

    def change(self, row, index):
        return row + 0.1 * copy.deepcopy(self.rng).random()


d = Mine()


class Replaces(Callback):
    def on_epoch_end(self, fit):
        d.rng = random.Random(fit.epoch)


t = trainer(net(), callbacks=[Replaces()])
fit(t, d)
