# promises: one-result.4 one-result.5 one-result.8
# %% numpy_iter: SAME
class Rate(Callback):
    def __init__(self):
        self.rates = iter(np.linspace(0.1, 0.01, 24))

    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = float(next(self.rates))


t = trainer(net(), callbacks=[Rate()])
fit(t)


# %% module_attribute: SAME
import sys
import tempfile

sys.path.insert(0, tempfile.mkdtemp())
Path(sys.path[0], "settings.py").write_text("rate = 0.1\n")
import settings


class Rate(Callback):
    def __init__(self, cfg):
        self.cfg = cfg

    def on_step_end(self, fit, step):
        self.cfg.rate *= 0.95
        fit.optimizer.param_groups[0]["lr"] = self.cfg.rate


t = trainer(net(), callbacks=[Rate(settings)])
fit(t)


# %% scale_in_nested_module: SAME
import sys
import tempfile

sys.path.insert(0, tempfile.mkdtemp())
Path(sys.path[0], "mine").mkdir()
Path(sys.path[0], "mine/__init__.py").touch()
Path(sys.path[0], "mine/conf.py").write_text("scale = 1.0\n")
import mine.conf


def scaled(m, b):
    return F.cross_entropy(m(b[0]), b[1]) * mine.conf.scale


class Falls(Callback):
    def on_step_end(self, fit, step):
        mine.conf.scale *= 0.9


t = trainer(net(), scaled, callbacks=[Falls()])
fit(t)


# %% first_scale_in_module_attribute: REFUSED
# says: `model.cfg.std` carries over
import sys
import tempfile

sys.path.insert(0, tempfile.mkdtemp())
Path(sys.path[0], "first_scale.py").write_text("std = None\n")
import first_scale as settings


