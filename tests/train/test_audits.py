"""Audits in one process: what is computed again, what is refused, and that nothing else changes."""

import itertools
import json
import time
from types import SimpleNamespace

import pytest
import torch
from tests.classified import taken
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import unisono
from unisono.callbacks import Callback
from unisono.faults import Faults, read_faults
from unisono.state.digest import checksum_of, digest_of
from unisono.train import loop
from unisono.train.audited_boundary import AuditedBoundary, _Dispute
from unisono.train.audited_step import AuditedStep
from unisono.train.step import Step
from unisono.workers.membership import Membership

GENERATOR = torch.Generator().manual_seed(3)
INPUTS = torch.randn(42, 6, generator=GENERATOR)
DATA = TensorDataset(INPUTS, (INPUTS[:, 0] > 0).long())  # nine steps of 5, the last of 2
STEPS = 9


class Augmenting(Dataset):
    def __len__(self):
        return len(DATA)

    def __getitem__(self, index):
        inputs, label = DATA[index]
        return inputs + torch.rand(6), label


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
    return model, torch.optim.Adam(model.parameters(), lr=0.02)


def loss_of(model, batch):
    inputs, labels = batch
    if len(inputs) < 2:
        return model[0](inputs).square().sum(), len(inputs)
    return F.cross_entropy(model(inputs), labels, reduction="sum"), len(inputs)


def train(audit_every, *, faults="", monkeypatch=None, data=DATA, loss=loss_of, **options):
    model, optimizer = make()
    fitted = {name: options.pop(name) for name in ("loader_workers",) if name in options}
    trainer = unisono.Trainer(
        model, optimizer, loss, shards=3, seed=4, audit_every=audit_every, **options
    )
    if faults:
        monkeypatch.setattr(trainer.run.team, "faults", Faults(read_faults(faults)))
    trainer.fit(data, batch_size=5, epochs=1, **fitted)
    return digest_of(model, optimizer), trainer


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"exchange": "staged"},
        {"exchange": "gloo"},
        {"data": Augmenting()},
        pytest.param({"data": Augmenting(), "loader_workers": 2}, marks=pytest.mark.slow),
        {"precision": "fp16"},
        {"clip_norm": 0.1},
    ],
    ids=lambda options: " and ".join(options) or "none",
)
def test_an_audited_run_has_the_same_bits(options, capfd):
    expected, _ = train(None, **options)
    capfd.readouterr()
    for audit_every in (1, 4):
        assert train(audit_every, **options)[0] == expected
    assert "wrong" not in capfd.readouterr().out


def test_random_numbers_between_steps_are_the_same():
    def drawn(audit_every):
        model, optimizer = make()
        run = unisono.Run(model, optimizer, shards=3, seed=4, audit_every=audit_every)
        numbers = []
        for _ in taken(run, loss_of, DATA, batch_size=5, steps=4):
            numbers.append(torch.rand(()).item())
        return numbers

    assert drawn(2) == drawn(None)


@pytest.mark.parametrize(
    ("of", "name"),
    [("gradient", "gradient of `0.weight`"), ("buffer", "buffer `1.running_mean`")],
)
def test_one_worker_alone_names_what_was_wrong(monkeypatch, of, name):
    with pytest.raises(unisono.CorruptionError, match="the audit of step 3 found what") as raised:
        train(4, faults=f"flip:rank=0,step=3,of={of}", monkeypatch=monkeypatch)
    error = raised.value
    assert (error.ranks, error.step, error.names) == ((0,), 3, (name,))
    assert f"{name} in shards 0–2. Its memory or processor" in str(error)
    assert "with a `directory`" in str(error)


def test_shared_memory_that_changes_is_found_and_the_steps_come_again(monkeypatch, tmp_path, capfd):
    expected, _ = train(None)
    faults = "flip:rank=0,step=7,of=replica"
    found, _ = train(4, faults=faults, monkeypatch=monkeypatch, directory=tmp_path)
    assert found == expected
    assert "did in step 7: parameter `0.weight`; the run goes back" in capfd.readouterr().out


def test_shared_memory_that_changes_again_ends_the_run(monkeypatch, tmp_path):
    faults = "defect:rank=0,step=6,of=replica"
    with pytest.raises(unisono.CorruptionError, match="Memory is at fault: test it") as raised:
        train(4, faults=faults, monkeypatch=monkeypatch, directory=tmp_path)
    assert (raised.value.ranks, raised.value.step) == ((), 7)


def test_a_run_resumes_from_what_was_audited(monkeypatch, tmp_path):
    expected, _ = train(None)
    options = {"directory": tmp_path, "checkpoint_every": 2, "monkeypatch": monkeypatch}
    with pytest.raises(unisono.CorruptionError, match="goes on from its newest checkpoint"):
        train(6, faults="defect:rank=0,step=4", **options)
    # Step 5, which led to the checkpoint that was due then, is wrong, and so is step 4.
    until(lambda: checkpoints(tmp_path) == ["step-000000000002", "step-000000000004"])
    monkeypatch.undo()
    assert train(6, **options)[0] == expected


def until(holds):
    """Wait for the thread that writes checkpoints."""
    deadline_s = time.monotonic() + 30
    while not holds() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert holds()


def checkpoints(directory):
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


def test_every_checkpoint_is_of_an_audited_step(tmp_path):
    audited = []

    class Look(Callback):
        def on_audit(self, fit, audit):
            assert (audit.wrong, audit.names) == ((), ())
            assert audit.seconds > 0
            audited.append(audit.step + 1)

    train(4, directory=tmp_path, checkpoint_every=3, keep=9, callbacks=[Look()])
    assert audited == [3, 4, 6, 8, 9]
    assert [int(name[-3:]) for name in checkpoints(tmp_path)] == [3, 6, 9]


