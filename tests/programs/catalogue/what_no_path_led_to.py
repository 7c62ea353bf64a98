# promises: one-result.4 one-result.5
# %% factory_replaced: SAME
from collections import defaultdict


def ten():
    return 0.1


def five():
    return 0.05


class Falls(Callback):
    def __init__(self):
        self.rates = defaultdict(ten)

    def on_step_end(self, fit, step):
        if step.number == 4:
            self.rates.default_factory = five
        fit.optimizer.param_groups[0]["lr"] = self.rates[step.number]


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% meta_rate: SAME
class Meta(type):
    rate = 0.1


class Rates(metaclass=Meta):
    pass


class Falls(Callback):
    def on_step_end(self, fit, step):
        type(Rates).rate *= 0.95
        fit.optimizer.param_groups[0]["lr"] = Rates.rate


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% setter_changes_a_global: SAME
count = 0


class Falls(Callback):
    @property
    def rate(self):
        return 0.1

    @rate.setter
    def rate(self, value):
        global count
        count += 1
        value.param_groups[0]["lr"] = 0.1 * 0.95**count

    def on_step_end(self, fit, step):
        self.rate = fit.optimizer


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% enum_method_changes_a_global: SAME
import enum

count = 0


class Phase(enum.Enum):
    A = 1

    def rate(self):
        global count
        count += 1
        return 0.1 * 0.95**count


class Falls(Callback):
    phase = Phase.A

    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = self.phase.rate()


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% flags_composed: SAME
import enum


class Kinds(enum.Flag):
    A = 1
    B = 2


class Falls(Callback):
    def __init__(self):
        self.flags = Kinds.A

    def on_step_end(self, fit, step):
        if step.number == 3:
            self.flags = Kinds.A | Kinds.B
        if Kinds.B in self.flags:
            fit.optimizer.param_groups[0]["lr"] *= 0.95


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% lambdas_alike: SAME
class Falls(Callback):
    def on_begin(self, fit):
        self.pick = [lambda e: e in {4, 5, 16, 17, 18, 20}, lambda e: e in {1, 2, 3}][0]

    def on_step_end(self, fit, step):
        if self.pick(step.number):
            fit.optimizer.param_groups[0]["lr"] *= 0.7


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% structured_with_objects: TOLD looked
class Falls(Callback):
    def __init__(self):
        self.t = np.zeros(1, dtype=[("a", object)])
        self.t[0]["a"] = 0.1

    def on_step_end(self, fit, step):
        self.t["a"][0] = self.t["a"][0] * 0.95
        fit.optimizer.param_groups[0]["lr"] = self.t["a"][0]


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% defaults_of_optimizer: SAME
class Falls(Callback):
    def on_step_end(self, fit, step):
        fit.optimizer.defaults["lr"] *= 0.95
        fit.optimizer.param_groups[0]["lr"] = fit.optimizer.defaults["lr"]


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% cell_that_is_deleted: SAME
def make():
    x = 0.1

    def step(lr):
        nonlocal x
        try:
            x
        except NameError:
            x = lr * 0.9
            return lr
        lr = x
        del x
        return lr

    return step


falls = make()


class Falls(Callback):
    def on_step_end(self, fit, step):
        group = fit.optimizer.param_groups[0]
        group["lr"] = falls(group["lr"])


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% tensor_keys: SAME
class Falls(Callback):
    def __init__(self):
        self.d = {torch.zeros(3): 0.1}

    def on_step_end(self, fit, step):
        rate = next(iter(self.d.values())) * 0.95
        self.d.clear()
        self.d[torch.zeros(3)] = rate
        fit.optimizer.param_groups[0]["lr"] = rate


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% array_resized: SAME
mask = np.array([1.0, 0.5, 0.25])


def masked(m, b):
    return F.cross_entropy(m(b[0]), b[1]) * float(mask.sum())


class Shrinks(Callback):
    def on_step_end(self, fit, step):
        if step.number == 3:
            mask.resize(1, refcheck=False)


t = trainer(net(), masked, callbacks=[Shrinks()])
fit(t)


# %% spawned: SAME
class Falls(Callback):
    def __init__(self):
        self.a = np.random.default_rng(7)

    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = 0.1 * self.a.spawn(1)[0].random()


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% spawned_of_new: SAME
class Falls(Callback):
    def on_begin(self, fit):
        self.a = np.random.default_rng(7)

    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = 0.1 * self.a.spawn(1)[0].random()


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% attribute_of_plain_tensor: SAME
class Falls(Callback):
    def __init__(self):
        self.t = torch.zeros(2)
        self.t.rate = 0.1

    def on_step_end(self, fit, step):
        self.t.rate *= 0.95
        fit.optimizer.param_groups[0]["lr"] = self.t.rate


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% attribute_of_new_tensor: SAME
class Falls(Callback):
    def on_begin(self, fit):
        self.t = nn.Parameter(torch.zeros(2))
        self.t.rate = 0.1

    def on_step_end(self, fit, step):
        self.t.rate = self.t.__dict__.get("rate", 0.1) * 0.95
        fit.optimizer.param_groups[0]["lr"] = self.t.rate


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% tensor_subclass: SAME
class Half(torch.Tensor):
    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.mul_:
            args = (args[0], args[1] * 0.9)
        return super().__torch_function__(func, types, args, kwargs or {})


