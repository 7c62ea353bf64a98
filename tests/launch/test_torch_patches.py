"""What of torch is replaced is in one table, and torch has it."""

import ast
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
import torch
from tests.test_architecture import FILES, nodes_of

from unisono.distributed import DistributedDataParallel
from unisono.runtime.launch.torch_patches import apply, patches

TABLE = patches(SimpleNamespace(world_size=2), 0, "unisono")


@pytest.mark.parametrize("patch", TABLE, ids=lambda patch: patch.owner)
def test_torch_has_what_is_replaced_and_the_reason_is_told(patch):
    owner = resolve_name(patch.owner)
    assert any(name in vars(owner) for name in patch.names)
    assert patch.why.endswith(".")


def test_gloo_is_replaced_only_where_it_is_asked_for():
    usual = patches(SimpleNamespace(), 0, "gloo")
    assert [patch.owner for patch in usual] == [patch.owner for patch in TABLE[:-1]]


def test_what_torch_lacks_is_left_out_and_the_rest_is_replaced(monkeypatch):
    patch = TABLE[0]._replace(names=["_no_such_name", "_rendezvous_handlers"])
    module = resolve_name(patch.owner)
    before = module._rendezvous_handlers
    monkeypatch.setattr(module, "_rendezvous_handlers", before)  # put back at the end
    apply([patch])
    assert not hasattr(module, "_no_such_name")
    assert module._rendezvous_handlers.keys() == before.keys()
    changed = [name for name, one in before.items() if module._rendezvous_handlers[name] != one]
    assert sorted(changed) == ["env", "file", "tcp"]


def test_torchs_ddp_has_the_private_methods_that_ours_extends():
    theirs = vars(torch.nn.parallel.DistributedDataParallel)
    own = [name for name in vars(DistributedDataParallel) if not name.startswith("__")]
    extended = [name for name in own if callable(getattr(DistributedDataParallel, name))]
    ours = {"_compare_models", "_order_sums", "_needs_hook"}
    assert set(extended) - ours <= theirs.keys()


def names_of_torch(path):
    """Return the names that a file has from torch."""
    for node in nodes_of(path):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            found = (alias for alias in node.names if alias.name.split(".")[0] == "torch")
            yield from (alias.asname or "torch" for alias in found)


def root_of(node):
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def replaced_in(path):
    """Yield the lines that set an attribute of something of torch's."""
    known = {*names_of_torch(path)}
    for node in nodes_of(path):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.Call) and root_of(node.func) == "setattr":
            targets = [ast.Attribute(node.args[0])]
        for target in targets:
            if isinstance(target, ast.Attribute) and root_of(target) in known:
                yield f"{path.name}:{node.lineno}"


def test_nothing_of_torch_is_replaced_elsewhere(tmp_path):
    planted = Path(tmp_path, "planted.py")
    planted.write_text("import torch.nn as n\nn.Linear.forward = 1\nsetattr(n.Linear, 'x', 1)\n")
    assert [*replaced_in(planted)] == ["planted.py:2", "planted.py:3"]
    assert [line for path in FILES for line in replaced_in(path)] == []
