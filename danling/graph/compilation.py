"""Compiled code: modules that are compiled in place for any stack, and forward and loss as one function for the stack `graph`."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from danling.config.checks import read_memory_policy
from danling.training import call_model
from danling.training.preparation import ModelPreparation
from danling.utils.observers import Observer

from .artifacts import Artifacts, artifacts_of
from .compiler import check_compiler

if TYPE_CHECKING:
    from danling.runners.graph_runner import GraphRunner
    from danling.runners.torch_runner import TorchRunner
    from danling.training import UpdateOutcome, Window

logger = logging.getLogger("danling")

_numbers = itertools.count()
_ABSENT = object()


class Compilation(Observer):
    """Compiles modules in place, counts the graphs that come of it, and undoes it all in `close`.

    `nn.Module.compile` compiles the method `_call_impl`, which Dynamo leaves alone together with all of torch's own code: a root that is
    a class of torch.nn makes no graph there. Here the forward is called from a function of this file, which Dynamo traces. The forward
    and backward hooks of the module itself run outside of the graph, as those of FSDP must; they may be registered at any time. Those of
    modules inside of it are part of the graph, so they must be registered before the first call.

    Nothing is added to the module's state dict, and copies and pickles of it are not compiled. Modules of one class share their graphs;
    two `Compilation`s share none, since their options may differ.

    As an observer of the run, it unpacks compiled code where a training begins, and lists what the first update has compiled.
    """

    critical = True

    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        distributed: bool = False,
        artifacts: Artifacts | None = None,
        warns: bool = True,
    ) -> None:
        names = ("backend", "fullgraph", "dynamic", "mode", "options")
        self.options = {name: settings[name] for name in names if settings.get(name) is not None}
        """Arguments of `torch.compile`."""
        self.artifacts = artifacts
        self.graphs = 0
        """Graphs that were compiled so far."""
        self.calls = 0
        """Calls of compiled functions."""
        self._warns = warns
        self._is_first = True
        self._optimize_ddp = settings.get("optimize_ddp") if distributed else None
        self._modules: list[nn.Module] = []
        self._codes: dict[object, CodeType] = {}
        # Dynamo remembers by file, line and name of a function which sizes have varied.
        self._number = next(_numbers)

    @classmethod
    def of(cls, runner: TorchRunner) -> Compilation:
        """Return what the section `compile` of a runner's configuration asks for. Called on all ranks."""
        check_compiler(
            runner.config.compile.backend,
            runner.device.type,
            setting="compile.enable",
            otherwise="compile.enable=false",
        )
        return cls(
            runner.config.compile,
            distributed=runner.distributed,
            artifacts=artifacts_of(runner),
            warns=runner.is_main_process,
        )

    def compile(self, module: nn.Module) -> None:
        """Compile the forward of a module in place; graphs are made at its first call."""
        compiled = self._compiled(_call, type(module))
        original = module.forward
        call_impl: Any = module._call_impl

        def forward(*args: Any, **kwargs: Any) -> Any:
            return compiled(original, *args, **kwargs)

        def call(*args: Any, **kwargs: Any) -> Any:
            # For the length of the call only: a copy or a pickle of the module must not hold a function of this one.
            with forwards_replaced([(module, forward)]), self._counted():
                return call_impl(*args, **kwargs)

        module._compiled_call_impl = call
        self._modules.append(module)

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function compiled; graphs are made at its first call, and none is shared with another compilation of it."""
        compiled = self._compiled(function, function)

        def call(*args: Any) -> Any:
            with self._counted():
                return compiled(*args)

        return call

    def _compiled(self, function: Callable[..., Any], of: Any) -> Any:
        assert isinstance(function, FunctionType)
        # Not at the top of the file: Dynamo takes a second to import.
        import_module("torch._dynamo.utils")
        # Dynamo keeps graphs, and counts recompilations, by code object.
        code = self._codes.setdefault(
            of, function.__code__.replace(co_name=f"{of.__name__}_{self._number}")
        )
        return torch.compile(FunctionType(code, function.__globals__, code.co_name), **self.options)

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Compile under the settings of this compilation inside; those of the process are put back on exit."""
        if self.artifacts is not None:
            self.artifacts.use()
        config: Any = import_module("torch._dynamo.config")
        if self._optimize_ddp in (None, config.optimize_ddp):
            yield
        else:
            with config.patch(optimize_ddp=self._optimize_ddp):
                yield

    @contextmanager
    def _counted(self) -> Iterator[None]:
        self.calls += 1
        stats = torch._dynamo.utils.counters["stats"]
        before = stats["unique_graphs"]
        with self.settings():
            yield
        # The program may clear the counters within the call.
        self.graphs += max(stats["unique_graphs"] - before, 0)

    def training_started(self) -> None:
        self.open()

    def update_ended(self, outcome: UpdateOutcome) -> None:
        if self._is_first and outcome.committed:
            self._is_first = False
            self.after_first_update(is_main=self._warns)

    def open(self) -> None:
        """Unpack the compiled code of earlier starts. Called on all ranks."""
        if self.artifacts is not None:
            self.artifacts.open()

    def after_first_update(self, *, is_main: bool) -> None:
        """Warn if the first update of this process has compiled nothing, and list what it has compiled. Called on all ranks."""
        if is_main and self._modules and not self.graphs:
            logger.warning(
                "Expected compile.enable to compile %s. Received: no graph; every operation runs as without it. Call the model itself, "
                "`self.model(...)`, and not a method or a part of it; TORCH_LOGS=graph_breaks shows what cannot be compiled, and "
                "TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE switch compilation off.",
                ", ".join(dict.fromkeys(type(module).__name__ for module in self._modules)),
            )
        if self.artifacts is not None:
            self.artifacts.seal()

    def close(self) -> None:
        """Leave the modules uncompiled again, and list what was compiled since. A second call does nothing."""
        if self.artifacts is not None:
            self.artifacts.close()
        while self._modules:
            self._modules.pop()._compiled_call_impl = None


