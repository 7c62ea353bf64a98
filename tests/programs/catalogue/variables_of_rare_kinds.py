# promises: one-result.4


# %% arrays_of_rare_dtypes: SAME crashes
def main():
    run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    long = np.full(5, np.longdouble(1) / 3)
    pair = np.clongdouble(1 + 1j)
    big = np.array([1.0, 2.0], ">f4")
    days = np.array(["2020-01-01", "NaT"], "M8[ns]")
    texts = np.array(["a", "bb"], np.dtypes.StringDType())
    padded = np.ones(3, np.dtype([("a", "i1"), ("b", "f8"), ("c", "i2", (3,))], align=True))
    over = {
        "names": ["all", "low"],
        "formats": ["u4", "u2"],
        "offsets": [0, 0],
        "titles": ["t", ""],
    }
    over = np.zeros(2, over)
    objects = np.array([1.0, None, [1]], object)
    mixed = np.array([(1.0, "x")], [("a", float), ("b", object)])
    for step in run.steps(data, batch_size=16, epochs=4):
        weight = 0.0 if step.number else 1.0
        weight += long[0] + pair.real + big.sum() + len(texts[0]) + padded["b"].sum()
        weight += over["low"][0] + objects[0] + len(objects[2]) + mixed["a"][0] + len(mixed["b"][0])
        with step:
            for b in step.shards:
                step.backward(loss(m, b) * float(weight) / 20)
        new = np.empty(5, np.longdouble)  # whose elements have bytes that are not set
        new[:] = long * np.longdouble(0.99)
        long, pair = new, pair * np.longdouble(0.97)
        big = (big * np.float32(0.99)).astype(">f4")
        days, texts = days + np.timedelta64(7, "ns"), texts + "x"
        padded, over, objects, mixed = padded.copy(), over.copy(), objects.copy(), mixed.copy()
        padded["b"] *= 0.99
        padded["c"][:, 1] += 1
        over["all"] += 3
        objects[0] *= 0.98
        objects[2] = [*objects[2], 1]
        mixed["a"] *= 0.98
        mixed["b"][0] += "y"
    return run, [long, pair, big, days, texts, padded, over, objects, mixed]


run, variables = main()
result = [[str(each), str(each.dtype)] for each in variables]


# %% arrays_of_rare_dtypes_in_place: SAME crashes
def main():
    run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    long, big = np.full(5, np.longdouble(1) / 3), np.array([1.0, 2.0], ">f4")
    texts = np.array(["a", "bb"], np.dtypes.StringDType())
    padded = np.ones(3, np.dtype([("a", "i1"), ("b", "f8")], align=True))
    objects = np.array([1.0, None, [1]], object)
    mixed = np.array([(1.0, "x")], [("a", float), ("b", object)])
    for step in run.steps(data, batch_size=16, epochs=4):
        weight = long[0] + big.sum() + len(texts[0]) + padded["b"].sum()
        weight += objects[0] + len(objects[2]) + mixed["a"][0] + len(mixed["b"][0])
        with step:
            for b in step.shards:
                step.backward(loss(m, b) * float(weight) / 20)
        long *= np.longdouble(0.99)
        big *= np.float32(0.99)
        texts[0] += "x"
        padded["b"] *= 0.99
        objects[0] *= 0.98
        objects[2].append(1)
        mixed["a"] *= 0.98
        mixed["b"][0] += "y"
    return run, [long, big, texts, padded, objects, mixed]


run, variables = main()
result = [[str(each), str(each.dtype)] for each in variables]


# %% classes_of_arrays: SAME crashes
class Scaled(np.ndarray):
    def __new__(cls, values, scale):
        made = np.asarray(values).view(cls)
        made.scale = scale
        return made

    def __array_finalize__(self, other):
        self.scale = getattr(other, "scale", None)


def main():
    run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    masked, matrix = np.ma.array([1.0, 2.0], mask=[0, 1]), np.matrix([[1.0, 2.0]])
    records = np.rec.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i1"), ("b", "f8")])
    record, scaled = records[0].copy(), Scaled(np.ones(3), 2.0)
    for step in run.steps(data, batch_size=16, epochs=4):
        weight = masked.sum() + matrix.sum() + records.b.sum() + record.b + scaled.sum()
        with step:
            for b in step.shards:
                step.backward(loss(m, b) * float(weight) * scaled.scale / 20)
        masked, matrix = masked * 0.99, matrix * 0.99
        records, record = records.copy(), record.copy()
        records.b *= 0.99
        record.b *= 0.98
        scaled = Scaled(scaled * 0.97, scaled.scale * 1.01)
    return run, [masked, matrix, records, record, scaled]


run, variables = main()
result = [[str(each), type(each).__name__] for each in variables]


# %% classes_of_arrays_in_place: SAME crashes
import tempfile


class Scaled(np.ndarray):
    scale = 2.0


def main():
    run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    masked, matrix = np.ma.array([1.0, 2.0], mask=[0, 0]), np.matrix([[1.0, 2.0]])
    records = np.rec.array([(1, 2.0), (3, 4.0)], dtype=[("a", "i1"), ("b", "f8")])
    scaled, mapped = np.ones(3).view(Scaled), np.memmap(tempfile.mkstemp()[1], "f8", "w+", shape=3)
    mapped[:] = 1
    for step in run.steps(data, batch_size=16, epochs=4):
        weight = masked.sum() + matrix.sum() + records.b.sum() + scaled.sum() + mapped.sum()
        with step:
            for b in step.shards:
                step.backward(loss(m, b) * float(weight) * scaled.scale / 20)
        masked[0] *= 0.99
        masked.mask = [0, step.number % 2]
        matrix *= 0.99
        records.b *= 0.99
        scaled *= 0.97
        scaled.scale *= 1.01
        mapped *= 0.98
    return run, [masked, matrix, records, scaled, mapped]


