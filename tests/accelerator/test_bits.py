"""Everything that is computed or drawn on the test accelerator is the CPU's, bit for bit."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.usefixtures("accelerator")


class Convolutions(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.3),
            nn.Dropout2d(0.2),
            nn.Flatten(),
            nn.Linear(36, 10),
        )

    def batch(self):
        return torch.randn(6, 1, 8, 8), torch.randint(10, (6,))


class Transformer(nn.Module):
    """Embeddings, attention with a mask and dropout, causal attention without, layer norm."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(20, 16), nn.Embedding(12, 16)
        self.block = nn.TransformerEncoderLayer(
            16, 2, 32, 0.1, batch_first=True, norm_first=True, activation="gelu"
        )
        self.queries = nn.Linear(16, 48)
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, 20, bias=False)

    def forward(self, words):
        samples, length = words.shape
        hidden = self.words(words) + self.places(torch.arange(length, device=words.device))
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=words.device)
        hidden = self.block(hidden, src_mask=mask)
        parts = self.queries(hidden).chunk(3, -1)
        parts = [part.view(samples, length, 2, 8).transpose(1, 2) for part in parts]
        seen = F.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + seen.transpose(1, 2).reshape(samples, length, 16)
        return self.out(self.norm(hidden)).flatten(0, 1)

    def batch(self):
        words = torch.randint(20, (3, 12))
        return words, words.flatten()


class Recurrent(nn.Module):
    def __init__(self, layer=nn.LSTM):
        super().__init__()
        self.layer = layer(5, 8, 2, dropout=0.2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(16, 10)

    def forward(self, inputs):
        return self.out(self.layer(inputs)[0][:, -1])

    def batch(self):
        return torch.randn(4, 6, 5), torch.randint(10, (4,))


class Gated(Recurrent):
    def __init__(self):
        super().__init__(nn.GRU)


class Matrices(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(6, 7, bias=False), nn.ReLU(), nn.Linear(7, 10, bias=False))

    def batch(self):
        return torch.randn(4, 6), torch.randint(10, (4,))


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, lr=0.01, **options)


def trained(
    make, device, make_optimizer=adamw, *, dtype=None, scaled=False, clip=False, checkpointed=False
):
    """Train three steps, and give every loss and tensor at their end."""
    kind = torch.device(device).type
    torch.manual_seed(0)
    model = make().to(device)
    optimizer, scaler = (
        make_optimizer(model.parameters()),
        torch.amp.GradScaler(kind, enabled=scaled),
    )
    batches, found = [model.batch() for _ in range(3)], []
    torch.manual_seed(1)
    for inputs, labels in batches:
        optimizer.zero_grad()
        with torch.autocast(kind, dtype) if dtype else contextlib.nullcontext():
            inputs = inputs.to(device)
            outputs = (
                checkpoint(model, inputs, use_reentrant=False) if checkpointed else model(inputs)
            )
            loss = F.cross_entropy(outputs, labels.to(device))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        if clip:
            found.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.detach())
    states = [value for state in optimizer.state.values() for value in state.values()]
    found += [*model.state_dict().values(), *filter(torch.is_tensor, states)]
    return [tensor.cpu() for tensor in found]


def assert_same_bits(make, *options, **named):
    torch.set_num_threads(1)
    here, there = trained(make, "cpu", *options, **named), trained(make, "sim:1", *options, **named)
    assert len(here) == len(there)
    assert all(torch.equal(a, b) for a, b in zip(here, there, strict=True))


def trains(test):
    """Mark what takes a third of a second, and more where it is the first."""
    return pytest.mark.slow(pytest.mark.usefixtures("optimizers_are_imported")(test))


MODELS = [Convolutions, Transformer, Recurrent, Gated]


@trains
@pytest.mark.parametrize("make", MODELS)
def test_training_gives_the_bits_of_the_cpu(make):
    assert_same_bits(make)


@trains
@pytest.mark.parametrize("make", MODELS)
def test_autocast_gives_the_bits_of_the_cpu(make):
    assert_same_bits(make, dtype=torch.bfloat16)


@trains
@pytest.mark.parametrize("make", [Convolutions, Transformer])
def test_a_gradient_scaler_gives_the_bits_of_the_cpu(make):
    assert_same_bits(make, dtype=torch.float16, scaled=True)


@trains
@pytest.mark.parametrize("make", MODELS)
def test_activation_checkpointing_gives_the_bits_of_the_cpu(make):
    assert_same_bits(make, checkpointed=True)


@trains
def test_clipping_gives_the_bits_of_the_cpu():
    assert_same_bits(Convolutions, clip=True)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
    "sgd_each": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    "adamw_each": lambda p: adamw(p, foreach=False),
    "adamw_foreach": lambda p: adamw(p, foreach=True),
    "adamw_fused": lambda p: adamw(p, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.01),
    "adamax": lambda p: torch.optim.Adamax(p, 0.01),
    "muon": lambda p: torch.optim.Muon(p, 0.01),
    # These round otherwise in groups, which torch chooses on devices.
    "nadam": lambda p: torch.optim.NAdam(p, 0.01, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, 0.01, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.001),
}


