"""Taking back what the micro-batches of an update have changed: to run them again, or since the update is skipped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_not
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from danling.metrics import TrainMetrics
from danling.utils.tensors import canonical_name, local_part
from danling.utils.trees import tensors

from .attributes import KeptAttributes
from .observer_states import ObserverStates
from .user_attributes import declared_names

if TYPE_CHECKING:
    from danling.data.run_data import RunData
    from danling.runners.torch_runner import TorchRunner

logger = logging.getLogger("danling")

_WATCHED = 2
"""Updates of a process in which all attributes of the user's are compared, to find those that `train_step` changes."""


class Recompute:
    """Takes the micro-batches of an update back, so that they can be run again.

    Puts back everything that they change: buffers, meters, counters, the carry, the user's attributes, the settings of the optimizer, the
    states of observers, the window and its gradient; the states of datasets where batches are read again.
    Random numbers follow from their keys. Batches are not copied: a step that has written to its batch cannot be run again, which is
    refused.
    """

    def __init__(
        self,
        runner: TorchRunner,
        attributes: KeptAttributes,
        observer_states: ObserverStates,
        data: RunData,
        train_metrics: TrainMetrics | None,
    ) -> None:
        self._runner = runner
        self._attributes = attributes
        self._observer_states = observer_states
        self._data = data
        self.train_metrics = train_metrics
        self._versions: dict[int, list[tuple[Tensor, int]]] = {}

    def remember(self, *, window: bool = True, reads_again: bool = False) -> Callable[[], None]:
        """Remember where an update begins, and return what takes its micro-batches back. No communication.

        Args:
            window: Whether an update is open, and not a micro-batch of padding or a hook.
            reads_again: Whether what follows is read again too. Else the states of datasets stay: reading may have changed them.
        """
        runner = self._runner
        self._versions = {}
        buffers = BufferCopies(runner)
        buffers.take()
        put_back = [
            self._attributes.remember(),
            buffers.put_back,
            remember_figures(runner, self.train_metrics),
            remember_settings(runner.optimizer),
        ]
        if reads_again:
            put_back.append(self._data.remember_states())
        # Of padding, observers hear nothing.
        if window:
            put_back.append(self._observer_states.remember())
        micro_step = runner.state.train.micro_step

        def take_back() -> None:
            if window:
                runner.window.reset()
                runner.reduction.drop_open()
                runner.reduction.zero()
            for each in put_back:
                each()
            runner.state.train.micro_step = micro_step

        return take_back

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """Put back on exit what an evaluation may change: buffers and their averages, meters, the carry, attributes and metrics."""
        runner = self._runner
        # The averages of weights do not change in an evaluation, those of buffers do: a forward may change buffers.
        averages = getattr(runner.ema, "weights", {})
        names = {canonical_name(name) for name, _ in runner.unwrapped_model.named_buffers()}
        averaged = [(tensor, tensor.clone()) for name, tensor in averages.items() if name in names]
        put_figures_back = remember_figures(runner, self.train_metrics)
        buffers = BufferCopies(runner)
        buffers.take()
        try:
            with self._attributes.preserved():
                yield
        finally:
            buffers.put_back()
            put_figures_back()
            for tensor, before in averaged:
                tensor.copy_(before)

    def check(self, data: object) -> None:
        """Note the version of the tensors of a batch before it is run, and refuse one that was changed since it was run before."""
        known = self._versions.setdefault(
            id(data),
            [(tensor, tensor._version) for _, tensor in tensors(data) if not tensor.is_inference()],
        )
        for tensor, version in known:
            if tensor._version != version:
                raise ValueError(
                    "Expected `train_step` to leave the tensors of its batch as they are where an update may be computed again, as with "
                    f"ft.enabled. Received: one of shape {tuple(tensor.shape)} that was changed in place. Change a clone of it."
                )


