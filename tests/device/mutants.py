"""Takes one wait, copy or move to a device out of the package, and sees whether tests notice.

    python -m tests.device.mutants            all, each with the tests in a process of its own
    python -m tests.device.mutants --list     what would be taken out
    python -m tests.device.mutants 3 14       these alone

What is taken out is found in the source: each call by a name of ``REMOVED`` in the files that move
bytes. It is gone for one process alone, which compiles the file otherwise than it stands there.
"""

from __future__ import annotations

import argparse
import ast
import importlib.abc
import importlib.machinery
import importlib.util
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, NoReturn

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
TIMEOUT_S = 60.0

# In these files, the calls that are waits, copies and moves.
FILES = {
    "unisono.exchange.staged": (),
    "unisono.exchange.staged_hosts": (),
    "unisono.exchange.buffers": (),
    "unisono.exchange.replicas": ("_bind", "_begin", "_load", "_copy"),
    "unisono.exchange.protocol": ("gather",),
    "unisono.step.pending": (),
    "unisono.state.contents": ("place",),
    "unisono.state.optimizer_state": ("move_state", "_moved"),
    "unisono.device": ("Copies", "Device"),
    "unisono.arrivals": (),
}
# What no test can notice, and why.
UNNOTICED = {
    # The leader writes the same values there again, which others read meanwhile: a matter of luck.
    ("ReplicaExchange._begin", "team.meet('shared parameters')"),
    # Nobody writes there before the second step, and all wait in the first.
    ("Buffers.load", "self._copies.wait()"),
}
STATEMENTS = {
    *("wait", "wait_stream", "wait_event", "to_host", "to_device", "record_stream", "record"),
    *("copy_", "_copy", "fetch", "pin", "synchronize", "meet"),
}
EXPRESSIONS = {"pin_memory", "to"}  # replaced by what they are called on
MEETINGS = {"meet"}  # replaced by True


@dataclass(frozen=True, slots=True)
class Mutant:
    """What is taken out: the call that is number `index` in a module."""

    module: str
    index: int
    line: int
    scope: str
    text: str

    def __str__(self) -> str:
        return f"{self.module.rpartition('.')[2]}.py:{self.line} {self.text}"


def all_mutants() -> list[Mutant]:
    """List what can be taken out, in the order of the source."""
    found = []
    for module in FILES:
        cut = _Cut(module, wanted=-1)
        cut.visit(_parsed(module))
        found += cut.found
    return found


def without(mutant: Mutant) -> CodeType:
    """Compile a module without something."""
    cut = _Cut(mutant.module, mutant.index)
    tree = ast.fix_missing_locations(cut.visit(_parsed(mutant.module)))
    assert cut.is_cut
    return compile(tree, str(_path_of(mutant.module)), "exec")


