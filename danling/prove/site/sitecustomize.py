"""Python runs this file at its start where `danling prove` has put this directory on PYTHONPATH.

Once torch (or a stack) has been imported, the tape attaches to it; nothing is imported earlier than the script does. The
`sitecustomize` that this one hides is run too, and this directory leaves `sys.path`.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_HOOKS = {
    "torch": "torch_loaded",
    "torch.distributed.fsdp": "fsdp_loaded",
    "accelerate.data_loader": "accelerate_loaded",
    "deepspeed.comm.torch": "deepspeed_comm_loaded",
    "deepspeed.runtime.engine": "deepspeed_loaded",
}


class _Finder(importlib.abc.MetaPathFinder):
    """Calls a function of `attach.py` once a module has been imported."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.has_torch = False
        self.left = dict(_HOOKS)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name not in self.left:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            self.loaded(name)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def loaded(self, name: str) -> None:
        # Modules of torch may come before torch itself is complete.
        self.waiting.append(name)
        self.has_torch |= name == "torch"
        if not self.has_torch:
            return
        self.waiting.sort(key="torch".__ne__)
        while self.waiting:
            each = self.waiting.pop(0)
            if self.left.pop(each, None) is not None:
                _call(_HOOKS[each])


def _call(function: str) -> None:
    if "_danling_prove" not in sys.modules:
        directory = os.path.join(os.path.dirname(_HERE), "inside")
        file = os.path.join(directory, "__init__.py")
        spec = importlib.util.spec_from_file_location(
            "_danling_prove", file, submodule_search_locations=[directory]
        )
        assert spec is not None and spec.loader is not None
        sys.modules["_danling_prove"] = package = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(package)
    getattr(importlib.import_module("_danling_prove.attach"), function)()


def _run_hidden() -> None:
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        sys.modules["sitecustomize"] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


sys.path[:] = [path for path in sys.path if os.path.abspath(path) != _HERE]
if os.environ.get("DANLING_PROVE"):
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    # What a `.pth` file has imported, say.
    for loaded in filter(sys.modules.__contains__, _HOOKS):
        finder.loaded(loaded)
_run_hidden()
