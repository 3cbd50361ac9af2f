"""A layout beside one process, in real processes: mistakes that people make are named one by one, and right layouts are found right."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.flawed_layouts import SETTINGS, FlawedRunner, record
from support.layouts import LayoutRunner
from support.processes import run_processes

from danling.audit.layout_check import (
    Layout,
    LayoutReport,
    compare_records,
    directory_of,
)
from danling.audit.layout_record import Record
from danling.prove.differences import NotChecked, Part, Rounding, compare

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
    "permuted",
    "permuted alike",
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
                    record,
                    FlawedRunner,
                    cases,
                    layout,
                    self.root,
                    alone=alone,
                    world_size=world,
                    timeout=200,
                )
                assert failed == [{}] * world

    def report(self, case: str) -> LayoutReport:
        layout = Layout.parse("replicate=2" if case in OVER_REPLICAS else "tensor=2")
        return compare_records(Path(self.root, case), layout)


@pytest.fixture(scope="module")
def checks(tmp_path_factory: pytest.TempPathFactory) -> Checks:
    return Checks(tmp_path_factory.mktemp("layouts"))


@pytest.mark.parametrize("case", ["right", "tied", "right ", "initial"])
def test_a_right_layout_is_found_right(case: str, checks: Checks) -> None:
    report = checks.report(case)
    assert report.is_same and report.updates == 2, report
    assert not report.gradients and not report.weights and not report.moved
    # Ranks that read different samples get shares that differ.
    assert "without dropout" in str(report) and report.samples == (
        7 if case in OVER_REPLICAS else 8
    )


TENSOR = "differs between ranks of tensor"
PLANTED: dict[str, tuple[str, str, float | None, str | None, str]] = {
    # case: parameter; what differs, ratio and axis of its gradient; words of the summary
    "column": (
        "blocks.1.norm.weight",
        TENSOR,
        None,
        "tensor",
        "nearest to the loss is blocks.1.norm.bias",
    ),
    "averaged": ("blocks.1.norm.weight", "0.5 times", 0.5, "tensor", "the backward pass is not"),
    "cut off": ("blocks.1.norm.weight", "0 times", 0.0, None, "the backward pass is not"),
    "bias before the sum": (
        "blocks.1.down.bias",
        "",
        None,
        None,
        "the first layer whose output differs is blocks.1",
    ),
    "bias of one": ("blocks.1.down.bias", TENSOR, None, "tensor", "the backward pass is not"),
    "sequence": ("blocks.1.norm.weight", TENSOR, None, "tensor", ""),
    "untied": ("embedding.weight", "", None, None, ""),
    "divided twice": ("head.weight", "0.5 times", 0.5, "tensor", "and the loss is not"),
    "not summed": (
        "head.weight",
        "differs between ranks of replicate",
        None,
        "replicate",
        "nearest to the loss",
    ),
    "batches alike": (
        "head.weight",
        "",
        None,
        None,
        "the weights of the batches add up to 2 times those",
    ),
    "diverges": ("head.weight", "not finite", None, None, "and the loss is not"),
}


@pytest.mark.parametrize("case", PLANTED)
def test_a_planted_mistake_is_located(case: str, checks: Checks) -> None:
    name, what, ratio, axis, words = PLANTED[case]
    report = checks.report(case)
    assert report.step == 1 and not report.is_same
    finding = next(each for each in report.gradients if each.name == name)
    assert what in finding.what, report
    if what:
        assert (
            finding.ratio == (None if ratio is None else pytest.approx(ratio))
            and finding.axis == axis
        ), report
    assert report.summary is not None and words in report.summary, report


@pytest.mark.parametrize("case", ["permuted", "permuted alike"])
def test_weights_moved_by_parallelize_are_named(case: str, checks: Checks) -> None:
    """Both begin with the weights of one process, so that losses and gradients say nothing of it."""
    report = checks.report(case)
    named = {
        "blocks.1.up.weight",
        "blocks.1.up.bias",
        *(["blocks.1.down.weight"] if case == "permuted alike" else []),
    }
    assert not report.is_same and set(report.moved) == named and not report.gradients, report
    assert report.summary is not None and "`parallelize` has changed the weights" in report.summary
    assert "the weights are not those of the model" in str(report)


def test_different_weights_with_equal_gradients_are_found(checks: Checks) -> None:
    report = checks.report("clipped alone")
    assert not report.gradients and report.weights and report.step == 1
    assert (
        report.summary is not None
        and "the step of the optimizer or the clipping is not" in report.summary
    )


def test_other_samples_are_no_mistake_of_a_layout(checks: Checks) -> None:
    with pytest.raises(
        NotChecked, match="(?s)the same samples in one process and on the layout.*8 samples and 8"
    ):
        checks.report("other data")


@pytest.mark.parametrize(
    "text",
    [
        "tensr=2",
        "tensor",
        "tensor=0",
        "tensor=1",
        "ddp=2,shard=2",
        "shard=2,shard=2",
        "deepspeed=2",
    ],
)
def test_impossible_layouts_are_refused(text: str) -> None:
    with pytest.raises(
        ValueError, match=f"each axis once, such as shard=2,tensor=2.*Received: '{text}'"
    ) as refused:
        Layout.parse(text)
    assert ("Did you mean 'tensor'" in str(refused.value)) == (text == "tensr=2")


def _gpt(case: str) -> LayoutRunner:
    return LayoutRunner(
        SETTINGS,
        model={"experts": 4, "dropout": 0.1} if "expert" in case else {"tied": case == "tensor=2"},
    )


@pytest.mark.parametrize(
    "layout",
    [
        "pipeline=2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("context=2", "tensor=2", "expert=2")
        ),
    ],
)
def test_axes_known_to_the_model_are_found_right(layout: str, tmp_path: Path) -> None:
    """No seed is set, which is then 0 in both, and gradients and weights of each stage stand beside those of the whole model."""
    for alone in (True, False):
        world = 1 if alone else 2
        failed = run_processes(
            record,
            _gpt,
            [layout],
            layout,
            str(tmp_path),
            alone=alone,
            world_size=world,
            timeout=200,
        )
        assert failed == [{}] * world
    place = tmp_path / layout
    report = compare_records(place, Layout.parse(layout))
    assert report.is_same and report.updates == 2, str(report)
    ranks = [Record.read(directory_of(place, alone=False), rank, 1) for rank in range(2)]
    named = {name for record in ranks for name in record.gradients}
    assert named == set(Record.read(directory_of(place, alone=True), 0, 1).gradients)


def _muon(case: str) -> LayoutRunner:
    optim = {"type": "muon", "lr": 0.02, "adamw": {"lr": 1e-3}}
    return LayoutRunner({**SETTINGS, "optim": optim}, model={"tied": False})


def test_muon_on_shards_is_found_right(tmp_path: Path) -> None:
    for alone in (True, False):
        world = 1 if alone else 2
        failed = run_processes(
            record,
            _muon,
            ["muon"],
            "shard=2",
            str(tmp_path),
            alone=alone,
            world_size=world,
            timeout=200,
        )
        assert failed == [{}] * world
    report = compare_records(tmp_path / "muon", Layout.parse("shard=2"))
    assert report.is_same and report.updates == 2, str(report)


ONE = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
OTHER = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
EXACT = Rounding(1e-8, 1e-12)
Held = list[tuple[dict[str, int], Part]]


def copies(*tensors: torch.Tensor, axis: str = "tensor") -> Held:
    """Return ranks that have copies of a tensor along an axis."""
    return [({axis: rank}, Part((0, 0), (6, 4), tensor)) for rank, tensor in enumerate(tensors)]


def rows(*tensors: torch.Tensor) -> Held:
    """Return ranks that have rows of a tensor."""
    size = len(tensors[0])
    return [
        ({"tensor": rank}, Part((rank * size, 0), (6, 4), tensor))
        for rank, tensor in enumerate(tensors)
    ]


@pytest.mark.parametrize(
    ("held", "what", "ratio", "axis"),
    [
        (copies(ONE / 2, ONE / 2), "0.5 times", 0.5, "tensor"),
        (copies(ONE / 3, ONE / 3, ONE / 3, axis="expert"), "0.333333 times", 1 / 3, "expert"),
        (copies(ONE * 1.7, ONE * 1.7), "1.7 times", 1.7, None),
        (copies(-ONE, -ONE), "-1 times", -1.0, None),
        (copies(ONE * 0, ONE * 0), "0 times", 0.0, None),
        ([], "no parameter of this name", None, None),
        (copies(ONE - OTHER, OTHER), "differs between ranks of tensor", None, "tensor"),
        (copies(ONE + OTHER, ONE + 2 * OTHER), "differs between ranks of tensor", None, "tensor"),
        (copies(ONE, ONE * float("nan")), "not finite", None, None),
        (copies(ONE[[5, 4, 3, 0, 1, 2]], ONE[[5, 4, 3, 0, 1, 2]]), "other values", None, None),
        (rows(ONE[:3], 0 * ONE[3:]), "other values", None, None),
        (rows(ONE[:3] * 2, ONE[3:] * 2), "2 times", 2.0, "tensor"),
        (rows(ONE[3:], ONE[:3]), "other values", None, None),
        ([({}, Part((0, 0), (3, 4), ONE[:3]))], "shape [3, 4] on the layout, [6, 4]", None, None),
    ],
)
def test_part_of_a_gradient_on_each_rank_is_described(
    held: Held, what: str, ratio: float | None, axis: str | None
) -> None:
    found = compare("w", ONE, held, {"tensor": 2, "expert": 3}, EXACT)
    assert found is not None and what in found.what, found
    assert found.axis == axis and found.ratio == (
        None if ratio is None else pytest.approx(ratio)
    ), found


@pytest.mark.parametrize(
    ("held", "one"),
    [
        (copies(ONE * (1 + 1e-12), ONE), ONE),
        (rows(ONE[:3] + 1e-13, ONE[3:]), ONE),
        (copies(ONE * 0 + 1e-16, ONE * 0), ONE * 0),  # 0 by its mathematics
        ([], ONE * 0),
        (copies(ONE * 0, ONE * 0), None),
    ],
)
def test_rounding_is_no_difference(held: Held, one: torch.Tensor | None) -> None:
    assert compare("w", one, held, {"tensor": 2}, EXACT) is None
