"""Finding out from a first batch whether the loss of a model compares each position with its own label or with the next one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from .targets import IGNORED_LABEL, told_to_shift

Answer = Literal["shifted", "unshifted", "neither"]

_TRIES = 8
"""Batches that are looked at before it is said that they do not tell."""

_ELEMENTS_AT_ONCE = 2**24
"""How many logits are copied at once: all of those of a large vocabulary would need as much memory as the forward."""


class LabelShift:
    """Whether a model shifts the labels of the loss that it returns, found out once where its class does not tell.

    A loss that equals the mean cross-entropy of logits and labels, or that of logits and the labels of the next position, is averaged
    over the labels that count in it. Where the two are equal, as those of a head that begins with zeros, the positions that get a
    gradient decide. No communication, except that all ranks are to be handed each other's answers once, see `agree`.
    """

    def __init__(self) -> None:
        self.is_open = True
        """Whether a batch is still to be looked at."""
        self.complaint: str | None = None
        """What is to be said where the loss is neither of the two."""
        self._model: Any = None
        self._answer: Answer | None = None
        self._told = False
        self._tries = 0

    def shifts(self, model: object) -> bool:
        """Whether the labels of the next position count, as far as it is known; a model that was not looked at before opens the question.

        Args:
            model: The model, out of the wrapper of its stack.
        """
        if model is not self._model:
            told = told_to_shift(model)
            self._model, self._told, self._answer = model, bool(told), None
            self.is_open, self.complaint, self._tries = told is None, None, 0
        return self._told or self._answer == "shifted"

    def observe(self, loss: Tensor, logits: Any, labels: object) -> bool:
        """Look at the loss of a batch; call it while `is_open`, before the backward.

        Args:
            loss: What the model returned, 0-dim.
            logits: `(batch, sequence, classes)`; anything else cannot be compared.
            labels: Integers `(batch, sequence)`, of which -100 does not count; of others there is nothing to find out.

        Returns:
            Whether another weight of this batch follows from it.
        """
        if not isinstance(labels, Tensor):
            return False
        if labels.ndim != 2 or labels.is_floating_point() or labels.dtype == torch.bool:
            self.is_open = False
            return False
        if labels.shape[1] < 2 or labels.numel() == 0:
            return False
        problem = _incomparable(loss, logits, labels)
        if problem is None:
            averages = mean_cross_entropies(logits, labels)
            answer = _nearest(loss, averages, logits) or _by_gradient(loss, logits, labels)
            if answer is None:
                self._tries += 1
                if self._tries < _TRIES:
                    return False
            if answer in ("shifted", "unshifted"):
                self._settle(answer)
                return answer == "shifted"
            problem = f"loss={float(loss.detach()):.6g}, where these are {averages[0]:.6g} and {averages[1]:.6g}"
        self._settle("neither", problem)
        return False

    def observe_afterwards(self, loss: Tensor, logits: object, labels: object) -> None:
        """Look at the loss of a batch after its backward, where it did not come by before: too late to weigh this one by it.

        Args:
            loss: What the model returned, 0-dim.
            logits: As for `observe`.
            labels: As for `observe`.
        """
        if self.observe(loss.detach(), logits, labels):
            # Weighing from now on would make a resumed run another one, whose first batch comes too late again.
            self._settle("neither", "a loss of the labels of the next position, seen only after its backward")

    @property
    def answer(self) -> Answer | None:
        """What was found out on this rank, `None` where nothing was."""
        return self._answer

    def agree(self, answers: Iterable[Answer | None]) -> bool:
        """Take over what was found out on any rank, so that all weigh alike from now on; return whether there is a new complaint.

        Args:
            answers: The `answer` of every rank.
        """
        before = self.complaint
        found = {answer for answer in answers if answer is not None}
        if len(found) == 1 and self._answer is None:
            self._settle(found.pop(), "a loss on another rank that is neither")
        elif len(found) > 1 and self._answer != "neither":
            self._settle("neither", "losses that are not the same one on all ranks")
        return self.complaint not in (None, before)

    def _settle(self, answer: Answer, received: str = "") -> None:
        self._answer, self.is_open = answer, False
        self.complaint = None
        if answer == "neither":
            self.complaint = (
                "Expected the loss that the model returns to be the mean cross-entropy of its logits and labels, or that of its logits and "
                f"the labels of the next position, so that what it is averaged over is known. Received: {received}. All labels other than "
                f"{IGNORED_LABEL} are counted, which is another gradient of accumulated or distributed updates where the loss is averaged "
                "over something else. Override `batch_weight(data, target)`, or set `shifts_labels` to True or False on the model."
            )


def mean_cross_entropies(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Return the mean cross-entropy of logits with labels, and that with the labels of the next position; NaN where none counts.

    Args:
        logits: `(batch, sequence, classes)`.
        labels: Integers `(batch, sequence)`, of which -100 does not count.
    """
    shifted = F.pad(labels[:, 1:], (0, 1), value=IGNORED_LABEL)
    both = (labels, shifted)
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    width = max(_ELEMENTS_AT_ONCE // max(logits.shape[0] * logits.shape[2], 1), 1)
    sums = torch.zeros(2, dtype=torch.float64, device=logits.device)
    with torch.no_grad():
        for begin in range(0, logits.shape[1], width):
            part = slice(begin, begin + width)
            predicted = F.log_softmax(logits[:, part].to(dtype), dim=-1).flatten(0, 1)
            for index, wanted in enumerate(both):
                target = wanted[:, part].flatten().long()
                sums[index] += F.nll_loss(predicted, target, ignore_index=IGNORED_LABEL, reduction="sum").double()
        counts = torch.stack([(wanted != IGNORED_LABEL).sum() for wanted in both])
        same, next_one = (sums / counts).tolist()
    return same, next_one


def _incomparable(loss: Tensor, logits: object, labels: Tensor) -> str | None:
    if loss.numel() != 1:
        return f"a loss of shape {tuple(loss.shape)}"
    if not isinstance(logits, Tensor) or hasattr(logits, "full_tensor"):
        return f"a prediction whose logits are of type {type(logits).__name__}, which cannot be compared"
    if logits.ndim != 3 or logits.shape[:2] != labels.shape:
        return f"logits of shape {tuple(logits.shape)} and labels of shape {tuple(labels.shape)}"
    foreign = (labels != IGNORED_LABEL) & ((labels < 0) | (labels >= logits.shape[2]))
    if bool(foreign.any()):
        return f"the label {int(labels[foreign][0])} beside {logits.shape[2]} classes"
    return None


def _nearest(loss: Tensor, averages: tuple[float, float], logits: Tensor) -> Answer | None:
    """Return which of two averages a loss is, `None` where it may be both."""
    value = float(loss.detach())
    if not math.isfinite(value) and not any(math.isnan(average) for average in averages):
        return None
    distances = [_distance(value, average) for average in averages]
    near, far = min(distances), max(distances)
    scale = max(abs(value), 1e-30) if math.isfinite(value) else 1.0
    if not near <= _tolerance(loss.dtype, logits.dtype) * scale:
        return "neither"
    # What rounding may do to the loss must not decide.
    if far > 16 * max(near, torch.finfo(loss.dtype).eps * scale):
        return "unshifted" if distances[0] == near else "shifted"
    return None


def _distance(value: float, average: float) -> float:
    # A mean over no label is NaN on both sides.
    if math.isnan(value) or math.isnan(average):
        return 0.0 if math.isnan(value) and math.isnan(average) else math.inf
    return abs(value - average)


def _tolerance(*dtypes: torch.dtype) -> float:
    """Return the relative error of a mean in the coarsest of some precisions."""
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    return 4 * eps if eps > 1e-4 else max(256 * eps, 1e-9)


def _by_gradient(loss: Tensor, logits: Tensor, labels: Tensor) -> Answer | None:
    """Return what the positions with a gradient tell, `None` where there is none to be had."""
    if not (loss.requires_grad and logits.requires_grad):
        return None
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True, allow_unused=True)
    if gradient is None:
        return None
    moved = gradient.ne(0).any(-1)
    counted = labels != IGNORED_LABEL
    shifted = F.pad(counted[:, 1:], (0, 1), value=False)
    beyond = [bool((moved & ~positions).any()) for positions in (counted, shifted)]
    if not bool(moved.any()) or beyond[0] == beyond[1]:
        return None
    return "shifted" if beyond[0] else "unshifted"
