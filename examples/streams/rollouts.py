"""Roll-outs: a small policy trains on episodes that it plays itself meanwhile, each with the version of the weights that played it.

python examples/streams/rollouts.py                       # 9 s of processor time
python examples/streams/rollouts.py --rollouts.played 16  # each update on episodes of its own weights

A walker on a grid of 6 x 6 squares is to reach a corner, in 16 moves at most. It prints moves 14.8 -> 5.2; 5.1 is the shortest way in the
mean. 64 episodes are played at a time, of which an update takes 16: the last ones are of weights 3 updates old, which the ratio of
probabilities corrects (PPO, https://arxiv.org/abs/1707.06347). `retain="step"` frees an episode at its update.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import danling as dl
from danling.data import derive_seed
from danling.stream import (
    FeatureProducer,
    MemoryChannel,
    MemoryStore,
    Sample,
    StreamLoader,
    run_together,
)

SIDE, MOVES = 6, 16
STEPS = torch.tensor([[1, 0], [-1, 0], [0, 1], [0, -1]])


class Policy(nn.Module):
    """Scores of four directions for each square, that of the walker one-hot."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(SIDE * SIDE, 64), nn.Tanh(), nn.Linear(64, 4))

    def forward(self, squares: Tensor) -> Tensor:
        """Return (..., 4) of squares int64 (...)."""
        scores: Tensor = self.layers(F.one_hot(squares, SIDE * SIDE).float())
        return scores


@torch.no_grad()
def play(policy: nn.Module, episodes: Sequence[int], seed: int) -> dict[str, Tensor]:
    """Play episodes, each from a random square and with its own random numbers.

    Args:
        policy: Who plays.
        episodes: Their numbers.
        seed: Episodes of another seed are others.

    Returns:
        `squares`, `actions`, `chances` (logarithms of their probabilities) and `alive` (not at the goal yet), each (B, moves).
    """
    drawn = torch.stack(
        [
            torch.rand(
                MOVES + 1, generator=torch.Generator().manual_seed(derive_seed(seed, number))
            )
            for number in episodes
        ]
    )
    # Any square but the goal, which is the first one.
    square = 1 + (drawn[:, 0] * (SIDE * SIDE - 1)).long()
    played: dict[str, list[Tensor]] = {"squares": [], "actions": [], "chances": [], "alive": []}
    for move in range(MOVES):
        scores = policy(square).log_softmax(-1)
        action = (scores.exp().cumsum(-1) < drawn[:, move + 1, None]).sum(-1).clamp_max(3)
        alive = square != 0
        for name, value in (("squares", square), ("actions", action), ("alive", alive)):
            played[name].append(value)
        played["chances"].append(scores.gather(-1, action[:, None])[:, 0])
        place = torch.stack([square // SIDE, square % SIDE], -1) + STEPS[action]
        place = place.clamp(0, SIDE - 1)
        square = torch.where(alive, place[:, 0] * SIDE + place[:, 1], square)
    return {name: torch.stack(values, 1) for name, values in played.items()}


class Player(FeatureProducer):
    """Plays with the weights that the learner has at the time."""

    def __init__(
        self, config: dl.RunnerConfig, learner: Learner, episodes: int, **stream: Any
    ) -> None:
        super().__init__(config, **stream)
        self.learner = learner
        self.model = Policy().requires_grad_(False)
        self.datasets = {"episodes": [{"id": number} for number in range(episodes)]}

    def capture(self, batch: Any) -> dict[str, Tensor]:
        """Return the episodes of a batch."""
        self.unwrapped_model.load_state_dict(self.learner.unwrapped_model.state_dict())
        return play(self.model, batch["id"].tolist(), self.seed)

    def metadata(self, batch: Any) -> list[dict[str, int]]:
        """Return the version of the weights, for each episode."""
        return [{"version": self.learner.train_state.global_step}] * len(batch["id"])


def collate(samples: list[Sample]) -> dict[str, Any]:
    """Return a batch of episodes."""
    batch = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    versions = torch.tensor([sample.ref.meta["version"] for sample in samples])
    return {"input": batch.pop("squares"), "target": batch | {"versions": versions}}


class Learner(dl.Runner):
    """Makes moves likelier that were better than others at the same time."""

    def __init__(self, config: dl.RunnerConfig, train: StreamLoader) -> None:
        super().__init__(config)
        self.dataloaders["train"] = train
        self.model = Policy()
        self.oldest = 0

    def batch_weight(self, data: Any, target: Any) -> float | Tensor:
        """Return the moves that were made before the goal."""
        moves: Tensor = target["alive"].sum()
        return moves

    def compute_loss(self, pred: Tensor, target: Any) -> Tensor:
        """Return the clipped objective of PPO, the mean over moves."""
        alive = target["alive"].float()
        self.oldest = max(self.oldest, self.train_state.global_step - int(target["versions"].min()))
        cost = alive.flip(1).cumsum(1).flip(1)  # moves from here to the goal, or to the end
        self.meters.update({"moves": alive.sum(1).mean()}, len(alive))
        baseline = (cost * alive).sum(0) / alive.sum(0).clamp_min(1)
        advantage = (baseline - cost) / MOVES
        chances = pred.log_softmax(-1).gather(-1, target["actions"][..., None])[..., 0]
        ratio = (chances - target["chances"]).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss: Tensor = -(gain * alive).sum() / alive.sum().clamp_min(1)
        return loss


def moves_of(policy: nn.Module) -> float:
    """Return the moves of an episode in the mean over 500."""
    return float(play(policy, range(500), seed=7)["alive"].sum(1).float().mean())


if __name__ == "__main__":
    config = dl.RunnerConfig(seed=1, steps=300, lineage="policy")
    config.optim = {"type": "adamw", "lr": 1e-2}
    config.rollouts = {"batch_size": 16, "played": 64}
    config.parse()
    size, played = config.rollouts.batch_size, config.rollouts.played
    store, channel = MemoryStore(), MemoryChannel()
    loader = StreamLoader(store, channel, size, collate_fn=collate, retain="step", prefetch=0)
    produces = dl.RunnerConfig(seed=1, lineage="player", dataloader={"batch_size": played})
    with (
        Learner(config, loader) as learner,
        Player(
            produces,
            learner,
            size * (config.steps or 0),
            store=store,
            channel=channel,
            max_in_flight=played,
        ) as player,
    ):
        before = moves_of(learner.unwrapped_model)
        run_together(player, learner)
        after = moves_of(learner.unwrapped_model)
        print(
            f"moves {before:.1f} -> {after:.1f}, {SIDE * SIDE * (SIDE - 1) / (SIDE * SIDE - 1):.1f} is the shortest way"
        )
        print(f"episodes were played by weights of up to {learner.oldest} updates ago")
