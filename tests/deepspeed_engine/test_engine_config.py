"""The engine's configuration: derived, merged, and refused where two keys disagree. Needs no DeepSpeed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from danling.config import RunnerConfig
from danling.deepspeed.engine_config import engine_config, without_auto, zero_stage


def config_of(given: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The configuration of the engine for a runner with batches of 4, 3 of them an update, on two ranks."""
    keys = ("optimizer", "scheduler", "device")
    runner: Any = SimpleNamespace(
        given_settings=without_auto(given),
        batch_size=4,
        accum_steps=3,
        data_domain=SimpleNamespace(size=2),
        config=RunnerConfig(
            {"max_grad_norm": 1.0, **{k: v for k, v in changes.items() if k not in keys}}
        ),
        optimizer=None,
        scheduler=None,
        device=torch.device("cpu"),
    )
    vars(runner).update({key: changes[key] for key in keys if key in changes})
    return engine_config(runner)


def test_sizes_are_derived_and_clipping_stays_with_the_runner() -> None:
    found = config_of({})
    assert found["train_micro_batch_size_per_gpu"] == 4
    assert found["gradient_accumulation_steps"] == 3
    assert found["train_batch_size"] == 24
    assert (
        found["gradient_clipping"]
        == 0.0
        == config_of({"gradient_clipping": 1.0})["gradient_clipping"]
    )
    assert zero_stage(found) == 0


def test_given_settings_pass_through() -> None:
    given = {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
        "comms_logger": {"enabled": True},
    }
    found = config_of(given)
    assert found["zero_optimization"] == given["zero_optimization"]
    assert found["comms_logger"] == {"enabled": True}
    assert given == {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 1000},
        "comms_logger": {"enabled": True},
    }


def test_agreeing_and_automatic_values_are_fine() -> None:
    given = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": 24,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    found = config_of(given)
    assert found["train_micro_batch_size_per_gpu"] == 4
    assert found["zero_optimization"] == {"stage": 3}


@pytest.mark.parametrize(
    ("given", "changes", "own"),
    [
        ({"train_micro_batch_size_per_gpu": 8}, {}, "dataloader.batch_size"),
        ({"gradient_accumulation_steps": 2}, {}, "accum_steps"),
        ({"train_batch_size": 16}, {}, "accum_steps"),
        ({"gradient_clipping": 0.5}, {}, "max_grad_norm"),
        (
            {"optimizer": {"type": "AdamW"}},
            {"optimizer": [], "optim": {"type": "sgd"}},
            "optim.type",
        ),
        ({"optimizer": {"type": "AdamW"}}, {"optimizer": []}, "self.optimizer"),
        (
            {"scheduler": {"type": "WarmupLR"}},
            {"optim": {"type": "sgd"}, "scheduler": []},
            "self.scheduler",
        ),
        ({"fp16": {"enabled": True}}, {"precision": "bf16"}, "precision"),
        ({"torch_autocast": {"enabled": True}}, {}, "precision"),
        ({"bf16": {"enabled": True}}, {"precision": "float16"}, "precision"),
        ({"bf16": {"enabled": True}}, {}, "deepspeed.zero_optimization.stage"),
        ({"managed_gradient_accumulation": False}, {}, "accum_steps"),
        ({"zero_optimization": True}, {}, "to be a section"),
    ],
)
def test_a_contradiction_names_both_keys(
    given: dict[str, Any], changes: dict[str, Any], own: str
) -> None:
    with pytest.raises(ValueError) as caught:
        config_of(given, **changes)
    assert f"deepspeed.{next(iter(given))}" in str(caught.value)
    assert own in str(caught.value)
    assert "Received" in str(caught.value)


def test_an_optimizer_of_ones_own_is_allowed_and_adam_is_not_compiled() -> None:
    assert config_of({}, optimizer=[])["zero_allow_untested_optimizer"] is True
    found = config_of({"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}})
    assert found["optimizer"]["params"] == {"torch_adam": True, "lr": 0.1}
    on_gpu = config_of({"optimizer": {"type": "AdamW"}}, device=torch.device("cuda"))
    assert on_gpu["optimizer"] == {"type": "AdamW"}
