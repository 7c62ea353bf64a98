"""A file that grows, is torn, is replaced, or is none."""

import json
import os
from unittest.mock import Mock

import pytest

from unisono.errors import DataFormatError
from unisono.training.events.follow import EventReader


def line(step):
    return json.dumps({"event": "checkpoint", "time_unix_s": 1.0, "step": step}).encode() + b"\n"


def steps(reader, begin=lambda: None):
    return [event.step for event in reader.new_events(begin)]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def test_each_look_gives_what_is_new(path):
    path.write_bytes(line(0))
    reader, begun = EventReader(path), Mock()
    assert steps(reader, begun) == [0]
    assert steps(reader, begun) == []
    with path.open("ab") as file:
        file.write(line(1) + line(2)[:10])
        file.flush()
        assert steps(reader, begun) == [1]  # the torn one is of no account
        file.write(line(2)[10:])
    assert steps(reader, begun) == [2]
    assert (begun.call_count, reader.num_unreadable) == (1, 0)


def test_a_line_that_is_torn_during_a_look_is_whole_in_the_next(path):
    """The second half counted as a line, and its step was lost."""
    path.write_bytes(line(0) + line(1)[:10])
    reader = EventReader(path)
    look = reader.new_events()
    assert next(look).step == 0
    with path.open("ab") as file:
        file.write(line(1)[10:] + line(2))
    assert list(look) == []
    assert steps(reader) == [1, 2]
    assert (reader.num_unreadable, reader.offset_bytes) == (0, path.stat().st_size)


def test_a_look_may_stop_midway(path):
    path.write_bytes(line(0) + line(1) + line(2))
    reader = EventReader(path)
    assert next(reader.new_events()).step == 0
    assert steps(reader) == [1, 2]


def shorten(path):
    os.truncate(path, len(line(0)))


def replace(path):
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


@pytest.mark.parametrize(("change", "then"), [(shorten, [0]), (replace, [0, 1, 2])])
def test_another_file_is_read_from_its_beginning(path, change, then):
    path.write_bytes(line(0) + line(1) + line(2))
    reader = EventReader(path)
    steps(reader)
    change(path)
    begun = Mock()
    assert steps(reader, begun) == then
    assert begun.call_count == 1


def test_lines_that_cannot_be_read_are_counted(path):
    path.write_bytes(b"garbage\n" + line(0) + b'{"event":"step","step":"x"}\n\n' + line(1))
    reader = EventReader(path)
    assert steps(reader) == [0, 1]
    assert reader.num_unreadable == 2


def test_a_newer_format_is_refused(path):
    path.write_bytes(b'{"event":"start","step":0,"format":2}\n')
    with pytest.raises(DataFormatError, match="written in format 2: use the version"):
        steps(EventReader(path))


def test_a_pipe_is_refused(path):
    os.mkfifo(path)
    with pytest.raises(ValueError, match="must be a plain file"):
        steps(EventReader(path))


def test_steps_that_are_old_news_are_passed_over(path):
    old, new = b'{"event":"step","step":%d,"time_unix_s":1}\n', line(7)
    path.write_bytes(old % 0 + line(1) + old % 2 + old % 3 + new)
    assert steps(EventReader(path, recent_bytes=len(new) + 1)) == [1, 3, 7]
    assert steps(EventReader(path, recent_bytes=0)) == [1, 7]
    assert steps(EventReader(path)) == [0, 1, 2, 3, 7]
