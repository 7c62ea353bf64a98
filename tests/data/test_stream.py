"""A stream is cut by position: the bits of a list of its samples, whoever reads how often."""

import copy
import os

import pytest
import torch
from tests.data import augmenting
from tests.loaders import loader_of
from torch.utils.data import ChainDataset, IterableDataset

import unisono
from unisono.data.fetch import fetcher
from unisono.data.loader_processes import LoaderProcesses

N = augmenting.NUM_SAMPLES


class Listed(augmenting.Noisy):
    """The samples by number, in the order of the stream, with all kinds of random numbers."""

    def __getitem__(self, index):
        noise = sum(draw() for draw in augmenting.DRAWS.values())
        return self.inputs[index] + noise, self.labels[index]


class Stream(IterableDataset):
    """The same, one after the other, out of a file that is read as it goes."""

    def __init__(self, path, length=N, gives=N):
        self.listed, self.path = Listed(), path
        self.length, self.gives = length, gives
        path.write_text("".join(f"{index}\n" for index in range(N)))

    def __len__(self):
        return self.length

    def __iter__(self):
        with self.path.open() as lines:
            for _, line in zip(range(self.gives), lines, strict=False):
                yield self.listed[int(line)]


class Turned(Stream):
    """Begins elsewhere in each epoch."""

    epoch = None

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for place in range(N):
            yield self.listed[(place + 7 * self.epoch) % N]


def train(dataset, loader_workers=0, *, steps=12, validate=None, in_eval=False, **options):
    trainer = augmenting.make(**options)
    if in_eval:  # so that BatchNorm takes single samples
        trainer.run.model.eval()
    shuffle = None if isinstance(dataset, IterableDataset) else False
    size = augmenting.BATCH_SIZE
    loader = loader_of(dataset, size, shuffle=shuffle, num_workers=loader_workers)
    summary = trainer.fit(loader, steps=steps, validate=validate)
    return summary.digest, summary.validation and summary.validation["loss"]


@pytest.fixture
def stream(tmp_path):
    return Stream(tmp_path / "lines")


def read(fetch, places, batch=6):
    """The positions that the fetch gives for shards of 3 of batches of 6."""
    return [
        fetch(torch.arange(start * batch + shard, min((start + 1) * batch, 20), 3), epoch).tolist()
        for epoch, start, shard in places
    ]


class Numbers(IterableDataset):
    """Counts how often it has begun, and what it has given."""

    def __init__(self, length=20):
        self.begun = self.given = 0
        self.length = length

    def __len__(self):
        return self.length

    def __iter__(self):
        self.begun += 1
        for number in range(20):
            self.given += 1
            yield number


# What is read


@pytest.mark.slow
def test_a_stream_gives_the_bits_of_a_list_that_is_not_shuffled(stream):
    expected = train(Listed(), validate=Listed(), steps=7)
    assert train(stream, validate=stream, steps=7) == expected
    assert train(stream, 2, validate=stream, steps=7) == expected


def test_an_epoch_is_read_once_and_skipped_where_it_must_be():
    numbers = Numbers()
    fetch = fetcher(numbers, batch_size=6)
    assert read(fetch, [(0, 0, 1), (0, 0, 2), (0, 2, 0), (0, 2, 1), (0, 3, 0)]) == [
        [1, 4],
        [2, 5],
        [12, 15],
        [13, 16],
        [18],
    ]
    assert (numbers.begun, numbers.given) == (1, 20)


@pytest.mark.parametrize(
    ("places", "num_begun"),
    [
        ([(0, 1, 2), (0, 1, 0)], 1),  # the shard of a lost worker, after the own
        ([(0, 1, 0), (0, 1, 0)], 2),  # the same again
        ([(0, 2, 0), (0, 1, 0)], 2),  # back
        ([(0, 1, 0), (1, 1, 0)], 2),  # the next epoch
    ],
)
def test_the_stream_begins_again_where_it_must(places, num_begun):
    numbers = Numbers()
    assert read(fetcher(numbers, batch_size=6), places) == [
        [6 * batch + shard, 6 * batch + shard + 3] for _, batch, shard in places
    ]
    assert numbers.begun == num_begun


def test_a_process_that_is_forked_from_a_reader_begins_for_itself():
    numbers = Numbers()
    fetch = fetcher(numbers, batch_size=6)
    read(fetch, [(0, 0, 0)])
    work = lambda place: (read(fetch, [place]), numbers.begun)  # noqa: E731
    processes = LoaderProcesses(work, 1, iter([(0, 1, 0)]))
    try:
        assert processes.take() == ([[6, 9]], 2)
    finally:
        processes.close()


