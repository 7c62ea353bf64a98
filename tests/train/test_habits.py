"""What people type from other libraries is accepted, or answered with one sentence."""

import inspect

import numpy as np
import pytest
import torch
from tests.classified import by_sign, cross_entropy
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import unisono
from unisono.callbacks import BestCheckpoint, EarlyStopping
from unisono.data import digits
from unisono.errors import CallbackError
from unisono.runtime import habits

DATA = by_sign(64)
X, Y = DATA.tensors
FIT = {"batch_size": 16, "steps": 2}
REFUSED = (
    AssertionError,
    AttributeError,
    IndexError,
    RuntimeError,
    TypeError,
    ValueError,
    CallbackError,
)


def trainer(loss=cross_entropy, model=None, **options):
    torch.manual_seed(0)
    model = model or nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    return unisono.Trainer(model, optimizer, loss, **{"shards": 2, **options})


def fit(dataset=DATA, *more, loss=cross_entropy, model=None, **options):
    return trainer(loss, model).fit(dataset, *more, **{**FIT, **options})


def own_loop(body, **options):
    model = nn.Linear(4, 2)
    run = unisono.Run(model, torch.optim.Adam(model.parameters()), shards=2, **options)
    for step in run.steps(DATA, **FIT):
        with step:
            body(run, step)


def swapped():
    model = nn.Linear(4, 2)
    return unisono.Trainer(model, cross_entropy, torch.optim.Adam(model.parameters()))


def backward_of_the_loss(run, step):
    for batch in step.shards:
        cross_entropy(run.model, batch).backward()


def step_of_the_optimizer(run, step):
    for batch in step.shards:
        run.optimizer.zero_grad()
        step.backward(cross_entropy(run.model, batch))
        run.optimizer.step()


def clipped(run, step):
    for batch in step.shards:
        step.backward(cross_entropy(run.model, batch))
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)


def with_outputs(model, batch):
    outputs = model(batch[0])
    return nn.functional.cross_entropy(outputs, batch[1]), outputs


def moved(model, batch):
    return nn.functional.cross_entropy(model(batch[0].cuda()), batch[1].cuda())


def backward_in_the_loss(model, batch):
    loss = cross_entropy(model, batch)
    loss.backward()
    return loss


class Stepped(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)

    def training_step(self, batch, batch_idx):
        return cross_entropy(self, batch)


class Hooked(unisono.callbacks.Callback):
    def on_train_epoch_end(self, trainer, module):
        pass


class DataFrame:
    """Of pandas, by its name: the package is not needed for this."""

    __module__ = "pandas.core.frame"

    def __len__(self):
        return 64

    def __getitem__(self, column):
        raise KeyError(column)


PAIR = "too many positional arguments; inputs and targets are one dataset, `TensorDataset(x, y)`."
SAMPLES = "must have samples numbered from 0, but"
STEP_0 = "This was in step 0, in the forward pass of shard 0, over samples"

