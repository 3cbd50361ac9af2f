"""What a torch runner hands to the replay of updates: all that an update may write to, and how to put it back."""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from danling.audit.held import HeldState, remember_optimizer, remember_scaler
from danling.audit.reached import PutBack, Reached, reach, remember, watch
from danling.audit.replay import Gradients, ReplayedRun, UpdateReplay
from danling.audit.update_audit import entries
from danling.data.generators import Generators, generator_state, held_objects, set_generator_state
from danling.training.keys import remember_streams
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
    reach = RunReach(runner)
    held = _Held(runner, reach)
    settings = runner.config.audit
    return UpdateReplay(
        every=int(settings.replay_interval or 1),
        replays=settings.replays,
        heal=settings.heal,
        run=ReplayedRun(
            step=lambda: runner.state.train.global_step,
            model=lambda: runner.model,
            has_updated=lambda: not runner.window.is_first,
            remember=parts.recompute.remember,
            sums=lambda totals: _summed_again(runner, parts, totals),
            forget_decision=lambda: parts.update.decision.forget(),
            compilations=_compilations,
            own_step=runner._overrides("step"),
            watch=lambda: watch(reach.with_attributes()),
            writes_at_end=lambda: runner._overrides("zero_gradients") or _is_of_users(runner.scheduler),
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
        streams=lambda: _remember_streams(runner, reach),
        domain=runner.placement.optimizer,
        device=runner.device,
    )


def _is_of_users(scheduler: object) -> bool:
    package = type(scheduler).__module__.partition(".")[0]
    return scheduler is not None and (package not in ("torch", "danling") or isinstance(scheduler, LambdaLR))


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


def _remember_streams(runner: TorchRunner, reach: RunReach) -> PutBack:
    """Remember the random streams of this process, and the generators that the runner reaches."""
    put_back, own = remember_streams(runner.device), [(each, generator_state(each)) for _, each in reach.generators()]

    def restore() -> None:
        put_back()
        for generator, state in own:
            set_generator_state(generator, state)

    return restore


class RunReach:
    """What a runner reaches that a step may write to: with the bare model in the place of its wrapper, and without the data.

    Args:
        runner: The runner.
    """

    def __init__(self, runner: TorchRunner) -> None:
        self._runner = runner
        self._step = -1
        self._apart: list[object] = []
        self._generators: list[tuple[str, Any]] = []

    def look(self) -> Reached:
        """Return what there is now."""
        self._refresh()
        runner = self._runner
        roots = [("model", runner.unwrapped_model), *_named(vars(runner), leave_out=(*_DATA, "model", "results"))]
        reduced = {id(parameter) for parameter in (*runner.reduction.parameters, *runner.unwrapped_model.parameters())}
        return reach(roots, apart=self._apart, own_gradient=lambda leaf: id(leaf) not in reduced)

    def with_attributes(self) -> Reached:
        """Return what there is now, and the runner, of which the attributes are."""
        reached = self.look()
        reached.holders.append(("", self._runner))
        return reached

    def generators(self) -> list[tuple[str, Any]]:
        """Return the generators that there were when the update began."""
        self._refresh()
        return self._generators

    def _refresh(self) -> None:
        """Look at the data, and for generators, once an update: that takes longer than all the rest."""
        step = self._runner.state.train.global_step
        if step == self._step:
            return
        self._step = step
        data = {name: vars(self._runner)[name] for name in _DATA}
        held = held_objects(data) or _shallow(data)
        self._apart = [self._runner, *(value for value in held if not isinstance(value, (nn.Module, Optimizer)))]
        self._generators = self.look().generators
        if self._generators:
            # What reads the data has generators that go on when a batch is read, which is done once.
            read = {id(place.current()) for place in Generators(data).places}
            self._generators = [(name, value) for name, value in self._generators if id(value) not in read]


def _named(attributes: Mapping[str, Any], *, leave_out: Collection[str]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in list(attributes.items()) if name not in leave_out]


def _shallow(data: Mapping[str, Any]) -> list[object]:
    """Return data sets, loaders and what these hold directly, where they hold more than can be looked at."""
    found: list[object] = []
    for splits in data.values():
        found += [splits, *splits.values()]
        found += [held for split in splits.values() for held in getattr(split, "__dict__", {}).values()]
    return found


class _Held:
    """The tensors of a run, and what puts the rest of it back.

    Args:
        runner: The runner.
        reach: Finds what is its user's.
    """

    def __init__(self, runner: TorchRunner, reach: RunReach) -> None:
        self._runner = runner
        self._reach = reach

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
        reached = self._reach.look()
        yield from reached.tensors
        for name, optimizer in reached.optimizers:
            found = entries(named_parameters=(), optimizer=optimizer, averages={}, buffers=())
            yield from ((f"{entry.column}/{name}.{entry.name}", entry.tensor) for entry in found)
            yield from _settings_of(name, optimizer)
        scaler = runner.precision.scaler
        for name in ("_scale", "_growth_tracker") if scaler is not None else ():
            value = getattr(scaler, name)
            if isinstance(value, Tensor):
                yield f"scaler/{name}", value

    def remember(self) -> PutBack:
        """Remember what is no tensor, and return what puts it back."""
        runner = self._runner
        reached = self._reach.with_attributes()
        kept = [remember(reached)]
        kept += [remember_optimizer(optimizer) for optimizer in _optimizers_of(runner, reached)]
        if runner.precision.scaler is not None:
            kept.append(remember_scaler(runner.precision.scaler))

        def put_back() -> None:
            for each in kept:
                each()

        return put_back


def _settings_of(name: str, optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    """Yield settings of an optimizer that are tensors, such as a rate on the device."""
    for number, group in enumerate(optimizer.param_groups):
        for key, value in group.items():
            if isinstance(value, Tensor):
                yield f"settings/{name}.{number}.{key}", value


def _optimizers_of(runner: TorchRunner, reached: Reached) -> Iterator[Any]:
    seen: set[int] = set()
    for optimizer in (runner.optimizer, *(value for _, value in reached.optimizers)):
        for each in (optimizer, *getattr(optimizer, "optimizers", ())):
            if id(each) not in seen:
                seen.add(id(each))
                yield each
