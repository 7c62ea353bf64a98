"""What a dataset draws, and what is read ahead, depends on what is read, never on who reads it."""

import gc
import multiprocessing
import os
import select
import signal
import sys
import traceback
from unittest import mock

import numpy as np
import pytest
import torch
from tests.data import augmenting
from tests.loaders import loader_of
from tests.promises import promise
from tests.warm import processes as warm
from torch.utils.data import Dataset, Subset, TensorDataset

import unisono
from unisono.data import epoch_order, loader
from unisono.data.fetch import fetcher
from unisono.data.loader import Loader, ShardPosition, upcoming
from unisono.data.loader_processes import LoaderProcesses, read_message, write_message
from unisono.data.second_reading import SecondReading
from unisono.plan.samples import SamplePlan
from unisono.runtime.device import host, num_threads
from unisono.runtime.signals import ENDING_SIGNALS
from unisono.runtime.workers.supervisor import is_worker

SHUFFLED = SamplePlan(num_samples=11, batch_size=4, shards=3, seed=1)


class Each(Dataset):
    """What a function says of each index."""

    def __init__(self, say, num_samples=augmenting.NUM_SAMPLES):
        self.say, self.num_samples = say, num_samples

    def __len__(self):
        return self.num_samples

    def __getitem__(self, index):
        return self.say(index)


class Many(Each):
    def __getitems__(self, indices):
        return [self.say(index) for index in indices]


def draw(index):
    numbers = torch.randint(2**62, ()), np.random.randint(2**62), augmenting.random.getrandbits(62)
    return tuple(int(number) for number in numbers)


def draws(dataset, indices, epoch=0, **options):
    """What each of the three generators gave for each sample."""
    batch = fetcher(dataset, **options)(torch.tensor(indices), epoch)
    return list(zip(*(numbers.tolist() for numbers in batch), strict=True))


def batches(dataset, loader_workers, **totals):
    """All batches of a run, as the loop's body sees them."""
    trainer = augmenting.make()
    parameter = next(trainer.run.model.parameters())
    seen = []
    for step in trainer.run.steps(loader_of(dataset, 10, num_workers=loader_workers), **totals):
        with step:
            for batch in step.shards:
                seen.append(batch)
                step.backward(parameter.sum())
    return seen


def in_lists(batches):
    return [[numbers.tolist() for numbers in batch] for batch in batches]


# Random numbers


def test_a_sample_has_the_same_numbers_in_every_company():
    together = draws(Each(draw), [5, 3, 9])
    assert [draws(Each(draw), [index])[0] for index in (5, 3, 9)] == together


@promise("one-result.9")
def test_no_two_samples_and_no_two_epochs_share_a_stream():
    seen = [
        drawn
        for stream in ("train", "evaluate")
        for seed in (0, 1)
        for epoch in (0, 1)
        for drawn in draws(Each(draw, 200), range(200), epoch, stream=stream, seed=seed)
    ]
    for numbers in zip(*seen, strict=True):
        assert len(set(numbers)) == 2 * 2 * 2 * 200


def test_entries_of_a_subset_that_name_one_sample_are_two_samples():
    first, second = draws(Subset(Each(draw), [4, 4]), [0, 1])
    assert set(first).isdisjoint(second)


def test_many_at_once_are_seeded_by_the_first_of_them():
    assert draws(Many(draw), [5, 3]) == draws(Many(draw), [5, 3])
    assert draws(Many(draw), [5, 3])[0] != draws(Many(draw), [3, 5])[0]
    assert draws(Many(draw), [5, 3]) != draws(Many(draw), [5, 3], epoch=1)


def test_a_collate_function_has_numbers_of_its_own():
    dataset = Each(lambda index: index)
    collated = [
        fetcher(dataset, collate_fn=draw)(torch.tensor(indices), epoch)
        for indices, epoch in [([1], 0), ([1], 0), ([2], 0), ([1], 1)]
    ]
    assert collated[0] == collated[1]
    assert len(set(collated)) == 3


IN_MEMORY, ONE_BY_ONE = TensorDataset(torch.arange(9)), Each(lambda index: [range(9)[index]], 9)


@pytest.mark.parametrize("dataset", [IN_MEMORY, ONE_BY_ONE], ids=["in memory", "one by one"])
def test_subsets_count_from_the_end_too(dataset):
    (values,) = fetcher(Subset(dataset, [-1, 0, -9]))(torch.tensor([0, 1, 2]))
    assert values.tolist() == [8, 0, 0]
    (values,) = fetcher(Subset(Subset(dataset, [4, 5, -3]), [-1, -2, 1]))(torch.tensor([0, 2, 1]))
    assert values.tolist() == [6, 5, 5]


