"""Of the process's settings, those count that the program's code names."""

from __future__ import annotations

import calendar
import decimal
import gc
import random
import socket
import sys
import types

import numpy as np
import pytest
import torch

from unisono.programs import holders
from unisono.programs.holders import SETTINGS, Content
from unisono.programs.settings import SETTINGS_OF_PROCESS, settings_of

NAMES = {"UNISONO_TEST_B", "UNISONO_TEST_A", "RANK", "chdir", "other"}


def _read() -> Content:
    return SETTINGS.read(SETTINGS_OF_PROCESS, NAMES)


def test_only_what_is_named_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("UNISONO_TEST_B", "UNISONO_TEST_A", "UNISONO_TEST_C", "RANK"):
        monkeypatch.setenv(name, "1")
    names, _ = _read()
    assert names[-2:] == ("os.environ UNISONO_TEST_A", "os.environ UNISONO_TEST_B")
    always = {name for name, setting in SETTINGS_OF_PROCESS.items() if not setting.words}
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


@pytest.mark.parametrize(
    ("owner", "name", "path", "other"),
    [
        (torch, "set_default_dtype", "torch.get_default_dtype()", torch.float64),
        (torch, "set_warn_always", "torch.is_warn_always_enabled()", True),
        (torch.backends.mha, "set_fastpath_enabled", "get_fastpath_enabled()", False),
        (torch.backends.cuda, "enable_math_sdp", "torch.backends.cuda.math_sdp_enabled()", False),
        (np, "set_printoptions", "numpy.get_printoptions()", None),
        (np, "seterr", "numpy.geterr()", None),
        (sys, "setrecursionlimit", "sys.getrecursionlimit()", 4321),
        (socket, "setdefaulttimeout", "socket.getdefaulttimeout()", 7.0),
        (gc, "set_threshold", "gc.get_threshold()", (600, 7, 8)),
        (gc, "disable", "gc.isenabled()", False),
    ],
)
def test_settings_are_found_by_convention(owner, name, path, other) -> None:
    ((found, setting),) = settings_of(owner, [name])
    assert found.endswith(path)
    was = holders.SETTINGS.read({found: setting}, {name})[1][0]
    if isinstance(setting.read(), dict):
        other = tuple((key, 5 if key == "precision" else value) for key, value in was)
    try:
        setting.put(other)
        assert holders.SETTINGS.read({found: setting}, {name})[1] == (other,)
    finally:
        setting.put(was)
    assert holders.SETTINGS.read({found: setting}, {name})[1] == (was,)


def test_what_two_functions_turn_on_and_off_is_one_setting() -> None:
    library, is_on = types.ModuleType("library"), [True]
    library.enable_caching = lambda: is_on.__setitem__(0, True)
    library.disable_caching = lambda: is_on.__setitem__(0, False)
    library.is_caching_enabled = lambda: is_on[0]
    library.set = library.is_enabled = lambda: None
    names = [*vars(library)]
    found = dict(settings_of(library, [name for name in names if name[:2] != "__"]))
    (setting,) = found.values()
    assert [*found] == ["library.is_caching_enabled()"]
    for value in (False, True):
        setting.put(value)
        assert is_on == [value]


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (random, "setstate"),  # of a hidden generator, which every step seeds
        (calendar, "setfirstweekday"),
        (torch, "set_printoptions"),  # nothing returns them
        (torch, "set_rng_state"),
        (np.random, "set_state"),
        (torch.utils.data.DistributedSampler, "set_epoch"),
    ],
)
def test_what_follows_no_convention_is_no_setting(owner, name) -> None:
    assert list(settings_of(owner, [name])) == []


def test_a_setting_that_does_not_come_back_is_an_error(monkeypatch) -> None:
    ((_, setting),) = settings_of(sys, ["setrecursionlimit"])
    monkeypatch.setattr(sys, "getrecursionlimit", lambda: 1234)
    with pytest.raises(RuntimeError, match="`setrecursionlimit` has not set 4321"):
        setting.put(4321)


def test_the_context_of_decimals_is_one_setting() -> None:
    setting = SETTINGS_OF_PROCESS["decimal.getcontext()"]
    with decimal.localcontext():
        was = setting.read()
        context = decimal.getcontext()
        context.prec, context.Emax, context.traps[decimal.DivisionByZero] = 5, 9, False
        now = setting.read()
        setting.put(was)
        assert setting.read() == was != now
        assert context.traps[decimal.DivisionByZero]
