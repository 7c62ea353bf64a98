"""Who is late, who waits, and which calls do not match: sentences, by tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import unisono
from unisono.runtime.hangs.explanation import Hang, describe, explain
from unisono.runtime.hangs.stacks import Frame, Sample, Stack
from unisono.runtime.hangs.whereabouts import (
    ProcessState,
    RankState,
    meeting_in_words,
    whereabouts,
)
from unisono.runtime.procfs import ProcessStat

PACKAGE = str(Path(unisono.__file__).parent)
SITE = "/env/lib/python3.11/site-packages/"
C10D = f"{SITE}torch/distributed/distributed_c10d.py"
DDP = f"{SITE}torch/nn/parallel/distributed.py"
RENDEZVOUS = f"{SITE}torch/distributed/rendezvous.py"
ENGINE = Frame("_engine_run_backward", f"{SITE}torch/autograd/graph.py", 800)
BACKWARD = Frame("Tensor.backward", f"{SITE}torch/_tensor.py", 500)
WRAPPER = Frame("wrapper", f"{SITE}torch/distributed/c10d_logger.py", 80)
TAKE = Frame("LoaderProcesses.take", f"{PACKAGE}/data/loader_processes.py", 112)
SERVE = Frame("_serve", f"{PACKAGE}/data/loader_processes.py", 188)
OUR_WAIT = Frame("GroupWork.wait", f"{PACKAGE}/runtime/c10d/execution.py", 48)
MESSAGE = Frame("read_message", f"{PACKAGE}/data/loader_processes.py", 90)
FETCH = Frame("_Reader._read_one", f"{PACKAGE}/data/fetch.py", 139)
TORCHS_TAKE = Frame("_BaseDataLoaderIter._try_get_data", f"{SITE}torch/utils/data/dataloader.py", 9)
TORCHS_LOOP = Frame("_worker_loop", f"{SITE}torch/utils/data/_utils/worker.py", 9)
TORCHS_FETCH = Frame("fetch", f"{SITE}torch/utils/data/_utils/fetch.py", 9)
GET = Frame("get", "/usr/lib/python3.11/multiprocessing/queues.py", 100)
LOAD = Frame("load_image", "/work/train.py", 88)
ITEM = Frame("Images.__getitem__", "/work/train.py", 70, {"self": "", "index": "10432"})
TRAIN = Frame("train", "/work/train.py", 40)
OTHER = Frame("train", "/work/train.py", 44)
ASLEEP, RUNS = ProcessStat("S"), ProcessStat("R")


def call(name: str, file: str = C10D) -> Frame:
    return Frame(name, file, 3000)


INIT = call("init_process_group")


def process(
    *stack: Frame, kernel: ProcessStat = ASLEEP, pid: int = 10, **more: object
) -> ProcessState:
    return ProcessState(pid, "python", Sample(tuple(stack)), kernel, kernel.computes, **more)  # type: ignore[arg-type]


def rank(number: int, *stack: Frame, kernel: ProcessStat = ASLEEP, **more: object) -> RankState:
    return RankState(number, process(*stack, kernel=kernel, pid=10 + number), **more)  # type: ignore[arg-type]


def first_line(*looks: RankState, hang: Hang | None = None) -> str:
    return explain(looks, hang or Hang(4.2)).partition("\n")[0]


def at_meeting(number: int, step: int = 57) -> RankState:
    return rank(number, TRAIN, meeting=f"gradients of step {step}", step=step)


def test_the_sentence_of_the_issue() -> None:
    late = rank(2, LOAD, ITEM, FETCH, TRAIN, step=57, is_behind=True)
    text = explain([at_meeting(0), at_meeting(1), late, at_meeting(3)], Hang(4.2, folder="/work"))
    assert text == (
        "Step 57 has been waiting for 4 s. Rank 2 has not arrived at the sum of gradients: it is "
        "in `load_image`, train.py:88 (loading sample 10432). Ranks 0, 1 and 3 wait for it.\n"
        "  rank 2, process 12:\n"
        "    load_image  train.py:88\n"
        "    Images.__getitem__  train.py:70\n"
        "    (1 frame of Unisono)\n"
        "    train  train.py:40"
    )


def test_several_late_ranks_are_each_told_of() -> None:
    late = [
        rank(n, LOAD, kernel=kernel, step=57, is_behind=True)
        for n, kernel in ((1, RUNS), (2, ASLEEP))
    ]
    assert first_line(at_meeting(0), *late) == (
        "Step 57 has been waiting for 4 s. Ranks 1 and 2 have not arrived at the sum of gradients: "
        "rank 1 is in `load_image`, train.py:88 (computing); rank 2 is in `load_image`, "
        "train.py:88. Rank 0 waits for them."
    )


def test_a_step_for_which_nobody_waits_is_told_of_with_what_is_usual() -> None:
    looks = [rank(n, LOAD, step=3) for n in (0, 1)]
    assert first_line(*looks, hang=Hang(31.0, 2.9)) == (
        "Step 3 has taken 31 s (usually 2.9 s). Ranks 0 and 1 have not finished it: rank 0 is in "
        "`load_image`, train.py:88; rank 1 is in `load_image`, train.py:88."
    )
    assert "(usually 3 ms)" in first_line(*looks, hang=Hang(31.0, 0.003))


def test_a_rank_that_has_ended_is_told_of() -> None:
    hang = Hang(4.0, missing=(1,))
    assert first_line(rank(0, call("barrier"), TRAIN), hang=hang) == (
        "A collective of torch.distributed has been waiting for 4 s. Rank 1 has ended. Rank 0 "
        "waits for it, in `train`, train.py:40."
    )


def test_nothing_is_said_where_nobody_waits() -> None:
    assert explain([rank(0, LOAD), rank(1, TRAIN)], Hang(10.0)) == ""


def test_calls_that_do_not_match_are_told_of_with_shape_and_line() -> None:
    looks = [
        rank(0, call("all_reduce"), WRAPPER, TRAIN, call="all_reduce of float32 [4]"),
        rank(1, call("broadcast"), WRAPPER, OTHER, call="broadcast of int64 [2, 3]"),
        rank(2, call("all_reduce"), WRAPPER, TRAIN, call="all_reduce of float32 [4]"),
    ]
    assert first_line(*looks) == (
        "A collective of torch.distributed has been waiting for 4 s. Ranks wait for each other. "
        "Ranks 0 and 2 are in `all_reduce of float32 [4]` (`train`, train.py:40); rank 1 is in "
        "`broadcast of int64 [2, 3]` (`train`, train.py:44). Every rank must make the same calls "
        "in the same order, with tensors of one shape and dtype."
    )


def test_one_call_that_some_have_made_oftener_is_told_of() -> None:
    looks = [rank(n, call("barrier"), TRAIN, call="barrier", num_calls=14 + n) for n in (0, 1)]
    assert first_line(*looks).endswith(
        "Ranks 0 and 1 are in `barrier` (`train`, train.py:40). But it is not the same one: for "
        "rank 0 call 14, for rank 1 call 15. Every rank must make the same calls in the same "
        "order, with tensors of one shape and dtype."
    )


@pytest.mark.parametrize(
    ("name", "noted"),
    [("recv", "recv of float32 [1] from rank 2"), ("barrier", "barrier among ranks 0, 2")],
)
def test_one_that_has_no_part_in_a_call_is_not_late(name: str, noted: str) -> None:
    looks = [rank(0, call(name), TRAIN, call=noted), rank(1, OTHER), rank(2, LOAD)]
    assert first_line(*looks) == (
        f"A collective of torch.distributed has been waiting for 4 s. Rank 2 has not arrived at "
        f"`{name}`: it is in `load_image`, train.py:88. Rank 0 waits for it, in `train`, "
        f"train.py:40."
    )


def test_a_group_that_is_not_made_is_told_of() -> None:
    waits = rank(0, call("init_process_group"), TRAIN, shown_wait="init_process_group")
    looks = [waits, rank(1, LOAD)]
    assert first_line(*looks) == (
        "`init_process_group` has been waiting for 4 s. Rank 1 has not arrived at "
        "`init_process_group`: it is in `load_image`, train.py:88. Rank 0 waits for it, in "
        "`train`, train.py:40."
    )


@pytest.mark.parametrize(
    ("stack", "name"),
    [
        ((call("all_reduce"), WRAPPER, TRAIN), "all_reduce"),
        # What the program has called, and not what that calls.
        ((call("all_gather"), call("all_gather_object"), TRAIN), "all_gather_object"),
        ((call("_store_based_barrier"), call("new_group"), TRAIN), "new_group"),
        ((ENGINE, BACKWARD, TRAIN), "the sum of gradients"),
        ((call("_sync_buffers", DDP), TRAIN), "the broadcast of buffers"),
        ((call("DistributedDataParallel.__init__", DDP), TRAIN), "DistributedDataParallel"),
        ((OUR_WAIT, TRAIN), "the end of a collective"),
        ((OUR_WAIT, ENGINE, TRAIN), "the sum of gradients"),
        ((call("_env_rendezvous_handler", RENDEZVOUS), INIT, TRAIN), "init_process_group"),
    ],
)
def test_a_collective_is_known_by_the_stack(stack: Stack, name: str) -> None:
    assert whereabouts(rank(0, *stack)).name == name


@pytest.mark.parametrize(
    ("more", "kernel", "name"),
    [
        ({"shown_wait": "init_process_group"}, ASLEEP, "init_process_group"),
        ({"shown_wait": "barrier (call 3)"}, RUNS, "barrier"),
        ({"meeting": "update of step 3"}, ASLEEP, "the update"),
        ({"meeting": "update of step 3", "is_behind": True}, ASLEEP, ""),
        ({"meeting": "update of step 3"}, ProcessStat("T"), ""),
        ({}, ASLEEP, ""),
    ],
)
def test_where_a_rank_says_that_it_is(
    more: dict[str, object], kernel: ProcessStat, name: str
) -> None:
    assert whereabouts(rank(0, TRAIN, kernel=kernel, **more)).name == name


@pytest.mark.parametrize(
    ("stack", "kernel"),
    [
        ((call("all_reduce"), TRAIN), RUNS),
        ((call("all_reduce"), TRAIN), ProcessStat("T")),
        ((ENGINE, BACKWARD, TRAIN), RUNS),
        ((LOAD, ENGINE, BACKWARD, TRAIN), ASLEEP),
        ((LOAD, call("DistributedDataParallel.forward", DDP), TRAIN), ASLEEP),
        ((), ASLEEP),
    ],
)
def test_one_that_computes_or_is_elsewhere_waits_for_nobody(
    stack: Stack, kernel: ProcessStat
) -> None:
    assert whereabouts(rank(0, *stack, kernel=kernel)).name == ""


def test_a_wait_for_work_is_known_by_its_line_and_the_call_before() -> None:
    def look(source: str, noted: str) -> RankState:
        return replace(rank(0, call=noted), process=process(TRAIN, source=source))

    found = whereabouts(look("    work.wait()\n", "all_reduce of float32 [3]"))
    assert found.name == "all_reduce"
    assert whereabouts(look("    work.wait()\n", "")).name == ""
    assert whereabouts(look("    time.sleep(9)\n", "barrier")).name == ""


def test_a_note_of_another_call_is_not_believed() -> None:
    assert whereabouts(rank(0, call("barrier"), call="all_reduce of float32 [3]")).call == ""
    nested = rank(0, call("all_gather_object"), call="all_gather of int64 [1]")
    assert whereabouts(nested).call == "all_gather of int64 [1]"


@pytest.mark.parametrize("take", [TAKE, TORCHS_TAKE])
@pytest.mark.parametrize(
    ("busy", "idle"),
    [
        ((LOAD, ITEM, FETCH, SERVE), (MESSAGE, SERVE)),
        ((LOAD, ITEM, TORCHS_FETCH, TORCHS_LOOP), (GET, TORCHS_LOOP)),
    ],
)
def test_who_waits_for_a_loader_process_is_where_that_is(
    take: Frame, busy: Stack, idle: Stack
) -> None:
    children = (
        process(*idle, pid=20),
        process(*busy, pid=21, kernel=ProcessStat("D")),
        ProcessState(22, "ffmpeg", kernel=ASLEEP),
    )
    late = rank(1, take, TRAIN, children=children, is_behind=True, step=3)
    text = explain([at_meeting(0, 3), late], Hang(4.0, folder="/work"))
    assert (
        "it waits for its loader process 21, which is in `load_image`, train.py:88 (loading sample "
        "10432; waits for a disk or a network file system). Rank 0 waits for it."
    ) in text
    assert "    loader process 20 is idle\n" in text
    assert "    loader process 21 is in `load_image`, train.py:88 (loading" in text
    assert "\n      load_image  train.py:88\n      Images.__getitem__  train.py:70\n" in text
    assert text.endswith("child process 22 (ffmpeg) runs")


@pytest.mark.parametrize(
    ("kernel", "more", "remark"),
    [
        (ProcessStat("T"), {}, "stopped by a signal; `kill -CONT 10` continues it"),
        (ProcessStat("t", tracer_pid=9), {}, "held by a debugger, process 9"),
        (RUNS, {}, "computing"),
        (ProcessStat("D"), {}, "waits for a disk or a network file system"),
        (ASLEEP, {"sample": Sample(trouble="py-spy is not installed")}, "py-spy is not installed"),
    ],
)
def test_what_the_kernel_says_is_added(
    kernel: ProcessStat, more: dict[str, object], remark: str
) -> None:
    look = ProcessState(
        10, "python", **{"sample": Sample((LOAD,)), **more}, kernel=kernel, computes=kernel.computes
    )  # type: ignore[arg-type]
    assert f"({remark})" in describe([RankState(0, look)], Hang())


def test_a_rank_without_a_stack_is_still_told_of() -> None:
    blind = ProcessState(11, "python", Sample(trouble="py-spy did not answer in time"), ASLEEP)
    late = RankState(1, blind, is_behind=True, step=57)
    assert first_line(at_meeting(0), late) == (
        "Step 57 has been waiting for 4 s. Rank 1 has not arrived at the sum of gradients: it is "
        "in code that cannot be seen (py-spy did not answer in time). Rank 0 waits for it."
    )
    gone = RankState(1, ProcessState(11), is_behind=True, step=57)
    assert "it has ended. Rank 0" in first_line(at_meeting(0), gone)


@pytest.mark.parametrize(
    ("purpose", "words"),
    [
        ("gradients of step 1", "the sum of gradients"),
        ("gradients of step 123456", "the sum of gradients"),
        ("gradients 123.1 generato", "the sum of gradients"),
        ("update of step 3", "the update"),
        ("start of a loop", "start of a loop"),
        ("evaluate", "evaluate"),
    ],
)
def test_meetings_are_named_for_those_who_know_none(purpose: str, words: str) -> None:
    assert meeting_in_words(purpose) == words


def test_all_ranks_are_described() -> None:
    looks = [
        rank(0, call("barrier"), TRAIN, call="barrier"),
        rank(1, LOAD, TRAIN, kernel=RUNS, step=5),
    ]
    assert describe(looks, Hang(folder="/work")).splitlines() == [
        "rank 0 (process 10) waits for others in `barrier` (`train`, train.py:40)",
        "  (1 frame of torch)",
        "  train  train.py:40",
        "rank 1 (process 11, step 5) is in `load_image`, train.py:88 (computing)",
        "  load_image  train.py:88",
        "  train  train.py:40",
    ]
