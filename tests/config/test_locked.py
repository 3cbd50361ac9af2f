"""After construction the settings that a runner has read are locked; the budget, live keys and the user's own stay open."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.toys import Line, settings

import danling as dl

GIVEN: dict[str, Any] = {
    "steps": 2,
    "own": {"width": 3},
    "optim": {
        "type": "sgd",
        "lr": 0.1,
        "param_groups": [{"pattern": "bias", "lr_multiplier": 2.0}],
    },
}

CHANGES: dict[str, Callable[[Any], Any]] = {
    "optim.lr=5": lambda config: setattr(config.optim, "lr", 5),
    "optim.weight_decay=5": lambda config: config.set("optim.weight_decay", 5),
    "accum_steps=2": lambda config: config.merge({"accum_steps": 2}),
    "max_grad_norm=1": lambda config: config.update({"max_grad_norm": 1}),
    "ema={'enabled': True}": lambda config: config.__setitem__("ema", {"enabled": True}),
    "ema.enabled=True": lambda config: config.update({"ema": {"enabled": True}}),
    "optim.momentum=0.9": lambda config: config.optim.setdefault("momentum", 0.9),
    "dataloader.val.batch_size=2": lambda config: config.set("dataloader.val.batch_size", 2),
    "dataloader.test={}": lambda config: config.dataloader.setdefault("test", {}),
    "optim.param_groups.lr_multiplier=9": lambda config: setattr(
        config.optim.param_groups[0], "lr_multiplier", 9
    ),
    "checkpoint.keep_latest_k=2": lambda config: setattr(config.checkpoint, "keep_latest_k", 2),
    "the removal of optim.lr": lambda config: config.optim.pop("lr"),
    "the removal of scheduler": lambda config: config.__delitem__("scheduler"),
    "the removal of optim.type": lambda config: config.optim.clear(),
}


@pytest.mark.parametrize("received", CHANGES)
def test_setting_is_locked_once_read_and_the_checkpoint_records_the_trained_value(
    received: str, tmp_path: Path
) -> None:
    with Line(settings(tmp_path, **GIVEN)) as runner:
        before = runner.config.plain()
        with pytest.raises(ValueError, match="before the runner is constructed") as caught:
            CHANGES[received](runner.config)
        assert f"Received: {received}. Construct another runner" in str(caught.value)
        runner.train()
        assert runner.read_checkpoint("latest")["runner"] == runner.config.public()
        assert runner.config.canonical() == dl.RunnerConfig(before).canonical()


def test_a_kept_configuration_does_not_keep_the_model_of_its_runner(tmp_path: Path) -> None:
    with Line(settings(tmp_path, **GIVEN)) as runner:
        runner.train()
    config, model = runner.config, weakref.ref(runner.model)
    del runner
    gc.collect()
    assert model() is None and config.steps == 2
    with pytest.raises(ValueError, match="before the runner is constructed"):
        config.optim.lr = 5
    config.steps = 3


def test_live_keys_and_own_sections_may_be_changed(tmp_path: Path) -> None:
    with Line(settings(tmp_path, **GIVEN)) as runner:
        config = runner.config
        (
            config.patience,
            config.log_interval,
            config.checkpoint.interval,
            config.profiling.enabled,
        ) = 3, 1, 1, False
        config.own.width, config.mine = 4, {"depth": 2}
        config.set("more.of.it", 1)
        del config.own.width
        runner.train()
        stored = runner.read_checkpoint("latest")["runner"]
        assert (stored["checkpoint"]["interval"], stored["mine"], stored["own"]) == (
            1,
            {"depth": 2},
            {},
        )
        assert (tmp_path / "checkpoints" / "ckpt-s000000000001.pth").exists()


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        copy.copy,
        lambda config: pickle.loads(pickle.dumps(config)),
        lambda config: config.clone(),
    ],
)
def test_copy_of_a_locked_configuration_may_be_changed(
    copied: Callable[[Any], Any], tmp_path: Path
) -> None:
    with Line(settings(tmp_path / "first", **GIVEN)) as runner:
        other = copied(runner.config)
        assert type(other) is type(runner.config) and other == runner.config
        other.optim.lr, other.seed, other.dir = 0.2, 5, str(tmp_path / "second")
        assert runner.config.optim.lr == 0.1
    with Line(other) as runner:
        assert runner.optimizer.param_groups[0]["lr"] == 0.2 and runner.seed == 5


def test_a_frozen_configuration_is_copied_and_stays_frozen(tmp_path: Path) -> None:
    config = dl.RunnerConfig(settings(tmp_path, **{**GIVEN, "seed": None})).freeze()
    with Line(config) as runner:
        assert runner.config.seed is not None and config.seed is None
    with pytest.raises(ValueError, match="not frozen"):
        config.seed = 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda runner: runner.config.optim.param_groups.append({"pattern": "x"}),
            r"optim\.param_groups=\[",
        ),
        (
            lambda runner: setattr(runner, "config", copy.deepcopy(runner.config)),
            "another one in `runner.config`",
        ),
    ],
)
def test_changes_behind_the_lock_are_refused_when_training_begins(
    change: Callable[[Any], Any], message: str, tmp_path: Path
) -> None:
    with Line(settings(tmp_path, **GIVEN)) as runner:
        change(runner)
        with pytest.raises(ValueError, match=message):
            runner.train()


@pytest.mark.parametrize(
    "key", ["seed", "deterministic", "backend", "ft", "parallel", "parallel.axes.shard"]
)
def test_change_in_init_of_a_key_read_by_construction_is_refused(key: str, tmp_path: Path) -> None:
    class Late(Line):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.config.dataloader.batch_size = 2  # is read later
            self.config.set(key, {} if key in ("ft", "parallel") else 1)

    with pytest.raises(ValueError, match=rf"{key} to be set before super\(\).__init__\(config\)"):
        Late(settings(tmp_path, **GIVEN))


def test_drawn_seed_follows_the_loaded_checkpoint(tmp_path: Path) -> None:
    with Line(settings(tmp_path / "first", **{**GIVEN, "seed": 11})) as runner:
        runner.train()
    with Line(settings(tmp_path / "second", **{**GIVEN, "steps": 4, "seed": None})) as runner:
        runner.load_checkpoint(tmp_path / "first" / "checkpoints" / "latest.pth")
        assert runner.config.seed == runner.seed == 11
        runner.train()
