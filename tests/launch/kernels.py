"""A real Jupyter kernel, and what its cells show, as a front end would see it."""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil

START_S = 60.0
CELL_S = 60.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Shown:
    """What one cell shows when it has been executed."""

    stdout: str = ""
    stderr: str = ""
    displays: dict[str, str] = field(default_factory=dict)
    value: Any = None
    error: str = ""
    traceback: str = ""


class Kernel:
    """A kernel in a folder, with environment variables of its own."""

    def __init__(self, folder: Path, runtime: Path, **variables: str) -> None:
        # ipykernel does not watch descriptors when it finds itself in a test.
        environ = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
        environ |= {"IPYTHONDIR": str(runtime / "ipython"), **variables}
        from jupyter_client import KernelManager  # not in every process of tests

        self.manager = KernelManager(
            transport="ipc", connection_file=str(runtime / f"{time.monotonic_ns()}.json")
        )
        self.manager.start_kernel(cwd=str(folder), env=environ)
        self._connect()

    def _connect(self) -> None:
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=START_S)
        self.process = psutil.Process(self.manager.provisioner.pid)

    def __enter__(self) -> Kernel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()

    def cell(self, code: str) -> Shown:
        """Execute a cell and give all it shows."""
        return self.shown(self.start(code))

    def fine(self, code: str) -> Shown:
        """Execute a cell that must not fail."""
        shown = self.cell(code)
        assert not shown.error, shown.traceback
        return shown

    def value(self, code: str) -> Any:
        """Execute a cell that ends in an expression, and give what its text stands for."""
        return self.fine(code).value

    def start(self, code: str) -> str:
        """Begin with a cell; see :meth:`shown`."""
        return self.client.execute(code)

    def interrupt(self) -> None:
        """Press the stop button."""
        self.manager.interrupt_kernel()

    def shown(self, cell: str, so_far: Shown | None = None) -> Shown:
        """Wait for the end of a cell; messages of other cells are an error."""
        shown = Shown() if so_far is None else so_far
        deadline = time.monotonic() + CELL_S
        while True:
            message = self.client.get_iopub_msg(timeout=deadline - time.monotonic())
            assert message["parent_header"].get("msg_id") == cell, f"late: {message['content']}"
            kind, content = message["msg_type"], message["content"]
            if kind == "status" and content["execution_state"] == "idle":
                self.client.get_shell_msg(timeout=CELL_S)
                return shown
            _add(shown, kind, content)

    def until(self, cell: str, text: str) -> Shown:
        """Wait until a cell, which goes on, has printed `text`."""
        shown = Shown()
        deadline = time.monotonic() + CELL_S
        while text not in shown.stdout + shown.stderr:
            message = self.client.get_iopub_msg(timeout=deadline - time.monotonic())
            assert message["parent_header"].get("msg_id") == cell
            _add(shown, message["msg_type"], message["content"])
            assert not shown.error, shown.traceback
        return shown


def _add(shown: Shown, kind: str, content: dict[str, Any]) -> None:
    match kind:
        case "stream" if content["name"] == "stdout":
            shown.stdout += content["text"]
        case "stream":
            shown.stderr += content["text"]
        case "display_data" | "update_display_data":
            name = content["transient"]["display_id"]
            assert (kind == "update_display_data") == (name in shown.displays)
            shown.displays[name] = content["data"]["text/plain"]
        case "execute_result":
            shown.value = content["data"]["text/plain"]
        case "error":
            shown.error = f"{content['ename']}: {content['evalue']}"
            shown.traceback = _COLOUR.sub("", "\n".join(content["traceback"]))