class Falls(Callback):
    def on_begin(self, fit):
        self.t = torch.full((1,), 0.1).as_subclass(Half)

    def on_step_end(self, fit, step):
        self.t.mul_(0.99)
        fit.optimizer.param_groups[0]["lr"] = self.t.item()


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% numpy_scalars_of_kinds: SAME
class Falls(Callback):
    def __init__(self):
        self.c = np.complex64(0.1)
        self.s = np.str_("a")
        self.d = np.datetime64("2020-01-01")
        self.l = np.longdouble(0.1)

    def on_step_end(self, fit, step):
        self.c *= np.complex64(0.95)
        self.s = np.str_(self.s + "a")
        self.d = self.d + np.timedelta64(1, "D")
        self.l *= np.longdouble(0.99)
        days = (self.d - np.datetime64("2020-01-01")).astype(int)
        lr = float(self.c.real) * float(self.l) * len(self.s) / (1 + int(days))
        fit.optimizer.param_groups[0]["lr"] = lr


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% event_flag: SAME
import threading


class Falls(Callback):
    def __init__(self):
        self.e = threading.Event()

    def on_step_end(self, fit, step):
        if step.number == 4:
            self.e.set()
        if self.e.is_set():
            fit.optimizer.param_groups[0]["lr"] *= 0.95


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% semaphore: SAME
import threading


class Falls(Callback):
    def __init__(self):
        self.e = threading.Semaphore(30)

    def on_step_end(self, fit, step):
        self.e.acquire()
        fit.optimizer.param_groups[0]["lr"] = 0.1 / self.e._value


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% bar_of_tqdm: SAME
from tqdm import tqdm


class Falls(Callback):
    def __init__(self):
        self.bar = tqdm(total=24, file=open("bar.txt", "w"))

    def on_step_end(self, fit, step):
        self.bar.update()
        fit.optimizer.param_groups[0]["lr"] = 0.1 * 0.95**self.bar.n


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% cache_of_results: SAME
calls = []


@functools.cache
def rate(epoch):
    return 0.1 * 0.9 ** (torch.rand(1).item())


