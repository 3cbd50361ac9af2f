"""peft: adapters train, are saved without the base, known to belong to it, and written as peft reads them.

Library: peft
Works: LoRA models, checkpoints of the adapters alone, `save_pretrained`, DDP and FSDP
Exact: resume; another base is refused
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch import Tensor

import danling as dl
from danling.checkpoints import CheckpointMismatch

pytest.importorskip("peft")

from peft import LoraConfig, PeftModel, get_peft_model
from support.language_models import collator_of, model_of, rows_of


def adapted(kind: str, *, base: float = 0.0, **more: Any) -> Any:
    """A model with adapters; `base` makes it another one."""
    model = model_of(kind)
    with torch.no_grad():
        next(model.parameters()).add_(base)
    torch.manual_seed(3)
    causal = kind == "causal"
    options: dict[str, Any] = {
        "target_modules": ["c_attn"] if causal else ["query", "value"],
        "fan_in_fan_out": causal,
    }
    task = "CAUSAL_LM" if causal else "SEQ_CLS"
    return get_peft_model(
        model, LoraConfig(r=2, init_lora_weights=False, task_type=task, **options, **more)
    )


class Adapting(dl.Runner):
    def __init__(self, config: dict[str, Any], kind: str = "causal", **options: Any) -> None:
        super().__init__(config)
        self.model = adapted(kind, **options)
        self.datasets = {"train": rows_of(kind, 20)}
        self.config.dataloader.collate_fn = collator_of(kind)


def settings(root: Path | str, steps: int, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = {
        "steps": steps,
        "seed": 0,
        "dir": f"{root}/run",
        "log": False,
        "accum_steps": 2,
    }
    config |= {
        "optim": {"type": "adamw", "lr": 1e-2},
        "dataloader": {"batch_size": 3},
        "auto_resume": True,
    }
    return {**config, "checkpoint": {"trainable_only": True}, **more}


def weights_of(runner: Any) -> dict[str, Tensor]:
    return {
        name: tensor.detach().clone()
        for name, tensor in runner.unwrapped_model.state_dict().items()
    }


@pytest.mark.parametrize("kind", ["causal", pytest.param("classes", marks=pytest.mark.slow)])
def test_only_trained_weights_are_saved_and_resume_bitwise(kind: str, tmp_path: Path) -> None:
    averaging = {"ema": {"enabled": True, "decay": 0.5}}
    with Adapting(settings(tmp_path / "whole", 6, **averaging), kind) as whole:
        whole.train()
        expected = weights_of(whole)
    with Adapting(settings(tmp_path, 3, **averaging), kind) as first:
        first.train()
        trained = {name for name, p in first.unwrapped_model.named_parameters() if p.requires_grad}
    payload = torch.load(tmp_path / "run/checkpoints/latest.pth", weights_only=True)
    buffers = {name for name, _ in first.unwrapped_model.named_buffers()}
    assert trained <= set(payload["model"]) <= trained | buffers
    assert set(payload["ema"]["weights"]) == set(payload["model"])
    with Adapting(settings(tmp_path, 6, **averaging), kind) as second:
        assert second.train_state.global_step == 3
        second.train()
        assert all(torch.equal(value, expected[name]) for name, value in weights_of(second).items())
        assert all(
            torch.equal(second.ema.weights[name], value)
            for name, value in whole.ema.weights.items()
        )


def test_base_model_is_loaded_again_at_a_resume(tmp_path: Path) -> None:
    torch.save(adapted("causal", base=0.5).state_dict(), tmp_path / "base.pt")
    pretrained = {"pretrained": str(tmp_path / "base.pt")}
    with Adapting(settings(tmp_path / "whole", 4, **pretrained)) as whole:
        whole.train()
        expected = weights_of(whole)
    with Adapting(settings(tmp_path, 2, **pretrained)) as first:
        first.train()
    with Adapting(settings(tmp_path, 4, **pretrained)) as second:
        assert second.train_state.global_step == 2
        second.train()
        assert all(torch.equal(value, expected[name]) for name, value in weights_of(second).items())
    latest = tmp_path / "run/checkpoints/latest.pth"
    with pytest.raises(CheckpointMismatch, match="or name the file of the base in `pretrained`"):
        Adapting.from_checkpoint(latest)
    with Adapting.from_checkpoint(latest, pretrained) as third:
        assert all(torch.equal(value, expected[name]) for name, value in weights_of(third).items())
    torch.save(adapted("causal", base=0.25).state_dict(), tmp_path / "base.pt")
    with pytest.raises(CheckpointMismatch, match="SHA-256"):
        Adapting(settings(tmp_path, 6, **pretrained))


@pytest.mark.parametrize("kind", ["causal", pytest.param("classes", marks=pytest.mark.slow)])
def test_adapters_are_written_as_peft_reads_them(kind: str, tmp_path: Path) -> None:
    more = {} if kind == "classes" else {"modules_to_save": ["wte"]}
    with Adapting(settings(tmp_path, 2), kind, **more) as runner:
        runner.train()
        runner.save_pretrained(tmp_path / "out")
        expected = weights_of(runner)
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(os.listdir(tmp_path / "out"))
    loaded = PeftModel.from_pretrained(model_of(kind), str(tmp_path / "out")).state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(value, loaded[name]) for name, value in expected.items())


def by_shards(root: str, steps: int) -> dict[str, Tensor]:
    more: dict[str, Any] = {"stack": "parallel", "parallel": {"axes": {"shard": 2}}}
    with Adapting(settings(root, steps, **more)) as runner:
        begun = runner.train_state.global_step
        runner.train()
        runner.save_pretrained(f"{root}/out")
        with runner.whole_weights():
            return {"begun": torch.tensor(begun), **weights_of(runner)}


@pytest.mark.slow
def test_divided_weights_are_known_again_too(tmp_path: Path) -> None:
    (whole, _) = run_processes(by_shards, str(tmp_path / "whole"), 4, world_size=2, timeout=120)
    run_processes(by_shards, str(tmp_path), 2, world_size=2, timeout=120)
    (resumed, _) = run_processes(by_shards, str(tmp_path), 4, world_size=2, timeout=120)
    assert int(resumed.pop("begun")) == 2 and int(whole.pop("begun")) == 0
    assert all(torch.equal(value, whole[name]) for name, value in resumed.items())
    loaded = PeftModel.from_pretrained(model_of("causal"), str(tmp_path / "out")).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in resumed.items())
