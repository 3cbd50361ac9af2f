"""Attaches the tape to torch and to the stacks of a script, each once it has been imported; see `site/sitecustomize.py`."""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from . import stacks
from .samples import CannotCompare
from .tape import VARIABLE, Job, Tape, is_forward


@functools.cache
def active() -> Tape:
    """Return the tape of this process."""
    return Tape(Job(**json.loads(os.environ[VARIABLE])))


def watched(source: Iterator[Any]) -> Iterator[Any]:
    """Yield from an iterator that is no `DataLoader`'s, recorded or replayed."""
    tape = active()
    key = _Key()
    while True:
        try:
            batch = tape.fetch(key, lambda: next(source))
        except StopIteration:
            return
        yield batch


class _Key:
    pass


def _guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """Have an error of the tape be known as one, and not as one of the script."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except CannotCompare as error:
            active().fail(str(error))
        except Exception:
            active().fail("the recording fails:\n" + traceback.format_exc())

    return call


def torch_loaded() -> None:
    """Attach the tape."""
    tape = active()
    _watch_loaders(tape)
    _watch_modules(tape)
    _watch_clipping(tape)
    _watch_steps(tape)
    if tape.job.checks and not tape.job.keeps_dropout:
        _switch_dropout_off()


def _watch_loaders(tape: Tape) -> None:
    from torch.utils.data import DataLoader
    from torch.utils.data.dataloader import _BaseDataLoaderIter

    if not tape.job.checks:
        return
    fetch, length, start = _BaseDataLoaderIter.__next__, DataLoader.__len__, DataLoader.__init__

    # Lightning reads the signature, to make a loader anew with another sampler.
    @functools.wraps(start)
    def started(self: Any, *args: Any, **kwargs: Any) -> None:
        tape.loaders.made(self)
        start(self, *args, **kwargs)

    @functools.wraps(fetch)
    def following(self: Any) -> Any:
        return tape.fetch(self, lambda: fetch(self))

    @functools.wraps(length)
    def counted(self: Any) -> int:
        return tape.loaders.length(self, lambda: length(self))

    _BaseDataLoaderIter.__next__ = following  # type: ignore[method-assign]
    DataLoader.__len__ = counted  # type: ignore[method-assign]
    DataLoader.__init__ = started  # type: ignore[method-assign]


def _watch_modules(tape: Tape) -> None:
    call, backward = nn.Module.__call__, torch.autograd.backward
    enters, note = _guarded(tape.enters), _guarded(tape.backward)
    end = _guarded(tape.backward_ended)

    @functools.wraps(call)
    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Dynamo would trace the tape into the graph.
        if torch.compiler.is_compiling():
            return call(self, *args, **kwargs)
        enters(self, (args, kwargs))
        tape._depth += 1
        try:
            output = call(self, *args, **kwargs)
        finally:
            tape._depth -= 1
        tape.leaves(output)
        return output

    @functools.wraps(backward)
    def begun(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        # Reentrant checkpointing calls it again within a backward, which is no pass of the script.
        if is_forward():
            note(tensors)
            backward(tensors, *args, **kwargs)
            end()
        else:
            backward(tensors, *args, **kwargs)

    nn.Module.__call__ = called  # type: ignore[method-assign]
    torch.autograd.backward = begun
    kinds: list[Any] = [nn.Module, torch.optim.Optimizer]
    for kind in kinds:
        kind.zero_grad = _noting(tape.forgets, kind.zero_grad)


def _noting(note: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        note()
        return function(*args, **kwargs)

    return call


def _watch_clipping(tape: Tape) -> None:
    clip_norm, clip_value = nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_
    with_norm = nn.utils.clip_grads_with_norm_

    def keep(parameters: Any) -> Any:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if tape.job.checks and not tape.inside:
            tape.clipping(stacks.gradients_of(params))
        return params

    keep = _guarded(keep)

    @functools.wraps(clip_norm)
    def clip_grad_norm_(parameters: Any, *args: Any, **kwargs: Any) -> Tensor:
        params = keep(parameters)
        with tape.unseen():
            norm = clip_norm(params, *args, **kwargs)
        tape.clipped(norm)
        return norm

    @functools.wraps(clip_value)
    def clip_grad_value_(parameters: Any, *args: Any, **kwargs: Any) -> None:
        clip_value(keep(parameters), *args, **kwargs)

    @functools.wraps(with_norm)
    def clip_grads_with_norm_(
        parameters: Any, max_norm: float, total_norm: Tensor, *args: Any, **kwargs: Any
    ) -> None:
        with_norm(keep(parameters), max_norm, total_norm, *args, **kwargs)
        tape.clipped(total_norm)

    # In both places, since programs take the functions from either.
    for module in (nn.utils, nn.utils.clip_grad):
        for function in (clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_):
            setattr(module, function.__name__, function)


def _watch_steps(tape: Tape) -> None:
    from torch.optim import optimizer as hooks

    before, after = _guarded(tape.before), _guarded(tape.after)

    def begins(optimizer: Any, args: Any, kwargs: Any) -> Any:
        # A step within that of another optimizer, such as ZeroRedundancyOptimizer, is a part of it.
        if tape.inside or (tape.running is not None and tape.running is not optimizer):
            return None
        tape.running = optimizer
        # `args[0]` is the optimizer.
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        trained = tape.trained_by(optimizer)
        if not callable(closure):
            before(trained)
            return None
        calls: list[int] = []

        def closed() -> Any:
            # As Lightning has it: backward and clipping happen in the step.
            value = closure()
            if not calls:
                before(trained)
            calls.append(1)
            return value

        return (args[0], closed, *args[2:]), {k: v for k, v in kwargs.items() if k != "closure"}

    def ended(optimizer: Any, args: Any, kwargs: Any) -> None:
        if tape.running is optimizer:
            tape.running = None
            after(tape.trained_by(optimizer))

    hooks.register_optimizer_step_pre_hook(begins)
    hooks.register_optimizer_step_post_hook(ended)


def _switch_dropout_off() -> None:
    """Have masks be none, so that they need not be the same; what a script draws itself is seen."""
    attend = functional.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        return attend(query, key, value, attn_mask, 0.0, *args, **kwargs)

    for name in (
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "alpha_dropout",
        "feature_alpha_dropout",
    ):
        setattr(functional, name, _without_dropout(getattr(functional, name)))
    functional.scaled_dot_product_attention = attention


def _without_dropout(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def kept(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return input

    return kept


def fsdp_loaded() -> None:
    """Watch the clipping of FSDP1."""
    kind = sys.modules["torch.distributed.fsdp"].FullyShardedDataParallel
    clip = kind.clip_grad_norm_

    def clip_grad_norm_(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        tape = active()
        with stacks.whole_parameters(self if self in stacks.fsdp_roots() else None):
            named = self.named_parameters()
            tape.clipping(
                {
                    stacks.clean(name): stacks.piece(p.grad, p)
                    for name, p in named
                    if p.grad is not None
                }
            )
        with tape.unseen():
            norm = clip(self, *args, **kwargs)
        tape.clipped(norm)
        return norm

    kind.clip_grad_norm_ = clip_grad_norm_


def accelerate_loaded() -> None:
    """Record what `dispatch_batches` hands to each rank, and not what the first one reads."""
    kind: Any = getattr(sys.modules["accelerate.data_loader"], "DataLoaderDispatcher", None)
    tape = active()
    if kind is None or tape.job.replays or not tape.job.checks:
        return
    iterate = kind.__iter__

    def handed_out(self: Any) -> Iterator[Any]:
        source = iterate(self)

        def following() -> Any:
            with tape.unseen():
                # Unseen, since the first rank reads the batches of all ranks here; each rank gets its own below.
                return next(source)

        while True:
            try:
                yield tape.fetch(source, following)
            except StopIteration:
                return

    kind.__iter__ = handed_out


def deepspeed_comm_loaded() -> None:
    """Leave out the operator of shared memory, which is compiled at a start and waits for ever where another process was killed."""
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]


def deepspeed_loaded() -> None:
    """Count the steps of an engine at the boundaries of accumulation; its inner optimizers make others."""
    kind = sys.modules["deepspeed.runtime.engine"].DeepSpeedEngine
    step = kind.step
    engines: weakref.WeakKeyDictionary[Any, stacks.Engine] = weakref.WeakKeyDictionary()

    def stepped(self: Any, *args: Any, **kwargs: Any) -> Any:
        tape = active()
        trained = engines.setdefault(self, stacks.Engine(self))
        is_update = self.is_gradient_accumulation_boundary()
        if is_update:
            tape.before(trained)
        with tape.unseen():
            made = step(self, *args, **kwargs)
        if is_update:
            norm = getattr(self, "get_global_grad_norm", lambda: None)()
            if norm is not None and getattr(self, "gradient_clipping", lambda: 0.0)():
                tape.clipped(norm)
            tape.after(trained)
        return made

    kind.step = stepped
