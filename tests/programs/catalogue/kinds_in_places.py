# promises: one-result.4


# %% attributes_of_a_callback: SAME crashes
from tests.programs.kinds import Values

V = Values()


class Changes(Callback):
    def __init__(self):
        vars(self).update(V.first())

    def on_step_end(self, fit, step):
        for name in V.kinds:
            setattr(self, name, V.next(name, getattr(self, name)))
        there = {name: getattr(self, name) for name in V.kinds}
        fit.optimizer.param_groups[0]["lr"] = 0.1 * V.number(there)


t = trainer(net(), callbacks=[Changes()])
fit(t)


# %% a_list_of_a_callback: SAME crashes
from tests.programs.kinds import Values

V = Values()


class Changes(Callback):
    def __init__(self):
        self.all = [*V.first().values()]

    def on_step_end(self, fit, step):
        self.all[:] = [V.next(name, value) for name, value in zip(V.kinds, self.all)]
        fit.optimizer.param_groups[0]["lr"] = 0.1 * V.number(dict(zip(V.kinds, self.all)))


t = trainer(net(), callbacks=[Changes()])
fit(t)


# %% a_tuple_in_a_slot: SAME crashes
from tests.programs.kinds import Values

V = Values()


class Changes(Callback):
    __slots__ = ("all",)

    def __init__(self):
        self.all = (*V.first().values(),)

    def on_step_end(self, fit, step):
        self.all = tuple(V.next(name, value) for name, value in zip(V.kinds, self.all))
        fit.optimizer.param_groups[0]["lr"] = 0.1 * V.number(dict(zip(V.kinds, self.all)))


t = trainer(net(), callbacks=[Changes()])
fit(t)


# %% attributes_of_a_class: SAME crashes
from tests.programs.kinds import Values

V = Values()


class Held:
    pass


def set_all(values):
    for name, value in values.items():
        is_function = type(value) is type(set_all)
        setattr(Held, name, staticmethod(value) if is_function else value)


class Changes(Callback):
    def on_step_end(self, fit, step):
        set_all({name: V.next(name, getattr(Held, name)) for name in V.kinds})
        there = {name: getattr(Held, name) for name in V.kinds}
        fit.optimizer.param_groups[0]["lr"] = 0.1 * V.number(there)


set_all(V.first())
t = trainer(net(), callbacks=[Changes()])
fit(t)


# %% a_variable_of_a_closure: SAME crashes
from tests.programs.kinds import Values

V = Values()


def changes():
    there = V.first()

    def change(model, optimizer):
        nonlocal there
        there = {name: V.next(name, value) for name, value in there.items()}
        optimizer.param_groups[0]["lr"] = 0.1 * V.number(there)

    return change


t = trainer(net(), callbacks=[Between(changes())])
fit(t)


# %% attributes_of_the_model: SAME crashes
from tests.programs.kinds import Values

V = Values("same_event")


class Changes(Callback):
    def on_step_end(self, fit, step):
        there = {name: V.next(name, vars(fit.model)["my_" + name]) for name in V.kinds}
        vars(fit.model).update({"my_" + name: value for name, value in there.items()})
        fit.optimizer.param_groups[0]["lr"] = 0.1 * V.number(there)


vars(m := net()).update({"my_" + name: value for name, value in V.first().items()})
t = trainer(m, callbacks=[Changes()])
fit(t)


# %% a_loss: SAME crashes
from tests.programs.kinds import Values

V = Values()


class Loss:
    def __init__(self):
        self.all = V.first()

    def __call__(self, m, b):
        return loss(m, b) * V.number(self.all)


l = Loss()


class Changes(Callback):
    def on_step_end(self, fit, step):
        l.all.update({name: V.next(name, value) for name, value in l.all.items()})


t = trainer(net(), l, callbacks=[Changes()])
fit(t)


# %% a_data_set: SAME crashes
from tests.programs.kinds import Values

V = Values()


class Mine(Rows):
    def __init__(self):
        self.all = V.first()

    def change(self, row, index):
        return row * V.number(self.all)


d = Mine()


class Changes(Callback):
    def on_step_end(self, fit, step):
        d.all.update({name: V.next(name, value) for name, value in d.all.items()})


t = trainer(net(), callbacks=[Changes()])
fit(t, d)


# %% a_variable_of_the_loop: SAME crashes
from tests.programs.kinds import Values

V = Values()


def main():
    run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    there = V.first()
    for step in run.steps(data, batch_size=16, epochs=4):
        with step:
            for b in step.shards:
                step.backward(loss(m, b) * V.number(there))
        there = {name: V.next(name, value) for name, value in there.items()}
    return run, V.number(there)


run, result = main()


# %% a_variable_of_a_context: SAME crashes
from tests.programs.kinds import Values

V = Values()


import contextvars

there = contextvars.ContextVar("there")
there.set(V.first())


class Changes(Callback):
    def on_step_end(self, fit, step):
        there.set({name: V.next(name, value) for name, value in there.get().items()})
        fit.optimizer.param_groups[0]["lr"] = 0.1 * V.number(there.get())


t = trainer(net(), callbacks=[Changes()])
fit(t)


# %% a_hook_of_the_optimizer: SAME crashes
from tests.programs.kinds import Values

V = Values()


there = V.first()
m = net()
o = SGD(m.parameters(), lr=0.1, momentum=0.9)


def after(optimizer, args, kwargs):
    there.update({name: V.next(name, value) for name, value in there.items()})
    optimizer.param_groups[0]["lr"] = 0.1 * V.number(there)


o.register_step_post_hook(after)
t = trainer(m, optimizer=o)
fit(t)
