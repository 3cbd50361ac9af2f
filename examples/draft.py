"""Trains draft models for speculative decoding on the hidden states of a frozen target; `examples/speculative/README.md` has the figures.

python examples/draft.py target                                     # a small Llama that learns a small language
python examples/draft.py capture                                    # offline: its hidden states into files, then
python examples/draft.py train --features.retain all                #   a draft trained on them, as often as one likes
python examples/draft.py together --draft.kind domino               # both in one process, through memory
python examples/draft.py capture --features.path live --features.max_in_flight 512 &      # both at once, in two processes
python examples/draft.py train --features.path live
torchrun --nproc-per-node 2 examples/draft.py train --features.path live                  # ... the trainer on two
python examples/draft.py decode --pretrained experiments/eagle3/.../checkpoints/best.pth   # text of the target with the help of a draft

A target of one's own is `--target.path DIRECTORY`, as `save_pretrained` of transformers writes it.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from speculative.decoding import speculate
from speculative.language import Language
from speculative.runners import RUNNERS, DraftConfig, DraftRunner, collate
from speculative.target import TargetEnds, build_target, capture, load_target, spread_layers
from torch import Tensor
from torch.utils.data import Dataset

import danling as dl
from danling.stream import (
    DirectoryStore,
    FeatureDataset,
    FeatureProducer,
    FeatureStore,
    MemoryChannel,
    MemoryStore,
    RefChannel,
    SQLiteChannel,
    StreamLoader,
    run_together,
)


class TargetConfig(dl.RunnerConfig):
    """Settings of the target's own training."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.seed = 1
        self.lineage = "target"
        self.steps = 600
        self.max_grad_norm = 1.0
        self.target.path = "experiments/target"
        self.language.update(LANGUAGE)
        self.model = {"width": 64, "depth": 6, "heads": 4}
        self.dataloader.batch_size = 16
        self.optim = {"type": "adamw", "lr": 3e-3}
        self.scheduler = {"type": "cosine", "warmup_steps": 0.1}


