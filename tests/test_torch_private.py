"""The private names of torch that the library uses are listed, and the torch that runs has them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from support.pages import ROOT
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DeviceMesh, DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from danling.utils.torch_private import (
    PRIVATE_NAMES,
    TESTED,
    _used_by_methods,
    has_name,
    missing_names,
)

LISTED = {part for name in PRIVATE_NAMES for part in name.split(".")}
OTHER_PACKAGES = {
    "accelerate": {"_reset_state"},
    # torch's notes on autograd document attributes with this prefix: https://docs.pytorch.org/docs/stable/notes/autograd.html
    "autograd": {"_saved_other"},
    "datasets": {"_ex_iterable"},
    "deepspeed": {
        "_clear_fp32_optimizer_param_groups",
        "_copy_recovery_script",
        "_hp_optimizer_states_linked",
        "_lazy_init_hp_params_optimizer_state",
        "_offload_accumulated_param_ids",
        "_overflow_clean_up",
        "_pre_step",
        "_release_preflattened_grad_buffers",
        "_set_fp32_optimizer_param_groups",
    },
    "numpy": {"_bit_generator", "_rand"},
    "python": {
        "_asdict",
        "_current_frames",
        "_exit",
        "_fields",
        "_getframe",
        "_inst",
        "_start_method",
    },
    "torchft": {"_quorum_future", "_server"},
    "torchmetrics": {"_computed", "_reductions", "_to_sync", "_update_count"},
    "trackio": {"_client_lock", "_flush_queues_inline"},
    # Written by the library: on a function, and on a loader of YAML.
    "danling": {"_danling", "_root"},
}
CLASSES = (
    torch.Tensor,
    torch.amp.GradScaler,
    torch.optim.Optimizer,
    nn.Module,
    DataLoader,
    DeviceMesh,
    DistributedDataParallel,
    DTensor,
    FSDPParamGroup,
    FSDPState,
    LRScheduler,
    _MultiProcessingDataLoaderIter,
)


def is_private(name: object) -> bool:
    return isinstance(name, str) and name.startswith("_") and not name.startswith("__")


def torchs_own() -> set[str]:
    """Return the private attributes of torch's classes, whose names a class of the library may also have."""
    found = {name for kind in CLASSES for base in kind.__mro__ for name in vars(base)}
    return {name for name in found.union(*map(_used_by_methods, CLASSES)) if is_private(name)}


def defined_in(tree: ast.AST) -> Iterator[str]:
    """Yield the names of functions, classes, variables and attributes of `self` that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and is_own(node.value)
        ):
            yield node.attr


def is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def unlisted(tree: ast.AST, defined: set[str]) -> Iterator[str]:
    """Yield the private names that a module of the library uses, and that neither the library defines nor a table has."""
    known = LISTED.union(*OTHER_PACKAGES.values())
    foreign = torchs_own()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] == "torch":
            yield from filter(is_unlisted, (f"{node.module}.{each.name}" for each in node.names))
        elif isinstance(node, ast.Import):
            yield from filter(is_unlisted, (each.name for each in node.names))
        elif (
            isinstance(node, ast.Constant)
            and str(node.value).startswith("torch.")
            and " " not in str(node.value)
        ):
            yield from filter(is_unlisted, [str(node.value)])
        elif isinstance(node, ast.Attribute) and is_private(node.attr) and node.attr not in known:
            if node.attr not in defined or (node.attr in foreign and not is_own(node.value)):
                yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in (
            "getattr",
            "hasattr",
            "setattr",
        ):
            name = node.args[1].value if isinstance(node.args[1], ast.Constant) else None
            if is_private(name) and name not in known | defined:
                yield ast.unparse(node)


def is_unlisted(name: str) -> bool:
    is_listed = any(f"{each}.".startswith(f"{name}.") for each in PRIVATE_NAMES)
    return name.startswith("torch.") and any(map(is_private, name.split("."))) and not is_listed


TREES = {path: ast.parse(path.read_text()) for path in sorted(Path(ROOT, "danling").rglob("*.py"))}
DEFINED = {name for tree in TREES.values() for name in defined_in(tree)}


def test_installed_torch_has_every_listed_name() -> None:
    assert missing_names(torch.__version__) == []


def test_library_uses_only_listed_private_names() -> None:
    found = [f"{path}: {name}" for path, tree in TREES.items() for name in unlisted(tree, DEFINED)]
    assert found == []


def test_library_uses_every_listed_name() -> None:
    texts = {path: path.read_text() for path in TREES if path.name != "torch_private.py"}
    assert [
        name
        for name in PRIVATE_NAMES
        if not any(name.rpartition(".")[2] in text for text in texts.values())
    ] == []
    assert all(set(releases.split()) <= {*TESTED} for releases in PRIVATE_NAMES.values())


@pytest.mark.parametrize(
    "use",
    [
        "from torch._inductor import compile_fx",
        "import torch._inductor.fx_passes",
        "import_module('torch._inductor.fx_passes')",
        "torch._foreach_sqrt_(gradients)",
        "tensor._grad_fn",
        "module._forward_hooks",
        "getattr(optimizer, '_opt_called')",
    ],
)
def test_use_of_another_private_name_is_found(use: str) -> None:
    assert [*unlisted(ast.parse(use), DEFINED)]


@pytest.mark.parametrize(
    "name",
    ["torch._no_such", "torch._no_such.part", "torch.nn.Module._no_such", "torch.nn._no.such"],
)
def test_missing_name_is_not_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not has_name(name)
    monkeypatch.setitem(PRIVATE_NAMES, name, TESTED[-1])
    assert name in missing_names(f"{TESTED[-1]}.1+cu132") and name in missing_names("9.0.0")
    assert name not in missing_names(TESTED[0])
