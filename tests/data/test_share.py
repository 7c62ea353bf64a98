"""A data set in memory: once per host, the same for all, whoever makes it and whoever is lost."""

import functools
import os
import random
import signal

import numpy
import pytest
import torch
from tests.classified import cross_entropy as loss_of
from tests.workers.forked import job  # noqa: F401
from torch.utils.data import Subset, TensorDataset

import unisono
from unisono.data.share import laid_out, viewed, write
from unisono.runtime.workers.context import context
from unisono.runtime.workers.memory import Memory, aligned

MIB = 1 << 20


def there_and_back(value):
    words, contents = laid_out(value)
    start = aligned(len(words))
    memory = Memory.private(start + sum(aligned(each.nbytes) for each in contents))
    write(memory, start, words, contents)
    return viewed(memory, start), sum(each.nbytes for each in contents)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(3, 5).T,
        torch.randn(6, 6)[::2, ::3],
        torch.tensor(float("nan"), dtype=torch.bfloat16),
        torch.empty(0, 3, dtype=torch.complex64),
        torch.tensor([True, False]),
    ],
    ids=["channels_last", "transposed", "with gaps", "scalar", "empty", "bool"],
)
def test_tensors_stay_as_a_copy_would_be(tensor):
    found, _ = there_and_back(tensor)
    assert found.dtype == tensor.dtype
    assert found.stride() == tensor.clone().stride()
    assert torch.equal(found, tensor) or tensor.isnan().all()


@pytest.mark.parametrize(
    "array",
    [
        numpy.arange(12.0).reshape(3, 4),
        numpy.asfortranarray(numpy.arange(12, dtype=">i4").reshape(3, 4)),
        numpy.arange(12)[::-2],
        numpy.array(["one", "three"]),
        numpy.array(["2026-11-22"], dtype="datetime64[D]"),
        numpy.empty((0, 2), dtype=bool),
        numpy.array(3.5, dtype=numpy.float16),
    ],
    ids=["plain", "fortran", "backwards", "texts", "dates", "empty", "scalar"],
)
def test_arrays_stay_as_a_copy_would_be(array):
    found, _ = there_and_back(array)
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.flags.f_contiguous == array.copy("K").flags.f_contiguous
    assert numpy.array_equal(found, array)


def test_containers_stay_and_what_is_there_twice_takes_room_once():
    x, y = torch.arange(64.0), torch.arange(64)
    whole = TensorDataset(x, y)
    value = {"all": whole, 1: [Subset(whole, [3, 5]), (None, "text")], "numbers": [1, 2.5]}
    found, num_bytes = there_and_back(value)
    assert num_bytes == 64 * (4 + 8)
    assert list(found) == ["all", 1, "numbers"]
    assert type(found["all"]) is TensorDataset
    assert [(int(a), int(b)) for a, b in found[1][0]] == [(3, 3), (5, 5)]
    assert (found[1][1], found["numbers"]) == ((None, "text"), [1, 2.5])


class Tagged(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ({"x": [torch.ones(2), lambda: 0]}, "pickle"),
        (torch.ones(2, requires_grad=True), "requires_grad=True"),
        (torch.ones(2).as_subclass(Tagged), "Tagged"),
        (torch.ones(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "sparse_coo"),
        (torch.nn.Linear(2, 2), "a Parameter"),
    ],
    ids=["function", "gradient", "subclass", "meta", "sparse", "module"],
)
def test_what_cannot_be_shared_is_refused(value, why):
    with pytest.raises(TypeError, match=why):
        laid_out(value)


class Images(torch.utils.data.Dataset):
    def __init__(self, images, names):
        self.images, self.names = images, names

    def __getitem__(self, number):
        return self.images[number], self.names[number]


def test_a_dataset_of_the_programs_own_has_its_tensors_in_the_block():
    found, num_bytes = there_and_back(Images(torch.arange(64.0), numpy.array([{}, "text"])))
    assert type(found) is Images
    assert (found[1][0], found.names[1], num_bytes) == (1.0, "text", 64 * 4)


