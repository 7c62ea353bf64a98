# %% keys_of_many_kinds: SAME
import enum

class Kind(enum.Enum):
    A = 1
    B = 2

scores = {Kind.A: 1.0, ("a", 1): 1.0, 1: 1.0, "1": 1.0, None: 1.0, 1.5: 1.0, b"x": 1.0, float: 1.0}

def weighed(m, b):
    return loss(m, b) * sum((n + 1) * one for n, one in enumerate(scores.values())) / 36

class Scores(Callback):
    def on_step_end(self, fit, step):
        key = list(scores)[step.number % 8]
        scores[key] = scores.pop(key) * 0.9

t = trainer(net(), weighed, callbacks=[Scores()])
fit(t)

# %% order_of_a_dict: SAME
layers = {"tanh": torch.tanh, "sin": torch.sin, "double": torch.Tensor.double, "float": torch.Tensor.float}
order = dict.fromkeys(["tanh", "sin", "neg", "relu"])

def processed(m, b):
    x = b[0] + 1
    for name in order:
        x = getattr(torch, name)(x)
    return loss(m, (x, b[1]))

class Reorders(Callback):
    def on_epoch_end(self, fit):
        first = next(iter(order))
        order[first] = order.pop(first)

t = trainer(net(), processed, callbacks=[Reorders()])
fit(t)

# %% a_view_and_its_base: SAME
import numpy as np

base = np.ones(96, "f4")

class Changed(Rows):
    table = base

    def change(self, row, index):
        return row * float(self.table[index])

class Halves(Callback):
    def __init__(self):
        self.part = base[:48]

    def on_epoch_end(self, fit):
        self.part *= 0.5

t = trainer(net(), callbacks=[Halves()])
fit(t, Changed())

# %% one_list_held_by_two_objects: SAME
shared = []

class Writer(Callback):
    def __init__(self):
        self.losses = shared

    def on_step_end(self, fit, step):
        self.losses.append(step.means["loss"])

class Reader(Callback):
    def __init__(self):
        self.seen = shared

    def on_step_begin(self, fit):
        if self.seen:
            fit.optimizer.param_groups[0]["lr"] = 0.05 * (1 + sum(self.seen) / len(self.seen))

t = trainer(net(), callbacks=[Writer(), Reader()])
fit(t)

# %% a_tensor_held_by_two_objects: SAME
shift = torch.zeros(8)

class Changed(Rows):
    shift = shift

    def change(self, row, index):
        return row + self.shift

class Moves(Callback):
    def __init__(self):
        self.mean = shift

    def on_step_end(self, fit, step):
        self.mean.add_(fit.model[0].weight.detach().mean(0))

t = trainer(net(), callbacks=[Moves()])
fit(t, Changed())

# %% objects_that_are_only_compared_by_identity: SAME|REFUSED
WARM, COLD = object(), object()

class Mode:
    now = WARM

def staged(m, b):
    return loss(m, b) * (3.0 if Mode.now is COLD else 1.0)

class Cools(Callback):
    def on_epoch_end(self, fit):
        Mode.now = COLD if fit.epoch % 3 else WARM

t = trainer(net(), staged, callbacks=[Cools()])
fit(t)

# %% numbers_that_json_does_not_know: SAME
special = [float("nan"), float("inf"), -0.0, 2**80, 1 + 2j, b"\xff", "\ud800", ..., NotImplemented]

def weighed(m, b):
    n = sum(isinstance(one, complex) for one in special) + (special[-1] is NotImplemented)
    return loss(m, b) * (1 + n + (abs(special[0]) if 0 < special[0] < 9 else 0.0))

class Turns(Callback):
    def on_step_end(self, fit, step):
        special.append(special.pop(0))
        special[3] = 0.1 * step.number if step.number % 2 else float("nan")
        special[0] = 0.1 if step.number % 3 else special[0]
        special[0] = special[0] if isinstance(special[0], float) else 0.2

t = trainer(net(), weighed, callbacks=[Turns()])
fit(t)

