"""Every verb of the contract called by itself on a runner that was just constructed, in the library's and in own loops."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.toys import settings as toy_settings
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import danling as dl
from danling.training import UpdateOutcome


def points(count: int = 20) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, 4, generator=generator)
    return TensorDataset(inputs, inputs[:, :3].argmax(1))


class Toy(dl.Runner):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.model = nn.Sequential(
            nn.Linear(4, 8), nn.Tanh(), nn.Dropout(self.config.get("dropout", 0.3)), nn.Linear(8, 3)
        )
        self.criterion = nn.CrossEntropyLoss()
        self.datasets = {"train": points(), "val": points(7)}


def settings(root: Path, **more: Any) -> dict[str, Any]:
    base: dict[str, Any] = {"seed": 5, "dataloader": {"batch_size": 3, "drop_last": False}}
    base |= {
        "optim": {"type": "adamw", "lr": 1e-2},
        "scheduler": {"type": "cosine", "warmup_steps": 2},
    }
    base |= {"ema": {"enabled": True, "decay": 0.9}, "checkpoint": {"async_enabled": False}}
    return toy_settings(
        root / "run", **{**base, **({} if "steps" in more else {"epochs": 3}), **more}
    )


def weights(runner: Any) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in runner.unwrapped_model.parameters()]


def equal(first: Any, second: Any) -> bool:
    return all(torch.equal(one, other) for one, other in zip(weights(first), weights(second)))


def done(kind: Any, config: dict[str, Any], action: Callable[[Any], Any]) -> Any:
    """Return a closed runner that has done something: runners of one process share its random streams, so one comes after the other."""
    with kind(config) as runner:
        action(runner)
    return runner


@pytest.fixture
def trained(tmp_path: Path) -> Any:
    """Return a runner that `train` has trained to its end."""
    return done(Toy, settings(tmp_path / "trained"), lambda runner: runner.train())


@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_epochs_by_hand_are_those_of_train(interval: str, tmp_path: Path) -> None:
    scheduler = {"type": "cosine", "interval": interval}
    whole = done(Toy, settings(tmp_path / "a", scheduler=scheduler), lambda runner: runner.train())
    results = whole.results
    with Toy(settings(tmp_path / "b", scheduler=scheduler)) as runner:
        for epoch in range(3):
            figures = runner.train_epoch()
            assert figures == results[epoch + 1]["train"]
            assert runner.evaluate() == {"val": results[epoch + 1]["val"]}
            runner.save_checkpoint()
        assert equal(whole, runner) and runner.train_state == whole.train_state
        assert runner.results == {
            epoch: {"train": figures["train"]} for epoch, figures in results.items()
        }
        rates = [each.optimizer.param_groups[0]["lr"] for each in (whole, runner)]
        assert rates[0] == rates[1]


class Stopping(Toy):
    def optimizer_step(self) -> None:
        super().optimizer_step()
        if self.train_state.global_step == 3 and not self.config.auto_resume:
            self.stop()


def test_stopped_epoch_by_hand_is_saved_and_finished_later(trained: Any, tmp_path: Path) -> None:
    with Stopping(settings(tmp_path)) as runner:
        assert runner.train_epoch() == {}
        stopped = runner.train_state.global_step
        assert 3 < stopped < 7 and (tmp_path / "run" / "checkpoints" / "latest.pth").exists()
    with Stopping(settings(tmp_path, auto_resume=True)) as runner:
        assert runner.train_state.global_step == stopped
        runner.train_epoch()
        assert runner.train_state.epoch == 1
        runner.train()
        assert equal(trained, runner)


@pytest.mark.parametrize("heeds", [True, False])
def test_a_loop_by_hand_ends_where_it_was_stopped_or_is_told_so(
    heeds: bool, trained: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Stopping(settings(tmp_path)) as runner:
        while runner.train_state.epoch < 3:
            if not runner.train_epoch() and heeds:
                break
            runner.evaluate()
            runner.save_checkpoint()
        # Accelerators apply a request one update later.
        assert (3 < runner.train_state.global_step < 7) if heeds else equal(trained, runner)
    said = [text for text in caplog.messages if "`train_epoch` is called again" in text]
    assert len(said) == (0 if heeds else 1)


def test_passes_by_hand_have_one_max_time_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = [0.0]
    clock = SimpleNamespace(monotonic=lambda: passed[0])
    monkeypatch.setattr("danling.training.session.time", clock)

    class Slow(Toy):
        def optimizer_step(self) -> None:
            super().optimizer_step()
            passed[0] += 1

    with Slow(settings(tmp_path, max_time=10)) as runner:
        # A pass has seven updates.
        assert runner.train_epoch() and not runner.train_epoch()
        assert 10 <= runner.train_state.global_step <= 11
        runner.config.max_time = None
        runner.train()
        assert runner.train_state.epoch == 3


def test_a_loop_around_updates_asks_the_boundary_whether_it_was_stopped(tmp_path: Path) -> None:
    def updates(runner: Toy, asks: bool) -> None:
        for index, batch in enumerate(list(runner.dataloaders["train"]), 1):
            runner.train_step(batch)
            if index % runner.accum_steps == 0:
                runner.step()
                if asks and runner.boundary():
                    break

    whole = done(Toy, settings(tmp_path / "a"), lambda runner: updates(runner, False))
    asked = done(Toy, settings(tmp_path / "b"), lambda runner: updates(runner, True))
    assert equal(whole, asked)
    stopped = done(Stopping, settings(tmp_path / "c"), lambda runner: updates(runner, True))
    assert 3 < stopped.train_state.global_step <= 5 < whole.train_state.global_step


def test_passes_by_hand_in_step_mode(tmp_path: Path) -> None:
    whole = done(Toy, settings(tmp_path / "a", steps=14), lambda runner: runner.train())
    with Toy(settings(tmp_path / "b", steps=14)) as runner:
        runner.train_epoch()
        runner.train_epoch()
        assert (
            equal(whole, runner)
            and runner.train_state.global_step == whole.train_state.global_step == 14
        )
        assert runner.train_state.epoch == 2


class OwnEpoch(Toy):
    """Has a loop of its own around `train_step` and `step`, and figures of its own."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.figures: Any = {"loss": 0.25, "speed": 7}

    def train_epoch(self, split: str = "train") -> Any:
        for batch in self.dataloaders[split]:
            self.train_step(batch)
            self.step()
        return self.figures


