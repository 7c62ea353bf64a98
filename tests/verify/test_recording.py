import errno
import os
import resource
import subprocess
import sys

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch.utils.data import Dataset, Subset, TensorDataset

from unisono.tools.verify import recorder as scratch
from unisono.tools.verify.digests import (
    WIDTH,
    base_of,
    contents_of,
    digest_of_tensor,
    row_hashes,
    sketch_of,
)
from unisono.tools.verify.module_hooks import name_without_wrappers
from unisono.tools.verify.reading import Identities, resolve
from unisono.tools.verify.recorder import copy_folder, replace_links
from unisono.tools.verify.trace import (
    Backward,
    Collective,
    Contents,
    EvaluationPass,
    Forward,
    Gradient,
    Iteration,
    LoaderFacts,
    ModelState,
    Note,
    OptimizerStep,
    RankTrace,
    line_of,
    read_trace,
)
from unisono.tools.verify.verifier import feed_of


@pytest.mark.slow
@hypothesis.given(st.integers(1, 700), st.floats(-3, 3), st.floats(-3, 3))
def test_sketches_are_linear(length, a, b):
    generator = torch.Generator().manual_seed(length)
    x, y = torch.randn(2, length, generator=generator, dtype=torch.float64)
    combined = np.array(sketch_of(a * x + b * y))
    parts = a * np.array(sketch_of(x)) + b * np.array(sketch_of(y))
    assert len(combined) == min(length, WIDTH)
    np.testing.assert_allclose(combined, parts, rtol=1e-6, atol=1e-6)


def test_a_sketch_is_about_as_long_as_the_vector():
    vectors = [torch.randn(5000, generator=torch.Generator().manual_seed(n)) for n in range(20)]
    ratios = [np.linalg.norm(sketch_of(v)) / v.norm().item() for v in vectors]
    assert 0.7 < min(ratios) <= max(ratios) < 1.3


def test_digests_know_bits_of_every_dtype_and_shape():
    zero = torch.zeros(3)
    assert digest_of_tensor(zero) != digest_of_tensor(-zero)
    for tensor in (torch.tensor(1.0), torch.ones(2, dtype=torch.bfloat16), torch.zeros(0)):
        assert digest_of_tensor(tensor) == digest_of_tensor(tensor.clone())


def test_rows_are_told_apart_by_all_tensors_of_a_batch():
    x, y = torch.tensor([[1.0, 2.0], [1.0, 2.0]]), torch.tensor([0, 1])
    assert len(set(row_hashes([x]))) == 1
    assert len(set(row_hashes({"x": x, "y": y}))) == 2
    assert row_hashes("text") == []


