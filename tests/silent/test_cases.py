"""Each published fault is what its program says: gradients, weights, samples and masks against a computation by hand in float64."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.data
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, mse_loss
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from benchmarks.silent.ranks import run_ranks

CASES = sorted((Path(__file__).parents[2] / "benchmarks" / "silent" / "cases").glob("case*.py"))
WORLD = 2

Gradients = list[Tensor]


def case(number: int) -> Path:
    return next(path for path in CASES if path.name.startswith(f"case{number:02}"))


class Recorder:
    """Records in a rank, in one file an update: what the optimizer gets and makes, the rows that are trained on, and dropout masks."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self.name = directory, name
        self.rows: list[Tensor] = []
        self.masks: list[Tensor] = []
        self.data: tuple[Tensor, ...] = ()
        self.begun: dict[str, Any] = {}
        self.updates = 0

    def __call__(self, rank: int) -> None:
        hold = torch.utils.data.TensorDataset.__init__

        def held(dataset: Any, *tensors: Tensor) -> None:
            self.data = tensors
            hold(dataset, *tensors)

        def before(optimizer: Any, *_: Any) -> None:
            found = parameters(optimizer)
            self.begun = {
                "weights": [local(p) for p in found],
                "gradients": [local(p.grad) for p in found],
            }

        def after(optimizer: Any, *_: Any) -> None:
            file = self.directory / f"{self.name}-{rank}-{self.updates:03}.pt"
            made = {**self.begun, "after": [local(p) for p in parameters(optimizer)]}
            kept = {
                "data": self.data if self.updates == 0 else (),
                "rows": self.rows,
                "masks": self.masks,
            }
            torch.save({**made, **kept}, file.with_suffix(".tmp"))
            os.replace(file.with_suffix(".tmp"), file)
            self.rows, self.masks = [], []
            self.updates += 1

        def entered(module: nn.Module, inputs: tuple[Any, ...]) -> None:
            if (
                isinstance(module, nn.Linear)
                and module.in_features == 8
                and torch.is_grad_enabled()
            ):
                self.rows.append(local(inputs[0]))

        def left(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            if isinstance(module, nn.Dropout):
                self.masks.append(output.detach() != 0)

        torch.utils.data.TensorDataset.__init__ = held  # type: ignore[method-assign]
        register_optimizer_step_pre_hook(before)
        register_optimizer_step_post_hook(after)
        nn.modules.module.register_module_forward_pre_hook(entered)
        nn.modules.module.register_module_forward_hook(left)


def local(value: Any) -> Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach().clone()


def parameters(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def ran(
    number: int, directory: Path, *arguments: str, name: str = "run", lines: int | None = None
) -> list[Any]:
    """Run a case, all of it or until rank 0 has printed some lines, and return what its ranks have recorded."""
    run_ranks(
        case(number),
        arguments,
        directory,
        world=WORLD,
        lines=lines,
        begin=Recorder(directory, name),
    )
    recorded = []
    for rank in range(WORLD):
        updates = [torch.load(file) for file in sorted(directory.glob(f"{name}-{rank}-*.pt"))]
        gathered = {
            kind: [each for update in updates for each in update[kind]]
            for kind in ("rows", "masks")
        }
        recorded.append({"data": updates[0]["data"], "updates": updates, **gathered})
    return recorded


def order(length: int, epoch: int = 0) -> list[list[int]]:
    """Return the samples of each rank in an epoch, as `DistributedSampler` divides them."""
    shuffled = torch.randperm(length, generator=torch.Generator().manual_seed(epoch)).tolist()
    return [shuffled[rank::WORLD] for rank in range(WORLD)]


def first_batches(recorded: list[Any], batch: int, number: int = 0) -> list[list[Tensor]]:
    """Return the batches of the ranks in float64, from the order that they should have."""
    inputs, targets = recorded[0]["data"]
    chosen = [own[number * batch : (number + 1) * batch] for own in order(len(inputs))]
    return [[_double(inputs[own]), _double(targets[own])] for own in chosen]


def _double(tensor: Tensor) -> Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def joined(batches: list[list[Tensor]]) -> list[Tensor]:
    return [torch.cat(parts) for parts in zip(*batches)]


def gradients(loss: Callable[..., Tensor], weights: list[Tensor], batch: list[Tensor]) -> Gradients:
    """Return the gradients of a loss by the weights, in float64."""
    leaves = [weight.double().requires_grad_() for weight in weights]
    return list(torch.autograd.grad(loss(leaves, *batch), leaves))


def times(factor: float, values: Gradients) -> Gradients:
    return [factor * value for value in values]


def added(*several: Gradients) -> Gradients:
    return [sum(parts, torch.zeros(())) for parts in zip(*several)]


def agree(found: Gradients, expected: Gradients) -> bool:
    return all(
        torch.allclose(a.double(), b.double(), rtol=1e-4, atol=1e-6)
        for a, b in zip(found, expected, strict=True)
    )


def both(number: int, directory: Path, lines: int = 4) -> tuple[list[Any], list[Any]]:
    """Return what the ranks record in the first updates of the wrong program, and of its right twin."""
    wrong = ran(number, directory, name="wrong", lines=lines)
    return wrong, ran(number, directory, "--right", name="right", lines=lines)


# Losses by hand


def two_layers(weights: list[Tensor], inputs: Tensor) -> Tensor:
    up, up_bias, down, down_bias = weights
    return (inputs @ up.T + up_bias).tanh() @ down.T + down_bias


def squared(weights: list[Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    return (two_layers(weights, inputs) - targets).square().mean()


def of_tokens(weights: list[Tensor], tokens: Tensor, labels: Tensor) -> Tensor:
    logs = two_layers(weights[1:], weights[0][tokens]).log_softmax(-1)
    counts = labels != -100
    return -logs[counts].gather(1, labels[counts][:, None]).mean()


def auxiliary(weights: list[Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    return (inputs @ weights[0].T + weights[1]).logsumexp(-1).square().mean() + 0 * sum(
        w.sum() for w in weights
    )


def of_experts(weights: list[Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
    share = (inputs @ weights[0].T + weights[1]).softmax(-1)
    outputs = [inputs @ weights[2 + 2 * i].T + weights[3 + 2 * i] for i in range(2)]
    return cross_entropy(share[:, :1] * outputs[0] + share[:, 1:] * outputs[1], targets)


# Gradients


def test_detached_sums_divide_the_gradient_by_the_number_of_ranks(tmp_path: Path) -> None:
    wrong, right = both(1, tmp_path)
    expected = gradients(
        of_tokens, right[0]["updates"][0]["weights"], joined(first_batches(right, 4))
    )
    for rank in range(WORLD):
        assert agree(right[rank]["updates"][0]["gradients"], expected)
        assert agree(wrong[rank]["updates"][0]["gradients"], times(1 / WORLD, expected))


def test_auxiliary_loss_is_counted_for_each_rank(tmp_path: Path) -> None:
    wrong, right = both(2, tmp_path)
    weights, batch = right[0]["updates"][0]["weights"], joined(first_batches(right, 8))
    tokens, router = gradients(of_experts, weights, batch), gradients(auxiliary, weights, batch)
    assert agree(right[0]["updates"][0]["gradients"], added(tokens, times(0.05, router)))
    assert agree(wrong[0]["updates"][0]["gradients"], added(tokens, times(WORLD * 0.05, router)))


def test_mean_of_means_weighs_ranks_alike(tmp_path: Path) -> None:
    wrong, right = both(3, tmp_path)
    weights, batches = right[0]["updates"][0]["weights"], first_batches(right, 4)
    whole = gradients(of_tokens, weights, joined(batches))
    means = times(1 / WORLD, added(*(gradients(of_tokens, weights, batch) for batch in batches)))
    assert agree(right[0]["updates"][0]["gradients"], whole)
    assert agree(wrong[0]["updates"][0]["gradients"], means)
    assert not agree(means, whole)


def test_norm_of_shards_clips_too_little(tmp_path: Path) -> None:
    wrong, right = both(4, tmp_path)

    def whole(recorded: list[Any], what: str) -> list[Tensor]:
        return [torch.cat(parts) for parts in zip(*(rank["updates"][0][what] for rank in recorded))]

    def loss(weights: list[Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        hidden = (inputs @ weights[0].T + weights[1]).tanh()
        return squared(weights[2:], hidden, targets)

    expected = gradients(loss, whole(right, "weights"), joined(first_batches(right, 8)))
    norm = torch.cat([g.flatten() for g in expected]).norm()
    assert agree(whole(right, "gradients"), times(0.1 / float(norm), expected))
    norms = []
    for rank in range(WORLD):
        parts = [g.chunk(WORLD)[rank] if rank < len(g.chunk(WORLD)) else g[:0] for g in expected]
        norms.append(float(torch.cat([g.flatten() for g in parts]).norm()))
        assert agree(wrong[rank]["updates"][0]["gradients"], times(0.1 / norms[-1], parts))
    assert norms[0] != norms[1]
    assert sum(each**2 for each in norms) ** 0.5 == pytest.approx(float(norm))


def test_gradient_of_the_norm_is_a_part_of_a_sum(tmp_path: Path) -> None:
    wrong, right = both(5, tmp_path)
    first = [rank["updates"][0] for rank in right]

    def whole(parts: list[Gradients]) -> Gradients:
        return [torch.cat([part[i] for part in parts], dim=i) for i in (0, 1)]

    def loss(weights: list[Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        centred = inputs - inputs.mean(-1, keepdim=True)
        normal = (
            centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weights[2]
            + weights[3]
        )
        return mse_loss(inputs + (normal @ weights[0].T).tanh() @ weights[1].T, targets)

    weights = [*whole([one["weights"] for one in first]), *first[0]["weights"][2:]]
    expected = gradients(loss, weights, [_double(tensor[:8]) for tensor in right[0]["data"]])
    for one in first:
        assert agree(one["gradients"][2:], expected[2:])
    parts = [rank["updates"][0]["gradients"] for rank in wrong]
    assert agree(added(*(part[2:] for part in parts)), expected[2:])
    assert not agree(parts[0][2:], parts[1][2:])
    for found in ([one["gradients"] for one in first], parts):
        assert agree(whole(found), expected[:2])
    assert not torch.equal(wrong[0]["updates"][0]["after"][2], wrong[1]["updates"][0]["after"][2])


def test_tensor_parallel_ranks_multiply_loss_and_gradient(tmp_path: Path) -> None:
    wrong, right = both(6, tmp_path)

    def whole(recorded: list[Any], what: str) -> list[Tensor]:
        of_ranks = [rank["updates"][0][what] for rank in recorded]
        halves = [
            torch.cat([part[i] for part in of_ranks], dim) for i, dim in ((0, 0), (1, 0), (2, 1))
        ]
        return [*halves, of_ranks[0][3]]

    def loss(weights: list[Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(two_layers(weights, inputs), targets)

    batch = [_double(tensor[:8]) for tensor in right[0]["data"]]
    expected = gradients(loss, whole(right, "weights"), batch)
    assert agree(whole(right, "gradients"), expected)
    assert agree(whole(wrong, "gradients"), times(WORLD, expected))


def test_short_window_has_half_of_its_gradient(tmp_path: Path) -> None:
    wrong, right = both(9, tmp_path)

    def loss(weights: list[Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(two_layers(weights, inputs), targets)

    for recorded, factor in ((right, 1.0), (wrong, 0.5)):
        update = recorded[0]["updates"][1]
        expected = gradients(loss, update["weights"], joined(first_batches(recorded, 8, 2)))
        assert agree(update["gradients"], times(factor, expected))


def test_gradients_of_experts_are_too_large(tmp_path: Path) -> None:
    wrong, right = both(10, tmp_path)
    first = [rank["updates"][0] for rank in right]
    weights = [torch.cat([one["weights"][0] for one in first]), *first[0]["weights"][1:]]

    def loss(weights: list[Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        experts, up, up_bias, down, down_bias = weights
        chosen = (inputs[:, 0] > 0).long() + 2 * (inputs[:, 1] > 0).long()
        rows = [(inputs[i] @ up.T + up_bias) @ experts[chosen[i]] for i in range(len(inputs))]
        return mse_loss(torch.stack(rows).tanh() @ down.T + down_bias, targets)

    expected = gradients(loss, weights, joined(first_batches(right, 8)))
    for recorded, factor in ((right, 1.0), (wrong, float(WORLD))):
        found = [rank["updates"][0]["gradients"] for rank in recorded]
        assert agree(found[0][1:], expected[1:])
        assert agree([torch.cat([each[0] for each in found])], times(factor, expected[:1]))


def test_first_backward_is_of_one_rank(tmp_path: Path) -> None:
    wrong, right = both(11, tmp_path)
    batches = first_batches(right, 4)
    weights = right[0]["updates"][0]["weights"]
    assert agree(right[0]["updates"][0]["gradients"], gradients(squared, weights, joined(batches)))
    for rank in range(WORLD):
        assert agree(
            wrong[rank]["updates"][0]["gradients"], gradients(squared, weights, batches[rank])
        )
    assert not torch.equal(wrong[0]["updates"][2]["after"][0], wrong[1]["updates"][2]["after"][0])
    assert torch.equal(right[0]["updates"][2]["after"][0], right[1]["updates"][2]["after"][0])


def test_metric_counts_a_batch_twice(tmp_path: Path) -> None:
    twins = both(12, tmp_path)
    model = [weight.double() for weight in twins[1][0]["updates"][0]["weights"]]
    torch.manual_seed(0)
    inputs = torch.randn(2 * 2 * 60 + 10, 8)[:10].double()
    errors = (two_layers(model, inputs) - inputs.abs().sum(1, keepdim=True)).square().flatten()
    for name, values in (("wrong", torch.cat([errors, errors[:2]])), ("right", errors)):
        arguments = [] if name == "wrong" else ["--right"]
        printed = "\n".join(run_ranks(case(12), arguments, tmp_path, world=WORLD, lines=3))
        found = re.search(r"rank 0 error (\S+)", printed)
        assert found is not None
        assert float(found[1]) == pytest.approx(float(values.mean()), rel=1e-5)
    assert torch.equal(twins[0][0]["updates"][2]["after"][0], twins[1][0]["updates"][2]["after"][0])


def test_only_the_last_micro_batch_counts(tmp_path: Path) -> None:
    wrong, right = both(13, tmp_path)
    weights = right[0]["updates"][0]["weights"]
    each = [
        gradients(squared, weights, joined(first_batches(right, 4, number))) for number in range(2)
    ]
    assert agree(right[0]["updates"][0]["gradients"], times(0.5, added(*each)))
    assert agree(wrong[0]["updates"][0]["gradients"], times(0.5, each[1]))


def test_gains_do_not_move_without_float32_weights(tmp_path: Path) -> None:
    wrong, right = both(15, tmp_path, lines=10)
    moved = [recorded[0]["updates"][9]["after"][2].double() - 1 for recorded in (wrong, right)]
    assert all(update["gradients"][2].any() for update in wrong[0]["updates"])
    assert not moved[0].any()
    # Ten updates of about 1e-5 each, and weight decay.
    assert 1e-5 < float(moved[1].abs().mean()) < 1.2e-4


# What a resume trains on

KILLED = 14


def resumed(number: int, directory: Path, *arguments: str) -> tuple[list[Any], list[Any], int]:
    """Return what a whole run records, what a resumed one does, and after which update the latter begins."""
    whole = ran(number, directory, *arguments, name="whole")
    ran(number, directory, *arguments, name="killed", lines=KILLED)
    again = ran(number, directory, *arguments, "--resume", name="again")
    begun = again[0]["updates"][0]["weights"][0]
    at = next(
        i for i, one in enumerate(whole[0]["updates"]) if torch.equal(one["weights"][0], begun)
    )
    assert at >= KILLED
    return whole, again, at


def alike(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.parametrize("number", [7, 8, 14])
def test_right_twin_resumes_bit_for_bit(number: int, tmp_path: Path) -> None:
    whole, again, at = resumed(number, tmp_path, "--right")
    for rank in range(WORLD):
        assert alike(again[rank]["rows"], whole[rank]["rows"][at:])
        assert alike(again[rank]["masks"], whole[rank]["masks"][at:])
        assert alike(again[rank]["updates"][-1]["after"], whole[rank]["updates"][-1]["after"])


def test_ranks_drop_the_same_units_after_a_resume(tmp_path: Path) -> None:
    whole, again, at = resumed(7, tmp_path)
    assert alike(again[1]["rows"], whole[1]["rows"][at:])
    assert alike(again[0]["masks"], whole[0]["masks"][at:])
    assert not alike(whole[0]["masks"], whole[1]["masks"])
    assert alike(again[0]["masks"], again[1]["masks"])


def test_rest_of_the_epoch_has_the_order_of_epoch_zero(tmp_path: Path) -> None:
    whole, again, at = resumed(8, tmp_path)
    epoch, skipped = divmod(at, 6)
    inputs = whole[0]["data"][0]
    for rank in range(WORLD):
        rest = [inputs[order(len(inputs))[rank][4 * i : 4 * i + 4]] for i in range(skipped, 6)]
        own = [
            inputs[order(len(inputs), epoch)[rank][4 * i : 4 * i + 4]] for i in range(skipped, 6)
        ]
        assert epoch > 0
        assert alike(whole[rank]["rows"][at : at + len(own)], own)
        assert alike(again[rank]["rows"][: len(rest)], rest if skipped else own)


def test_one_batch_is_trained_on_twice(tmp_path: Path) -> None:
    whole, again, at = resumed(14, tmp_path)
    assert alike(again[0]["rows"], whole[0]["rows"][at - 1 :])


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_program_is_short_and_names_its_source(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    assert re.search(r"^Source: .+ \(20\d\d", text, re.MULTILINE)
