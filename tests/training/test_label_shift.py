"""Which labels the loss of a model counts is found out from its first batch where its class does not tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.language import (
    NextTokens,
    OwnTokens,
    SmoothNextTokens,
    TinyForCausalLM,
    TinyForMaskedLM,
    ZeroNextTokens,
    encode,
    sentences,
)
from torch import Tensor, nn
from torch.nn import functional as F

from danling.training import LabelShift
from danling.training.label_shift import mean_cross_entropies


def watched(model: nn.Module, *, rows: int = 9) -> tuple[LabelShift, bool]:
    shift, batch = LabelShift(), encode(sentences(rows))
    assert shift.shifts(model) is False
    output = model(**batch)
    return shift, shift.observe(output["loss"], output["logits"], batch["labels"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "shifts"), [(NextTokens, True), (ZeroNextTokens, True), (OwnTokens, False), (TinyForMaskedLM, False)]
)
def test_it_is_found_out_in_every_precision(kind: Any, shifts: bool, dtype: torch.dtype) -> None:
    model = kind().to(dtype)
    shift, changes = watched(model)
    assert changes is shifts
    assert shift.shifts(model) is shifts
    assert not shift.is_open
    assert shift.complaint is None


@pytest.mark.parametrize(("kind", "shifts"), [(NextTokens, True), (OwnTokens, False)])
def test_it_is_found_out_under_autocast_and_without_gradients(kind: Any, shifts: bool) -> None:
    model = kind(double=False)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        shift, _ = watched(model, rows=64)
    assert shift.shifts(model) is shifts


def test_the_gradient_that_follows_is_untouched() -> None:
    gradients = []
    for observes in (False, True):
        model, batch = ZeroNextTokens(), encode(sentences(9))
        output = model(**batch)
        if observes:
            LabelShift().observe(output["loss"], output["logits"], batch["labels"])
        output["loss"].backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(first, second) for first, second in zip(*gradients))


@pytest.mark.parametrize("kind", [TinyForCausalLM, NextTokens])
def test_a_class_or_an_attribute_that_tells_is_not_looked_at(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NextTokens, "shifts_labels", True, raising=False)
    shift = LabelShift()
    assert shift.shifts(kind()) is True
    assert not shift.is_open


def test_a_loss_that_is_neither_is_a_complaint_that_names_the_mend() -> None:
    model = SmoothNextTokens()
    shift, changes = watched(model)
    assert not changes
    assert not shift.is_open
    assert shift.shifts(model) is False
    assert shift.complaint is not None
    assert "Override `batch_weight(data, target)`, or set `shifts_labels`" in shift.complaint


@pytest.mark.parametrize(
    ("logits", "labels", "received"),
    [
        (None, torch.zeros(2, 3).long(), "logits are of type NoneType"),
        (torch.zeros(2, 4, 5), torch.zeros(2, 3).long(), r"logits of shape (2, 4, 5) and labels of shape (2, 3)"),
        (torch.zeros(2, 3, 5), torch.full((2, 3), -1), "the label -1 beside 5 classes"),
    ],
)
def test_what_cannot_be_compared_is_a_complaint(logits: Any, labels: Tensor, received: str) -> None:
    shift = LabelShift()
    assert not shift.observe(torch.tensor(1.0), logits, labels)
    assert shift.complaint is not None
    assert received in shift.complaint


@pytest.mark.parametrize("labels", [torch.zeros(2, 3), torch.zeros(2).long(), torch.zeros(2, 3, 4).long()])
def test_of_labels_that_are_no_sequence_there_is_nothing_to_find_out(labels: Tensor) -> None:
    shift = LabelShift()
    assert not shift.observe(torch.tensor(1.0), torch.zeros(2, 5), labels)
    assert not shift.is_open
    assert shift.complaint is None


def test_batches_that_do_not_tell_leave_it_open_for_a_while() -> None:
    shift, labels = LabelShift(), torch.full((2, 3), -100)
    for _ in range(7):
        assert not shift.observe(torch.tensor(float("nan")), torch.zeros(2, 3, 5), labels)
        assert shift.is_open
    shift.observe(torch.tensor(float("nan")), torch.zeros(2, 3, 5), labels)
    assert not shift.is_open
    assert shift.complaint is not None
    assert not LabelShift().observe(torch.tensor(1.0), torch.zeros(2, 3, 5), None)


def test_labels_that_count_at_the_first_position_only_tell_by_their_mean_over_nothing() -> None:
    shift, model = LabelShift(), NextTokens()
    batch = encode(sentences(4))
    labels = torch.full_like(batch["labels"], -100)
    labels[:, 0] = 1
    output = model(**{**batch, "labels": labels})
    assert shift.observe(output["loss"], output["logits"], labels)


def test_a_loss_seen_after_its_backward_is_a_complaint_and_changes_nothing() -> None:
    model, batch = NextTokens(), encode(sentences(9))
    output = model(**batch)
    output["loss"].backward()
    shift = LabelShift()
    shift.shifts(model)
    shift.observe_afterwards(output["loss"], output["logits"], batch["labels"])
    assert shift.shifts(model) is False
    assert shift.complaint is not None
    assert "only after its backward" in shift.complaint


@pytest.mark.parametrize(
    ("answers", "shifts", "complains"),
    [
        (["shifted", None], True, False),
        (["unshifted", None], False, False),
        ([None, None], False, False),
        (["neither", None], False, True),
        (["neither", "shifted"], False, True),
        (["unshifted", "shifted"], False, True),
    ],
)
def test_ranks_take_over_what_one_of_them_found_out(answers: list[Any], shifts: bool, complains: bool) -> None:
    shift, model = LabelShift(), NextTokens()
    shift.shifts(model)
    assert shift.agree(answers) is complains
    assert shift.shifts(model) is shifts
    assert shift.is_open is (answers == [None, None])


def test_the_averages_are_those_of_cross_entropy_in_parts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(3, 7, 5, dtype=torch.float64)
    labels = torch.randint(0, 5, (3, 7)).where(torch.rand(3, 7) > 0.3, -100)
    expected = (
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()),
        F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),
    )
    for elements in (1, 30, 10**6):
        monkeypatch.setattr("danling.training.label_shift._ELEMENTS_AT_ONCE", elements)
        assert mean_cross_entropies(logits, labels) == pytest.approx([float(value) for value in expected], rel=1e-12)
