"""Compilation of modules in place and of functions: graphs for every class of module, and clean names in the state dict."""

from __future__ import annotations

import importlib
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn

from .artifacts import ArtifactDirectory

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
        artifacts: Where compiled code is kept; `None` leaves it where torch puts it.
        within: Returns a context around every call of a compiled function, for settings of the compiler beyond these.
    """

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        *,
        optimize_ddp: str | bool | None = None,
        artifacts: ArtifactDirectory | None = None,
        within: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self.options = dict(options or {})
        self.optimize_ddp = optimize_ddp
        self.graphs = 0
        """Graphs that were compiled so far."""
        self.calls = 0
        """Calls of compiled functions."""
        self._artifacts = artifacts
        self._sealed = 0
        self._within = within
        self._modules: list[nn.Module] = []
        self._codes: dict[type[nn.Module], CodeType] = {}
        self._warned = False
        # Dynamo remembers by file, line and name of a function which sizes have varied.
        self._number = next(_numbers)

    @classmethod
    def of(
        cls,
        settings: Mapping[str, Any],
        *,
        distributed: bool,
        artifacts: ArtifactDirectory | None = None,
    ) -> Compilation:
        """Return what the section `compile` of a configuration asks for."""
        given = {name: settings[name] for name in ("backend", "fullgraph", "dynamic", "mode", "options")}
        options = {name: value for name, value in given.items() if value is not None}
        return cls(options, optimize_ddp=settings["optimize_ddp"] if distributed else None, artifacts=artifacts)

    def compile(self, module: nn.Module) -> None:
        """Compile the forward of a module in place; graphs are made at its first call."""
        compiled = self._compiled(self._function_for(type(module)))
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

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function compiled; graphs are made at its first call, and none is shared with another compilation of it."""
        assert isinstance(function, FunctionType)
        code = function.__code__.replace(co_name=f"{function.__name__}_{self._number}")
        compiled = self._compiled(FunctionType(code, function.__globals__, function.__name__))

        def call(*args: Any) -> Any:
            with self.settings(), self._counted():
                return compiled(*args)

        return call

    def _compiled(self, function: FunctionType) -> Any:
        # Not at the top of the file: Dynamo takes a second to import.
        importlib.import_module("torch._dynamo.utils")
        return torch.compile(function, **self.options)

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Compile under the settings of this compilation inside; those of the process are put back on exit."""
        if self._artifacts is not None:
            self._artifacts.use()
        with ExitStack() as stack:
            if self.optimize_ddp is not None:
                config: Any = importlib.import_module("torch._dynamo.config")
                if self.optimize_ddp != config.optimize_ddp:
                    stack.enter_context(config.patch(optimize_ddp=self.optimize_ddp))
            stack.enter_context(self._within())
            yield

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.calls += 1
        stats = torch._dynamo.utils.counters["stats"]
        before = stats["unique_graphs"]
        yield
        self.graphs += max(stats["unique_graphs"] - before, 0)

    def open(self) -> None:
        """Look into the folder of compiled code. Call on all ranks."""
        if self._artifacts is not None:
            self._artifacts.open()

    def after_first_update(self, *, speaks: bool) -> None:
        """Look at what the first update of this process has compiled, and list it while no process compiles. Call on all ranks."""
        if speaks:
            self.warn_without_graph()
        if self._artifacts is not None:
            self._artifacts.world.barrier()
            self._seal(everything=True)
            self._artifacts.world.barrier()

    def _seal(self, *, everything: bool) -> None:
        if self._artifacts is not None and self.graphs > self._sealed:
            self._artifacts.seal(everything=everything)
            self._sealed = self.graphs

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
        """Leave the modules uncompiled again, and list what was compiled since. A second call does nothing."""
        if self._artifacts is not None:
            self._seal(everything=self._artifacts.world.size == 1)
            self._artifacts.close()
        while self._modules:
            self._modules.pop()._compiled_call_impl = None

    def _function_for(self, kind: type[nn.Module]) -> FunctionType:
        # Dynamo keeps graphs, and counts recompilations, by code object.
        code = self._codes.setdefault(
            kind, _call.__code__.replace(co_name=f"forward_of_{kind.__name__}_{self._number}")
        )
        return FunctionType(code, _call.__globals__, code.co_name)


_ABSENT = object()
_numbers = itertools.count()


def _call(forward: Any, *args: Any, **kwargs: Any) -> object:
    return forward(*args, **kwargs)