# What is typed, and what must be in the answer: what was seen, and what to write.
ANSWERS = {
    "fit((X, y))": (lambda: fit((X, Y)), f"{SAMPLES} tuple has 2 arrays of 64 rows: pass"),
    "fit(arrays)": (lambda: fit((X.numpy(), Y.numpy())), "pass `TensorDataset(x, y)`"),
    "fit(X, y)": (lambda: fit(X, Y), PAIR),
    "evaluate(X, y)": (lambda: trainer().evaluate(X, Y), PAIR),
    "validation": (lambda: fit(DATA, DATA), "as in `fit(train_set, batch_size=64, epochs=3, val"),
    "loaders": (lambda: fit(DataLoader(DATA, 16), DataLoader(DATA, 16)), "to validate on is `v"),
    "DataFrame": (lambda: fit(DataFrame()), f"{SAMPLES} DataFrame has columns: pass `TensorD"),
    "a dict of arrays": (lambda: fit({"x": X, "y": Y}), "for i in range(64)]`"),
    "a generator": (lambda: fit(each for each in DATA), "such as `list(samples)`"),
    "a generator function": (lambda: fit(lambda: iter(DATA)), "but function does not: pass"),
    "loss, optimizer": (swapped, "is of type Adam: the optimizer comes before it, `Trainer(m"),
    "float64": (lambda: fit(TensorDataset(X.double(), Y)), f"{STEP_0}.*`.float\\(\\)` on samples"),
    "no Flatten": (lambda: fit(digits(), model=nn.Linear(64, 10)), "begin with `nn.Flatten()`"),
    "cuda": (lambda: fit(loss=moved), "moves the model and batches .* leave `.cuda\\(\\)`"),
    "int32 labels": (lambda: fit(TensorDataset(X, Y.int())), "in int64: call `.long\\(\\)`"),
    "labels (n, 1)": (lambda: fit(TensorDataset(X, Y[:, None])), "call `.squeeze\\(1\\)`"),
    "labels from 1": (lambda: fit(TensorDataset(X, Y + 1)), "class numbers from 0, below"),
    "loss.backward()": (lambda: own_loop(backward_of_the_loss), "not `loss.backward"),
    "optimizer.step()": (lambda: own_loop(step_of_the_optimizer), ": leave `optimizer.step()` out"),
    "clip_grad_norm_": (lambda: own_loop(clipped), ": pass `clip_norm=` or `clip_value=` to the"),
    "loss, outputs": (lambda: fit(loss=with_outputs), "return the loss alone, without the outputs"),
    "backward in loss": (lambda: fit(loss=backward_in_the_loss), "return the sum of all losses"),
    "item": (lambda: fit(loss=lambda m, b: cross_entropy(m, b).item()), "but returned float: ret"),
    "criterion": (lambda: fit(loss=nn.CrossEntropyLoss()), "pass `lambda model, batch: criterion"),
    "bf16-mixed": (lambda: trainer(precision="bf16-mixed"), "must be one of ('fp32', 'bf16', 'f"),
    "epochs twice": (lambda: trainer(max_epochs=3), "has no argument `max_epochs`: write `trainer"),
    "lr": (lambda: trainer(lr=1e-3), "give it to the optimizer, as in `torch.optim.Adam(model"),
    "accelerator": (lambda: trainer(accelerator="gpu"), "leave it out, as each worker has a GPU"),
    "devices": (lambda: trainer(devices=2), "start the program with `unisono run -n 2 train.py`"),
    "callbacks of fit": (lambda: fit(callbacks=[]), "write `Trainer(…, callbacks=[…])`"),
    "validation_data": (lambda: fit(validation_data=DATA), "write `trainer.fit(…, validate=test_s"),
    "num_workers": (lambda: fit(num_workers=2), "pass a `DataLoader` as data, such as"),
    "a typing mistake": (lambda: fit(vaildate=DATA), "no argument `vaildate`: did you mean `valid"),
    "nothing known": (lambda: fit(frobnicate=1), "`frobnicate`: write `fit(train_set, batch_size="),
    "no loss": (
        lambda: unisono.Trainer(nn.Linear(1, 1)),
        "`Trainer(model, optimizer, loss, shards",
    ),
    "Run(max_epochs)": (lambda: own_loop(print, max_epochs=1), "write `run.steps(…, epochs=3)`"),
    "Run(precision)": (lambda: own_loop(print, precision="bf16"), "losses under torch.autocast"),
    "Run(output_dir)": (lambda: own_loop(print, output_dir="a"), 'write `Run(…, directory="runs'),
    "nprocs": (lambda: unisono.launch(print, nprocs=2), "write `unisono.launch(main, workers=2)`"),
    "mode": (lambda: EarlyStopping(mode="max"), 'write `better="lower"`, or "higher".'),
    "save_top_k": (lambda: BestCheckpoint(save_top_k=1), "keeps the best weights alone; the new"),
    "EarlyStopping(name)": (lambda: EarlyStopping("acc"), "EarlyStopping(3, monitor='acc')`, for"),
    "interval": (
        lambda: unisono.Schedule(None, interval="step"),
        'Schedule(scheduler, every="step',
    ),
    "on_train_epoch_end": (
        lambda: trainer(callbacks=Hooked()).fit(DATA, **FIT),
        "Hooked has `on_train_epoch_end`, which is never called: write one of on_begin, ",
    ),
    "BestCheckpoint(name)": (
        lambda: trainer(callbacks=BestCheckpoint("loss")).fit(DATA, **FIT, validate=DATA),
        'write `BestCheckpoint(monitor="loss", better="higher")`, or "lower".',
    ),
    "callbacks=EarlyStopping": (lambda: trainer(callbacks=EarlyStopping), "pass an instance"),
    "training_step": (lambda: trainer(Stepped().training_step), ": model.training_step(batch, 0)`"),
    "trainer.test": (lambda: trainer().test(DATA), "`Trainer` has no attribute 'test': write `tra"),
    "seed_everything": (lambda: unisono.seed_everything(0), "call `torch.manual_seed(0)` before"),
    "ModelCheckpoint": (lambda: unisono.callbacks.ModelCheckpoint(), "which resumes, and `unisono"),
    "fit(model, loader)": (lambda: fit(nn.Linear(4, 2), DATA), "the model is `Trainer(model, …)`"),
    "val_loss": (
        lambda: trainer(callbacks=[EarlyStopping(monitor="val_loss")]).fit(
            DATA, **FIT, validate=DATA, validate_every=1
        ),
        "but is 'val_loss': pass `monitor=\"loss\"`",
    ),
}


