# promises: one-result.5

# %% a_hash_of_the_steps_sets_the_rate: TOLD looked.into
import hashlib


class Rate(Callback):
    def __init__(self):
        self.hash = hashlib.sha256()

    def on_step_end(self, fit, step):
        self.hash.update(b"x")
        fit.optimizer.param_groups[0]["lr"] = 0.05 + 0.001 * (self.hash.digest()[0] % 7)


t = trainer(net(), callbacks=[Rate()])
fit(t)


# %% rows_in_a_database_in_memory: TOLD looked.into
import sqlite3


class Counted(Callback):
    def __init__(self):
        self.rows = sqlite3.connect(":memory:")
        self.rows.execute("create table losses (loss)")

    def on_step_end(self, fit, step):
        self.rows.execute("insert into losses values (?)", (step.means["loss"],))
        (mean,) = self.rows.execute("select avg(loss) from losses").fetchone()
        fit.optimizer.param_groups[0]["lr"] = 0.02 + 0.05 * min(mean, 1.0)


t = trainer(net(), callbacks=[Counted()])
fit(t)


# %% a_simple_queue_in_a_loop: TOLD looked.into
import queue

run = unisono.Run(m := net(), SGD(m.parameters(), 0.1), shards=6, directory=DIR)
waiting = queue.SimpleQueue()
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for batch in step.shards:
            step.backward(loss(m, batch))
    waiting.put(step.number)
    if waiting.qsize() % 3 == 0:
        run.optimizer.param_groups[0]["lr"] *= 0.97


# %% an_element_of_xml_that_passes_read: REFUSED
import xml.etree.ElementTree as ET

settings = ET.Element("settings", scale="1.0")


def scaled(m, b):
    return F.cross_entropy(m(b[0]), b[1]) * float(settings.get("scale"))


class Turns(Callback):
    def on_step_end(self, fit, step):
        settings.set("scale", str(1 + 0.01 * step.number))


t = trainer(net(), scaled, callbacks=[Turns()])
fit(t)


# %% an_element_of_xml_in_a_callback: TOLD not.kept
import xml.etree.ElementTree as ET


class Rate(Callback):
    def __init__(self):
        self.settings = ET.Element("settings", steps="0")

    def on_step_end(self, fit, step):
        steps = int(self.settings.get("steps")) + 1
        self.settings.set("steps", str(steps))
        fit.optimizer.param_groups[0]["lr"] = 0.05 / (1 + 0.1 * steps)


t = trainer(net(), callbacks=[Rate()])
fit(t)


# %% a_database_that_a_dataset_reads: SAME reads
import sqlite3


class Stored(Dataset):
    def __init__(self):
        self.rows = sqlite3.connect(":memory:", check_same_thread=False)
        self.rows.execute("create table samples (x, y)")
        self.rows.executemany(
            "insert into samples values (?, ?)", [(n % 7, n % 2) for n in range(96)]
        )

    def __len__(self):
        return 96

    def __getitem__(self, index):
        asked = "select x, y from samples limit 1 offset ?"
        x, y = self.rows.execute(asked, (int(index),)).fetchone()
        return torch.full((8,), 0.1 * x), y


t = trainer(net())
fit(t, Stored())


# %% an_element_of_xml_that_a_dataset_reads: REFUSED reads
import xml.etree.ElementTree as ET


class Scaled(Rows):
    settings = ET.Element("settings", scale="1.0")

    def change(self, row, index):
        return row * float(self.settings.get("scale"))


class Turns(Callback):
    def on_step_end(self, fit, step):
        Scaled.settings.set("scale", str(1 + 0.01 * step.number))


t = trainer(net(), callbacks=[Turns()])
fit(t, Scaled())