def compile_modules(runner: TorchRunner, modules: Iterable[nn.Module], closers: ExitStack) -> None:
    """Compile modules of a runner in place, so that their names stay: `torch.compile(model)` would put `_orig_mod.` before each."""
    # The parallel stack calls this for each part of a pipeline.
    if runner.compilation is None:
        runner.compilation = Compilation.of(runner)
        runner.observers.append(runner.compilation)
        closers.callback(runner.compilation.close)
    for module in modules:
        runner.compilation.compile(module)


def _call(forward: Any, *args: Any, **kwargs: Any) -> object:
    return forward(*args, **kwargs)


@contextmanager
def forwards_replaced(forwards: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Call other functions in the place of the forwards of modules inside, which stay as they are."""
    before = [(module, vars(module).get("forward", _ABSENT)) for module, _ in forwards]
    for module, forward in forwards:
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module, shadowed in before:
            if shadowed is _ABSENT:
                vars(module).pop("forward", None)
            else:
                module.__dict__["forward"] = shadowed


# Forward and loss as one function

PASS_VERSION = 1
"""To be counted up with every change of `keep_random_operations`. The pass is no part of the keys of torch's caches, so that code of an
earlier one would come back."""

_DIVIDING = ("inductor", "aot_eager_decomp_partition")
_FOLLOWED_BY = {"budget": _DIVIDING, "recompute": (*_DIVIDING, "aot_eager")}


def policy_tag(policy: str | None) -> str:
    """Return what tells the compiled code of a memory policy from that of others."""
    kind, budget = read_memory_policy(policy)
    return f"danling-{kind}-{budget:g}-{PASS_VERSION}"


def check_backend(policy: str | None, backend: str | None) -> None:
    """Refuse a backend that would pass over the memory policy."""
    kind, _ = read_memory_policy(policy)
    followed = _FOLLOWED_BY.get(kind)
    if followed is not None and backend is not None and backend not in followed:
        raise ValueError(
            f"Expected compile.backend to be one that follows compile.memory_policy: {', '.join(map(repr, followed))}. Received: "
            f"compile.backend={backend!r} with the policy {policy!r}. Leave compile.backend out, or the policy."
        )


def keep_random_operations(graph: GraphModule, inputs: object = None) -> GraphModule:
    """Mark what every random operation draws as to be kept for the backward.

    Under an activation memory budget torch may choose to compute a random operation again, and draws other numbers then: dropout has
    another mask in the backward than in the forward, and the gradient is wrong without an error.
    """
    for node in graph.graph.nodes:
        if node.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(
            node.target, "tags", ()
        ):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return graph


class GraphCompilation(Compilation):
    """Compiles forward and loss under a memory policy.

    Every size of a batch has its own graph unless `dynamic` is set: the results of a batch then depend on nothing that the process
    has seen before, and a run that is resumed in the middle of an epoch computes the same.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        blocks: Iterable[nn.Module],
        *,
        distributed: bool = False,
        artifacts: Artifacts | None = None,
        warns: bool = True,
    ) -> None:
        super().__init__(settings, distributed=distributed, artifacts=artifacts, warns=warns)
        self.options = {"fullgraph": True, "dynamic": False, **self.options}
        policy = settings.get("memory_policy")
        kind, budget = read_memory_policy(policy)
        self._recomputed = (
            [(each, _recomputing(each.forward)) for each in blocks] if kind == "recompute" else []
        )
        if self._recomputed and distributed:
            # What cuts a graph at the buckets of DistributedDataParallel cannot cut one with a part that is computed again.
            self._optimize_ddp = "no_optimization"
        # A backward that is compiled when it is first run would be compiled under other settings, and on another thread.
        changes: dict[str, Any] = {
            "activation_memory_budget": budget,
            "force_non_lazy_backward_lowering": True,
        }
        if kind == "budget":
            changes["joint_custom_pass"] = keep_random_operations
        functorch: Any = import_module("torch._functorch.config")
        compiler: Any = import_module("torch.compiler.config")
        # The pass is no part of the keys of torch's caches, in whatever folder they are.
        self._patches = [functorch.patch(changes), compiler.patch(cache_key_tag=policy_tag(policy))]

    def function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        call = super().function(function)
        errors: Any = import_module("torch._dynamo.exc")

        def checked(*args: Any) -> Any:
            try:
                return call(*args)
            except (errors.Unsupported, errors.UserError) as error:
                raise RuntimeError(
                    f"Expected forward and loss that become one graph. Received: {str(error).partition(chr(10))[0]}. The traceback above "
                    "shows where. Take it out of the model or the loss, or set compile.fullgraph=false, which compiles the parts around it."
                ) from error
            except errors.FailOnRecompileLimitHit as error:
                raise RuntimeError(
                    f"Expected batches of a few sizes, each of which is compiled. Received: more than torch compiles, with "
                    f"compile.dynamic={self.options['dynamic']}. Set compile.dynamic=true, which compiles one graph for all sizes, or "
                    "bring batches to fewer; a number that the loss reads and that changes causes a compilation as well."
                ) from error

        return checked

    @contextmanager
    def settings(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(super().settings())
            for patch in self._patches:
                stack.enter_context(patch)
            if self._recomputed:
                stack.enter_context(forwards_replaced(self._recomputed))
            yield

    def after_first_update(self, *, is_main: bool) -> None:
        if not self.calls:
            raise ValueError(
                "Expected a `train_step` that calls super().train_step(data): with stack='graph' that is the compiled function of forward "
                "and loss. Received: one that does not. Put what it computes into the model or `compute_loss`, or choose stack='ddp' with "
                "compile.enable."
            )
        super().after_first_update(is_main=is_main)


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed


Loss = Callable[[Any, Any], Tensor]


class WholeLoss(nn.Module):
    """Calls a model and its loss as one compiled function: `(inputs, target) -> (prediction, loss)`.

    The model itself is not compiled: its names, copies and pickles, and its forward in an evaluation, are those of the model.
    DistributedDataParallel goes around this module, so that its hooks stay outside of the graph.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Callable[[], Loss | None],
        compilation: Compilation,
        window: Window,
    ) -> None:
        super().__init__()
        self.model = model
        self._loss = loss
        self._window = window
        self._compilation = compilation
        self._compiled = compilation.function(_forward_and_loss)

    def forward(self, inputs: object, target: object) -> tuple[Any, Tensor | None]:
        """Return the prediction, and its loss unless that is found outside."""
        if self._window.weighs_nothing:
            # Not compiled: within a graph, the gradient of the loss cannot be kept from the prediction.
            self._compilation.calls += 1
            pred = call_model(self.model, inputs)
            self._window.cut(pred)
            loss = self._loss()
            return pred, None if loss is None else loss(pred, target)
        found: tuple[Any, Tensor | None] = self._compiled(self.model, self._loss(), inputs, target)
        return found


def _forward_and_loss(model: object, loss: Any, inputs: object, target: Any) -> Any:
    pred = call_model(model, inputs)
    return pred, None if loss is None else loss(pred, target)


class GraphPreparation(ModelPreparation):
    """The model, and the function that trains it."""

    def __init__(self, runner: GraphRunner) -> None:
        super().__init__(runner.world)
        self._whole_loss = runner._whole_loss
        self._function: WholeLoss | None = None

    def wrap(
        self, model: nn.Module, options: Mapping[str, object], *, reduces_later: bool = False
    ) -> nn.Module:
        self._function = self._whole_loss(model)
        wrapped = super().wrap(self._function, options, reduces_later=reduces_later)
        return model if wrapped is self._function else wrapped

    def unwrap(self, model: object) -> Any:
        bare = super().unwrap(model)
        return bare.model if isinstance(bare, WholeLoss) else bare

    def function(self, model: nn.Module) -> Callable[[Any, Any], Any]:
        """Return what a micro-batch is run with: `(inputs, target) -> (prediction, loss)`."""
        if isinstance(model, DistributedDataParallel):
            if isinstance(model.module, WholeLoss):
                return model
            raise ValueError(
                "Expected the graph stack to wrap the model together with its loss. Received: a model in DistributedDataParallel. Hand "
                "options of it over in `ddp_kwargs`, or choose stack='ddp'."
            )
        # The program has replaced the model, which the compiled function holds.
        if self._function is None or self._function.model is not model:
            self._function = self._whole_loss(model)
        return self._function
