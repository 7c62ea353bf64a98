"""The variable that makes matrix products on GPUs the same each time."""

from __future__ import annotations

import pytest

from unisono.cublas import fix_workspaces


@pytest.mark.parametrize(
    ("before", "after", "is_fixed"),
    [
        ({}, ":4096:8", True),
        ({"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, ":16:8", True),
        ({"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, ":0:0", False),
        ({"CUBLAS_WORKSPACE_CONFIG": ""}, "", False),
    ],
)
def test_workspaces_are_fixed_unless_the_user_has_said_how(
    before: dict[str, str], after: str, is_fixed: bool
) -> None:
    environ = dict(before)
    assert fix_workspaces(environ) is is_fixed
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": after}


def test_it_is_the_variable_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "x")  # so that it is put back
    del os.environ["CUBLAS_WORKSPACE_CONFIG"]
    assert fix_workspaces()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
