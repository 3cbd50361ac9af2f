"""What a torch runner hands to the replay of updates: all that an update may write to, and how to put it back."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer

from danling.audit.held import HeldState, PutBack, remember_attributes, remember_optimizer, remember_scaler
from danling.audit.inventory import entries
from danling.audit.replay import Gradients, ReplayedRun, UpdateReplay
from danling.data import capture_random_state, restore_random_state
from danling.data.generators import Generators, generator_state, is_generator, set_generator_state
from danling.training.rollback import remember_forwards
from danling.utils.names import canonical_name

if TYPE_CHECKING:
    from .assembly import TorchParts
    from .torch_runner import TorchRunner

_DATA = ("datasets", "dataloaders")


def check_replay(runner: TorchRunner) -> None:
    """Refuse to make updates again where that says nothing of the machine, or cannot be.

    Raises:
        ValueError: If kernels need not be deterministic, or other replica groups or an engine hold what is to be put back.
    """
    if runner.config.audit.replay_interval is None:
        return
    if not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled():
        raise ValueError(
            "Expected deterministic=true with audit.replay_interval: other kernels may come to other bits each time, which would look like "
            "a fault. Received: deterministic=False. Set it; `danling doctor --determinism` says what of this machine is repeatable."
        )
    if runner.config.ft.enabled:
        raise ValueError(
            "Expected one group of ranks with audit.replay_interval: an update that is made again on one of several replica groups would "
            "leave the others waiting. Received: ft.enabled=True. Leave one of them out."
        )


def build_replay(runner: TorchRunner, parts: TorchParts) -> UpdateReplay:
    """Return what makes updates of a runner again."""
    held = _Held(runner)
    settings = runner.config.audit
    return UpdateReplay(
        every=int(settings.replay_interval or 1),
        replays=settings.replays,
        heal=settings.heal,
        run=ReplayedRun(
            step=lambda: runner.state.train.global_step,
            model=lambda: runner.model,
            has_updated=lambda: not runner.window.is_first,
            remember=lambda: _remember(runner),
            sums=lambda totals: _summed_again(runner, parts, totals),
            forget_decision=lambda: parts.update.decision.forget(),
            compilations=_compilations,
            own_step=runner._overrides("step"),
            draws_between=lambda: any(
                not type(tracker).__module__.startswith("danling.") for tracker in runner._reporter.trackers.opened
            ),
        ),
        held=HeldState(held.tensors, [held.remember], runner.device),
        gradients=Gradients(
            held=lambda: runner.reduction.named_gradients(),
            remember=lambda: runner.reduction.remember(),
            unreduced=lambda: runner.reduction.seen_before_reduction(),
            is_reduced=lambda: runner.reduction.is_reduced_by_backward,
            summed=lambda: _ranks_of(runner),
        ),
        window=runner.window,
        streams=RunStreams(runner),
        domain=runner.placement.optimizer,
        device=runner.device,
    )


def _remember(runner: TorchRunner) -> PutBack:
    telemetry, flops = runner._reporter.telemetry, runner._reporter.flops
    tokens, counts_next = telemetry.tokens if telemetry is not None else 0.0, flops.counts_next
    put_back = remember_forwards(runner.device, counter=runner.state.train, meters=runner.meters, buffers=dict)

    def take_back() -> None:
        runner.window.reset()
        put_back()
        flops.counts_next = counts_next
        if telemetry is not None:
            telemetry.tokens = tokens

    return take_back


def _summed_again(runner: TorchRunner, parts: TorchParts, totals: Any) -> Any:
    window = runner.window
    again = parts.update.sync.reduce(
        weight=window.weight, loss=window.loss, samples=window.samples, nonfinite=window.nonfinite
    )
    return replace(again, requests=totals.requests | again.requests)


def _compilations() -> int:
    dynamo = sys.modules.get("torch._dynamo.utils")
    return int(dynamo.counters["frames"]["total"]) if dynamo is not None else 0


def _ranks_of(runner: TorchRunner) -> str:
    group = runner.data_domain.group
    size = runner.data_domain.size
    ranks = dist.get_process_group_ranks(group or dist.group.WORLD) if size > 1 else [runner.rank]
    return f"ranks {ranks}"


class RunStreams:
    """The random streams of this process, and generators that the runner or a module of it holds.

    Args:
        runner: The runner.
    """

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner

    def capture(self) -> dict[str, Any]:
        """Return their state."""
        own = {name: generator_state(generator) for name, generator in self._own()}
        return {**capture_random_state(self._runner.device), **({"own": own} if own else {})}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Put them into a state."""
        restore_random_state(state, self._runner.device)
        own = state.get("own", {})
        for name, generator in self._own():
            if name in own:
                set_generator_state(generator, own[name])

    def _own(self) -> Iterator[tuple[str, Any]]:
        holders = (("", vars(self._runner)), *((name, vars(m)) for name, m in modules_of(self._runner)))
        found = {f"{at}.{name}": value for at, held in holders for name, value in held.items() if is_generator(value)}
        if found:
            # What reads the data has generators that go on when a batch is read, which is done once.
            readers = Generators({name: vars(self._runner)[name] for name in _DATA})
            read = {id(place.current()) for place in readers.places}
            yield from ((name, value) for name, value in found.items() if id(value) not in read)