@pytest.mark.slow
def test_epochs_are_alike_unless_the_stream_is_told_of_them(tmp_path):
    turned = Turned(tmp_path / "lines")
    expected = train(Listed(), steps=5)
    assert train(turned, steps=5) == expected
    assert train(turned, steps=10) != train(Stream(tmp_path / "lines"), steps=10)
    assert train(turned, 2, steps=10) == train(turned, steps=10)


class Dealt(Stream):
    """Gives each shard its part, every S-th line."""

    part = None

    def __iter__(self):
        assert self.part is not None, "nobody needs the whole"
        first, step = self.part
        for line in self.path.read_text().split()[: self.gives][first::step]:
            yield self.listed[int(line)]

    def shard(self, num_shards, index):
        part = copy.copy(self)
        part.part = (index, num_shards)
        return part


def test_a_worker_asks_for_the_parts_of_its_shards_alone():
    class Parts(Numbers):
        def shard(self, index, num_shards):
            begun.append(index)
            return range(index, 20, num_shards)

    begun = []
    fetch = fetcher(Parts(), batch_size=6, shards=3)
    assert read(fetch, [(0, 0, 1), (0, 2, 1), (0, 3, 1)]) == [[1, 4], [13, 16], [19]]
    assert begun == [1]
    assert read(fetch, [(0, 2, 0), (1, 0, 1), (1, 0, 1)]) == [[12, 15], [1, 4], [1, 4]]
    assert begun == [1, 0, 1, 1]


def test_a_part_of_another_length_is_refused(tmp_path):
    with pytest.raises(
        unisono.errors.LoadingError, match=r"16 of shard 0 of 3, but after 15 it ends"
    ):
        train(Dealt(tmp_path / "lines", gives=45))
    with pytest.raises(
        unisono.errors.LoadingError, match=r"15 of shard 0 of 3, but after 15 it has more"
    ):
        train(Dealt(tmp_path / "lines", length=44), in_eval=True)


def test_evaluation_and_prediction_take_streams_too(stream):
    trainer = augmenting.make()
    kinds = (stream, Listed())
    means = [trainer.evaluate(kind, batch_size=10) for kind in kinds]
    rows = [trainer.predict(kind, batch_size=10) for kind in kinds]
    assert means[0] == means[1]
    assert torch.equal(*rows)


@pytest.mark.slow
def test_a_run_resumes_in_the_midst_of_an_epoch_of_a_stream(stream, tmp_path):
    whole = train(stream)
    for loader_workers, steps in ((0, 3), (2, 8), (0, 12)):
        result = train(stream, loader_workers, steps=steps, directory=tmp_path / "run")
    assert result == whole


# What can fail


@pytest.mark.parametrize("loader_workers", [0, 1])
@pytest.mark.parametrize(
    ("length", "message"),
    [
        (N + 3, rf"as its length says, {N + 3}, but after {N} it ends there"),
        (N - 3, rf"as its length says, {N - 3}, but after {N - 3} it has more"),
    ],
)
def test_a_stream_of_another_length_is_refused(tmp_path, length, message, loader_workers):
    with pytest.raises(unisono.errors.LoadingError, match=message):
        train(Stream(tmp_path / "lines", length=length), loader_workers, in_eval=True)


@pytest.mark.parametrize("loader_workers", [0, 1])
def test_a_sample_of_a_stream_that_cannot_be_read_is_named(stream, loader_workers):
    stream.path.write_text("0\n1\n2\nthree\n")
    with pytest.raises(
        unisono.errors.LoadingError, match="sample 3 of the stream raised Val"
    ) as caught:
        train(stream, loader_workers)
    assert caught.value.indices == (3,)


def test_a_stream_that_cannot_begin_is_refused_in_words(stream):
    stream.set_epoch = lambda: None
    with pytest.raises(unisono.errors.LoadingError, match="readable from its start in every epoch"):
        train(stream)


def test_after_a_sample_that_cannot_be_read_the_stream_begins_again():
    class Once(Numbers):
        def __iter__(self):
            for number in super().__iter__():
                if number == 4 and self.begun == 1:
                    raise OSError("try again")
                yield number

    fetch = fetcher(Once(), batch_size=6)
    with pytest.raises(unisono.errors.LoadingError, match="sample 4 of the stream raised OSError"):
        read(fetch, [(0, 0, 0)])
    assert read(fetch, [(0, 0, 0)]) == [[0, 3]]


class Unmeasured(IterableDataset):
    """The stream, without a length."""

    def __init__(self, stream):
        self.stream = stream

    def __iter__(self):
        return iter(self.stream)


