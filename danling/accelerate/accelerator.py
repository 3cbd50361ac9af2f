"""Accelerate beneath the library's update: its settings, the accelerator, how it prepares a model, and its gradient."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from danling.distributed import Domain, LaunchEnvironment, LocalDomain
from danling.training.outcome import NonFiniteError
from danling.training.precision import NO_CONTEXT
from danling.training.preparation import ModelPreparation
from danling.training.reduction import DDPReduction
from danling.utils.messages import did_you_mean

if TYPE_CHECKING:
    from danling.runners.accelerate_runner import AccelerateRunner

AutocastPrecision = Literal["fp16", "bf16"]

_DECIDED = {
    "gradient_accumulation": "Set accum_steps, which weighs each micro-batch.",
    "step_scheduler_with_optimizer": "Set scheduler.interval.",
    "split_batches": "Set dataloader.global_batch_size.",
    "dataloader_config": "Use the settings under dataloader.",
    "rng_types": "Set seed: every random stream is the library's.",
    "device_placement": "Leave it out: the library places models and batches.",
    "log_with": "Set tensorboard or wandb.enabled, or call runner.add_tracker.",
    "project_": "Set dir.",
    "kwargs_handlers": "Override `accelerate_kwargs`, which may return objects.",
    "dynamo": "Set compile.enable and compile.backend, which keep the names of parameters.",
    "deepspeed": "Set stack='deepspeed', whose section `deepspeed` takes the same configuration.",
    "megatron": "Set stack='deepspeed' or stack='parallel', which divide a model themselves.",
    "fsdp": "Set stack='parallel' and parallel.axes.shard, which is FSDP2; on the CPU Accelerate would train each rank alone.",
    "torch_tp": "Set stack='parallel' and the degrees under parallel.axes.",
    "parallelism": "Set stack='parallel' and the degrees under parallel.axes.",
    "fp8_config": "Start with `accelerate launch --config_file`, which reads it, or return a recipe from `accelerate_kwargs`.",
    "xla": "Set stack='ddp' on another device: the collectives of an update go through torch.distributed, of which XLA has none here.",
    "tpu": "Set stack='ddp' on another device: the collectives of an update go through torch.distributed, of which XLA has none here.",
    "autocastkwargs": "Set precision, or override `forward_context`.",
    "gradscalerkwargs": "Set precision='fp16', whose scaler is runner.precision.scaler.",
    "initprocessgroupkwargs": "Set backend, init_method or comm.init_timeout_seconds.",
    "profilekwargs": "Set profiling.enabled.",
}
"""How to set what the library decides, by a part of Accelerate's name of an argument, variable, distributed type or handler."""
_VARIABLES = (
    "GRADIENT_ACCUMULATION_STEPS",
    "DYNAMO_BACKEND",
    *(f"USE_{name}" for name in ("DEEPSPEED", "MEGATRON_LM", "FSDP", "PARALLELISM_CONFIG")),
)
_NEUTRAL = ("", "no", "none", "false", "0", "1", "{}", "[]")
"""Values under Accelerate's names that change nothing."""
_MPI_SIZES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")


@dataclass(frozen=True)
class AccelerateSettings:
    """The settings for Accelerate, without those that the library's own keys replace.

    Attributes:
        precision: Autocast of the run: `config.precision`, else that of Accelerate's settings.
        fp8: Whether Accelerate is to train in fp8, which it does itself.
        cpu: Whether the CPU is asked for, also where there is another device.
        num_processes: Number of processes that its file says, `None` without one.
    """

    precision: AutocastPrecision | None = None
    fp8: bool = False
    cpu: bool = False
    num_processes: int | None = None


