"""The file in which predictions lie: its two names, whose it is, and the rows of each host."""

import os
import threading

import pytest
import torch
from safetensors.torch import load_file
from tests.test_plainfile import STAND_INS
from tests.threads import in_threads

from unisono.plan.samples import SamplePlan
from unisono.runtime.plainfile import open_plain
from unisono.runtime.procfs import create_memory
from unisono.training.predict import check_path, finish_file, make_file, partial_path
from unisono.training.predictions import Rows, header_of, share_rows

HEADER, NUM_BYTES = header_of({"predictions": torch.zeros(2, 1)}, 4)


def opened(partial):
    fd = open_plain(partial, os.O_RDWR)
    os.pwrite(fd, HEADER, 0)
    return fd


def begin(path):
    """Have somebody collect rows for `path`; give the partial file's name and a descriptor."""
    partial = partial_path(path)
    make_file(partial, NUM_BYTES)
    return partial, opened(partial)


def fill(fd, value):
    Rows(fd, HEADER, ["predictions"], is_private=False).tensors["predictions"].fill_(value)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "rows.safetensors"


def test_two_who_predict_to_one_path_do_not_touch_each_others_rows(path):
    first, first_fd = begin(path)
    second, second_fd = begin(path)
    fill(first_fd, 1.0)
    fill(second_fd, 2.0)
    finish_file(first_fd, first, path)
    assert load_file(path)["predictions"].unique().tolist() == [1.0]
    finish_file(second_fd, second, path)
    assert load_file(path)["predictions"].unique().tolist() == [2.0]
    assert os.listdir(path.parent) == [path.name]
    os.close(first_fd)
    os.close(second_fd)


def test_the_next_lead_finds_that_the_file_has_its_name(path):
    partial, fd = begin(path)
    others_fd = opened(partial)
    finish_file(fd, partial, path)
    os.close(fd)
    finish_file(others_fd, partial, path)
    assert os.listdir(path.parent) == [path.name]
    os.close(others_fd)


def test_a_file_of_somebody_else_is_never_renamed(path):
    partial, fd = begin(path)
    path.write_bytes(b"old")
    partial.unlink()
    partial.write_bytes(b"not ours")
    with pytest.raises(FileNotFoundError, match="removed or replaced meanwhile"):
        finish_file(fd, partial, path)
    assert path.read_bytes() == b"old"
    os.close(fd)


def test_the_next_lead_makes_the_file_of_a_lost_one_anew(path):
    partial, fd = begin(path)
    make_file(partial, NUM_BYTES)
    next_fd = opened(partial)
    assert not os.path.samestat(os.fstat(fd), os.fstat(next_fd))
    finish_file(next_fd, partial, path)
    os.close(fd)
    os.close(next_fd)


def test_a_file_without_room_is_refused_and_leaves_nothing(path):
    with pytest.raises(OSError, match=r"File too large|No space left"):
        make_file(partial_path(path), 1 << 60)
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("seen", ["a symbolic link", "a symbolic link ", "a named pipe"])
def test_a_name_that_is_something_elses_is_refused_before_anything_is_computed(path, seen):
    outside = path.with_name("outside")
    outside.write_bytes(b"of somebody else")
    STAND_INS[seen](path, outside)
    with pytest.raises(OSError, match=r"a symbolic link|a device, pipe or socket"):
        check_path(path)
    with pytest.raises(OSError, match=r"a symbolic link|a named pipe"):
        open_plain(path, os.O_RDWR)
    assert outside.read_bytes() == b"of somebody else"


class FakeTeam:
    """One of the workers on some hosts, as threads."""

    def __init__(self, rank, hosts, barrier, posts):
        self.hosts, self._rank, self._barrier, self._posts = hosts, rank, barrier, posts
        self.host = next(at for at, ranks in enumerate(hosts) if rank in ranks)
        self.leads_host = rank == hosts[self.host][0]
        self._came, self._put = {}, b""

    def put_beside(self, data):
        self._put = data

    def meet(self, purpose):
        assert len(purpose) <= 24
        self._posts[self._rank], self._put = self._put, b""
        self._barrier.wait()
        far = (rank for rank in self._posts if rank not in self.hosts[self.host])
        self._came = {rank: self._posts[rank] for rank in far if self._posts[rank]}
        self._barrier.wait()
        return True

    def beside(self):
        return self._came


def predicted(num_samples):
    generator = torch.Generator().manual_seed(0)
    return {
        "logits": torch.randn(num_samples, 3, generator=generator),
        "half": torch.randn(num_samples, generator=generator).bfloat16(),
        "label": torch.arange(num_samples) % 5 == 0,
        "nothing": torch.zeros(num_samples, 0),
    }


def file_of(output):
    header, num_bytes = header_of(output, len(output["logits"]))
    fd = create_memory("predictions", num_bytes)
    rows = Rows(fd, header, list(output), is_private=False)
    os.close(fd)
    return rows


@pytest.mark.parametrize("chunk", [1, 40, 1 << 20])
@pytest.mark.parametrize("hosts", [[(0, 1), (2,)], [(0,), (1,), (2, 3)], [(0, 1)]], ids=str)
@pytest.mark.parametrize("num_samples", [1, 2, 23])
def test_each_host_gets_the_rows_of_all(hosts, num_samples, chunk):
    whole, shards = predicted(num_samples), 5
    plan = SamplePlan(num_samples, 2 * shards, shards, shuffle=False, in_blocks=True)
    host_of = {shard: shard % len(hosts) for shard in range(shards)}
    files = [file_of(whole) for _ in hosts]
    for shard, host in host_of.items():
        own = plan.positions(shard)
        files[host].write(own, {name: tensor[own] for name, tensor in whole.items()})
    ranks = [rank for ranks in hosts for rank in ranks]
    barrier, posts = threading.Barrier(len(ranks), timeout=20), {}

    def share(rank):
        team = FakeTeam(rank, hosts, barrier, posts)
        share_rows(files[team.host], team, host_of, plan, chunk)

    assert in_threads(len(ranks), share) == [None] * len(ranks)
    for rows in files:
        for name, tensor in whole.items():
            assert torch.equal(rows.tensors[name], tensor), name


def test_other_rows_are_refused():
    rows = predicted(4)
    others = rows | {"logits": torch.zeros(4, 2)}
    with pytest.raises(ValueError, match="must have the same names, dtypes and shapes"):
        file_of(rows).take(torch.arange(4), file_of(others).read(torch.arange(4)))
