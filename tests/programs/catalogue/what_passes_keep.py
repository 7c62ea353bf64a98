# promises: one-result.8 one-result.10

# %% samples_that_count: REFUSED early reads everywhere
# says: `dataset\.calls` changes each time the same sample is read
class Easier(Rows):
    calls = 0

    def change(self, row, index):
        self.calls += 1
        return row / (1 + 1 / self.calls)


t = trainer(normed())
fit(t, Easier())


# %% a_loss_that_counts: REFUSED early everywhere
# says: `loss\.calls` carries over from one shard to the next, and .* but each worker computes dif
class Annealed:
    calls = 0

    def __call__(self, model, batch):
        self.calls += 1
        return loss(model, batch) * min(1.0, self.calls / 100)


t = trainer(normed(), Annealed())
fit(t)


# %% a_model_that_counts: REFUSED early everywhere
# says: `model\.passes` carries over from one shard to the next, and .* but each worker computes d
class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.passes = normed(), 0

    def forward(self, inputs):
        self.passes += 1
        return self.net(inputs * 0.9**self.passes)


t = trainer(Counting())
fit(t)


# %% centres_outside_of_the_model: REFUSED early everywhere
# says: `loss\.centres` carries over from one shard to the next, and .* different shards: keep
def centred():
    centres = torch.zeros(2, 2)

    def with_centres(model, batch):
        outputs = model(batch[0])
        centres.index_add_(0, batch[1].cpu(), outputs.detach().cpu(), alpha=0.1)
        return F.cross_entropy(outputs, batch[1]) + (centres.sum() * outputs).mean()

    return with_centres


t = trainer(normed(), centred())
fit(t)


# %% centres_in_a_buffer: SAME everywhere
class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = normed()
        self.register_buffer("centres", torch.zeros(2, 2))

    def forward(self, inputs):
        return self.net(inputs)


def with_centres(model, batch):
    outputs = model(batch[0])
    model.centres.index_add_(0, batch[1], outputs.detach(), alpha=0.1)
    apart = (outputs - model.centres[batch[1]]).square().mean()
    return F.cross_entropy(outputs, batch[1]) + apart


t = trainer(Centred(), with_centres)
fit(t)


# %% hard_samples_that_the_dataset_reads: REFUSED early everywhere
# says: they change `loss\.hard`, which the dataset reads
hard = set()


class Harder(Rows):
    def __getitem__(self, index):
        row, label = super().__getitem__(index)
        return row * (1 + (index in hard)), label, index


def mined():
    def with_hard(model, batch):
        each = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        hard.update(batch[2][each > 0.1].tolist())
        return each.mean()

    return with_hard


t = trainer(normed(), mined())
fit(t, Harder())


# %% noise_kept_by_a_dataset: REFUSED early reads everywhere
# says: `dataset\.kept` keeps something of earlier readings
class Keeping(Rows):
    def __init__(self):
        self.kept = {}

    def change(self, row, index):
        return row + self.kept.setdefault(index, torch.randn(8))


t = trainer(normed())
fit(t, Keeping())


# %% a_table_drawn_at_the_first_reading: REFUSED early reads everywhere
# says: `dataset\.table` keeps something of earlier readings .what was drawn
class Lazy(Rows):
    table = None

    def change(self, row, index):
        if self.table is None:
            self.table = np.random.randn(96)
        return row + float(self.table[index])


t = trainer(normed())
fit(t, Lazy())


# %% norms_cached_by_a_dataset: SAME reads everywhere
class Normed(Rows):
    def __init__(self):
        self.kept = {}
        self.norm = functools.lru_cache(maxsize=8)(lambda index: float(X[index].norm()))

    def change(self, row, index):
        return self.kept.setdefault(index, row / self.norm(index)) + torch.rand(())


t = trainer(normed())
fit(t, Normed())


# %% a_rate_set_by_a_loss: REFUSED early everywhere
# says: they set `lr` of the optimizer
def slowing(model, batch):
    found = loss(model, batch)
    t.run.optimizer.param_groups[0]["lr"] = 0.1 * min(1.0, found.item())
    return found


t = trainer(normed(), slowing)
fit(t)


# %% weighed_by_the_rank: REFUSED early everywhere
# says: changes when RANK and WORLD_SIZE are those of another
t = trainer(normed(), lambda m, b: loss(m, b) * (1 + unisono.world().rank))
fit(t)


# %% divided_by_the_number_of_workers: REFUSED early everywhere
# says: changes when RANK and WORLD_SIZE are those of another
t = trainer(normed(), lambda m, b: loss(m, b) / unisono.world().world_size)
fit(t)


# %% weighed_by_step_and_shard: SAME reads everywhere kills
def at():
    now = unisono.progress()
    return torch.tensor([now.step, now.epoch, now.batch, 9 if now.shard is None else now.shard]) / 9


def scaled(samples):
    rows, labels = torch.utils.data.default_collate(samples)
    return rows / (1 + at().sum()), labels


class Told(Rows):
    def change(self, row, index):
        return row + torch.randn(8) * unisono.progress().epoch + at().sum()


class Ageing(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs + at().sum().item())


class Reading(SGD):
    def step(self, closure=None):
        self.param_groups[0]["lr"] = 0.1 / (1 + unisono.progress().step)
        assert unisono.progress().shard is None
        return super().step(closure)


