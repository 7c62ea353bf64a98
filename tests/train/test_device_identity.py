"""What of a device belongs to a run's identity, and what is said where workers' devices differ."""

import os
import subprocess
import sys

import pytest
import torch
from tests.accelerator import sim
from tests.promises import promise
from tests.warm import processes
from torch import nn

import unisono
from unisono.errors import MismatchError
from unisono.plan.samples import SamplePlan
from unisono.runtime.device import Device, default_generator, host
from unisono.training import identity as device_fingerprint
from unisono.training.computing import arithmetic_in_words, tf32_in_words
from unisono.training.identity import compare, fingerprint_of, identity, kinds_of

PLAN = SamplePlan(num_samples=8, batch_size=4, shards=2, seed=0, shuffle=False)
BEFORE = {
    "arithmetic",
    "seed",
    "shards",
    "batch_size",
    "sampler",
    "shuffle",
    "dataset length",
    "threads",
    "torch",
    "processor",
}


def test_on_the_cpu_a_fingerprint_is_all_that_is_new():
    capability = torch.backends.cpu.get_cpu_capability()
    facts = identity(PLAN, {}, host(), is_kept=True)
    assert facts.keys() == BEFORE | {"fingerprint"}
    assert facts["processor"] == f"{capability} {os.uname().machine}"
    assert identity(PLAN, {}, host(), is_kept=False).keys() == BEFORE


@promise("accelerators.3")
@pytest.mark.slow
def test_on_an_accelerator_model_versions_and_settings_are_there(accelerator, monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    device = Device(torch.device("sim:1"))
    facts = identity(PLAN, {"exact": True}, device, is_kept=True)
    assert facts.keys() == BEFORE | {"fingerprint", "tf32", "exact"}
    assert facts["processor"] == (
        "sim test accelerator, capability 0.0, CUBLAS_WORKSPACE_CONFIG=:16:8"
    )
    assert facts["tf32"] == tf32_in_words()


class GPU:
    """What torch's module for GPUs says of one."""

    multi_processor_count = 132

    def get_device_name(self, device):
        return "NVIDIA H100"

    def get_device_capability(self, device):
        return (9, 0)

    def get_device_properties(self, device):
        return self


def test_a_gpu_is_named_with_its_processors_and_libraries(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    device = host()
    device.torch, device.is_host, device._module = torch.device("cuda:0"), False, GPU()
    assert device.facts == (
        "cuda NVIDIA H100, capability 9.0, 132 multiprocessors, CUDA 12.8, cuDNN 91002, "
        "CUBLAS_WORKSPACE_CONFIG=:4096:8"
    )


def test_tf32_is_told_as_it_is():
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    try:
        matmul.fp32_precision, conv.fp32_precision = "tf32", "ieee"
        assert tf32_in_words().split(", ")[0] == "products"
        assert "convolutions" not in tf32_in_words()
        matmul.fp32_precision = "ieee"
        assert "products" not in tf32_in_words()
    finally:
        matmul.fp32_precision, conv.fp32_precision = before


@pytest.fixture
def arithmetic_is_put_back():
    matmul = torch.backends.mkldnn.matmul
    before = torch.backends.mkldnn.enabled, matmul.fp32_precision
    yield
    torch.backends.mkldnn.enabled, matmul.fp32_precision = before
    torch.set_flush_denormal(False)
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.mha.set_fastpath_enabled(True)


@pytest.mark.usefixtures("arithmetic_is_put_back")
def test_what_is_switched_on_the_cpu_is_told_as_it_is():
    assert arithmetic_in_words() == "as usual"
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    assert arithmetic_in_words() == "products in bf16"
    torch.backends.mkldnn.enabled = False
    torch.set_flush_denormal(True)
    said = "products in bf16, without oneDNN, denormal numbers as 0"
    assert arithmetic_in_words() == said
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.mha.set_fastpath_enabled(False)
    said += ", attention without flash kernels, attention without its fast path"
    assert arithmetic_in_words() == said


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train_in_another_arithmetic(switch):
    if unisono.world().rank == 1:
        switch(torch)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = unisono.Trainer(model, optimizer, loss_of, shards=2)
    samples = torch.utils.data.TensorDataset(torch.randn(8, 3), torch.zeros(8).long())
    trainer.fit(samples, batch_size=4, epochs=1)


@promise("accelerators.3")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("switch", "words"),
    [
        (lambda torch: torch.set_float32_matmul_precision("medium"), "products in bf16"),
        (lambda torch: torch.set_flush_denormal(True), "denormal numbers as 0"),
    ],
)
def test_another_arithmetic_on_one_worker_is_refused(switch, words):
    with pytest.raises(unisono.UnisonoError, match=f"torch's arithmetic.*{words}"):
        unisono.launch(train_in_another_arithmetic, switch, workers=2)


@pytest.mark.usefixtures("arithmetic_is_put_back")
def test_another_arithmetic_in_the_midst_of_a_loop_is_refused(tmp_path):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = unisono.Run(model, optimizer, shards=1, directory=tmp_path)
    with pytest.raises(RuntimeError, match="from 'as usual' to 'denormal numbers as 0'"):
        for step in run.steps(torch.randn(8, 3), batch_size=4, epochs=1):
            with step:
                for batch in step.shards:
                    step.backward(model(batch).square().mean())
            torch.set_flush_denormal(True)


OLD = {"processor": "AVX2 x86_64", "torch": "2.13.0", "threads": 1}


@promise("accelerators.3")
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ({}, {}, []),
        # a checkpoint of before there were any
        ({}, {"fingerprint": "b", "optimizer": "Adam", "samples": {"sample 0": "a"}}, []),
        ({"fingerprint": "a"}, {"fingerprint": "a"}, []),
        ({"fingerprint": "a"}, {"fingerprint": ""}, []),
        ({"fingerprint": ""}, {"fingerprint": "b"}, []),
        ({"fingerprint": "a"}, {"fingerprint": "b"}, ["computes other bits than the one that"]),
        # it follows from what is said anyway
        (
            {"fingerprint": "a"},
            {"fingerprint": "b", "processor": "cuda NVIDIA H100"},
            ["processor was 'AVX2 x86_64' in the checkpoint and is 'cuda NVIDIA H100' now"],
        ),
        (
            {"fingerprint": "a"},
            {"fingerprint": "b", "torch": "3"},
            ["torch was '2.13.0' in the checkpoint and is '3' now: training continues, but the"],
        ),
        ({"tf32": "off"}, {"tf32": "products"}, ["tf32 was 'off' in the checkpoint and is"]),
        ({"exact": True}, {"exact": False}, ["exact was True in the checkpoint and is False now"]),
    ],
)
def test_what_differs_from_a_checkpoint_is_told(old, new, words):
    told = compare(OLD | old, OLD | new)
    assert len(told) == len(words)
    assert all(word in line for word, line in zip(words, told, strict=True))


