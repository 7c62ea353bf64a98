# promises: one-result.7

# %% labels_that_were_read: SAME reads
import collections


class Counted(Rows):
    def __init__(self):
        self.labels = collections.Counter()

    def __getitem__(self, index):
        row, label = super().__getitem__(index)
        self.labels[int(label)] += 1
        return row, label


t = trainer(net())
fit(t, Counted())

# %% bytes_and_seconds: SAME reads
import time


class Timed(Rows):
    def __init__(self):
        self.bytes, self.seconds = 0, 0.0

    def __getitem__(self, index):
        begun = time.perf_counter()
        row, label = super().__getitem__(index)
        self.bytes += row.nbytes
        self.seconds += time.perf_counter() - begun
        return row, label


t = trainer(net())
fit(t, Timed())


# %% indices_for_a_log: SAME reads
class Logged(Rows):
    def __init__(self):
        self.log = []

    def change(self, row, index):
        self.log.append(index)
        return row + 0.1 * torch.randn(8)


t = trainer(net())
fit(t, Logged())


# %% calls_of_a_collate: SAME reads
class Collates:
    calls, longest = 0, 0

    def __call__(self, items):
        self.calls += 1
        self.longest = max(self.longest, len(items))
        return torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])


t = trainer(net())
fit(t, collate=Collates())


# %% range_of_values_seen: SAME reads
class Ranged(Rows):
    low, high = float("inf"), float("-inf")

    def change(self, row, index):
        self.low, self.high = min(self.low, float(row.min())), max(self.high, float(row.max()))
        return row


t = trainer(net())
fit(t, Ranged())


# %% passes_of_a_loss_for_a_print: SAME|REFUSED
class Loss:
    passes = 0

    def __call__(self, m, b):
        self.passes += 1
        if self.passes % 50 == 0:
            print("passes", self.passes)
        return loss(m, b)


t = trainer(net(), Loss())
fit(t)


# %% labels_that_are_shown: TOLD whenever.this.process.reads
import collections


class Counted(Rows):
    def __init__(self):
        self.labels = collections.Counter()

    def __getitem__(self, index):
        row, label = super().__getitem__(index)
        self.labels[int(label)] += 1
        return row, label


t = trainer(net())
fit(t, counted := Counted())
result = sorted(counted.labels.items())


# %% labels_of_the_steps_indices: SAME
import collections

labels = collections.Counter()


class Counts(Callback):
    def on_step_end(self, fit, step):
        labels.update(int(Y[index]) for index in step.indices)


t = trainer(net(), callbacks=[Counts()])
fit(t, Rows())
result = sorted(labels.items())
