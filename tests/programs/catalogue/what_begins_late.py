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
