"""How busy a machine was follows from two looks at what the kernel says; what it hides is None."""

import pytest

from unisono.machine_load import (
    LoadLook,
    LoadWatch,
    MachineLoad,
    load_between,
    parse_proc_stat,
    parse_throttling,
)

PROC_STAT = """\
cpu  1000 20 300 5000 40 5 6 70 0 0
cpu0 500 10 150 2500 20 2 3 35 0 0
intr 123 0 9
ctxt 5
procs_running 7
procs_blocked 1
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (PROC_STAT, (1331, 70, 7)),
        ("", (None, None, None)),
        ("cpu  1 2 3\nprocs_running x\n", (None, None, None)),
        ("cpu\n\nprocs_running 3", (None, None, 3)),
        ("cpu " + "x " * 8, (None, None, None)),
    ],
)
def test_the_time_of_all_cores_is_read(text, found):
    assert parse_proc_stat(text) == found


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("usage_usec 5\nnr_throttled 3\nthrottled_usec 2500000\n", 2.5),  # v2
        ("nr_periods 4\nthrottled_time 1500000000", 1.5),  # v1
        ("usage_usec 5\n", None),
        ("throttled_usec many", None),
        ("", None),
    ],
)
def test_how_long_a_limit_has_stopped_a_container_is_read(text, seconds):
    assert parse_throttling(text) == seconds


def look(at_s, busy_s=0.0, stolen_s=0.0, workers_s=0.0, throttled_s=0.0, runnable=1):
    return LoadLook(at_s, busy_s, stolen_s, workers_s, throttled_s, runnable)


def test_what_was_used_between_two_looks():
    load = load_between(look(10.0), look(14.0, 7.0, 0.8, 4.0, 1.0, 5), 2)
    assert load == MachineLoad(2, 1.75, 1.0, 0.1, 0.25, 3.0)
    assert load.as_json["busy"] == 1.75
    assert load.in_words == (
        "2 cores, of which the workers use 1.0, other programs 0.8, the container's limit stops "
        "them 25 % of the time, the hypervisor takes 10 %"
    )


def test_what_nobody_knows_is_not_told():
    nothing = LoadLook(1.0, None, None, 0.0, None, None)
    load = load_between(nothing, LoadLook(3.0, None, None, 1.0, None, None), 4)
    assert load == MachineLoad(4, None, 0.5)
    assert load.in_words == "4 cores, of which the workers use 0.5"
    assert not load.is_crowded


@pytest.mark.parametrize("passed_s", [0.0, -1.0])
def test_a_clock_that_stands_still_gives_no_load(passed_s):
    assert load_between(look(1.0), look(1.0 + passed_s), 2) is None


def test_counters_that_go_back_are_no_load():
    assert load_between(look(1.0, busy_s=9.0), look(2.0, busy_s=3.0), 2).busy == 0.0


@pytest.mark.parametrize(
    ("load", "is_crowded"),
    [
        (MachineLoad(2, 2.0, 2.0, runnable=2.0), False),
        (MachineLoad(2, 2.0, 0.5, runnable=3.0), True),
        (MachineLoad(2, 0.9, 0.9, throttled=0.3, runnable=1.0), True),
        (MachineLoad(2, 2.5, 0.9), True),
    ],
)
def test_a_machine_is_crowded_where_more_want_to_run_than_can(load, is_crowded):
    assert load.is_crowded is is_crowded


def fake(root, *, throttled_usec, running, cgroup="0::/pod/one"):
    for folder in ("proc/self", "proc/7", "sys/fs/cgroup/pod/one"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    text = PROC_STAT.replace("running 7", f"running {running}")
    (root / "proc/stat").write_text(text + "x" * 100_000)
    (root / "proc/7/stat").write_text("7 (a) R 1 " + "0 " * 9 + "100 50 " + "0 " * 6 + "1 0")
    path = root / "sys/fs/cgroup/pod/one/cpu.stat"
    path.write_text(f"throttled_usec {throttled_usec}\n")


def test_a_machine_is_looked_at_again_and_again(tmp_path):
    now_s = [100.0]
    fake(tmp_path, throttled_usec=0, running=1)
    watch = LoadWatch(lambda: now_s[0], tmp_path)
    assert watch.look([7]) is None
    now_s[0] += 2.0
    fake(tmp_path, throttled_usec=1_000_000, running=5)
    load = watch.look([7, 8])
    assert (load.busy, load.workers, load.throttled, load.runnable) == (0.0, 0.0, 0.5, 3.0)


@pytest.mark.parametrize("cgroup", ["", "nonsense", "0::/../../etc", "4:cpu,cpuacct:/gone"])
def test_a_place_that_is_not_there_is_no_error(cgroup, tmp_path):
    fake(tmp_path, throttled_usec=5, running=1, cgroup=cgroup)
    watch = LoadWatch(lambda: 0.0, tmp_path)
    assert watch._look([7]).throttled_s is None


def test_a_group_of_the_first_version_is_found(tmp_path):
    fake(tmp_path, throttled_usec=5, running=1, cgroup="4:cpuacct,cpu:/pod\n3:memory:/x")
    folder = tmp_path / "sys/fs/cgroup/cpuacct,cpu/pod"
    folder.mkdir(parents=True)
    (folder / "cpu.stat").write_text("throttled_time 3000000000\n")
    assert LoadWatch(lambda: 0.0, tmp_path)._look([]).throttled_s == 3.0


def test_a_machine_without_proc_says_nothing(tmp_path):
    look = LoadWatch(lambda: 0.0, tmp_path)._look([1])
    assert (look.busy_s, look.stolen_s, look.throttled_s, look.runnable) == (None,) * 4
