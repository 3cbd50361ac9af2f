"""Runners that train the drafts on what was captured of their target: one base, and one subclass for each draft.

A sample is a mapping of one sequence: `input_ids` int64 (S,), `loss_mask` bool (S,) (which tokens are to be predicted), `features`
(S, m * d) and `final` (S, d) of the target, and `index`, its number, int64 (). `collate` makes batches of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import danling as dl
from danling.checkpoints import export_weights
from danling.data import derive_seed
from danling.metrics import Meters
from danling.stream import StreamLoader

from .acceptance import expected_acceptance, lengths, position_sums
from .dflash import (
    DFlash,
    block_tokens,
    block_weights,
    decay_of,
    draw_anchors,
    weighted_cross_entropy,
)
from .domino import Domino, base_share
from .eagle3 import Eagle3, at_steps, counting_positions, eagle3_loss, step_weights
from .layers import shift_left
from .target import TargetEnds
from .vocabulary import DraftVocabulary

Tensors = dict[str, Any]


class DraftConfig(dl.RunnerConfig):
    """Settings that all drafts share; the command line goes above them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seed = 1
        self.max_grad_norm = 1.0
        self.score_name = "acceptance_length"
        self.target.path = "experiments/target"
        self.target.layers = 3
        self.draft.update(
            {"heads": 4, "depth": 2, "steps": 7, "vocabulary": 48, "block": 8, "anchors": 16}
        )
        self.dataloader.batch_size = 8
        self.optim = {"type": "adamw", "lr": 3e-3, "betas": [0.9, 0.95], "weight_decay": 0.0}
        self.scheduler = {"type": "cosine", "warmup_steps": 0.05, "final_lr_ratio": 0.1}