def test_a_fingerprint_is_the_same_whatever_the_program_has_set():
    device_fingerprint._known().clear()
    generator = torch.random.get_rng_state()
    expected = fingerprint_of(host())
    assert torch.equal(torch.random.get_rng_state(), generator)
    assert len(expected) == 16
    torch.manual_seed(5)
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with (
            torch.no_grad(),
            torch.inference_mode(),
            torch.autocast("cpu", torch.bfloat16),
            torch.device("meta"),
        ):
            device_fingerprint._known().clear()
            assert fingerprint_of(host()) == expected
    finally:
        torch.set_default_dtype(dtype)


@pytest.mark.slow
def test_a_fingerprint_of_an_accelerator_has_no_effect_on_generators(accelerator):
    device = Device(torch.device("sim:0"))
    device.seed(3)
    states = [default_generator(device.torch).get_state(), torch.random.get_rng_state()]
    first = fingerprint_of(device)
    assert len(first) == 16
    after = [default_generator(device.torch).get_state(), torch.random.get_rng_state()]
    assert all(map(torch.equal, states, after))
    device_fingerprint._known().clear()
    assert fingerprint_of(device) == first
    assert fingerprint_of(Device(torch.device("sim:1"))) == first


def test_without_memory_there_is_no_fingerprint(accelerator):
    accelerator.limit(0, 2**20)
    assert fingerprint_of(Device(torch.device("sim:0"))) == ""


SAID = (
    "from unisono.runtime.device import host\n"
    "from unisono.training.identity import fingerprint_of\n"
    "print(host().facts, fingerprint_of(host()), sep=chr(10))"
)