class Falls(Callback):
    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = rate(step.number // 6)


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% cache_bounded: TOLD stored
@functools.lru_cache
def rate(epoch):
    return 0.1 * 0.9 ** (torch.rand(1).item())


class Falls(Callback):
    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = rate(step.number // 7)


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% module_imported_late: TOLD imported


import sys
import tempfile

sys.path.insert(0, tempfile.mkdtemp())
Path(sys.path[0], "late_settings.py").write_text("rate = 0.1\n")


class Falls(Callback):
    def on_step_end(self, fit, step):
        import late_settings

        late_settings.rate *= 0.95
        fit.optimizer.param_groups[0]["lr"] = late_settings.rate


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% grad_outside: SAME
class Falls(Callback):
    def __init__(self):
        self.w = nn.Parameter(torch.full((2,), 0.1))
        self.opt = SGD([self.w], lr=0.01)

    def on_step_end(self, fit, step):
        (self.w.sum() * (1 + step.number)).backward()
        if step.number % 3 == 2:
            self.opt.step()
            self.opt.zero_grad()
        fit.optimizer.param_groups[0]["lr"] = abs(float(self.w.detach()[0])) / 10


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% requires_grad_outside: SAME
class Falls(Callback):
    def __init__(self):
        self.net = nn.Linear(2, 1)
        self.opt = SGD(self.net.parameters(), lr=0.01)
        self.net.weight.requires_grad_(False)

    def on_step_end(self, fit, step):
        if step.number == 4:
            self.net.weight.requires_grad_(True)
        self.opt.zero_grad()
        self.net(torch.ones(2)).sum().backward()
        self.opt.step()
        fit.optimizer.param_groups[0]["lr"] = abs(float(self.net.weight.sum().detach())) / 10


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% autocast_left_open: REFUSED
# says: left open
class Falls(Callback):
    def on_step_end(self, fit, step):
        if step.number == 4:
            lower.__enter__()


lower = torch.autocast("cpu", torch.bfloat16)
t = trainer(net(), callbacks=[Falls()])
try:
    fit(t)
finally:  # for other programs in this process
    lower.__exit__(None, None, None)


# %% series_in_place: SAME
import pandas as pd


class Falls(Callback):
    def __init__(self):
        self.d = pd.Series([0.1, 0.2])

    def on_step_end(self, fit, step):
        self.d[0] = float(self.d[0]) * 0.95
        fit.optimizer.param_groups[0]["lr"] = float(self.d[0])


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% hook_on_new_tensor: SAME
class Falls(Callback):
    def on_begin(self, fit):
        self.w = nn.Parameter(torch.full((1,), 0.1))
        self.w.register_hook(lambda g: g * 0.5)

    def on_step_end(self, fit, step):
        self.w.grad = None
        (self.w * 1.0).sum().backward()
        with torch.no_grad():
            self.w -= 0.001 * self.w.grad
        fit.optimizer.param_groups[0]["lr"] = float(self.w.detach())


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% gradient_of_a_new_one: SAME
class Falls(Callback):
    def on_begin(self, fit):
        self.w = nn.Parameter(torch.full((2,), 0.1))

    def on_step_end(self, fit, step):
        (self.w.sum() * (1 + step.number)).backward()
        if step.number % 4 == 3:
            with torch.no_grad():
                self.w -= 0.0001 * self.w.grad
            self.w.grad = None
        fit.optimizer.param_groups[0]["lr"] = abs(float(self.w.detach()[0]))


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% frame_in_place: SAME
import pandas as pd


class Falls(Callback):
    def __init__(self):
        self.d = pd.DataFrame({"rate": [0.1, 0.2], "n": [1, 2]})

    def on_step_end(self, fit, step):
        self.d.loc[0, "rate"] *= 0.95
        self.d.at[1, "n"] += 1
        fit.optimizer.param_groups[0]["lr"] = float(self.d.loc[0, "rate"]) / int(self.d.at[1, "n"])


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% random_state_new: SAME
class Falls(Callback):
    def on_begin(self, fit):
        self.r = np.random.RandomState(3)

    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = 0.1 * self.r.rand()


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% event_in_a_loss: SAME
import threading

late = threading.Event()


def weighed(m, b):
    return F.cross_entropy(m(b[0]), b[1]) * (0.5 if late.is_set() else 1.0)


class Falls(Callback):
    def on_step_end(self, fit, step):
        if step.number == 5:
            late.set()


t = trainer(net(), weighed, callbacks=[Falls()])
fit(t)


# %% spawned_in_a_dataset: SAME
class Noisy(Dataset):
    def __init__(self):
        self.rng = np.random.default_rng(0)

    def __len__(self):
        return 96

    def __getitem__(self, i):
        return X[i] + float(self.rng.spawn(1)[0].normal()) * 0.1, Y[i]


t = trainer(net())
fit(t, Noisy())


# %% rate_by_a_bar_that_passes_count: REFUSED
# says: `loss.bar.n` carries over
from tqdm import tqdm

bar = tqdm(total=24, file=open("bar.txt", "w"))


def shown(m, b):
    bar.update()
    return F.cross_entropy(m(b[0]), b[1]) * 0.99**bar.n


t = trainer(net(), shown)
fit(t)


# %% global_of_a_computed_name: SAME
rate_0 = rate_1 = 0.1


def of(step):
    return f"rate_{step.number % 2}"


class Falls(Callback):
    def on_step_end(self, fit, step):
        globals()[of(step)] *= 0.9
        fit.optimizer.param_groups[0]["lr"] = globals()[of(step)]


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% global_of_a_computed_name_is_new: SAME
class Falls(Callback):
    def on_step_end(self, fit, step):
        name = f"rate_{step.number % 2}"
        globals()[name] = globals().get(name, 0.1) * 0.9
        fit.optimizer.param_groups[0]["lr"] = globals()[name]


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% computed_name_in_a_module: SAME
import sys
import tempfile

sys.path.insert(0, tempfile.mkdtemp())
Path(sys.path[0], "computed_rates.py").write_text("rate_0 = rate_1 = 0.1\n")
import computed_rates


class Falls(Callback):
    def on_step_end(self, fit, step):
        name = f"rate_{step.number % 2}"
        setattr(computed_rates, name, getattr(computed_rates, name) * 0.9)
        fit.optimizer.param_groups[0]["lr"] = getattr(computed_rates, name)


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% computed_name_beside_a_loop_outside_functions: SAME
rate_0 = rate_1 = 0.1


def fallen(step):
    name = f"rate_{step % 2}"
    globals()[name] *= 0.9
    return globals()[name]


run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch))
    rate = fallen(step.number)
    run.optimizer.param_groups[0]["lr"] = rate
