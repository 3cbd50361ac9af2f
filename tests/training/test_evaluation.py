"""The component of evaluations by itself: its sums beside sums by hand, its mode, and ranks that stay in step."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support.weights import batch_loss
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from danling.data import PLACEHOLDER, Batch, BatchSource
from danling.metrics import MetricSet, accuracy
from danling.training import (
    Evaluation,
    EvaluationSums,
    checked_figures,
    even_out,
    try_one_batch,
    written_by_forward,
)
from danling.training.evaluation import Trial

CPU = torch.device("cpu")


class Ranks:
    """Ranks of one process: threads that meet at a barrier instead of communicating."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=20)

    def rank(self, index: int) -> Rank:
        return Rank(self, index)

    def exchange(self, index: int, value: Any) -> list[Any]:
        self._values[index] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


class Rank:
    def __init__(self, ranks: Ranks, index: int) -> None:
        self.rank, self.size, self._ranks = index, ranks.size, ranks

    def all_reduce(self, tensor: Tensor, op: str = "sum") -> Tensor:
        assert op == "sum"
        return tensor.copy_(torch.stack(self._ranks.exchange(self.rank, tensor.clone())).sum(0))

    def gather_objects(self, value: Any) -> list[Any]:
        return self._ranks.exchange(self.rank, value)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return self._ranks.exchange(self.rank, value)[source]

    def barrier(self) -> None:
        self._ranks.exchange(self.rank, None)


def evened(own: Sequence[list[Any]], readers: Sequence[int] | None = None) -> list[list[Batch]]:
    """Return what every rank evaluates; a number in `readers` says which group of readers a rank belongs to, 0 reads nothing."""
    groups = readers or [1] * len(own)
    world = Ranks(len(own))
    of_group = {group: Ranks(groups.count(group)) for group in set(groups)}
    found: list[list[Batch]] = [[] for _ in own]

    def run(rank: int) -> None:
        group = groups[rank]
        batches = iter([Batch(data, None if data is PLACEHOLDER else 2, None) for data in own[rank]])
        place = groups[:rank].count(group)
        found[rank] = list(
            even_out(batches, ranks=world.rank(rank), readers=of_group[group].rank(place), reads=bool(group))
        )

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(own))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


@pytest.mark.parametrize("counts", [(3, 3), (0, 2), (2, 0, 5), (4, 1, 0, 0), (0, 0)], ids=str)
def test_ranks_evaluate_equally_many_batches_and_each_of_them_once(counts: tuple[int, ...]) -> None:
    own = [[f"{rank}.{index}" for index in range(count)] for rank, count in enumerate(counts)]
    found = evened(own)
    assert {len(batches) for batches in found} == {max(counts)}
    for mine, batches in zip(own, found):
        assert [batch.data for batch in batches if batch.samples != 0] == mine
        spare = [batch for batch in batches if batch.samples == 0]
        # A rank that ran out repeats what it had; one that had nothing is given what another one has.
        others = {data for rank in own for data in rank[:1]}
        assert all(batch.data == mine[-1] if mine else batch.data in others for batch in spare)


def test_ranks_that_read_nothing_go_on_with_placeholders() -> None:
    # Stages of a pipeline: the first and the last one read, each over two data replicas; the middle one does not.
    own = [["a", "b"], ["c"], [PLACEHOLDER], [PLACEHOLDER, PLACEHOLDER], ["a", "b"], ["c"]]
    found = evened(own, readers=[1, 1, 0, 0, 2, 2])
    assert [[batch.data for batch in batches] for batches in found] == [
        ["a", "b"],
        ["c", "c"],
        [PLACEHOLDER, PLACEHOLDER],
        [PLACEHOLDER, PLACEHOLDER],
        ["a", "b"],
        ["c", "c"],
    ]
    assert [batch.samples for batch in found[1]] == [2, 0]


def points(count: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, 3, generator=generator)
    return inputs, inputs.argmax(1)


