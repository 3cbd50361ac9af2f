"""What can be read off a runner at any time, on any rank: its scores, its place among the ranks, its budget."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from danling.config import RunnerConfig
from danling.distributed import Domain, LaunchEnvironment, Placement
from danling.metrics import ScoreBoard
from danling.workspace.run_place import RunPlace

from .state import ElasticState, RngState, RunnerState, TrainState
from .verbs import Results, RunnerVerbs


class RunnerFacts(RunnerVerbs):
    """Properties of every runner. None of them communicates."""

    config: RunnerConfig
    device: torch.device
    seed: int
    seed_was_drawn: bool
    datasets: dict[str, Any]
    dataloaders: dict[str, Any]
    mode: Literal["train", "evaluate", "infer"]
    state: RunnerState
    launch: LaunchEnvironment
    world: Domain
    placement: Placement
    results: Results
    scoreboard: ScoreBoard | None
    id: str
    _run_place: RunPlace

    # Scores

    @property
    def scores(self) -> dict[int, float]:
        """The monitored figure by completed epoch or global step, of evaluations only.

        Override it for a score of your own, such as one made of several figures in `self.results`, in the order of the
        evaluations: the best and the latest score, `best`, early stopping and metric schedulers go by it. No communication: the same
        on all ranks.
        """
        return dict(self.scoreboard.scores) if self.scoreboard is not None else {}

    @property
    def own_scores(self) -> dict[int, float]:
        """What `scores` gives; none where an override gives nothing."""
        return self.scores or {}

    @property
    def best_index(self) -> int | None:
        """Completed epoch or global step of the best score; `None` before the first evaluation. Override it to choose another."""
        if self.scoreboard is None or not self._scores_itself:
            return self.scoreboard.best_index if self.scoreboard is not None else None
        return self.scoreboard.best_of(self.own_scores)

    @property
    def _scores_itself(self) -> bool:
        return type(self).scores is not RunnerFacts.scores

    @property
    def best_score(self) -> float | None:
        """The best score so far."""
        index = self.best_index
        return self.own_scores.get(index) if index is not None else None

    @property
    def latest_score(self) -> float | None:
        """The score of the last evaluation."""
        scores = self.own_scores
        return scores[next(reversed(scores))] if scores else None

    @property
    def evaluations_since_best(self) -> int:
        """Number of evaluations after the best one."""
        indices = list(self.own_scores)
        best = self.best_index
        return len(indices) - 1 - indices.index(best) if best in indices else len(indices)

    @property
    def is_best(self) -> bool:
        """Whether the last evaluation gave the best score."""
        scores = self.own_scores
        return bool(scores) and self.best_index == next(reversed(scores))

    @property
    def latest_result(self) -> dict[str, dict[str, float]] | None:
        """The last entry of `results`."""
        return self.results[next(reversed(self.results))] if self.results else None

    @property
    def best_result(self) -> dict[str, dict[str, float]] | None:
        """The entry of `results` with the best score."""
        return self.results.get(self.best_index) if self.best_index is not None else None

    # Where the run stands

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.launch.rank

    @property
    def workspace_part(self) -> str | None:
        """Directory below the run directory for all but the checkpoints; `None` unless several replica groups work on one run.

        Logs and figures of several processes must not meet in one file.
        """
        ft = self.config.ft
        return f"{self.config.checkpoint.ft_dataloader_checkpoint_prefix}-{ft.replica_id}" if ft.enabled else None

    @property
    def _replica_place(self) -> tuple[int, int]:
        """The replica group of this process, and how many there are."""
        ft = self.config.ft
        return (ft.replica_id, ft.group_size) if ft.enabled else (0, 1)

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.launch.world_size

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self.launch.local_rank

    @property
    def distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.launch.world_size > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is global rank 0."""
        return self.launch.rank == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is rank 0 of its machine."""
        return self.launch.local_rank == 0

    @property
    def data_domain(self) -> Domain:
        """Ranks that read different data, and over which losses and metrics are reduced."""
        return self.placement.data

    @property
    def data_replicas(self) -> int:
        """Number of ranks that read different samples to train on, over all replica groups."""
        return self.data_domain.size * self._replica_place[1]

    @property
    def optimizer_domain(self) -> Domain:
        """Ranks that decide an update together."""
        return self.placement.optimizer

    @property
    def figures_domain(self) -> Domain:
        """Ranks whose losses and metrics add up to those of all data; the data domain, unless one sample lies on several ranks."""
        return self.placement.metrics

    @property
    def stream_place(self) -> tuple[int, int]:
        """Index and number of the random streams of a forward, over all replica groups: ranks with one index draw the same numbers."""
        (group, groups), (index, number) = self._replica_place, self.placement.rng_stream
        return group * number + index, groups * number

    @property
    def instance(self) -> str:
        """Name of this run among those of one id that lie side by side: the id, or the id with `-2`, `-3`, ..."""
        return self._run_place.instance

    @property
    def name(self) -> str:
        """Name of the run: `config.name`, else lineage, experiment and id."""
        config = self.config
        return str(config.name) if config.name else f"{config.lineage}-{config.experiment}-{self.id}"

    @property
    def train_state(self) -> TrainState:
        """Counters of training."""
        return self.state.train

    @property
    def elastic_state(self) -> ElasticState:
        """Attempts of the run."""
        return self.state.elastic

    @property
    def rng_state(self) -> RngState:
        """Random streams by rank, as of the last checkpoint."""
        return self.state.rng

    @property
    def epochs(self) -> int | None:
        """Number of epochs after which training ends; `None` in step mode."""
        return self.config.epochs

    @property
    def steps(self) -> int | None:
        """Number of optimizer updates after which training ends; `None` when it is not known."""
        return self.config.steps

    @property
    def is_step_mode(self) -> bool:
        """Whether the budget counts updates instead of epochs."""
        return self.config.epochs is None

    @property
    def accum_steps(self) -> int:
        """Micro-batches of an update on each rank."""
        return int(self.config.accum_steps)

    @property
    def progress(self) -> float:
        """Share of the budget that is done, in [0, 1]; 0 without a budget."""
        if self.epochs:
            return min(self.state.train.epoch / self.epochs, 1.0)
        return min(self.state.train.global_step / self.steps, 1.0) if self.steps else 0.0

    @property
    def checkpoint_interval(self) -> int:
        """Epochs or updates between periodic checkpoints: `checkpoint.interval`, each epoch, or a twentieth of the steps."""
        if self.config.checkpoint.interval is not None:
            return int(self.config.checkpoint.interval)
        return 1 if not self.is_step_mode else max(math.ceil((self.steps or 0) / 20), 1)

    @property
    def log_interval(self) -> int:
        """Updates between log lines: `log_interval`, about a hundredth of the run, or 1024 when its length is unknown."""
        if self.config.log_interval is not None:
            return int(self.config.log_interval)
        return max(self.steps // 100, 1) if self.steps else 1024
