# promises: one-result.4

# %% precision_of_decimal: SAME
import decimal


class Coarse(Callback):
    def on_step_begin(self, fit):
        if fit.step == 9:
            decimal.getcontext().prec = 2
        rate = decimal.Decimal(fit.step + 1) / 77
        fit.optimizer.param_groups[0]["lr"] = float(rate)


t = trainer(net(), callbacks=[Coarse()])
fit(t)

# %% a_context_variable: SAME
import contextvars

weight = contextvars.ContextVar("weight", default=1.0)


def weighed(m, b):
    return weight.get() * loss(m, b)


class Sets(Callback):
    def on_epoch_end(self, fit):
        weight.set(1.0 + fit.epoch)


t = trainer(net(), weighed, callbacks=[Sets()])
fit(t)

# %% local_to_a_thread: SAME
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


# %% a_function_of_torch_is_replaced: SAME
def activated(m, b):
    return F.cross_entropy(m[2](torch.nn.functional.relu(m[0](b[0]))), b[1])


class Replaces(Callback):
    def on_epoch_end(self, fit):
        if fit.epoch == 1:
            torch.nn.functional.relu = torch.nn.functional.elu


t = trainer(net(), activated, callbacks=[Replaces()])
fit(t)

# %% working_directory: SAME
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

# %% a_stage_in_the_environment: SAME
import os

os.environ.setdefault("STAGE", "0")


class Staged(Rows):
    def change(self, row, index):
        return row * (1 + int(os.environ["STAGE"]))


class Stages(Callback):
    def on_epoch_end(self, fit):
        os.environ["STAGE"] = str(fit.epoch)


t = trainer(net(), callbacks=[Stages()])
fit(t, Staged())

# %% an_attribute_of_all_modules: SAME
nn.Module.temperature = 1.0


def scaled(m, b):
    return F.cross_entropy(m(b[0]) * m.temperature, b[1])


class Cools(Callback):
    def on_step_end(self, fit, step):
        nn.Module.temperature *= 1.04


t = trainer(net(), scaled, callbacks=[Cools()])
fit(t)

# %% a_name_among_the_builtins: SAME
import builtins

builtins.sharpness = 1.0


def scaled(m, b):
    return F.cross_entropy(m(b[0]) * sharpness, b[1])


class Cools(Callback):
    def on_step_end(self, fit, step):
        builtins.sharpness *= 1.04


t = trainer(net(), scaled, callbacks=[Cools()])
fit(t)

# %% a_hook_on_every_module: SAME
from torch.nn.modules.module import register_module_forward_hook


def halved(module, args, out):
    return out * 0.5 if isinstance(module, nn.ReLU) else None


class Hooks(Callback):
    def on_epoch_end(self, fit):
        if fit.epoch == 1:
            register_module_forward_hook(halved)


t = trainer(net(), callbacks=[Hooks()])
fit(t)

# %% errors_of_numpy_raised_later: SAME
import numpy as np


class Logged(Rows):
    def change(self, row, index):
        try:
            return torch.from_numpy(np.nan_to_num(np.log(row.numpy()), neginf=0.0))
        except FloatingPointError:
            return row


class Strict(Callback):
    def on_epoch_end(self, fit):
        if fit.epoch == 1:
            np.seterr(invalid="raise")


np.seterr(invalid="ignore")
t = trainer(net(), callbacks=[Strict()])
fit(t, Logged())

# %% names_of_a_text: SAME
names = {}
exec("weight = 1.0\n\ndef weighed(value):\n    return value * weight", names)  # with the builtins


class Lower(Callback):
    def on_step_end(self, fit, step):
        names["weight"] *= 0.95


t = trainer(net(), lambda m, b: names["weighed"](loss(m, b)), callbacks=[Lower()])
fit(t)


# %% anomalies_detected_later: SAME
class Switch(Callback):
    def on_step_end(self, fit, step):
        if step.number == 7:
            torch.autograd.set_detect_anomaly(True)


def careful(m, b):
    return loss(m, b) * (2 if torch.is_anomaly_enabled() else 1)


t = trainer(net(), careful, callbacks=[Switch()])
fit(t)


# %% a_default_device_later: SAME
class Switch(Callback):
    def on_step_end(self, fit, step):
        if step.number == 7:
            torch.set_default_device("meta")


def careful(m, b):
    return loss(m, b) * (2 if torch.get_default_device().type == "meta" else 1)


t = trainer(net(), careful, callbacks=[Switch()])
fit(t)
torch.set_default_device("cpu")

# %% a_thread_that_a_callback_starts: TOLD has.started.a.thread
import queue
import threading

asked, answers = queue.Queue(), queue.Queue()


def answer():
    weight = 1.0
    while True:
        asked.get()
        weight *= 0.9
        answers.put(weight)


class Asking(Callback):
    weight, alive = 1.0, ()

    def on_step_end(self, fit, step):
        if threading.get_ident() not in self.alive or len(threading.enumerate()) < 2:
            threading.Thread(target=answer, daemon=True).start()
            self.alive = (threading.get_ident(),)
        asked.put(0)
        self.weight = answers.get()


asking = Asking()
t = trainer(net(), lambda m, b: loss(m, b) * asking.weight, callbacks=[asking])
fit(t)

# %% held_by_weak_references: SAME
import weakref


class Scale:
    now = 1.0


scale = Scale()
scales = weakref.WeakValueDictionary({"one": scale})


class Lower(Callback):
    def on_step_end(self, fit, step):
        scales["one"].now *= 0.95


t = trainer(net(), lambda m, b: loss(m, b) * scales["one"].now, callbacks=[Lower()])
fit(t)

# %% bytes_in_two_kinds_of_arrays: SAME
import array
import struct

packed, numbers = bytearray(8), array.array("d", [1.0])
struct.pack_into("d", packed, 0, 1.0)


class Lower(Callback):
    def on_step_end(self, fit, step):
        struct.pack_into("d", packed, 0, struct.unpack_from("d", packed)[0] * 0.95)
        numbers[0] *= 0.99


def lowered(m, b):
    return loss(m, b) * struct.unpack_from("d", packed)[0] * numbers[0]


t = trainer(net(), lowered, callbacks=[Lower()])
fit(t)