def sums_over(criterion: nn.Module, *, metrics: MetricSet, sums_loss: bool) -> tuple[EvaluationSums, float, float]:
    """Return the sums over ragged batches, and loss and accuracy over all samples at once."""
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    inputs, target = points(11)

    def step(data: Any) -> tuple[Tensor, Tensor]:
        assert not torch.is_grad_enabled()
        pred = model(data[0])
        return pred, criterion(pred, data[1])

    sums = EvaluationSums(
        step,
        weigh=lambda batch, data: batch_loss().weigh(batch, data),
        to_device=lambda data: data,
        metrics=metrics,
        sums_loss=sums_loss,
    )
    cuts = [slice(0, 4), slice(4, 8), slice(8, 11)]
    batches = [Batch((inputs[cut], target[cut]), cut.stop - cut.start, None) for cut in cuts]
    sums.add_all([*batches, Batch((inputs[:4], target[:4]), 0, 0)])  # padding at the end
    pred = model(inputs)
    return (
        sums,
        float(nn.functional.cross_entropy(pred, target).detach()),
        float((pred.argmax(1) == target).double().mean()),
    )


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_figures_are_those_of_all_samples_at_once(reduction: str) -> None:
    metrics = MetricSet.wrap({"accuracy": accuracy})
    sums, loss, share = sums_over(
        nn.CrossEntropyLoss(reduction=reduction), metrics=metrics, sums_loss=reduction == "sum"
    )
    assert sums.scored
    assert sums.totals.averages()["loss"] == pytest.approx(loss, rel=1e-6)
    assert metrics.compute()["accuracy"] == pytest.approx(share)


def test_a_step_without_a_loss_leaves_no_loss() -> None:
    sums = EvaluationSums(
        lambda data: (data, None),
        weigh=lambda batch, data: (1.0, 1.0),
        to_device=lambda data: data,
        metrics=MetricSet.wrap(None),
    )
    sums.add(Batch(torch.ones(2), 2, None))
    assert not sums.scored and sums.totals.averages() == {}


@pytest.mark.parametrize("returned", [None, torch.ones(()), (1, 2, 3)], ids=["none", "loss", "three"])
def test_a_step_that_returns_no_pair_is_named(returned: Any) -> None:
    sums = EvaluationSums(
        lambda data: returned,
        weigh=lambda batch, data: (1.0, 1.0),
        to_device=lambda data: data,
        metrics=MetricSet.wrap(None),
    )
    with pytest.raises(ValueError, match="Expected `evaluate_step` to return the prediction and the loss"):
        sums.add(Batch(torch.ones(2), 2, None))


@pytest.mark.parametrize("fails", [False, True])
def test_the_mode_leaves_model_and_weights_as_they_were(fails: bool) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5))
    trained = model[0].weight.detach().clone()
    happened: list[str] = []

    @contextmanager
    def averaged() -> Iterator[None]:
        happened.append("averaged")
        with torch.no_grad():
            kept = model[0].weight.clone()
            model[0].weight.zero_()
            try:
                yield
            finally:
                model[0].weight.copy_(kept)

    evaluation = Evaluation()
    for _ in range(2):
        try:
            with evaluation.mode(model, model, equalize=lambda: happened.append("equalized"), averaged=averaged):
                assert not model[1].training and not model[0].weight.any()
                if fails:
                    raise RuntimeError("in the middle")
        except RuntimeError:
            assert fails
    assert model[1].training and torch.equal(model[0].weight, trained)
    assert happened == ["equalized", "averaged", "equalized"] * 2


def test_a_model_that_was_in_evaluation_mode_stays_in_it() -> None:
    model = nn.Dropout(0.5).eval()
    with Evaluation().mode(model, model, equalize=lambda: None):
        pass
    assert not model.training


