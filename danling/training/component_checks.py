"""Checks of what users put on a runner: wrong kinds, misnamed parts, and parameters that are not trained."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike

from torch import nn
from torch.nn.parameter import is_lazy

from danling.config.names import ATTRIBUTES_ELSEWHERE, METHODS_ELSEWHERE, slip_of
from danling.utils.protocols import ReductionDomain

logger = logging.getLogger("danling")

_ASSIGNED = ("model", "criterion", "optimizer", "scheduler", "datasets", "dataloaders", "metrics")


def check_model(model: object, present: Iterable[str]) -> None:
    """Refuse a model that is no module, or whose weights are not made yet."""
    if isinstance(model, nn.Module):
        lazy = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
        if lazy is not None:
            raise ValueError(
                f"Expected a model whose weights are made. Received: {lazy!r} of a lazy layer, which is made by the first batch. Call the "
                "model once in __init__, such as self.model(torch.zeros(1, 3, 32, 32)), or give the layer its sizes."
            )
        return
    made = " Make an instance of it." if isinstance(model, type) else ""
    raise ValueError(
        f"Expected `self.model` to be a torch.nn.Module when __init__ ends. Received: model={model!r} ({type(model).__name__})."
        f"{made or ' Assign it after super().__init__(config).'}{_did_you_mean('model', present)}"
    )


def check_criterion(criterion: object) -> None:
    """Refuse a class in the place of a loss."""
    if isinstance(criterion, type):
        name = criterion.__name__
        raise ValueError(f"Expected `self.criterion` to be a loss. Received: the class {name}. Write {name}().")
    if criterion is not None and not callable(criterion):
        raise ValueError(
            f"Expected `self.criterion` to be a callable (pred, target) -> loss. Received: criterion={criterion!r}. Assign a loss "
            "module or a function."
        )


def check_scheduler(scheduler: object) -> None:
    """Refuse a name or a class in the place of a schedule."""
    if scheduler is not None and (isinstance(scheduler, type) or not callable(getattr(scheduler, "step", None))):
        raise ValueError(
            f"Expected `self.scheduler` to be a scheduler with a method step(). Received: scheduler={scheduler!r}. Make one over "
            "self.optimizer, or name it in `scheduler.type` and let the runner build it."
        )


def check_optimizer(optimizer: object, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse an optimizer that is none, or that has no parameter of this model."""
    if optimizer is None:
        return
    if isinstance(optimizer, (list, tuple, Mapping)):
        raise ValueError(
            f"Expected `self.optimizer` to be one optimizer. Received: a {type(optimizer).__name__} of {len(optimizer)}. Hold them "
            'together, danling.optim.JointOptimizer(first, second), or by name, {"first": first, "second": second}.'
        )
    if isinstance(optimizer, (str, type)) or not hasattr(optimizer, "param_groups"):
        raise ValueError(
            f"Expected `self.optimizer` to be a torch.optim.Optimizer. Received: optimizer={optimizer!r}. Make one over "
            "self.model.parameters(), or name it in `optim.type` and let the runner build it."
        )
    trainable = {id(parameter) for _, parameter in named_parameters if parameter.requires_grad}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    if trainable and not trainable & held:
        raise ValueError(
            f"Expected an optimizer over parameters of the model. Received: a {type(optimizer).__name__} over {len(held)} others, which "
            "would train nothing of it. Make it over self.model.parameters(), after the model is complete."
        )


def check_mapping(name: str, value: object) -> None:
    """Refuse a single dataset or loader where one for each split is expected."""
    if not isinstance(value, Mapping):
        raise ValueError(
            f"Expected `self.{name}` to be a mapping by split. Received: {name} of type {type(value).__name__}. Write "
            f"self.{name} = {{'train': ..., 'val': ...}}."
        )
    for split, data in value.items():
        if data is None or isinstance(data, (str, bytes, PathLike, type)):
            raise ValueError(
                f"Expected `self.{name}[{split!r}]` to hold samples. Received: {data!r}. Make a dataset of it, or leave the split out."
            )


def check_passes(dataloaders: Mapping[str, object], epochs: int | None) -> None:
    """Refuse a loader that ends for good where it has to be read in every epoch."""
    for split, loader in dataloaders.items():
        if isinstance(loader, Iterator) and epochs is not None and epochs > 1:
            raise ValueError(
                f"Expected a loader of split {split!r} that can be iterated again in each of {epochs} epochs. Received: a "
                f"{type(loader).__name__}, which ends for good. Pass an iterable with __iter__, such as a DataLoader."
            )


def check_metrics(metrics: object, reserved: Iterable[str]) -> None:
    """Refuse a metric whose name the library uses for a metric of its own."""
    taken = [name for name in reserved if isinstance(metrics, Mapping) and name in metrics]
    if taken:
        raise ValueError(
            f"Expected metrics by names of their own. Received: a metric called {taken[0]!r}, which is what the criterion returns. Call it "
            f"'{taken[0]}_of_...', or override `compute_loss`."
        )


def misnamed_overrides(runner_class: type, assigned: Iterable[str], unset: Iterable[str]) -> list[str]:
    """Return a sentence for every method and attribute of the user's that looks like one of the library's and is not."""
    own, known = _methods(runner_class, of_library=False), _methods(runner_class, of_library=True)
    sentences = []
    for name in sorted(own - known):
        meant = METHODS_ELSEWHERE.get(name) or slip_of(name, sorted(known))
        made_anyway = meant in ("build_optimizer", "build_scheduler") and meant.removeprefix("build_") not in unset
        if meant is not None and meant not in own and not made_anyway:
            sentences.append(f"The library does not call the method {name!r}: did you mean `{meant}`?")
    for component in unset:
        hint = _did_you_mean(component, assigned)
        sentences += [f"`self.{component}` is not set.{hint}"] if hint else []
    return sentences


def _methods(runner_class: type, *, of_library: bool) -> set[str]:
    classes = [kind for kind in runner_class.__mro__ if kind.__module__.startswith("danling.") == of_library]
    return {
        name
        for kind in classes
        for name, value in vars(kind).items()
        if callable(value) and not name.startswith("_") and not isinstance(value, type)
    }


def _did_you_mean(component: str, present: Iterable[str]) -> str:
    for name in present:
        if name in _ASSIGNED or name == "mode" or name.startswith("_"):
            continue
        if ATTRIBUTES_ELSEWHERE.get(name) == component or slip_of(name, [component]) == component:
            return f" You have set `self.{name}`: did you mean `self.{component}`?"
    return ""


def warn_of(messages: Callable[[], Iterable[str]]) -> None:
    """Log sentences that are a hint only: what goes wrong while they are made must not end a run."""
    try:
        found = list(messages())
    except Exception:
        logger.debug("The settings could not be looked through.", exc_info=True)
        return
    for message in found:
        logger.warning("%s", message)


# What is trained


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
    def of(cls, named: Iterable[tuple[str, nn.Parameter]], optimized: Iterable[nn.Parameter]) -> Coverage:
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
