"""The frames of a program's own loop, kept from one step to the next.

Since Python 3.14, a reference to a generator's frame keeps what is on its stack when the generator
is closed: a loop's iterator, such as our generator of steps, whose loop would never end. So this
module keeps a weak reference to the generator instead of its frame.
"""

from __future__ import annotations

import weakref
from types import FrameType, GeneratorType
from typing import Any, final


@final
class FrameOfGenerator:
    """A generator's frame, and its attributes, while the generator exists and has not ended."""

    def __init__(self, generator: GeneratorType[Any, Any, Any]) -> None:
        self._generator = weakref.ref(generator)

    @property
    def frame(self) -> FrameType | None:
        """The frame itself, not to be kept; None once the generator has ended."""
        generator = self._generator()
        return None if generator is None else generator.gi_frame

    def __getattr__(self, name: str) -> Any:
        if (frame := self.frame) is None:
            raise RuntimeError(f"a generator around the steps has ended, and has no `{name}`.")
        return getattr(frame, name)


KeptFrame = FrameType | FrameOfGenerator
KEPT_FRAMES = (FrameType, FrameOfGenerator)

_of_generators: weakref.WeakKeyDictionary[Any, FrameOfGenerator] = weakref.WeakKeyDictionary()


def kept_frame(frame: FrameType) -> KeptFrame:
    """Return a frame as it may be kept, the same object each time."""
    generator = getattr(frame, "f_generator", None)  # new in Python 3.14
    if not isinstance(generator, GeneratorType):
        return frame
    return _of_generators.setdefault(generator, FrameOfGenerator(generator))


def frame_of(kept: KeptFrame) -> FrameType | None:
    """Return the frame itself, which the caller does not keep; None if its generator has ended."""
    return kept.frame if isinstance(kept, FrameOfGenerator) else kept
