import pytest

from unisono.training.options import Every


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (500, Every(steps=500)),
        ("500 steps", Every(steps=500)),
        ("1 step", Every(steps=1)),
        ("1 epoch", Every(epochs=1)),
        ("2epochs", Every(epochs=2)),
        ("10min", Every(seconds=600.0)),
        ("90 s", Every(seconds=90.0)),
        ("1.5h", Every(seconds=5400.0)),
        ("2 hours", Every(seconds=7200.0)),
    ],
)
def test_intervals_are_understood(text, expected):
    assert Every.read(text) == expected


@pytest.mark.parametrize("text", [0, -3, "0 steps", "1.5 epochs", "often", "500", "", "10 parsecs"])
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match="`checkpoint` must be a number of steps"):
        Every.read(text)


@pytest.mark.parametrize(
    ("every", "steps", "epoch_ended", "seconds", "expected"),
    [
        (Every(steps=3), 6, 0, 0.0, True),
        (Every(steps=3), 7, 0, 9e9, False),
        (Every(epochs=2), 10, 2, 0.0, True),
        (Every(epochs=2), 15, 3, 0.0, False),
        (Every(epochs=1), 11, 0, 9e9, False),
        (Every(seconds=60.0), 1, 0, 59.9, False),
        (Every(seconds=60.0), 1, 0, 60.0, True),
    ],
)
def test_a_checkpoint_is_due(every, steps, epoch_ended, seconds, expected):
    assert every.is_due(steps=steps, epoch_ended=epoch_ended, seconds=seconds) is expected
