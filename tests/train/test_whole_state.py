"""Optimizers that look at whole parameters go on, and back, as if nothing had happened."""

import functools

import pytest
import torch
from tests.train import whole

import unisono
from unisono.engine.state.contents import digest_of

KINDS = [whole.Lamb, whole.Transposed, whole.Past, whole.Preconditioned, whole.Madgrad]
EACH = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__.lower())


@functools.cache
def undisturbed(kind):
    return whole.train(kind, [8])


@pytest.mark.slow
@EACH
def test_a_run_that_is_resumed_has_the_bits_of_one_that_never_stopped(kind, tmp_path):
    whole.train(kind, [3], tmp_path)
    assert whole.train(kind, [8], tmp_path) == undisturbed(kind)


@pytest.mark.slow
@EACH
def test_one_fit_after_the_other_has_the_bits_of_a_single_one(kind, tmp_path):
    assert whole.train(kind, [3, 5, 8], tmp_path) == undisturbed(kind)


@pytest.mark.slow
@EACH
@pytest.mark.parametrize(
    "faults",
    ["kill:rank=0,step=5,at=update", pytest.param("kill:rank=1,step=5", marks=pytest.mark.long)],
)
def test_lost_workers_change_nothing(kind, faults, monkeypatch, tmp_path):
    monkeypatch.setenv("UNISONO_FAULTS", faults)
    for directory in (None, tmp_path):
        digests = unisono.launch(whole.train, kind, [4, 8], directory, workers=2)
        assert digests == [undisturbed(kind)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", [whole.Lamb, whole.Madgrad], ids=["lamb", "madgrad"])
@pytest.mark.parametrize("workers", [2, 3])
def test_every_worker_has_the_optimizers_state_without_recovery_too(kind, workers):
    alone = whole.train_and_look(kind, [2, 5])
    found = unisono.launch(whole.train_and_look, kind, [2, 5], workers=workers, restarts=0)
    assert found == [alone] * workers


@pytest.mark.slow
def test_without_recovery_state_that_cannot_be_kept_stays_the_leads():
    leader, other = unisono.launch(whole.train_and_look, whole.Caching, [5], workers=2, restarts=0)
    assert (leader[1], other[1]) == (6, 0)


@pytest.mark.slow
@EACH
def test_any_number_of_workers_goes_on(kind, tmp_path):
    unisono.launch(whole.train, kind, [3], tmp_path, workers=2)
    assert unisono.launch(whole.train, kind, [8], tmp_path, workers=3) == [undisturbed(kind)] * 3


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (whole.Caching, "the optimizer's `cache` must be a tensor, a number or a text to be kept"),
        (whole.Counting, "an optimizer must name its state by texts to have it kept, but has 3"),
        (whole.Lookahead, "but Lookahead's `state_dict` also has `base`"),
        (whole.Quiet, "but Quiet's `base` is another optimizer with state of its own"),
    ],
)
def test_state_that_cannot_be_kept_is_refused_before_the_second_step(kind, words, tmp_path):
    with pytest.raises(unisono.errors.CheckpointError, match=words):
        whole.train(kind, [1000], tmp_path)


@pytest.mark.slow
def test_a_state_dict_that_says_no_more_than_torchs_is_let_through(tmp_path):
    whole.train(whole.Same, [3], tmp_path)
    assert whole.train(whole.Same, [8], tmp_path) == undisturbed(whole.Same)


def test_state_that_a_program_gives_an_elementwise_optimizer_is_kept(tmp_path):
    def make(directory):
        model = torch.nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        return unisono.Run(model, optimizer, shards=2, directory=directory)

    run, data = make(tmp_path), torch.utils.data.TensorDataset(torch.randn(8, 3))
    run.optimizer.state["mine"] = {"mean": torch.ones(2)}
    for total in (1, 2):
        for step in run.steps(data, batch_size=4, steps=total):
            with step:
                for (inputs,) in step.shards:
                    step.backward(run.model(inputs).square().mean())
        digest = digest_of(run.model, run.optimizer)
        run = make(tmp_path)
    assert list(run.steps(data, batch_size=4, steps=2)) == []
    assert run.optimizer.state["mine"]["mean"].tolist() == [1, 1]
    assert digest_of(run.model, run.optimizer) == digest


def with_complex(place):
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if place == "model":
        model.register_buffer("phase", torch.zeros(2, dtype=torch.complex128))
    else:
        optimizer.state["phase"] = {"of": torch.zeros(2, dtype=torch.complex128)}
    return model, optimizer


@pytest.mark.parametrize("place", ["model", "optimizer"])
def test_what_no_file_can_hold_is_refused_before_any_training(place, tmp_path):
    run = unisono.Run(*with_complex(place), shards=1, directory=tmp_path)
    data = torch.utils.data.TensorDataset(torch.randn(8, 3))
    with pytest.raises(unisono.errors.CheckpointError, match=r"`phase.* but is torch\.complex"):
        next(run.steps(data, batch_size=4, steps=1))
