# promises: one-result.4

# %% settings_with_functions_that_return_them: SAME
import gc
import socket
import sys


class Sets(Callback):
    def on_step_end(self, fit, step):
        if step.number == 9:
            np.set_printoptions(precision=2)
            np.seterr(divide="ignore")
            gc.disable()
            gc.set_threshold(500, 11, 12)
            sys.set_int_max_str_digits(5000)
            socket.setdefaulttimeout(3)
            torch.backends.cuda.enable_math_sdp(False)
        told = [np.get_printoptions()["precision"], len(np.geterr()["divide"]), gc.isenabled()]
        told += [gc.get_threshold()[0] / 100, sys.get_int_max_str_digits() / 1000]
        told += [socket.getdefaulttimeout() or 0, torch.backends.cuda.math_sdp_enabled()]
        fit.optimizer.param_groups[0]["lr"] = 0.001 * sum(map(float, told))


t = trainer(net(), callbacks=[Sets()])
fit(t)


# %% a_strategy_of_torch_as_an_attribute: SAME
import torch.backends.opt_einsum

parts = torch.randn(6, 7, generator=torch.Generator().manual_seed(1))


class Sets(Callback):
    def on_step_end(self, fit, step):
        if step.number == 9:
            torch.backends.opt_einsum.strategy = "optimal"
            torch._dynamo.config.cache_size_limit = 3
        told = len(torch.backends.opt_einsum.strategy or "") + torch._dynamo.config.cache_size_limit
        fit.optimizer.param_groups[0]["lr"] = 0.01 * told


t = trainer(net(), callbacks=[Sets()])
fit(t)


# %% new_names_in_libraries: SAME
import json
import math


def scaled(tensor):
    return 2.0 * tensor


class Sets(Callback):
    def on_step_end(self, fit, step):
        if step.number == 9:
            math.tau_of_ours = 2.0
            json.encoder.FLOAT_REPR = 3.0
            torch.Tensor.scaled = scaled
            torch.nn.Module.rate_of_ours = 4.0
            torch.nn.Linear.__str__ = lambda self: "short"
        told = getattr(math, "tau_of_ours", 1.0) + getattr(json.encoder, "FLOAT_REPR", 1.0)
        told += getattr(torch.nn.Module, "rate_of_ours", 1.0) + len(str(nn.Linear(1, 1))) / 10
        if hasattr(torch.Tensor, "scaled"):
            told *= torch.ones(()).scaled().item()
        fit.optimizer.param_groups[0]["lr"] = 0.01 * told


t = trainer(net(), callbacks=[Sets()])
fit(t)


# %% settings_from_a_module_imported_within: SAME
class Sets(Callback):
    def on_step_end(self, fit, step):
        from decimal import Decimal, DivisionByZero, getcontext
        from sys import getswitchinterval, setswitchinterval

        if step.number == 9:
            getcontext().prec = 3
            getcontext().traps[DivisionByZero] = False
            setswitchinterval(0.01)
        third = float(Decimal(1) / 3) + getswitchinterval()
        if not getcontext().traps[DivisionByZero]:
            third += float(Decimal(1) / 0 > 5)
        fit.optimizer.param_groups[0]["lr"] = 0.1 * third


t = trainer(net(), callbacks=[Sets()])
fit(t)


# %% what_python_itself_keeps_of_classes_and_functions: SAME
class Weak:
    scale = property(lambda self: 1.0)

    def __call__(self):
        return self.scale


class Base:
    rate = 1.0


class Other:
    rate = 3.0


class Rate(Base):
    pass


def named():
    """Short."""


weak = Weak()


class Sets(Callback):
    def on_step_end(self, fit, step):
        if step.number == 9:
            Weak.scale = property(lambda self: 2.0)
            Weak.__call__ = lambda self: 3.0 * self.scale
            Rate.__bases__ = (Other,)
            named.__doc__, Rate.__name__ = "Longer than it was.", "Rates"
        told = weak() + Rate.rate + len(named.__doc__) + len(Rate.__name__)
        fit.optimizer.param_groups[0]["lr"] = 0.01 * told


t = trainer(net(), callbacks=[Sets()])
fit(t)


# %% the_dtype_of_new_tensors_by_its_old_name: SAME
class Sets(Callback):
    def on_step_end(self, fit, step):
        kind = torch.DoubleTensor if step.number == 9 else torch.FloatTensor
        if step.number in (9, 10):
            torch.set_default_tensor_type(kind)
        fit.optimizer.param_groups[0]["lr"] = 0.1 * float(torch.tensor(1.0) / 3)


t = trainer(net(), callbacks=[Sets()])
fit(t)


# %% what_a_cache_has_stored_while_the_run_goes_back: SAME
import functools

base = [1.0]


@functools.lru_cache
def rate(of):
    return of * base[0]


class Sets(Callback):
    def on_step_end(self, fit, step):
        if step.number == 9:
            base[0] = 2.0
            rate.cache_clear()
        fit.optimizer.param_groups[0]["lr"] = 0.1 * rate(1.0)


t = trainer(net(), callbacks=[Sets()])
fit(t)


# %% a_mode_of_torch_that_is_left_open: REFUSED
# says: a mode that is left open cannot be kept with the run
from torch.overrides import TorchFunctionMode


class Doubled(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        return found * 2 if function is torch.sin else found


mode = Doubled()


class Enters(Callback):
    def on_step_end(self, fit, step):
        if step.number == 0:
            mode.__enter__()
        fit.optimizer.param_groups[0]["lr"] = 0.1 * float(torch.sin(torch.ones(())))


t = trainer(net(), callbacks=[Enters()])
fit(t)


# %% a_strategy_that_a_loss_sets: REFUSED
# says: `torch.backends.opt_einsum.strategy` carries over from one shard to the next
import torch.backends.opt_einsum


def in_turns(m, b):
    einsum = torch.backends.opt_einsum
    einsum.strategy = "greedy" if einsum.strategy != "greedy" else "optimal"
    return loss(m, b) * len(einsum.strategy)


t = trainer(net(), in_turns)
fit(t)


# %% a_precision_that_rows_set_and_put_back: SAME
import decimal


class Thirds(Rows):
    def change(self, row, index):
        with decimal.localcontext() as context, np.errstate(divide="ignore"):
            context.prec = 3 + index % 2
            return row * float(decimal.Decimal(1) / 3)


t = trainer(net())
fit(t, Thirds())


# %% a_precision_that_rows_leave_behind: REFUSED
# says: a sample must depend on its index
import decimal


class Thirds(Rows):
    def change(self, row, index):
        third = float(decimal.Decimal(1) / 3)
        decimal.getcontext().prec = 3 + index % 3
        return row * third


t = trainer(net())
fit(t, Thirds())
