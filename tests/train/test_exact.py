"""On an accelerator a run is exact, or says that it is not; on the CPU nothing changes."""

import contextlib
import os
from pathlib import Path

import pytest
import torch
from tests.once import computed_once
from tests.promises import promise
from torch import nn

import unisono
from unisono.errors import NondeterministicError
from unisono.training.computing import deterministic_kernels
from unisono.training.failing_step import refusals_explained, refused

CUDNN, MEMORY = torch.backends.cudnn, torch.utils.deterministic


def switches():
    return {
        "mode": torch.are_deterministic_algorithms_enabled(),
        "warn only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "compiled": torch._inductor.config.deterministic,
        "fills": MEMORY.fill_uninitialized_memory,
        "tries": CUDNN.benchmark,
        "repeats": CUDNN.deterministic,
    }


EXACT = {
    "mode": True,
    "warn only": False,
    "compiled": True,
    "fills": False,
    "tries": False,
    "repeats": True,
}


@pytest.fixture(autouse=True)
def switches_put_back():
    before = switches()
    yield
    torch.use_deterministic_algorithms(before["mode"], warn_only=before["warn only"])
    torch._inductor.config.deterministic = before["compiled"]
    MEMORY.fill_uninitialized_memory = before["fills"]
    CUDNN.benchmark, CUDNN.deterministic = before["tries"], before["repeats"]


PROGRAMS = {
    "nothing": lambda: None,
    "deterministic": lambda: torch.use_deterministic_algorithms(True),
    "warn only": lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    "unfilled": lambda: setattr(MEMORY, "fill_uninitialized_memory", False),
    "benchmark": lambda: setattr(CUDNN, "benchmark", True),
    "deterministic cuDNN": lambda: setattr(CUDNN, "deterministic", True),
}


@promise("accelerators.1")
@pytest.mark.parametrize("program", PROGRAMS)
def test_switches_are_set_and_put_back_whatever_a_program_has_set(program):
    PROGRAMS[program]()
    before = switches()
    with contextlib.suppress(KeyError), deterministic_kernels(True):
        assert switches() == EXACT
        raise KeyError
    assert switches() == before


HERE = Path(__file__)


