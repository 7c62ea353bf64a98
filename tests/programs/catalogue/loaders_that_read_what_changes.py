# promises: one-result.9

# %% value_shared_by_multiprocessing: SAME|LOADERS reads
import multiprocessing

level = multiprocessing.Value("d", 1.0)


class Changed(Rows):
    def change(self, row, index):
        return row * level.value


class Raises(Callback):
    def on_step_end(self, fit, step):
        level.value += 0.1


t = trainer(net(), callbacks=[Raises()])
fit(t, Changed())

# %% tensor_shared_by_torch: SAME|LOADERS reads
difficulty = torch.ones(96).share_memory_()


class Changed(Rows):
    def change(self, row, index):
        return row * difficulty[index]


class Raises(Callback):
    def on_step_end(self, fit, step):
        difficulty[step.indices] += 0.1 * step.means["loss"]


t = trainer(net(), callbacks=[Raises()])
fit(t, Changed())


# %% number_set_after_each_step: SAME|LOADERS reads
class Changed(Rows):
    scale = 1.0

    def change(self, row, index):
        return row * self.scale


rows = Changed()


class Raises(Callback):
    def on_step_end(self, fit, step):
        rows.scale = 1.0 + 0.1 * step.number


t = trainer(net(), callbacks=[Raises()])
fit(t, rows)

# %% thresholds_in_a_global_dict: SAME|LOADERS reads
thresholds = {"low": -3.0, "high": 3.0}


class Changed(Rows):
    def change(self, row, index):
        return row.clamp(thresholds["low"], thresholds["high"])


class Tightens(Callback):
    def on_epoch_end(self, fit):
        thresholds["low"] *= 0.7
        thresholds["high"] *= 0.6


t = trainer(net(), callbacks=[Tightens()])
fit(t, Changed())


# %% module_that_collates: SAME|LOADERS reads
class Mixes(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("share", torch.zeros(()))

    def forward(self, items):
        x, y = torch.stack([a for a, _ in items]), torch.stack([b for _, b in items])
        return x.lerp(x.flip(0), self.share.item()), y


mixes = Mixes()


class Raises(Callback):
    def on_epoch_end(self, fit):
        mixes.share += 0.1


t = trainer(net(), callbacks=[Raises()])
fit(t, collate=mixes)


# %% class_method_that_collates: SAME|LOADERS reads
class Collates:
    share = 0.0

    @classmethod
    def mixed(cls, items):
        x, y = torch.stack([a for a, _ in items]), torch.stack([b for _, b in items])
        return x.lerp(x.roll(1, 0), cls.share), y


class Raises(Callback):
    def on_epoch_end(self, fit):
        Collates.share = 0.1 * fit.epoch


t = trainer(net(), callbacks=[Raises()])
fit(t, collate=Collates.mixed)


# %% drawn_anew_by_a_callback: SAME|LOADERS reads
class Changed(Rows):
    angles = torch.zeros(96)

    def change(self, row, index):
        return row.roll(1) * self.angles[index].sin() + row * self.angles[index].cos()


rows = Changed()


class Draws(Callback):
    def on_epoch_end(self, fit):
        rows.angles = torch.rand(96)


t = trainer(net(), callbacks=[Draws()])
fit(t, rows)