@pytest.mark.parametrize("typed", ANSWERS)
def test_a_habit_is_answered_with_what_to_write(typed):
    type_it, answer = ANSWERS[typed]
    with pytest.raises(REFUSED) as caught:
        type_it()
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    for part in answer.replace("\\", "").split(".*"):
        assert part in said
    assert len(said.split()) < 75


@pytest.mark.parametrize(
    "type_it",
    [
        lambda: fit([{"x": x, "y": y} for x, y in DATA], loss=lambda m, b: m(b["x"]).mean()),
        lambda: fit([(x, y) for x, y in DATA]),
        lambda: fit([(np.float32(x), int(y)) for x, y in DATA]),
        lambda: fit(drop_last=True),
        lambda: trainer(callbacks=EarlyStopping()).fit(DATA, **FIT, validate=DATA),
        lambda: trainer(schedule=None).predict(X.numpy(), batch_size=16),
        lambda: own_loop(lambda run, step: [
            (run.optimizer.zero_grad(), step.backward(cross_entropy(run.model, batch)))
            for batch in step.shards
        ]),
    ],
)  # fmt: skip
def test_what_has_but_one_meaning_is_accepted(type_it):
    type_it()


def test_a_pair_that_may_be_a_loss_and_an_accuracy_gets_a_line(capsys):
    fit(loss=lambda model, batch: (cross_entropy(model, batch), torch.tensor(0.5)))
    said = capsys.readouterr().out
    assert said.count('here 0.5: if that is an accuracy, return `{"loss": loss, "accura') == 1


def test_no_argument_of_the_table_is_one_of_the_call_that_it_names():
    calls = {"fit": unisono.Trainer.fit, "evaluate": unisono.Trainer.evaluate}
    calls |= {"Trainer": unisono.Trainer, "EarlyStopping": EarlyStopping, "StepLR": StepLR}
    assert len(all_names := " ".join(habits._NAMES.values()).split()) == len({*all_names})
    for remedy, names in habits._INSTEAD.items():
        for name in names.split():
            assert sum(name in others.split() for others in habits._INSTEAD.values()) == 1, name
        for call, function in calls.items():
            shown = remedy.partition(f"{call}(…, ")[2].partition("=")[0]
            assert not shown or shown in inspect.signature(function).parameters, remedy