def test_result_of_an_overridden_train_epoch_is_kept(tmp_path: Path) -> None:
    trained = done(Toy, settings(tmp_path / "trained", dropout=0.0), lambda runner: runner.train())
    with OwnEpoch(settings(tmp_path, dropout=0.0)) as runner:
        results = runner.train()
        assert [result["train"] for result in results.values()] == [
            {"loss": 0.25, "speed": 7.0}
        ] * 3
        assert runner.train_state.global_step == 21 and equal(trained, runner)
    with OwnEpoch(settings(tmp_path / "b", epochs=1)) as runner:
        runner.figures = None
        assert runner.train()[1]["train"] == {}
    with OwnEpoch(settings(tmp_path / "c", epochs=1)) as runner:
        runner.figures = 0.25
        with pytest.raises(
            ValueError, match=r"Expected `train_epoch` to return metrics by name\. Received: 0\.25"
        ):
            runner.train()


def by_hand(runner: Any, accum_steps: int = 1) -> list[UpdateOutcome]:
    outcomes = []
    batches = list(runner.dataloaders["train"])
    for index, batch in enumerate(batches, 1):
        runner.train_step(batch)
        if index % accum_steps == 0 or index == len(batches):
            outcomes.append(runner.step())
    return outcomes


@pytest.mark.parametrize("accum_steps", [1, 2])
def test_updates_by_hand_are_those_of_the_loop(accum_steps: int, tmp_path: Path) -> None:
    # Without a loader that says where a batch is in the pass, the noise of a micro-batch is another one.
    config = {"accum_steps": accum_steps, "dropout": 0.0}
    whole = done(Toy, settings(tmp_path / "a", **config), lambda runner: runner.train_epoch())
    with Toy(settings(tmp_path / "b", **config)) as runner:
        outcomes = by_hand(runner, accum_steps)
        assert (
            all(outcome.committed for outcome in outcomes)
            and sum(outcome.samples for outcome in outcomes) == 20
        )
        assert equal(whole, runner)
        for name in ("global_step", "micro_step", "samples"):
            assert getattr(whole.train_state, name) == getattr(runner.train_state, name)
        assert torch.equal(whole.ema.weights["0.weight"], runner.ema.weights["0.weight"])


class OwnStep(Toy):
    def train_step(self, data: Any) -> Any:
        pred, loss = self.evaluate_step(data)
        self.backward(loss)
        if self.rank == 0:
            self.meters.update({"of_rank_0": 2.0})
        return pred, loss


def update_by_hand(config: dict[str, Any]) -> bool:
    loop = done(OwnStep, {**config, "dir": config["dir"] + "/loop"}, lambda runner: runner.train())
    plain = done(
        Toy, {**config, "dir": config["dir"] + "/plain"}, lambda runner: runner.train_epoch()
    )
    by_verbs = done(OwnStep, {**config, "dir": config["dir"] + "/hand"}, by_hand)
    return (
        loop.results[1]["train"]["of_rank_0"] == 2.0
        and equal(loop, plain)
        and equal(plain, by_verbs)
    )


def test_steps_of_the_users_by_hand_on_two_ranks(tmp_path: Path) -> None:
    assert run_processes(
        update_by_hand, settings(tmp_path, epochs=1, dropout=0.0), world_size=2
    ) == [True, True]


CALLS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "backward": (
        lambda runner: runner.backward(torch.zeros((), requires_grad=True)),
        "`train_step(batch)` first",
    ),
    "step": (lambda runner: runner.step(), "`train_step(batch)` first"),
    "train_steps": (lambda runner: runner.train_steps(), "Call `train()` or `train_epochs()`"),
    "train_epochs": (lambda runner: runner.train_epochs(), "`train()` or `train_steps"),
    "infer": (lambda runner: runner.infer("predict"), "Expected a split out of"),
    "train_epoch": (lambda runner: runner.train_epoch("training"), "Expected a split out of"),
}