class PutBackward(torch.autograd.Function):
    """Refuses its backward pass, as kernels of GPUs do."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        places = torch.arange(gradient.numel(), device=gradient.device)
        return torch.zeros_like(gradient).put_(places, gradient)


class Backward(nn.Module):
    def forward(self, x):
        return PutBackward.apply(x)


class Forward(nn.Module):
    def forward(self, x):
        places = torch.arange(x.numel(), device=x.device)
        return torch.zeros_like(x).put_(places, x)  # line of the forward pass


class Encoder(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.first, self.pool, self.last = nn.Linear(3, 3), pool, nn.Linear(3, 3)

    def forward(self, x):
        return self.last(torch.relu(self.pool(self.first(x))))


class Whole(nn.Module):
    def __init__(self, pool):
        super().__init__()
        self.encoder, self.head = Encoder(pool), nn.Sequential(nn.ReLU(), nn.Linear(3, 1))

    def forward(self, x):
        return self.head(self.encoder(x)).square().mean()


def line_of(comment):
    return next(n for n, text in enumerate(HERE.read_text().splitlines(), 1) if comment in text)


def refused_in(model, compute):
    with deterministic_kernels(True), pytest.raises(RuntimeError) as seen:
        compute(model)
    return refused(seen.value, model)


def of_ones(model):
    return model(torch.ones(2, 3))


def test_module_and_line_are_named():
    error = refused_in(Whole(Forward()), of_ones)
    line = line_of("# line of the forward pass")
    code = HERE.read_text().splitlines()[line - 1].strip()
    assert str(error) == (
        f"every operation must have a deterministic form on this device, but `put_` has none: it "
        f"is called in `encoder.pool` of the model (Forward), "
        f"{HERE.relative_to(Path.cwd())}, line {line}, `{code}`. Compute it by other "
        f"operations, or pass `precision=Precision(exact=False)`, to a `Run` `exact=False`, which "
        f"allows it; results may then differ from one run to the next."
    )
    assert (error.operation, error.module) == ("put_", "encoder.pool")
    assert (error.file, error.line) == (str(HERE), line)


def test_a_module_of_torch_is_named_with_the_line_that_calls_it():
    def compute(model):
        return model(torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2, dtype=torch.int64)).sum()

    class Unpool(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.MaxUnpool2d(2)

        def forward(self, x, indices):
            return self.up(x, indices)  # line of torch's module

    error = refused_in(Unpool(), compute)
    assert error.module == "up"
    assert "called in `up` of the model (MaxUnpool2d)" in str(error)
    assert "Compute it by other operations" in str(error)
    assert error.line == line_of("# line of torch's module")


def test_outside_of_modules_the_function_is_named():
    def compute(model):
        return Forward.forward(None, model[0](torch.ones(2, 3))).sum()  # by the loss function

    error = refused_in(nn.Sequential(nn.Linear(3, 3)), compute)
    assert error.module is None
    assert "a function outside of the model, " in str(error)
    assert error.line == line_of("# line of the forward pass")


def test_other_errors_and_runs_that_are_not_exact_are_left_alone():
    for is_needed, words in ((True, "out of luck"), (False, "put_ does not have a deterministic")):
        error = RuntimeError(f"{words} implementation")
        with pytest.raises(RuntimeError) as seen, refusals_explained(nn.Linear(1, 1), is_needed):
            raise error
        assert seen.value is error


def test_what_cublas_needs_is_told(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":8:8")
    said = (
        "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` "
        "or `at::Context::setDeterministicAlgorithms(true)`, but this operation is not "
        "deterministic because it uses CuBLAS and you have CUDA >= 10.2. To enable deterministic "
        "behavior in this case, you must set an environment variable before running your PyTorch "
        "application: CUBLAS_WORKSPACE_CONFIG=:4096:8 or CUBLAS_WORKSPACE_CONFIG=:16:8."
    )
    with (
        pytest.raises(NondeterministicError, match=r"must be `:4096:8` or .* but is ':8:8': set"),
        refusals_explained(nn.Linear(1, 1), True),
    ):
        raise RuntimeError(said)


DATA = torch.arange(48.0).view(16, 3) / 48


@pytest.fixture(autouse=True)
def passes_are_counted():
    with computed_once():
        yield


class Model(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.first, self.rest = nn.Linear(3, 3), nn.Sequential(*layers)
        self.passes = 0

    def forward(self, x):
        self.passes += 1
        return self.rest(self.first(x))


def make(device, *layers, **options):
    torch.manual_seed(3)
    model = Model(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []

    def loss(model, batch):
        seen.append(switches())
        return model(batch).square().mean()

    options = {"shards": 2, "device": device, **options}
    return unisono.Trainer(model, optimizer, loss, **options), seen


def use(trainer):
    trainer.fit(DATA, batch_size=8, steps=3, validate=DATA)
    trainer.evaluate(DATA, batch_size=8)
    trainer.predict(DATA, batch_size=8)


INEXACT = unisono.Precision(exact=False)


@promise("accelerators.1")
@pytest.mark.parametrize("exact", [True, False])
def test_deterministic_kernels_are_chosen_while_a_run_computes(accelerator, exact):
    torch.backends.cudnn.benchmark = True
    before = switches()
    trainer, seen = make("sim", precision=unisono.Precision(exact=exact))
    use(trainer)
    assert seen
    assert all(each == (EXACT if exact else before) for each in seen)
    assert switches() == before


def test_loops_of_a_program_are_exact_too_and_put_switches_back(accelerator):
    before, model = switches(), nn.Linear(3, 1)
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=2, device="sim")
    for step in run.steps(DATA, batch_size=8, steps=4):
        assert switches() == EXACT
        with step:
            for batch in step.shards:
                step.backward(model(batch).mean())
        if step.number == 1:
            break
    del step
    run.steps(DATA, batch_size=8, steps=4).close()
    assert switches() == before


def test_on_the_cpu_nothing_changes(monkeypatch):
    monkeypatch.setattr(torch, "use_deterministic_algorithms", None)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before, digests = switches(), []
    for exact in (True, False):
        trainer, seen = make("cpu", precision=unisono.Precision(exact=exact))
        use(trainer)
        assert seen
        assert all(each == before for each in seen)
        assert "exact" not in trainer.run.fixed
        digests.append(trainer.digest())
    assert len(set(digests)) == 1
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


CALLS = {
    "fit": lambda trainer: trainer.fit(DATA, batch_size=8, steps=2),
    "evaluate": lambda trainer: trainer.evaluate(DATA, batch_size=8),
    "predict": lambda trainer: trainer.predict(DATA, batch_size=8),
}


@promise("accelerators.1")
@pytest.mark.parametrize("call", CALLS)
def test_a_forward_pass_without_a_deterministic_form_is_named(accelerator, call):
    trainer, _ = make("sim", nn.ReLU(), Forward())
    before = switches()
    with pytest.raises(NondeterministicError) as seen:
        CALLS[call](trainer)
    assert seen.value.module == "rest.1"
    assert "`put_` has none: it is called in `rest.1` of the model (Forward), " in str(seen.value)
    assert seen.value.file == str(HERE)
    assert "put_ does not have a deterministic implementation" in str(seen.value.__cause__)
    assert switches() == before
    # The same on the CPU, and where it is allowed.
    CALLS[call](make("cpu", nn.ReLU(), Forward())[0])
    CALLS[call](make("sim", nn.ReLU(), Forward(), precision=INEXACT)[0])


@pytest.mark.slow
def test_of_a_backward_pass_the_operation_is_named(accelerator):
    trainer, _ = make("sim", nn.ReLU(), Backward())
    with pytest.raises(NondeterministicError) as seen:
        CALLS["fit"](trainer)
    assert (seen.value.operation, seen.value.module) == ("put_", None)
    assert "is called in the backward pass (`torch.autograd.set_detect" in str(seen.value)
    CALLS["evaluate"](trainer)  # has no backward pass
    digests = []
    for device, options in (("cpu", {}), ("sim", {"precision": INEXACT})):
        trainer, _ = make(device, nn.ReLU(), Backward(), **options)
        CALLS["fit"](trainer)
        digests.append(trainer.digest())
    assert len(set(digests)) == 1


def test_a_loop_of_the_programs_own_is_told_too(accelerator):
    model = Model(Backward(), nn.Linear(3, 1))  # the latter has its gradients by then
    run = unisono.Run(model, torch.optim.SGD(model.parameters(), lr=0.1), shards=2, device="sim")
    with pytest.raises(NondeterministicError, match="`put_` has none"):
        for step in run.steps(DATA, batch_size=8, steps=2):
            with step:
                for batch in step.shards:
                    step.backward(model(batch).mean())


@promise("accelerators.2")
def test_that_a_run_is_not_exact_is_said_once(accelerator, capfd):
    trainer, _ = make("sim", precision=INEXACT)
    trainer.fit(DATA, batch_size=8, steps=1)
    trainer.fit(DATA, batch_size=8, steps=2)
    said = capfd.readouterr()
    assert (said.out + said.err).count("`exact=False`: operations without a deterministic") == 1
    assert trainer.run.fixed["exact"] is False
