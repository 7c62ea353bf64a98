"""TF32: torch's switches are set while a run computes, and put back, in either of their names."""

import contextlib

import pytest
import torch
from tests.once import computed_once

import unisono
from unisono.training.computing import tf32_switched

BACKENDS = torch.backends
NEW = (BACKENDS.cuda.matmul, BACKENDS.cudnn.conv, BACKENDS.cudnn.rnn, BACKENDS.mkldnn.matmul)


def switches():
    """Read all switches; those of the old names where torch tells them."""
    values = [switch.fp32_precision for switch in NEW]
    for read in (torch.get_float32_matmul_precision, lambda: BACKENDS.cudnn.allow_tf32):
        try:
            values.append(read())
        except RuntimeError:
            values.append("torch does not tell")
    return values


@pytest.fixture(autouse=True)
def switches_put_back():
    before = switches()
    yield
    torch.set_float32_matmul_precision(before[4])
    BACKENDS.cudnn.allow_tf32 = before[5]
    for switch, value in zip(NEW, before[:4], strict=True):
        switch.fp32_precision = value


PROGRAMS = {
    "none": lambda: None,
    "old high": lambda: torch.set_float32_matmul_precision("high"),
    "old medium": lambda: torch.set_float32_matmul_precision("medium"),
    "old allow": lambda: setattr(BACKENDS.cuda.matmul, "allow_tf32", True),
    "old cudnn": lambda: setattr(BACKENDS.cudnn, "allow_tf32", False),
    "new matmul": lambda: setattr(BACKENDS.cuda.matmul, "fp32_precision", "tf32"),
    "new conv": lambda: setattr(BACKENDS.cudnn.conv, "fp32_precision", "ieee"),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("tf32", [True, False, None])
def test_switches_are_put_back_whatever_a_program_has_set(program, tf32):
    PROGRAMS[program]()
    before = switches()
    with contextlib.suppress(KeyError), tf32_switched(tf32):
        if tf32 is not None:
            assert switches()[:3] == ["tf32" if tf32 else "ieee"] * 3
        assert switches()[3] == before[3]  # the CPU's
        raise KeyError
    assert switches() == before


def compute(tf32):
    seen = []

    def loss(model, batch):
        seen.append(switches()[0])
        return model(batch).square().mean()

    torch.manual_seed(1)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    precision = unisono.Precision(tf32=tf32)
    trainer = unisono.Trainer(model, optimizer, loss, shards=1, precision=precision)
    data = torch.ones(8, 3)
    trainer.fit(data, batch_size=4, epochs=1, validate=data)
    trainer.evaluate(data, batch_size=4)
    trainer.predict(data, batch_size=4, forward=lambda model, batch: (loss(model, batch), batch)[1])
    return trainer.digest(), trainer.run.fixed, set(seen)


@computed_once()
def test_a_run_computes_with_them_and_on_the_cpu_they_change_nothing():
    before = switches()
    digest, fixed, seen = compute(None)
    assert seen == {before[0]}
    assert compute(True) == (digest, fixed, {"tf32"})
    assert compute(False) == (digest, fixed, {"ieee"})
    assert switches() == before


def test_another_word_is_refused():
    with pytest.raises(TypeError, match="`tf32` must be True or False, or None, but is 'high'"):
        unisono.Precision(tf32="high")
