"""What is copied from one device to another, and how large it is."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Travelling(TorchDispatchMode):
    """Counts the bytes of all copies between devices inside its block."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes: list[int] = []

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), options: Any = None
    ) -> Any:
        result = operation(*args, **(options or {}))
        name = operation._schema.name
        if name == "aten::_to_copy" and result.device != args[0].device:
            self.num_bytes.append(result.nbytes)
        elif name == "aten::copy_" and args[0].device != args[1].device:
            self.num_bytes.append(args[0].nbytes)
        return result
