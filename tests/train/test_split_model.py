"""Trainer and Run with a model that is split over several devices."""

import io

import pytest
import torch
import torch.nn.functional as F
from tests.splitting.models import CNN, GPT
from torch import nn
from torch.utils.data import TensorDataset

import unisono
from unisono import callbacks
from unisono.engine.step.transforms import total_norm
from unisono.runtime.device import Device

BATCH_SIZE, SHARDS = 16, 4


pytestmark = pytest.mark.usefixtures("optimizers_are_imported")


def data(model):
    generator = torch.Generator().manual_seed(3)
    batches = [model.batch(generator) for _ in range(9)]
    return TensorDataset(*(torch.cat(each) for each in zip(*batches, strict=True)))


def loss_of(model, batch):
    outputs = model(batch[0])
    loss = F.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())
    return {"loss": loss, "accuracy": (outputs.argmax(-1) == batch[1]).float().mean()}


def trainer_of(make, devices, balance="memory", **options):
    torch.manual_seed(1)
    model = make()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
    where = {"device": devices[0]} if len(devices) == 1 else {}
    if len(devices) > 1:
        unisono.split(model, devices, balance)
    options = {"loss": loss_of, "shards": SHARDS, **where, **options}
    return unisono.Trainer(model, optimizer, **options)


def fitted(make, devices, balance="memory", **options):
    trainer = trainer_of(make, devices, balance, **options)
    samples = data(make)
    trainer.fit(samples, batch_size=BATCH_SIZE, epochs=2, validate=samples)
    found = trainer.evaluate(samples, batch_size=BATCH_SIZE)
    rows = trainer.predict(samples, batch_size=BATCH_SIZE)
    return trainer.digest(), trainer.run.last["means"], found, rows.flatten().tolist()


APART = {0: ["position", "blocks.1", "norm"], 1: ["embedding", "blocks", "head"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_value": 0.01},
        {"precision": "bf16", "clip_norm": 0.1},
        {"precision": "fp16"},
        {"precision": unisono.Precision(exact=False)},
    ],
    ids=str,
)
def test_bits_are_those_of_one_device(accelerator, options):
    expected = fitted(GPT, ["sim:2"], **options)
    assert fitted(GPT, ["sim:0", "sim:1"], **options) == expected
    assert fitted(GPT, ["sim:3", "sim:1"], APART, **options) == expected


def test_norms_have_the_bits_of_one_device(accelerator):
    torch.manual_seed(1)
    dtypes = (torch.float32, torch.float32, torch.bfloat16, torch.float32, torch.float64)
    shapes = ((3, 7), (0, 2), (5,), (64, 64), (9, 9)) * 8
    tensors = [torch.randn(shape).to(dtypes[at % 5]) for at, shape in enumerate(shapes)]
    for kinds in (slice(None), slice(0, None, 5), slice(3, None, 5)):
        some = tensors[kinds]
        expected = torch.nn.utils.get_total_norm([tensor.to("sim:0") for tensor in some])
        spread = [tensor.to(f"sim:{at * at % 3}") for at, tensor in enumerate(some)]
        found = total_norm(spread)
        assert str(found.device) == "sim:0"
        assert found.dtype == expected.dtype
        assert found.item() == expected.item()


@pytest.mark.slow
def test_loops_of_ones_own_bring_targets_to_the_outputs(accelerator):
    def loop(devices):
        torch.manual_seed(1)
        model = GPT()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, foreach=False)
        where = {"device": devices[0]} if len(devices) == 1 else {}
        if len(devices) > 1:
            unisono.split(model, devices)
        run = unisono.Run(model, optimizer, shards=SHARDS, **where)
        for step in run.steps(data(GPT), batch_size=BATCH_SIZE, epochs=1):
            with step:
                for tokens, targets in step.shards:
                    outputs = model(tokens)
                    targets = targets.to(outputs.device)
                    step.backward(F.cross_entropy(outputs.flatten(0, 1), targets.flatten()))
        return {name: value.tolist() for name, value in model.state_dict().items()}

    assert loop(["sim:0", "sim:1"]) == loop(["sim:3"])


@pytest.mark.slow
def test_averages_and_files_of_weights_are_the_same(accelerator, tmp_path):
    found = []
    for devices in (["sim:0"], ["sim:2", "sim:1"]):
        average = callbacks.EMA(0.9)
        trainer = trainer_of(GPT, devices, callbacks=[average])
        trainer.fit(data(GPT), batch_size=BATCH_SIZE, epochs=1)
        averaged = average.model(trainer.run.model)
        means = trainer.evaluate(data(GPT), batch_size=BATCH_SIZE, model=averaged)
        trainer.save(tmp_path / "weights.safetensors", model=averaged)
        file = io.BytesIO()
        torch.save(averaged, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False).eval()
        tokens = data(GPT)[0][0][None].to(devices[0])
        outputs = loaded(tokens)
        found.append((means, (tmp_path / "weights.safetensors").read_bytes(), outputs.tolist()))
        assert str(outputs.device) == devices[-1]
    assert found[0] == found[1]


class Large(nn.Sequential):
    """8 MiB, and 50 with gradients, Adam's state, parts and sums."""

    def __init__(self):
        super().__init__(
            nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.Linear(1024, 1024)
        )

    @staticmethod
    def batch(generator):
        return torch.randn(4, 64, generator=generator), torch.randint(9, (4,), generator=generator)


