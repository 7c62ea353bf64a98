"""What was meant? Command lines that people write from habit, and what to write instead."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from unisono.cli.endings import Refusal

_NUM_WORKERS = (
    "--nproc-per-node",
    "--nproc_per_node",
    "--num-processes",
    "--num_processes",
    "--np",
)
_NOT_NEEDED = ("--standalone", "--master-port", "--master_port", "--rdzv-backend", "--rdzv_backend")
_RENAMED = {
    "--node_rank": "--node-rank",
    "--rdzv-endpoint": "--rendezvous",
    "--rdzv_endpoint": "--rendezvous",
}


def without_run(arguments: Sequence[str]) -> Refusal | None:
    """Say what is missing where `unisono` is followed by a script, or by an option of `run`."""
    if not arguments:
        return None
    first = arguments[0]
    is_script = first.endswith(".py")
    if not is_script and not (first in ("-n", "-m", *_NUM_WORKERS) or first[:2] == "-n"):
        return None
    what = f"`{first}` is a script" if is_script else f"`{first}` is an option of `unisono run`"
    return Refusal(f"a command must come first, but {what}: use `{meant(['run', *arguments])}`.")


def of_another_launcher(option: str, arguments: Sequence[str]) -> Refusal | None:
    """Say what stands for an option of torchrun or another launcher; None: it is none.

    Args:
        option: which `unisono run` does not have.
        arguments: all that follows `unisono run`.
    """
    if option in _NUM_WORKERS:
        line = meant(["run", *arguments])
        return Refusal(f"`{option}` is `-n` here: use `{line}`.")
    if option in _NOT_NEEDED:
        return Refusal(f"`{option}` is not needed: workers of one machine need no address.")
    if option in _RENAMED:
        return Refusal(f"`{option}` is `{_RENAMED[option]}` here.")
    return None


def meant(arguments: Sequence[str]) -> str:
    """Put a command line into our words, up to its script."""
    words: list[str] = []
    for position, word in enumerate(arguments):
        name, equals, value = word.partition("=")
        if name in _NUM_WORKERS:
            words += ["-n", value] if equals else ["-n"]
        else:
            words.append(word)
        if word.endswith(".py"):
            words += arguments[position + 1 :]
            break
    return shlex.join(["unisono", *words])
