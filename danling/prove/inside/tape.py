"""Records the updates of a script: samples, loss, gradients before clipping and weights. One file for each rank and update.

The work to do is in the variable DANLING_PROVE, see `Job`. Each rank ends its records with a file `rank-N.end` and then waits: the
driver kills all processes of the script once all ranks are there.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from . import stacks
from .samples import CannotCompare, Loaders, digest, leaves, local_of

VARIABLE = "DANLING_PROVE"
_SETTINGS = ("lr", "weight_decay", "momentum", "dampening", "betas", "eps")
"""Numbers of a parameter group that one process takes from the layout: schedules may count the processes."""
_PARTS = 64
"""Backward passes of an update after which gradients are kept."""


@dataclass(frozen=True)
class Job:
    """What to record.

    Attributes:
        directory: Where the records go.
        updates: Updates to record.
        mode: `check` switches dropout off and keeps the tensors; `resume` changes nothing and keeps digests.
        source: Directory of the layout whose batches and weights are replayed in this process; `None` on the layout itself.
        how: `joined`: the ranks' batches are one; `reversed`: in the other order; `micro`: they come one after the other.
        ranks: The ranks whose batches are replayed.
        parts: Whether the gradients are kept after each backward pass too.
        keeps_dropout: Whether dropout stays as it is.
        token: By which the processes of a start are known, see `danling.prove.guard`.
    """

    directory: str
    updates: int = 2
    mode: str = "check"
    source: str | None = None
    how: str = "joined"
    ranks: Sequence[int] = ()
    parts: bool = False
    keeps_dropout: bool = False
    token: str = ""

    @property
    def checks(self) -> bool:
        """Whether layouts are compared."""
        return self.mode == "check"

    @property
    def replays(self) -> bool:
        """Whether batches of a layout are replayed."""
        return self.source is not None


class Tape:
    """Records the batches, backward passes and steps of a script, and replays batches. It is no tape of autograd."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.directory = Path(job.directory)
        self.inside = 0
        """Depth of calls of a stack, whose own steps and batches are not counted."""
        self.running: object | None = None
        """The optimizer whose step runs."""
        self.loaders = Loaders(None if job.source is None else Path(job.source), job.ranks, job.how)
        self.steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.made = 0
        self._trained: weakref.WeakKeyDictionary[Any, stacks.Trained] = weakref.WeakKeyDictionary()
        self._depth = 0
        self._known: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.switched: set[str] = set()
        """Classes of batch normalization that use their running statistics."""
        self._roots: dict[str, dict[str, stacks.Piece]] = {}
        self._streams: list[object] = []
        self._settings: list[str] = []
        self._pending = 0
        self._pieces: dict[int, list[dict[str, Any]]] = {}
        self._start_update()

    def _start_update(self) -> None:
        self._losses: list[float] = []
        self._divisors: list[list[float]] = []
        self._inputs: list[int] = []
        self._amount = 0.0
        self._models: list[str] = []
        self._draws = False
        self._batch_norm: list[str] = []
        self._norms: list[float] = []
        self._dropped = 0
        self._parts: list[dict[str, stacks.Piece]] = []
        self._eps = 0.0
        self._before_clipping: dict[str, stacks.Piece] = {}
        self._gradients: dict[str, stacks.Piece] = {}
        self._held: dict[str, stacks.Piece] = {}
        self._groups: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Leave out the batches, steps and clipping that a stack makes in this block."""
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1

    # Samples

    def fetch(self, iterator: Any, original: Callable[[], Any]) -> Any:
        """Return the next batch of an iterator, recorded or replayed."""
        # What a worker reads is recorded once it comes to the process that trains.
        if self.inside or not self.job.checks or torch.utils.data.get_worker_info() is not None:
            return original()
        try:
            batch = self.loaders.fetch(iterator, original)
        except CannotCompare as error:
            self.fail(str(error))
        self._streams = _streams()
        return batch

    # Forward and backward

    def enters(self, module: nn.Module, inputs: Any) -> None:
        """Note what an outermost module is called with."""
        if self._depth or not is_forward() or not stacks.has_parameters(module):
            return
        if self.job.checks:
            if module not in self._known:
                self._meet(module)
            self._separate_samples(module)
        if torch.is_grad_enabled():
            self._note_inputs(module, inputs)

    def _separate_samples(self, root: nn.Module) -> None:
        """Have the output of a sample not depend on the others: batch normalization uses its running statistics."""
        for module in root.modules():
            kind = type(module)
            if issubclass(kind, nn.RNNBase) and not self.job.keeps_dropout:
                module.dropout = 0.0  # type: ignore[assignment]
            is_norm = issubclass(kind, nn.modules.batchnorm._BatchNorm) and module.training
            # With that of several ranks, one process gets the same statistics.
            if not is_norm or issubclass(kind, nn.SyncBatchNorm):
                continue
            if module.running_mean is None:
                self._batch_norm.append(kind.__name__)
            else:
                module.training = False
                self.switched.add(kind.__name__)

    def _note_inputs(self, module: nn.Module, inputs: Any) -> None:
        # What other modules have computed depends on weights.
        found = [tensor for tensor in leaves(inputs) if not tensor.requires_grad]
        if not found:
            return
        if not self.job.checks:
            self._inputs.append(digest(found))
            return
        rows = max((len(tensor) for tensor in found if tensor.dim()), default=1)
        self._inputs.append(rows)
        for tensor in map(local_of, found):
            if tensor.dim() and len(tensor) == rows and not tensor.is_complex():
                # Joined batches are padded with zeros or, for labels, -100: neither may count.
                values = tensor.double()
                self._amount += float(values[values != -100].abs().sum())
        names = ("module", "_orig_mod", "_fsdp_wrapped_module")
        while (inner := next(filter(None, map(module._modules.get, names)), None)) is not None:
            module = inner
        self._models.append(type(module).__name__.removeprefix("FSDP"))

    def leaves(self, output: Any) -> None:
        """Note the precision of what a module returns."""
        if isinstance(output, Tensor) and output.is_floating_point():
            self._eps = max(self._eps, torch.finfo(output.dtype).eps)

    def _meet(self, module: nn.Module) -> None:
        """Keep the first weights of the model that a module belongs to, or take those of the layout."""
        found = [
            root for root in stacks.roots() if any(each is module for each in root.modules())
        ] or [module]
        root = found[0]
        is_new = root not in self._known
        self._known.update(root.modules())
        if not is_new:
            return
        at = str(len(self._roots))
        self._roots[at] = {}
        engine = stacks.engine_of(root)
        if not self.job.replays:
            if engine is None:
                named = stacks.named_tensors(root)
                self._roots[at] = {name: stacks.piece(tensor) for name, tensor in named}
            else:
                self._roots[at] = engine.weights()
            return
        first = [torch.load(file, weights_only=True).get(at, {}) for file in self._files("first")]
        if engine is not None:
            engine.put(lambda name, shape: _whole(first, name, shape))
            return
        with torch.no_grad():
            for name, tensor in stacks.named_tensors(root, writes=True):
                whole = _whole(first, name, tensor.shape)
                if whole is not None:
                    stacks.put(tensor, whole)

    def _files(self, what: str) -> list[Path]:
        source = Path(str(self.job.source))
        return [
            source / f"rank-{rank}.{what}.pt"
            for rank in range(len(list(source.glob(f"rank-*.{what}.pt"))))
        ]

    def backward(self, tensors: Any) -> None:
        """Note the value that a backward begins with."""
        loss = sum(float(each.detach().double().sum()) for each in leaves(tensors))
        self._losses.append(loss)
        self._divisors.append(
            [divisor for each in leaves(tensors) for divisor in _divisors_of(each)]
        )
        self._pending += 1
        self._note_draws()

    def _note_draws(self) -> None:
        if self._streams:
            self._draws |= any(before != after for before, after in zip(self._streams, _streams()))

    def forgets(self) -> None:
        """Count the backward passes whose gradients are deleted though no step has used them."""
        # An optimizer with several backward passes, such as SAM, uses each of them.
        self._dropped += self._pending if self.running is None else 0
        self._pending = 0
        self._parts = []

    def backward_ended(self) -> None:
        """Keep the sum of the gradients of a window up to here."""
        if self.job.parts and len(self._parts) < _PARTS:
            params = [p for root in stacks.roots() for p in root.parameters() if p.grad is not None]
            self._parts.append(stacks.gradients_of(params))

    # Clipping

    def clipping(self, gradients: dict[str, stacks.Piece]) -> None:
        """Keep gradients as they are before they are clipped."""
        if not self.inside and self.job.checks:
            # The first clipping of an update counts: a second one gets clipped gradients.
            self._before_clipping.update(
                {n: g for n, g in gradients.items() if n not in self._before_clipping}
            )

    def clipped(self, norm: Any) -> None:
        """Keep the norm that clipping has used."""
        if self.inside:
            return
        norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        self._norms.append(float(norm))

    # Updates

    def trained_by(self, optimizer: Any) -> stacks.Trained:
        """Return the parameters of an optimizer."""
        return self._trained.setdefault(optimizer, stacks.Trained(optimizer))

    def before(self, trained: stacks.Trained) -> None:
        """Keep gradients and weights before a step."""
        self._claim()
        if not self._losses:
            self._note_draws()  # a script that calls `torch.autograd.grad`
        gradients, weights = trained.gradients(), trained.weights()
        self._gradients = {
            name: self._before_clipping.get(name, g) for name, g in gradients.items()
        }
        self._held = weights
        self._take_settings(trained)

    def _take_settings(self, trained: stacks.Trained) -> None:
        """Keep the learning rate and its like; in a replay take them from the layout."""
        self._groups = [
            {k: _number(group[k]) for k in _SETTINGS if k in group} for group in trained.groups
        ]
        if not self.job.replays:
            return
        wanted = self._of_layout(self.made + 1)[0]["groups"]
        for group, own, given in zip(trained.groups, self._groups, wanted):
            for name, value in given.items():
                if own.get(name) == value or name not in own:
                    continue
                # In place, since a compiled step refers to this tensor.
                if isinstance(group[name], Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = type(group[name])(value)

    def _of_layout(self, number: int) -> list[dict[str, Any]]:
        if number not in self._pieces:
            files = self._files(f"update-{number}")
            self._pieces[number] = [
                torch.load(file, weights_only=True, mmap=True) for file in files
            ]
            if not files:
                self.fail("one process makes more updates than the layout")
        return self._pieces[number]

    def after(self, trained: stacks.Trained) -> None:
        """Write an update, and stop after the last one."""
        self.made += 1
        self._pending = 0
        self.steps[trained.optimizer] = self.steps.get(trained.optimizer, 0) + 1
        weights = trained.weights()
        if self.job.checks:
            self._write_tensors(weights)
            if self.job.replays and self._continues():
                layout = [record["weights"] for record in self._of_layout(self.made)]
                trained.put(lambda name, shape: _whole(layout, name, shape))
        else:
            self._write_digests(weights)
        self._start_update()
        if not self._continues():
            self._end()

    def _continues(self) -> bool:
        if not self.job.checks:
            return self.made < self.job.updates
        has_engine = any(not issubclass(type(each), torch.optim.Optimizer) for each in self.steps)
        others = not has_engine and any(
            _steps_alone(each, self.steps) for each in stacks.optimizers()
        )
        is_each_done = not others and min(self.steps.values()) >= self.job.updates
        # Bounded for scripts in which one optimizer steps far more often than another.
        return not (is_each_done or self.made >= 8 * self.job.updates)

    def _write_tensors(self, weights: dict[str, stacks.Piece]) -> None:
        rank, _ = stacks.rank_and_size()
        gradients = self._gradients
        unchanged = [
            name
            for name, (_, _, after) in weights.items()
            if name in gradients
            and torch.equal(after, self._held[name][2])
            and bool(gradients[name][2].any())
        ]
        record = {
            "rank": rank,
            "has_group": stacks.has_group(),
            "has_runner": stacks.has_runner(),
            "gradients": gradients,
            "start": self._held,
            "weights": weights,
            "losses": self._losses,
            "divisors": self._divisors,
            "inputs": self._inputs,
            "amount": self._amount,
            "models": sorted(set(self._models)),
            "draws": self._draws,
            "batch_norm": sorted(set(self._batch_norm)),
            "switched": sorted(self.switched),
            "norms": self._norms,
            "unchanged": unchanged,
            "groups": self._groups,
            "batches": self.loaders.seen,
            "dropped": self._dropped,
            "parts": self._parts,
            "eps": self._eps,
        }
        torch.save(record, self.directory / f"rank-{rank}.update-{self.made}.pt")

    def _write_digests(self, weights: dict[str, stacks.Piece]) -> None:
        rank, _ = stacks.rank_and_size()
        line = {
            "samples": self._inputs,
            "loss": self._losses,
            "gradients": digest([part for _, _, part in self._gradients.values()]),
            "before": digest([part for _, _, part in self._held.values()]),
            "after": digest([part for _, _, part in weights.values()]),
        }
        with open(self.directory / f"rank-{rank}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")

    def _end(self) -> NoReturn:
        rank, world = stacks.rank_and_size()
        if self.job.checks and not self.job.replays:
            (self.directory / f"rank-{rank}.batches").write_bytes(pickle.dumps(self.loaders.kept))
            torch.save(self._roots, self.directory / f"rank-{rank}.first.pt")
            if rank == 0:
                (self.directory / "lengths.json").write_text(json.dumps(self.loaders.lengths))
        self._mark(self.directory / f"rank-{rank}.end", str(world))

    def _claim(self) -> None:
        """Have one process be a rank: of two the records would be mixed."""
        rank, _ = stacks.rank_and_size()
        file = self.directory / f"rank-{rank}.pid"
        # Only one process can make the file, and another one finds that id in it.
        with contextlib.suppress(FileExistsError), open(file, "x") as new:
            new.write(str(os.getpid()))
        # It is empty for the moment between its making and the writing of the id.
        if file.read_text() not in ("", str(os.getpid())):
            self.fail(f"two processes of the script train as rank {rank}")

    def fail(self, reason: str) -> NoReturn:
        """Say why the script cannot be compared."""
        self._mark(self.directory / f"rank-{stacks.rank_and_size()[0]}.failed", reason)

    def _mark(self, file: Path, text: str) -> NoReturn:
        # Renamed when it is whole: the driver reads the file as soon as it is there.
        staged = file.with_suffix(".new")
        staged.write_text(text)
        os.replace(staged, file)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        while (
            True
        ):  # until the driver kills this process, so that nothing is saved or logged any more
            time.sleep(60)


def _whole(
    ranks: Sequence[dict[str, stacks.Piece]], name: str, shape: Sequence[int]
) -> Tensor | None:
    pieces = [pieces[name] for pieces in ranks if name in pieces]
    return stacks.assembled(pieces, shape)


def _divisors_of(loss: Tensor) -> Iterator[float]:
    """Yield the numbers that a loss is divided by at its end, as by the number of micro-batches; a factor is the inverse of one."""
    node = loss.grad_fn
    while node is not None and node.name() in ("DivBackward0", "MulBackward0"):
        other = getattr(node, "_saved_other", None)
        if other is None or other.numel() != 1 or other.requires_grad or not float(other):
            return
        yield float(other) if node.name() == "DivBackward0" else 1.0 / float(other)
        node = node.next_functions[0][0]


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.item()
    return tuple(map(_number, value)) if isinstance(value, (tuple, list)) else value


def _steps_alone(optimizer: Any, seen: Any) -> bool:
    """Whether an optimizer has parameters that none of those that have made a step has."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    return bool(own) and not any(
        own & {id(p) for group in each.param_groups for p in group["params"]} for each in seen
    )


def is_forward() -> bool:
    """Whether a module is called by the script: checkpointing calls modules again within a backward."""
    return bool(torch._C._current_graph_task_id() == -1)


def _streams() -> list[object]:
    found: list[object] = [torch.get_rng_state().numpy().tobytes(), random.getstate()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found.append(torch.cuda.get_rng_state().numpy().tobytes())
    numpy = sys.modules.get("numpy.random")
    if numpy is not None:
        state = numpy.get_state()
        found.append((state[1].tobytes(), state[2]))
    return found