@trains
@pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
def test_optimizers_give_the_bits_of_the_cpu(make_optimizer):
    assert_same_bits(Matrices, make_optimizer)


def cast(device):
    numbers = torch.linspace(-1, 1, 36, device=device).view(6, 6)
    half = numbers.bfloat16()
    with torch.autocast(device, torch.bfloat16):
        return [
            numbers @ numbers,
            F.linear(numbers, numbers),
            half.softmax(-1),
            F.layer_norm(half, (6,)),
            F.mse_loss(half, numbers),
            F.cross_entropy(half, torch.arange(6, device=device)),
            torch.cat([half, numbers]),
            torch.fft.fft(half).real,
            F.scaled_dot_product_attention(numbers[None], numbers[None], numbers[None]),
            F.conv1d(numbers[None], numbers[:2, :, None]),
        ]


def test_autocast_chooses_the_types_of_the_cpu():
    for there, here in zip(cast("sim"), cast("cpu"), strict=True):
        assert there.dtype == here.dtype
        assert torch.equal(there.cpu(), here)


# Random numbers

DRAWS = {
    "rand": lambda device: torch.rand(5, device=device),
    "randn": lambda device: torch.randn(5, device=device),
    "many_normal": lambda device: torch.empty(100, device=device).normal_(),
    "randint": lambda device: torch.randint(9, (5,), device=device),
    "randperm": lambda device: torch.randperm(9, device=device),
    "bernoulli": lambda device: torch.full((9,), 0.5, device=device).bernoulli(),
    "multinomial": lambda device: torch.ones(5, device=device).multinomial(3),
    "poisson": lambda device: torch.poisson(torch.full((5,), 0.5, device=device)),
    "dropout": lambda device: F.dropout(torch.ones(50, device=device), 0.37),
    "dropout_in_place": lambda device: F.dropout(torch.ones(50, device=device), 0.37, inplace=True),
    "native_dropout": lambda device: torch.native_dropout(torch.ones(9, device=device), 0.3, True)[
        0
    ],
    "rrelu": lambda device: F.rrelu(-torch.ones(9, device=device), training=True),
    "gumbel": lambda device: F.gumbel_softmax(torch.ones(5, device=device)),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=list(DRAWS))
def test_a_device_draws_what_the_cpu_draws(draw):
    torch.manual_seed(3)
    here = [draw("cpu") for _ in range(3)]
    state = torch.get_rng_state()
    torch.manual_seed(3)
    assert all(torch.equal(draw("sim:2").cpu(), each) for each in here)
    assert torch.equal(torch.sim.get_rng_state(2), state)
    torch.manual_seed(3)
    assert torch.equal(draw("cpu"), here[0]), "it drew from the CPU's generator"


def test_each_device_has_a_generator():
    torch.manual_seed(1)
    first = torch.rand(2, device="sim:1")
    assert torch.equal(torch.rand(2, device="sim:2").cpu(), first.cpu())
    with torch.sim.device(2):
        torch.sim.manual_seed(1)
    assert torch.equal(torch.rand(2, device="sim:2").cpu(), first.cpu())
    assert not torch.equal(torch.rand(2, device="sim:1"), first)


def test_generators_are_seeded_kept_and_put_back():
    generator = torch.Generator("sim:1").manual_seed(5)
    assert generator.device == torch.device("sim:1")
    first, state = torch.rand(3, device="sim:1", generator=generator), generator.get_state()
    second = torch.rand(3, device="sim:1", generator=generator)
    generator.set_state(state)
    assert torch.equal(torch.rand(3, device="sim:1", generator=generator), second)
    assert generator.initial_seed() == 5
    cpu = torch.Generator().manual_seed(5)
    assert torch.equal(torch.rand(3, generator=cpu), first.cpu())
    assert torch.equal(cpu.get_state(), state)
    twin = generator.clone_state()
    drawn = [torch.rand(3, device="sim:1", generator=each) for each in (generator, twin)]
    assert torch.equal(*drawn)


def test_an_offset_counts_what_was_drawn():
    generator = torch.Generator("sim:1").manual_seed(5)
    assert generator.get_offset() == 0
    torch.rand(1000, device="sim:1", generator=generator)
    offset = generator.get_offset()
    assert offset == 1000
    expected = torch.rand(5, device="sim:1", generator=generator)
    other = torch.Generator("sim:2").manual_seed(5)
    other.set_offset(offset)
    assert torch.equal(torch.rand(5, device="sim:2", generator=other).cpu(), expected.cpu())


def test_generators_of_devices_are_forked():
    torch.manual_seed(1)
    with torch.random.fork_rng(range(4), device_type="sim"):
        first = torch.rand(2, device="sim:3")
    assert torch.equal(torch.rand(2, device="sim:3"), first)
