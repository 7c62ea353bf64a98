"""What people mistype, or type from other libraries, is accepted or answered in one sentence."""

import copy
import functools
import inspect

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tests.classified import by_sign, cross_entropy
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import unisono
from unisono.callbacks import BestCheckpoint, EarlyStopping
from unisono.data import digits
from unisono.errors import CallbackError
from unisono.runtime import habits
from unisono.tools.cli import main

DATA = by_sign(64)
LOADER = DataLoader(DATA, 16)
X, Y = DATA.tensors
FIT = {"batch_size": 16, "steps": 2}
REFUSED = (
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    CallbackError,
)


class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 2)


class Forgetful(Net):
    def forward(self, x):
        super().forward(x)


def trainer(loss=cross_entropy, model=None, **options):
    torch.manual_seed(0)
    model = Net() if model is None else model
    trained = model if isinstance(model, nn.Module) else Net()
    optimizer = torch.optim.Adam(trained.parameters(), lr=1e-3)
    return unisono.Trainer(model, optimizer, loss, **{"shards": 2, **options})


def made_with(optimizer):
    return unisono.Trainer(Net(), optimizer, cross_entropy)


def fit(dataset=DATA, *more, loss=cross_entropy, model=None, **options):
    return trainer(loss, model).fit(dataset, *more, **{**FIT, **options})


def evaluate(**options):
    return trainer().evaluate(DATA, batch_size=16, **options)


def predict(dataset=DATA, **options):
    return trainer().predict(dataset, batch_size=4, **options)


def in_fit(name):
    class Looks(unisono.callbacks.Callback):
        def on_begin(self, fit):
            getattr(fit, name)

    trainer(callbacks=[Looks()]).fit(DATA, **FIT)


def command(*arguments):
    done = CliRunner().invoke(main, list(arguments))
    assert done.exit_code == 2, done
    assert done.output.count("\n") == 1, done.output
    raise ValueError(done.output)


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


def clipped(run, step):
    for batch in step.shards:
        step.backward(cross_entropy(run.model, batch))
    nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)


def with_outputs(model, batch):
    outputs = model(batch[0])
    return nn.functional.cross_entropy(outputs, batch[1]), outputs


def forgets_to_return(model, batch):
    cross_entropy(model, batch)


def fails(outputs, targets):
    raise KeyError("no such class")


adam = functools.partial(torch.optim.Adam, lr=1e-3)


def moved(model, batch):
    return nn.functional.cross_entropy(model(batch[0].cuda()), batch[1].cuda())


def backward_in_the_loss(model, batch):
    loss = cross_entropy(model, batch)
    loss.backward()
    return loss


class Stepped(Net):
    def training_step(self, batch, batch_idx):
        return cross_entropy(self, batch)


class Hooked(unisono.callbacks.Callback):
    def on_train_epoch_end(self, trainer, module):
        pass


