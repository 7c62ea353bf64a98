"""Sixty calls as people mistype them: each answer is one sentence with the thing and the remedy."""

import copy
import functools

import pytest
import torch
from click.testing import CliRunner
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import unisono
from unisono.callbacks import EarlyStopping
from unisono.runtime.habits import attributes_met
from unisono.tools.cli import main

DATA = TensorDataset(torch.zeros(64, 4), torch.zeros(64, dtype=torch.long))
FIT = {"batch_size": 16, "steps": 1}


def cross_entropy(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


class Forgetful(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)

    def forward(self, x):
        super().forward(x)


class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)


def trainer(loss=cross_entropy, model=None, optimizer=None, **options):
    torch.manual_seed(0)
    model = Net() if model is None else model
    optimizer = optimizer or torch.optim.SGD(Net().parameters(), lr=0.1)
    if isinstance(model, nn.Module):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return unisono.Trainer(model, optimizer, loss, **{"shards": 2, **options})


def made_with(optimizer):
    return unisono.Trainer(Net(), optimizer, cross_entropy)


def fit(dataset=DATA, loss=cross_entropy, model=None, **options):
    return trainer(loss, model).fit(dataset, **{**FIT, **options})


def evaluate(**options):
    return trainer().evaluate(DATA, batch_size=16, **options)


def in_step(name):
    for step in trainer().run.steps(DATA, **FIT):
        getattr(step, name)


def in_fit(name):
    class Looks(unisono.callbacks.Callback):
        def on_begin(self, fit):
            getattr(fit, name)

    fit_with = trainer(callbacks=[Looks()]).fit
    try:
        fit_with(DATA, **FIT)
    except unisono.errors.CallbackError as error:
        raise error.__cause__ from None


def command(*arguments):
    done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code == 2, done
    assert done.output.count("\n") == 1, done.output
    raise ValueError(done.output)


def forgets_to_return(model, batch):
    cross_entropy(model, batch)


def fails(outputs, targets):
    raise KeyError("no such class")


adam = functools.partial(torch.optim.Adam, lr=1e-3)

