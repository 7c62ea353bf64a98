"""Imports run one way, and nothing happens at import."""

import ast
import functools
import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "src" / "unisono"

DRAWING = PACKAGE.parents[1] / "docs" / "architecture.md"
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def module_of(path):
    names = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


@functools.cache
def nodes_of(path):
    return [*ast.walk(ast.parse(path.read_text()))]


def import_nodes(path):
    return [node for node in nodes_of(path) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports_of(path):
    for node in import_nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module and node.level == 0:
            yield node.module


@functools.cache
def edges():
    return [
        (module_of(path), imported)
        for path in FILES
        for imported in imports_of(path)
        if imported.startswith("unisono.")
    ]


def room_of(module):
    """Name the folder at the top that a module is in; none of its own for what all may import."""
    name = module.split(".")[1]
    return name if (PACKAGE / name / "__init__.py").exists() else ""


def room_edges():
    found = {path.name: set() for path in PACKAGE.iterdir() if (path / "__init__.py").exists()}
    for importer, imported in edges():
        here, there = room_of(importer), room_of(imported)
        if here and there and here != there:
            found[here].add(there)
    return found


def folder_of(module):
    path = PACKAGE.parent / module.replace(".", "/")
    return module if path.is_dir() else module.rpartition(".")[0]


def refuse_circles(graph):
    done, path = set(), []

    def visit(node):
        assert node not in path, f"a circle: {[*path[path.index(node) :], node]}"
        if node in done:
            return
        path.append(node)
        for imported in graph.get(node, ()):
            visit(imported)
        path.pop()
        done.add(node)

    for node in list(graph):
        visit(node)


def test_modules_import_each_other_in_no_circle():
    graph = {}
    for importer, imported in edges():
        graph.setdefault(importer, set()).add(imported)
    refuse_circles(graph)


def test_folders_import_each_other_in_no_circle():
    graph = {}
    for importer, imported in edges():
        here, there = folder_of(importer), folder_of(imported)
        if here != there and "unisono" not in (here, there):
            graph.setdefault(here, set()).add(there)
    refuse_circles(graph)


def test_the_drawing_shows_what_rooms_import():
    drawn = {}
    for line in DRAWING.read_text().splitlines():
        name, arrow, imported = line.partition(" ← ")
        if arrow and name.strip().isidentifier():
            drawn[name.strip()] = set(imported.replace(",", " ").split())
    rooms = room_edges()
    refuse_circles(rooms)
    assert drawn == {name: found for name, found in rooms.items() if found}
    assert len(rooms) <= 8
    assert len([*PACKAGE.glob("*.py")]) <= 4


def used_twice(names):
    places = {}
    for name, path in names:
        places.setdefault(name, []).append(str(path.relative_to(PACKAGE)))
    return {name: found for name, found in places.items() if len(found) > 1}


def test_the_files_that_the_page_names_exist():
    page = DRAWING.read_text()
    named = {*re.findall(r"`([\w/]+\.py)`", page), *re.findall(r"([\w/]+\.py) +→", page)}
    root = PACKAGE.parents[1]
    paths = [*FILES, *(root / "tests").rglob("test_*.py")]
    files = [f"/{path.relative_to(root)}" for path in paths]
    assert named
    assert [name for name in sorted(named) if not any(f.endswith(f"/{name}") for f in files)] == []


def test_no_name_of_a_module_is_used_in_two_packages():
    assert not used_twice((path.stem, path) for path in FILES if not path.stem.startswith("__"))


def test_no_public_class_is_defined_twice():
    assert not used_twice(
        (node.name, path)
        for path in FILES
        for node in nodes_of(path)[0].body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )


# Everything that a batch and its gradients come through.
ON_THE_WAY = ("plan", "data", "engine", "training")
OF_A_DEVICE = {"cuda", "cpu", "numpy", "pin_memory"}


def test_one_file_alone_asks_for_a_type_of_device():
    found = [
        (str(path.relative_to(PACKAGE)), node.lineno)
        for part in ON_THE_WAY
        for path in (PACKAGE / part).rglob("*.py")
        for node in nodes_of(path)
        if (isinstance(node, ast.Constant) and node.value in ("cpu", "cuda"))
        or (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in OF_A_DEVICE
        )
        or (isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda")
    ]
    # The order of an epoch, which never is on a device.
    assert [place for place, _ in found] == ["plan/samples.py"]


def test_the_plan_is_pure():
    allowed = {"__future__", "collections.abc", "dataclasses", "functools", "hashlib", "struct"}
    allowed |= {"typing", "torch"}
    for path in (PACKAGE / "plan").glob("*.py"):
        foreign = {name for name in imports_of(path) if not name.startswith("unisono.plan")}
        assert foreign <= allowed, path


def test_the_report_stands_alone():
    """It reads what a run has written, and no code of runs."""
    known = {"errors", "runtime.notices", "runtime.plainfile", "runtime.procfs"}
    known |= {"runtime.quantities"}
    reading = ("unisono.tools.report", "unisono.training.events")
    imported = {b for a, b in edges() if a.startswith(reading) and not b.startswith(reading)}
    assert imported <= {f"unisono.{name}" for name in known}


def test_relative_imports_are_not_used():
    for path in FILES:
        for node in import_nodes(path):
            assert not (isinstance(node, ast.ImportFrom) and node.level), path


WITHOUT_TORCH = [
    "unisono",
    "unisono.tools.cli",
    "unisono.runtime.launch.api",
    "unisono.runtime.checkpoint.run_directory",
    "unisono.tools.report.files",
    "unisono.tools.report.top",
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

    names = (
        "Checkpoint DataParallel Precision Run Schedule Trainer UnisonoError WholeBatch "
        "__version__ callbacks data distributed errors launch load_weights progress share split "
        "token_mean world"
    )
    assert unisono.__all__ == names.split()
    assert all(getattr(unisono, name) is not None for name in unisono.__all__)
