"""What a run has done so far: the part of a runner that is saved and restored as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass
class TrainState:
    """Progress of training, the same on all ranks.

    Attributes:
        global_step: Optimizer updates committed.
        micro_step: Micro-batches that went through a backward on this rank.
        epoch: Epochs completed.
        samples: Samples of the data domain that committed or skipped updates consumed.
        skipped_updates: Updates that were not committed.
        consecutive_skips: Updates not committed since the last committed one.
        weight_reference: Fixed scale of micro-batch weights in a run of several ranks; see `danling.training.Window`.
    """

    global_step: int = 0
    micro_step: int = 0
    epoch: int = 0
    samples: int = 0
    skipped_updates: int = 0
    consecutive_skips: int = 0
    weight_reference: float | None = None

    @property
    def attempted(self) -> int:
        """Updates committed or skipped: the number of the next one in the keys of random numbers, which never comes twice."""
        return self.global_step + self.skipped_updates

    def load(self, stored: Mapping[str, object]) -> None:
        """Restore the counters; one that is not stored stays as it is."""
        for item in fields(self):
            if item.name in stored:
                setattr(self, item.name, stored[item.name])


@dataclass
class ElasticState:
    """The attempts of a run, which runs that are compared bit by bit need not have in common; it has nothing to do with `elastic.enabled`.

    Attributes:
        world_size: Number of processes of the attempt.
        data_replicas: How many of them read different samples.
        restart_count: How often torchrun has restarted the group in this attempt.
        attempts: How many processes in a row have worked on the run, the first one counted.
        micro_batch_size: Samples that a rank can hold at once, as running out of memory has told; `None` before it did.
        arithmetic: Threads, torch and processor, on which the bits of a result depend.
    """

    world_size: int = 1
    data_replicas: int = 1
    restart_count: int = 0
    attempts: int = 1
    micro_batch_size: int | None = None
    arithmetic: dict[str, str] = field(default_factory=dict)

    def load(self, stored: Mapping[str, Any]) -> None:
        """Count the attempts up, and take over how many samples a rank can hold."""
        self.attempts, self.micro_batch_size = (
            int(stored.get("attempts", 0)) + 1,
            stored.get("micro_batch_size"),
        )


@dataclass
class RngState:
    """What the random numbers of a run follow from, in addition to their place.

    Attributes:
        seed: Seed of the run.
    """

    seed: int = 0


@dataclass
class RunnerState:
    """Everything of a runner that is neither model, optimizer, scheduler nor data.

    Attributes:
        train: Counters.
        elastic: Attempts.
        rng: The seed.
    """

    train: TrainState = field(default_factory=TrainState)
    elastic: ElasticState = field(default_factory=ElasticState)
    rng: RngState = field(default_factory=RngState)

    @property
    def train_state(self) -> TrainState:
        """The counters, by their longer name."""
        return self.train

    @property
    def elastic_state(self) -> ElasticState:
        """The attempts, by their longer name."""
        return self.elastic

    @property
    def rng_state(self) -> RngState:
        """The seed, by its longer name."""
        return self.rng

    def state_dict(self) -> dict[str, Any]:
        """Return `{"train": ..., "elastic": ..., "rng": ...}` of tensors and plain values."""
        return {
            "train": asdict(self.train),
            "elastic": asdict(self.elastic),
            "rng": asdict(self.rng),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters; attempts are counted up. The seed is that of the configuration. What is not stored stays as it is.

        A checkpoint is restored entry by entry: this method gets the entries that the `state_dict` of a subclass has added.
        """
        if "train" in state:
            self.train.load(state["train"])
        if "elastic" in state:
            self.elastic.load(state["elastic"])