class _Cut(ast.NodeTransformer):
    """Counts what could be taken out, and takes out number `wanted`."""

    def __init__(self, module: str, wanted: int) -> None:
        self._module, self._wanted = module, wanted
        self._scopes = FILES[module]
        self._is_inside, self._scope = not self._scopes, ""
        self.found: list[Mutant] = []
        self.is_cut = False

    def visit_ClassDef(self, node: ast.ClassDef) -> Any:
        return self._visit_scope(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> Any:
        return self._visit_scope(node)

    def visit_Expr(self, node: ast.Expr) -> Any:
        either = node.value.body if isinstance(node.value, ast.IfExp) else node.value
        if _name_of(either) in STATEMENTS and self._is_wanted(node):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_While(self, node: ast.While) -> Any:
        if "query" in ast.unparse(node.test) and self._is_wanted(node):
            return ast.copy_location(ast.Pass(), node)
        return self.generic_visit(node)

    def visit_If(self, node: ast.If) -> Any:
        if _name_of(node.test) in MEETINGS and self._is_wanted(node.test):
            node.test = ast.copy_location(ast.Constant(True), node.test)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> Any:
        name = _name_of(node)
        if name in EXPRESSIONS and self._is_wanted(node):
            assert isinstance(node.func, ast.Attribute)
            return node.func.value
        return self.generic_visit(node)

    def _visit_scope(self, node: Any) -> Any:
        before, scope = self._is_inside, self._scope
        self._is_inside |= node.name in self._scopes
        self._scope = f"{scope}.{node.name}".lstrip(".")
        self.generic_visit(node)
        self._is_inside, self._scope = before, scope
        return node

    def _is_wanted(self, node: Any) -> bool:
        if not self._is_inside:
            return False
        text = ast.unparse(node).splitlines()[0]
        self.found.append(Mutant(self._module, len(self.found), node.lineno, self._scope, text))
        is_it = len(self.found) - 1 == self._wanted
        self.is_cut |= is_it
        return is_it


def _name_of(node: ast.expr) -> str:
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr
    return ""


def _path_of(module: str) -> Path:
    return SOURCE.joinpath(*module.split(".")).with_suffix(".py")


def _parsed(module: str) -> ast.Module:
    return ast.parse(_path_of(module).read_text())


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module, and gives it without something."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self._mutant.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert Path(str(spec.origin)).resolve() == _path_of(name).resolve()
        loader = _Loader(name, str(spec.origin))
        loader.mutant = self._mutant
        spec.loader = loader
        return spec


class _Loader(importlib.machinery.SourceFileLoader):
    mutant: Mutant

    def get_code(self, fullname: str) -> CodeType:
        return without(self.mutant)


def outcome(mutant: Mutant | None) -> tuple[str, str]:
    """Run the tests of ``small`` in a forked process that has a package without something.

    Returns:
        "passed", "failed" or "hangs", and what was said.
    """
    assert not any(name.startswith("unisono") for name in sys.modules), "fork before it is loaded"
    with tempfile.TemporaryFile() as said:
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _run(mutant, said.fileno())
        status = _waited(pid)
        said.seek(0)
        text = said.read().decode(errors="replace")
    if status is None:
        return "hangs", text
    # Failed, or ended by a signal.
    return "passed" if os.waitstatus_to_exitcode(status) == 0 else "failed", text


def _waited(pid: int) -> int | None:
    """Wait for a process and give its status; None: it was killed, as it took too long."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline_s:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.02)
    os.killpg(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _run(mutant: Mutant | None, out: int) -> NoReturn:
    code = 1
    try:
        os.setsid()
        os.dup2(out, 1)
        os.dup2(out, 2)
        if mutant is not None:
            sys.meta_path.insert(0, _Finder(mutant))
        from tests.device import small

        small.check()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def survivors(mutants: Sequence[Mutant]) -> Iterator[Mutant]:
    """Give those that no test notices, and print what becomes of each."""
    for mutant in mutants:
        start_s = time.monotonic()
        what, text = outcome(mutant)
        why = (text.splitlines() or [""])[-1]
        seconds = time.monotonic() - start_s
        print(f"{what:8}{seconds:5.1f} s  {mutant}   {why[:100]}", flush=True)
        if what == "passed" and (mutant.scope, mutant.text) not in UNNOTICED:
            yield mutant


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("numbers", type=int, nargs="*", help="which; all by default")
    parser.add_argument("--list", action="store_true", help="say what there is")
    args = parser.parse_args()
    mutants = all_mutants()
    if args.list:
        for number, mutant in enumerate(mutants):
            print(f"{number:3} {mutant}")
        return 0
    import pytest  # noqa: F401
    import torch  # noqa: F401

    what, text = outcome(None)
    if what != "passed":
        print(f"the tests must pass with all that is there, but: {what}\n{text}")
        return 2
    chosen = [mutants[number] for number in args.numbers] if args.numbers else mutants
    unnoticed = list(survivors(chosen))
    print(f"{len(chosen)} taken out one by one, {len(unnoticed)} unnoticed")
    return 1 if unnoticed else 0


if __name__ == "__main__":
    raise SystemExit(main())
