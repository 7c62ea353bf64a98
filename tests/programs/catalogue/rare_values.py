# promises: one-result.4

# %% slow_weights_keyed_by_id: SAME
class Lookahead(Callback):
    def __init__(self):
        self.slow = {}

    def on_step_end(self, fit, step):
        with torch.no_grad():
            for p in fit.model.parameters():
                slow = self.slow.setdefault(id(p), p.detach().clone())
                slow.lerp_(p, 0.3)
                p.copy_(slow)


t = trainer(net(), callbacks=[Lookahead()])
fit(t)

# %% gains_of_layers_by_id: SAME
gains = {}


def gained(m, b):
    x = b[0]
    for layer in m:
        x = layer(x) * gains.get(id(layer), 1.0)
    return F.cross_entropy(x, b[1])


class Gains(Callback):
    def on_step_end(self, fit, step):
        for n, layer in enumerate(fit.model):
            gains[id(layer)] = gains.get(id(layer), 1.0) * (1 + 0.01 * n)


t = trainer(net(), gained, callbacks=[Gains()])
fit(t)

# %% a_member_of_an_enum_that_counts: SAME
import enum


class Phase(enum.Enum):
    WARM = 1
    COLD = 2

    def __init__(self, number):
        self.seen = 0


phase = Phase.WARM


class Phases(Callback):
    def on_step_end(self, fit, step):
        global phase
        phase.seen += 1
        phase = Phase.COLD if phase.seen % 5 == 0 else Phase.WARM
        rate = 0.1 if phase is Phase.WARM else 0.01 * phase.seen
        fit.optimizer.param_groups[0]["lr"] = rate


t = trainer(net(), callbacks=[Phases()])
fit(t)

# %% arrays_of_rare_kinds: SAME
import numpy as np


class Tables:
    records = np.zeros(96, dtype=[("gain", ">f4"), ("name", "U4")])
    fortran = np.asfortranarray(np.ones((8, 8), "f4"))
    masked = np.ma.masked_array(np.ones(8, "f4"), mask=np.zeros(8, bool))
    objects = np.array([1.0, "a", None], dtype=object)


def changed(m, b):
    x = b[0] @ torch.from_numpy(np.ascontiguousarray(Tables.fortran))
    x = x * float(1 + Tables.records["gain"].sum()) * float(Tables.masked.sum() or 1) / 8
    return loss(m, (x * Tables.objects[0], b[1]))


class Turns(Callback):
    def on_epoch_end(self, fit):
        Tables.records["gain"][fit.epoch] = 0.3
        Tables.fortran[:, fit.epoch] *= 0.5
        Tables.masked[fit.epoch] = np.ma.masked
        Tables.objects[0] = 1.0 + 0.1 * fit.epoch


t = trainer(net(), changed, callbacks=[Turns()])
fit(t)


# %% tensors_of_rare_kinds: SAME
class Tables:
    sparse = torch.eye(8).to_sparse()
    half = torch.ones(8, dtype=torch.bfloat16)
    strided = torch.ones(8, 8).t()
    expanded = torch.ones(1).expand(8)
    mask = torch.ones(8, dtype=torch.bool)


def changed(m, b):
    x = torch.sparse.mm(Tables.sparse, b[0].t()).t() @ Tables.strided / 8
    return loss(m, (x * Tables.half.float() * Tables.expanded * Tables.mask, b[1]))


class Turns(Callback):
    def on_epoch_end(self, fit):
        Tables.sparse = (torch.eye(8) * (1 + fit.epoch)).to_sparse()
        Tables.half[fit.epoch] = 0.3
        Tables.strided[:, fit.epoch] *= 0.5
        Tables.expanded = torch.full((1,), 1.0 + fit.epoch).expand(8)
        Tables.mask[fit.epoch] = False


t = trainer(net(), changed, callbacks=[Turns()])
fit(t)

# %% written_into_globals: SAME
alpha = 1.0


def weighed(m, b):
    return alpha * loss(m, b) + globals().get("beta", 0.0) * m[2].bias.square().sum()


class Writes(Callback):
    def on_epoch_end(self, fit):
        globals()["alpha"] = 1.0 / (1 + fit.epoch)
        globals()["beta"] = 0.1 * fit.epoch


t = trainer(net(), weighed, callbacks=[Writes()])
fit(t)


# %% code_of_a_function_is_exchanged: SAME
def weight(step):
    return 1.0


def heavier(step):
    return 1.0 + 0.1 * step


def weighed(m, b):
    return weight(unisono.progress().step) * loss(m, b)


class Exchanges(Callback):
    def on_epoch_end(self, fit):
        if fit.epoch == 1:
            weight.__code__ = heavier.__code__


t = trainer(net(), weighed, callbacks=[Exchanges()])
fit(t)

# %% a_coroutine_that_adapts: REFUSED
import types


@types.coroutine
def give(rate):
    return (yield rate)


async def adapts():
    rate = 0.1
    while True:
        found = await give(rate)
        rate = 0.9 * rate + 0.02 * found


class Adapts(Callback):
    def __init__(self):
        self.co = adapts()
        self.co.send(None)

    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = self.co.send(step.means["loss"])


t = trainer(net(), callbacks=[Adapts()])
fit(t)


# %% first_attribute_of_a_tensor: SAME crashes
class Marks(Callback):
    def __init__(self):
        self.mean = torch.ones(2)

    def on_step_end(self, fit, step):
        self.mean.scale = getattr(self.mean, "scale", 1.0) * 0.98
        fit.optimizer.param_groups[0]["lr"] = 0.1 * self.mean.scale


t = trainer(net(), callbacks=[Marks()])
fit(t)


# %% modes_of_a_layer_of_a_callback: SAME crashes
class Turns(Callback):
    def __init__(self):
        self.noise = nn.Dropout(0.5)

    def on_step_end(self, fit, step):
        self.noise.train(not self.noise.training)
        fit.optimizer.param_groups[0]["lr"] = 0.1 * float(self.noise(torch.ones(64)).mean())


t = trainer(net(), callbacks=[Turns()])
fit(t)


# %% modes_of_a_teacher: SAME crashes
def main():
    run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
    teacher = normed().requires_grad_(False)
    for step in run.steps(data, batch_size=16, epochs=4):
        with step:
            for x, y in step.shards:
                step.backward(F.cross_entropy(m(x), y))
        if step.number % 5 == 4:
            teacher.train(not teacher.training)
        run.optimizer.param_groups[0]["lr"] = 0.1 * (1 + float(teacher(X[:8]).mean()))
    return run


run = main()
