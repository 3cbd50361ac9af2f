"""A run in which bits of live tensors flip at any instant of an update: one bit an update, of a kind and at a place drawn from a seed."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from models.gpt import GPT
from torch import Tensor, nn

import danling as dl
from danling.utils.tensors import local_part

from .layouts import LENGTH, VOCABULARY, Sentences
from .toys import NoisyPoints

STATE = ("weight", "moment", "buffer")
KINDS: Mapping[str, tuple[str, ...]] = {
    "fetch": STATE,
    "forward": (*STATE, "batch"),
    "loss": (*STATE, "batch", "loss"),
    "backward": ("gradient",),
    "after backward": (*STATE, "batch", "gradient"),
    "clip": (*STATE, "gradient"),
    "step": (*STATE, "gradient"),
    "after step": (*STATE, "gradient"),
    "end": STATE,
}
"""What may flip at each instant: before it is used for the last time."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass
class Flip:
    """A bit that flips.

    Attributes:
        kind: Of tensor.
        instant: When in the update.
        call: At which of the times that the update comes there.
        step: Number of the update.
        struck: Whether it has.
    """

    kind: str
    instant: str
    call: int
    step: int
    struck: bool = False


def flip_bit(tensor: Tensor, draw: random.Random, *, counts: bool = False) -> None:
    """Flip one bit of a tensor in memory, behind the back of autograd.

    Args:
        tensor: The tensor.
        draw: Draws the bit.
        counts: Take one of the upper bits of the largest element, which the sum with another gradient does not round away.
    """
    part = local_part(tensor.data)
    number, bits = draw.randrange(part.numel()), 8 * part.element_size()
    number = int(part.abs().argmax()) if counts else number
    flat = torch.as_strided(part, (part.numel(),), (1,)) if part.is_contiguous() else part.reshape(-1)
    assert flat.data_ptr() == part.data_ptr()
    view = flat.view(_BITS[part.element_size()])
    bit = draw.randrange(bits // 2 if counts else 0, bits)
    view[number] ^= (1 << bit) - (1 << bits if part.element_size() > 1 and bit == bits - 1 else 0)


STRIKERS: dict[int, Striker] = {}
"""What flips bits of a runner, by its identity: no attribute, so that nothing of what it notes is put back with an update."""


class Striker:
    """Flips bits of a runner.

    Args:
        seed: What the flips are drawn from.
        ranks: On which they are.
        every: Updates from one flip to the next.
        kinds: Of tensors that are struck; `None` for all.
        instants: At which they are; `None` for all.
        only: Update with the only flip; `None` for all.
    """

    runner: Flipped

    def __init__(
        self,
        seed: int,
        *,
        ranks: tuple[int, ...] = (0,),
        every: int = 1,
        kinds: tuple[str, ...] | None = None,
        instants: tuple[str, ...] | None = None,
        only: int | None = None,
    ) -> None:
        # No generator: one that a dataset can reach is seeded at every sample.
        self.seed = seed
        self.ranks, self.every, self.only = ranks, every, only
        self.choices = [
            (kind, instant)
            for instant, found in KINDS.items()
            for kind in found
            if (instants is None or instant in instants) and (kinds is None or kind in kinds)
        ]
        self.flips: list[Flip] = []
        self.seen: dict[str, int] = {}
        self.held: dict[str, Any] = {}

    def plan(self) -> Flip:
        """Return the flip of this update, which is drawn when it begins; ranks draw alike, whoever is struck."""
        step = self.runner.state.train.global_step + 1
        if not self.flips or self.flips[-1].step != step:
            draw = random.Random(f"{self.seed}, {step}")
            kind, instant = draw.choice(self.choices)
            call, rank = draw.randrange(2), draw.choice(self.ranks)
            due = step > 1 and step % self.every == 0 and rank == self.runner.rank and self.only in (None, step)
            self.flips.append(Flip(kind, instant, call, step, struck=not due))
            self.seen = {}
        return self.flips[-1]

    def strike(self, instant: str, **held: Any) -> None:
        """Flip the bit, where it is due at this instant."""
        if not self.runner._session.running:
            return
        self.held.update(held)
        flip = self.plan()
        if flip.struck or flip.instant != instant:
            return
        seen = self.seen[instant] = self.seen.get(instant, 0) + 1
        if seen <= flip.call and instant not in ("fetch", "end"):
            return
        flip.struck = True
        draw = random.Random(f"{self.seed}, {flip.step}, {flip.kind}")
        flip_bit(draw.choice(self.tensors(flip.kind)), draw, counts=instant == "backward")

    def tensors(self, kind: str) -> list[Tensor]:
        """Return the live tensors of a kind."""
        # Not those of the model, which FSDP exchanges for gathered copies while it computes.
        parameters = [parameter for group in self.runner.optimizer.param_groups for parameter in group["params"]]
        if kind == "weight":
            return [parameter for parameter in parameters if local_part(parameter).numel()]
        if kind == "moment":
            found = [value for state in self.runner.optimizer.state.values() for value in state.values()]
            return [value for value in found if isinstance(value, Tensor) and local_part(value).numel()]
        if kind == "buffer":
            return list(self.runner.unwrapped_model.buffers())
        if kind == "gradient" and "of" not in self.held:
            return [gradient for _, gradient in self.runner.reduction.named_gradients() if local_part(gradient).numel()]
        return [self.held[{"gradient": "of"}.get(kind, kind)]]


class FlippedPoints(NoisyPoints):
    """Points, at the reading of which something may flip."""

    striker: Striker | None = None

    def __getitem__(self, index: int) -> dict[str, Any]:
        if self.striker is not None:
            self.striker.strike("fetch")
        return super().__getitem__(index)


class Flipped(dl.Runner):
    """A network with statistics, dropout and a constant buffer, in which bits flip.

    Args:
        config: The configuration.
        striker: Flips them; `None` for none.
    """

    def __init__(self, config: dict[str, Any], striker: Striker | None = None) -> None:
        super().__init__(config)
        if striker is not None:
            STRIKERS[id(self)] = striker
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
        self.model.register_buffer("scale", torch.full((3,), 1.5))
        self.criterion = nn.CrossEntropyLoss()
        points = FlippedPoints(64)
        self.datasets = {"train": points}
        if striker is not None:
            striker.runner, points.striker = self, striker
        self.model[2].register_forward_hook(lambda *_: self.strike("forward"))

    @property
    def striker(self) -> Striker | None:
        """What flips bits of this runner."""
        return STRIKERS.get(id(self))

    def strike(self, instant: str, **held: Any) -> None:
        """Flip a bit, where it is due at this instant."""
        if self.striker is not None:
            self.striker.strike(instant, **held)

    # Instants

    def train_step(self, data: dict[str, Any]) -> tuple[Any, Tensor]:
        """Strike in the forward and after the backward; a hook strikes the gradient on its way."""
        self.strike("", batch=data["input"])
        watched: Any = dict(self.named_parameters())["4.weight"]
        handle = watched.register_hook(self._backward)
        found = super().train_step((data["input"], data["target"]))
        handle.remove()
        self.strike("after backward")
        return found

    def _backward(self, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        self.strike("backward", of=gradient)
        if self.striker is not None:
            del self.striker.held["of"]
        return gradient

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        """Strike before the backward."""
        loss = super().compute_loss(pred * self.scale(), target)
        self.strike("loss", loss=loss)
        return loss

    def scale(self) -> Tensor:
        """Return the constant buffer."""
        return next(buffer for name, buffer in self.unwrapped_model.named_buffers() if name == "scale")

    def clip_gradients(self, grad_norm: Tensor) -> None:
        """Strike before the gradient is clipped."""
        self.strike("clip")
        super().clip_gradients(grad_norm)

    def optimizer_step(self) -> None:
        """Strike before and after the step."""
        self.strike("step")
        super().optimizer_step()
        self.strike("after step")

    def zero_gradients(self) -> None:
        """Strike at the end of an update."""
        self.strike("end")
        super().zero_gradients()


class FlippedText(Flipped):
    """A language model, for stacks that divide it over tensor and pipeline ranks.

    Args:
        config: The configuration.
        striker: Flips bits between forward and end.
    """

    def __init__(self, config: dict[str, Any], striker: Striker | None = None) -> None:
        super().__init__(config, striker)
        # One block for each stage: a second one takes a tensor rank as long again, and shows nothing else.
        depth = self.config.parallel.axes.pipeline
        self.model = GPT(VOCABULARY, context=LENGTH, width=16, depth=depth, heads=4, tied=False, dropout=0.1)
        self.datasets = {"train": Sentences(64)}

    def train_step(self, data: Any) -> tuple[Any, Tensor]:
        """Strike after the backward."""
        found = super(Flipped, self).train_step(data)
        self.strike("after backward")
        return found

    def compute_loss(self, pred: Tensor, target: Tensor) -> Tensor:
        """Return the mean over the targets that count."""
        return super(Flipped, self).compute_loss(pred.flatten(0, 1), target.flatten())


class Heard(logging.Handler):
    """Notes at which update something was said of a mismatch.

    Args:
        runner: The runner.
    """

    def __init__(self, runner: Flipped) -> None:
        super().__init__(logging.WARNING)
        self.runner = runner
        self.said: list[tuple[int, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note it, with the number of the last flip."""
        if "Healed" in record.getMessage():
            striker = self.runner.striker
            self.said.append((striker.flips[-1].step if striker is not None else 0, record.getMessage()))


def state_of(runner: Flipped) -> dict[str, Tensor]:
    """Return weights, buffers and moments of a run."""
    moments = {
        f"moment/{name}/{key}": local_part(value).clone()
        for name, parameter in runner.named_parameters()
        for key, value in runner.optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }
    weights = {f"weight/{n}": local_part(p.detach()).clone() for n, p in runner.named_parameters()}
    buffers = {f"buffer/{n}": b.clone() for n, b in runner.unwrapped_model.named_buffers()}
    return {**weights, **buffers, **moments}


def settings(root: Any, **more: Any) -> dict[str, Any]:
    """Return the configuration of a run that checks all of its updates."""
    own = {"seed": 1, "steps": 30, "dir": str(root), "log_interval": 1000, "checkpoint.load_only": True}
    loading = {"batch_size": 4}
    optim = {"type": "adamw", "lr": 0.01}
    checked = {"deterministic": True, "audit.replay_interval": 1, "accum_steps": 2, "max_grad_norm": 1.0}
    return {**own, "optim": optim, "dataloader": loading, **checked, **more}


def train_flipped(
    config: dict[str, Any], striker: Striker | None = None, kind: type[Flipped] = Flipped
) -> tuple[dict[str, Tensor], list[Flip], list[tuple[int, str]]]:
    """Train a run in which bits flip; return its end, the flips, and what was said, with the update of the last flip before."""
    STRIKERS.clear()
    with kind(config, striker) as runner:
        heard, logger = Heard(runner), logging.getLogger("danling")
        logger.addHandler(heard)
        try:
            runner.train()
        finally:
            logger.removeHandler(heard)
        return state_of(runner), [] if striker is None else striker.flips, heard.said
