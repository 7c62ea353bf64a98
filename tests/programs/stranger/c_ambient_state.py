# %% precision_of_decimal: SAME|REFUSED
import decimal

class Coarse(Callback):
    def on_step_begin(self, fit):
        if fit.step == 9:
            decimal.getcontext().prec = 2
        rate = decimal.Decimal(fit.step + 1) / 77
        fit.optimizer.param_groups[0]["lr"] = float(rate)

t = trainer(net(), callbacks=[Coarse()])
fit(t)

# %% a_context_variable: SAME|REFUSED
import contextvars

weight = contextvars.ContextVar("weight", default=1.0)

def weighed(m, b):
    return weight.get() * loss(m, b)

class Sets(Callback):
    def on_epoch_end(self, fit):
        weight.set(1.0 + fit.epoch)

t = trainer(net(), weighed, callbacks=[Sets()])
fit(t)

# %% local_to_a_thread: SAME|REFUSED
import threading

local = threading.local()
local.weight = 1.0

def weighed(m, b):
    return local.weight * loss(m, b)

class Sets(Callback):
    def on_epoch_end(self, fit):
        local.weight += 1.0

t = trainer(net(), weighed, callbacks=[Sets()])
fit(t)

# %% a_function_of_torch_is_replaced: SAME|REFUSED
def activated(m, b):
    return F.cross_entropy(m[2](torch.nn.functional.relu(m[0](b[0]))), b[1])

class Replaces(Callback):
    def on_epoch_end(self, fit):
        if fit.epoch == 1:
            torch.nn.functional.relu = torch.nn.functional.elu

t = trainer(net(), activated, callbacks=[Replaces()])
fit(t)

# %% a_default_type: SAME|REFUSED
def noisy(m, b):
    return loss(m, b) + 1e-3 * float(torch.tensor([1 / 3]).double() * 1e6 % 1)

class Doubles(Callback):
    def on_epoch_end(self, fit):
        if fit.epoch == 1:
            torch.set_default_dtype(torch.float64)

t = trainer(net(), lambda m, b: noisy(m, b) * float(torch.tensor(1 / 3)), callbacks=[Doubles()])
fit(t)
torch.set_default_dtype(torch.float32)

# %% working_directory: SAME|REFUSED
import os
import pathlib

pathlib.Path("deep").mkdir(exist_ok=True)

def weighed(m, b):
    return loss(m, b) * (2.0 if os.getcwd().endswith("deep") else 1.0)

class Moves(Callback):
    def on_epoch_end(self, fit):
        if fit.epoch == 1:
            os.chdir("deep")

t = trainer(net(), weighed, callbacks=[Moves()])
fit(t)

# %% a_recursion_limit_of_sys: SAME|REFUSED
import sys

def weighed(m, b):
    return loss(m, b) * (sys.getrecursionlimit() / 1000)

class Deepens(Callback):
    def on_epoch_end(self, fit):
        sys.setrecursionlimit(1000 + 100 * fit.epoch)

t = trainer(net(), weighed, callbacks=[Deepens()])
fit(t)