def read_settings(
    section: Mapping[str, object],
    environment: Mapping[str, str],
    *,
    precision: AutocastPrecision | None,
) -> AccelerateSettings:
    """Return what a section or file of Accelerate's and its environment ask for.

    Raises:
        ValueError: If a key is unknown to Accelerate, or a setting is one that the library decides; the key to set is named.
    """
    if section:
        accelerator = import_module("accelerate").Accelerator
        cluster = import_module("accelerate.commands.config.config_args").ClusterConfig
        known = {
            *inspect.signature(accelerator).parameters,
            *(field.name for field in fields(cluster)),
        }
        for name in section:
            if name not in known:
                raise ValueError(
                    "Expected arguments of Accelerator, or keys of a file that `accelerate config` writes. Received: "
                    f"accelerate.{name}.{did_you_mean(name, known)}"
                )
    asked = {f"accelerate.{name}": value for name, value in section.items()}
    asked |= {
        name: environment.get(name)
        for name in (f"ACCELERATE_{variable}" for variable in _VARIABLES)
    }
    for name, value in asked.items():
        kind = (
            str(value)
            if name == "accelerate.distributed_type"
            else name.partition("accelerate.")[2] or name
        )
        if _asks(value) and _fix(kind) is not None:
            raise _decided(f"{name}={value!r}", kind)
    modes = {
        "accelerate.mixed_precision": section.get("mixed_precision"),
        "ACCELERATE_MIXED_PRECISION": environment.get("ACCELERATE_MIXED_PRECISION"),
    }
    given = {name: str(value).lower() for name, value in modes.items() if _asks(value)}
    for name, asked_mode in given.items():
        if asked_mode not in ("fp16", "bf16", "fp8"):
            raise ValueError(
                f"Expected {name} to be 'no', 'fp16', 'bf16' or 'fp8'. Received: {asked_mode!r}."
            )
    if precision is not None:
        given = {"precision": precision, **given}
    if len(set(given.values())) > 1:
        received = " and ".join(f"{name}={mode!r}" for name, mode in given.items())
        raise ValueError(f"Expected one precision. Received: {received}. Leave one of them out.")
    mode = next(iter(given.values()), None)
    processes = section.get("num_processes")
    return AccelerateSettings(
        precision=None if mode == "fp8" else cast("AutocastPrecision | None", mode),
        fp8=mode == "fp8",
        cpu=any(
            map(
                _asks,
                (section.get("cpu"), section.get("use_cpu"), environment.get("ACCELERATE_USE_CPU")),
            )
        ),
        # -1 is what a file of Accelerate has where the launcher decides.
        num_processes=None if processes in (None, -1) else int(str(processes)),
    )


