"""Where do commands and a run's display print? The console of rich, for any reader and width."""

from __future__ import annotations

from typing import final

from rich.console import Console
from typing_extensions import override


@final
class Output(Console):
    """Standard output. rich would end the program if the reader is gone; this raises."""

    def __init__(self) -> None:
        super().__init__()
        if self.width < 1:  # COLUMNS=0, with which rich prints nothing
            self.width = 80

    @override
    def show_cursor(self, show: bool = True) -> bool:
        """Hide the cursor on the other screen alone: who is killed could not show it again."""
        return (show or self.is_alt_screen) and super().show_cursor(show)

    @override
    def on_broken_pipe(self) -> None:
        raise  # the error that rich has just caught
