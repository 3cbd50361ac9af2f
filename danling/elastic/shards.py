"""The state of the optimizer in shards, `elastic.shard_state`: each rank has that of its own parameters, and a mirror of the next rank's.

Every rank has all weights and the whole gradient. It steps the parameters of its two shards and gets the other weights from their owners.
An update on shards is made in two collectives, and a rank may end in each:

    all have the sums -> vote -> step of the own shards -> weights of all shards

The vote says that all ranks have the sums. A rank that has passed it may step; if it has, all others can, since they have the sums too;
if no one is left that has, the update is given up and made again. So no rank keeps a copy to take a step back.
"""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from danling.distributed import MembershipChanged
from danling.optim.state import from_inner_tensors, named_state_dict, to_inner_tensors
from danling.training.model_states import ModelStates
from danling.utils.tensors import bucketed, flattened, scatter

from .member import Member, Membership, RunEnded, TrainingComplete

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

    from .domain import ElasticDomain

logger = logging.getLogger("danling")

_STEPS_EACH_ALONE = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
    }
)
"""Optimizers of torch whose step of a parameter follows from its own state and gradient."""

_WHOLE, _SUMS, _STEPPED, _TORN = "whole", "sums", "stepped", "torn"
"""What a rank has: all weights of one update; the sums of one that it may make; its own shards after it; these, with an update given up."""
_IN_STEP = 1 << 60
"""Progress of ranks within a step, each another one: their weights are not to be compared."""
_ALIGNMENT = 16


class _Decided(BaseException):
    """The ranks have found out whether the open step is made on this rank."""

    def __init__(self, *, is_made: bool) -> None:
        self.is_made = is_made


