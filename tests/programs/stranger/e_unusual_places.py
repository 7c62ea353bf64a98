# %% a_module_of_its_own: SAME reads
import pathlib
import sys

pathlib.Path("settings_of_mine.py").write_text("strength = 1.0\ndef scaled(row):\n    return row * strength\n")
sys.path.insert(0, ".")
import settings_of_mine

class Changed(Rows):
    def change(self, row, index):
        return settings_of_mine.scaled(row)

class Stronger(Callback):
    def on_epoch_end(self, fit):
        settings_of_mine.strength *= 1.5

t = trainer(net(), callbacks=[Stronger()])
fit(t, Changed())

# %% a_registry_by_single_dispatch: SAME|REFUSED
import functools

@functools.singledispatch
def scaled(x):
    return x

def processed(m, b):
    return loss(m, (scaled(b[0]), b[1]))

class Registers(Callback):
    def on_epoch_end(self, fit):
        scaled.register(torch.Tensor, lambda x, by=fit.epoch: x * (1 + by))

t = trainer(net(), processed, callbacks=[Registers()])
fit(t)

# %% a_registry_of_a_metaclass: SAME|REFUSED
class Registry(type):
    known = []

    def __init__(cls, name, bases, names):
        Registry.known.append(cls)

class Scale(metaclass=Registry):
    by = 1.0

def processed(m, b):
    for one in Registry.known:
        b = (b[0] * one.by, b[1])
    return loss(m, b)

class Adds(Callback):
    def on_epoch_end(self, fit):
        Registry("Scale", (Scale,), {"by": 1.0 + 0.2 * fit.epoch})

t = trainer(net(), processed, callbacks=[Adds()])
fit(t)

# %% keyed_by_layers_weakly: SAME|REFUSED
import weakref

m = net()
gains = weakref.WeakKeyDictionary({layer: 1.0 for layer in m})

def gained(m, b):
    x = b[0]
    for layer in m:
        x = layer(x) * gains[layer]
    return F.cross_entropy(x, b[1])

class Gains(Callback):
    def on_step_end(self, fit, step):
        for layer in m:
            gains[layer] *= 1.01

t = trainer(m, gained, callbacks=[Gains()])
fit(t)

# %% keyed_by_parameters: SAME
m = net()
slow = {p: p.detach().clone() for p in m.parameters()}

class Lookahead(Callback):
    def on_step_end(self, fit, step):
        if step.number % 3 == 2:
            with torch.no_grad():
                for p, s in slow.items():
                    s.lerp_(p, 0.5)
                    p.copy_(s)

t = trainer(m, callbacks=[Lookahead()])
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

# %% a_descriptor_that_stores: SAME
class Clamped:
    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, one, owner=None):
        return self if one is None else one.__dict__.get(self.name, 1.0)

    def __set__(self, one, value):
        one.__dict__[self.name] = max(0.1, min(3.0, value))

class Changed(Rows):
    scale = Clamped()

    def change(self, row, index):
        return row * self.scale

rows = Changed()

class Grows(Callback):
    def on_epoch_end(self, fit):
        rows.scale = rows.scale * 1.4

t = trainer(net(), callbacks=[Grows()])
fit(t, rows)

# %% a_wrapper_that_passes_attributes_on: SAME
class Wrapper(Dataset):
    def __init__(self, inner):
        self.__dict__["inner"] = inner

    def __getattr__(self, name):
        return getattr(self.__dict__["inner"], name)

    def __setattr__(self, name, value):
        setattr(self.inner, name, value)

    def __len__(self):
        return 96

    def __getitem__(self, index):
        row, label = self.inner[index]
        return row * self.inner.scale, label

inner = Rows()
inner.scale = 1.0
rows = Wrapper(inner)

class Grows(Callback):
    def on_epoch_end(self, fit):
        rows.scale = 1.0 + fit.epoch

t = trainer(net(), callbacks=[Grows()])
fit(t, rows)

# %% code_of_a_function_is_exchanged: SAME|REFUSED
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

# %% a_cache_that_a_callback_fills: SAME|REFUSED
import functools

@functools.lru_cache(maxsize=None)
def noise(epoch):
    return torch.randn(8)

def noised(m, b):
    return loss(m, (b[0] + 0.3 * noise(unisono.progress().epoch), b[1]))

class Fills(Callback):
    def on_step_begin(self, fit):
        noise(fit.epoch)

t = trainer(net(), noised, callbacks=[Fills()])
fit(t)