class FeatureConfig(DraftConfig):
    """Settings of producer and trainer; each looks at its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.language.update(LANGUAGE)
        self.steps = 400
        self.draft.kind = "eagle3"
        self.features.update(
            {"path": "experiments/features", "train": 3200, "val": 64, "batch_size": 16}
        )
        self.features.update({"retain": "checkpoint", "max_in_flight": None})


LANGUAGE = {"tokens": 64, "preferred": 0.85, "length": 48, "prompt": 8}


class Sequences(Dataset[dict[str, Tensor]]):
    """Sequences of the language, each a function of its number.

    Args:
        config: Of which `language` is read.
        count: How many.
        seed: Sequences of another seed are others.
    """

    draws_random = False

    def __init__(self, config: dl.RunnerConfig, count: int, seed: int) -> None:
        self.settings = config.language
        self.language = Language(self.settings.tokens, self.settings.preferred)
        self.count = count
        self.seed = seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = self.language.sample(index, self.settings.length, self.seed)
        return {"input_ids": tokens, "labels": tokens, "index": torch.tensor(index)}


class TargetRunner(dl.Runner):
    """Trains the target, which is frozen afterwards."""

    def __init__(self, config: TargetConfig) -> None:
        super().__init__(config)
        self.datasets = {
            "train": Sequences(self.config, 20_000, seed=1),
            "val": Sequences(self.config, 200, seed=2),
        }
        self.model = build_target(self.config.language.tokens, **self.config.model)


class HiddenStates(FeatureProducer):
    """Publishes what drafts are trained on: tokens, hidden states of some layers, and the final one."""

    def __init__(
        self,
        config: FeatureConfig,
        *,
        store: FeatureStore,
        channel: RefChannel,
        max_in_flight: int | None = None,
    ) -> None:
        super().__init__(config, store=store, channel=channel, max_in_flight=max_in_flight)
        features = self.config.features
        self.config.dataloader.batch_size = features.batch_size
        self.datasets = {
            "train": Sequences(self.config, features.train, seed=3),
            "val": Sequences(self.config, features.val, seed=4),
        }
        self.model = load_target(self.config.target.path)
        self.layers = spread_layers(self.model.config.num_hidden_layers, self.config.target.layers)

    def sample_ids(self, batch: Any) -> list[int]:
        """Return the numbers of the sequences."""
        numbers: list[int] = batch["index"].tolist()
        return numbers

    def capture(self, batch: Any) -> dict[str, Tensor]:
        """Return the features of a batch of sequences."""
        tokens = batch["input_ids"]
        answered = (
            torch.arange(tokens.shape[1], device=tokens.device) >= self.config.language.prompt
        )
        known = {
            "input_ids": tokens,
            "loss_mask": answered.expand_as(tokens),
            "index": batch["index"],
        }
        return known | capture(self.unwrapped_model, tokens, self.layers)


def train_target(arguments: list[str]) -> None:
    """Train the target, and save it with the counts of its tokens."""
    config = TargetConfig()
    config.parse(arguments)
    with TargetRunner(config) as runner:
        runner.train()
        runner.save_pretrained(config.target.path)
        if runner.is_main_process:
            tokens = torch.cat(
                [runner.datasets["train"][index]["input_ids"] for index in range(1000)]
            )
            counts = torch.bincount(tokens, minlength=config.language.tokens)
            torch.save(counts, Path(config.target.path) / "token_counts.pt")
        loss, share = (runner.latest_result or {})["val"]["loss"], config.language.preferred
        entropy = -share * math.log(share) - (1 - share) * math.log(1 - share)
        runner.print(
            f"the target's loss is {loss:.3f}; {entropy:.3f} is the entropy of the language"
        )


def features_config(arguments: list[str]) -> FeatureConfig:
    """Return what the command line says; the runs of each draft have their own lineage."""
    config = FeatureConfig()
    config.parse(arguments)
    config.lineage = config.draft.kind
    return config


def producer_config(arguments: list[str]) -> FeatureConfig:
    """Return the same for a run that trains nothing, in its own directory."""
    config = features_config(arguments)
    config.lineage, config.dir, config.optim, config.scheduler = "capture", None, {}, {}
    return config


def stream(config: FeatureConfig, split: str) -> tuple[DirectoryStore, SQLiteChannel]:
    """Return store and log of a split, which are files."""
    place = Path(config.features.path) / split
    return DirectoryStore(place / "objects"), SQLiteChannel(place / "log.sqlite")


def produce(
    config: FeatureConfig,
    split: str,
    store: FeatureStore,
    channel: RefChannel,
    limit: int | None = None,
) -> None:
    """Make the features of a split, but those that are there."""
    with HiddenStates(config, store=store, channel=channel, max_in_flight=limit) as producer:
        producer.produce(split)


def complete(store: FeatureStore, channel: RefChannel, seconds: float = 600.0) -> FeatureDataset:
    """Return the samples of a log as a list that stays as it is, once it is complete.

    Raises:
        TimeoutError: If it is not so in time.
    """
    last = time.monotonic() + seconds
    while (end := channel.ended()) is None or end.kind != "complete":
        if time.monotonic() > last:
            raise TimeoutError(
                f"Expected {channel.name} to be complete. Received: {end}. Run `draft.py capture`."
            )
        time.sleep(0.1)
    return FeatureDataset(store, channel.read(0, end.published))


def capture_features(arguments: list[str]) -> None:
    """Write the features to validate on, then those to train on."""
    config = producer_config(arguments)
    produce(config, "val", *stream(config, "val"))
    produce(config, "train", *stream(config, "train"), limit=config.features.max_in_flight)


def trainer(
    config: FeatureConfig, store: FeatureStore, channel: RefChannel, val: FeatureDataset
) -> DraftRunner:
    """Return the runner of a draft on a stream."""
    retain, batch_size = config.features.retain, config.dataloader.batch_size or 1
    loader = StreamLoader(store, channel, batch_size, collate_fn=collate, retain=retain)
    return RUNNERS[config.draft.kind](config, train=loader, val=val)


def train(arguments: list[str]) -> None:
    """Train a draft on features in files, which may still be made."""
    config = features_config(arguments)
    val = complete(*stream(config, "val"))
    with trainer(config, *stream(config, "train"), val) as runner:
        fit(runner, runner.train)


def train_together(arguments: list[str]) -> None:
    """Train a draft on features that are made in the same process whenever it needs some."""
    config = features_config(arguments)
    produces, kept = producer_config(arguments), (MemoryStore(), MemoryChannel())
    produce(produces, "val", *kept)
    val, store, channel = complete(*kept), MemoryStore(), MemoryChannel()
    limit = config.features.max_in_flight
    with (
        HiddenStates(produces, store=store, channel=channel, max_in_flight=limit) as producer,
        trainer(config, store, channel, val) as runner,
    ):
        fit(runner, lambda: run_together(producer, runner, split="train"))


def fit(runner: DraftRunner, call: Callable[[], object]) -> None:
    """Train, export the draft, and print how much of it is accepted."""
    before = runner.evaluate("val")["val"]
    call()
    after = runner.evaluate("val")["val"]
    path = runner.workspace.dir / "draft.safetensors"
    runner.export(path)
    for name in ("acceptance_length", "expected_length"):
        runner.print(
            f"{name} {before[name]:.2f} -> {after[name]:.2f} of at most {runner.positions + 1}"
        )
    runner.print(f"the draft: {path}")


def decode(arguments: list[str]) -> None:
    """Write text with the target and a draft, and count the tokens of a round."""
    config = producer_config(arguments)
    model, ends = load_target(config.target.path), TargetEnds.load(config.target.path)
    layers = spread_layers(model.config.num_hidden_layers, config.target.layers)
    sequences = Sequences(config, 16, seed=5)
    with RUNNERS[config.draft.kind](config, train=sequences) as runner:
        draft = runner.unwrapped_model.eval()
        rounds = []
        for index in range(len(sequences)):
            prompt = sequences[index]["input_ids"][: config.language.prompt]
            length, count = config.language.length, runner.positions
            rounds += speculate(
                model, draft, ends, prompt, layers=layers, length=length, count=count
            )[1]
        runner.print(f"{sum(rounds) / len(rounds):.2f} tokens a round, greedily")


COMMANDS: dict[str, Callable[[list[str]], None]] = {
    "target": train_target,
    "capture": capture_features,
    "train": train,
    "together": train_together,
    "decode": decode,
}

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        raise SystemExit(f"usage: python {sys.argv[0]} {{{','.join(COMMANDS)}}} [--KEY VALUE ...]")
    COMMANDS[sys.argv[1]](sys.argv[2:])
