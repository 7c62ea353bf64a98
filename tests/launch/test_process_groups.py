"""What a program asks torch for, and whether the launcher answers."""

from __future__ import annotations

import socket

import pytest

from unisono.runtime.launch.job import reserved_port
from unisono.runtime.launch.process_groups import GroupRequest, group_request

ENVIRON = {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "77"}


def wanted(url: str, **environ: str) -> GroupRequest | None:
    environ = {**ENVIRON, **environ}
    return group_request(url, environ)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("env://", GroupRequest("port 77", 1, 3)),
        ("env://?rank=0&world_size=2", GroupRequest("port 77", 0, 2)),
        ("env://?world_size=2", GroupRequest("port 77", 1, 2)),
        (
            "tcp://localhost:12355?rank=0&world_size=2",
            GroupRequest("port 12355", 0, 2),
        ),
        (
            "tcp://[::1]:12355?rank=0&world_size=2",
            GroupRequest("port 12355", 0, 2),
        ),
        (
            "file:///a b/c?rank=0&world_size=2",
            GroupRequest("file /a b/c", 0, 2),
        ),
    ],
)
def test_the_launcher_answers_where_ranks_meet_on_this_host(
    url: str, expected: GroupRequest
) -> None:
    assert wanted(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "tcp://elsewhere:12355?rank=0&world_size=2",
        "tcp://localhost?rank=0&world_size=2",
        "tcp://localhost:99999?rank=0&world_size=2",
        "tcp://localhost:12355",
        "tcp://localhost:12355?rank=0",
        "tcp://localhost:12355?rank=-1&world_size=-1",
        "tcp://localhost:12355?rank=x&world_size=2",
        "file:///a",
        "file://?rank=0&world_size=2",
    ],
)
def test_torch_answers_everything_else(url: str) -> None:
    assert wanted(url) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("MASTER_PORT", "x"), ("MASTER_PORT", ""), ("MASTER_ADDR", "elsewhere"), ("RANK", "")],
)
def test_torch_says_what_is_wrong_with_the_environment(name: str, value: str) -> None:
    assert wanted("env://", **{name: value}) is None


def test_a_rank_beyond_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match="must be below `world_size`, but is 2 of 2"):
        wanted("env://?rank=2&world_size=2")


@pytest.mark.parametrize("name", ["::1", "127.0.0.1", "0.0.0.0", socket.gethostname()])
def test_names_of_this_host_are_known(name: str) -> None:
    assert wanted("env://", MASTER_ADDR=name) == GroupRequest("port 77", 1, 3)


def test_a_reserved_port_may_be_used_by_the_program_and_by_no_other() -> None:
    ports = [reserved_port() for _ in range(50)]
    assert len({port.getsockname()[1] for port in ports}) == 50
    first = ports[0]
    with socket.socket() as client:
        assert client.connect_ex(first.getsockname()) != 0  # nobody listens
    with socket.socket() as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        own.bind(("", first.getsockname()[1]))
        own.listen()
    for port in ports:
        port.close()