@pytest.mark.parametrize(
    ("dataset", "words"),
    [
        (Subset(IN_MEMORY, [3, 9]), "has 9 samples, but the index at position 1 is 9"),
        (Subset(IN_MEMORY, [-10]), "has 9 samples, but the index at position 0 is -10"),
        (Subset(Subset(ONE_BY_ONE, [1, 2]), [0, 1, 2]), "has 2 samples, but .* position 2 is 2"),
        (Subset(Subset(IN_MEMORY, [99, 0]), [1, 0]), "has 9 samples, but .* position 1 is 99"),
    ],
)
def test_subsets_beyond_their_data_set_are_refused(dataset, words):
    with pytest.raises(unisono.errors.LoadingError, match=words):
        fetcher(dataset)


def test_what_a_subset_of_a_subset_leaves_out_may_be_missing():
    (values,) = fetcher(Subset(Subset(IN_MEMORY, [99, 7]), [1]))(torch.tensor([0]))
    assert values.tolist() == [7]


def test_what_a_dataset_draws_never_shifts_what_the_model_draws():
    def of_the_model(dataset):
        trainer = augmenting.make()
        parameter = next(trainer.run.model.parameters())
        seen = []
        for step in trainer.run.steps(dataset, batch_size=10, steps=6):
            with step:
                for _ in step.shards:
                    seen.append(draw(0))
                    step.backward(parameter.sum())
        return seen

    assert of_the_model(Each(draw)) == of_the_model([0] * augmenting.NUM_SAMPLES)


# Reading ahead


def test_upcoming_leaves_out_shards_without_samples():
    plan = SamplePlan(num_samples=5, batch_size=4, shards=3)
    assert list(upcoming(plan, range(3), ShardPosition(0, 0, 2), 2)) == [(0, 0, 2), (0, 1, 1)]


@pytest.mark.slow
def test_batches_are_the_same_whoever_reads_and_wherever_the_run_goes():
    wanted = [
        *((ShardPosition(0, 0, shard), range(2)) for shard in (0, 1)),
        (ShardPosition(0, 0, 2), range(2)),  # taken over: not of this worker's shards
        *((ShardPosition(0, batch, shard), range(3)) for batch in (1, 2) for shard in range(3)),
        (ShardPosition(1, 0, 0), range(3)),
        (ShardPosition(0, 1, 0), range(3)),  # gone back
        (ShardPosition(0, 1, 2), [0, 2]),  # in the midst of a step
        (ShardPosition(0, 2, 0), [0, 2]),
    ]
    fetch = fetcher(Each(lambda index: (index, *draw(index)), 11))

    def read(num_processes):
        with Loader(
            fetch, SHUFFLED, num_processes=num_processes, num_batches=6, device=host()
        ) as loader:
            return [[t.tolist() for t in loader.batch(*place)] for place in wanted]

    alone = read(0)
    assert read(1) == alone
    assert read(2) == alone


@pytest.mark.slow
def test_a_long_order_is_made_in_the_worker_alone_and_one_is_kept(monkeypatch):
    alone = batches(Each(draw), 0, steps=12)
    worker, order, kept = os.getpid(), SamplePlan.order, []

    def order_here(plan, epoch, into=None):
        assert os.getpid() == worker
        kept.append(max((len(one._epochs) for one in loaders), default=0))
        return order(plan, epoch, into)

    loaders, enter = [], Loader.__enter__
    monkeypatch.setattr(Loader, "__enter__", lambda one: loaders.append(one) or enter(one))
    monkeypatch.setattr(SamplePlan, "order", order_here)
    monkeypatch.setattr(loader, "_LONG", 1)
    assert in_lists(batches(Each(draw), 2, steps=12)) == in_lists(alone)
    assert kept == [0] * 3  # the order before is gone when the next is made


