"""Compilation of modules in place: graphs for every class of module, and clean names in the state dict."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

logger = logging.getLogger("danling")


class Compilation:
    """Compiles modules in place, counts the graphs that come of it, and undoes it all in `close`.

    `nn.Module.compile` compiles the method `_call_impl`, which Dynamo leaves alone together with all of torch's own code: a root that is
    a class of torch.nn makes no graph there. Here the forward is called from a function of this file, which Dynamo traces. The forward
    and backward hooks of the module itself run outside of the graph, as those of FSDP must; they may be registered at any time. Those of
    modules inside of it are part of the graph, so they must be registered before the first call.

    Nothing is added to the module's state dict, and copies and pickles of it are not compiled. Modules of one class share their graphs;
    two `Compilation`s share none, since their options may differ.

    Args:
        options: Arguments of `torch.compile`, such as `backend` and `fullgraph`.
        optimize_ddp: `torch._dynamo.config.optimize_ddp` while anything is compiled; `None` leaves it as the process has it.
    """

    def __init__(self, options: Mapping[str, Any] | None = None, *, optimize_ddp: str | bool | None = None) -> None:
        self.options = dict(options or {})
        self.optimize_ddp = optimize_ddp
        self.graphs = 0
        """Graphs that were compiled so far."""
        self._modules: list[nn.Module] = []
        self._codes: dict[type[nn.Module], CodeType] = {}
        self._warned = False

    @classmethod
    def of(cls, settings: Mapping[str, Any], *, distributed: bool) -> Compilation:
        """Return what the section `compile` of a configuration asks for.

        Args:
            settings: That section.
            distributed: Whether there are several processes, so that DistributedDataParallel may wrap what is compiled.
        """
        given = {name: settings[name] for name in ("backend", "fullgraph", "dynamic", "mode", "options")}
        options = {name: value for name, value in given.items() if value is not None}
        return cls(options, optimize_ddp=settings["optimize_ddp"] if distributed else None)

    def compile(self, module: nn.Module) -> None:
        """Compile the forward of a module in place; graphs are made at its first call.

        Args:
            module: The module. What is called instead of it, such as a wrapper, calls the compiled forward.
        """
        # Not at the top of the file: Dynamo takes a second to import.
        importlib.import_module("torch._dynamo.utils")
        compiled: Any = torch.compile(self._function_for(type(module)), **self.options)
        original = module.forward
        call_impl: Any = module._call_impl

        def forward(*args: Any, **kwargs: Any) -> Any:
            return compiled(original, *args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            # For the length of the call only: a copy or a pickle of the module must not hold a function of this one.
            shadowed = vars(module).get("forward", _ABSENT)
            module.__dict__["forward"] = forward
            try:
                with self.settings(), self._counted():
                    return call_impl(*args, **kwargs)
            finally:
                if shadowed is _ABSENT:
                    vars(module).pop("forward", None)
                else:
                    module.__dict__["forward"] = shadowed

        module._compiled_call_impl = call
        self._modules.append(module)

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Compile under `optimize_ddp` inside; the setting of the process is put back on exit."""
        if self.optimize_ddp is None:
            yield
            return
        config: Any = importlib.import_module("torch._dynamo.config")
        before = config.optimize_ddp
        if self.optimize_ddp == before:
            yield
            return
        config.optimize_ddp = self.optimize_ddp
        try:
            yield
        finally:
            config.optimize_ddp = before

    @contextmanager
    def _counted(self) -> Iterator[None]:
        stats = torch._dynamo.utils.counters["stats"]
        before = stats["unique_graphs"]
        yield
        self.graphs += max(stats["unique_graphs"] - before, 0)

    def warn_without_graph(self) -> None:
        """Say once when modules were to be compiled and no graph has been made; to be called when they have had their chance."""
        if self.graphs or self._warned or not self._modules:
            return
        self._warned = True
        logger.warning(
            "Expected compile.enable to compile %s. Received: no graph; every operation runs as without it. Call the model itself, "
            "`self.model(...)`, and not a method or a part of it; TORCH_LOGS=graph_breaks shows what cannot be compiled, and "
            "TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE switch compilation off.",
            ", ".join(dict.fromkeys(type(module).__name__ for module in self._modules)),
        )

    def close(self) -> None:
        """Leave the modules uncompiled again. A second call does nothing."""
        while self._modules:
            self._modules.pop()._compiled_call_impl = None

    def _function_for(self, kind: type[nn.Module]) -> Any:
        # Dynamo keeps graphs, and counts recompilations, by code object.
        code = self._codes.setdefault(kind, _call.__code__.replace(co_name=f"forward_of_{kind.__name__}"))
        return FunctionType(code, _call.__globals__, code.co_name)


_ABSENT = object()


def _call(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)
