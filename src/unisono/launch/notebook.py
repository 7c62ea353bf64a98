"""What is a notebook to somebody who launches from a cell? The names of cells, and its signals.

Nothing of IPython is imported that is not there already.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

_FRAME = re.compile(r'^([ |]*)File "([^"\n]+)", line (\d+)', re.MULTILINE)


def name_cells(text: str) -> str:
    """Write ``Cell In[3], line 2`` for the made-up file names of cells in a traceback.

    As IPython itself does; elsewhere, and for files, the text stays as it is.
    """
    name_of = _names_of_files()
    if name_of is None:
        return text

    def named(match: re.Match[str]) -> str:
        indent, file, line = match.groups()
        name = name_of(file)
        return match.group() if name is None else f"{indent}{' '.join(name)}, line {line}"

    return _FRAME.sub(named, text)


def is_kernels_handler(handler: object) -> bool:
    """Tell whether a handler of SIGINT is the one that a kernel sets for cells with ``await``.

    It cancels the cell when the cell next waits, which one that launches does not do.
    """
    return str(getattr(handler, "__module__", "")).split(".")[0] == "ipykernel"


def _names_of_files() -> Callable[[str], tuple[str, str] | None] | None:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(getattr(shell, "compile", None), "format_code_name", None)