@pytest.mark.slow
def test_processes_go_on_over_the_ends_of_epochs_and_read_nothing_beyond_the_last(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(SecondReading, "is_due", lambda self: False)

    def say(index):
        with (tmp_path / "read").open("a") as file:
            file.write("x")
        return os.getpid()

    seen = batches(Each(say), 2, steps=12)
    assert len({int(pid) for batch in seen for pid in batch} - {os.getpid()}) == 2
    assert (tmp_path / "read").stat().st_size == sum(map(len, seen))


def test_one_thread_reads_and_a_loader_process_is_no_worker(monkeypatch):
    monkeypatch.setenv("UNISONO_PID", str(os.getpid()))
    dataset = Each(lambda index: (torch.get_num_threads(), is_worker()))
    with num_threads(2):
        for loader_workers, is_here in ((0, True), (1, False)):
            fetch = fetcher(dataset)
            with Loader(
                fetch, SHUFFLED, num_processes=loader_workers, num_batches=3, device=host()
            ) as loader:
                threads, workers = loader.batch(ShardPosition(0, 0, 0), range(3))
            assert threads.eq(1).all()
            assert workers.eq(is_here).all()


@pytest.mark.parametrize(
    "content",
    [
        [torch.empty(0, 3), torch.tensor(2, dtype=torch.bfloat16), torch.tensor([True])],
        {"strided": torch.arange(6).reshape(2, 3).T, "words": ["a", None, 1.5]},
        torch.arange(4).to_sparse(),
    ],
)
def test_a_batch_travels_unchanged(content):
    arrived, num_bytes = travelled(content)
    assert num_bytes < 2_000_000
    assert str(arrived) == str(content)


def travelled(content):
    """Send something from another process; gives it, and how many bytes that took."""
    reading, writing = os.pipe()
    process = multiprocessing.get_context("fork").Process(
        target=write_message, args=(writing, content)
    )
    process.start()
    os.close(writing)
    counts, readv = [], os.readv
    with mock.patch.object(os, "readv", lambda *call: counts.append(readv(*call)) or counts[-1]):
        arrived = read_message(reading)
    with pytest.raises(EOFError):
        read_message(reading)
    process.join()
    os.close(reading)
    return arrived, sum(counts)


MANY = torch.arange(3_000_000, dtype=torch.int32)
LAYOUTS = {
    "grey images from height, width, channels": torch.rand(3, 5, 5, 1).permute(0, 3, 1, 2),
    "channels last": torch.rand(3, 2, 5, 5).to(memory_format=torch.channels_last),
    "expanded": torch.arange(3.0).expand(1000, 1000, 3),
    "windows": torch.arange(90.0).unfold(0, 30, 1),
    "a column": MANY.reshape(-1, 100)[:, 7],
    "far windows": MANY.as_strided((2, 5, 5), (1_000_000, 1, 1), 7),
    "a slice": torch.rand(4, 6)[1:3, 2:4],
    "empty": torch.empty(0, 3).T,
    "empty and expanded": torch.empty(0, 1).expand(0, 9),
    "a number": torch.tensor(True),
    "of one": torch.ones(1, 1).as_strided((1, 1), (7, 9)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_tensors_keep_their_strides_and_take_no_more_room(name):
    tensor = LAYOUTS[name]
    (arrived, again), num_bytes = travelled([tensor, tensor])
    assert arrived is again
    assert (arrived.dtype, arrived.shape) == (tensor.dtype, tensor.shape)
    assert arrived.stride() == tensor.stride()
    assert torch.equal(arrived, tensor)
    assert num_bytes < 200_000


@pytest.mark.parametrize(
    "array",
    [
        np.random.default_rng(1).random((3, 5, 5, 1)).transpose(0, 3, 1, 2),
        np.arange(6, dtype=np.uint16).reshape(2, 3).T,
        np.arange(600).reshape(20, 30)[:, ::3],
    ],
    ids=range(3),
)
def test_arrays_keep_their_strides(array):
    (arrived,), _ = travelled([array])
    assert (arrived.dtype, arrived.strides) == (array.dtype, array.strides)
    assert np.array_equal(arrived, array)
    assert arrived.flags.writeable


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6.0)[::-1],
        np.broadcast_to(np.arange(3), (2, 3)),
        np.arange(6).astype(">i4").reshape(2, 3).T,
        np.array([["a", "b"], ["c", "d"]]).T,
        np.zeros(3, [("a", "i1"), ("b", "f8")])["b"],
    ],
    ids=range(5),
)
def test_other_arrays_travel_as_numpy_has_it(array):
    (arrived,), _ = travelled([array])
    assert arrived.dtype == array.dtype
    assert np.array_equal(arrived, array)


# What can fail


def fail_at_17(index):
    if index == 17:
        raise KeyError("no such picture")
    return torch.zeros(8), 0


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_a_sample_that_cannot_be_read_is_named_with_its_traceback(loader_workers):
    with pytest.raises(unisono.errors.LoadingError, match="sample 17 raised KeyError") as caught:
        batches(Subset(Each(fail_at_17), range(40)), loader_workers, epochs=1)
    assert caught.value.indices == (17,)
    shown = "".join(traceback.format_exception(caught.value))
    assert 'raise KeyError("no such picture")' in shown


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_samples_that_do_not_fit_together_are_named(loader_workers):
    ragged = Each(lambda index: torch.zeros(1 + index % 2))
    with pytest.raises(
        unisono.errors.LoadingError, match=r"to collate samples \d+, .*`collate_fn`"
    ):
        batches(ragged, loader_workers, epochs=1)
    with pytest.raises(unisono.errors.LoadingError, match=r"`__getitems__` of samples \d+, "):
        batches(Many(fail_at_17), loader_workers, epochs=1)


