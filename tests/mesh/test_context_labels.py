"""Labels that a model shifts, on slices of sequences: the weights of a loop by hand on whole sequences."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.toys import whole_settings
from torch import Tensor, nn
from torch.nn import functional as F

import danling as dl
from danling.mesh import Topology
from danling.utils.tensors import whole

LENGTH, VOCABULARY = 8, 11


class Shifting(nn.Module):
    """Compares each position with the label of the next one, as causal language models do."""

    shifts_labels = True

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding, self.head = nn.Embedding(VOCABULARY, 6), nn.Linear(6, VOCABULARY)

    def parallelize(self, topology: Topology) -> None:
        """Positions do not see each other."""

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        shift_labels: Tensor | None = None,
        **_: Any,
    ) -> dict[str, Any]:
        logits = self.head(torch.tanh(self.embedding(input_ids)))
        if labels is None:
            return {"loss": None, "logits": logits}
        if shift_labels is None:
            shift_labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return {
            "loss": F.cross_entropy(logits.flatten(0, 1), shift_labels.flatten()),
            "logits": logits,
        }


class Deaf(Shifting):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> dict[str, Any]:  # type: ignore[override]
        return super().forward(input_ids, labels)


class Undeclared(Shifting):
    shifts_labels = None  # type: ignore[assignment]


def sentences() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    tokens = torch.randint(VOCABULARY, (48, LENGTH), generator=generator)
    labels = tokens.masked_fill(torch.rand(tokens.shape, generator=generator) < 0.2, -100)
    return [{"input_ids": each, "labels": target} for each, target in zip(tokens, labels)]


def packed() -> Any:
    generator = torch.Generator().manual_seed(6)
    sizes = torch.randint(2, 6, (90,), generator=generator).tolist()
    return dl.data.Packed(
        [torch.randint(VOCABULARY, (size,), generator=generator).tolist() for size in sizes], LENGTH
    )


class Language(dl.Runner):
    not_saved = ("seen",)

    def __init__(
        self, config: Mapping[str, Any], model: type[nn.Module], data: Any, stop_at: int = 0
    ) -> None:
        super().__init__(config)
        self.model = model().double()
        self.datasets = {"train": data, "val": sentences()[:5]}
        self.seen = list[dict[str, Tensor]]()
        self.stop_at = stop_at

    def to_device(self, data: Any) -> Any:
        if self.mode == "train":
            self.seen.append(dict(data))
        return super().to_device(data)

    def step(self) -> Any:
        if self.train_state.global_step + 1 == self.stop_at:
            self.stop()
        return super().step()


def config(root: Path, axes: Mapping[str, int], **changes: Any) -> dict[str, Any]:
    base = {
        "stack": "parallel",
        "parallel": {"axes": dict(axes)},
        "steps": 3,
        "dataloader": {"batch_size": 2},
    }
    base |= {
        "optim": {"type": "adamw", "lr": 0.05},
        "scheduler": {"type": "constant"},
        "log": False,
    }
    return whole_settings(str(root), **{**base, "evaluate_interval": 3, **changes})


def train(
    settings: Mapping[str, Any], data: Any, stop_at: int = 0
) -> tuple[dict[str, Tensor], Any]:
    """Return the weights, and the whole batches of this rank."""
    with Language(settings, Shifting, data, stop_at) as runner:
        runner.train()
        return {
            name: whole(value).clone() for name, value in runner.model_state_dict().items()
        }, runner.seen


def by_hand(seen: list[list[dict[str, Tensor]]], accumulated: int) -> nn.Module:
    """The same updates on whole sequences."""
    model = Shifting().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for first in range(0, len(seen[0]), accumulated):
        batches = [batch for replica in seen for batch in replica[first : first + accumulated]]
        counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
        for batch, count in zip(batches, counts):
            (model(batch["input_ids"], batch["labels"])["loss"] * count / sum(counts)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


CONTEXT = {"context": 2}


@pytest.mark.parametrize("kind", ["sentences", "packed"])
@pytest.mark.parametrize(
    "axes",
    [CONTEXT, pytest.param({"context": 2, "shard": 2}, marks=pytest.mark.slow)],
    ids=["CP", "CP x FSDP"],
)
def test_labels_at_the_edges_of_slices_count(
    axes: Mapping[str, int], kind: str, tmp_path: Path
) -> None:
    data = sentences() if kind == "sentences" else packed()
    ranks = 2 * axes.get("shard", 1)
    first = config(tmp_path, axes, dir=str(tmp_path / "run"), auto_resume=True)
    # Stopped after the second update, and resumed.
    before = run_processes(train, first, data, 2, world_size=ranks)
    results = run_processes(train, first, data, world_size=ranks)
    replicas = _one_of_each([before[rank][1] + results[rank][1] for rank in range(ranks)])
    assert len(replicas) == axes.get("shard", 1)
    model = by_hand(replicas, 2)
    expected = model.state_dict()
    for weights, _ in results:
        assert all((value - expected[name]).abs().max() < 1e-12 for name, value in weights.items())


def _one_of_each(replicas: list[list[dict[str, Tensor]]]) -> list[list[dict[str, Tensor]]]:
    """Ranks of one data replica have seen the same batches."""
    found: list[list[dict[str, Tensor]]] = []
    for each in replicas:
        if not any(torch.equal(each[0]["input_ids"], other[0]["input_ids"]) for other in found):
            found.append(each)
    return found


def refused(
    settings: Mapping[str, Any], model: type[nn.Module], data: Any, criterion: Any, shifts: Any
) -> str:
    class Refused(Language):
        def __init__(self) -> None:
            super().__init__(settings, model, data)
            self.criterion, self.shifts_labels = criterion, shifts

    with pytest.raises(ValueError, match="context") as caught, Refused() as runner:
        runner.train()
    return str(caught.value)


@pytest.mark.parametrize(
    ("model", "criterion", "shifts", "data", "said"),
    [
        (Deaf, None, None, sentences, "parameter `shift_labels`"),
        (Undeclared, None, None, sentences, "Set `shifts_labels`"),
        (Shifting, nn.CrossEntropyLoss(), True, sentences, "with a criterion"),
        (Shifting, nn.CrossEntropyLoss(), None, packed, "dl.data.Packed"),
    ],
    ids=[
        "a model that takes no shifted labels",
        "a model that does not say",
        "a criterion",
        "labels of Packed",
    ],
)
def test_loss_with_a_shift_of_slices_is_refused(
    model: Any, criterion: Any, shifts: Any, data: Any, said: str, tmp_path: Path
) -> None:
    arguments = config(tmp_path, CONTEXT), model, data(), criterion, shifts
    assert all(said in message for message in run_processes(refused, *arguments))