class Scaled(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.cfg, self.net = cfg, net()

    def forward(self, x):
        if self.cfg.std is None:
            self.cfg.std = x.std().item()
        return self.net(x / self.cfg.std)


t = trainer(Scaled(settings))
fit(t)


# %% random_subclass: SAME
class Rate(random.Random):
    def __init__(self):
        super().__init__(0)
        self.rate = 0.1


class Falls(Callback):
    def __init__(self):
        self.draws = Rate()

    def on_step_end(self, fit, step):
        self.draws.rate *= 0.95
        fit.optimizer.param_groups[0]["lr"] = self.draws.rate


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% attribute_of_a_partial: SAME
def weighed(m, b):
    return F.cross_entropy(m(b[0]), b[1]) * weighs.scale


weighs = functools.partial(weighed)
weighs.scale = 1.0


class Falls(Callback):
    def on_step_end(self, fit, step):
        weighs.scale *= 0.9


t = trainer(net(), weighs, callbacks=[Falls()])
fit(t)


# %% set_of_observers: SAME
class Falls:
    def __init__(self):
        self.rate = 0.1

    def after(self, fit):
        self.rate *= 0.95
        fit.optimizer.param_groups[0]["lr"] = self.rate


class All(Callback):
    def __init__(self):
        self.observers = {Falls()}

    def on_step_end(self, fit, step):
        for each in self.observers:
            each.after(fit)


t = trainer(net(), callbacks=[All()])
fit(t)


# %% set_of_terms: SAME
class Term:
    def __init__(self):
        self.weight = 1.0

    def __call__(self, m, b):
        return F.cross_entropy(m(b[0]), b[1]) * self.weight


terms = {Term()}


def total(m, b):
    return sum(each(m, b) for each in terms)


class Falls(Callback):
    def on_step_end(self, fit, step):
        for each in terms:
            each.weight *= 0.9


t = trainer(net(), total, callbacks=[Falls()])
fit(t)


# %% first_of_each_in_a_set: REFUSED
# says: `loss.steps.Norm.std` carries over
class Norm:
    def __init__(self):
        self.std = None

    def __call__(self, x):
        if self.std is None:
            self.std = x.std().item()
        return x / self.std


steps = {Norm()}


def loss2(m, b):
    x = b[0]
    for each in steps:
        x = each(x)
    return F.cross_entropy(m(x), b[1])


t = trainer(net(), loss2)
fit(t)


# %% key_of_a_dict: SAME
class Term:
    weight = 1.0

    def __init__(self):
        self.weight = 1.0


terms = {Term(): 1.0}


def total(m, b):
    return sum(F.cross_entropy(m(b[0]), b[1]) * each.weight * by for each, by in terms.items())


class Falls(Callback):
    def on_step_end(self, fit, step):
        for each in terms:
            each.weight *= 0.9


t = trainer(net(), total, callbacks=[Falls()])
fit(t)


# %% teacher_rounded: SAME
teacher = net().requires_grad_(False).eval()


def distilled(m, b):
    x = b[0].to(teacher[0].weight.dtype)
    return F.cross_entropy(m(b[0]), b[1]) + (m(b[0]) - teacher(x).float()).square().mean()


class Turns(Callback):
    def on_step_end(self, fit, step):
        if step.number == 3:
            teacher.to(torch.bfloat16)


t = trainer(net(), distilled, callbacks=[Turns()])
fit(t)


# %% shrunk: SAME
mask = torch.tensor([1.0, 0.5, 0.25])


def masked(m, b):
    return F.cross_entropy(m(b[0]), b[1]) * mask.sum()


class Shrinks(Callback):
    def on_step_end(self, fit, step):
        if step.number == 3:
            mask.data = mask.data[:1].clone()


t = trainer(net(), masked, callbacks=[Shrinks()])
fit(t)


# %% memory_view: TOLD looked
class Rate(Callback):
    def __init__(self):
        self.view = memoryview(bytearray(8)).cast("d")
        self.view[0] = 0.1

    def on_step_end(self, fit, step):
        self.view[0] *= 0.95
        fit.optimizer.param_groups[0]["lr"] = self.view[0]


t = trainer(net(), callbacks=[Rate()])
fit(t)


# %% pairwise: REFUSED
# says: `Rate.pairs` has changed between two steps, but itertools.pairwise cannot be kept
import itertools

rates = [0.1]
for _ in range(30):
    rates.append(rates[-1] * 0.95)


class Rate(Callback):
    def __init__(self):
        self.pairs = itertools.pairwise(rates)

    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = next(self.pairs)[1]


t = trainer(net(), callbacks=[Rate()])
fit(t)


# %% weights_of_5000: TOLD container
table = {n: {"w": 1.0} for n in range(5000)}


def weighed(m, b):
    return F.cross_entropy(m(b[0]), b[1]) * table[7]["w"]


class Falls(Callback):
    def on_step_end(self, fit, step):
        table[7]["w"] *= 0.9


t = trainer(net(), weighed, callbacks=[Falls()])
fit(t)


# %% imported_in_a_method: SAME
import sys
import tempfile

sys.path.insert(0, tempfile.mkdtemp())
Path(sys.path[0], "settings.py").write_text("rate = 0.1\n")
import settings as _loaded_before


class Rate(Callback):
    def on_step_begin(self, fit):
        import settings

        settings.rate *= 0.9
        fit.optimizer.param_groups[0]["lr"] = settings.rate


t = trainer(net(), callbacks=[Rate()])
fit(t)


# %% several_terms_in_a_set: TOLD looked
class Term:
    def __init__(self):
        self.weight = 1.0

    def __call__(self, m, b):
        return F.cross_entropy(m(b[0]), b[1]) * self.weight


terms = {Term(), Term()}


def total(m, b):
    return sum(each(m, b) for each in terms)


class Falls(Callback):
    def on_step_end(self, fit, step):
        for each in terms:
            each.weight *= 0.9


t = trainer(net(), total, callbacks=[Falls()])
fit(t)
