"""The variable that makes matrix products on GPUs the same each time."""

from __future__ import annotations

import pytest

from unisono.runtime.cublas import fix_workspaces


@pytest.mark.parametrize(
    ("before", "after"), [(None, ":4096:8"), (":16:8", ":16:8"), (":0:0", ":0:0"), ("", "")]
)
def test_workspaces_are_fixed_unless_the_user_has_said_how(before: str | None, after: str) -> None:
    environ = {} if before is None else {"CUBLAS_WORKSPACE_CONFIG": before}
    fix_workspaces(environ)
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": after}
