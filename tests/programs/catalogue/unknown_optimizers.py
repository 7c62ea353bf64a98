# promises: conditions.7

# %% lion: SAME
class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.sub_(group["lr"] * m.lerp(p.grad, 0.1).sign())
                m.lerp_(p.grad, 0.01)


class Forgets(Callback):
    def on_epoch_end(self, fit):
        for state in fit.optimizer.state.values():
            state["m"].mul_(0.5)


m = net()
t = trainer(m, optimizer=Lion(m.parameters()), callbacks=[Forgets()])
fit(t, validate=data)


# %% estimate_kept_on_the_optimizer: SAME
class Adapting(SGD):
    d = 0.01

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            norm = sum(p.grad.abs().sum().item() for p in group["params"])
            self.d = max(self.d, 0.1 / (1 + norm))
            group["lr"] = self.d
        super().step()


m = net()
t = trainer(m, optimizer=Adapting(m.parameters(), 0.1))
fit(t)


# %% averages_swapped_in_for_validation: SAME
class Averaging(Adam):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            average = self.state[p].setdefault("average", p.clone())
            average.lerp_(p, 0.2)

    @torch.no_grad()
    def swap(self):
        for p in self.param_groups[0]["params"]:
            kept = p.clone()
            p.copy_(self.state[p]["average"])
            self.state[p]["average"].copy_(kept)


class Swaps(Callback):
    def on_epoch_end(self, fit):
        fit.optimizer.swap()


m = net()
t = trainer(m, optimizer=Averaging(m.parameters(), 0.01), callbacks=[Swaps()])
fit(t)
result = t.evaluate(data, batch_size=32)["loss"]


# %% distance_travelled_read_in_a_loop: SAME
class Tracking(SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            self.state[p].setdefault("start", p.clone())
        super().step()


run = unisono.Run(m := net(), optimizer := Tracking(m.parameters(), 0.1), shards=6, directory=DIR)
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch))
    away = sum((p - optimizer.state[p]["start"]).norm().item() for p in m.parameters())
    optimizer.param_groups[0]["lr"] = 0.1 / (1 + away)


