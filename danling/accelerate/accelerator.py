"""Accelerate beneath the library's update: its accelerator, how it prepares model and optimizer, and the gradient that goes through it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from danling.distributed import Domain, LaunchEnvironment
from danling.training.preparation import ModelPreparation
from danling.training.reduction import DDPReduction, NamedParameters
from danling.training.update import NonFiniteError
from danling.utils.protocols import SteppedOptimizer

from .settings import AccelerateSettings, check_arguments

_users = 0
"""How many runners of this process use Accelerate's shared state; the last one resets it."""


def import_accelerate() -> Any:
    """Import Accelerate and return it."""
    if find_spec("accelerate") is None:
        raise ImportError(
            "Expected the package accelerate for stack='accelerate'. Received: it is not installed. Install it: "
            "pip install accelerate, or pip install -e '.[accelerate]' in a clone of this library."
        )
    return import_module("accelerate")


def open_accelerator(settings: AccelerateSettings, launch: LaunchEnvironment, more: Mapping[str, object]) -> Any:
    """Return an accelerator with the rank and the device of this process. Call on all ranks, after the process group was joined."""
    global _users
    accelerate = import_accelerate()
    if _users == 0 and import_module("accelerate.state").is_initialized():
        raise ValueError(
            "Expected the runner to make the Accelerator of this process, whose state all of them share. Received: one that was made "
            "before. Use runner.accelerator instead of it."
        )
    check_arguments(more)
    # Also under a launcher one process is one process to Accelerate, which would make a group of it that nothing leaves.
    hidden = {} if launch.world_size > 1 else {name: os.environ[name] for name in ("LOCAL_RANK",) if name in os.environ}
    for name in hidden:
        del os.environ[name]
    try:
        accelerator = accelerate.Accelerator(
            cpu=settings.cpu or torch.accelerator.current_accelerator(check_available=True) is None,
            mixed_precision="fp8" if settings.fp8 else "no",
            gradient_accumulation_steps=1,
            step_scheduler_with_optimizer=False,
            **more,
        )
    finally:
        os.environ.update(hidden)
    _users += 1
    try:
        check_place(accelerator, settings, launch)
    except BaseException:
        release_accelerator()
        raise
    return accelerator


def check_place(accelerator: Any, settings: AccelerateSettings, launch: LaunchEnvironment) -> None:
    """Refuse an accelerator with another rank than its process, or another precision than was asked for."""
    place, own = (accelerator.num_processes, accelerator.process_index), (launch.world_size, launch.rank)
    if place != own:
        raise ValueError(
            f"Expected Accelerate to know all processes that were launched. Received: num_processes={place[0]}, process_index={place[1]} "
            f"with WORLD_SIZE={own[0]}, RANK={own[1]}: its ranks would train alone. Start with torchrun, and make no PartialState of "
            "your own before the runner."
        )
    kind = str(accelerator.distributed_type).rpartition(".")[2]
    if not (kind.startswith("MULTI_") if launch.world_size > 1 else kind == "NO"):
        raise ValueError(
            f"Expected one copy of the model a process. Received: distributed_type={kind} with WORLD_SIZE={launch.world_size}. Set "
            "stack='parallel' or stack='deepspeed', which divide a model."
        )
    if settings.fp8 and accelerator.mixed_precision != "fp8":
        raise ValueError(
            f"Expected a device that can train in fp8. Received: {accelerator.device}, where Accelerate would take "
            f"mixed_precision={accelerator.mixed_precision!r} instead. Set precision='bf16'."
        )
    if launch.world_size > 1:
        check_backend(accelerator.device.type, str(dist.get_backend_config()))


def check_backend(device_type: str, backends: str) -> None:
    """Refuse a process group that has no collectives for a device."""
    if device_type not in [pair.partition(":")[0] for pair in backends.split(",")]:
        usual = dist.Backend.default_device_backend_map.get(device_type, "NAME")
        raise ValueError(
            f"Expected a process group with collectives for the device that Accelerate picked. Received: device={device_type!r}, "
            f"backend={backends!r}. Set backend='cpu:gloo,{device_type}:{usual}'."
        )


def release_accelerator() -> None:
    """Let Accelerate forget this process's accelerator, if no other runner uses it, so that another one can follow."""
    global _users
    _users -= 1
    if _users == 0:
        state = import_module("accelerate.state")
        state.AcceleratorState._reset_state(reset_partial_state=True)
        state.GradientState._reset_state()


class WrapperOptions:
    """The arguments of DistributedDataParallel, as Accelerate asks its handlers for them."""

    def __init__(self, options: Mapping[str, Any], given: Any = None) -> None:
        # Accelerate names the device itself.
        self.options = {name: value for name, value in options.items() if name not in ("device_ids", "output_device")}
        self.given = given

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments."""
        return {**(self.given.to_kwargs() if self.given is not None else {}), **self.options}

    def register_comm_hook(self, model: nn.Module) -> None:
        """Do to the wrapped model what the user's handler does."""
        if self.given is not None:
            self.given.register_comm_hook(model)


