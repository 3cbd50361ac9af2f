"""Several optimizers as one, and their schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from .arguments_of_step import needs_metric, takes_position

SHARED = "shared"
"""Key of the entries of `state` that belong to no parameter: an optimizer keeps them under a text."""
OWN = "own"
"""Key of what a `state_dict` has next to `state` and `param_groups`, such as the slow weights of Lookahead."""
_MEMBERS = "members"


def added_to(plain: Mapping[str, Any]) -> dict[str, dict[Any, Any]]:
    """Return what a state of an optimizer has that is not of one parameter, by the key under which it is saved."""
    numbers = {index for group in plain["param_groups"] for index in group["params"]}
    return {
        SHARED: {key: value for key, value in plain["state"].items() if key not in numbers},
        OWN: {key: value for key, value in plain.items() if key not in ("state", "param_groups")},
    }


class JointState(MutableMapping[Any, Any]):
    """The states of several optimizers as one mapping, by parameter. It keeps nothing: each look reads the optimizers as they are now.

    A parameter belongs to the optimizer that has it in a group. Other keys, such as a text, belong to the first optimizer that has them.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers

    def _owner(self, key: object) -> Optimizer:
        for member in self._optimizers:
            if key in member.state:
                return member
        if isinstance(key, Tensor):
            for member in self._optimizers:
                if any(
                    key is parameter
                    for group in member.param_groups
                    for parameter in group["params"]
                ):
                    return member
        raise KeyError(key)

    def __getitem__(self, key: Any) -> Any:
        # As that of torch's optimizers, the state of a parameter begins empty.
        return self._owner(key).state[key]

    def get(self, key: Any, default: Any = None) -> Any:
        """Return the state of a parameter, or `default`; no state is begun."""
        return self[key] if key in self else default  # noqa: SIM401

    def setdefault(self, key: Any, default: Any = None) -> Any:
        """Return the state of a parameter, which begins as `default`."""
        return self._owner(key).state.setdefault(key, default)

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove the state of a parameter and return it, or `default`; no state is begun."""
        if default and key not in self:
            return default[0]
        return self._owner(key).state.pop(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._owner(key).state[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._owner(key).state[key]

    def __contains__(self, key: object) -> bool:
        return any(key in member.state for member in self._optimizers)

    def __iter__(self) -> Iterator[Any]:
        # Keys that are no parameters may be the same in several of them.
        return iter(dict.fromkeys(chain.from_iterable(member.state for member in self._optimizers)))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))


class JointOptimizer(Optimizer):
    """Several optimizers as one, so that a runner steps, skips, clips, saves and restores them together.

    Its groups are those of the optimizers, one after another, and are the very same mappings: a schedule over this optimizer sets the
    rates of all of them, and one over a single member sets that member's. `state` and `param_groups` are read from the members each
    time. No communication: construct it on all ranks.

    Optimizers by name, as in `self.optimizer = {"critic": ..., "actor": ...}`, can also be stepped one after the other: see
    `TorchRunner.optimizing`. `joint["critic"]` is one of them.

    Args:
        optimizers: The members, over different parameters.
        named: Members by name, in place of `optimizers`.

    Raises:
        ValueError: If there is no member; from torch, if two of them have the same parameter.

    Examples:
        >>> JointOptimizer(Adam(generator.parameters(), lr=1e-3), SGD(critic.parameters(), lr=1e-2))  # doctest: +SKIP
    """

    def __init__(self, *optimizers: Optimizer, **named: Optimizer) -> None:
        if bool(optimizers) == bool(named):
            raise ValueError(
                f"Expected optimizers, or optimizers by name. Received: {len(optimizers)} without a name and {len(named)} by name. Pass "
                "either JointOptimizer(first, second) or JointOptimizer(first=..., second=...)."
            )
        self.named = named
        self.optimizers: tuple[Optimizer, ...] = optimizers or tuple(named.values())
        for member in self.optimizers:
            if not isinstance(member, Optimizer):
                raise ValueError(
                    f"Expected every member to be a torch.optim.Optimizer. Received: {member!r}. Make one over the parameters of its part."
                )
        self._is_made = False
        groups = self.param_groups
        # torch looks within one optimizer only.
        parameters = [id(parameter) for group in groups for parameter in group["params"]]
        if len(parameters) != len(set(parameters)):
            raise ValueError(
                "Expected members over different parameters. Received: a parameter in more than one parameter group. Leave it out of all "
                "but one."
            )
        # It sets up the hooks. It also adds each group, which `add_param_group` leaves out until the end of this method.
        super().__init__(groups, {})
        self._is_made = True

    def __getitem__(self, name: str) -> Optimizer:
        return self.named[name]

    @property  # type: ignore[override]
    def param_groups(self) -> tuple[dict[str, Any], ...]:
        """The groups of all members."""
        # No list: a group that is appended to it would be lost in silence.
        return tuple(group for member in self.optimizers for group in member.param_groups)

    @param_groups.setter
    def param_groups(self, groups: object) -> None:
        self._refuse_to_set("param_groups")

    @property  # type: ignore[override]
    def state(self) -> JointState:
        """The states of all members."""
        return JointState(self.optimizers)

    @state.setter
    def state(self, state: object) -> None:
        self._refuse_to_set("state")

    def _refuse_to_set(self, name: str) -> None:
        # torch's constructor sets both to empty ones.
        if self._is_made:
            raise ValueError(
                f"Expected {name} of one of the optimizers to be set. Received: JointOptimizer.{name} = .... Set it there."
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group: a member has to update it."""
        if self._is_made:
            raise ValueError(
                "Expected a member to add the group to. Received: JointOptimizer.add_param_group(). Call add_param_group of one of "
                "`optimizers`."
            )

    def __getstate__(self) -> dict[str, Any]:
        return {
            "defaults": self.defaults,
            "named": self.named,
            "optimizers": self.optimizers,
            "_is_made": True,
        }

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every member in order."""
        if closure is not None:
            raise ValueError(
                "Expected no closure: every optimizer would evaluate it again. Received: closure. Compute the losses before the step."
            )
        for member in self.optimizers:
            member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of every member."""
        for member in self.optimizers:
            member.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all members in the form of one optimizer: parameters are numbered through."""
        for prepare in self._optimizer_state_dict_pre_hooks.values():
            prepare(self)
        result = self._numbered_through()
        for change in self._optimizer_state_dict_post_hooks.values():
            changed = change(self, result)
            result = result if changed is None else changed
        return result

    def _numbered_through(self) -> dict[str, Any]:
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        added: list[dict[str, dict[Any, Any]]] = []
        offset = 0
        for member in self.optimizers:
            own = member.state_dict()
            added.append(added_to(own))
            shared = added[-1][SHARED]
            state.update(
                {
                    offset + index: entry
                    for index, entry in own["state"].items()
                    if index not in shared
                }
            )
            groups += [
                {**group, "params": [offset + i for i in group["params"]]}
                for group in own["param_groups"]
            ]
            offset += sum(len(group["params"]) for group in member.param_groups)
        members = {_MEMBERS: added} if any(any(each.values()) for each in added) else {}
        return {"state": state, "param_groups": groups, **members}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        state_dict = dict(state_dict)  # as torch does: a hook may change its keys
        for change in self._optimizer_load_state_dict_pre_hooks.values():
            changed = change(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups = iter(state_dict["param_groups"])
        none: list[dict[str, dict[Any, Any]]] = [{SHARED: {}, OWN: {}}] * len(self.optimizers)
        for member, added in zip(self.optimizers, state_dict.get(_MEMBERS, none)):
            stored: list[dict[str, Any]] = [
                next(groups, {"params": []}) for _ in member.param_groups
            ]
            own = {
                index: i
                for i, index in enumerate(index for group in stored for index in group["params"])
            }
            entries = {
                own[index]: entry for index, entry in state_dict["state"].items() if index in own
            }
            numbered = [
                {**group, "params": [own[index] for index in group["params"]]} for group in stored
            ]
            member.load_state_dict(
                {**added[OWN], "state": {**entries, **added[SHARED]}, "param_groups": numbered}
            )
        for notice in self._optimizer_load_state_dict_post_hooks.values():
            notice(self)


class JointScheduler:
    """Schedules by the name of their optimizer: each advances with the updates of its optimizer, or all of them by epochs.

    Args:
        schedules: The schedules, each over one member of a `JointOptimizer`.

    Raises:
        ValueError: If one of them follows a metric, or is told its place.
    """

    def __init__(self, **schedules: Any) -> None:
        for name, schedule in schedules.items():
            if (
                needs_metric(schedule)
                or takes_position(schedule)
                or not callable(getattr(schedule, "step", None))
            ):
                raise ValueError(
                    f"Expected schedules with a method step() that takes nothing. Received: {name!r}: {type(schedule).__name__}. Take "
                    "another one, or one schedule over all optimizers."
                )
        self.schedules: Mapping[str, Any] = schedules

    def __getitem__(self, name: str) -> Any:
        return self.schedules[name]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.schedules.values())

    @property
    def last_epoch(self) -> int:
        """The positions of all schedules that say theirs, added up: it grows with each advance."""
        return sum(getattr(schedule, "last_epoch", 0) for schedule in self)

    def step(self) -> None:
        """Advance all schedules."""
        for schedule in self:
            schedule.step()

    def step_of(self, name: str) -> None:
        """Advance the schedule of one optimizer, if it has one."""
        if name in self.schedules:
            self.schedules[name].step()

    def state_dict(self) -> dict[str, Any]:
        """Return the states by name."""
        return {name: schedule.state_dict() for name, schedule in self.schedules.items()}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Restore what `state_dict` returned."""
        if state.keys() != self.schedules.keys():
            raise ValueError(
                f"Expected the state of the schedules {', '.join(self.schedules)}. Received: that of {', '.join(state)}. Give the "
                "optimizers the names of the checkpoint, or add 'scheduler' to checkpoint.exclude_from_loading."
            )
        for name, schedule in self.schedules.items():
            schedule.load_state_dict(state[name])
