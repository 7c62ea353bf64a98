"""Parameters that got no gradient have names, where torch's DDP numbers them."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import unisono
from unisono.runtime.launch.exceptions import summary_line, traceback_text, unused_in_words

TORCHS = (
    "Expected to have finished reduction in the prior iteration before starting a new one.\n"
    "Parameters which did not receive grad for rank 0: 0.weight\n"
    "Parameter indices which did not receive grad for rank 0: {}\n In addition, you can"
)


class Net(nn.Module):
    def __init__(self, num_unused=1):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.unused = nn.ModuleList(nn.Linear(3, 2) for _ in range(num_unused))
        self.fixed = nn.Linear(2, 2).requires_grad_(False)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.first.weight
        self.last = nn.Linear(3, 1)

    def forward(self, x):
        return self.last(self.tied(self.first(x)))


class InTurns(nn.Module):
    """Uses the second layer in the first pass only."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x):
        self.passes += 1
        return self.second(self.first(x)) if self.passes == 1 else self.first(x)


class Wrapped:
    """What is asked of a DistributedDataParallel."""

    def __init__(self, module, ignored=()):
        self.module, self.parameters_to_ignore = module, set(ignored)


@pytest.mark.parametrize(
    ("indices", "words"),
    [
        ("2 3 ", "but `unused.0.weight`, `unused.0.bias` got none: use them in the loss"),
        ("4", "but `tied.bias` got none: use it in the loss, fix it with"),
        ("5 6", "but `last.weight`, `last.bias` got none"),
        ("99", "but `number 99` got none"),
    ],
)
def test_indices_become_names(indices, words):
    told = unused_in_words(RuntimeError(TORCHS.format(indices)), Wrapped(Net()))
    assert words in told
    assert "pass `find_unused_parameters=True`" in told


def test_ignored_parameters_have_no_index():
    wrapped = Wrapped(Net(), ["first.weight"])
    assert "`unused.0.weight` got" in unused_in_words(RuntimeError(TORCHS.format("1")), wrapped)


def test_many_are_counted():
    told = unused_in_words(
        RuntimeError(TORCHS.format(" ".join(map(str, range(2, 22))))), Wrapped(Net(10))
    )
    assert "`unused.3.bias` and 12 more got none" in told


@pytest.mark.parametrize("error", [ValueError(TORCHS.format("1")), RuntimeError("something else")])
def test_other_errors_are_left_alone(error):
    assert unused_in_words(error, Wrapped(Net())) is None
    assert summary_line(error).endswith(str(error).splitlines()[-1].strip())


def train(of_torch):
    ddp = (TorchDDP if of_torch else unisono.distributed.DistributedDataParallel)(Net())
    try:
        for _ in range(2):
            ddp(torch.ones(2, 3)).sum().backward()
    except RuntimeError as error:
        return str(error), summary_line(error), traceback_text(error)
    finally:
        dist.barrier()
    return None


@pytest.mark.slow
@pytest.mark.parametrize("of_torch", [False, True])
@pytest.mark.parametrize("backend", ["gloo", "unisono"])
def test_real_ranks_name_them(on_ranks, backend, of_torch):
    for message, summary, text in on_ranks(backend, 2, train, of_torch):
        assert ("`unused.0.weight`, `unused.0.bias` got none" in message) != of_torch
        assert summary.startswith("RuntimeError: every parameter of a DistributedDataParallel")
        assert text.endswith(summary)


def train_in_turns():
    ddp = unisono.distributed.DistributedDataParallel(InTurns(), static_graph=True)
    with pytest.raises(RuntimeError) as raised:
        for _ in range(3):
            ddp(torch.ones(2, 3)).sum().backward()
    dist.barrier()
    return str(raised.value)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["gloo", "unisono"])
def test_a_static_graph_that_changes_has_another_remedy(on_ranks, backend):
    for told in on_ranks(backend, 2, train_in_turns):
        assert told.startswith("with `static_graph=True` every backward pass must use")
        assert "but `second.weight`, `second.bias` got no gradient: use them in each" in told
