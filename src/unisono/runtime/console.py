"""Where do commands and a run's display print? The console of rich, whose reader may be gone."""

from __future__ import annotations

from typing import final

from rich.console import Console
from typing_extensions import override


@final
class Output(Console):
    """Standard output. rich would end the program if the reader is gone; this raises."""

    @override
    def on_broken_pipe(self) -> None:
        raise  # the error that rich has just caught
