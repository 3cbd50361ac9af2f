"""Attaches audits to a runner: digests of updates, replicas that agree, recorded gradients, replays, and the programs that audits start."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from danling.config.imposed import end_after
from danling.data import Batch, BatchSource
from danling.data.splits import DividedSettings
from danling.distributed import ReplicaDriftError
from danling.optim.state import to_parts
from danling.training.recompute import RunWindow
from danling.training.session import IntactStateError
from danling.training.update import UpdateStep
from danling.utils.observers import Observer
from danling.utils.tensors import canonical_name, default_dtype, dtype_of

from .digests import OF_EACH_RANK, OWN, DigestFile, DigestLine, DigestTable, Drift
from .hashing import Hasher, key_of
from .layout_check import CheckOptions, check_this_program
from .layout_record import LayoutRecorder, divided_batch
from .layout_report import LayoutReport
from .rerun import audit_runner

if TYPE_CHECKING:
    from danling.runners.base_runner import BaseRunner
    from danling.runners.torch_runner import TorchRunner
    from danling.training import UpdateOutcome
    from danling.training.recompute import Recompute

__all__ = ["Audits", "ReplayMismatchError", "ReplicaDriftError", "audit_runner", "check_layout", "divide_for_check"]


def divide_for_check(runner: BaseRunner) -> DividedSettings:
    """Prepare this process for a check of layouts, before a model is built, and return how it divides updates."""
    config, section = runner.config, runner.config.audit.gradients
    if section.dtype is not None:
        # What the forward creates has to be of this dtype as well.
        runner._closers.enter_context(default_dtype(dtype_of(section.dtype)))
    if config.seed is None:
        config.seed = 0
    return lambda settings, divides_itself: divided_batch(
        settings,
        accum_steps=int(config.accum_steps),
        samples=section.samples,
        replicas=int(section.replicas),
        alone=section.weights is None,
        divides_itself=divides_itself,
    )


def check_layout(runner: TorchRunner, layout: str, **options: Any) -> LayoutReport:
    """Check a layout; see `TorchRunner.check_layout`. In a program that records its updates, train and end."""
    if runner.config.audit.gradients.dir is not None:
        runner.train()
        raise SystemExit(0)  # with fewer updates than are wanted
    return check_this_program(layout, CheckOptions(**options), runner.world)


class Audits:
    """Makes what `config.audit` asks for, and puts it into what makes updates."""

    def __init__(self, runner: TorchRunner) -> None:
        check_replay(runner)
        self.runner = runner

    @cached_property
    def updates(self) -> UpdateAudit | None:
        """What digests updates and compares replicas; `None` unless that is configured."""
        every = self.runner.config.audit.digest_interval
        return None if every is None else UpdateAudit(self.runner, every)

    @cached_property
    def recorder(self) -> LayoutRecorder | None:
        """What records the first updates; `None` unless a check of layouts has asked for them."""
        return None if self.runner.config.audit.gradients.dir is None else LayoutRecorder(self.runner)

    def observe(self) -> None:
        """Add what observes the run. Called once, before it trains."""
        runner, target = self.runner, self.runner.config.audit.until
        until = None if target is None else Until(runner, target)
        runner.observers.extend(each for each in (self.recorder, self.updates, until) if each is not None)

    def see_updates(self, update: UpdateStep) -> None:
        """Let the recorder see samples, and digests travel with the collective of each update."""
        update.recorder = self.recorder
        if self.updates is not None:
            update.sync.riders.append(self.updates)

    def around(self, run_window: RunWindow) -> RunWindow:
        """Return what runs the micro-batches of an update, and runs them again where that is asked for."""
        if self.runner.config.audit.replay_interval is None:
            return run_window
        return UpdateReplay(self.runner, run_window, self.runner._parts.recompute).run


# Replays


class ReplayMismatchError(IntactStateError):
    """An update that was made again did not come out bitwise the same: a chip, a link, or a program that is not repeatable.

    The update is taken back before it is raised, to the bit.
    """


class UpdateReplay:
    """Runs the micro-batches of every so many updates again and compares what they came to.

    Random numbers follow from the place of a micro-batch, so that a computation that is repeated has the same bits: losses, weights of
    the batches, buffers, and the gradient of the window as this rank has it. The first update of a process, or of a model that was wrapped
    anew, is not checked, since code is compiled in it; the next one is.
    """

    def __init__(self, runner: TorchRunner, inner: RunWindow, recompute: Recompute) -> None:
        self._runner = runner
        self._inner = inner
        self._recompute = recompute
        self._hasher = Hasher(runner.device)
        self._known_model: object = None
        self._is_owed = False

    def run(self, source: BatchSource, batches: Iterator[Batch], consumed: list[Batch]) -> bool:
        """Run forward and backward of one update, and again where it is checked. Called on all ranks."""
        runner, settings = self._runner, self._runner.config.audit
        is_new = runner.model is not self._known_model or runner.window.is_first
        self._known_model = runner.model
        is_due = self._is_owed or (runner.state.train.global_step + 1) % int(settings.replay_interval or 1) == 0
        self._is_owed = is_due and is_new
        if not is_due or is_new:
            return self._inner(source, batches, consumed)
        take_back = self._recompute.remember()
        if not self._inner(source, batches, consumed):
            return False
        attempts = [self._digests()]
        for _ in range(settings.replays):
            attempts.append(self._again(take_back, source, consumed))
            if self._differ(attempts[0], attempts[-1]):
                attempts.append(self._again(take_back, source, consumed))
                take_back()
                raise self._error(attempts[0], attempts[-2], attempts[-1])
        return True

    def _again(self, take_back: object, source: BatchSource, consumed: list[Batch]) -> dict[str, int]:
        assert callable(take_back)
        take_back()
        self._inner(source, iter(consumed), [])
        return self._digests()

    def _digests(self) -> dict[str, int]:
        """Return the digest of everything that forwards and backwards have left on this rank. The device is waited for once."""
        runner, window = self._runner, self._runner.window
        named = {
            f"{kind} of micro-batches": torch.as_tensor(value, dtype=torch.float64)
            for kind, value in (("the losses", window.loss), ("the weights", window.weight))
        }
        named |= {f"buffer {name!r}": buffer for name, buffer in runner.unwrapped_model.named_buffers()}
        named |= {f"the gradient of {name!r}": gradient for name, gradient in runner.reduction.named_gradients()}
        digests = [self._hasher.digest_held(tensor).to(runner.device) for tensor in named.values()]
        return dict(zip(named, torch.stack(digests).tolist()))

    def _differ(self, first: dict[str, int], second: dict[str, int]) -> bool:
        """Whether any rank computed other bits. A small collective on several ranks."""
        domain = self._runner.placement.optimizer
        differs = torch.tensor(float(first != second), dtype=torch.float64)
        return bool(domain.all_reduce(differs, "max").item() if domain.size > 1 else differs.item())

    def _error(self, first: dict[str, int], second: dict[str, int], third: dict[str, int]) -> ReplayMismatchError:
        """Return the error that names the ranks and the first tensor. Called on all ranks."""
        device = self._runner.device
        names = [name for name in first if second.get(name) != first[name]]
        told = self._runner.placement.optimizer.gather_objects((names, third in (first, second), socket.gethostname()))
        # A gradient that is reduced over ranks differs on all of them; a loss only where the fault is.
        own = [rank for rank, (found, *_) in enumerate(told) if any("gradient" not in name for name in found)]
        ranks = own or [rank for rank, (found, *_) in enumerate(told) if found]
        where = "; ".join(
            f"rank {rank} on {device.type} of {told[rank][2]}: {' and '.join(told[rank][0][:3])}" for rank in ranks[:8]
        )
        reduced = ""
        if not own and len(ranks) > 1:
            reduced = " The gradient is reduced over these ranks: one of them is at fault."
        mend = (
            "A third computation gave other bits again: a step depends on something that is not put back, such as a variable "
            "of a module or the time, or a kernel is not deterministic."
        )
        if all(repeats for _, repeats, _ in told):
            mend = (
                "A third computation agrees with one of the two. Suspect the memory or the chip of that machine: take it out and continue "
                "with auto_resume from the state before this update, which is saved."
            )
        return ReplayMismatchError(
            f"Expected forward and backward of update {self._runner.state.train.global_step + 1} to give the same bits when they are "
            f"computed again. Received: {where}.{reduced} {mend}"
        )


def check_replay(runner: TorchRunner) -> None:
    """Refuse `audit.replay_interval` where a difference would say nothing of the machine, or gradients cannot be taken back."""
    if runner.config.audit.replay_interval is None:
        return
    if not torch.are_deterministic_algorithms_enabled() or torch.is_deterministic_algorithms_warn_only_enabled():
        raise ValueError(
            "Expected deterministic=true with audit.replay_interval: other kernels may give other bits each time, which would look like "
            "a fault. Received: deterministic=False. Set it."
        )
    refused = {"ft.enabled=True": runner.config.ft.enabled, "stack='deepspeed'": runner.stack == "deepspeed"}
    for received in (name for name, is_set in refused.items() if is_set):
        raise ValueError(
            "Expected gradients that are reduced within one group of ranks and can be dropped and computed again, with "
            f"audit.replay_interval. Received: {received}. Leave one of them out."
        )


# Digests and replicas


@dataclass(frozen=True)
class Entry:
    """A tensor of a run as this rank has it: the column of its digest, its name, and whether other ranks may have copies of it."""

    column: str
    name: str
    tensor: Tensor
    is_shared: bool = True


def entries(runner: TorchRunner) -> Iterator[Entry]:
    """Yield the tensors of a run as this rank has them; their order may be another one on each rank."""
    named = list(runner.named_parameters())
    names: dict[int, str] = {}
    for name, parameter in named:
        names.setdefault(id(parameter), name)
    grouped: set[int] = set()
    optimizer: Any = runner.optimizer
    state = getattr(optimizer, "state", {})
    members = getattr(optimizer, "optimizers", ())
    for index, group in enumerate(getattr(optimizer, "param_groups", ())):
        for number, parameter in enumerate(group["params"]):
            shared = id(parameter) in names
            grouped.add(id(parameter))
            name = names.get(id(parameter), f"group.{index}.{number}")
            yield Entry(f"weights.{index}", name, parameter, shared)
            found = next((m.state[parameter] for m in members if parameter in m.state), None)
            for key, value in sorted((found or state.get(parameter, {})).items(), key=lambda item: str(item[0])):
                for part, tensor in tensors_of(value, f"{name}/{key}"):
                    yield Entry(f"optimizer.{index}", part, tensor, shared)
    for name, parameter in named:
        if id(parameter) not in grouped:
            grouped.add(id(parameter))
            yield Entry("weights.rest", name, parameter)
    buffers = [(canonical_name(name), buffer) for name, buffer in runner.unwrapped_model.named_buffers()]
    if isinstance(runner.criterion, nn.Module):
        buffers += [(f"criterion.{name}", buffer) for name, buffer in runner.criterion.named_buffers()]
    for name, tensor in buffers:
        yield Entry("buffers", name, tensor)
    of_buffers = {name for name, _ in buffers}
    for name, tensor in runner.ema.weights.items() if runner.ema is not None else ():
        yield Entry("ema.buffers" if name in of_buffers else "ema", name, tensor)


def tensors_of(value: object, name: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that an entry of an optimizer's state is or is made of, under names that begin with `name`."""
    value = to_parts(value)
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, part in value.items():
            yield from tensors_of(part, f"{name}.{key}")
    elif isinstance(value, (list, tuple)):
        for number, part in enumerate(value):
            yield from tensors_of(part, f"{name}.{number}")


