# promises: one-result.8

# %% labels_counted_by_the_loss: REFUSED
seen = {}


def counting(m, b):
    seen["positive"] = int(b[1].sum())
    return loss(m, b)


def weighed(step, gradients):
    for g in gradients.values():
        g.mul_(1 + seen["positive"])


t = trainer(net(), counting, on_gradients=weighed)
fit(t)


# %% sparsity_noted_by_the_model: REFUSED
class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.sparsity = net(), 0.0

    def forward(self, x):
        hidden = self.net[1](self.net[0](x))
        self.sparsity = (hidden == 0).float().mean().item()
        return self.net[2](hidden)


m = Sparse()


def scaled(step, gradients):
    for g in gradients.values():
        g.mul_(m.sparsity)


t = trainer(m, on_gradients=scaled)
fit(t)

# %% norm_noted_by_a_forward_hook: REFUSED
norms = [0.0]
m = net()
m[0].register_forward_hook(lambda layer, given, out: norms.__setitem__(0, given[0].norm().item()))


def damped(step, gradients):
    for g in gradients.values():
        g.div_(norms[0])


t = trainer(m, on_gradients=damped)
fit(t)

# %% accuracies_collected_and_cleared: REFUSED
hits = []


def scored(m, b):
    out = m(b[0])
    hits.append((out.argmax(1) == b[1]).float().mean().item())
    return F.cross_entropy(out, b[1])


def eager(step, gradients):
    for g in gradients.values():
        g.mul_(2 - sum(hits) / len(hits))
    hits.clear()


t = trainer(net(), scored, on_gradients=eager)
fit(t)


# %% gradient_seen_by_a_tensor_hook: REFUSED
class Watched(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.last = net(), torch.zeros(2)

    def forward(self, x):
        out = self.net(x)
        if out.requires_grad:
            out.register_hook(lambda g: setattr(self, "last", g.detach().abs().sum(0)))
        return out


m = Watched()


def balanced(step, gradients):
    gradients["net.2.bias"].mul_(m.last)


t = trainer(m, on_gradients=balanced)
fit(t)

# %% outputs_left_for_plots_alone: SAME
last = {}


def looking(m, b):
    last["out"] = m(b[0])
    return F.cross_entropy(last["out"], b[1])


def clipped(step, gradients):
    for g in gradients.values():
        g.clamp_(-0.1, 0.1)


t = trainer(net(), looking, on_gradients=clipped)
fit(t)
