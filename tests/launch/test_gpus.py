"""Which GPUs workers see: what the environment shows."""

from __future__ import annotations

import pytest

from unisono.runtime.launch.gpus import visible_gpus
from unisono.runtime.world import fix_workspaces

UUIDS = ("GPU-8932f937-d72c", "GPU-8932aaaa-0000", "GPU-11111111-2222", "GPU-fedc0000-3333")
NAMELESS = ("",) * 4  # of a driver that tells no names


def test_names_are_believed_where_the_driver_tells_none() -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-8932,GPU-77"}, NAMELESS) == (
        "GPU-8932",
        "GPU-77",
    )


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (None, ("0", "1", "2", "3")),
        ("", ()),
        ("-1", ()),
        ("NoDevFiles", ()),
        ("2,1", ("2", "1")),
        (" 2 , 1 ", ("2", "1")),
        ("0,1,7,2", ("0", "1")),  # no further than what is not there
        ("0,-1,2", ("0",)),
        ("0,,2", ("0",)),
        ("7", ()),
        ("1,1", ()),
        ("GPU-8932f,GPU-fe", ("GPU-8932f", "GPU-fe")),
        ("GPU-8932f,GPU-77,GPU-fe", ("GPU-8932f",)),
        ("GPU-8932", ()),  # two begin like this
    ],
)
def test_a_process_sees_the_gpus_that_cuda_would_show_it(
    text: str | None, seen: tuple[str, ...]
) -> None:
    environ = {} if text is None else {"CUDA_VISIBLE_DEVICES": text}
    assert visible_gpus(environ, UUIDS) == seen
    assert visible_gpus(environ, ()) == ()


@pytest.mark.parametrize(
    ("before", "after"), [(None, ":4096:8"), (":16:8", ":16:8"), (":0:0", ":0:0"), ("", "")]
)
def test_workspaces_are_fixed_unless_the_user_has_said_how(before: str | None, after: str) -> None:
    environ = {} if before is None else {"CUBLAS_WORKSPACE_CONFIG": before}
    fix_workspaces(environ)
    assert environ == {"CUBLAS_WORKSPACE_CONFIG": after}
