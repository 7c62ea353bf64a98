"""Imports run one way, and nothing happens at import."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "unisono"

# Each layer may import those before it, and itself.
LAYERS = [
    {"errors", "world", "version", "whole", "plan", "faults", "seeding", "words", "plainfile"},
    {"comm"},
    {"c10d"},
    {"ddp"},
    {"engine", "data", "checkpoint"},
    {"callbacks"},
    {"train"},
    {"launch"},
    {"report"},
    {"cli"},
    {"__main__"},
]
RANK = {name: number for number, layer in enumerate(LAYERS) for name in layer}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def part_of(module):
    return module.split(".")[1]


def module_of(path):
    names = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


@functools.cache
def import_nodes(path):
    nodes = ast.walk(ast.parse(path.read_text()))
    return [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]


def imports_of(path):
    for node in import_nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module and node.level == 0:
            yield node.module


def edges():
    for path in FILES:
        for imported in imports_of(path):
            if imported.startswith("unisono."):
                yield module_of(path), imported


def test_every_part_has_its_place():
    assert {part_of(module_of(path)) for path in FILES} <= RANK.keys()


def test_imports_never_run_upwards():
    upward = [(a, b) for a, b in edges() if RANK[part_of(a)] < RANK[part_of(b)]]
    assert upward == []


def test_imports_have_no_circle():
    graph = {}
    for importer, imported in edges():
        graph.setdefault(importer, set()).add(imported)
    done, path = set(), []

    def visit(module):
        assert module not in path, f"a circle: {[*path[path.index(module) :], module]}"
        if module in done:
            return
        path.append(module)
        for imported in graph.get(module, ()):
            visit(imported)
        path.pop()
        done.add(module)

    for module in list(graph):
        visit(module)


def test_the_plan_is_pure():
    allowed = {
        "__future__",
        "collections.abc",
        "dataclasses",
        "functools",
        "hashlib",
        "struct",
        "typing",
        "torch",
    }
    for path in (PACKAGE / "plan").glob("*.py"):
        foreign = {name for name in imports_of(path) if not name.startswith("unisono.plan")}
        assert foreign <= allowed, path


def test_the_report_stands_alone():
    parts = {(part_of(a), part_of(b)) for a, b in edges()}
    assert {b for a, b in parts if a == "report"} <= {"report", "errors", "world", "plan"}
    assert {a for a, b in parts if b == "report"} <= {"report", "cli"}


def test_relative_imports_are_not_used():
    for path in FILES:
        for node in import_nodes(path):
            assert not (isinstance(node, ast.ImportFrom) and node.level), path


WITHOUT_TORCH = [
    "unisono",
    "unisono.cli",
    "unisono.launch.api",
    "unisono.checkpoint.store",
    "unisono.report.files",
    "unisono.report.top",
]
FIRST_THAT_LOADS_TORCH = """
import importlib, sys
for module in sys.argv[1:]:
    importlib.import_module(module)
    assert not {"torch", "numpy"} & sys.modules.keys(), module
"""


def test_the_launcher_does_not_wait_for_torch():
    subprocess.run([sys.executable, "-c", FIRST_THAT_LOADS_TORCH, *WITHOUT_TORCH], check=True)


def test_public_names_are_these():
    import unisono

    assert unisono.__all__ == [
        "CallbackError",
        "CheckpointError",
        "DataFormatError",
        "DistributedDataParallel",
        "DistributedSampler",
        "DownloadError",
        "LoadingError",
        "MismatchError",
        "NonFiniteLossError",
        "PeerLostError",
        "RendezvousError",
        "Run",
        "Step",
        "Trainer",
        "UnisonoError",
        "WaitTimeoutError",
        "WorkerError",
        "World",
        "__version__",
        "data",
        "init",
        "launch",
        "load_model",
        "world",
    ]
    assert all(getattr(unisono, name) is not None for name in unisono.__all__)