@lru_cache(maxsize=16)
def owners(sizes: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Return the owner of each parameter: the largest first, each to the rank that has least. The same on all ranks."""
    loads, found = [0] * ranks, [0] * len(sizes)
    for index in sorted(range(len(sizes)), key=lambda each: (-sizes[each], each)):
        found[index] = min(range(ranks), key=loads.__getitem__)
        loads[found[index]] += sizes[index]
    return tuple(found)


@lru_cache(maxsize=16)
def parts_of(sizes: tuple[int, ...], ranks: int, rank: int) -> frozenset[int]:
    """Return the parameters whose state a rank has: its own, and those of the next rank."""
    pair = rank, (rank + 1) % ranks
    return frozenset(index for index, owner in enumerate(owners(sizes, ranks)) if owner in pair)


def check_optimizer(optimizer: object, *, scales: bool) -> None:
    """Refuse what cannot be stepped in shards."""
    kind = type(optimizer)
    is_of_torch = kind.__name__ in _STEPS_EACH_ALONE and kind is getattr(
        torch.optim, kind.__name__, None
    )
    received = None
    if not is_of_torch:
        received = f"{kind.__name__}. Take one of {', '.join(sorted(_STEPS_EACH_ALONE))}"
    elif scales:
        received = "precision='fp16'. Set precision='bf16' or none"
    if received:
        raise ValueError(
            f"Expected an optimizer of torch.optim that steps each parameter by itself, without a gradient scaler, with "
            f"elastic.shard_state. Received: {received}, or unset elastic.shard_state."
        )


class Shards:
    """The shards of the optimizer's state that this rank has.

    Args:
        runner: The runner.
        member: This process among the members of the run.
        domain: All ranks.
        closers: What is called when the runner is closed.

    Attributes:
        held: Indices of the parameters whose state is here. After a change the old ones stay until all ranks have theirs.
    """

    def __init__(
        self,
        runner: TorchRunner,
        member: Member,
        domain: ElasticDomain,
        closers: ExitStack,
    ) -> None:
        check_optimizer(runner.optimizer, scales=runner.precision.scaler is not None)
        self._runner = runner
        self._member = member
        self._domain = domain
        self._optimizer: torch.optim.Optimizer = runner.optimizer
        self._parameters = self._listed()
        self._ids = [*map(id, self._parameters)]
        self._sizes = tuple(parameter.nbytes for parameter in self._parameters)
        self.held: frozenset[int] = frozenset()
        self._phase = _WHOLE
        self._version = -1 if member.joins else 0
        """Steps of the optimizer that the shards here have had since the run was started; -1 without any."""
        self._stepped: list[int] = []
        self._has_stepped = False
        self._incoming: tuple[int, dict[int, dict[str, Any]]] = (0, {})
        """Steps and shards that have come in a change which is not complete yet."""
        self._plan: tuple[object, list[list[list[nn.Parameter]]]] = (None, [])
        self._left_out: list[tuple[nn.Parameter, Tensor | None]] = []
        """Gradients of other shards, while the optimizer steps."""
        self._before = self._optimizer.register_step_pre_hook(lambda *_: self._before_step())
        self._after = self._optimizer.register_step_post_hook(lambda *_: self._after_step())
        for hook in (self._before, self._after):
            closers.callback(hook.remove)
        vars(runner)["model_states"] = ShardedStates(runner, self)
        if member.joins:
            self._optimizer.state.clear()
            return
        self.keep_own()
        kept = sum(self._sizes[index] for index in self.held)
        logger.info(
            "elastic.shard_state: this rank has the state of the optimizer for %.1f of %.1f MB of parameters.",
            kept / 1e6,
            sum(self._sizes) / 1e6,
        )

    def _listed(self) -> list[nn.Parameter]:
        return [
            parameter for group in self._optimizer.param_groups for parameter in group["params"]
        ]

    @property
    def is_torn(self) -> bool:
        """Whether the weights here are of two updates, until the state of another rank is taken over."""
        return self._phase == _TORN

    def begin_update(self) -> None:
        """Begin an update; refuse another optimizer than that whose state was divided."""
        self._has_stepped = False
        if self._runner.optimizer is not self._optimizer or [*map(id, self._listed())] != self._ids:
            raise ValueError(
                "Expected the optimizer and the parameters of construction with elastic.shard_state. Received: another optimizer, or "
                "other parameters in its groups, or in another order. Give it all parameters in __init__, with requires_grad_(False) "
                "where they train later, or unset elastic.shard_state."
            )
        # Hooks of the program see whole gradients before the step, and all weights after it.
        self._optimizer._optimizer_step_pre_hooks.move_to_end(self._before.id)
        self._optimizer._optimizer_step_post_hooks.move_to_end(self._after.id, last=False)

    def keep_own(self) -> None:
        """Drop the state of other shards, where all of it was loaded."""
        self.held = parts_of(self._sizes, self._domain.size, self._domain.rank)
        for index, parameter in enumerate(self._parameters):
            if index not in self.held:
                self._optimizer.state.pop(parameter, None)

    # A step

    def _before_step(self) -> None:
        if self._has_stepped:
            raise ValueError(
                "Expected one step of the optimizer in an update with elastic.shard_state. Received: a second one. Call "
                "super().optimizer_step() once, or unset elastic.shard_state."
            )
        if self._domain.size > 1:
            self._phase = _SUMS
            # The vote, see the module.
            is_made = (
                self._succeeds(lambda: self._domain.all_reduce(torch.zeros(1))) or self._decide()
            )
            if not is_made:
                self._phase = _WHOLE
                raise MembershipChanged
        self._has_stepped = True
        self._version += 1
        if self.held != parts_of(self._sizes, self._domain.size, self._domain.rank):
            # All ranks have come through the change, so that older shards are not needed any more.
            self.keep_own()
        self._stepped = [
            index for index, parameter in enumerate(self._parameters) if parameter.grad is not None
        ]
        others = [self._parameters[index] for index in self._stepped if index not in self.held]
        self._left_out = [(parameter, parameter.grad) for parameter in others]
        for parameter in others:
            parameter.grad = None
        self._phase = _STEPPED

    def _after_step(self) -> None:
        for parameter, gradient in self._left_out:
            parameter.grad = gradient
        self._left_out = []
        if self._domain.size > 1 and not self._succeeds(self._share_weights) and not self._decide():
            self._phase = _TORN
            raise MembershipChanged
        self._phase = _WHOLE

    def _succeeds(self, collective: Callable[[], object]) -> bool:
        """Make a collective, and return whether all ranks are still there."""
        try:
            collective()
        except MembershipChanged:
            return False
        return True

    def _decide(self) -> bool:
        """Find out with the ranks that are left whether the open step is made here. Call outside of `except`."""
        self._domain.is_over = True
        found = False
        try:
            self._member.form(_IN_STEP + self._member.number, str, self.exchange)
        except _Decided as decided:
            found = decided.is_made
        except (TrainingComplete, RunEnded):
            pass  # said again where the ranks are formed
        return found

    @torch.no_grad()
    def _share_weights(self) -> None:
        """Give all ranks the weights that were stepped: each one sends those of its shard."""
        size, rank = self._domain.size, self._domain.rank
        made_for = size, tuple(self._stepped)
        if self._plan[0] != made_for:
            owner = owners(self._sizes, size)
            of_ranks = [
                [self._parameters[i] for i in self._stepped if owner[i] == each]
                for each in range(size)
            ]
            self._plan = made_for, [bucketed(parameters) for parameters in of_ranks]
        plan = self._plan[1]
        for number in range(max(map(len, plan))):
            buckets = [each[number] if number < len(each) else [] for each in plan]
            lengths = [sum(parameter.nbytes for parameter in bucket) for bucket in buckets]
            most = -(-max(lengths) // _ALIGNMENT) * _ALIGNMENT
            sent = torch.zeros(most, dtype=torch.uint8, device=self._parameters[0].device)
            if buckets[rank]:
                sent[: lengths[rank]] = flattened(buckets[rank]).view(torch.uint8)
            received = sent.new_empty(size, most)
            self._domain.guarded(lambda: dist.all_gather(list(received), sent))  # noqa: B023
            for each, (bucket, length) in enumerate(zip(buckets, lengths)):
                if bucket and each != rank:
                    scatter(received[each, :length].view(bucket[0].dtype), bucket)

    # A change of the ranks

    def exchange(self, now: Membership) -> None:
        """Bring the shards to where they belong. Called on all ranks of a group that was just formed, and again if it fails.

        Raises:
            MembershipChanged: If the group must be formed again, since a rank finishes a step first.
        """
        table: list[Any] = [(self._version, self._phase, sorted(self.held))]
        if now.size > 1:
            table = [None] * now.size
            dist.all_gather_object(table, (self._version, self._phase, sorted(self.held)))
        top = max(version for version, _, _ in table)
        phases = {phase for _, phase, _ in table}
        if _SUMS in phases:
            # An update that a living rank has made is made by all that have its sums.
            if self._phase == _SUMS:
                raise _Decided(is_made=self._version < top)
            raise MembershipChanged
        held = [set(indices) if version == top else set() for version, _, indices in table]
        has = [
            [rank for rank in range(now.size) if index in held[rank]]
            for index in range(len(self._parameters))
        ]
        is_complete = any(version == top and phase == _WHOLE for version, phase, _ in table)
        if not all(has) or not (is_complete or _STEPPED in phases):
            self._end_run(now, [index for index, ranks in enumerate(has) if not ranks])
        if _STEPPED in phases:
            # Weights of a rank that is past the step may be changed by the program since: its whole state is taken over instead.
            if not is_complete:
                self._complete_weights(has, now)
            if self._phase == _STEPPED:
                raise _Decided(is_made=not is_complete)
            raise MembershipChanged
        self._incoming = top, self._redistribute(has, held, now)

    def _end_run(self, now: Membership, lost: list[int]) -> None:
        """End the run on all ranks."""
        what = f"the state of the optimizer for {len(lost)} of {len(self._parameters)} parameters"
        why = (
            f"Two ranks ended at once, and {what if lost else 'the weights of the open update'} with them: elastic.shard_state keeps each "
            f"shard on two ranks. Start the command again with auto_resume: it continues from the newest checkpoint in "
            f"{self._runner.workspace.checkpoints}."
        )
        if now.rank == 0:
            logger.error("%s", why)
        self._member.end_run(why)
        raise MembershipChanged

    @torch.no_grad()
    def _complete_weights(self, has: list[list[int]], now: Membership) -> None:
        """Give the ranks within a step the weights of all shards, each from one that has stepped it."""
        for source in range(now.size if now.size > 1 else 0):
            sent = [
                parameter for parameter, ranks in zip(self._parameters, has) if ranks[0] == source
            ]
            for bucket in bucketed(sent):
                flat = flattened(bucket)
                dist.broadcast(flat, source)
                if self._phase == _STEPPED and source != now.rank:
                    scatter(flat, bucket)

    def _redistribute(
        self, has: list[list[int]], held: list[set[int]], now: Membership
    ) -> dict[int, dict[str, Any]]:
        """Send shards to the ranks that are to have them now, and return those that have come."""
        wanted = [parts_of(self._sizes, now.size, rank) for rank in range(now.size)]
        missing = set().union(*(wanted[rank] - held[rank] for rank in range(now.size)))
        found: dict[int, dict[str, Any]] = {}
        for source in range(now.size):
            sent = sorted(index for index in missing if has[index][0] == source)
            if not sent:
                continue
            data = torch.empty(0, dtype=torch.uint8)
            if source == now.rank:
                data = self._packed(sent)
            size = torch.tensor([data.numel()])
            dist.broadcast(size, source)
            # That of the source has this size already.
            dist.broadcast(data.resize_(int(size)), source)
            if source != now.rank:
                taken = wanted[now.rank] - held[now.rank]
                found |= {
                    index: entry for index, entry in _unpacked(data).items() if index in taken
                }
        return found

    def settle(self) -> None:
        """Take in what has come, once the group is formed and the state of another rank, if any, is taken over."""
        version, entries = self._incoming
        if self._version != version:
            self.held = frozenset()
            self._optimizer.state.clear()
        self.held |= entries.keys()
        for index, entry in entries.items():
            if entry:
                self._optimizer.state[self._parameters[index]] = {
                    key: from_inner_tensors(value) for key, value in entry.items()
                }
        self._version, self._phase, self._incoming = version, _WHOLE, (version, {})

    # States

    def _packed(self, indices: Collection[int]) -> Tensor:
        """Return shards as bytes, which no pickle reads."""
        state = self._optimizer.state
        entries = {
            index: {
                key: to_inner_tensors(value)
                for key, value in state.get(self._parameters[index], {}).items()
            }
            for index in indices
        }
        stream = io.BytesIO()
        torch.save(entries, stream)
        return torch.frombuffer(stream.getbuffer(), dtype=torch.uint8)

    def groups(self) -> dict[str, Any]:
        """Return the optimizer's state without that of parameters. No communication."""
        return {**named_state_dict(self._optimizer, self._runner.named_parameters()), "state": {}}

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the shards while the state of another rank is taken over."""
        held, state = self.held, dict(self._optimizer.state)
        yield
        self.held = held
        self._optimizer.state.update(state)

    def gathered(self, own: dict[str, Any]) -> dict[str, Any]:
        """Return a state of the optimizer with all shards on the main process, and as it is on others. Called on all ranks."""
        size, rank = self._domain.size, self._domain.rank
        names = [name for group in own["param_groups"] for name in group["params"]]
        # The main process has the shards of ranks 0 and 1 itself.
        of_main, owner = parts_of(self._sizes, size, 0), owners(self._sizes, size)
        state: dict[str, Any] = dict(own["state"])
        for source in range(2, size):
            sent = [
                index
                for index in range(len(names))
                if owner[index] == source and index not in of_main
            ]
            if sent and rank in (0, source):
                found = self._domain.guarded(lambda: self._sent_to_main(source, sent))  # noqa: B023
                state |= {names[index]: entry for index, entry in found.items() if entry}
        return {**own, "state": {name: state[name] for name in names if name in state}}

    def _sent_to_main(self, source: int, indices: Collection[int]) -> Mapping[int, Any]:
        if self._domain.rank == source:
            data = self._packed(indices)
            dist.send(torch.tensor([data.numel()]), 0)
            dist.send(data, 0)
            return {}
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, source)
        data = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(data, source)
        return _unpacked(data)


def _unpacked(data: Tensor) -> dict[int, dict[str, Any]]:
    entries: dict[int, dict[str, Any]] = torch.load(
        io.BytesIO(data.numpy().tobytes()), weights_only=True
    )
    return entries


class ShardedStates(ModelStates):
    """The states of a model that each rank has whole, and of an optimizer that is in shards."""

    def __init__(self, runner: TorchRunner, shards: Shards) -> None:
        super().__init__(runner)
        self._shards = shards

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state by parameter name: all of it on the main process, this rank's shards on others."""
        return self._shards.gathered(super().optimizer_state())

    def load_optimizer(self, state: Mapping[str, object]) -> None:
        """Restore the whole state, and keep this rank's shards of it."""
        super().load_optimizer(state)
        self._shards.keep_own()
