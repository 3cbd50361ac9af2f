"""Compares what a run left with what the reference computes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from .spec import Record, Update

Tensors = Mapping[str, Tensor]

MOVED = 1e-3
"""A weight may be wrong by this share of how far it has moved."""
NOISE = 16.0
"""And by so many times the difference that the dtypes of the program make in the reference itself."""

REACH = 10.0
"""An optimizer that divides by the gradient moves a weight by at most so many times its rate: RMSprop in its first update."""

LARGEST = torch.finfo(torch.float32).max
"""What is larger cannot be compared: metrics and predictions are float32."""
ROUNDING = 1e-6
"""And by this: an optimizer that divides by its gradient makes much of the rounding of one that is zero."""


def differences(
    found: Record,
    exact: Record,
    own: Record,
    digits: float = 0.0,
    *,
    decay: float | None = None,
    cancels: bool = False,
) -> list[str]:
    """Return in words where a run differs from the reference, the first update first; nothing where it does not.

    Args:
        found: What the run left.
        exact: What the reference computes in float64.
        own: What it computes in the dtypes of the program.
        digits: The last digit of what it computes in, relative to 1: of its precision, if that is coarser than its weights.
        decay: Of an optimizer that divides by the gradient, so that a weight moves by the sign of one that is rounding and no more:
            the weight decay that it adds to the gradient.
        cancels: Whether a gradient is a sum of signs, which is zero in one order of addition, and its rounding in another.
    """
    doubtful = {
        name: torch.zeros(tensor.shape, dtype=torch.float64)
        for name, tensor in found.initial.items()
    }
    digits = max(4 * digits, digits_of(found.initial))
    return list(
        _differences(
            found, exact, own, digits, {} if decay is None else doubtful, decay or 0.0, cancels
        )
    )


def _differences(
    found: Record,
    exact: Record,
    own: Record,
    digits: float,
    doubtful: Tensors,
    decay: float,
    cancels: bool,
) -> Iterator[str]:
    if (found.refused is None) != (exact.refused is None):
        yield f"ended with {found.refused or 'no error'}, expected {exact.refused or 'no error'}"
        return
    for number, updates in enumerate(zip(found.updates, exact.updates, own.updates)):
        _note_doubtful(*updates[1:], doubtful, decay, REACH * max(updates[1].rates), cancels)
        wrong = list(_of_update(*updates, found.initial, digits, doubtful))
        yield from (f"update {number}: {text}" for text in wrong)
        if wrong:
            return
    if len(found.updates) != len(exact.updates):
        yield f"{len(found.updates)} updates, expected {len(exact.updates)}"
    if found.refused is not None:
        return
    if found.steps != exact.steps:
        yield f"{found.steps} steps, expected {exact.steps}"
    initial = found.initial
    yield from _of_tensors("final", found.final, exact.final, own.final, initial, digits, doubtful)
    yield from _of_tensors(
        "averages", found.averages, exact.averages, own.averages, initial, digits, doubtful
    )
    yield from _of_numbers(
        "pass losses", found.pass_losses, exact.pass_losses, own.pass_losses, digits
    )
    places = [
        [(each.split, each.after) for each in record.evaluations] for record in (found, exact)
    ]
    if places[0] != places[1]:
        yield f"evaluations after {places[0]}, expected {places[1]}"
    for one, right, rounded in zip(found.evaluations, exact.evaluations, own.evaluations):
        for name, value in right.result.items():
            label = f"{name} of {one.split} after {one.after}"
            yield from _of_numbers(
                label, [one.result.get(name, math.nan)], [value], [rounded.result[name]], digits
            )
    yield from _of_predictions(found.predictions, exact.predictions, own.predictions, digits)


def _of_predictions(
    found: Tensor | None, exact: Tensor | None, own: Tensor | None, digits: float
) -> Iterator[str]:
    if exact is None or own is None or bool(((exact.abs() > LARGEST) & exact.isfinite()).any()):
        return
    if found is None or found.shape != exact.shape:
        yield f"predictions of shape {None if found is None else tuple(found.shape)}, expected {tuple(exact.shape)}"
        return
    name = "predictions"
    yield from _of_tensors(
        name, {name: found}, {name: exact}, {name: own}, {name: torch.zeros_like(exact)}, digits
    )


def digits_of(initial: Tensors) -> float:
    """Return what the last digits of losses and norms can hold: those of the coarsest weights."""
    return max(
        (4 * torch.finfo(each.dtype).eps for each in initial.values() if each.is_floating_point()),
        default=0.0,
    )


def _note_doubtful(
    exact: Update, own: Update, doubtful: Tensors, decay: float, reach: float, cancels: bool
) -> None:
    """Note the elements whose gradient, without or with the weight decay, is not larger than its rounding, and not simply 0.

    Each may have been moved by `reach`: in float64, a gradient of that kind is smaller than the `eps` of the optimizer, and moves nothing.
    """
    for name in doubtful.keys() & exact.gradients.keys() & own.gradients.keys():
        gradient, weight = exact.gradients[name], exact.before[name]
        rounded = own.gradients[name].to(gradient.dtype)
        noise = NOISE * (rounded - gradient).abs().max()
        is_small = ~(gradient.abs() > noise) | ~((gradient + decay * weight).abs() > noise)
        moves = (gradient != 0.0) | (rounded != 0.0)
        doubtful[name] += reach * (is_small & (moves | (cancels & moves.any())))


def _of_update(
    found: Update, exact: Update, own: Update, initial: Tensors, digits: float, doubtful: Tensors
) -> Iterator[str]:
    if found.committed != exact.committed:
        yield f"committed={found.committed}, expected {exact.committed}"
        return
    if not exact.committed:
        yield from _of_tensors("skipped", found.after, exact.after, own.after, initial, digits)
        return
    if not _is_close(sorted(found.rates), sorted(exact.rates), sorted(exact.rates)):
        yield f"rates {found.rates}, expected {exact.rates}"
    for name in ("loss", "grad_norm"):
        figure, right, rounded = (getattr(update, name) for update in (found, exact, own))
        if figure is not None:
            yield from _of_numbers(name, [figure], [right], [rounded], digits)
    yield from _of_tensors("after", found.after, exact.after, own.after, initial, digits, doubtful)
    yield from _of_tensors(
        "averages", found.averages, exact.averages, own.averages, initial, digits, doubtful
    )


def _of_numbers(
    name: str, found: list[float], exact: list[float], own: list[float], digits: float = 0.0
) -> Iterator[str]:
    if not _is_close(found, exact, own, digits):
        yield f"{name} {found}, expected {exact}"


def _is_close(
    found: list[float], exact: list[float], own: list[float], digits: float = 0.0
) -> bool:
    if len(found) != len(exact):
        return False
    return all(_is_near(*figures, digits) for figures in zip(found, exact, own))


def _is_near(found: float, exact: float, own: float, digits: float) -> bool:
    if LARGEST < abs(exact) < math.inf:
        return True
    if not math.isfinite(exact):
        return found == exact or (math.isnan(found) and math.isnan(exact))
    return abs(found - exact) <= NOISE * abs(own - exact) + max(digits, 1e-5) * abs(exact) + 1e-7


def _of_tensors(
    what: str,
    found: Tensors,
    exact: Tensors,
    own: Tensors,
    initial: Tensors,
    digits: float,
    doubtful: Tensors | None = None,
) -> Iterator[str]:
    if found.keys() != exact.keys():
        yield f"{what}: names {sorted(found.keys() ^ exact.keys())} on one side only"
        return
    for name, right in exact.items():
        either_way = (doubtful or {}).get(name, torch.zeros(right.shape, dtype=torch.float64))
        error, allowed = _error(found[name], right, own[name], initial[name], digits, either_way)
        if not error <= allowed:
            yield f"{what}: {name} is wrong by {error:.3g}, may be by {allowed:.3g}"


def _error(
    found: Tensor, exact: Tensor, own: Tensor, initial: Tensor, coarse: float, either_way: Tensor
) -> tuple[float, float]:
    """Return how wrong a tensor is, and how wrong it may be; of some elements nobody knows whether they move up or down."""
    kind = torch.complex128 if exact.is_complex() else torch.float64
    is_number = own.dtype.is_floating_point or own.dtype.is_complex
    digits = max(2 * torch.finfo(own.dtype).eps, 1e-7) if is_number else 1e-7
    given = [each.detach().to(kind) for each in (found, exact, own, initial)]
    finite = given[1].isfinite()
    if given[0].shape != given[1].shape or not torch.equal(given[0].isfinite(), finite):
        return math.inf, 0.0
    found, exact, own, initial = (each[finite] for each in given)
    either_way = either_way[finite]
    both_ways = 2.0 * (either_way > 0.0)
    if not exact.numel():
        return 0.0, 0.0
    if not own.isfinite().all():
        return (
            0.0,
            0.0,
        )  # such as Adam in float16, where eps is 0: no loop in these dtypes says what is right
    moved, noise = (exact - initial).abs().max(), (own - exact).abs().max()
    # What the last digits of each stored number can hold.
    allowed = (
        (max(MOVED, coarse) + both_ways) * moved + NOISE * noise + digits * exact.abs() + ROUNDING
    )
    allowed += either_way
    error = (found - exact).abs()
    worst = int((error / allowed).argmax())
    return float(error[worst]), float(allowed[worst])
