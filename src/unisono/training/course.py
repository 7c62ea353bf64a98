"""Has the program come to this loop by the course that it took before? Its counts show it.

A resumed program that sees newer weights than it then had may leave loops of its own earlier or
later, and so continue in another iteration. Counts are the integers in its frames that have changed
since they were first seen; process numbers and the like do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType

from unisono.programs.walk import is_of_program
from unisono.training.run_context import RunContext

COURSE = "course"  # in ``run.last``: the counts with which the newest loop began
_COUNTS_AT_MOST = 100  # because each snapshot contains them


def note_course(run: RunContext, frame: FrameType | None) -> None:
    """Note the counts in `frame`, and in the frames of the program around it."""
    counts = dict[str, int]()
    while frame is not None:
        if is_of_program(frame):
            where = frame.f_code.co_qualname
            here = frame.f_locals.items()
            counts |= {f"{name} in {where}": one for name, one in here if type(one) is int}
        frame = frame.f_back
    run.first_counts = counts | run.first_counts
    changed = [(name, one) for name, one in counts.items() if one != run.first_counts[name]]
    run.course = dict(changed[:_COUNTS_AT_MOST])


def other_course(run: RunContext, then: Mapping[str, object]) -> str:
    """Return a line about a count that differs from `then`; empty if there is none."""
    first = run.first_counts
    for name in sorted({*then, *run.course} & first.keys()):
        here, there = run.course.get(name, first[name]), then.get(name, first[name])
        if here != there:
            variable, _, where = name.partition(" in ")
            return (
                f"the program must take the same course again, but in its loop number "
                f"{run.num_loops} `{variable}` ({where}) is {here} and was {there!r:.40} before, "
                f"as it sees the newest weights after older loops: the result will differ from "
                f"that of an uninterrupted run; `Checkpoint(keep=1000)` keeps what a thousand "
                f"loops end with"
            )
    return ""