def said_elsewhere(**variables):
    answer = processes.run(
        [sys.executable, "-c", SAID],
        popen=subprocess.Popen if variables else processes.start,  # those are read with torch
        env={**os.environ, **variables},
        check=True,
    )
    return answer.stdout.split("\n")[:2]


@pytest.mark.slow
def test_another_processor_of_the_same_name_has_another_fingerprint():
    facts, here = said_elsewhere()
    assert said_elsewhere() == [facts, here]
    # As on a processor with fewer instructions; the identity of before does not show it.
    other_facts, there = said_elsewhere(ONEDNN_MAX_CPU_ISA="SSE41")
    assert other_facts == facts
    assert there != here


def train(directory, steps):
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    trainer = unisono.Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: model(batch).square().mean(),
        shards=2,
        directory=directory,
    )
    trainer.fit(torch.ones(8, 3), batch_size=4, steps=steps)


def test_a_run_that_goes_on_elsewhere_is_warned_once(tmp_path, capsys, monkeypatch):
    train(tmp_path, 1)
    train(tmp_path, 2)
    assert "other bits" not in capsys.readouterr().err
    monkeypatch.setitem(device_fingerprint._known(), "cpu as usual", "0" * 16)
    train(tmp_path, 3)
    told = capsys.readouterr()
    assert (told.out + told.err).count("this machine computes other bits than the one") == 1


def test_without_a_directory_no_fingerprint_is_taken(monkeypatch):
    device_fingerprint._known().clear()
    train(None, 1)
    assert device_fingerprint._known() == {}


A, B = "cuda NVIDIA A100, capability 8.0, 108", "cuda NVIDIA H100, capability 9.0, 132"


@pytest.mark.parametrize(
    ("heard", "kinds"),
    [
        ({0: (A, "a"), 1: (A, "a")}, {0: "a", 1: "a"}),
        # of one model, but they compute other bits
        ({0: (A, "a"), 1: (A, "b")}, {0: "a", 1: "b"}),
        # of two models that compute the same
        ({0: (A, "a"), 1: (B, "a")}, {0: "a", 1: "a"}),
        # one had no memory to find it out
        ({0: (A, "a"), 1: (A, "")}, {0: A, 1: A}),
        ({0: (A, "a"), 1: (B, "")}, {0: A, 1: B}),
    ],
)
def test_devices_of_a_kind_are_those_with_equal_fingerprints(heard, kinds):
    assert kinds_of(heard) == kinds


def train_mixed(mixed, exact):
    """Train as one of several workers, whose updates differ as mixed devices' do."""
    sim.install()
    rank = unisono.world().rank
    device_fingerprint._known()[f"sim:{rank} as usual {tf32_in_words()}"] = (
        f"{rank if mixed else 0:016}"
    )
    torch.manual_seed(1)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = unisono.Run(model, optimizer, shards=8, device="sim", seed=2, exact=exact)
    for step in run.steps(torch.arange(192.0).view(64, 3) / 192, batch_size=16, steps=4):
        with step:
            for batch in step.shards:
                step.backward(model(batch).square().mean())
        if step.is_done and mixed:
            model.bias.data.add_(rank * 1e-6)
    return [p.tolist() for p in model.parameters()]


@pytest.fixture
def simulated():
    if reason := sim.why_not():
        pytest.skip(reason)


@promise("accelerators.4")
@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
def test_devices_that_round_differently_are_refused():
    with pytest.raises(MismatchError, match=r"on rank 0 and .* on rank 1\): use .*exact=False"):
        unisono.launch(train_mixed, True, True, workers=2)


@promise("accelerators.2", "accelerators.4")
@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
def test_replicas_that_round_differently_are_not_compared(capfd):
    weights, others = unisono.launch(train_mixed, True, False, workers=2)
    assert weights != others
    torch.testing.assert_close(weights[0], others[0], rtol=0, atol=1e-3)
    said = capfd.readouterr()
    assert (said.out + said.err).count("the workers' devices round differently") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("simulated")
def test_nothing_is_said_of_devices_that_compute_the_same_bits(capfd):
    weights, others = unisono.launch(train_mixed, False, True, workers=2)
    assert weights == others
    said = capfd.readouterr()
    assert "round differently" not in said.out + said.err
