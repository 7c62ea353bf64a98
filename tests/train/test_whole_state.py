"""Optimizers that look at whole parameters go on, and back, as if nothing had happened."""

import functools

import pytest
from tests.train import whole

import unisono

KINDS = [whole.Lamb, whole.Transposed, whole.Past, whole.Preconditioned]
EACH = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__.lower())


@functools.cache
def undisturbed(kind):
    return whole.train(kind, [8])


@EACH
def test_a_run_that_is_resumed_has_the_bits_of_one_that_never_stopped(kind, tmp_path):
    whole.train(kind, [3], tmp_path)
    assert whole.train(kind, [8], tmp_path) == undisturbed(kind)


@EACH
def test_one_fit_after_the_other_has_the_bits_of_a_single_one(kind, tmp_path):
    assert whole.train(kind, [3, 5, 8], tmp_path) == undisturbed(kind)


@pytest.mark.slow
@EACH
@pytest.mark.parametrize("faults", ["kill:rank=0,step=5,at=update", "kill:rank=1,step=5"])
def test_lost_workers_change_nothing(kind, faults, monkeypatch, tmp_path):
    monkeypatch.setenv("UNISONO_FAULTS", faults)
    for directory in (None, tmp_path):
        digests = unisono.launch(whole.train, kind, [4, 8], directory, workers=2)
        assert digests == [undisturbed(kind)] * 2


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
    ],
)
def test_state_that_cannot_be_kept_is_refused_before_the_second_step(kind, words, tmp_path):
    with pytest.raises(unisono.CheckpointError, match=words):
        whole.train(kind, [1000], tmp_path)