class Augmented(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.full((2,), float(index)) + torch.rand(()) + np.random.rand()


def test_contents_do_not_depend_on_generators_and_leave_them_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = contents_of(Augmented())
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert contents_of(Augmented()) == first
    assert len(set(first)) == 5


class Broken(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        if index == 1:
            raise OSError("no such file")
        return torch.tensor(index)


def test_a_dataset_that_cannot_be_read_has_fewer_contents():
    assert len(contents_of(Broken())) == 1


def test_subsets_of_subsets_lead_to_the_dataset():
    data = TensorDataset(torch.arange(10))
    base, index_of = base_of(Subset(Subset(data, range(5, 10)), [3, 1]))
    assert base is data
    assert [index_of(0), index_of(1)] == [8, 6]


def test_wrappers_leave_no_trace_in_names():
    assert name_without_wrappers("module.head.weight") == "head.weight"
    assert name_without_wrappers("_forward_module.module._orig_mod.w") == "w"
    assert name_without_wrappers("net.module.w") == "net.w"
    assert name_without_wrappers("submodule.w") == "submodule.w"


def rank(number, kept, contents, batch_size=2):
    indices = [index for batch in kept for index in batch]
    return RankTrace(
        number,
        (
            LoaderFacts(0, 0, len(contents), batch_size),
            Iteration(indices=indices, kept=kept),
            Contents(0, len(contents), contents),
        ),
    )


@pytest.mark.parametrize(
    ("kept", "one_by_one", "batches", "size"),
    [
        (([[0, 2], [4]], [[1, 3]]), False, [[0, 2, 1, 3], [4]], 4),  # all together
        (([[0, 2]], [[1, 3]]), True, [[0, 2], [1, 3]], 2),  # one rank accumulates more passes
        (([[0, 1]], [[0, 1]]), False, [[0, 1]], 2),  # what all ranks read is read once
    ],
)
def test_one_rank_reads_what_all_read(kept, one_by_one, batches, size):
    ranks = [rank(number, of_rank, "abcde") for number, of_rank in enumerate(kept)]
    fed = feed_of(ranks, one_by_one=one_by_one)
    assert fed["epochs"]["0/0"] == [[[at, "abcde"[at]] for at in batch] for batch in batches]
    assert (fed["batch_sizes"], fed["lengths"]) == ({"0": size}, {"0": 5})


def test_parts_that_ranks_made_for_themselves_are_known_by_content():
    ranks = [rank(0, [[0, 1]], "ab"), rank(1, [[0, 1]], "cd")]
    fed = feed_of([rank(0, [[0, 1]], "ab"), rank(1, [[1, 0]], "cd")])
    assert fed["epochs"]["0/0"] == [[[0, "a"], [1, "b"], [1, "d"], [0, "c"]]]
    assert fed["lengths"] == {"0": -1}
    assert Identities(ranks).name(ranks[1], 0, [0]) == ["c"]


def test_equal_samples_are_told_apart_by_their_index():
    ranks = [rank(0, [], "aab"), rank(1, [], "aab")]
    assert Identities(ranks).name(ranks[0], 0, [0, 1]) == ["0:0", "0:1"]
    others = [rank(0, [], "aab"), rank(1, [], "xxy")]
    assert Identities(others).name(others[0], 0, [0]) is None


def test_records_are_read_as_they_were_written_but_a_line_that_was_cut_off(tmp_path):
    gradients = {"t": Gradient([1.5], [[0.5], [1.0]]), "kind": Gradient([2.0], [], [3.0])}
    step = OptimizerStep(
        lr=[0.1], gradients=gradients, state=ModelState({"w": "a"}), backwards=[0, 1]
    )
    records = [Forward(0, [0, 1, 2], ["a"]), Backward(0, draws=True), step, Note("end", "ended")]
    lines = "".join(map(line_of, records))
    (tmp_path / "rank0.jsonl").write_text(lines + lines[:20])
    trace = read_trace(tmp_path, 0)
    assert (trace.records, trace.how, trace.num_steps) == (records, "ended", 1)
    assert read_trace(tmp_path, 1).records == []


def test_passes_belong_to_the_step_behind_them_and_the_rest_is_evaluation():
    at_train, at_eval = [0, 0, 0], [1, 0, 0]
    trace = RankTrace(
        0,
        [
            Iteration(0, 0, 0, [0, 1], [[0], [1]]),
            Iteration(1, 0, 0, [4], [[4]]),
            Contents(0, 5, "abcde"),
            Forward(0, at_train, ["x"]),
            Backward(0, draws=True),
            OptimizerStep(backwards=(0, 1)),
            Collective("all_reduce", [1.0]),  # before the evaluation
            Forward(1, at_eval, ["y"], is_training=False, may_train=False),
            Note("printed", ["0.5"]),
            Collective("all_reduce", [2.0]),
            Forward(2, [0, 0, 1], ["z"]),
            Backward(2),
            Note("end", "stopped"),
        ],
    )
    (read,) = resolve([trace])
    (step,), (evaluation,) = read.of(OptimizerStep), read.of(EvaluationPass)
    assert (step.samples, step.rows, step.draws) == (("a",), ("x",), True)
    assert [(one.role, one.plan) for one in read.of(Iteration)] == [
        ("train", ["a", "b"]),
        ("eval", ["e"]),
    ]
    assert (evaluation.samples, evaluation.rows, evaluation.printed) == (["e"], ["y"], ["0.5"])
    assert (evaluation.collectives, evaluation.is_finished) == (
        [Collective("all_reduce", [2.0])],
        True,
    )


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "COPIED_AT_MOST_BYTES", 10)
    source = tmp_path / "source folder"
    (source / "package" / "deep").mkdir(parents=True)
    (source / ".git").mkdir()
    (source / "package" / "deep" / "a.py").write_text("a = 1")
    (source / "model.pt").write_text("a large checkpoint")
    (source / ".git" / "config").write_text("x")
    os.mkfifo(source / "pipe")
    (source / "dangling").symlink_to("nowhere")
    copy_folder(source, tmp_path / "copy")
    return source, tmp_path / "copy"


def test_small_files_are_copied_and_the_rest_is_linked(folder):
    source, copy = folder
    (copy / "package" / "deep" / "a.py").write_text("b")
    assert (source / "package" / "deep" / "a.py").read_text() == "a = 1"
    assert (copy / "model.pt").is_symlink()
    assert (copy / ".git").is_symlink()
    (copy / "package" / "new.txt").write_text("new")
    assert not (source / "package" / "new.txt").exists()


def test_a_large_file_is_left_alone_by_who_writes_and_so_are_links_elsewhere(folder, tmp_path):
    source, copy = folder
    replace_links(str(copy), str(copy / "model.pt"))
    assert (copy / "model.pt").read_text() == "a large checkpoint"
    (copy / "model.pt").write_text("other")
    assert (source / "model.pt").read_text() == "a large checkpoint"
    (tmp_path / "mine").symlink_to(source / "model.pt")
    replace_links(str(copy), str(tmp_path / "mine"))
    assert (tmp_path / "mine").is_symlink()


NATIVE_WRITES = """
import sys
import torch
from unisono.tools.verify.recorder import copy_before_writing

copy_before_writing(sys.argv[1])
from safetensors.torch import save_file
save_file({"a": torch.ones(1)}, filename="first")
torch.save({"a": torch.ones(1)}, "second")
open("third", "w").close()
"""


@pytest.mark.slow
def test_whatever_a_program_writes_with_the_large_files_of_its_folder_stay(tmp_path):
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in ("first", "second", "third"):
        (tmp_path / name).write_text("mine")
        (folder / name).symlink_to(tmp_path / name)
    subprocess.run([sys.executable, "-c", NATIVE_WRITES, folder], cwd=folder, check=True)
    for name in ("first", "second", "third"):
        assert (tmp_path / name).read_text() == "mine"
        assert (folder / name).read_bytes() != b"mine"


def test_a_folder_that_takes_no_whole_copy_is_named_and_keeps_no_partial_file(tmp_path):
    source, copy = tmp_path / "source", tmp_path / "copy"
    source.mkdir()
    (source / "a").write_bytes(bytes(9000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with pytest.raises(OSError, match=str(copy / "a")) as raised:
            copy_folder(source, copy)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG
    assert not os.listdir(copy)


WRITES_INTO_LINKED_FOLDERS = """
import os, shutil, sys
from pathlib import Path
import torch
from unisono.tools.verify.recorder import copy_before_writing

copy_before_writing(os.getcwd())
torch.save(1, "out/model.pt")
open("out/sub/deep/a", "w").close()
open(b"out/sub/../b", "w").close()
os.remove("out/c")
os.replace("out/d", "out/e")
os.truncate("out/f", 0)
shutil.rmtree("out/run")
os.rmdir("out/empty")
os.mkdir("out/new")
os.symlink("e", "out/link")
Path("out/g").touch()
os.chmod("out/h", 0)
os.chdir("env")
open("i", "w").close()
"""


@pytest.mark.slow
def test_nothing_that_is_written_into_linked_folders_gets_there(tmp_path):
    source, real = tmp_path / "source", tmp_path / "real"
    for folder in (real / "sub" / "deep", real / "run", real / "empty", source / "env"):
        folder.mkdir(parents=True)
    for folder in (real, real / "sub" / "deep", real / "run", source / "env"):
        for name in ("model.pt", *"abcdefghi"):
            (folder / name).write_text("mine")
    (source / "out").symlink_to(real)

    def found():
        paths = sorted([*real.rglob("*"), *source.rglob("*")])
        return [(path, path.lstat().st_mtime_ns, path.stat().st_mode) for path in paths]

    before = found()
    copy_folder(source, tmp_path / "copy")
    command = [sys.executable, "-c", WRITES_INTO_LINKED_FOLDERS]
    subprocess.run(command, cwd=tmp_path / "copy", check=True)
    assert found() == before
    assert set(os.listdir(tmp_path / "copy" / "out")) == {
        *("model.pt", "sub", "new", "link", *"abefghi"),
    }


def test_a_copy_inside_of_the_folder_does_not_copy_itself(tmp_path):
    (tmp_path / "a").write_text("a")
    (tmp_path / "temporary").mkdir()
    copy_folder(tmp_path, tmp_path / "temporary" / "copy")
    assert sorted(os.listdir(tmp_path / "temporary" / "copy")) == ["a"]


def test_beyond_the_limit_everything_is_a_link(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch, "ENTRIES_AT_MOST", 3)
    source = tmp_path / "source"
    source.mkdir()
    for number in range(6):
        (source / f"{number}").write_text("x")
    copy_folder(source, tmp_path / "copy")
    links = [path.is_symlink() for path in (tmp_path / "copy").iterdir()]
    assert links.count(True) == 4