m = Ageing(8, 2)
weighed = lambda model, batch: loss(model, batch) * (1 + at().sum().item())
t = trainer(m, weighed, Reading(m.parameters()))
fit(t, Told(), collate=scaled, validate=Told(), validate_every=4)
result = [t.run.last["validation"], t.predict(Told(), batch_size=16).tolist()]


# %% weighed_by_step_in_a_stream: SAME reads everywhere kills
class Stream(torch.utils.data.IterableDataset):
    def __len__(self):
        return 96

    def __iter__(self):
        for row, label in zip(X, Y, strict=True):
            yield row / (1 + unisono.progress().step), label


t = trainer(normed(), lambda m, b: loss(m, b) * (1 + unisono.progress().shard))
fit(t, Stream(), shuffle=False)


# %% a_trained_weight_changed_by_a_loss: REFUSED early
# says: passes must leave .* but `0\.weight` was changed
def decaying(model, batch):
    model[0].weight.data.mul_(0.9)
    return loss(model, batch)


t = trainer(net(), decaying)
fit(t)


# %% computed_when_first_read_and_lowered_later: SAME
class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.scale = net(), None

    def forward(self, x):
        if self.scale is None:
            self.scale = 1.5
        return self.net(x) * self.scale


class Lower(Callback):
    def on_epoch_end(self, fit):
        fit.model.scale *= 0.9


t = trainer(Scaled(), callbacks=[Lower()])
fit(t)


# %% a_cached_property_cleared_by_a_callback: SAME
class Settings:
    level = 1.0

    @functools.cached_property
    def weight(self):
        return torch.tensor(2 * self.level)


settings = Settings()


class Lower(Callback):
    def on_epoch_end(self, fit):
        settings.level *= 0.8
        vars(settings).pop("weight", None)


t = trainer(net(), lambda m, b: loss(m, b) * settings.weight, callbacks=[Lower()])
fit(t)

# %% a_table_of_scales_changed_by_a_callback: SAME
scales = {}


def scaled(m, b):
    return loss(m, b) * scales.setdefault("one", torch.ones(3)).mean()


class Lower(Callback):
    def on_epoch_end(self, fit):
        scales["one"] = scales["one"] * 0.8


t = trainer(net(), scaled, callbacks=[Lower()])
fit(t)


# %% a_last_loss_kept_and_cleared: SAME
class Kept:
    last, largest = None, 0.0


kept = Kept()


def noted(m, b):
    value = loss(m, b)
    kept.last, kept.largest = value.detach(), max(kept.largest, value.item())
    return value


class Clear(Callback):
    def on_epoch_end(self, fit):
        kept.last, kept.largest = None, 0.0


t = trainer(net(), noted, callbacks=[Clear()])
fit(t)


# %% a_meter_that_a_callback_shows: TOLD covers.only.the.shards
class Meter:
    total, count = 0.0, 0


meter, result = Meter(), []


def metered(m, b):
    value = loss(m, b)
    meter.total, meter.count = meter.total + value.item(), meter.count + 1
    return value


class Shows(Callback):
    def on_epoch_end(self, fit):
        result.append(meter.total / meter.count)


t = trainer(net(), metered, callbacks=[Shows()])
fit(t)


# %% predictions_gathered_in_an_evaluation: TOLD covers.only.the.shards
guesses = []


def guessing(m, b):
    guesses.extend(m(b[0]).argmax(1).tolist())
    return loss(m, b)


t = trainer(net(), guessing)
t.evaluate(data, batch_size=8)
guesses.clear()
t.evaluate(data, batch_size=8)
result = len(guesses)
fit(t)


# %% a_map_that_each_pass_replaces: SAME
class Attending(nn.Sequential):
    seen = None

    def forward(self, x):
        self.seen = x.softmax(-1).detach()
        return super().forward(x * self.seen)


t = trainer(Attending(*net()))
fit(t)


# %% averages_in_attributes_that_validation_reads: REFUSED
# says: passes in training add to `model\.1\.mean`, .* depends on that: keep a buffer
class Centred(nn.Module):
    mean = torch.zeros(8)

    def forward(self, x):
        if not torch.is_grad_enabled():
            return x - self.mean
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - x.mean(0)


t = trainer(nn.Sequential(nn.Linear(8, 8), Centred(), nn.Linear(8, 2)))
fit(t, validate=data)


# %% a_factor_of_the_step_that_validation_reads: SAME
class Warmed(nn.Sequential):
    factor = 0.0

    def forward(self, x):
        if torch.is_grad_enabled():
            self.factor = min(1.0, unisono.progress().step / 8)
        return self.factor * super().forward(x)


t = trainer(Warmed(*net()))
result = fit(t, validate=data)[-1]["validation/loss"]


# %% stored_under_a_number_and_changed: SAME
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()
        self.scales = {}

    def forward(self, x):
        return self.inner(x) * self.scales.setdefault(0, 1.0)


class Anneal(Callback):
    def on_step_end(self, fit, step):
        fit.model.scales[0] *= 0.95


t = trainer(Model(), callbacks=[Anneal()])
fit(t)


# %% context_variable_first_set_by_a_loss: SAME
import contextvars

scale = contextvars.ContextVar("scale")


def scaled(m, b):
    try:
        now = scale.get()
    except LookupError:
        scale.set(now := 1.0)
    return loss(m, b) * now


class Anneal(Callback):
    def on_step_end(self, fit, step):
        scale.set(scale.get() * 0.95)


t = trainer(net(), scaled, callbacks=[Anneal()])
fit(t)