@pytest.mark.parametrize("verb", list(CALLS))
def test_premature_call_names_the_required_one(verb: str, tmp_path: Path) -> None:
    call, message = CALLS[verb]
    with Toy(settings(tmp_path, **({"steps": 3} if verb == "train_epochs" else {}))) as runner:
        before = copy.deepcopy(runner.train_state)
        with pytest.raises(ValueError) as caught:
            call(runner)
        assert message in str(caught.value) and "\n" not in str(caught.value)
        assert runner.train_state == before


@pytest.mark.parametrize("verb", ["train", "train_epoch", "train_step", "step", "optimizer_step"])
def test_without_an_optimizer_every_verb_says_so(verb: str, tmp_path: Path) -> None:
    config = settings(tmp_path)
    del config["optim"], config["scheduler"]
    with Toy(config) as runner:
        arguments = [next(iter(runner.dataloaders["train"]))] if verb == "train_step" else []
        with pytest.raises(ValueError, match=r"Expected an optimizer\. Received: optimizer=None"):
            getattr(runner, verb)(*arguments)


def test_the_optimizer_steps_alone(tmp_path: Path) -> None:
    with Toy(settings(tmp_path, optim={"type": "sgd", "lr": 1.0}, scheduler={})) as runner:
        before = weights(runner)
        for parameter in runner.unwrapped_model.parameters():
            parameter.grad = torch.ones_like(parameter)
        runner.optimizer_step()
        assert all(torch.equal(new, old - 1) for new, old in zip(weights(runner), before))


def test_a_batch_is_evaluated_and_predicted_as_in_a_whole_evaluation(tmp_path: Path) -> None:
    with Toy(settings(tmp_path, dataloader={"batch_size": 7})) as runner:
        runner.train_epoch()
        (batch,) = runner.dataloaders["val"]
        state = torch.get_rng_state()
        pred, loss = runner.evaluate_step(batch)
        prediction = runner.infer_step(batch)
        assert not pred.requires_grad and not loss.requires_grad and not prediction.requires_grad
        assert float(loss) == runner.evaluate("val")["val"]["loss"]
        assert torch.equal(torch.stack(runner.infer("val")), prediction) and torch.equal(
            pred, prediction
        )
        assert (
            runner.model.training
            and runner.mode == "train"
            and torch.equal(torch.get_rng_state(), state)
        )


class OwnEvaluation(Toy):
    def evaluate_step(self, data: Any) -> Any:
        return (self.mode, self.model.training, torch.is_grad_enabled()), None

    def infer_step(self, data: Any) -> Any:
        return self.mode, self.model.training, torch.is_grad_enabled()


def test_overrides_are_called_in_the_same_surroundings(tmp_path: Path) -> None:
    with OwnEvaluation(settings(tmp_path)) as runner:
        assert runner.evaluate_step([])[0] == ("evaluate", False, False)
        assert runner.infer_step([]) == ("infer", False, False)


def test_data_added_after_construction_is_trained_on_and_evaluated(tmp_path: Path) -> None:
    with Toy(settings(tmp_path)) as runner:
        runner.dataloaders["train_more"] = DataLoader(points(9), batch_size=3)
        runner.datasets["test"] = points(6)
        assert runner.train_epoch("train_more")["loss"] > 0 and runner.train_state.global_step == 3
        assert runner.evaluate("test")["test"]["loss"] > 0 and len(runner.infer("test")) == 6
        assert runner.train_state.epoch == 0, "the other split has not had its pass"
        runner.train_epoch("train")
        assert runner.train_state.epoch == 1
        assert runner.train()[3].keys() == {"train", "train_more", "val", "test"}


STATE = ["state.train", "state.rng", "scheduler.last_epoch", "ema.weights", "ema.num_updates"]


@pytest.mark.parametrize(
    "entry", [*STATE, "optimizer.state", "optimizer.param_groups", "dataloaders.train"]
)
def test_every_path_of_a_checkpoint_can_be_left_out(entry: str, tmp_path: Path) -> None:
    done(Toy, settings(tmp_path / "first", epochs=1), lambda runner: runner.train())
    source = str(tmp_path / "first" / "run" / "checkpoints" / "latest.pth")
    again = settings(
        tmp_path / "second", epochs=2, resume=source, checkpoint={"exclude_from_loading": [entry]}
    )
    with Toy(again) as runner:
        moments, train = runner.optimizer.state, runner.train_state
        assert bool(moments) == (entry != "optimizer.state")
        assert (train.global_step, train.epoch) == ((0, 0) if entry == "state.train" else (7, 1))
        equal_now = all(
            torch.equal(runner.ema.weights[n], w) for n, w in runner.model_state_dict().items()
        )
        assert equal_now == (entry == "ema.weights")
        assert runner.ema.num_updates == (0 if entry == "ema.num_updates" else 7)
        assert runner.sources["train"].epoch == (0 if entry == "dataloaders.train" else 1)
        runner.train()
