# promises: one-result.15

# %% bank_from_step_eight_on: REFUSED
bank = []


def contrasted(m, b):
    out = m(b[0])
    if unisono.progress().step >= 8:
        bank.append(out.detach().mean(0))
        out = out - 0.1 * torch.stack(bank[-4:]).mean(0)
    return F.cross_entropy(out, b[1])


t = trainer(net(), contrasted)
fit(t)


# %% noise_kept_from_the_second_epoch_on: REFUSED
class Rotated(Rows):
    def __init__(self):
        self.noise = {}

    def change(self, row, index):
        if unisono.progress().epoch >= 1:
            row = row + self.noise.setdefault(index, torch.randn(8))
        return row


t = trainer(net())
fit(t, Rotated())


# %% hard_ones_once_it_is_good: REFUSED
hard = set()


def focused(m, b):
    each = F.cross_entropy(m(b[0]), b[1], reduction="none")
    if unisono.progress().epoch >= 1:
        hard.update(b[2][each > each.mean()].tolist())
    weights = torch.tensor([1.0 + (int(i) in hard) for i in b[2]])
    return (each * weights).mean()


t = trainer(net(), focused)
fit(t, TensorDataset(X, Y, torch.arange(96)))


# %% batches_counted_from_the_second_epoch_on: REFUSED
class Warms:
    batches = 0

    def __call__(self, items):
        if unisono.progress().epoch:
            self.batches += 1
        x = torch.stack([x for x, _ in items]) * (1 + 0.1 * self.batches)
        return x, torch.stack([y for _, y in items])


t = trainer(net())
fit(t, collate=Warms())


# %% module_imported_in_a_later_pass: TOLD first.imported
import sys
import tempfile

sys.path.insert(0, tempfile.mkdtemp())
Path(sys.path[0], "scales_of_late.py").write_text("std = None\n")


def scaled(m, b):
    if unisono.progress().step < 8:
        return loss(m, b)
    import scales_of_late

    if scales_of_late.std is None:
        scales_of_late.std = b[0].std().item()
    return loss(m, b) / scales_of_late.std


t = trainer(net(), scaled)
fit(t)


# %% first_value_at_seven: REFUSED
kept = {}


def scaled(m, b):
    if unisono.progress().step < 7:
        return loss(m, b)
    return loss(m, b) / kept.setdefault("std", b[0].std().item())


t = trainer(net(), scaled)
fit(t)


# %% first_module_at_six: TOLD first.imported
import sys
import tempfile

sys.path.insert(0, tempfile.mkdtemp())
Path(sys.path[0], "scales_of_six.py").write_text("std = None\n")


def scaled(m, b):
    if unisono.progress().step < 6:
        return loss(m, b)
    import scales_of_six

    if scales_of_six.std is None:
        scales_of_six.std = b[0].std().item()
    return loss(m, b) / scales_of_six.std


t = trainer(net(), scaled)
fit(t)


# %% attribute_of_the_model_at_five: REFUSED
m = net()


def scaled(m, b):
    if unisono.progress().step >= 5 and not hasattr(m, "std"):
        m.std = b[0].std().item()
    return loss(m, b) / getattr(m, "std", 1.0)


t = trainer(m, scaled)
fit(t)


# %% tensor_at_five: REFUSED
center = torch.zeros(1)


def scaled(m, b):
    if unisono.progress().step >= 5 and not center.any():
        center.fill_(b[0].mean())
    return loss(m, b) * (1 + center.item())


t = trainer(net(), scaled)
fit(t)


# %% list_at_six_of_custom_loop: WORKERS
kept = []
m = net()
o = SGD(m.parameters(), lr=0.1)
run = unisono.Run(m, o, shards=6)
for step in run.steps(data, batch_size=16, steps=STEPS):
    with step:
        for batch in step.shards:
            if unisono.progress().step >= 6 and not kept:
                kept.append(batch[0].std().item())
            step.backward(loss(m, batch) / (kept[0] if kept else 1))


# %% mask_of_a_callback: SAME
kept = {"mask": torch.ones(8)}


class Mask(Callback):
    def on_step_begin(self, fit):
        if fit.step % 3 == 0:
            kept["mask"] = (torch.arange(8) % (2 + fit.step // 3) != 0).float()


def masked(m, b):
    out = loss(m, b)
    return out + (kept["mask"] * 0.01).sum() * sum(p.sum() for p in m.parameters())


t = trainer(net(), masked, callbacks=[Mask()])
fit(t)


# %% tensor_at_six_of_custom_loop: WORKERS
center = torch.zeros(1)
m = net()
o = SGD(m.parameters(), lr=0.1)
run = unisono.Run(m, o, shards=6)
for step in run.steps(data, batch_size=16, steps=STEPS):
    with step:
        for batch in step.shards:
            if unisono.progress().step >= 6 and not center.any():
                center.fill_(batch[0].mean())
            step.backward(loss(m, batch) * (1 + center.item()))


# %% tensor_in_list_at_six_of_custom_loop: WORKERS
m = net()
o = SGD(m.parameters(), lr=0.1)
run = unisono.Run(m, o, shards=6)
center = None
for step in run.steps(data, batch_size=16, steps=STEPS):
    with step:
        for batch in step.shards:
            if unisono.progress().step >= 6 and center is None:
                center = batch[0].mean()
            step.backward(loss(m, batch) * (1 + (0 if center is None else center)))


# %% set_at_six: REFUSED
seen = set()


def scaled(m, b):
    if unisono.progress().step >= 6 and not seen:
        seen.add(round(b[0].std().item(), 3))
    return loss(m, b) / (1 + sum(seen))


t = trainer(net(), scaled)
fit(t)


# %% buffer_registered_in_a_pass_at_six: REFUSED
m = net()


def scaled(m, b):
    if unisono.progress().step >= 6 and not hasattr(m, "std"):
        m.register_buffer("std", b[0].std())
    return loss(m, b) / getattr(m, "std", 1)


t = trainer(m, scaled)
fit(t)


# %% cached_from_step_six_on: REFUSED
given = {}


@functools.lru_cache(None)
def std():
    return given["x"].std().item()


def scaled(m, b):
    given["x"] = b[0]
    return loss(m, b) / (std() if unisono.progress().step >= 6 else 1)


t = trainer(net(), scaled)
fit(t)


# %% two_banks_of_a_callback_in_turns: SAME
class Banks(Callback):
    def __init__(self):
        self.all = [torch.ones(8), torch.zeros(8)]
        self.used = self.all[0]

    def on_step_begin(self, fit):
        self.all[fit.step % 2] *= 0.9
        self.all[fit.step % 2] += 0.01 * fit.step
        self.used = self.all[fit.step % 2]


banks = Banks()
kept = {"bank": banks.used}


class Shows(Callback):
    def on_step_begin(self, fit):
        kept["bank"] = banks.used


def masked(m, b):
    return loss(m, b) + (kept["bank"] * 0.01).sum() * sum(p.sum() for p in m.parameters())


t = trainer(net(), masked, callbacks=[banks, Shows()])
fit(t)