# %% two_kinds_of_parameters: SAME
class Muon(SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if p.ndim == 2:
                u, _, v = torch.linalg.svd(p.grad, full_matrices=False)
                p.sub_(0.02 * u @ v)
            else:
                p.sub_(0.1 * p.grad)


m = net()
t = trainer(m, optimizer=Muon(m.parameters(), 0.1))
fit(t)


# %% rows_reset_where_dead: SAME
class Counting(Adam):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["quiet"] = state.get("quiet", torch.zeros_like(p)) + (p.grad.abs() < 1e-3)


class Revives(Callback):
    def on_step_end(self, fit, step):
        with torch.no_grad():
            for p in fit.model.parameters():
                quiet = fit.optimizer.state[p]["quiet"]
                p.add_((quiet > 4).float(), alpha=0.05)
                quiet[quiet > 4] = 0


m = net()
t = trainer(m, optimizer=Counting(m.parameters(), 0.01), callbacks=[Revives()])
fit(t)


# %% counts_in_its_groups: SAME together
class Slowing(torch.optim.Optimizer):
    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["count"] += 1
            for parameter in group["params"]:
                parameter.add_(parameter.grad, alpha=-group["lr"] / group["count"])


m = normed()
t = trainer(m, optimizer=Slowing(m.parameters()))
fit(t, epochs=EPOCHS // 2)
result = [group["count"] for group in t.run.optimizer.param_groups]
fit(t)


# %% keep_their_steps_otherwise: SAME together
makers = {
    "a": lambda p: Adam(p, lr=0.01, fused=True),
    "b": lambda p: Adam(p, lr=0.01, foreach=True),
    "c": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "d": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.3),
    "e": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "f": lambda p: torch.optim.ASGD(p, lr=0.01, foreach=False),
    "g": lambda p: torch.optim.AdamW(p, torch.tensor(0.01), foreach=False),
}
result = {}
for name, make in makers.items():
    m = normed()
    one = trainer(m, optimizer=make(m.parameters()), directory=DIR and f"{DIR}-{name}")
    fit(one)
    result[name] = one.digest()


# %% a_function_in_an_attribute: SAME
class Chosen(SGD):
    def __init__(self, params, chooses):
        super().__init__(params, lr=0.1)
        self.chooses = chooses

    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            if not self.chooses(p):
                p.grad = None
        super().step()


class Turn(Callback):
    def on_step_end(self, fit, step):
        if step.number == 3:
            fit.optimizer.chooses = lambda p: p.ndim == 2


m = net()
t = trainer(m, optimizer=Chosen(m.parameters(), lambda p: p.ndim == 1), callbacks=[Turn()])
fit(t)


# %% an_inner_optimizer_in_the_runs_state: SAME
class Slow(torch.optim.Optimizer):
    """Looks ahead: an average of the weights that another optimizer leads to."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.param_groups = inner, inner.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        self.inner.step()
        for p in (p for group in self.param_groups for p in group["params"]):
            slow = self.state[p].setdefault("slow", p.clone())
            p.copy_(slow.lerp_(p, 0.5))


m = net()
inner = Adam(m.parameters(), lr=0.01)
t = trainer(m, optimizer=Slow(inner))
t.run.state["inner"] = inner
fit(t)


# %% state_of_a_hook_in_an_object: SAME everywhere kills crashes
class Kept:
    def __init__(self):
        self.a = [1.0, 0]

    def __call__(self, by=0.99):
        self.a = [self.a[0] * by, self.a[1] + 1]
        return self.a[0] * (1 + 0.1 * (self.a[1] % 7))


kept = Kept()
m = net()
o = SGD(m.parameters(), lr=0.1, momentum=0.9)


def after(optimizer, args, kwargs):
    optimizer.param_groups[0]["lr"] = 0.1 * kept()


o.register_step_post_hook(after)
t = trainer(m, optimizer=o)
fit(t)
result = kept.a


# %% state_of_a_hook_in_a_closure: SAME everywhere kills crashes
m = net()
o = SGD(m.parameters(), lr=0.1, momentum=0.9)


def make():
    n = [1.0]

    def after(optimizer, args, kwargs):
        n[0] *= 0.97
        optimizer.param_groups[0]["lr"] = 0.1 * n[0]

    return after


o.register_step_post_hook(make())
t = trainer(m, optimizer=o)
fit(t)


# %% state_of_a_hook_of_all_optimizers: SAME everywhere kills crashes
from torch.optim.optimizer import register_optimizer_step_post_hook

n = [1.0]


def after(optimizer, args, kwargs):
    n[0] *= 0.97
    optimizer.param_groups[0]["lr"] = 0.1 * n[0]


m = net()
o = SGD(m.parameters(), lr=0.1, momentum=0.9)
handle = register_optimizer_step_post_hook(after)
try:
    t = trainer(m, optimizer=o)
    fit(t)
finally:
    handle.remove()


# %% state_of_a_replaced_step: SAME everywhere kills crashes
n = [1.0]
m = net()
o = SGD(m.parameters(), lr=0.1, momentum=0.9)
first = o.step


def step(closure=None):
    n[0] *= 0.97
    o.param_groups[0]["lr"] = 0.1 * n[0]
    return first(closure)


o.step = step
t = trainer(m, optimizer=o)
fit(t)


# %% state_of_two_hooks_over_two_fits: SAME everywhere kills crashes
n = [1.0]
m = net()
o = SGD(m.parameters(), lr=0.1, momentum=0.9)
o.register_step_pre_hook(lambda o, a, k: o.param_groups[0].__setitem__("lr", 0.1 * n[0]))
o.register_step_post_hook(lambda o, a, k: n.__setitem__(0, n[0] * 0.98))
t = trainer(m, optimizer=o)
fit(t, epochs=2)
n[0] = 2.0
fit(t, epochs=4)