def check_launch(
    settings: AccelerateSettings, environment: Mapping[str, str], *, world_size: int
) -> None:
    """Refuse a start with another number of processes than was asked for; no process has joined a group yet.

    `accelerate launch --cpu --num_processes 2` starts one process without an error. Only the address of the others in its environment
    shows it.
    """
    asked = settings.num_processes
    if asked is not None and asked not in (0, world_size):
        raise ValueError(
            f"Expected as many processes as accelerate.num_processes={asked}. Received: WORLD_SIZE={world_size}. Start with "
            f"torchrun --nproc-per-node {asked}, or leave num_processes out."
        )
    if world_size > 1 or "RANK" in environment:
        return
    # What MPI sets for each of several processes.
    signs = [name for name in _MPI_SIZES if environment.get(name, "1") not in ("", "1")]
    if environment.keys() >= {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR", "MASTER_PORT"}:
        signs.append("MASTER_PORT")
    if signs:
        raise ValueError(
            f"Expected the processes that were asked for. Received: {signs[0]}={environment[signs[0]]}, and no RANK: a launcher that "
            "starts one process, or does not say which one of several this is, as `accelerate launch` does on the CPU. Start with torchrun "
            "--nproc-per-node N; for one process, unset MASTER_ADDR and MASTER_PORT."
        )


def _asks(value: object) -> bool:
    return (
        value
        if isinstance(value, bool)
        else value is not None and str(value).lower() not in _NEUTRAL
    )


def _fix(name: str) -> str | None:
    return next((fix for part, fix in _DECIDED.items() if part in name.lower()), None)


def _decided(received: str, name: str) -> ValueError:
    return ValueError(f"Expected the library to decide this. Received: {received}. {_fix(name)}")


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


def open_accelerator(
    settings: AccelerateSettings, launch: LaunchEnvironment, more: Mapping[str, Any]
) -> Any:
    """Return an accelerator with the rank and the device of this process. Call on all ranks, after the process group was joined."""
    global _users
    accelerate = import_accelerate()
    # Its rank and its precision are set by the first one of a process, and later ones take them over.
    if _users == 0 and import_module("accelerate.state").is_initialized():
        raise ValueError(
            "Expected the runner to make the Accelerator of this process, whose state all of them share. Received: one that was made "
            "before. Use runner.accelerator instead of it."
        )
    for name in {"cpu", "mixed_precision"} & more.keys():
        raise ValueError(
            f"Expected accelerate.{name} in the configuration. Received: {name}={more[name]!r} from accelerate_kwargs. Set it there."
        )
    handlers = [type(handler).__name__ for handler in more.get("kwargs_handlers") or ()]
    for name in (*handlers, *(name for name in more if name != "kwargs_handlers")):
        if _fix(name) is not None:
            raise _decided(f"{name} from accelerate_kwargs", name)
    # Also under a launcher one process is one process to Accelerate, which would make a group of it that nothing leaves.
    hidden = None if launch.world_size > 1 else os.environ.pop("LOCAL_RANK", None)
    try:
        accelerator = accelerate.Accelerator(
            cpu=settings.cpu or torch.accelerator.current_accelerator(check_available=True) is None,
            mixed_precision="fp8" if settings.fp8 else "no",
            gradient_accumulation_steps=1,
            step_scheduler_with_optimizer=False,
            **more,
        )
    finally:
        if hidden is not None:
            os.environ["LOCAL_RANK"] = hidden
    _users += 1
    try:
        check_place(accelerator, settings, launch)
    except BaseException:
        release_accelerator()
        raise
    return accelerator


def check_place(accelerator: Any, settings: AccelerateSettings, launch: LaunchEnvironment) -> None:
    """Refuse an accelerator with another rank than its process, or another precision than was asked for."""
    place = (accelerator.num_processes, accelerator.process_index)
    own = (launch.world_size, launch.rank)
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
        device = accelerator.device.type
        backends = str(dist.get_backend_config())
        if device not in [pair.partition(":")[0] for pair in backends.split(",")]:
            raise ValueError(
                f"Expected a process group with collectives for the device that Accelerate picked. Received: device={device!r}, "
                f"backend={backends!r}. Set backend='cpu:gloo,{device}:{dist.Backend.default_device_backend_map.get(device, 'NAME')}'."
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

    def __init__(self, options: Mapping[str, object], given: Any = None) -> None:
        # Accelerate names the device itself.
        self.options = {
            name: value
            for name, value in options.items()
            if name not in ("device_ids", "output_device")
        }
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
        self._optimizer = optimizer
        self._is_bound = True

    def wrap(
        self, model: nn.Module, options: Mapping[str, object], *, reduces_later: bool = False
    ) -> nn.Module:
        """Return the model as Accelerate prepares it, together with the optimizer; see `ModelPreparation.wrap`."""
        # DistributedDataParallel refuses a model in which nothing is trained.
        trains = any(parameter.requires_grad for parameter in model.parameters())
        if not self._is_bound or (self.world.size > 1 and not trains):
            return model
        asked = (
            self.wrapper_options(options, reduces_later=reduces_later)
            if self.world.size > 1
            else {}
        )
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


class AccelerateReduction(DDPReduction):
    """The gradient of a model that Accelerate has prepared; the window has weighed each loss, and Accelerate must not divide again."""

    def __init__(self, runner: AccelerateRunner, *, averages: Literal["criterion", "all"]) -> None:
        super().__init__(runner, averages=averages)
        self.accelerator: Any = runner.accelerator
        self.stepped = runner.preparation.stepped(self.optimizer)
        if not isinstance(self.model, DistributedDataParallel):
            self.domain = LocalDomain()
            self.mean_over = 1

    def begin(self) -> None:
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
        if last or self.mean_over == 1:
            return NO_CONTEXT
        self.check_accumulates()
        context: AbstractContextManager[object] = self.accelerator.no_sync(self.model)
        return context

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Back-propagate a loss that is scaled already."""
        self.accelerator.backward(loss)

    def apply(self) -> None:
        """Let Accelerate step the optimizer, which it would leave out between updates by its own count."""
        self.accelerator.sync_gradients = True
        super().apply()
        if getattr(self.stepped, "step_was_skipped", False):
            step = self.runner.state.train.global_step + 1
            raise NonFiniteError(
                f"Expected Accelerate to make update {step}, which was found finite. Received: its own gradient scaler left it out. "
                "Set precision='fp16', whose scaler is the library's."
            )