# What is typed: the thing that the answer names, and the remedy.
CALLS = {
    "load_weights(model, path)": (
        lambda: unisono.load_weights(Net(), "a.safetensors"),
        "`path` must come first and `model` second",
        "write `load_weights(path, model)`",
    ),
    "load_weights(path, Net)": (
        lambda: unisono.load_weights("a.safetensors", Net),
        "`model` must be a torch.nn.Module, but is the class Net",
        "make one, as `Net()`",
    ),
    "load_weights({}, model)": (
        lambda: unisono.load_weights({}, Net()),
        "`path` must be the name of a file or folder, but is of type dict",
        'pass a text such as "runs/mnist"',
    ),
    "save(None)": (lambda: trainer().save(None), "`path` must be the name of a file", "pass a"),
    "save(5)": (lambda: trainer().save(5), "`path` must be the name of a file", "but is 5: pass a"),
    "save(folder)": (lambda: trainer().save("/"), "`path` must name a file", "such as /model.safe"),
    "directory=True": (
        lambda: trainer(directory=True),
        "`directory` must be the name of a file or folder, but is True",
        'pass a text such as "runs/mnist"',
    ),
    "directory=5": (lambda: trainer(directory=5), "`directory` must be the", "but is 5: pass a"),
    "directory=b'run'": (lambda: trainer(directory=b"r"), "`directory` must be the", "b'r': pass"),
    "directory=''": (lambda: trainer(directory=""), "`directory` must name a folder", "pass `dir"),
    "Trainer(Net, …)": (
        lambda: trainer(model=Net),
        "`model` must be a torch.nn.Module, but is the class Net",
        "make one, as `Net()`",
    ),
    "Trainer([layer], …)": (
        lambda: trainer(model=[Net()]),
        "`model` must be a torch.nn.Module, but is of type list",
        "`nn.Sequential(*layers)`",
    ),
    "Trainer('m.pt', …)": (
        lambda: trainer(model="m.pt"),
        "`model` must be a torch.nn.Module, but is 'm.pt'",
        "make the model, then `unisono.load_weights` into it",
    ),
    "Trainer(model.parameters(), …)": (
        lambda: trainer(model=Net().parameters()),
        "`model` must be a torch.nn.Module, but is of type generator",
        "pass the model itself",
    ),
    "optimizer=SGD": (
        lambda: made_with(torch.optim.SGD),
        "`optimizer` must be a torch.optim.Optimizer, but is the class SGD",
        "pass `torch.optim.SGD(model.parameters())`",
    ),
    "optimizer=partial": (lambda: made_with(adam), "`optimizer` must be a", "pass `torch.optim"),
    "optimizer='adam'": (lambda: made_with("adam"), "`optimizer` must be a", "pass `torch.optim"),
    "optimizer=None": (lambda: unisono.Run(Net(), None), "`optimizer` must be a", "pass `torch"),
    "loss=CrossEntropyLoss": (
        lambda: trainer(loss=nn.CrossEntropyLoss),
        "`loss` must be a function of (model, batch), but is the class `nn.CrossEntropyLoss`",
        "nn.CrossEntropyLoss()(model(batch[0]), batch[1])`",
    ),
    "loss=CrossEntropyLoss()": (
        lambda: trainer(loss=nn.CrossEntropyLoss()),
        "`loss` must be a function of (model, batch)",
        "pass `lambda model, batch: criterion(model(batch[0]), batch[1])`",
    ),
    "loss='mse'": (lambda: trainer(loss="mse"), "`loss` must be a function", "pass `lambda model"),
    "a frozen model": (
        lambda: fit(model=Net().requires_grad_(False)),
        "the model must have parameters to train, but all have `requires_grad=False`",
        "call `requires_grad_(True)` on the layers",
    ),
    "a forgotten return": (
        lambda: fit(loss=forgets_to_return),
        "a loss function must return a scalar tensor, (sum, weight) or a dict, but returned None",
        "return the batch's mean loss",
    ),
    "loss.item()": (
        lambda: fit(loss=lambda model, batch: cross_entropy(model, batch).item()),
        "a loss function must return a scalar tensor",
        "return the batch's mean loss",
    ),
    "loss.detach()": (
        lambda: fit(loss=lambda model, batch: cross_entropy(model, batch).detach()),
        "the loss must depend on the model's parameters",
        "compute it from the model's output",
    ),
    "precision='16-mixed'": (
        lambda: trainer(precision="16-mixed"),
        "`precision` must be one of ('fp32', 'bf16', 'fp16'), but is '16-mixed'",
        'pass `precision="fp16"`',
    ),
    "precision='bf16-mixed'": (
        lambda: trainer(precision="bf16-mixed"),
        "`precision` must be one of",
        'pass `precision="bf16"`',
    ),
    "precision=torch.bfloat16": (
        lambda: trainer(precision=torch.bfloat16),
        "`precision` must be one of",
        'but is torch.bfloat16: pass `precision="bf16"`',
    ),
    "precision=32": (lambda: trainer(precision=32), "`precision` must be", '`precision="fp32"`'),
    "callbacks='tensorboard'": (
        lambda: trainer(callbacks="tensorboard"),
        "`callbacks` must be a list of `unisono.callbacks.Callback`, but has 'tensorboard'",
        "pass `unisono.callbacks.TensorBoard()`",
    ),
    "callbacks=['wandb']": (
        lambda: trainer(callbacks=["wandb"]),
        "`callbacks` must be a list",
        "pass `unisono.callbacks.WandB()`",
    ),
    "callbacks=print": (lambda: trainer(callbacks=print), "`callbacks` must be", "derive from it"),
    "callbacks=[EarlyStopping]": (
        lambda: trainer(callbacks=[EarlyStopping]),
        "`callbacks` must be a list of `unisono.callbacks.Callback`, not the class",
        "pass an instance",
    ),
    "a metric that fails": (
        lambda: evaluate(metrics={"top5": fails}),
        "no such class",
        "This was in the metric 'top5'.",
    ),
    "metrics='accuracy'": (lambda: evaluate(metrics="accuracy"), "`metrics` must be", "such as `{"),
    "metrics=['accuracy']": (lambda: evaluate(metrics=["f1"]), "`metrics` must be", "such as `{"),
    "evaluate(model=path)": (
        lambda: evaluate(model="best.safetensors"),
        "`model` must be a torch.nn.Module, but is 'best.safetensors'",
        "`unisono.load_weights` into it",
    ),
    "evaluate(model=Net)": (lambda: evaluate(model=Net), "`model` must be a", "as `Net()`"),
    "predict(forward='logits')": (
        lambda: trainer().predict(DATA, batch_size=4, forward="logits"),
        "`forward` must be a function of (model, batch)",
        "pass `lambda model, batch: …`",
    ),
    "schedule='cosine'": (
        lambda: trainer(schedule="cosine"),
        "`schedule` must be one of torch.optim.lr_scheduler",
        "pass `CosineAnnealingLR(optimizer, T_max=30)`",
    ),
    "schedule=StepLR": (lambda: trainer(schedule=StepLR), "`schedule` must be", "pass `Cosine"),
    "shards='2'": (lambda: trainer(shards="2"), "`shards` must be a whole number", "pass `shards"),
    "shards=0": (lambda: trainer(shards=0), "`shards` must be at least 1", "pass `shards=1`"),
    "seed=None": (lambda: trainer(seed=None), "`seed` must be a whole number", "pass `seed=1`"),
    "device='gpu'": (lambda: trainer(device="gpu"), "`device` must be", 'write "cuda", or "cpu"'),
    "device=0": (lambda: trainer(device=0), "`device` must be", 'write "cuda:0", or "cpu"'),
    "clip_norm='1'": (lambda: trainer(clip_norm="1"), "`clip_norm` must be a number", "pass `clip"),
    "checkpoint=True": (
        lambda: trainer(directory="d", checkpoint=True),
        "`checkpoint` must be a number of steps",
        'pass `checkpoint="1 epoch"`',
    ),
    "checkpoint without directory": (
        lambda: trainer(checkpoint=5),
        "`directory` must say where checkpoints go",
        'pass `directory="runs/mnist"`',
    ),
    "resume='a.ckpt'": (
        lambda: unisono.Checkpoint(resume="a.ckpt"),
        "`resume` must be one of ('auto', 'never'), but is 'a.ckpt'",
        "to start from other weights, call `unisono.load_weights`",
    ),
    "fit without epochs": (lambda: fit(steps=None), "`epochs` or `steps` must say", "pass `epochs"),
    "fit without batch_size": (
        lambda: fit(batch_size=None),
        "`batch_size` must say how many samples all workers together take",
        "pass `batch_size=64`",
    ),
    "epochs='3'": (lambda: fit(epochs="3"), "`epochs` must be a whole number", "pass `epochs=1`"),
    "fit(None)": (lambda: fit(None), "the dataset must have `__getitem__`", "pass a DataLoader"),
    "fit([])": (lambda: fit([]), "the dataset must have at least one sample", "check its folder"),
    "fit((x, y))": (
        lambda: fit(DATA.tensors),
        "the dataset must have samples numbered from 0",
        "pass `TensorDataset(x, y)`",
    ),
    "fit({'train': …})": (
        lambda: fit({"train": DATA}),
        "the dataset must have samples numbered from 0",
        'pass one of them, such as `datasets["train"]`',
    ),
    "fit('data/')": (
        lambda: fit("data/"),
        "the dataset must hold samples, but is 'data/'",
        "make one of it, such as `ImageFolder('data/')`",
    ),
    "fit(TensorDataset)": (
        lambda: fit(TensorDataset),
        "the dataset must hold samples, but is the class TensorDataset",
        "make one, such as `TensorDataset(…)`",
    ),
    "fit(DataLoader)": (lambda: fit(DataLoader), "but is the class DataLoader", "make one"),
    "fit(iter(loader))": (
        lambda: fit(iter(DataLoader(DATA, 16)), batch_size=None),
        "the dataset must hold samples, but is an iterator over a DataLoader",
        "pass the DataLoader itself",
    ),
    "validate='test/'": (lambda: fit(validate="test/"), "must hold samples, but is", "make one"),
    "predict('x.csv')": (
        lambda: trainer().predict("x.csv", batch_size=4),
        "the dataset must hold samples, but is 'x.csv'",
        "make one of it",
    ),
    "sampler=RandomSampler": (
        lambda: fit(sampler=RandomSampler),
        "`sampler` must be a sampler, or a function of (epoch, seed), but is the class Random",
        "make one, such as `RandomSampler(dataset)`",
    ),
    "batch_sampler=BatchSampler": (
        lambda: fit(batch_size=None, batch_sampler=BatchSampler),
        "`batch_sampler` must be a sampler",
        "make one, such as `BatchSampler(dataset)`",
    ),
    "shuffle='yes'": (
        lambda: fit(shuffle="yes"),
        "`shuffle` must be True or False (None: yes, unless there is a sampler), but is 'yes'",
        "pass `shuffle=True`",
    ),
    "drop_last='no'": (lambda: fit(drop_last="no"), "`drop_last` must be True or False", "pass"),
    "world().size": (
        lambda: unisono.world().size,
        "`unisono.world()` has no attribute 'size'",
        "did you mean `world_size`?",
    ),
    "world().get_rank()": (lambda: unisono.world().get_rank(), "no attribute", "mean `rank`?"),
    "world().is_main": (
        lambda: unisono.world().is_main,
        "`unisono.world()` has no attribute 'is_main'",
        "it has local_rank, local_world_size, rank, started_by and world_size.",
    ),
    "trainer.save_model()": (lambda: trainer().save_model("m"), "`Trainer` has no", "save(path)`"),
    "trainer.directoy": (lambda: trainer().directoy, "`Trainer` has no", "mean `directory`?"),
    "run.step()": (lambda: trainer().run.step(), "`Run` has no attribute 'step'", "mean `steps`?"),
    "step.epochs": (lambda: in_step("epochs"), "the step has no attribute", "mean `epoch`?"),
    "fit.current_epoch": (lambda: in_fit("current_epoch"), "`fit` has no attribute", "`fit.epoch`"),
    "fit.end_steps": (lambda: in_fit("end_steps"), "`fit` has no attribute", "mean `end_step`?"),
    "forward without return": (
        lambda: fit(model=Forgetful()),
        "The model returns None",
        "end its `forward` with `return`",
    ),
    "launch(main())": (
        lambda: unisono.launch(None, workers=2),
        "`fn` must be a function that every worker calls, but is None",
        "pass the function itself",
    ),
    "split(model, 'cpu')": (
        lambda: unisono.split(nn.Linear(2, 2), "cpu"),
        "`devices` must be a list of devices",
        'such as `["cuda:0", "cuda:1"]`',
    ),
    "run without --node-rank": (
        lambda: command("run", "--nnodes", "2", "--rendezvous", "host:1", __file__),
        "`--node-rank` must be the number of this host",
        "add `--node-rank 0` on the first host",
    ),
    "new train.py extra": (
        lambda: command("new", "train.py", "extra"),
        "NAME must be a recipe where a FILE follows, but is 'train.py'",
        "use `unisono new train.py`",
    ),
    "new gann": (
        lambda: command("new", "gann"),
        "NAME must be a recipe, or a file that ends in .py, but is 'gann'",
        "did you mean `unisono new gan`?",
    ),
    "rum x.py": (lambda: command("rum", "x.py"), "no such command 'rum'", "did you mean 'run'?"),
    "run --worker 2": (
        lambda: command("run", "--worker", "2", __file__),
        "no such option '--worker'",
        "did you mean '--workers-per-gpu'?",
    ),
    "where": (lambda: command("where"), "missing argument", "see `unisono where --help`"),
    "report a b": (lambda: command("report", "a", "b"), "extra argument (b)", "unisono report --h"),
    "train.py": (
        lambda: command("train.py"),
        "a command must come first",
        "`unisono run train.py`",
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_is_answered_with_the_thing_and_the_remedy(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call, thing, remedy = CALLS[name]
    with pytest.raises((TypeError, ValueError, OSError, LookupError, AttributeError)) as caught:
        call()
    said = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert thing in said
    assert remedy in said[said.index(thing) :]


def test_a_property_that_fails_keeps_its_own_error():
    @attributes_met("`it`")
    class It:
        value = 1

        @property
        def broken(self):
            return self.value.real.nothing

    with pytest.raises(AttributeError, match="'int' object has no attribute 'nothing'"):
        _ = It().broken
    assert not hasattr(It(), "__array__")
    assert copy.deepcopy(It()).value == 1


def test_there_are_sixty_of_them():
    assert len(CALLS) >= 60
