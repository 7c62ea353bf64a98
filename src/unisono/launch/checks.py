"""A workaround for ``--debug``: torch's own checks must not crash.

With TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps a gloo group, and DDP's logger reads the wrapper as
if it were gloo: a segmentation fault in torch 2.13. There the logger's note is left out.
"""

from __future__ import annotations

from typing import Any


def spare_ddps_logger() -> None:
    """Keep DDP's logger away from wrapped gloo groups, in this process."""
    import torch.distributed as dist

    if not dist.is_available():
        return
    from torch.distributed import distributed_c10d

    if distributed_c10d.get_debug_level().name != "DETAIL":
        return
    logger: Any = dist.Logger  # type: ignore[attr-defined]

    class Logger(logger):  # type: ignore[misc]
        """torch's, except for one call."""

        def set_construction_data_and_log(self, *arguments: Any) -> None:
            """Note what was constructed, unless there is a gloo group."""
            groups = distributed_c10d._world.pg_backend_config.values()
            if not any("gloo" in str(group) for group in groups):
                super().set_construction_data_and_log(*arguments)

    dist.Logger = Logger  # type: ignore[attr-defined]
