"""Cutting a model into parts for the stages of a pipeline, under the names of the whole model, and blocks that are computed again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)


class ModelParts(nn.Module):
    """The parts of a model that one rank holds, under the names of the whole model.

    The pipeline schedule calls the parts. A step of the runner that calls the whole model gets what `answering` says.
    """

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.answer: Callable[..., Any] | None = None
        """What a step that runs now gets from its call of the model."""

    def inputs_of(self, step: Callable[[object], object], data: object) -> tuple[object, ...]:
        """Return what a step calls the model with; the step is left there."""
        with self._answering(_leave):
            try:
                step(data)
            except _ModelCalled as call:
                if call.keywords:
                    raise ValueError(
                        "Expected self.model to be called with tensors by position in a pipeline. Received: the keywords "
                        f"{', '.join(call.keywords)}, which stages in the middle would need too. Call self.model(tensor, ...), and pass "
                        "on from stage to stage what a later one needs."
                    ) from None
                return call.arguments
        raise ValueError(
            "Expected a step that calls self.model in a pipeline. Received: one that returned without. Call self.model once with the "
            "tensors of the batch, or train on another axis than `pipeline`."
        )

    def output_is(self, step: Callable[[object], object], data: object, output: object) -> Any:
        """Run a step whose call of the model returns `output`, and return what the step returns."""
        calls = 0

        def answer(*_: Any, **__: Any) -> Any:
            nonlocal calls
            calls += 1
            return output

        with self._answering(answer):
            returned = step(data)
        if calls != 1:
            raise ValueError(
                f"Expected a step that calls self.model once in a pipeline, whose schedule has computed the output. Received: {calls} "
                "calls. Put what needs several forwards into the model's `forward`, or train on another axis than `pipeline`."
            )
        return returned

    @contextmanager
    def _answering(self, answer: Callable[..., object]) -> Iterator[None]:
        self.answer = answer
        try:
            yield
        finally:
            self.answer = None

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all parts."""
        for part in self.parts:
            yield from part.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the buffers of all parts."""
        for part in self.parts:
            yield from part.named_buffers(*args, **kwargs)

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Return the state of all parts."""
        return {
            name: value
            for part in self.parts
            for name, value in part.state_dict(*args, **kwargs).items()
        }

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> object:
        """Load each part's share; names that belong to none of them are not looked at."""
        for part in self.parts:
            own = part.state_dict()
            share = {name: value for name, value in state_dict.items() if name in own}
            part.load_state_dict(share, strict=strict, assign=assign)
        return None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the answer for a step; refuse any other call, since a part needs what the part before it returned."""
        if self.answer is None:
            raise RuntimeError(
                "self.model cannot be called here in a pipeline: its schedule calls the stages. Call it in `train_step` or "
                "`evaluate_step`, and use the default `infer_step`."
            )
        return self.answer(*args, **kwargs)


class _ModelCalled(BaseException):
    """Leaves a step at its call of the model. No `Exception`: a step may catch those."""

    def __init__(self, arguments: tuple[object, ...], keywords: tuple[str, ...]) -> None:
        self.arguments, self.keywords = arguments, keywords


def _leave(*args: Any, **kwargs: Any) -> Any:
    raise _ModelCalled(args, tuple(kwargs))


def choose_parts(
    model: nn.Module, num_parts: int, listed: Sequence[Sequence[str]] | None = None
) -> list[list[str]]:
    """Return the module names of each part: as listed, as the model's `pipeline_modules(num_parts)` says, or dealt out evenly.

    What is no division of the model is refused.
    """
    own = getattr(model, "pipeline_modules", None)
    if listed:
        parts = [list(part) for part in listed]
    elif callable(own):
        parts = [list(part) for part in own(num_parts)]
        if len(parts) != num_parts:
            raise ValueError(
                f"Expected `pipeline_modules({num_parts})` of {type(model).__name__} to return as many lists. Received: "
                f"{len(parts)}. Correct it, or set parallel.module_fqns_per_model_part."
            )
    else:
        parts = _even_parts(model, num_parts)
    _check_parts(model, parts)
    return parts


def _even_parts(model: nn.Module, num_parts: int) -> list[list[str]]:
    """Deal out the children of a `Sequential` by their parameters."""
    if not isinstance(model, nn.Sequential):
        raise ValueError(
            f"Expected to know which modules of {type(model).__name__} make up the {num_parts} stages. Received: "
            "parallel.module_fqns_per_model_part=None. Set it, give the model a method `pipeline_modules(num_stages)` that returns such "
            "lists, or override `build_pipeline_model_parts`."
        )
    # Not `named_children`, which leaves out a module that is there for the second time, such as one activation for all layers.
    names = list(model._modules)
    if len(names) < num_parts:
        raise ValueError(
            f"Expected at least {num_parts} modules for as many stages. Received: {len(names)} ({', '.join(names)}). Use fewer stages."
        )
    # One more than its parameters, so that modules without any are dealt out evenly too.
    sizes = [1 + sum(p.numel() for p in child.parameters()) for child in model]
    parts: list[list[str]] = [[] for _ in range(num_parts)]
    total = sum(sizes)
    done = 0
    part = 0
    for index, (name, size) in enumerate(zip(names, sizes)):
        left = len(names) - index
        # A module belongs to the part with its middle; the later parts get one module each at least.
        full = done + size / 2 >= total * (part + 1) / num_parts
        if parts[part] and part < num_parts - 1 and (full or left <= num_parts - 1 - part):
            part += 1
        parts[part].append(name)
        done += size
    return parts


def _check_parts(model: nn.Module, parts: Sequence[Sequence[str]]) -> None:
    # What has two names is looked for under both.
    modules = dict(model.named_modules(remove_duplicate=False))
    listed = [name for part in parts for name in part]
    unknown = [name for name in listed if name not in modules or not name]
    twice = sorted({name for name in listed if listed.count(name) > 1})
    if unknown or twice or not all(parts):
        raise ValueError(
            f"Expected every part to list modules of the model, each once. Received: unknown={unknown}, listed twice={twice}, "
            f"empty parts={[i for i, part in enumerate(parts) if not part]}. Modules: {', '.join(n for n in modules if n)[:500]}."
        )

    def is_in_part(path: str) -> bool:
        return any(f"{path}.".startswith(f"{name}.") for name in listed)

    tensors = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    loose = [name for name, _ in tensors if not is_in_part(name)]
    for path, module in modules.items():
        is_holder = any(name.startswith(f"{path}.") for name in listed)
        # An `nn.Identity` computes nothing, so that no part has to have it.
        if path and not is_in_part(path) and not is_holder and not isinstance(module, nn.Identity):
            loose.append(path)
    if loose:
        raise ValueError(
            f"Expected every module and parameter to belong to one part. Received: {', '.join(loose[:8])} in none. List them, or put "
            "parameters that belong to the model itself into their own module."
        )
    owners: dict[int, tuple[int, str]] = {}
    for index, part in enumerate(parts):
        for path, parameter in (
            (f"{root}.{n}", p) for root in part for n, p in modules[root].named_parameters()
        ):
            before, name = owners.setdefault(id(parameter), (index, path))
            if before != index:
                raise ValueError(
                    f"Expected tied parameters to be in one part. Received: {name} in part {before} and {path} in part {index}, which "
                    "are one parameter. Put both modules into one part, or untie them."
                )


def take_part(model: nn.Module, part: Sequence[str], *, keep: bool = False) -> nn.Module:
    """Return the part of a model: every module that is not in it becomes `nn.Identity`, which leaves all other names alone.

    Lists of modules stay lists, of as many.
    """
    # Pruning changes the model, from which the other stages of this rank are still to be cut.
    if keep:
        model = copy.deepcopy(model)
    _prune(model, "", set(part))
    return model


def _prune(module: nn.Module, prefix: str, part: set[str]) -> None:
    for name, child in list(module._modules.items()):
        path = f"{prefix}{name}"
        if path in part or child is None:
            continue
        # Keep a container, since `forward` may go through it, and replace the modules in it.
        # Not a subclass of `nn.Sequential`: its forward may need modules that would be pruned.
        listing = type(child) is nn.Sequential or isinstance(child, (nn.ModuleList, nn.ModuleDict))
        only_holds = listing and not child._parameters and not child._buffers
        if any(other.startswith(f"{path}.") for other in part) or only_holds:
            _prune(child, f"{path}.", part)
        else:
            setattr(module, name, nn.Identity())


class copied_buffers:
    """Let a forward write to copies of the buffers, such as the statistics of a normalization, which stay as they are.

    Buffers that were written back would count as changed under a backward still to come. One object can be entered again and again, as
    it is where a block is computed anew for each of several backwards.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __enter__(self) -> None:
        modules = [module for module in self.model.modules() if module._buffers]
        self.before = [(module, dict(module._buffers)) for module in modules]
        for module, buffers in self.before:
            module._buffers.update(
                {name: value if value is None else value.clone() for name, value in buffers.items()}
            )

    def __exit__(self, *_: object) -> None:
        for module, buffers in self.before:
            module._buffers.update(buffers)