class Validated(unisono.callbacks.Callback):
    def on_validation(self, fit, result):
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
ANSWERS = [
    (lambda: unisono.load_weights(Net(), "a"), "`path` must come first.*write `load_weights(path"),
    (lambda: unisono.load_weights("a.pt", Net), "but is the class Net.*make one, as `Net()`"),
    (lambda: unisono.load_weights({}, Net()), "`path` must be the name of a file or folder.*dict"),
    (lambda: trainer().save(None), "`path` must be the name of a file.*pass a"),
    (lambda: trainer().save(5), "`path` must be the name of a file.*but is 5: pass a"),
    (lambda: trainer().save("/"), "`path` must name a file.*such as /model.safe"),
    (lambda: trainer(directory=True), 'but is True.*pass a text such as "runs/mnist"'),
    (lambda: trainer(directory=5), "`directory` must be the name of a file or folder.*5: pass a"),
    (lambda: trainer(directory=b"r"), "`directory` must be the.*b'r': pass"),
    (lambda: trainer(directory=""), "`directory` must name a folder, but is empty.*pass `dir"),
    (lambda: trainer(model=Net), "`model` must be a torch.nn.Module.*class Net.*as `Net()`"),
    (lambda: trainer(model=[Net()]), "`model` must be a.*of type list.*`nn.Sequential(*layers)`"),
    (lambda: trainer(model="m.pt"), "is 'm.pt'.*make the model, then `unisono.load_weights` into"),
    (lambda: trainer(model=Net().parameters()), "but is of type generator.*pass the model itself"),
    (lambda: made_with(torch.optim.SGD), "the class SGD.*pass `torch.optim.SGD(model.parameters("),
    (lambda: made_with(adam), "`optimizer` must be a torch.optim.Optimizer.*pass `torch.optim"),
    (lambda: made_with("adam"), "`optimizer` must be a.*pass `torch.optim"),
    (lambda: unisono.Run(Net(), None), "`optimizer` must be a.*pass `torch"),
    (
        lambda: trainer(loss=nn.CrossEntropyLoss),
        "but is the class `nn.CrossEntropyLoss`.*nn.CrossEntropyLoss()(model(batch[0]), batch[1])`",
    ),
    (
        lambda: trainer(loss=nn.CrossEntropyLoss()),
        "is `nn.CrossEntropyLoss`,.*pass `lambda model, batch: criterion(model(batch[0]), batch[1",
    ),
    (lambda: trainer(loss="mse"), "`loss` must be a function of (model, batch).*pass `lambda mode"),
    (lambda: trainer(loss=None), "is of type NoneType"),
    (
        lambda: fit(model=Net().requires_grad_(False)),
        "but all have `requires_grad=False`.*call `requires_grad_(True)` on the layers",
    ),
    (lambda: fit(loss=forgets_to_return), "but returned None.*return the batch's mean loss"),
    (lambda: trainer(precision="16-mixed"), "but is '16-mixed'.*pass `precision=\"fp16\"`"),
    (lambda: trainer(precision=torch.bfloat16), 'is torch.bfloat16: pass `precision="bf16"`'),
    (lambda: trainer(precision=32), '`precision` must be.*`precision="fp32"`'),
    (lambda: trainer(callbacks="tensorboard"), "has 'tensorboard'.*`unisono.callbacks.TensorBoard"),
    (lambda: trainer(callbacks=["wandb"]), "must be a list.*pass `unisono.callbacks.WandB()`"),
    (lambda: trainer(callbacks=print), "`callbacks` must be.*derive from it"),
    (lambda: trainer(callbacks=[EarlyStopping]), "not the class.*pass an instance"),
    (lambda: evaluate(metrics={"top5": fails}), "no such class.*This was in the metric 'top5'."),
    (lambda: evaluate(metrics="accuracy"), "`metrics` must be.*such as `{"),
    (lambda: evaluate(metrics=["f1"]), "`metrics` must be.*such as `{"),
    (lambda: evaluate(model="best.pt"), "but is 'best.pt'.*`unisono.load_weights` into it"),
    (lambda: evaluate(model=Net), "`model` must be a.*as `Net()`"),
    (lambda: predict(forward="logits"), "of (model, batch).*pass `lambda model, batch: …`"),
    (lambda: trainer(schedule="cosine"), "one of torch.optim.lr_scheduler.*`CosineAnnealingLR(op"),
    (lambda: trainer(schedule=StepLR), "`schedule` must be.*pass `Cosine"),
    (lambda: trainer(shards="2"), "`shards` must be a whole number.*pass `shards"),
    (lambda: trainer(shards=0), "`shards` must be at least 1.*pass `shards=1`"),
    (lambda: trainer(seed=None), "`seed` must be a whole number.*pass `seed=1`"),
    (lambda: trainer(device="gpu"), '`device` must be.*write "cuda", or "cpu"'),
    (lambda: trainer(device=0), '`device` must be.*write "cuda:0", or "cpu"'),
    (lambda: trainer(clip_norm="1"), "`clip_norm` must be a number.*pass `clip"),
    (lambda: trainer(directory="d", checkpoint=True), 'a number of steps.*pass `checkpoint="1 ep'),
    (lambda: trainer(checkpoint=5), '`directory` must say where checkpoints.*pass `directory="r'),
    (
        lambda: unisono.Checkpoint(resume="a.ckpt"),
        "`resume` must be one of ('auto', 'never').*call `unisono.load_weights`",
    ),
    (lambda: fit(steps=None), "`epochs` or `steps` must say.*pass `epochs"),
    (lambda: fit(batch_size=None), "how many samples all workers together.*pass `batch_size=64`"),
    (lambda: fit(epochs="3"), "`epochs` must be a whole number.*pass `epochs=1`"),
    (lambda: fit(None), "the dataset must have `__getitem__`.*pass a DataLoader"),
    (lambda: fit([]), "the dataset must have at least one sample.*check its folder"),
    (lambda: fit({"train": DATA}), f'{SAMPLES}.*pass one of them, such as `datasets["train"]`'),
    (lambda: fit("data/"), "must hold samples, but is 'data/'.*such as `ImageFolder('data/')`"),
    (lambda: fit(TensorDataset), "is the class TensorDataset.*make one, such as `TensorDataset(…"),
    (lambda: fit(DataLoader), "but is the class DataLoader.*make one"),
    (lambda: fit(iter(LOADER), batch_size=None), "an iterator over a DataL.*pass the DataLoader"),
    (lambda: fit(validate="test/"), "must hold samples, but is.*make one"),
    (lambda: predict("x.csv"), "the dataset must hold samples, but is 'x.csv'.*make one of it"),
    (lambda: fit(sampler=RandomSampler), "`sampler` must be a.*class Random.*`RandomSampler(data"),
    (
        lambda: fit(batch_size=None, batch_sampler=BatchSampler),
        "`batch_sampler` must be a sampler.*make one, such as `BatchSampler(dataset)`",
    ),
    (lambda: fit(shuffle="yes"), "`shuffle` must be True or False.*is 'yes'.*pass `shuffle=True`"),
    (lambda: fit(drop_last="no"), "`drop_last` must be True or False.*pass"),
    (lambda: unisono.world().size, "`unisono.world()` has no attribute 'size'.*`world_size`?"),
    (lambda: unisono.world().get_rank(), "no attribute.*mean `rank`?"),
    (lambda: unisono.world().is_main, "'is_main'.*it has local_rank, local_world_size, rank, star"),
    (lambda: trainer().save_model("m"), "`Trainer` has no.*save(path)`"),
    (lambda: trainer().directoy, "`Trainer` has no.*mean `directory`?"),
    (lambda: trainer().run.step(), "`Run` has no attribute 'step'.*mean `steps`?"),
    (lambda: own_loop(lambda run, step: step.epochs), "step has no attribute.*mean `epoch`?"),
    (lambda: in_fit("current_epoch"), "`fit` has no attribute.*`fit.epoch`"),
    (lambda: in_fit("end_steps"), "`fit` has no attribute.*mean `end_step`?"),
    (lambda: fit(model=Forgetful()), "The model returns None.*end its `forward` with `return`"),
    (lambda: unisono.launch(None, workers=2), "every worker calls, but is None.*the function itse"),
    (lambda: unisono.split(Net(), "cpu"), 'a list of devices.*such as `["cuda:0", "cuda:1"]`'),
    (lambda: command("new", "train.py", "extra"), "but is 'train.py'.*use `unisono new train.py`"),
    (lambda: command("new", "gann"), "NAME must be a recipe.*did you mean `unisono new gan`?"),
    (lambda: command("rum", "x.py"), "no such command 'rum'.*did you mean 'run'?"),
    (lambda: command("run", "--worker", "2", "x.py"), "option '--worker'.*'--workers-per-gpu'?"),
    (lambda: command("train.py"), "a command must come first.*`unisono run train.py`"),
    (
        lambda: command("run", "--nnodes", "2", "--rendezvous", "host:1", __file__),
        "the number of this host.*add `--node-rank 0` on the first host",
    ),
    (
        lambda: fit(loss=lambda model, batch: cross_entropy(model, batch).detach()),
        "must depend on the model's parameters.*compute it from the model's output",
    ),
    (lambda: fit({"train": DATA, "test": DATA}), "has 'train', 'test'"),
    (lambda: command("where"), "missing argument.*see `unisono where --help`"),
    (lambda: command("report", "a", "b"), "extra argument (b).*unisono report --h"),
    (lambda: fit((X, Y)), f"{SAMPLES} tuple has 2 arrays of 64 rows: pass"),
    (lambda: fit((X.numpy(), Y.numpy())), "pass `TensorDataset(x, y)`"),
    (lambda: fit(X, Y), PAIR),
    (lambda: trainer().evaluate(X, Y), PAIR),
    (lambda: fit(DATA, DATA), "as in `fit(train_set, batch_size=64, epochs=3, val"),
    (lambda: fit(LOADER, LOADER), "to validate on is `v"),
    (lambda: fit(DataFrame()), f"{SAMPLES} DataFrame has columns: pass `TensorD"),
    (lambda: fit({"x": X, "y": Y}), "for i in range(64)]`"),
    (lambda: fit(each for each in DATA), "such as `list(samples)`"),
    (lambda: fit(lambda: iter(DATA)), "but function does not: pass"),
    (swapped, "is of type Adam: the optimizer comes before it, `Trainer(m"),
    (lambda: fit(TensorDataset(X.double(), Y)), f"{STEP_0}.*`.float()` on samples"),
    (lambda: fit(digits(), model=nn.Linear(64, 10)), "begin with `nn.Flatten()`"),
    (lambda: fit(loss=moved), "moves the model and batches .* leave `.cuda()`"),
    (lambda: fit(TensorDataset(X, Y.int())), "in int64: call `.long()`"),
    (lambda: fit(TensorDataset(X, Y[:, None])), "call `.squeeze(1)`"),
    (lambda: fit(TensorDataset(X, Y + 1)), "class numbers from 0, below"),
    (lambda: own_loop(backward_of_the_loss), "not `loss.backward"),
    (lambda: own_loop(clipped), ": pass `clip_norm=` or `clip_value=` to the"),
    (lambda: fit(loss=with_outputs), "return the loss alone, without the outputs"),
    (lambda: fit(loss=backward_in_the_loss), "return the sum of all losses"),
    (lambda: fit(loss=lambda m, b: cross_entropy(m, b).item()), "but returned float: ret"),
    (lambda: trainer(precision="bf16-mixed"), "must be one of ('fp32', 'bf16', 'f"),
    (lambda: trainer(max_epochs=3), "has no argument `max_epochs`: write `trainer"),
    (lambda: trainer(lr=1e-3), "give it to the optimizer, as in `torch.optim.Adam(model"),
    (lambda: trainer(accelerator="gpu"), "leave it out, as each worker has a GPU"),
    (lambda: trainer(devices=2), "start the program with `unisono run -n 2 train.py`"),
    (lambda: fit(callbacks=[]), "write `Trainer(…, callbacks=[…])`"),
    (lambda: fit(validation_data=DATA), "write `trainer.fit(…, validate=test_s"),
    (lambda: fit(num_workers=2), "pass a `DataLoader` as data, such as"),
    (lambda: fit(vaildate=DATA), "no argument `vaildate`: did you mean `valid"),
    (lambda: fit(frobnicate=1), "`frobnicate`: write `fit(train_set, batch_size="),
    (
        lambda: unisono.Trainer(nn.Linear(1, 1)),
        "`Trainer(model, optimizer, loss, shards",
    ),
    (lambda: own_loop(print, max_epochs=1), "write `run.steps(…, epochs=3)`"),
    (lambda: own_loop(print, precision="bf16"), "losses under torch.autocast"),
    (lambda: own_loop(print, output_dir="a"), 'write `Run(…, directory="runs'),
    (lambda: unisono.launch(print, nprocs=2), "write `unisono.launch(main, workers=2)`"),
    (lambda: EarlyStopping(mode="max"), 'write `better="lower"`, or "higher".'),
    (lambda: BestCheckpoint(save_top_k=1), "keeps the best weights alone; the new"),
    (lambda: EarlyStopping("acc"), "EarlyStopping(3, monitor='acc')`, for"),
    (
        lambda: unisono.Schedule(None, interval="step"),
        'Schedule(scheduler, every="step',
    ),
    (
        lambda: trainer(callbacks=Hooked()).fit(DATA, **FIT),
        "Hooked has `on_train_epoch_end`, which is never called: write one of on_begin, ",
    ),
    (
        lambda: trainer(callbacks=Validated()).fit(DATA, **FIT),
        "must be a method of (self, fit, means, seconds), but takes (self, fit, result)",
    ),
    (
        lambda: trainer(callbacks=BestCheckpoint("loss")).fit(DATA, **FIT, validate=DATA),
        'write `BestCheckpoint(monitor="loss", better="higher")`, or "lower".',
    ),
    (lambda: trainer(Stepped().training_step), ": model.training_step(batch, 0)`"),
    (lambda: trainer().test(DATA), "`Trainer` has no attribute 'test': write `tra"),
    (lambda: unisono.seed_everything(0), "call `torch.manual_seed(0)` before"),
    (lambda: unisono.callbacks.ModelCheckpoint(), "which resumes, and `unisono"),
    (lambda: fit(nn.Linear(4, 2), DATA), "the model is `Trainer(model, …)`"),
    (
        lambda: trainer(callbacks=[EarlyStopping(monitor="val_loss")]).fit(
            DATA, **FIT, validate=DATA, validate_every=1
        ),
        "but is 'val_loss': pass `monitor=\"loss\"`",
    ),
]


@pytest.mark.parametrize(("type_it", "answer"), ANSWERS)
def test_what_is_typed_is_answered_with_what_to_write(type_it, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "cuda" in answer and torch.version.cuda:
        pytest.skip("torch for GPUs has words of its own for a machine without one")
    with pytest.raises(REFUSED) as caught:
        type_it()
    said = rest = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    for part in answer.split(".*"):
        assert part in rest, said
        rest = rest.partition(part)[2]
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


def test_a_property_that_fails_keeps_its_own_error():
    @habits.attributes_met("`it`")
    class It:
        value = 1

        @property
        def broken(self):
            return self.value.real.nothing

    with pytest.raises(AttributeError, match="'int' object has no attribute 'nothing'"):
        _ = It().broken
    assert not hasattr(It(), "__array__")
    assert copy.deepcopy(It()).value == 1
