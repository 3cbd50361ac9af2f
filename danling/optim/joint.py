"""Several optimizers as one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


class JointOptimizer(Optimizer):
    """Holds several optimizers as one, so that a runner steps, skips, clips, saves and restores them together.

    Its groups are those of the optimizers, one after another, and are the very same mappings: a schedule over this optimizer sets the
    rates of all of them, and one over a single member sets that member's. No communication: construct it on all ranks.

    Args:
        optimizers: The members, over different parameters.

    Raises:
        ValueError: If there is no member, or two of them hold the same parameter.

    Examples:
        >>> JointOptimizer(Adam(generator.parameters(), lr=1e-3), SGD(critic.parameters(), lr=1e-2))  # doctest: +SKIP
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        if not optimizers:
            raise ValueError("Expected at least one optimizer. Received: none. Pass the optimizers to hold together.")
        _check_apart(optimizers)
        self.optimizers = optimizers
        super().__init__([group for member in optimizers for group in member.param_groups], {})
        self._share()

    def _share(self) -> None:
        # Loading replaces a member's groups and state by new objects.
        self.param_groups = [group for member in self.optimizers for group in member.param_groups]
        self.state.clear()
        for member in self.optimizers:
            self.state.update(member.state)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every member in order.

        Raises:
            ValueError: If a closure is given, which would be evaluated once for each member.
        """
        if closure is not None:
            raise ValueError(
                "Expected no closure: every member would evaluate it anew. Received: closure. Compute the losses before."
            )
        for member in self.optimizers:
            member.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of every member."""
        for member in self.optimizers:
            member.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all members in the form of one optimizer: parameters are numbered through."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        for member, offset in zip(self.optimizers, self._offsets()):
            own = member.state_dict()
            state.update({offset + index: entry for index, entry in own["state"].items()})
            groups += [{**group, "params": [offset + i for i in group["params"]]} for group in own["param_groups"]]
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: If a member finds other groups or parameters than its own.
        """
        groups = iter(state_dict["param_groups"])
        for member in self.optimizers:
            stored: list[dict[str, Any]] = [next(groups, {"params": []}) for _ in member.param_groups]
            own = {index: i for i, index in enumerate(index for group in stored for index in group["params"])}
            entries = {own[index]: entry for index, entry in state_dict["state"].items() if index in own}
            numbered = [{**group, "params": [own[index] for index in group["params"]]} for group in stored]
            member.load_state_dict({"state": entries, "param_groups": numbered})
        self._share()

    def _offsets(self) -> list[int]:
        offsets = [0]
        for member in self.optimizers:
            offsets.append(offsets[-1] + sum(len(group["params"]) for group in member.param_groups))
        return offsets[:-1]


def _check_apart(optimizers: tuple[Optimizer, ...]) -> None:
    held: dict[int, int] = {}
    for number, member in enumerate(optimizers):
        for group in member.param_groups:
            for parameter in group["params"]:
                other = held.setdefault(id(parameter), number)
                if other != number:
                    raise ValueError(
                        f"Expected optimizers over different parameters. Received: optimizers {other} and {number} both hold a "
                        f"parameter of shape {tuple(parameter.shape)}. Leave it out of one of them."
                    )