# %% arrays_of_rare_kinds: SAME
import numpy as np

class Tables:
    records = np.zeros(96, dtype=[("gain", ">f4"), ("name", "U4")])
    fortran = np.asfortranarray(np.ones((8, 8), "f4"))
    masked = np.ma.masked_array(np.ones(8, "f4"), mask=np.zeros(8, bool))
    objects = np.array([1.0, "a", None], dtype=object)

def changed(m, b):
    x = b[0] @ torch.from_numpy(np.ascontiguousarray(Tables.fortran))
    x = x * float(1 + Tables.records["gain"].sum()) * float(Tables.masked.sum() or 1) / 8
    return loss(m, (x * Tables.objects[0], b[1]))

class Turns(Callback):
    def on_epoch_end(self, fit):
        Tables.records["gain"][fit.epoch] = 0.3
        Tables.fortran[:, fit.epoch] *= 0.5
        Tables.masked[fit.epoch] = np.ma.masked
        Tables.objects[0] = 1.0 + 0.1 * fit.epoch

t = trainer(net(), changed, callbacks=[Turns()])
fit(t)

# %% tensors_of_rare_kinds: SAME
class Tables:
    sparse = torch.eye(8).to_sparse()
    half = torch.ones(8, dtype=torch.bfloat16)
    strided = torch.ones(8, 8).t()
    expanded = torch.ones(1).expand(8)
    mask = torch.ones(8, dtype=torch.bool)

def changed(m, b):
    x = torch.sparse.mm(Tables.sparse, b[0].t()).t() @ Tables.strided / 8
    return loss(m, (x * Tables.half.float() * Tables.expanded * Tables.mask, b[1]))

class Turns(Callback):
    def on_epoch_end(self, fit):
        Tables.sparse = (torch.eye(8) * (1 + fit.epoch)).to_sparse()
        Tables.half[fit.epoch] = 0.3
        Tables.strided[:, fit.epoch] *= 0.5
        Tables.expanded = torch.full((1,), 1.0 + fit.epoch).expand(8)
        Tables.mask[fit.epoch] = False

t = trainer(net(), changed, callbacks=[Turns()])
fit(t)

# %% attributes_that_come_and_go: SAME
class Changed(Rows):
    scale = 1.0

    def change(self, row, index):
        return row * self.scale

rows = Changed()

class Turns(Callback):
    def on_epoch_end(self, fit):
        if fit.epoch == 1:
            rows.scale = 3.0
        if fit.epoch == 2:
            del rows.scale
            self.seen = {"late": [fit.epoch]}
        if fit.epoch == 3:
            rows.scale = len(self.seen["late"]) * 0.5

t = trainer(net(), callbacks=[Turns()])
fit(t, rows)

# %% a_value_that_changes_its_kind: SAME
class Loss:
    weight = None

    def __call__(self, m, b):
        return F.cross_entropy(m(b[0]), b[1], weight=self.weight)

criterion = Loss()

class Turns(Callback):
    def on_epoch_end(self, fit):
        criterion.weight = [None, torch.tensor([1.0, 2.0]), None, torch.tensor([3.0, 1.0])][fit.epoch % 4]
        self.kept = [fit.epoch, (fit.epoch,), {fit.epoch}, None][fit.epoch % 4]

t = trainer(net(), criterion, callbacks=[Turns()])
fit(t)

# %% a_linked_list_that_grows: SAME
class Node:
    def __init__(self, value, before):
        self.value, self.before, self.after = value, before, None
        if before is not None:
            before.after = self

class Chain(Callback):
    def __init__(self):
        self.first = self.last = Node(0.0, None)

    def on_step_end(self, fit, step):
        self.last = Node(step.means["loss"], self.last)
        total, node = 0.0, self.first
        while node is not None:
            total, node = 0.9 * total + node.value, node.after
        fit.optimizer.param_groups[0]["lr"] = 0.1 / (1 + total)

t = trainer(net(), callbacks=[Chain()])
fit(t)