STEPS = N // augmenting.BATCH_SIZE
"""That an epoch's samples are enough for, without its short last batch."""


@pytest.mark.parametrize("loader_workers", [0, 2])
def test_a_stream_without_a_length_trains_for_steps(stream, loader_workers):
    expected = train(stream, steps=STEPS)
    assert train(Unmeasured(stream), loader_workers, steps=STEPS) == expected


@pytest.mark.slow
def test_a_run_on_a_stream_without_a_length_goes_on(stream, tmp_path):
    for steps in (3, STEPS):
        trainer = augmenting.make(directory=tmp_path / "run")
        trainer.fit(Unmeasured(stream), batch_size=augmenting.BATCH_SIZE, steps=steps)
        assert (trainer.run.position.epoch, trainer.run.position.batch) == (0, steps)
    whole = augmenting.make()
    whole.fit(stream, batch_size=augmenting.BATCH_SIZE, steps=STEPS)
    assert trainer.digest() == whole.digest()
    in_one_program = augmenting.make()
    for steps in (2, STEPS):
        in_one_program.fit(Unmeasured(stream), batch_size=augmenting.BATCH_SIZE, steps=steps)
    assert in_one_program.digest() == whole.digest()


def test_a_stream_without_a_length_that_ends_too_early_says_so(stream):
    with pytest.raises(
        unisono.errors.LoadingError, match=f"after {N} it ends there: let it start again"
    ):
        train(Unmeasured(stream), steps=STEPS + 1)


@pytest.mark.parametrize("dataset", [Unmeasured([1]), ChainDataset([Unmeasured([1])])])
def test_a_stream_without_a_length_is_refused_where_epochs_are_counted(dataset):
    trainer = augmenting.make()
    for use in (
        lambda: trainer.fit(dataset, batch_size=10, epochs=3),
        lambda: trainer.fit(dataset, batch_size=10, epochs=3, steps=4),
        lambda: trainer.evaluate(dataset, batch_size=10),
        lambda: trainer.predict(dataset, batch_size=10),
        lambda: trainer.fit([0] * 20, batch_size=10, epochs=1, validate=dataset),
    ):
        with pytest.raises(TypeError, match=r"without `__len__`: train with `steps=` alone"):
            use()


def test_intervals_in_epochs_are_refused_where_none_ends(tmp_path):
    trainer = augmenting.make(directory=tmp_path, checkpoint="1 epoch")
    with pytest.raises(ValueError, match="`checkpoint` must be in steps"):
        trainer.fit(Unmeasured([1]), batch_size=10, steps=4)


@pytest.mark.parametrize(
    ("options", "name"), [({"shuffle": True}, "shuffle"), ({"sampler": range(9)}, "sampler")]
)
def test_the_order_of_a_stream_is_its_own(stream, options, name):
    with pytest.raises(ValueError, match=f"`{name}` must be left out for an IterableDataset"):
        augmenting.make().fit(stream, batch_size=10, steps=3, **options)
    augmenting.make().fit(stream, batch_size=10, steps=3, shuffle=False)


# Several workers


def train_on_streams(path):
    """Train in this worker, with a file of its own."""
    stream = Turned(path / f"{os.getpid()}")
    plain = Stream(path / f"{os.getpid()}")
    dealt = Dealt(path / f"{os.getpid()}")
    digests = [train(stream, n, steps=7, validate=plain) for n in (0, 2)]
    return [
        *digests,
        *(train(dataset, n, steps=7) for dataset, n in ((plain, 0), (dealt, 0), (dealt, 2))),
        train(Unmeasured(plain), steps=STEPS),
    ]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    digests = train_on_streams(tmp_path_factory.mktemp("alone"))
    assert digests[0] == digests[1]
    assert digests[2] == digests[3] == digests[4]
    return digests


@pytest.mark.slow
@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.long), 3])
def test_digest_is_the_same_on_any_number_of_workers_with_a_stream(tmp_path, alone, workers):
    assert unisono.launch(train_on_streams, tmp_path, workers=workers) == [alone] * workers


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Stream, Dealt])
def test_workers_that_are_killed_cost_nothing_with_a_stream(monkeypatch, tmp_path, kind):
    stream = kind(tmp_path / "lines")
    alone = train(stream)
    faults = "kill:rank=1,step=4,at=update; kill:rank=2,step=7,at=shard"
    monkeypatch.setenv("UNISONO_FAULTS", faults)
    assert unisono.launch(train, stream, workers=3) == [alone] * 3