@dataclass
class _Taken:
    """Digests of an update that the ranks have not compared yet."""

    step: int
    cells: Tensor
    tensors: list[tuple[str, str, str]]
    places: Tensor
    digests: Tensor
    figures: Tensor
    has_norm: bool


class UpdateAudit(Observer):
    """Digests the state after every so many updates, on the device, without waiting for it.

    What was computed travels with the collective that the next update makes anyway, and is read one update later still on an accelerator;
    before anything is evaluated or saved it is compared at once, in its own collective.
    """

    critical = True

    def __init__(self, runner: TorchRunner, every: int) -> None:
        self.every = every
        self._runner = runner
        self._domain = runner.placement.optimizer
        self._device = runner.device
        self._file: DigestFile | None = None
        self.began_at = 0
        self._hasher = Hasher(self._device)
        self._samples: Tensor | None = None
        self._table: DigestTable | None = None
        self._groups: set[str] = set()
        self._waiting: _Taken | None = None
        self._sent: _Taken | None = None
        self._landed: tuple[_Taken, Tensor, torch.cuda.Event | None] | None = None

    def _step(self) -> int:
        return self._runner.state.train.global_step

    def _write(self, line: DigestLine) -> None:
        if self._file is None:
            self._file = DigestFile(self._runner.workspace.digests_file, resume_step=self.began_at)
            self._runner._closers.callback(self._file.close)
        self._file.write(line)

    # Within an update

    def training_started(self) -> None:
        """Note where the run begins. No communication."""
        if self._table is None:
            self.began_at = self._step()

    def update_started(self) -> None:
        """Forget the samples of the update before."""
        self._samples = None

    def micro_batch_started(self, data: object, *, read: object, samples: float) -> None:
        """Take in the samples of a micro-batch, where its update is digested. No communication."""
        if self._runner.placement.counts_samples and (self._step() + 1) % self.every == 0:
            found = self._hasher.digest_samples(data)
            self._samples = found if self._samples is None else self._samples + found

    def update_ended(self, outcome: UpdateOutcome) -> None:
        """Digest the state after an update, where that is due. Called on all ranks."""
        self._read_landed()
        if not outcome.committed or self._step() % self.every:
            return
        self.results_needed()
        self._waiting = self._take(outcome)
        if self._domain.size == 1:
            self._sent, self._waiting = self._waiting, None
            self.take(self._packed(self._sent))

    def _take(self, outcome: UpdateOutcome) -> _Taken:
        found = list(entries(self._runner))
        digests = self._together([self._hasher.digest(entry.tensor) for entry in found])
        table = self._agreed_table(found)
        tensors = []
        for entry in found:
            kind = self._runner.preparation.held_part(entry.tensor)[0] if entry.is_shared else OWN
            tensors.append((kind if kind in table.kinds else OWN, entry.column, entry.name))
        places = self._on_device([table.place(kind, column) for kind, column, _ in tensors])
        keys = [key_of(entry.name, str(entry.tensor.dtype), tuple(entry.tensor.shape)) for entry in found]
        cells = torch.zeros(table.width, dtype=torch.int64, device=self._device)
        if found:
            cells.index_add_(0, places, digests * self._on_device(keys))
        if self._samples is not None:
            cells[-1] = self._samples
        norm = outcome.grad_norm
        pair = [outcome.loss, 0.0 if norm is None else norm]
        figures = torch.stack([torch.as_tensor(x, dtype=torch.float64, device=self._device).detach() for x in pair])
        return _Taken(self._step(), cells, tensors, places, digests, figures, norm is not None)

    def _together(self, values: Sequence[Tensor]) -> Tensor:
        """Return single digests as one tensor on the device; those of tensors in host memory, such as counts of steps, go there at once."""
        stacked = torch.zeros(len(values), dtype=torch.int64, device=self._device)
        for device in {value.device for value in values}:
            here = [index for index, value in enumerate(values) if value.device == device]
            found = torch.stack([values[index] for index in here]).to(self._device, non_blocking=True)
            stacked = stacked.index_copy(0, self._on_device(here), found)
        return stacked

    def _on_device(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(self._device, non_blocking=True)

    def _agreed_table(self, found: Sequence[Entry]) -> DigestTable:
        """Return the table; it is made at the first digest, and where parameter groups were added. A collective then."""
        groups = {entry.column for entry in found if entry.column.startswith("weights.")}
        if self._table is not None and groups <= self._groups:
            return self._table
        held = dict(self._runner.preparation.held_part(entry.tensor) for entry in found if entry.is_shared)
        told = self._domain.gather_objects((groups, {OWN: (self._domain.rank,), **held}))
        self._groups = set().union(*(groups for groups, _ in told))
        numbered = sorted(self._groups, key=lambda name: (len(name), name))
        states = [name.replace("weights.", "optimizer.", 1) for name in numbered if name != "weights.rest"]
        self._table = DigestTable([*numbered, *states, "ema", *OF_EACH_RANK], [kinds for _, kinds in told])
        return self._table

    # What travels with the collective of an update

    def values(self) -> Tensor | None:
        """Return the vector to sum over the ranks with the collective of this update, float64; `None` where nothing waits."""
        self._sent, self._waiting = self._waiting, None
        return None if self._sent is None else self._packed(self._sent)

    def _packed(self, taken: _Taken) -> Tensor:
        assert self._table is not None
        return self._table.packed(taken.cells, self._domain.rank)

    def take(self, sums: Tensor) -> None:
        """Take the sum over the ranks of what `values` returned. Called on all ranks."""
        taken, self._sent = self._sent, None
        assert taken is not None
        together = torch.cat([sums.to(self._device), taken.figures])
        if self._device.type == "cpu":
            self._conclude(taken, together)
            return
        host = torch.empty(together.shape, dtype=torch.float64, pin_memory=self._device.type == "cuda")
        host.copy_(together, non_blocking=True)
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        self._landed = taken, host, event

    def _read_landed(self) -> None:
        landed, self._landed = self._landed, None
        if landed is not None:
            if landed[2] is not None:
                landed[2].synchronize()
            self._conclude(landed[0], landed[1])

    def results_needed(self) -> None:
        """Compare what has not been compared yet. Called on all ranks, before anything is evaluated or saved."""
        self._read_landed()
        values = self.values()
        if values is not None:
            self.take(self._domain.all_reduce(values))
            self._read_landed()

    # What was found

    def _conclude(self, taken: _Taken, together: Tensor) -> None:
        assert self._table is not None
        values = together.tolist()
        rows = self._table.unpacked(values[:-2])
        drifted = self._table.drifted(rows)
        if drifted:
            raise self._error(taken, drifted)
        if self._domain.rank == 0:
            loss, norm = values[-2:]
            totals = self._table.totals(rows)
            # A column without tensors has no digest.
            shown = {name: value for name, value in totals.items() if value or name == "samples"}
            self._write(DigestLine(taken.step, loss, norm if taken.has_norm else None, shown))

    def _error(self, taken: _Taken, drifted: Sequence[Drift]) -> ReplicaDriftError:
        """Return the error that names the ranks and the first tensor. Called on all ranks: they exchange the digests of single tensors."""
        assert self._table is not None
        first = drifted[0]
        place = self._table.place(first.kind, first.column)
        found = zip(taken.tensors, taken.places.tolist(), taken.digests.tolist())
        mine = {name: digest for (_, _, name), at, digest in found if at == place}
        told = self._domain.gather_objects(mine)
        reference, rank = told[first.others[0]], first.ranks[0]
        known = {**reference, **told[rank]}
        names = [name for name in known if told[rank].get(name) != reference.get(name)] or ["its kind"]
        ranks, others = (
            f"rank {found[0]}" if len(found) == 1 else f"ranks {list(found)}" for found in (first.ranks, first.others)
        )
        unsure = " Two copies do not tell which one is wrong." if len(first.others) == len(first.ranks) == 1 else ""
        return ReplicaDriftError(
            f"Expected ranks that hold copies of a tensor to hold the same after update {taken.step}. Received: {ranks} differs from "
            f"{others} in {names[0]!r} and {len(names) - 1} more of {len(known)} in {first.column!r}.{unsure} No checkpoint of this "
            "state was published. Check the machine of that rank, and code that writes to weights on one rank alone; go on with "
            "auto_resume."
        )


class Until(Observer):
    """Has a run save at the position of `audit.until`, and end there: updates and completed epochs of the checkpoint to compare with."""

    critical = True

    def __init__(self, runner: TorchRunner, target: Sequence[int]) -> None:
        self.target = tuple(target)
        self._runner = runner
        runner.saver.saved.append(self._saved)

    def update_ended(self, outcome: UpdateOutcome) -> None:
        """Have the run save after the last update, and end where it has come beyond it. Called on all ranks."""
        step, session = self._runner.saver.at[0], self._runner._session
        if step == self.target[0]:
            # At once, and not as a request, of which an accelerator hears an update later.
            session.save_requested = True
        elif step > self.target[0]:
            session.stop_reason = "stop"

    def _saved(self) -> None:
        # The same update may be saved before and after the end of its epoch.
        if self._runner.saver.at == self.target:
            self._runner._session.stop_reason = "stop"
            end_after()
