"""Of the process's settings, those count that the program's code names."""

from __future__ import annotations

import pytest

from unisono.programs import holders
from unisono.programs.holders import SETTINGS, SETTINGS_OF_PROCESS, Content

NAMES = {"UNISONO_TEST_B", "UNISONO_TEST_A", "RANK", "chdir", "other"}


def _read() -> Content:
    return SETTINGS.read(SETTINGS_OF_PROCESS, NAMES)


def test_only_what_is_named_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UNISONO_TEST_B", "UNISONO_TEST_A", "UNISONO_TEST_C", "RANK"):
        monkeypatch.setenv(name, "1")
    names, _ = _read()
    assert names[-2:] == ("os.environ UNISONO_TEST_A", "os.environ UNISONO_TEST_B")
    always = {name for name, (word, _, _) in SETTINGS_OF_PROCESS.items() if not word}
    assert {*names[:-2]} == {"os.getcwd()", *always}


def test_a_variable_that_is_removed_and_set_again_has_not_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("UNISONO_TEST_B", "UNISONO_TEST_A"):
        monkeypatch.setenv(name, "1")
    then = _read()
    monkeypatch.delenv("UNISONO_TEST_B")
    assert holders.changed_slots(then, _read()) == ["os.environ UNISONO_TEST_B"]
    monkeypatch.setenv("UNISONO_TEST_B", "1")
    assert holders.same(then, _read())
    monkeypatch.setenv("UNISONO_TEST_B", "2")
    assert holders.changed_slots(then, _read()) == ["os.environ UNISONO_TEST_B"]