def test_batches_are_watched_only_while_somebody_watches() -> None:
    evaluation = Evaluation()
    seen: list[tuple[str, int]] = []

    def between(split: str, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            seen.append((split, batch.data))
            if batch.data == 2:
                return  # asked to stop
            yield batch

    def evaluated() -> list[Any]:
        return [batch.data for batch in evaluation.between("val", (Batch(index, 1, None) for index in range(4)))]

    with pytest.raises(KeyError), evaluation.watched(between):
        assert evaluated() == [0, 1]
        raise KeyError
    assert seen == [("val", 0), ("val", 1), ("val", 2)]
    assert evaluated() == [0, 1, 2, 3] and len(seen) == 3


def test_averaged_weights_are_announced_once_and_on_one_process(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "danling")
    for evaluation in (Evaluation(), Evaluation(is_main=False)):
        evaluation.announce_averaged(0.99)
        evaluation.announce_averaged(0.99)
    assert [record.getMessage() for record in caplog.records] == ["Evaluating the averaged weights (decay 0.99)."]


class Normalized(nn.Module):
    """Writes to its buffers in every forward of training mode, and counts its forwards in a buffer of its own in any mode."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        output: Tensor = self.norm(inputs)
        return output


def tried(loader: Any, summarize: Any, model: Normalized) -> tuple[Trial | None, list[Tensor]]:
    """Try the first batch of a loader; return what came of it and the batches that were read."""
    read: list[Tensor] = []
    metrics = MetricSet.wrap({"mean": lambda pred, target: pred.detach().mean()})

    def step(data: Any) -> tuple[Tensor, None]:
        read.append(data[0])
        return model(data[0][:, None].float()), None

    def evaluate(source: BatchSource) -> EvaluationSums:
        sums = EvaluationSums(
            step,
            weigh=lambda batch, data: (1.0, 1.0),
            to_device=lambda data: data,
            metrics=metrics,
        )
        sums.add(next(source.batches()))
        return sums

    found = try_one_batch(
        BatchSource(loader, split="val", seed=3),
        reopen=lambda loader: BatchSource(loader, split="val", seed=3),
        evaluate=evaluate,
        summarize=summarize,
        written=written_by_forward(model),
    )
    assert metrics.compute() == {}  # nothing of it is left in the figures of a whole evaluation
    return found, read


class Declared:
    """A sampler that counts its passes, and has a state therefore."""

    passes = 0

    def __iter__(self) -> Iterator[int]:
        self.passes += 1
        return iter(range(12))

    def __len__(self) -> int:
        return 12

    def state_dict(self) -> dict[str, Any]:
        return {"passes": self.passes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.passes = state["passes"]


def test_a_trial_leaves_loader_and_buffers_as_they_were() -> None:
    dataset = TensorDataset(torch.arange(12.0), torch.zeros(12, dtype=torch.long))
    sampler = Declared()
    loader, model = DataLoader(dataset, batch_size=4, sampler=sampler), Normalized()
    found, read = tried(loader, lambda totals: {"loss": 0.5}, model)
    assert found == Trial({"loss": 0.5}, False) and len(read) == 1
    assert sampler.passes == 0
    assert model.calls == 0 and not model.norm.running_mean.any()
    once, read = tried(iter([(torch.ones(2),)]), lambda totals: {}, model)
    assert once is None and not read  # what is given once is kept for the evaluation


def test_figures_that_one_batch_does_not_define_are_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def undefined(totals: Any) -> dict[str, float]:
        raise ZeroDivisionError("one class only")

    found, read = tried([(torch.ones(2), torch.zeros(2, dtype=torch.long))], undefined, Normalized())
    assert found == Trial(None, False) and len(read) == 1
    assert "ZeroDivisionError: one class only" in caplog.text


def test_what_a_forward_may_write_to() -> None:
    model, other = Normalized(), torch.ones(2)
    averaged = {"norm.running_mean": torch.ones(1), "norm.weight": torch.ones(1)}
    found = written_by_forward(model, [other], averaged)
    expected = [*model.buffers(), other, averaged["norm.running_mean"]]
    assert len(found) == len(expected) and all(one is another for one, another in zip(found, expected))


def test_figures_of_a_hook_are_floats_by_name() -> None:
    assert checked_figures("summarize", "val", {"loss": torch.tensor(0.5), 3: 2}) == {"loss": 0.5, "3": 2.0}
    with pytest.raises(ValueError, match="Expected `summarize` to return metrics by name"):
        checked_figures("summarize", "val", None)
    with pytest.raises(ValueError, match="val/loss"):
        checked_figures("summarize", "val", {"loss": torch.ones(2)})