def test_a_batch_that_cannot_travel_is_refused_in_words():
    with pytest.raises(unisono.errors.LoadingError, match="must travel between processes"):
        processes = LoaderProcesses(lambda request: lambda: None, 1, iter([0]))
        try:
            processes.take()
        finally:
            processes.close()


IN_A_FORK = "Cannot re-initialize CUDA in forked subprocess. To use CUDA with multiprocessing, …"


@pytest.mark.parametrize(
    "error", [RuntimeError(IN_A_FORK), torch.AcceleratorError("CUDA error: initialization error")]
)
def test_a_dataset_that_uses_a_gpu_in_a_loader_process_gets_the_way_out(error):
    def say(index):
        raise error

    with pytest.raises(
        unisono.errors.LoadingError,
        match=r"A loader process cannot use a GPU: .*or set `num_workers=0`",
    ):
        batches(Each(say), 1, epochs=1)
    with pytest.raises(unisono.errors.LoadingError) as caught:
        batches(Each(say), 0, epochs=1)
    assert "loader process" not in str(caught.value)


class OfTheWorker:
    """Garbage that only a search finds, such as an event of a GPU that a list of its own holds."""

    def __init__(self, folder):
        self.folder, self.itself = folder, self

    def __del__(self):
        (self.folder / str(os.getpid())).touch()


def in_a_loader_process(work):
    processes = LoaderProcesses(lambda request: work(), 1, iter([0]))
    processes.take()
    processes.close()


@pytest.mark.slow
def test_a_fork_frees_nothing_that_is_the_workers(tmp_path):
    gc.collect()
    gc.disable()
    try:
        OfTheWorker(tmp_path)
        in_a_loader_process(gc.collect)
        assert list(tmp_path.iterdir()) == []
    finally:
        gc.enable()
    gc.collect()
    assert [path.name for path in tmp_path.iterdir()] == [str(os.getpid())]


@pytest.mark.slow
def test_a_loader_process_that_is_killed_is_explained():
    def kill(index):
        if multiprocessing.parent_process() is not None and index == 17:
            os.kill(os.getpid(), signal.SIGKILL)
        return index

    with pytest.raises(unisono.errors.LoadingError, match="was killed by SIGKILL: is there enough"):
        batches(Each(kill), 2, epochs=1)
    with pytest.raises(unisono.errors.LoadingError, match="ended with status 3"):
        batches(Each(lambda index: os._exit(3)), 1, epochs=1)


def test_a_loader_process_that_is_killed_while_it_writes_is_explained():
    processes = LoaderProcesses(lambda request: torch.zeros(2_000_000), 2, iter([0]))
    try:
        select.select([processes._loaders[0].results_fd], [], [])
        processes._loaders[0].process.kill()
        with pytest.raises(unisono.errors.LoadingError, match="was killed by SIGKILL"):
            processes.take()
    finally:
        processes.close()


def test_what_a_loader_process_has_read_before_it_died_is_given():
    def die_at_one(request):
        if request == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return request

    processes = LoaderProcesses(die_at_one, 1, iter([0, 1, 2]))
    try:
        assert select.select([processes._loaders[0].process.sentinel], [], [], 60)[0]
        assert processes.take() == 0
        with pytest.raises(unisono.errors.LoadingError, match="was killed by SIGKILL"):
            processes.take()
    finally:
        processes.close()


@pytest.mark.parametrize("signum", ENDING_SIGNALS)
def test_a_notice_to_all_processes_ends_no_loader_process(signum):
    processes = LoaderProcesses(lambda request: request, 2, iter(range(8)))
    try:
        given = [processes.take(), processes.take()]  # one of each
        for loader in processes._loaders:
            os.kill(loader.process.pid, signum)
        assert given + [processes.take() for _ in range(6)] == list(range(8))
    finally:
        processes.close()


def test_a_worker_leaves_at_once_that_has_not_closed_its_loader_processes():
    program = (
        "from unisono.data.loader_processes import LoaderProcesses\n"
        "processes = LoaderProcesses(lambda request: request, 2, iter(range(8)))\n"
        "processes.take()"
    )
    assert warm.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_loader_processes_end_when_the_loop_is_left():
    trainer = augmenting.make()
    before = multiprocessing.active_children()
    for step in trainer.run.steps(loader_of(augmenting.Noisy(), 6, num_workers=2), steps=2):
        with step:
            for batch in step.shards:
                step.backward(augmenting.loss_of(trainer.run.model, batch))
        assert len(multiprocessing.active_children()) == len(before) + 2
        break
    assert multiprocessing.active_children() == before


