"""The engine's configuration: derived, merged, and refused where two keys disagree. Needs no DeepSpeed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from danling.deepspeed.engine_config import EngineFacts, clip_norm, engine_config, zero_stage

FACTS = EngineFacts(
    micro_batch=4,
    accum_steps=3,
    world_size=2,
    precision=None,
    max_grad_norm=1.0,
    optimizer=None,
    scheduler=None,
    on_cpu=True,
)


def test_sizes_are_derived_and_clipping_stays_with_the_runner() -> None:
    found = engine_config({}, FACTS)
    assert found["train_micro_batch_size_per_gpu"] == 4
    assert found["gradient_accumulation_steps"] == 3
    assert found["train_batch_size"] == 24
    assert found["gradient_clipping"] == 0.0
    assert zero_stage(found) == 0


def test_what_is_given_passes_through() -> None:
    given = {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}, "comms_logger": {"enabled": True}}
    found = engine_config(given, FACTS)
    assert found["zero_optimization"] == given["zero_optimization"]
    assert found["comms_logger"] == {"enabled": True}
    assert given == {"zero_optimization": {"stage": 2, "reduce_bucket_size": 1000}, "comms_logger": {"enabled": True}}


def test_agreeing_and_automatic_values_are_fine() -> None:
    given = {
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": 24,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto"},
    }
    found = engine_config(given, FACTS)
    assert found["train_micro_batch_size_per_gpu"] == 4
    assert found["zero_optimization"] == {"stage": 3}


@pytest.mark.parametrize(
    ("given", "changes", "own"),
    [
        ({"train_micro_batch_size_per_gpu": 8}, {}, "dataloader.batch_size"),
        ({"gradient_accumulation_steps": 2}, {}, "accum_steps"),
        ({"train_batch_size": 16}, {}, "accum_steps"),
        ({"gradient_clipping": 0.5}, {}, "max_grad_norm"),
        ({"optimizer": {"type": "AdamW"}}, {"optimizer": "optim.type"}, "optim.type"),
        ({"optimizer": {"type": "AdamW"}}, {"optimizer": "self.optimizer"}, "self.optimizer"),
        ({"scheduler": {"type": "WarmupLR"}}, {"scheduler": "scheduler.type"}, "scheduler.type"),
        ({"fp16": {"enabled": True}}, {"precision": "bf16"}, "precision"),
        ({"torch_autocast": {"enabled": True}}, {}, "precision"),
        ({"bf16": {"enabled": True}}, {"precision": "fp16"}, "precision"),
        ({"bf16": {"enabled": True}}, {}, "deepspeed.zero_optimization.stage"),
        ({"managed_gradient_accumulation": False}, {}, "accum_steps"),
    ],
)
def test_a_contradiction_names_both_keys(given: dict[str, Any], changes: dict[str, Any], own: str) -> None:
    with pytest.raises(ValueError) as caught:
        engine_config(given, replace(FACTS, **changes))
    assert f"deepspeed.{next(iter(given))}" in str(caught.value)
    assert own in str(caught.value)
    assert "Received" in str(caught.value)


def test_clipping_may_be_given_to_deepspeed_alone() -> None:
    assert engine_config({"gradient_clipping": 0.5}, replace(FACTS, max_grad_norm=None))["gradient_clipping"] == 0.0
    assert clip_norm({"gradient_clipping": 0.5}, None) == 0.5
    assert clip_norm({}, 2.0) == 2.0
    assert clip_norm({"gradient_clipping": "auto"}, None) is None


def test_an_optimizer_of_ones_own_is_allowed_and_adam_is_not_compiled() -> None:
    assert engine_config({}, replace(FACTS, optimizer="self.optimizer"))["zero_allow_untested_optimizer"] is True
    found = engine_config({"optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}, FACTS)
    assert found["optimizer"]["params"] == {"torch_adam": True, "lr": 0.1}
    on_gpu = engine_config({"optimizer": {"type": "AdamW"}}, replace(FACTS, on_cpu=False))
    assert on_gpu["optimizer"] == {"type": "AdamW"}