class SkippedUpdates:
    """Puts back what the micro-batches of a skipped update have changed, but for the numbers of samples and micro-batches.

    Buffers, meters, training metrics and the carry are copied where an update begins, in runs that may skip updates; in other runs where
    the first micro-batch weighs nothing. Attributes of the user's are put back if `train_step` has changed them in the first updates of
    this process, in which all are compared: no later update looks at others. So what hooks count, such as skipped updates, stays.
    """

    def __init__(
        self, runner: TorchRunner, attributes: KeptAttributes, train_metrics: TrainMetrics | None
    ) -> None:
        self._runner = runner
        self._attributes = attributes
        self._train_metrics = train_metrics
        self._buffers = BufferCopies(runner, with_declared=True)
        self._watched = 0
        """Updates in which attributes were compared."""
        self._found: set[str] = set()
        """Attributes that `train_step` has changed in these."""
        self.before: Mapping[str, bytes] | None = None
        """Digests of the attributes at the beginning of an open update in which they are compared; else `None`, and `look` does nothing."""
        self.remembers = False
        """Whether the open update was remembered, and `end` has something to do."""
        self._put_back: tuple[Callable[[], None], Callable[..., None]] | None = None
        """What puts back figures and attributes; `None` where the open update was not remembered."""
        self.may_skip = True
        """Whether updates are skipped, so that what one changes is remembered; which of them, `UpdateStep` decides."""

    def bind(self) -> None:
        """Look again whether updates may be skipped, and which modules have buffers. Called where a pass begins."""
        runner = self._runner
        # A loss scaler skips updates that overflow, whatever the configuration says.
        self.may_skip = runner.config.skip_nonfinite_grad or runner.reduction.scaler is not None
        self._buffers.bind()

    def begin(self) -> None:
        """Remember where an update begins that may be skipped: `may_skip`, or the first micro-batch, which follows, weighs nothing."""
        runner = self._runner
        is_watched = self._watched < _WATCHED
        before = self._attributes.digests() if is_watched else None
        self._buffers.take()
        # In the first updates it is not known yet which attributes change: remember all.
        names = None if is_watched else self._found
        self._put_back = (
            remember_figures(runner, self._train_metrics),
            self._attributes.remember(names),
        )
        # Last: an error or a Ctrl+C above, such as a copy that finds no memory, leaves nothing to put back.
        self.before, self.remembers = before, True

    def look(self) -> None:
        """Find the attributes that a micro-batch has changed. Called after each micro-batch where `before` is set."""
        assert self.before is not None
        now = self._attributes.digests()
        self._found |= {
            name for name, digest in now.items() if self.before.get(name, digest) != digest
        }

    def end(self, *, put_back: bool) -> None:
        """End a remembered update: put back what it has changed, or keep it. Called where `remembers` is set, after the decision."""
        assert self._put_back is not None
        put_figures_back, put_attributes_back = self._put_back
        self.remembers, self._put_back = False, None
        if put_back:
            put_attributes_back(self._found)
            self._buffers.put_back()
            put_figures_back()
        if self.before is not None:
            # The first updates may differ, as where the second one finds the state that the first has made.
            self.before = None
            self._watched += 1
            if self._watched == _WATCHED and self._found:
                self._attributes.note_put_back(self._found)

    def put_buffers_back(self) -> None:
        """Put the buffers back where one of several optimizers skips its update."""
        if self._put_back is not None:
            self._buffers.put_back()


def remember_figures(runner: TorchRunner, metrics: TrainMetrics | None) -> Callable[[], None]:
    """Return what puts meters, metrics of training and the carry back to what they are now. No communication."""
    # Copied twice, here and where it is put back: the program may change it in place each time.
    carry = map_carry(runner.carry, Tensor.clone)
    put_meters_back = runner.meters.remember()
    put_metrics_back = metrics.remember() if metrics is not None else None

    def put_back() -> None:
        put_meters_back()
        if put_metrics_back is not None:
            put_metrics_back()
        runner.carry = map_carry(carry, Tensor.clone)

    return put_back


