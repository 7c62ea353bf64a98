"""An operation that torch refuses is named, in a forward pass with its module and its line."""

from pathlib import Path

import pytest
import torch
from torch import nn

from unisono.errors import NondeterministicError
from unisono.training.computing import deterministic_kernels
from unisono.training.failing_step import refusals_explained, refused

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


class Model(nn.Module):
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


def run(model):
    return model(torch.ones(2, 3))


def test_module_and_line_are_named():
    error = refused_in(Model(Forward()), run)
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