def collate(samples: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return a batch of samples, those that are shorter filled up with zeros behind their end, which have no weight.

    Args:
        samples: Each with the same names.
    """
    return {
        name: nn.utils.rnn.pad_sequence([sample[name] for sample in samples], batch_first=True)
        if samples[0][name].ndim
        else torch.stack([sample[name] for sample in samples])
        for name in samples[0]
    }


class DraftRunner(dl.Runner):
    """Trains a draft on captured features; a subclass says which draft, and what a batch is to it.

    Args:
        config: Settings, as those of `DraftConfig`.
        train: A stream of samples, or a dataset of them.
        val: A dataset of samples.
    """

    positions: int
    """Tokens that are drafted at a time, K."""

    def __init__(
        self,
        config: dl.RunnerConfig,
        *,
        train: StreamLoader | Dataset[Any],
        val: Dataset[Any] | None = None,
    ) -> None:
        super().__init__(config)
        self.config.dataloader.collate_fn = collate
        (self.dataloaders if isinstance(train, StreamLoader) else self.datasets)["train"] = train
        if val is not None:
            self.datasets["val"] = val
        # Not a part of the model: neither trained nor saved with it.
        self.target = TargetEnds.load(self.config.target.path, self.device)
        self.model = self.build_draft()

    def build_draft(self) -> nn.Module:
        """Return the model that is trained."""
        raise NotImplementedError

    def prepare(self, samples: Tensors) -> dict[str, Tensors]:
        """Return what the draft is given, `input`, and what it is to say, `target`, with `weights` of the positions.

        Args:
            samples: A batch on the device, as `collate` made it.
        """
        raise NotImplementedError

    def measure(self, pred: Any, target: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """Return where the target's choice was drafted, the expected acceptance, and which positions count, each (B, K, ...)."""
        raise NotImplementedError

    # What the runner asks for

    def to_device(self, data: Any) -> Any:
        """Return the batch on the device, with the target's frozen head run on it."""
        with torch.no_grad():
            return self.prepare(super().to_device(data))

    def batch_weight(self, data: Any, target: Any) -> float | Tensor:
        """Return what the positions that count weigh together; a batch without any weighs nothing, and changes nothing."""
        weight: Tensor = target["weights"].sum(dtype=torch.float64)
        return weight

    def evaluate_step(self, data: Any) -> tuple[Any, Tensor | None]:
        """Evaluate a batch, and count at each position how much of the draft its target accepts."""
        pred, loss = super().evaluate_step(data)
        accepted, expected, counts = self.measure(pred, data["target"])
        for name, values in (("accepted", accepted), ("expected", expected)):
            for position, (total, count) in enumerate(position_sums(values, counts), 1):
                self.meters.add_totals(f"{name}_{position}", total, count)
        return pred, loss

    def summarize(self, split: str, totals: Meters) -> dict[str, float]:
        """Return the loss, what is accepted at each position, and lengths, which are made of sums over all ranks."""
        figures = super().summarize(split, totals)
        found = lengths(figures, self.positions)
        return {
            name: figure for name, figure in figures.items() if not name.startswith("expected_")
        } | found

    def export(self, path: str | Path) -> None:
        """Write the draft's weights as safetensors. Call on all ranks."""
        with self.whole_weights():
            if self.is_main_process:
                export_weights(
                    path,
                    self.unwrapped_model.state_dict(),
                    metadata={"draft": type(self.unwrapped_model).__name__},
                )


class Eagle3Runner(DraftRunner):
    """Trains EAGLE-3."""

    def build_draft(self) -> nn.Module:
        """Return the draft, whose vocabulary are the tokens that are most frequent where the target was trained."""
        draft = self.config.draft
        self.positions = draft.steps
        counts = torch.load(Path(self.config.target.path) / "token_counts.pt", weights_only=True)
        vocabulary = DraftVocabulary.most_frequent(counts, min(draft.vocabulary, len(counts)))
        return Eagle3(
            self.target.width, vocabulary, layers=self.config.target.layers, heads=draft.heads
        )

    @property
    def vocabulary(self) -> DraftVocabulary:
        """The draft's tokens."""
        model = self.unwrapped_model
        assert isinstance(model, Eagle3)
        return model.vocabulary

    def prepare(self, samples: Tensors) -> dict[str, Tensors]:
        """Return features and embeddings, and the target's probabilities of the draft's tokens."""
        scores = self.target.scores(samples["final"])
        supervised, best = samples["loss_mask"], scores.argmax(-1)
        counts = counting_positions(supervised, best, self.vocabulary, self.positions)
        known = self.vocabulary.restrict(scores)
        embeddings = self.target.embed(samples["input_ids"])
        target = {
            "teacher": known.log_softmax(-1),
            "weights": step_weights(counts),
            # For acceptance, to which tokens that the draft does not have are refusals.
            "share": (known.logsumexp(-1) - scores.logsumexp(-1)).exp(),
            "best": best,
            "supervised": shift_left(supervised, 1),
        }
        return {
            "input": {
                "features": samples["features"],
                "embeddings": embeddings,
                "steps": self.positions,
            },
            "target": target,
        }

    def compute_loss(self, pred: Tensor, target: Tensors) -> Tensor:
        """Return the loss of all steps."""
        return eagle3_loss(pred, target["teacher"], target["weights"])

    def measure(self, pred: Tensor, target: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """Return acceptance by step."""
        drafted = self.vocabulary.to_target(pred.argmax(-1))
        target_shares = at_steps(
            target["teacher"].exp() * target["share"][..., None], self.positions
        )
        expected = expected_acceptance(target_shares, pred.softmax(-1))
        return (
            drafted == at_steps(target["best"], self.positions),
            expected,
            at_steps(target["supervised"], self.positions),
        )


class DFlashRunner(DraftRunner):
    """Trains DFlash."""

    def build_draft(self) -> nn.Module:
        """Return the draft."""
        draft = self.config.draft
        self.positions = draft.block - 1
        return DFlash(
            self.target.width,
            layers=self.config.target.layers,
            depth=draft.depth,
            heads=draft.heads,
        )

    def anchors(self, supervised: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        """Return where the blocks of a batch begin, int64 (B, A), and which of them are real.

        In training they are drawn by a stream of each sample and epoch, whichever rank reads it; in evaluation they are always the same.

        Args:
            supervised: Which tokens are to be predicted, bool (B, S).
            index: The numbers of the samples, int64 (B,).
        """
        drawn = []
        for row, number in zip(supervised.cpu(), index.tolist()):
            generator = None
            if self.mode == "train":
                seed = derive_seed(self.seed, "anchors", self.state.train.epoch, number)
                generator = torch.Generator().manual_seed(seed)
            drawn.append(draw_anchors(row, self.config.draft.anchors, generator))
        anchors, real = (torch.stack(parts).to(supervised.device) for parts in zip(*drawn))
        return anchors, real

    def prepare(self, samples: Tensors) -> dict[str, Tensors]:
        """Return features and blocks, and the tokens at their places."""
        block, supervised = self.config.draft.block, samples["loss_mask"]
        anchors, real = self.anchors(supervised, samples["index"])
        tokens, counts = block_tokens(samples["input_ids"], supervised, anchors, real, block)
        masked = torch.cat(
            [tokens[..., :1], torch.full_like(tokens[..., 1:], self.target.tokens - 1)], -1
        )
        inputs = {
            "features": samples["features"],
            "blocks": self.target.embed(masked),
            "anchors": anchors,
        }
        target = {
            "tokens": tokens,
            "weights": block_weights(counts, decay_of(block)),
            "counts": counts,
        }
        if self.mode == "evaluate":
            # What the target says of x_{a+k} is one position before it.
            places = (
                anchors[..., None] + torch.arange(block - 1, device=anchors.device)
            ).clamp_max(supervised.shape[1] - 1)
            batch = torch.arange(len(anchors), device=anchors.device)[:, None, None]
            target["teacher"] = self.target.scores(samples["final"][batch, places])
        return {"input": inputs, "target": target}

    def drafted_scores(self, pred: Tensors) -> Tensor:
        """Return the scores of the drafted tokens, (B, A, b - 1, V), by the target's head."""
        return self.target.scores(pred["hidden"])

    def compute_loss(self, pred: Tensors, target: Tensors) -> Tensor:
        """Return the weighted mean of the cross-entropy of the tokens."""
        return weighted_cross_entropy(
            self.drafted_scores(pred), target["tokens"][..., 1:], target["weights"]
        )

    def measure(self, pred: Tensors, target: Tensors) -> tuple[Tensor, Tensor, Tensor]:
        """Return acceptance by position of a block."""
        scores, teacher = self.drafted_scores(pred), target["teacher"]
        accepted = scores.argmax(-1) == teacher.argmax(-1)
        expected = expected_acceptance(teacher.softmax(-1), scores.softmax(-1))
        by_position = (values.transpose(1, 2) for values in (accepted, expected, target["counts"]))
        return tuple(by_position)  # type: ignore[return-value]


class DominoRunner(DFlashRunner):
    """Trains Domino: DFlash with a correction, and with another loss."""

    def build_draft(self) -> nn.Module:
        """Return the draft."""
        draft = self.config.draft
        self.positions = draft.block - 1
        return Domino(
            self.target.width,
            self.target.tokens,
            layers=self.config.target.layers,
            depth=draft.depth,
            heads=draft.heads,
        )

    def prepare(self, samples: Tensors) -> dict[str, Tensors]:
        """Return what DFlash is given, and the embeddings of the tokens that are known when each one is drafted."""
        batch = super().prepare(samples)
        batch["input"]["known"] = self.target.embed(batch["target"]["tokens"][..., :-1])
        return batch

    def drafted_scores(self, pred: Tensors) -> Tensor:
        """Return the corrected scores."""
        corrected: Tensor = super().drafted_scores(pred) + pred["correction"]
        return corrected

    def compute_loss(self, pred: Tensors, target: Tensors) -> Tensor:
        """Return (1 - l) of the corrected scores' loss and l of the others', where l falls to zero in the first half of the run."""
        if not self.steps:
            raise ValueError(
                "Expected a budget, over half of which the loss changes. Received: neither `steps` nor `epochs` of a known length."
            )
        share = base_share(self.state.train.global_step, self.steps)
        base = weighted_cross_entropy(
            DFlashRunner.drafted_scores(self, pred), target["tokens"][..., 1:], target["weights"]
        )
        return (1 - share) * super().compute_loss(pred, target) + share * base


RUNNERS: dict[str, type[DraftRunner]] = {
    "eagle3": Eagle3Runner,
    "dflash": DFlashRunner,
    "domino": DominoRunner,
}
"""For a command line; a program of one's own names the class."""