def noise(num_bytes=4096):
    random.random()
    numpy.random.random()
    return torch.randn(num_bytes // 4), [os.getpid()]


def test_one_worker_gets_it_and_its_generators_stay():
    before = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state()
    torch.manual_seed(3)
    found, _ = unisono.share(noise)
    after = torch.rand(1)
    torch.manual_seed(3)
    assert torch.equal(found, torch.randn(1024))
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(1))
    assert (before[0], before[1]) == (random.getstate(), numpy.random.get_state()[1].tolist())
    torch.set_rng_state(before[2])


def test_data_in_place_of_a_function_is_refused():
    with pytest.raises(TypeError, match=r"`make` must be a function .* but is TensorDataset"):
        unisono.share(TensorDataset(torch.ones(2)))


def proportional_bytes():
    """Read how much memory this process takes, of shared pages its share (PSS)."""
    with open("/proc/self/smaps_rollup") as file:
        lines = dict(line.split(":", 1) for line in file if line.startswith("Pss:"))
    return int(lines["Pss"].split()[0]) * 1024


def take_memory(num_bytes, is_shared):
    team = context().join().team
    unisono.share(noise)[0].sum()  # what is loaded for the first of all
    team.gather(b"", "before")
    before = proportional_bytes()
    make = functools.partial(noise, num_bytes)
    tensor, made_by = unisono.share(make) if is_shared else make()
    total = tensor.sum().item()
    team.gather(b"", "all have it")
    taken = proportional_bytes() - before
    team.gather(b"", "all have looked")
    tensor += 1.0  # seen by nobody else
    team.gather(b"", "all have written")
    assert tensor.sum().item() == pytest.approx(total + tensor.numel(), rel=1e-3)
    return taken, made_by, total


@pytest.mark.slow
def test_four_workers_hold_one_data_set():
    """And four where each makes its own, so that what is measured is what is shared."""
    num_bytes = 32 * MIB
    for is_shared, copies in ((True, 1), (False, 4)):
        taken, made_by, totals = zip(
            *unisono.launch(take_memory, num_bytes, is_shared, workers=4), strict=True
        )
        assert sum(taken) / num_bytes == pytest.approx(copies, abs=0.4)
        assert len({pid for (pid,) in made_by}) == copies
        assert len(set(totals)) == 1


def make_or_die(marks):
    (marks / str(os.getpid())).touch()
    if len(list(marks.iterdir())) == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return digits()


def digits():
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, (x.sum(1) > 0).long())


def train(make, loss=loss_of):
    torch.manual_seed(1)
    data = unisono.share(make)
    first = data.tensors[0].clone()
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    trainer = unisono.Trainer(model, optimizer, loss, shards=3)
    trainer.fit(data, batch_size=12, epochs=4)
    assert torch.equal(data.tensors[0], first)
    return trainer.digest()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3])
def test_a_worker_that_is_killed_while_it_makes_it_is_made_up_for(tmp_path, workers):
    results = unisono.launch(train, functools.partial(make_or_die, tmp_path), workers=workers)
    assert results == [train(digits)] * workers
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "faults"),
    [(1, "kill:rank=0,step=3"), (2, "kill:rank=0,step=3; kill:rank=1,step=7")],
)
def test_replacements_map_what_is_there(tmp_path, monkeypatch, workers, faults):
    monkeypatch.setenv("UNISONO_FAULTS", faults)

    def make():
        (tmp_path / str(os.getpid())).touch()
        return digits()

    results = unisono.launch(train, make, workers=workers)
    monkeypatch.delenv("UNISONO_FAULTS")
    assert len(list(tmp_path.iterdir())) == 1
    assert results == [train(digits)] * workers


@pytest.mark.slow
def test_workers_of_another_launcher_share_it_too(job):  # noqa: F811
    def work(rank):
        torch.set_num_threads(1)
        torch.manual_seed(5)
        tensor, made_by = unisono.share(noise)
        tensor += rank  # seen by nobody else
        context().join().team.gather(b"", "all have written")
        with pytest.raises(RuntimeError, match="must be called before a loop over steps"):
            train(digits, loss=lambda model, batch: unisono.share(noise))
        return made_by, (tensor - rank).sum().item()

    said = [one.value for one in job.run(work, 3)]
    assert len({pid for (pid,), _ in said}) == 1
    assert [total for _, total in said] == pytest.approx([said[0][1]] * 3, abs=1e-2)