@pytest.mark.slow
def test_a_loader_process_that_is_stuck_is_ended():
    before = multiprocessing.active_children()
    wait = lambda seconds: signal.sigtimedwait([], seconds)  # noqa: E731
    processes = LoaderProcesses(wait, 1, iter([0, 600]))
    processes.take()
    processes.close()
    assert multiprocessing.active_children() == before


def test_loader_processes_end_with_a_sample_that_cannot_be_read():
    fetch = fetcher(Each(fail_at_17, 18))
    plan = SamplePlan(num_samples=18, batch_size=18, shards=1)
    before = multiprocessing.active_children()
    with Loader(fetch, plan, num_processes=1, num_batches=1, device=host()) as loader:
        with pytest.raises(unisono.errors.LoadingError):
            loader.batch(ShardPosition(0, 0, 0), range(1))
        assert multiprocessing.active_children() == before


# Bits


CASES = [
    *((augmenting.Noisy(kind), n, None) for kind in augmenting.DRAWS for n in (0, 2)),
    *((augmenting.NoisyMany(), n, None) for n in (0, 2)),
    *((augmenting.Noisy("python"), n, augmenting.noisy_collate) for n in (0, 2)),
]


@pytest.fixture(scope="module")
def alone():
    """What one worker trains and draws, without and with loader processes."""
    return augmenting.train_and_draw(CASES)


@pytest.mark.slow
def test_digest_is_the_same_with_loader_processes(alone):
    results, _ = alone
    assert results[::2] == results[1::2]
    assert len(set(results)) == len(CASES) // 2


@promise("one-result.1")
@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.long), 3])
def test_digest_is_the_same_on_any_number_of_workers_with_loader_processes(alone, workers):
    results = unisono.launch(augmenting.train_and_draw, CASES, workers=workers)
    assert [digests for digests, _ in results] == [alone[0]] * workers
    for here, there in zip(
        alone[1], zip(*(drawn for _, drawn in results), strict=True), strict=True
    ):
        assert sorted(here) == sorted(sum(there, []))


def train_long(*arguments):
    loader._LONG = 1
    return augmenting.train(*arguments)


def train_and_count_orders(*arguments):
    draw, drawn = epoch_order._drawn, []
    epoch_order._drawn = lambda plan, epoch: drawn.append(epoch) or draw(plan, epoch)
    return train_long(*arguments), drawn


@pytest.mark.slow
def test_one_worker_draws_a_long_order_for_all():
    dataset = augmenting.Noisy("torch")
    alone = augmenting.train(dataset, 0)
    results = unisono.launch(train_and_count_orders, dataset, 2, workers=2)
    assert [result for result, _ in results] == [alone] * 2
    assert len(results[0][1]) == len({*results[0][1]}) > 1
    assert results[1][1] == []


class Stuck(augmenting.Noisy):
    """The loader processes of the first worker of rank 1 never come back from a later sample."""

    def __getitem__(self, index):
        is_later = unisono.progress().step >= 2  # read ahead, in step 1
        first = (os.environ.get("RANK"), os.environ.get("UNISONO_INCARNATION")) == ("1", "0")
        if first and multiprocessing.parent_process() is not None and is_later:
            signal.sigtimedwait([], 600)
        return super().__getitem__(index)


@pytest.mark.slow
def test_loader_processes_die_with_their_worker_whatever_they_do(monkeypatch):
    alone = augmenting.train(Stuck(), 0)
    monkeypatch.setenv("UNISONO_FAULTS", "kill:rank=1,step=1,at=update")
    assert unisono.launch(augmenting.train, Stuck(), 2, workers=2) == [alone] * 2


def test_a_subset_means_what_it_holds_when_it_is_read():
    def read():
        found = fetch(torch.tensor([0, 1]))
        return (found[0] if type(found) is tuple else found).tolist()

    rows = torch.arange(8.0)
    for indices in ([0, 1, 2], np.array([0, 1, 2]), torch.tensor([0, 1, 2])):
        for dataset in (TensorDataset(rows), rows):
            subset = Subset(dataset, indices)
            fetch = fetcher(Subset(subset, [2, 0]))
            assert read() == [2, 0]
            indices[2], indices[0] = 7, -2
            assert read() == [7, 6]
            indices[2], indices[0] = 2, 0
            subset.indices = [5, 5, 5]
            assert read() == [5, 5]
