# promises: one-result.8

# %% at_each_epoch: REFUSED
# says: a generator that the dataset has made after its first batch
import random


class Noisy(Rows):
    epoch = -1

    def change(self, row, index):
        if unisono.progress().epoch != self.epoch:
            self.epoch = unisono.progress().epoch
            self.rng = random.Random(self.epoch)
        return row + self.rng.random() * 0.1


t = trainer(net())
fit(t, Noisy())

# %% in_the_second_epoch: REFUSED stop=4
# says: a generator that the dataset has made after its first batch
import numpy as np


class Noisy(Rows):
    rng = None

    def change(self, row, index):
        if unisono.progress().epoch == 0:
            return row
        self.rng = self.rng or np.random.default_rng(0)
        return row + float(self.rng.random()) * 0.1


t = trainer(net())
fit(t, Noisy())

# %% of_each_index: SAME reads
import random


class Noisy(Rows):
    def change(self, row, index):
        self.rng = random.Random(index)
        return row + self.rng.random() * 0.1


t = trainer(net())
fit(t, Noisy())

# %% by_a_callback: SAME reads
import random


class Noisy(Rows):
    rng = random.Random(0)

    def change(self, row, index):
        return row + self.rng.random() * 0.1


rows = Noisy()


class New(Callback):
    def on_epoch_end(self, fit):
        rows.rng = random.Random(fit.epoch)


t = trainer(net(), callbacks=[New()])
fit(t, rows)


# %% when_it_is_first_read: SAME reads
class Noisy(Rows):
    rng = None

    def change(self, row, index):
        if self.rng is None:
            self.rng = torch.Generator().manual_seed(3)
        return row + torch.rand((), generator=self.rng) * 0.1


t = trainer(net())
fit(t, Noisy())

# %% in_a_collate: REFUSED stop=4
# says: a generator that the dataset has made after its first batch
import random


class Collate:
    rng = None

    def __call__(self, samples):
        x, y = (torch.stack([torch.as_tensor(one[at]) for one in samples]) for at in (0, 1))
        if unisono.progress().epoch:
            self.rng = self.rng or random.Random(0)
            x = x + self.rng.random() * 0.1
        return x, y


t = trainer(net())
fit(t, collate=Collate())
