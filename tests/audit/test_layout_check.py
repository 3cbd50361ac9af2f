"""A layout beside one process, in real processes: mistakes that people make are named one by one, and right layouts are found right."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from support.flawed_layouts import SETTINGS, FlawedRunner, record
from support.layouts import LayoutRunner
from support.processes import run_processes

from danling.audit.gradient_record import RankRecord, UpdateRecord, read_ranks
from danling.audit.layout import Layout
from danling.audit.layout_comparison import LayoutReport, NotChecked, _differing, compare_records, explain

pytestmark = pytest.mark.timeout(300)

OVER_TENSOR = [
    "right",
    "tied",
    "column",
    "averaged",
    "cut off",
    "bias before the sum",
    "bias of one",
    "sequence",
    "untied",
    "divided twice",
    "clipped alone",
    "initial",
    "other data",
    "diverges",
]
OVER_REPLICAS = ["right ", "not summed", "batches alike"]


class Checks:
    """The records of all cases, made in one process each, and in one pair of processes for each layout."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        for layout, cases in (("tensor=2", OVER_TENSOR), ("replicate=2", OVER_REPLICAS)):
            for alone in (True, False):
                world = 1 if alone else 2
                failed = run_processes(
                    record, FlawedRunner, cases, layout, self.root, alone=alone, world_size=world, timeout=200
                )
                assert failed == [{}] * world

    def report(self, case: str) -> LayoutReport:
        layout = Layout.parse("replicate=2" if case in OVER_REPLICAS else "tensor=2")
        one = read_ranks(Path(self.root, case, "one", "records"), 1)[0]
        return compare_records(one, read_ranks(Path(self.root, case, "layout", "records"), 2), layout)


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Checks:
    return Checks(tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize("case", ["right", "tied", "right ", "initial"])
def test_a_right_layout_is_found_right(case: str, checks: Checks) -> None:
    report = checks.report(case)
    assert report.is_same and report.updates == 2, report
    assert report.cause is None and not report.gradients and not report.weights
    assert any("Dropout of 2 modules was switched off" in note for note in report.notes)
    # What a program initializes otherwise is taken from one process, and not blamed on the layout.
    assert any("depend on the layout" in note and "head.weight" in note for note in report.notes) == (case == "initial")


def test_ranks_that_read_different_samples_get_shares_that_differ(checks: Checks) -> None:
    assert checks.report("right ").samples == 7 and checks.report("right").samples == 8


PLANTED: dict[str, tuple[str, str, str, str | None]] = {
    # case: parameter, kind, words of its cause, words of what explains all
    "column": (
        "blocks.1.norm.weight",
        "partial",
        "not summed over tensor",
        "nearest to the loss is blocks.1.norm.bias",
    ),
    "averaged": (
        "blocks.1.norm.weight",
        "scaled",
        "half of the gradient: not summed over tensor, or divided twice",
        None,
    ),
    "cut off": ("blocks.1.norm.weight", "missing", "no gradient on the layout", None),
    "bias before the sum": ("blocks.1.down.bias", "other", "", "the loss differs already: the forward pass"),
    "bias of one": ("blocks.1.down.bias", "one_rank", "whole on rank 0 and zero on rank 1", None),
    "sequence": ("blocks.1.norm.weight", "partial", "each rank of tensor has a part of it", None),
    "untied": ("embedding.weight", "untied", "one parameter with head.weight in one process", None),
    "divided twice": (
        "head.weight",
        "scaled",
        "half of the gradient",
        "every gradient is 0.5 times that of one process",
    ),
    "not summed": ("head.weight", "partial", "not summed over replicate", "nearest to the loss"),
    "batches alike": ("head.weight", "", "", "the weights of the batches add up to 2 times those of one process"),
    "diverges": ("head.weight", "nonfinite", "not finite on ranks 0 to 1", "the loss differs already"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_mistake_is_named(case: str, checks: Checks) -> None:
    name, kind, words, explained = PLANTED[case]
    report = checks.report(case)
    assert report.step == 1 and not report.is_same
    finding = next(each for each in report.gradients if each.name == name)
    assert finding.kind == kind or not kind, report
    assert words in finding.cause
    if explained is not None:
        assert report.cause is not None and explained in report.cause


def test_what_lies_between_the_mistake_and_the_loss_is_not_blamed(checks: Checks) -> None:
    for case in ("column", "averaged", "cut off", "sequence", "bias of one"):
        named = {each.name for each in checks.report(case).gradients}
        assert "head.weight" not in named and "blocks.1.up.weight" not in named and "blocks.1.down.weight" not in named


def test_weights_that_differ_though_no_gradient_does(checks: Checks) -> None:
    report = checks.report("clipped alone")
    assert not report.gradients and report.weights and report.step == 1
    assert "clipping by a norm of this rank alone" in report.weights[0].cause


def test_other_samples_are_no_mistake_of_a_layout(checks: Checks) -> None:
    with pytest.raises(NotChecked, match="(?s)the same samples in one process and on the layout.*8 samples and 8"):
        checks.report("other data")


@pytest.mark.parametrize(
    ("text", "received"),
    [
        ("tensr=2", "Did you mean"),
        ("tensor", "such as shard=2,tensor=2"),
        ("tensor=0", "of axes and their degrees"),
        ("tensor=1", "of several processes"),
        ("ddp=2,shard=2", "or of one stack"),
        ("shard=2,shard=2", "Write each axis once"),
        ("deepspeed=2", "whose engine keeps shares of flat"),
    ],
)
def test_layouts_that_cannot_be_are_refused(text: str, received: str) -> None:
    with pytest.raises(ValueError, match=received):
        Layout.parse(text)


def test_what_a_layout_imposes() -> None:
    layout = Layout.parse("shard=2, tensor=2,context=1")
    assert (layout.processes, layout.replicas, layout.stack) == (4, 2, "parallel")
    alone, several = layout.settings(alone=True), layout.settings(alone=False)
    assert math.prod(value for key, value in alone.items() if key.startswith("parallel.axes")) == 1  # type: ignore[misc]
    assert several["parallel.axes.shard"] == several["parallel.axes.tensor"] == 2
    ddp = Layout.parse("ddp=3")
    assert (ddp.processes, ddp.replicas) == (3, 3) and ddp.settings(alone=False) == {"stack": "ddp"}


def _gpt(case: str) -> LayoutRunner:
    return LayoutRunner(
        SETTINGS, model={"experts": 4, "dropout": 0.1} if "expert" in case else {"tied": case == "tensor=2"}
    )


@pytest.mark.parametrize(
    "layout",
    ["pipeline=2", "context=2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tensor=2", "expert=2"))],
)
def test_axes_of_a_model_that_knows_them_are_found_right(layout: str, tmp_path: Path) -> None:
    """No seed is set, which is then 0 in both, and gradients and weights of each stage stand beside those of the whole model."""
    for alone in (True, False):
        world = 1 if alone else 2
        failed = run_processes(
            record, _gpt, [layout], layout, str(tmp_path), alone=alone, world_size=world, timeout=200
        )
        assert failed == [{}] * world
    one = read_ranks(tmp_path / layout / "one" / "records", 1)[0]
    ranks = read_ranks(tmp_path / layout / "layout" / "records", 2)
    report = compare_records(one, ranks, Layout.parse(layout))
    assert report.is_same and report.updates == 2 and report.parameters >= len(one.trained), str(report)
    assert {name for rank in ranks for name in rank.trained} == set(one.trained)


def test_what_makes_layouts_differ_rightly_is_named_and_not_the_layout() -> None:
    one = UpdateRecord(1.0, 8.0, 8.0, 0, 1.0, {}, {}, {})
    layout = Layout.parse("ddp=2")
    other = replace(one, loss=1.1)
    record_of = RankRecord(
        rank=0,
        coordinate={"replicate": 0},
        degrees={"replicate": 2},
        trained=[],
        tied={},
        initial=[],
        dropped=0,
        drops_in_calls=False,
        draws=False,
        held_norms=0,
        batch_norms=1,
        eps=1e-16,
        coarse=False,
        updates=1,
    )
    told = _differing(record_of, [record_of], layout)
    assert told is not None and "batch normalization without running statistics" in told
    assert _differing(record_of, [record_of], Layout.parse("tensor=2")) is None
    drawing = _differing(replace(record_of, draws=True), [record_of], layout)
    assert drawing is not None and "draws random numbers" in drawing
    explained = explain(one, other, [], 3, layout, same_loss=False, differing=told)
    assert explained is not None and explained.startswith(
        "the loss differs already, and may do so: batch normalization"
    )