def modules_of(runner: TorchRunner) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that a runner holds, each once: those of the bare model, and of all that a user has assigned."""
    seen: set[int] = set()
    for name, value in _held_by(runner):
        if isinstance(value, nn.Module):
            for inner, module in value.named_modules():
                if id(module) not in seen:
                    seen.add(id(module))
                    yield f"{name}.{inner}", module


def _held_by(runner: TorchRunner) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a runner, and what stands in its lists and mappings, with the bare model in the place of its wrapper."""
    yield "model", runner.unwrapped_model
    for name, value in vars(runner).items():
        if name in (*_DATA, "model"):
            continue
        if isinstance(value, Mapping):
            yield from ((f"{name}.{key}", item) for key, item in list(value.items()))
        elif isinstance(value, (list, tuple)):
            yield from ((f"{name}.{number}", item) for number, item in enumerate(value))
        else:
            yield name, value


class _Held:
    """The tensors of a run, and what puts the rest of it back.

    Args:
        runner: The runner.
    """

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor that an update may write to, each once, by name."""
        seen: set[int] = set()
        for name, tensor in self._all():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield name, tensor

    def _all(self) -> Iterator[tuple[str, Tensor]]:
        runner = self._runner
        found = entries(
            named_parameters=runner.named_parameters(),
            optimizer=runner.optimizer,
            averages=runner.ema.weights if runner.ema is not None else {},
            buffers=((canonical_name(name), buffer) for name, buffer in runner.unwrapped_model.named_buffers()),
        )
        yield from ((f"{entry.column}/{entry.name}", entry.tensor) for entry in found)
        for name, value in _held_by(runner):
            yield from _tensors_in(name, value)
        scaler = runner.precision.scaler
        for name in ("_scale", "_growth_tracker") if scaler is not None else ():
            value = getattr(scaler, name)
            if isinstance(value, Tensor):
                yield f"scaler/{name}", value

    def remember(self) -> PutBack:
        """Remember what is no tensor, and return what puts it back."""
        runner = self._runner
        kept = [remember_optimizer(optimizer) for optimizer in _optimizers_of(runner)]
        kept.append(remember_attributes(runner, *(module for _, module in modules_of(runner))))
        if runner.precision.scaler is not None:
            kept.append(remember_scaler(runner.precision.scaler))

        def put_back() -> None:
            for each in kept:
                each()

        return put_back


def _tensors_in(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield f"attribute/{name}", value
    elif isinstance(value, nn.Module):
        yield from ((f"weights/{name}.{inner}", parameter) for inner, parameter in value.named_parameters())
        yield from ((f"buffers/{name}.{inner}", buffer) for inner, buffer in value.named_buffers())
    elif isinstance(value, Optimizer):
        found: Iterable[Any] = entries(named_parameters=(), optimizer=value, averages={}, buffers=())
        yield from ((f"{entry.column}/{name}.{entry.name}", entry.tensor) for entry in found)


def _optimizers_of(runner: TorchRunner) -> Iterator[Any]:
    seen: set[int] = set()
    for value in (runner.optimizer, *(value for _, value in _held_by(runner) if isinstance(value, Optimizer))):
        for optimizer in (value, *getattr(value, "optimizers", ())):
            if id(optimizer) not in seen:
                seen.add(id(optimizer))
                yield optimizer