def is_meta(model: nn.Module) -> bool:
    """Whether a model has tensors without memory."""
    return any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def check_meta(model: nn.Module) -> None:
    """Raise where a part of a model is on the meta device and another has weights, which its initialisation would overwrite."""
    places = {
        tensor.is_meta: name
        for name, tensor in (
            *model.named_buffers(remove_duplicate=False),
            *model.named_parameters(),
        )
    }
    if len(places) > 1:
        raise ValueError(
            f"Expected a model that is on the meta device as a whole, or not at all. Received: {places[True]} on it, and {places[False]} "
            "with values, which would be lost when the model is initialised. Build all of it there and set values in `init_weights()`, or "
            "load them with `pretrained`."
        )


def materialize(model: nn.Module, device: torch.device) -> None:
    """Give the tensors of a model on the meta device memory; a parameter with several names stays one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    # It makes a parameter for each name, which unties them.
    model.to_empty(device=device)
    for first, *others in names.values():
        for name in others:
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, model.get_parameter(first))


def recompute_blocks(part: nn.Module, blocks: Iterable[nn.Module], *, compiled: bool) -> None:
    """Wrap blocks of a model, in place, so that their activations are computed again."""

    def wrapped(block: nn.Module) -> nn.Module:
        # What a forward leaves in buffers, it has left there the first time.
        if compiled or not any(True for _ in block.buffers()):
            return checkpoint_wrapper(block)
        return checkpoint_wrapper(block, context_fn=lambda: (nullcontext(), copied_buffers(block)))

    chosen = {id(block) for block in blocks}
    apply_activation_checkpointing(
        part, checkpoint_wrapper_fn=wrapped, check_fn=lambda module: id(module) in chosen
    )


def recomputes(parts: Iterable[nn.Module]) -> bool:
    """Return whether a block of these parts is computed again."""
    return any(isinstance(module, CheckpointWrapper) for part in parts for module in part.modules())