LIMIT = 40 << 20


def fit_large(accelerator, devices, limit=LIMIT):
    for device in range(4):
        accelerator.limit(device, limit)
    trainer = trainer_of(Large, devices, shards=2)
    trainer.fit(data(Large), batch_size=4, steps=3)
    return trainer.digest()


@pytest.mark.slow
def test_a_model_that_does_not_fit_on_one_device_fits_on_two(accelerator):
    found = fit_large(accelerator, ["sim:0", "sim:1"])
    assert torch.sim.max_memory_allocated(0) + torch.sim.max_memory_allocated(1) > LIMIT
    assert found == fit_large(accelerator, ["cpu"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "words"),
    [(LIMIT, "the memory of sim:1 must hold what the "), (6 << 20, "the move of the model needs")],
)
def test_on_one_device_it_is_told_what_to_do(accelerator, limit, words):
    with pytest.raises(unisono.errors.OutOfMemoryError, match=words) as caught:
        fit_large(accelerator, ["sim:1"], limit)
    assert caught.value.device == "sim:1"
    assert "put parts of the model on several devices (`unisono.split`)" in str(caught.value)


@pytest.mark.slow
def test_of_several_the_full_device_is_named(accelerator):
    trainer = trainer_of(Large, ["sim:0", "sim:1"], {0: ["0"], 1: ["2", "3"]}, shards=2)
    accelerator.limit(1, 20 << 20)
    with pytest.raises(unisono.errors.OutOfMemoryError) as caught:
        trainer.fit(data(Large), batch_size=4, steps=3)
    assert caught.value.device == "sim:1"
    assert 8 << 20 <= caught.value.needed["parameters"] < 9 << 20
    assert "give sim:1 fewer layers (`balance=` of `unisono.split`)" in str(caught.value)


@pytest.mark.slow
def test_a_model_that_the_program_has_moved_is_put_back(accelerator):
    trainer = trainer_of(CNN, ["sim:0", "sim:1"])
    torch.__future__.set_swap_module_params_on_conversion(True)
    trainer.run.model.cpu()
    trainer.fit(data(CNN), batch_size=BATCH_SIZE, steps=2)
    assert {str(p.device) for p in trainer.run.model.parameters()} == {"sim:0", "sim:1"}


def make_optimizer(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_split_model_has_no_other_device(device):
    model = unisono.split(CNN(), ["cpu", "cpu"])
    with pytest.raises(ValueError, match="split model cannot be combined with `device`: it is"):
        unisono.Trainer(model, make_optimizer(model), loss_of, device=device)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, as it is imported
def test_a_split_model_that_is_compiled_is_refused():
    model = unisono.split(CNN(), ["cpu", "cpu"])
    model.compile()
    with pytest.raises(ValueError, match="a split model cannot be combined with a compiled"):
        unisono.Trainer(model, make_optimizer(model), loss_of)


@pytest.mark.slow
def test_casts_do_not_depend_on_the_cut(accelerator):
    def make():
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10))
        model[2].weight = model[1].weight
        return model

    for precision in ("bf16", "fp16"):
        with pytest.raises(ValueError, match="`2` has `weight` in common with `1`: name both for"):
            trainer_of(make, ["sim:0", "sim:1"], {0: ["1"], 1: ["2", "3"]}, precision=precision)
    options = {"precision": "bf16"}
    expected = fitted(make_images(make), ["sim:0"], **options)
    together = {0: ["1", "2"], 1: ["3"]}
    assert fitted(make_images(make), ["sim:0", "sim:1"], together, **options) == expected
    apart = {0: ["1"], 1: ["2", "3"]}
    found = fitted(make_images(make), ["sim:0", "sim:1"], apart)
    assert found == fitted(make_images(make), ["sim:0"])


def make_images(make):
    make.batch = CNN.batch
    return make


def test_the_whole_model_is_to_be_split():
    model = nn.Sequential(unisono.split(CNN(), ["cpu", "cpu"]), nn.Linear(10, 10))
    with pytest.raises(ValueError, match="split as a whole, but only its part `0` is"):
        unisono.Trainer(model, make_optimizer(model), loss_of)


def test_a_model_is_split_before_its_run_is_made(accelerator):
    model = CNN()
    trainer = unisono.Trainer(model, make_optimizer(model), loss_of, device="sim:0")
    unisono.split(model, ["sim:0", "sim:1"])
    with pytest.raises(ValueError, match="must be split before its run or trainer is created"):
        trainer.fit(data(CNN), batch_size=BATCH_SIZE, steps=2)


def test_several_devices_are_told_as_one_where_they_are_alike(accelerator):
    one, two = (Device(*map(torch.device, names)) for names in (["sim:1"], ["sim:1", "sim:3"]))
    assert (one.name, two.name) == ("sim:1", "sim:1, sim:3")
    assert one.facts == two.facts
    assert two.room()[1] == 2 * one.room()[1]
    kept = torch.zeros(1000, device="sim:3")
    assert two.memory()[0] == one.memory()[0] + torch.sim.memory_allocated(3) >= kept.nbytes
    assert torch.sim.current_device() == 1
