# promises: one-result.4 one-result.8
# %% imported_in_a_method_from_beside: SAME
write("proj/__init__.py")
write("proj/config.py", "settings = {'rate': 0.1}\n")
write("proj/cb/__init__.py", "")
write(
    "proj/cb/falls.py",
    """
    from tests.programs.given import Callback
    class Falls(Callback):
        def on_step_end(self, fit, step):
            from ..config import settings
            settings["rate"] *= 0.95
            fit.optimizer.param_groups[0]["lr"] = settings["rate"]
""",
)
import proj.config
from proj.cb.falls import Falls

t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% imported_by_a_dotted_name: SAME
write("proj/__init__.py")
write("proj/conf.py", "rate = 0.1\n")
import importlib

importlib.import_module("proj.conf")


class Falls(Callback):
    def on_step_end(self, fit, step):
        conf = importlib.import_module("proj.conf")
        conf.rate *= 0.95
        fit.optimizer.param_groups[0]["lr"] = conf.rate


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% a_module_that_computes_its_names: SAME
write(
    "conf.py",
    """
    _reads = 0
    def __getattr__(name):
        global _reads
        if name != "rate":
            raise AttributeError(name)
        _reads += 1
        return 0.1 * 0.95 ** _reads
""",
)
import conf


class Falls(Callback):
    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = conf.rate


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% a_module_of_another_class: SAME
write(
    "settings.py",
    """
    import sys, types
    steps = 0
    class Settings(types.ModuleType):
        @property
        def rate(self):
            global steps
            steps += 1
            return 0.1 * 0.95 ** steps
    sys.modules[__name__].__class__ = Settings
""",
)
import settings


class Falls(Callback):
    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = settings.rate


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% an_object_in_place_of_a_module: SAME
write(
    "settings.py",
    """
    import sys
    calls = 0
    class Settings:
        steps = 0
        def rate(self):
            global calls
            calls += 1
            type(self).steps += 1
            return 0.1 * 0.97 ** (self.steps + calls)
    _keep = sys.modules[__name__]
    sys.modules[__name__] = Settings()
    sys.modules[__name__]._keep = _keep
""",
)
import settings


class Falls(Callback):
    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = settings.rate()


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% a_private_global: SAME
__rate = 0.1


def lower():
    global __rate
    __rate *= 0.95
    return __rate


class Falls(Callback):
    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = lower()


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% a_registry_with_a_private_name: SAME
class Plugin:
    __plugins__ = {"rate": 0.1}

    @classmethod
    def lower(cls):
        cls.__plugins__["rate"] *= 0.95
        return cls.__plugins__["rate"]


class Falls(Callback):
    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = Plugin.lower()


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% found_as_subclasses: SAME
write("proj/__init__.py")
write(
    "proj/base.py",
    """
    class Schedule:
        pass
""",
)
write(
    "proj/falls.py",
    """
    from .base import Schedule
    class Falls(Schedule):
        steps = 0
        @classmethod
        def rate(cls):
            cls.steps += 1
            return 0.1 * 0.95 ** cls.steps
""",
)
import importlib
from proj.base import Schedule

importlib.import_module("proj.falls")


class Falls2(Callback):
    def on_step_end(self, fit, step):
        for each in Schedule.__subclasses__():
            fit.optimizer.param_groups[0]["lr"] = each.rate()


t = trainer(net(), callbacks=[Falls2()])
fit(t)


# %% a_class_that_counts_its_items: SAME
count = 0


class Rates:
    def __class_getitem__(cls, name):
        global count
        count += 1
        return 0.1 * 0.95**count


class Falls(Callback):
    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = Rates["lr"]


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% a_callback_of_a_file: SAME
write(
    "plugins/falls.py",
    """
    from tests.programs.given import Callback
    steps = 0
    class Falls(Callback):
        def on_step_end(self, fit, step):
            global steps
            steps += 1
            fit.optimizer.param_groups[0]["lr"] = 0.1 * 0.95 ** steps
""",
)
import importlib.util


def load(path):
    spec = importlib.util.spec_from_file_location("falls_plugin", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


t = trainer(net(), callbacks=[load(project() / "plugins/falls.py").Falls()])
fit(t)


# %% a_loss_of_a_file_that_keeps: REFUSED
# says: `loss.std` carries over
write(
    "plugins/weighed.py",
    """
    from tests.programs.given import F
    std = None
    def loss(m, b):
        global std
        if std is None:
            std = b[0].std().item()
        return F.cross_entropy(m(b[0] / std), b[1])
""",
)
import importlib.util


def load(path):
    spec = importlib.util.spec_from_file_location("plugins.weighed", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


plugin = load(project() / "plugins/weighed.py")
t = trainer(net(), plugin.loss)
fit(t)


# %% a_function_of_a_text: SAME
def compiled(text):
    space = {}
    exec(text, space)
    return space["rate"]


rate = compiled(
    "count = 0\ndef rate():\n    global count\n    count += 1\n    return 0.1 * 0.95 ** count\n"
)


class Falls(Callback):
    def on_step_end(self, fit, step):
        fit.optimizer.param_groups[0]["lr"] = rate()


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% a_lambda_of_a_text: SAME
space = {"F": F, "rate": 0.1}
exec("def make():\n    return lambda n: rate * 0.95 ** n\n", space)
make = space["make"]


class Falls(Callback):
    def on_begin(self, fit):
        self.by = make()

    def on_step_end(self, fit, step):
        if step.number == 4:
            space["rate"] = 0.08
        fit.optimizer.param_groups[0]["lr"] = self.by(step.number)


t = trainer(net(), callbacks=[Falls()])
fit(t)


# %% an_installed_program_that_is_started: SAME
import sys

sys.path.insert(0, str(project() / "site-packages"))
write("site-packages/proj/__init__.py")
write(
    "site-packages/proj/sched.py",
    """
    _steps = 0
    def rate():
        global _steps
        _steps += 1
        return 0.1 * 0.95 ** _steps
""",
)
write(
    "site-packages/proj/train.py",
    """
    from tests.programs.given import *
    from . import sched
    class Falls(Callback):
        def on_step_end(self, fit, step):
            fit.optimizer.param_groups[0]["lr"] = sched.rate()
    t = trainer(net(), callbacks=[Falls()])
    fit(t)
""",
)
import runpy

t = runpy.run_module("proj.train", run_name="__main__", alter_sys=True)["t"]


# %% kept_in_a_module_beside: REFUSED
# says: `proj.stats.std` carries over
write("proj/__init__.py")
write("proj/stats.py", "std = None\n")
write(
    "proj/losses.py",
    """
    from tests.programs.given import F
    def loss(m, b):
        from . import stats
        if stats.std is None:
            stats.std = b[0].std().item()
        return F.cross_entropy(m(b[0] / stats.std), b[1])
""",
)
from proj.losses import loss as mine
import proj.stats

t = trainer(net(), mine)
fit(t)


# %% kept_in_a_module_imported_in_a_pass: TOLD first.imported
write("proj/__init__.py")
write("proj/stats.py", "std = None\n")
write(
    "proj/losses.py",
    """
    from tests.programs.given import F
    def loss(m, b):
        from . import stats
        if stats.std is None:
            stats.std = b[0].std().item()
        return F.cross_entropy(m(b[0] / stats.std), b[1])
""",
)
from proj.losses import loss as mine

t = trainer(net(), mine)
fit(t)
