# promises: one-result.7

# %% progress_bar_of_a_user: SAME
import io


class Bar(Callback):
    def on_begin(self, fit):
        from tqdm import tqdm

        self.bar = tqdm(total=24, file=io.StringIO())

    def on_step_end(self, fit, step):
        self.bar.update(1)
        self.bar.set_postfix(loss=step.means["loss"])


try:
    import tqdm

    bars = [Bar()]
except ImportError:
    bars = []
t = trainer(net(), callbacks=bars)
fit(t)

# %% seconds_of_each_step: SAME
import time


class Clock(Callback):
    def __init__(self):
        self.begun, self.seconds = None, []

    def on_step_begin(self, fit):
        self.begun = time.perf_counter()

    def on_step_end(self, fit, step):
        self.seconds.append(time.perf_counter() - self.begun)


t = trainer(net(), callbacks=[Clock()])
fit(t)

# %% rows_that_the_leader_writes: SAME
import csv


class Csv(Callback):
    rows = 0

    def on_begin(self, fit):
        if fit.is_leader:
            self.file = open("log.csv", "a")
            self.writer = csv.writer(self.file)

    def on_step_end(self, fit, step):
        if fit.is_leader:
            if not hasattr(self, "writer"):
                self.on_begin(fit)
            self.writer.writerow([step.number, step.means["loss"]])
            self.rows += 1


t = trainer(net(), callbacks=[Csv()])
fit(t)

# %% history_kept_on_rank_0_alone: SAME
history = {"loss": [], "norm": []}


class Keeps(Callback):
    def on_step_end(self, fit, step):
        if unisono.world().rank == 0:
            history["loss"].append(step.means["loss"])
            history["norm"].append(float(fit.model[0].weight.detach().norm()))


t = trainer(net(), callbacks=[Keeps()])
fit(t)

# %% logging_and_a_lock: SAME
import logging
import threading

log = logging.getLogger("mine")
log.addHandler(logging.NullHandler())


class Logs(Callback):
    def __init__(self):
        self.lock, self.lines = threading.Lock(), 0

    def on_step_end(self, fit, step):
        with self.lock:
            self.lines += 1
            log.warning("step %d: %f", step.number, step.means["loss"])


t = trainer(net(), callbacks=[Logs()])
fit(t)

# %% a_thread_that_looks_on: SAME
import threading


class Watch(Callback):
    def __init__(self):
        self.beats = 0

    def on_begin(self, fit):
        self.done = threading.Event()
        self.thread = threading.Thread(target=self.beat, daemon=True)
        self.thread.start()

    def beat(self):
        while not self.done.wait(0.001):
            self.beats += 1

    def on_end(self, fit, summary):
        self.done.set()
        self.thread.join()


t = trainer(net(), callbacks=[Watch()])
fit(t)

# %% last_outputs_and_timings_of_a_model: SAME
import time


class Timed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.seconds, self.last, self.calls = net(), 0.0, None, 0

    def forward(self, x):
        begun = time.perf_counter()
        out = self.net(x)
        self.last, self.seconds = out.detach(), time.perf_counter() - begun
        return out


t = trainer(Timed())
fit(t)

# %% an_open_file_in_a_dataset: SAME
import tempfile

path = tempfile.mkstemp()[1]
open(path, "wb").write(X.numpy().tobytes())


class Stored(Rows):
    file = None

    def change(self, row, index):
        if self.file is None:
            self.file = open(path, "rb")
        self.file.seek(index * 32)
        return torch.frombuffer(bytearray(self.file.read(32)), dtype=torch.float32)


t = trainer(net())
fit(t, Stored())

# %% a_bounded_cache_of_decoded_rows: SAME
import collections


class Cached(Rows):
    def __init__(self):
        self.cache = collections.OrderedDict()

    def change(self, row, index):
        if index in self.cache:
            self.cache.move_to_end(index)
            return self.cache[index]
        self.cache[index] = made = (row * 3).tanh()
        while len(self.cache) > 20:
            self.cache.popitem(last=False)
        return made


t = trainer(net())
fit(t, Cached())

# %% a_set_of_locks_that_never_changes: SAME
import threading


class Guarded(Callback):
    def __init__(self):
        self.locks = {threading.Lock(), threading.Lock()}

    def on_step_end(self, fit, step):
        for lock in self.locks:
            with lock:
                pass


t = trainer(net(), callbacks=Guarded())
fit(t)


# %% a_set_that_a_callback_fills: SAME
class Seen(Callback):
    def __init__(self):
        self.seen = set()

    def on_step_end(self, fit, step):
        self.seen.add(round(step.loss, 1))
        for group in fit.optimizer.param_groups:
            group["lr"] = 0.1 / (1 + len(self.seen))


t = trainer(net(), callbacks=Seen())
fit(t)
