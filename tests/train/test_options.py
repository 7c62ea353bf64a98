"""`Run` and `Trainer` take the same options, which one value checks for both."""

import inspect
from dataclasses import fields

import pytest

import unisono
from unisono.training.options import RunOptions

OPTIONS = fields(RunOptions)
TOGETHER = (unisono.Precision, unisono.Schedule, unisono.Checkpoint)
IN_PRECISION = ("exact", "scaler")  # in a Trainer


@pytest.mark.parametrize("kind", [unisono.Run, unisono.Trainer])
def test_run_and_trainer_have_every_option_with_the_same_default(kind):
    parameters = inspect.signature(kind).parameters
    for option in OPTIONS:
        if kind is unisono.Run or option.name not in IN_PRECISION:
            parameter = parameters[option.name]
            assert (parameter.default, parameter.annotation) == (option.default, option.type)
        assert f"    {option.name}: " in unisono.Trainer.__doc__ + unisono.Run.__doc__
    assert "that are not listed are those of :class:`unisono.Trainer`" in unisono.Run.__doc__


@pytest.mark.parametrize("kind", TOGETHER)
def test_options_that_belong_together_are_documented_and_stay_as_they_are(kind):
    for option in fields(kind):
        assert f"    {option.name}: " in kind.__doc__
    assert kind.__dataclass_params__.frozen


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ({"seed": -1}, ValueError, "`seed` must be at least 0"),
        ({"seed": 0.5}, TypeError, "`seed` must be a whole number"),
        ({"seed": 2**64}, ValueError, f"`seed` must be below {2**64}, but is {2**64}: pass `seed="),
        ({"exact": None}, TypeError, "`exact` must be True or False, but is None"),
        ({"exact": 2}, TypeError, "`exact` must be True or False, but is 2"),
        ({"directory": "here", "checkpoint": "soon"}, ValueError, "`checkpoint` must be a number"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, ValueError, "clipped in one way"),
    ],
)
def test_options_that_do_not_fit_are_refused(given, error, words):
    with pytest.raises(error, match=words):
        RunOptions(**given)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"every": "soon"}, "`checkpoint` must be a number"),
        ({"keep": 0}, "`keep` must be at least 1"),
        ({"options": "new"}, "`options` must be one of"),
    ],
)
def test_checkpoints_that_do_not_fit_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        unisono.Checkpoint(**given)