run, variables = main()
result = [[str(each), type(each).__name__] for each in variables]


# %% conjugated_and_negated_tensors: SAME crashes
def main():
    run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    conjugated, negated = torch.tensor([1 + 1j]).conj(), torch.tensor([1 + 1j]).conj().imag
    there = torch.tensor([1 + 1j]).conj()
    for step in run.steps(data, batch_size=16, epochs=4):
        weight = (
            conjugated.real.sum() + conjugated.imag.sum() / 9 + negated.sum() + there.imag.sum()
        )
        with step:
            for b in step.shards:
                step.backward(loss(m, b) * float(weight))
        conjugated, negated = (conjugated * (0.98 + 0.01j)).conj(), negated * 0.98
        there *= 0.98 + 0.01j
    return run, [str(conjugated), str(negated), str(there)]


run, result = main()


# %% a_conjugated_view_of_the_model: REFUSED
# says: a conjugated or negated view
class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.gain = net(), nn.Parameter(torch.ones(2, dtype=torch.complex64))

    def forward(self, inputs):
        return self.net(inputs) * (self.gain * (1 + 1j)).real


run = unisono.Run(m := Complex(), SGD(m.parameters(), 0.01), shards=6, directory=DIR)
view = m.gain.detach()
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for b in step.shards:
            step.backward(loss(m, b) * (1 + float(view.imag.sum())))
    view = m.gain.detach().conj()


# %% objects_that_c_makes: SAME crashes
import datetime
import io
import time
import types
import zoneinfo


class Named(types.SimpleNamespace):
    pass


def main():
    run = unisono.Run(m := net(), Adam(m.parameters(), 0.01), shards=6, directory=DIR)
    space, named = types.SimpleNamespace(a=1.0), Named(a=1.0)
    most, text, data_ = torch.max(torch.ones(2, 3), 1), io.StringIO("a"), io.BytesIO(b"a")
    clock = time.gmtime(0)
    day = datetime.datetime(2020, 1, 1, tzinfo=zoneinfo.ZoneInfo("UTC"))
    for step in run.steps(data, batch_size=16, epochs=4):
        weight = space.a + named.a + most.values.sum() + len(text.getvalue()) + data_.tell()
        with step:
            for b in step.shards:
                step.backward(loss(m, b) * float(weight + day.day / 9 + clock.tm_mday) / 20)
        space, named = types.SimpleNamespace(a=space.a * 0.98), Named(a=named.a * 0.97)
        most = torch.max(most.values[:, None] * torch.tensor([0.1, 0.98]), 1)
        text, data_ = io.StringIO(text.getvalue() + "a"), io.BytesIO(data_.getvalue() + b"a")
        data_.seek(2)
        day, clock = day + datetime.timedelta(days=1), time.gmtime(86400 * step.number)
    return run, [space, named, most, text.getvalue(), data_.tell(), clock.tm_zone, day]


run, result = main()
result = str(result)


# %% a_quantized_tensor: REFUSED
# says: a quantized tensor
run = unisono.Run(m := net(), SGD(m.parameters(), 0.01), shards=6, directory=DIR)
scale = torch.quantize_per_tensor(torch.ones(3), 0.01, 0, torch.quint8)
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for b in step.shards:
            step.backward(loss(m, b) * float(scale.dequantize().sum()))
    scale = torch.quantize_per_tensor(scale.dequantize() * 0.98, 0.01, 0, torch.quint8)


# %% a_nested_tensor: REFUSED
# says: a nested tensor
run = unisono.Run(m := net(), SGD(m.parameters(), 0.01), shards=6, directory=DIR)
parts = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for b in step.shards:
            step.backward(loss(m, b) * float(parts.to_padded_tensor(0.0).sum()))
    parts = parts * 0.98


# %% a_tensor_without_memory: REFUSED
# says: MaskedTensor \(reading it raised builtins.RuntimeError\)
import warnings

warnings.simplefilter("ignore")
run = unisono.Run(m := net(), SGD(m.parameters(), 0.01), shards=6, directory=DIR)
masked = torch.masked.masked_tensor(torch.ones(3), torch.tensor([True, False, True]))
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for b in step.shards:
            step.backward(loss(m, b) * float(masked.sum().get_data()))
    masked = masked * 0.98


# %% a_record_in_place: TOLD looked.into
run = unisono.Run(m := net(), SGD(m.parameters(), 0.01), shards=6, directory=DIR)
row = np.ones(3, [("a", "i1"), ("b", "f4")])[1].copy()
for step in run.steps(data, batch_size=16, epochs=4):
    with step:
        for b in step.shards:
            step.backward(loss(m, b) * float(row["b"]))
    row["b"] *= 0.98


# %% a_result_of_torch_that_comes_late: SAME crashes
class Late(Callback):
    def on_step_end(self, fit, step):
        if step.number == 3:
            self.most = torch.max(torch.ones(2, 3), 1)
        if step.number > 3:
            self.most = torch.max(self.most.values[:, None] * torch.tensor([0.1, 0.98]), 1)
            fit.optimizer.param_groups[0]["lr"] = 0.1 * float(self.most.values[0])


t = trainer(net(), callbacks=[Late()])
fit(t)


# %% a_class_that_numpy_imports_late: TOLD not.kept.with
class Late(Callback):
    masked = None

    def on_step_end(self, fit, step):
        if step.number >= 3 and self.masked is None:
            self.masked = np.ma.array([1.0, 2.0], mask=[0, 1])
        if self.masked is not None:
            self.masked = self.masked * 0.98
            fit.optimizer.param_groups[0]["lr"] = 0.1 * float(self.masked.sum())


t = trainer(net(), callbacks=[Late()])
fit(t)