def remember_settings(optimizer: Any) -> Callable[[], None]:
    """Return what puts the learning rates and other settings of an optimizer back to what they are now."""
    groups = [*getattr(optimizer, "param_groups", ())]
    kept = [
        {name: _copied(value) for name, value in group.items() if name != "params"}
        for group in groups
    ]

    def put_back() -> None:
        for group, values in zip(groups, kept):
            for name, value in values.items():
                # In place: a captured graph, or a schedule, reads the rate from this tensor.
                if isinstance(value, Tensor) and isinstance(group.get(name), Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value

    return put_back


def _copied(value: object) -> object:
    return value.clone() if isinstance(value, Tensor) else value


class BufferCopies:
    """Copies of the buffers of model and criterion. The memory of the copies is kept from update to update.

    Args:
        runner: The runner.
        with_declared: Whether those of modules in attributes that the class lists in `saved` are copied too.
    """

    def __init__(self, runner: TorchRunner, *, with_declared: bool = False) -> None:
        self._runner = runner
        self._declared = tuple(declared_names(runner, "saved")) if with_declared else ()
        self._roots: list[object] = []
        """What the buffers are of."""
        self._registries: list[dict[str, Tensor | None]] = []
        self._taken: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = []
        self._live: list[Tensor] = []
        self._copies: list[Tensor] = []

    def bind(self) -> None:
        """Look again which modules there are."""
        self._roots = []

    def take(self) -> None:
        """Copy the buffers."""
        # Walking over all modules costs more than copying their buffers: once for a model, and again after `bind`.
        # A program may make a teacher in an update, or another one.
        declared = [vars(self._runner).get(name) for name in self._declared]
        roots = [self._runner.model, *declared]
        if len(roots) != len(self._roots) or any(map(is_not, roots, self._roots)):
            self._roots = roots
            modules = [self._runner.unwrapped_model, self._runner.criterion]
            modules += tree_leaves(declared)
            self._registries = [
                part._buffers
                for each in modules
                if isinstance(each, nn.Module)
                for part in each.modules()
            ]
        self._taken = [
            (registry, name, buffer)
            for registry in self._registries
            for name, buffer in registry.items()
        ]
        live = [local_part(buffer) for _, _, buffer in self._taken if buffer is not None]
        is_same = len(live) == len(self._live) and all(
            one is other for one, other in zip(live, self._live)
        )
        # An observer of values gives its buffers their size in the first forward.
        if is_same and all(one.shape == copy.shape for one, copy in zip(live, self._copies)):
            # torch refuses a call for no tensors.
            if live:
                with torch.no_grad():
                    torch._foreach_copy_(self._copies, live)
            return
        with torch.no_grad():
            self._live, self._copies = live, [buffer.clone() for buffer in live]

    @torch.no_grad()
    def put_back(self) -> None:
        """Write the copies into the buffers, which are those that were copied; one that was registered since is left as it is."""
        # In place, since a captured graph and a wrapper refer to the tensors; then the tensors themselves, if they were replaced.
        for buffer, before in zip(self._live, self._copies):
            if buffer.shape != before.shape:
                buffer.resize_(before.shape)
            buffer.copy_(before)
        for registry, name, original in self._taken:
            if name in registry:
                registry[name] = original


def map_carry(carry: Any, change: Callable[[Tensor], Tensor], path: str = "self.carry") -> Any:
    """Return a carry with each tensor changed; lists, tuples and mappings are made anew, mappings as `dict`."""
    if isinstance(carry, Tensor):
        return change(carry)
    if carry is None or isinstance(carry, (bool, int, float, str)):
        return carry
    if isinstance(carry, Mapping):
        return {key: map_carry(value, change, f"{path}[{key!r}]") for key, value in carry.items()}
    # No subclasses: a named tuple is made of its fields, not of one list.
    if type(carry) in (list, tuple):
        return type(carry)(
            map_carry(value, change, f"{path}[{index}]") for index, value in enumerate(carry)
        )
    raise TypeError(
        f"Expected self.carry to be of tensors, numbers and None, and of lists, tuples and mappings of them. Received: {path} of type "
        f"{type(carry).__name__}. Put its tensors into a tuple."
    )
