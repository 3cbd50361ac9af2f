"""Which components of users are refused, and which names look like one of the library's, before a runner is made of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from danling.config.names import ATTRIBUTES_ELSEWHERE, METHODS_ELSEWHERE, closest_typo
from danling.optim.state import modal
from danling.utils.hooks import is_overridden

from .batch_weights import criterion_setting, smooths_without_weight

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner

_ASSIGNED = ("model", "criterion", "optimizer", "scheduler", "datasets", "dataloaders", "metrics")


# Components, before anything is made of them


def check_components(runner: TorchRunner) -> None:
    """Refuse components of the wrong kind."""
    model, criterion, optimizer = runner.model, runner.criterion, runner.optimizer
    if not isinstance(model, nn.Module):
        made = " Make an instance of it." if isinstance(model, type) else ""
        raise ValueError(
            f"Expected `self.model` to be a torch.nn.Module when __init__ ends. Received: model={model!r} ({type(model).__name__})."
            f"{made or ' Assign it after super().__init__(config).'}{_did_you_mean('model', vars(runner))}"
        )
    # The optimizer, DDP and the averages need the shapes before the first batch.
    lazy = next((name for name, parameter in model.named_parameters() if is_lazy(parameter)), None)
    if lazy is not None:
        raise ValueError(
            f"Expected a model whose weights are made. Received: {lazy!r} of a lazy layer, which is made by the first batch. Call the "
            "model once in __init__, such as self.model(torch.zeros(1, 3, 32, 32)), or give the layer its sizes."
        )
    # A class is callable too: called with prediction and target, it would return an object and no loss.
    is_class = isinstance(criterion, type)
    if is_class or not (criterion is None or callable(criterion)):
        made = " Assign a loss module or a function."
        if is_class:
            made = f" Write {criterion.__name__}()."
        raise ValueError(
            f"Expected `self.criterion` to be a callable (pred, target) -> loss. Received: criterion={criterion!r}.{made}"
        )
    check_smoothing(criterion)
    check_kinds(runner)
    if optimizer is not None:
        # One that has some parameters of the model and others is named when a training begins, not refused.
        trained = {
            id(parameter) for _, parameter in runner.named_parameters() if parameter.requires_grad
        }
        optimized = {
            id(parameter) for group in optimizer.param_groups for parameter in group["params"]
        }
        if trained and not trained & optimized:
            raise ValueError(
                f"Expected an optimizer over parameters of the model. Received: a {type(optimizer).__name__} over {len(optimized)} others, "
                "which would train nothing of it. Make it over self.model.parameters(), after the model is complete."
            )
    # `self.ema` is often a copy of the model in a program that comes from a plain loop.
    if runner.ema is not None and not callable(getattr(runner.ema, "applied", None)):
        raise ValueError(
            f"Expected `self.ema` to be averages, such as a danling.training.EMA. Received: ema of type {type(runner.ema).__name__}. Set "
            "ema.enabled=true, and the runner makes and updates the averages; give your own copy of the model another name."
        )
    for name in ("datasets", "dataloaders"):
        splits = getattr(runner, name)
        if not isinstance(splits, Mapping):
            raise ValueError(
                f"Expected `self.{name}` to be a mapping by split. Received: {name} of type {type(splits).__name__}. Write "
                f"self.{name} = {{'train': ..., 'val': ...}}."
            )
        for split, data in splits.items():
            if data is None or isinstance(data, (str, bytes, PathLike, type)):
                raise ValueError(
                    f"Expected `self.{name}[{split!r}]` to have samples. Received: {data!r}. Make a dataset of it, or leave the split out."
                )
            if (
                name == "datasets"
                and isinstance(data, tuple)
                and len(data) > 1
                and is_columns(data)
            ):
                raise ValueError(
                    f"Expected `self.datasets[{split!r}]` to have samples. Received: a tuple of {len(data)} tensors or arrays of "
                    f"{len(data[0])} rows each, which is a dataset of {len(data)} samples. Write TensorDataset(inputs, targets) with "
                    "tensors; where each tensor is a sample, put them into a list."
                )
            if isinstance(data, Iterator) and runner.epochs is not None and runner.epochs > 1:
                raise ValueError(
                    f"Expected a loader of split {split!r} that can be iterated again in each of {runner.epochs} epochs. Received: a "
                    f"{type(data).__name__}, which ends for good. Pass an iterable with __iter__, such as a DataLoader."
                )


def check_smoothing(criterion: object) -> None:
    """Refuse a criterion whose loss of some samples is infinite or not, by the batch that they are in."""
    if smooths_without_weight(criterion):
        raise ValueError(
            "Expected class weights above 0 with label_smoothing: torch divides the smoothed loss by the weight of the targets, so that "
            f"that of a micro-batch with targets of weight 0 alone is infinite. Received: criterion={criterion!r} with "
            f"weight={criterion_setting(criterion, 'weight')!r}. Give these classes a small weight, such as 1e-6; or use "
            "reduction='sum'; or ignore_index, which leaves out their samples."
        )


def check_kinds(runner: TorchRunner) -> None:
    """Refuse an optimizer or a scheduler that is none, and a scheduler that no checkpoint can hold where some are saved."""
    optimizer, scheduler = runner.optimizer, runner.scheduler
    is_scheduler = callable(getattr(scheduler, "step", None)) and not isinstance(scheduler, type)
    if scheduler is not None and not is_scheduler:
        raise ValueError(
            f"Expected `self.scheduler` to be a scheduler with a method step(). Received: scheduler={scheduler!r}. Make one over "
            "self.optimizer, or name it in `scheduler.type` and let the runner build it."
        )
    missing = [
        name
        for name in ("state_dict", "load_state_dict")
        if not callable(getattr(scheduler, name, None))
    ]
    # A run that saves nothing needs no state of its schedule.
    if scheduler is not None and missing and not runner.config.checkpoint.load_only:
        raise ValueError(
            f"Expected `self.scheduler` to be a scheduler that a checkpoint can hold. Received: a {type(scheduler).__name__} without "
            f"{' and '.join(missing)}. Derive it from torch.optim.lr_scheduler.LRScheduler, or give it both: a dictionary of its numbers, "
            "and what puts them back."
        )
    if isinstance(optimizer, (list, tuple)):
        raise ValueError(
            f"Expected `self.optimizer` to be one optimizer. Received: a {type(optimizer).__name__} of {len(optimizer)}. Hold them "
            'together, danling.optim.JointOptimizer(first, second), or by name, {"first": first, "second": second}.'
        )
    is_optimizer = hasattr(optimizer, "param_groups") and not isinstance(optimizer, type)
    if optimizer is not None and not is_optimizer:
        raise ValueError(
            f"Expected `self.optimizer` to be a torch.optim.Optimizer. Received: optimizer={optimizer!r}. Make one over "
            "self.model.parameters(), or name it in `optim.type` and let the runner build it."
        )


def is_columns(data: tuple[object, ...]) -> bool:
    """Whether a tuple has the form (inputs, targets): tensors or arrays with one number of rows, and not all of one shape and dtype."""
    # Samples that are tensors have one shape and dtype, as a rule; inputs and targets differ in one of them.
    columns = [
        part for part in data if isinstance(part, Tensor) or type(part).__module__ == "numpy"
    ]
    shapes = [tuple(getattr(part, "shape", ())) for part in columns]
    if len(columns) < len(data) or not all(shapes):
        return False
    kinds = {(shape, str(getattr(part, "dtype", None))) for shape, part in zip(shapes, columns)}
    return len({shape[0] for shape in shapes}) == 1 and len(kinds) > 1


def misnamed(runner: TorchRunner, built_optimizer: object, built_scheduler: object) -> list[str]:
    """Return a sentence for every method and attribute of the user's that looks like one of the library's and is not."""
    # Names of methods by who has written the class; a mixin of another package counts as the program's.
    library, own = set[str](), set[str]()
    for kind in type(runner).__mro__:
        names = {
            name
            for name, value in vars(kind).items()
            if callable(value) and not (name.startswith("_") or isinstance(value, type))
        }
        if kind.__module__.startswith("danling."):
            library.update(names)
        else:
            own.update(names)
    has_data = bool(runner.datasets or runner.dataloaders)
    own_loss = is_overridden(runner, "compute_loss") or is_overridden(runner, "train_step")
    given = {
        "criterion": runner.criterion is not None or own_loss,
        "optimizer": runner.optimizer is not None,
        "scheduler": runner.scheduler is not None,
        "datasets": has_data,
        "dataloaders": has_data,
    }
    # A program that sets a component may call such a method of its own for it.
    set_by_program = {
        "build_optimizer": runner.optimizer is not None and runner.optimizer is not built_optimizer,
        "build_scheduler": runner.scheduler is not None and runner.scheduler is not built_scheduler,
        "self.metrics": runner.metrics is not None
        or is_overridden(runner, "summarize")
        or is_overridden(runner, "evaluate_step"),
        "self.datasets": has_data,
        "dataloader.collate_fn": not _collates_by_default(runner),
    }
    sentences = []
    for name in sorted(own - library):
        meant = METHODS_ELSEWHERE.get(name) or closest_typo(name, sorted(library))
        if meant is not None and meant not in own and not set_by_program.get(meant, False):
            sentences.append(
                f"The library does not call the method {name!r}: did you mean `{meant}`?"
            )
    sentences += [
        f"The library does not call `self.{name}`: did you mean `dataloader.collate_fn` of the configuration?"
        for name in ("collate_fn", "data_collator")
        if callable(vars(runner).get(name)) and not set_by_program["dataloader.collate_fn"]
    ]
    missing = [name for name, is_given in given.items() if not is_given]
    hints = {name: _did_you_mean(name, vars(runner)) for name in missing}
    sentences += [f"`self.{name}` is not set.{hint}" for name, hint in hints.items() if hint]
    return sentences


def _collates_by_default(runner: TorchRunner) -> bool:
    """Whether the library builds all loaders, and no setting says how samples are made into a batch."""
    has_own = bool(runner.dataloaders.keys() - runner.datasets.keys())
    builds = not (
        is_overridden(runner, "build_dataloader") or is_overridden(runner, "build_dataloaders")
    )
    if has_own or not runner.datasets or not builds:
        return False
    section = runner.config.get("dataloader", None) or {}
    sections = [section, *(value for value in section.values() if isinstance(value, Mapping))]
    return not any("collate_fn" in each for each in sections)


def _did_you_mean(component: str, present: Iterable[str]) -> str:
    # `mode` is one letter away from `model`, and an attribute of every runner.
    names = [
        name for name in present if name not in (*_ASSIGNED, "mode") and not name.startswith("_")
    ]
    for name in names:
        if component in (ATTRIBUTES_ELSEWHERE.get(name), closest_typo(name, [component])):
            return f" You have set `self.{name}`: did you mean `self.{component}`?"
    return ""


# Preparation


def check_settings(runner: TorchRunner) -> None:
    """Refuse settings that the stack cannot do. May be called on one rank."""
    config = runner.config
    in_pipeline = int(config.parallel.axes.pipeline) != 1 and runner.stack == "parallel"
    divides_names = in_pipeline or runner.stack == "deepspeed"
    if config.checkpoint.trainable_only and divides_names:
        received = "parallel.axes.pipeline above 1" if in_pipeline else "stack='deepspeed'"
        raise ValueError(
            "Expected a stack on which every rank knows all weights for checkpoint.trainable_only=true. Received: "
            f"{received}. Leave it out there; for adapters alone call `runner.save_pretrained(directory)`."
        )


def check_retries(runner: TorchRunner, *, finds_micro_batch_size: bool) -> None:
    """Refuse to look for the size of micro-batches where a rank that is out of memory would leave others waiting."""
    if not finds_micro_batch_size:
        return
    reason = runner.preparation.forward_communicates(runner.unwrapped_model)
    if reason is not None:
        raise ValueError(
            "Expected dataloader.micro_batch_size to be a number where forward or backward communicate: a rank that is out of memory "
            f"would leave the others waiting. Received: dataloader.micro_batch_size='auto' with {reason}. Set the most samples that "
            "fit a rank."
        )


def check_reduced(runner: TorchRunner) -> None:
    """Refuse a model on the stack `ddp` whose gradients nothing would reduce over the ranks."""
    if runner.stack != "ddp":
        return
    trains = any(parameter.requires_grad for _, parameter in runner.named_parameters())
    hooks = ("build_reduction", "complete_gradients", "unscale_gradients")
    reduced_by_user = any(is_overridden(runner, hook) for hook in hooks)
    runner.preparation.check_reduced(runner.model, trains=trains, reduced_by_user=reduced_by_user)


def check_modes(runner: TorchRunner) -> None:
    """Refuse an optimizer that exchanges the weights between training and evaluation on a stack that cannot keep both."""
    if modal(runner.optimizer) and not runner.model_states.keeps_modes:
        raise ValueError(
            f"Expected an optimizer with one set of weights on the stack {runner.stack!r}. Received: a "
            f"{type(runner.optimizer).__name__}, whose train() and eval() exchange them. Train on 'ddp', or take another optimizer."
        )
