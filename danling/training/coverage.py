"""Compares the parameters of an optimizer with those of the model: which are left out, foreign, or without a gradient."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from danling.utils.protocols import ReductionDomain

NamedParameters = Iterable[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Coverage:
    """Which parameters of a model an optimizer updates.

    Attributes:
        trained: Number of parameters that require a gradient and are in the optimizer.
        left_out: Names of parameters that require a gradient and are not in it.
        foreign: Shapes of tensors in the optimizer that are not parameters of the model.
    """

    trained: int = 0
    left_out: list[str] = field(default_factory=list)
    foreign: list[tuple[int, ...]] = field(default_factory=list)

    @classmethod
    def of(cls, named: NamedParameters, optimized: Iterable[nn.Parameter]) -> Coverage:
        """Compare parameters by identity.

        Args:
            named: Parameters of the model, and of a criterion that is trained with it, by name.
            optimized: Parameters that the optimizer updates.
        """
        held = {id(parameter): parameter for parameter in optimized}
        known, trained, left_out = set(), 0, []
        for name, parameter in named:
            known.add(id(parameter))
            if parameter.requires_grad:
                trained += id(parameter) in held
                left_out += [name] if id(parameter) not in held else []
        return cls(trained, left_out, [tuple(p.shape) for key, p in held.items() if key not in known])

    @classmethod
    def joined(cls, ranks: Sequence[Coverage]) -> Coverage:
        """Return the coverage of the whole model, of which each rank may hold a part."""
        names = dict.fromkeys(name for rank in ranks for name in rank.left_out)
        foreign = max((rank.foreign for rank in ranks), key=len, default=[])
        return cls(sum(rank.trained for rank in ranks), list(names), foreign)

    def check(self, kind: str) -> None:
        """Refuse an optimizer that would train no parameter of a model that has trainable ones.

        Args:
            kind: Class of the optimizer, for the error.

        Raises:
            ValueError: If the optimizer has none of the trainable parameters.
        """
        if self.left_out and not self.trained:
            raise ValueError(
                f"Expected an optimizer over parameters of the model. Received: a {kind} over {len(self.foreign)} others, which would "
                f"train nothing of it ({listed(self.left_out)}). A model that is put on the runner after construction is not the one "
                "that the optimizer was made for: assign `self.model` in __init__, and make the optimizer after the model is complete."
            )

    def warnings(self, kind: str) -> list[str]:
        """Return a sentence about parameters that are left out, and one about foreign ones."""
        found = []
        if self.left_out:
            found.append(
                f"Expected every parameter that requires a gradient in the optimizer. Received: a {kind} without "
                f"{listed(self.left_out)}, which stay as they are. Make the optimizer after the model is complete, or freeze them with "
                "requires_grad_(False)."
            )
        if self.foreign:
            found.append(
                f"Expected an optimizer over parameters of the model and the criterion. Received: a {kind} with {len(self.foreign)} others "
                f"of the shapes {self.foreign[:5]}, which are not saved by name, nor reduced over ranks. Make them part of the model, or "
                "make the optimizer after the model is complete."
            )
        return found


class GradientWatch:
    """Notes which parameters get a gradient, for stacks that remove gradients before they can be examined.

    Args:
        named: The parameters. Each is watched until it gets its first gradient, or the watch is closed.
    """

    def __init__(self, named: NamedParameters) -> None:
        self._missing: dict[int, str] = {}
        self._handles: list[Any] = []
        for name, parameter in named:
            if parameter.requires_grad and id(parameter) not in self._missing:
                self._missing[id(parameter)] = name
                hook = partial(self._note, id(parameter))
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]

    def _note(self, key: int, _: object) -> None:
        self._missing.pop(key, None)

    def close(self) -> list[str]:
        """Stop watching, and return the names of the parameters that got no gradient."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        return list(self._missing.values())


def ungraded_names(mine: Sequence[str], trained: Iterable[str], domain: ReductionDomain) -> list[str]:
    """Return the names of parameters that got a gradient on no rank. Called on all ranks."""
    missing = dict.fromkeys(name for names in domain.gather_objects(list(mine)) for name in names)
    if not missing:
        return []
    own = set(trained) - set(mine)
    found = set().union(*domain.gather_objects(own & missing.keys()))
    return [name for name in missing if name not in found]


def ungraded(names: Sequence[str]) -> str:
    """Return the sentence for parameters that are trained and got no gradient in the first update."""
    return (
        f"Expected a gradient for every parameter that is trained. Received: none in the first update for {listed(names)}. The loss "
        "does not depend on them: use them in `forward`, or freeze them with requires_grad_(False)."
    )


def listed(names: Sequence[str]) -> str:
    """Return the first five names as text, with the total number if there are more."""
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown}, ... ({len(names)} in all)"