class AcceleratePreparation(ModelPreparation):
    """The model as Accelerate wraps it: in DistributedDataParallel on several ranks.

    The user's optimizer stays the runner's, with its state, its keys and its scheduler; the one that Accelerate makes of it steps it.
    Until `bind` the model is as it is. Loaders and schedulers are never prepared: a prepared loader repeats samples to fill up the ranks,
    and a prepared scheduler moves by their number.
    """

    def __init__(self, world: Domain, *, accelerator: Any) -> None:
        super().__init__(world)
        self.accelerator = accelerator
        self._given_handler = accelerator.ddp_handler
        self._is_bound = False
        self._optimizer: Any = None
        self._stepped: Any = None

    def bind(self, optimizer: object) -> None:
        """Take the optimizer that is prepared together with the model; `None` where nothing is trained."""
        self._optimizer, self._is_bound = optimizer, True

    def wrap(self, model: nn.Module, options: Mapping[str, Any], *, reduces_later: bool = False) -> nn.Module:
        """Return the model as Accelerate prepares it, together with the optimizer; see `ModelPreparation.wrap`."""
        trains = any(parameter.requires_grad for parameter in model.parameters())
        if not self._is_bound or (self.world.size > 1 and not trains):
            return model
        asked = self.wrapper_options(options, reduces_later=reduces_later) if self.world.size > 1 else {}
        self.accelerator.ddp_handler = WrapperOptions(asked, self._given_handler)
        if self._stepped is not None:
            # It would keep a reference to every model that was ever wrapped.
            self.accelerator.free_memory()
        if self._optimizer is None:
            alone: nn.Module = self._prepared(model)[0]
            return alone
        wrapped: nn.Module
        wrapped, self._stepped = self._prepared(model, self._optimizer)
        return wrapped

    def _prepared(self, *objects: Any) -> tuple[Any, ...]:
        # The optimizer's state goes where it belongs when it is loaded.
        placed = [None if isinstance(item, nn.Module) else False for item in objects]
        prepared = self.accelerator.prepare(*objects, device_placement=placed)
        return tuple(prepared) if len(objects) > 1 else (prepared,)

    def stepped(self, optimizer: object) -> Any:
        """Return what Accelerate steps in place of an optimizer, which may have been exchanged since it was bound."""
        if not self._is_bound:
            raise ValueError(
                "Expected `bind_optimizer` to let Accelerate prepare model and optimizer. Received: neither prepared. Call "
                "super().bind_optimizer() in it."
            )
        if self._stepped is None or optimizer is not self._optimizer:
            self._optimizer, self._stepped = optimizer, self._prepared(optimizer)[0]
        return self._stepped


_NO_CONTEXT: AbstractContextManager[object] = nullcontext()


class AccelerateReduction(DDPReduction):
    """The gradient of a model that Accelerate has prepared; the window has weighed each loss, and Accelerate must not divide again."""

    def __init__(
        self,
        optimizer: SteppedOptimizer,
        named_parameters: NamedParameters,
        scaler: torch.amp.GradScaler | None = None,
        *,
        accelerator: Any,
        stepped: object,
        **ranks: Any,
    ) -> None:
        super().__init__(optimizer, named_parameters, scaler, **ranks)
        self.accelerator = accelerator
        self.stepped = stepped

    def begin(self, *, first: bool) -> None:
        """Refuse an accelerator that divides the loss: another one of this process may have changed the state that they share."""
        steps = self.accelerator.gradient_accumulation_steps
        if steps != 1:
            raise ValueError(
                "Expected the runner to weigh the micro-batches of an update. Received: an Accelerator with "
                f"gradient_accumulation_steps={steps}, which shares its state with runner.accelerator. Set accum_steps={steps} and make "
                "no other Accelerator."
            )

    def context(self, *, last: bool) -> AbstractContextManager[object]:
        """Return the context in which gradients stay on this rank, but for the last micro-batch."""
        return _NO_CONTEXT if last or self.mean_over == 1 else self.accelerator.no_sync(self.model)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Back-propagate a loss that is scaled already."""
        self.accelerator.backward(loss)

    def apply(self, step: int) -> None:
        """Let Accelerate step the optimizer, which it would leave out between updates by its own count."""
        self.accelerator.sync_gradients = True
        super().apply(step)
        if getattr(self.stepped, "step_was_skipped", False):
            raise NonFiniteError(
                f"Expected Accelerate to make update {step}, which was found finite. Received: its own gradient scaler left it out. "
                "Set precision='fp16', whose scaler is the library's."
            )