def test_a_checkpoint_by_the_clock_waits_for_an_audit(tmp_path, monkeypatch):
    audited = []

    class Look(Callback):
        def on_audit(self, fit, audit):
            audited.append(audit.step + 1)

    train(1000, directory=tmp_path, checkpoint_every="0.000001s", keep=9, callbacks=[Look()])
    kept = [int(name[-3:]) for name in checkpoints(tmp_path)]
    assert audited[:2] == [2, 4]
    assert kept == audited


def test_audits_are_in_the_event_file(tmp_path):
    train(4, directory=tmp_path)
    lines = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    events = [event for event in lines if event["event"] in ("step", "audit")]
    order = [(event["event"], event["step"]) for event in events]
    steps = [("step", number) for number in range(STEPS)]
    assert [one for one in order if one[0] == "step"] == steps
    assert [order[at - 1 : at + 1] for at, one in enumerate(order) if one[0] == "audit"] == [
        [("step", 3), ("audit", 4)],
        [("step", 7), ("audit", 8)],
        [("step", 8), ("audit", 9)],
    ]


def test_what_audits_cost_is_said_once(capfd):
    _, trainer = train(2)
    trainer.fit(DATA, batch_size=5, epochs=2)
    said = capfd.readouterr().out
    assert said.count("an audit takes") == 1
    assert "audits take at most 1 % of the time with `audit_every=" in said


def test_a_program_that_is_not_deterministic_is_told_so():
    numbers = itertools.count()

    def loss(model, batch):
        total, weight = loss_of(model, batch)
        return total * (1 + next(numbers) / 1000), weight

    with pytest.raises(unisono.CorruptionError, match="a clock, a counter, a generator") as raised:
        train(1, loss=loss)
    assert raised.value.ranks == ()
    assert raised.value.names[0] == "gradient of `0.weight`"
    assert "loss of shard 0" in raised.value.names


def test_a_loss_that_is_not_finite_is_told_in_an_audited_step_as_in_any():
    def loss(model, batch):
        total, weight = loss_of(model, batch)
        return total * (float("nan") if weight == 1 else 1), weight

    with pytest.raises(unisono.NonFiniteLossError, match="shard 2"):
        train(1, loss=loss)


def test_shards_must_be_looped_over_to_the_end():
    model, optimizer = make()
    run = unisono.Run(model, optimizer, shards=1, seed=4, audit_every=2)
    with pytest.raises(RuntimeError, match="must be looped over to its end, but was left before"):
        for step in run.steps(DATA, batch_size=5, steps=2):
            with step:
                step.backward(loss_of(model, next(step.shards)))
    assert step.number == 1


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        (0, ValueError, "`audit_every` must be at least 1"),
        (2.5, TypeError, "`audit_every` must be a whole number"),
        ("100", TypeError, "`audit_every` must be a whole number"),
    ],
)
def test_intervals_that_do_not_fit_are_refused(given, error, words):
    with pytest.raises(error, match=words):
        train(given)


def test_without_audits_steps_are_plain_ones(monkeypatch):
    def refuse(*_):
        raise AssertionError("nobody is audited")

    monkeypatch.setattr(loop, "next_step", refuse)
    monkeypatch.setattr(loop, "AuditedBoundary", refuse)
    train(None)
    with pytest.raises(AssertionError, match="nobody"):
        train(3)


def test_other_steps_of_an_audited_run_are_plain_ones():
    model, optimizer = make()
    run = unisono.Run(model, optimizer, shards=3, seed=4, audit_every=3)
    kinds = []
    for step in run.steps(DATA, batch_size=5, steps=5):
        kinds.append(type(step))
        with step:
            for batch in step.shards:
                step.backward(loss_of(model, batch))
    assert kinds == [Step, Step, AuditedStep, Step, AuditedStep]


@pytest.mark.parametrize(
    ("now", "is_audited"),
    [
        (Membership((0, 1), 0, 4), True),
        (Membership((0,), 0, 5), True),  # who was lost does not know, either
        (Membership((0, 1), 0, 5), False),  # somebody has joined, be it in the same seat
        (Membership((0,), 0, 6), False),  # or after one more was lost
    ],
)
def test_who_has_joined_is_not_audited_in_a_step_that_only_others_know_of(now, is_audited):
    team = SimpleNamespace(membership=Membership((0, 1), 0, 4))
    boundary = AuditedBoundary.__new__(AuditedBoundary)
    boundary._team, boundary._disputed = team, _Dispute(7, False, 4, [])
    boundary.postpone()
    assert boundary.is_disputed(7)
    team.membership = now
    assert boundary._is_postponed == is_audited
    assert boundary.is_disputed(7) == (now.generation == 4)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.complex64]
)
def test_a_checksum_knows_every_bit_and_the_order(dtype):
    tensor = torch.randn(7, 5, generator=GENERATOR).to(dtype)
    same = tensor.clone()
    assert checksum_of(tensor) == checksum_of(same)
    assert checksum_of(tensor) == checksum_of(tensor.T.contiguous().T)  # however it lies
    seen = {checksum_of(tensor)}
    flat = same.view(-1).view(torch.uint8)
    for bit in range(8 * flat.numel()):
        flat[bit // 8] ^= 1 << bit % 8
        seen.add(checksum_of(same))
        flat[bit // 8] ^= 1 << bit % 8
    assert len(seen) == 8 * flat.numel() + 1
    assert checksum_of(tensor.flip(0)) not in seen or torch.equal(tensor.flip(0), tensor)
    assert checksum_of(torch.zeros(2)) != checksum_of(-torch.zeros(2))
    assert checksum_of(torch.zeros(2)) != checksum_of(torch.zeros(2, 1))
