# promises: one-result.4

# %% error_feedback_of_sign_sgd: SAME
rest = {}


def compressed(step, gradients):
    for name, g in gradients.items():
        g.add_(rest.get(name, 0))
        sent = g.sign() * g.abs().mean()
        rest[name] = g - sent
        g.copy_(sent)


t = trainer(net(), on_gradients=compressed)
fit(t)


# %% largest_norm_so_far_of_an_object: SAME
class Limit:
    def __init__(self):
        self.largest = 0.0

    def __call__(self, step, gradients):
        norm = sum(g.square().sum() for g in gradients.values()).sqrt().item()
        self.largest = max(0.98 * self.largest, norm)
        for g in gradients.values():
            g.div_(self.largest)


t = trainer(net(), on_gradients=Limit())
fit(t)

# %% mask_drawn_once: SAME
masks = {}


def sparse(step, gradients):
    for name, g in gradients.items():
        if name not in masks:
            masks[name] = (torch.rand(g.shape) > 0.5).float()
        g.mul_(masks[name])


t = trainer(net(), on_gradients=sparse)
fit(t)

# %% momentum_that_is_reset_now_and_then: SAME
import functools


def pushed(step, gradients, memory):
    memory["since"] = memory.get("since", 0) + 1
    if memory["since"] == 7:
        memory.clear()
    for name, g in gradients.items():
        memory[name] = g + 0.5 * memory.get(name, torch.zeros_like(g))
        g.copy_(memory[name])


t = trainer(net(), on_gradients=functools.partial(pushed, memory={}))
fit(t)


# %% module_with_a_buffer: SAME
class Meter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("square", torch.ones(()))

    def forward(self, step, gradients):
        for g in gradients.values():
            self.square.lerp_(g.square().mean(), 0.3)
            g.div_(self.square.sqrt() + 0.1)


t = trainer(net(), on_gradients=Meter())
fit(t)

# %% deque_of_gradients: SAME
import collections

last = collections.deque(maxlen=3)


def smoothed(step, gradients):
    last.append({name: g.clone() for name, g in gradients.items()})
    return {name: sum(one[name] for one in last) / len(last) for name in gradients}


t = trainer(net(), on_gradients=smoothed)
fit(t)


# %% counter_behind_nonlocal: SAME
def alternating():
    calls = 0

    def on_gradients(step, gradients):
        nonlocal calls
        calls += 1
        for at, g in enumerate(gradients.values()):
            g.mul_(1.0 if at % 3 == calls % 3 else 0.1)

    return on_gradients


run = unisono.Run(
    m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR, on_gradients=alternating()
)
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch))


# %% scaled_by_step_and_epoch: SAME kills
def by_hook(step, gradients):
    now = unisono.progress()
    assert now.shard is None
    for gradient in gradients.values():
        gradient.mul_(1 + (now.step + now.epoch + now.batch) / 9)


t = trainer(normed(), on_gradients=by_hook)
fit(t)
