"""transformers: its batches, collators and models train, evaluate and infer without an override, as one large batch would.

Library: transformers
Works: causal and masked language models, classifiers and encoder-decoders, every collator, `save_pretrained`, DDP and FSDP
Exact: the gradient of an update within 1e-6 in float64; masks that collators draw, on resume
"""

from __future__ import annotations

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.processes import run_processes
from support.seen import Seeing, assert_goes_on_alike
from support.toys import KeepsGradients
from torch import Tensor, nn

from danling.cli.main import main
from danling.optim import build_param_groups

pytest.importorskip("transformers")

import transformers
from support.language_models import SIZE, collator_of, model_of, rows_of, tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DataCollatorForLanguageModeling,
)

KINDS = ["causal", "masked", "classes", "seq2seq"]


class HFRunner(KeepsGradients):
    def __init__(self, config: dict[str, Any], kind: str, model: Any = None) -> None:
        super().__init__(config)
        self.model = model_of(kind).double() if model is None else model
        self.datasets = {"train": rows_of(kind, 20), "val": rows_of(kind, 7, seed=3)}
        self.config.dataloader.collate_fn = collator_of(kind, self.model)


def settings(
    root: Path | str, micro_batch: int = 4, accum_steps: int = 1, **more: Any
) -> dict[str, Any]:
    config: dict[str, Any] = {"steps": 1, "seed": 0, "workspace_root": str(root), "log": False}
    config |= {"accum_steps": accum_steps, "optim": {"type": "sgd", "lr": 0.1}}
    return {
        **config,
        "dataloader": {"batch_size": micro_batch, "shuffle": False, "drop_last": False},
        **more,
    }


def updated(root: str, kind: str, micro_batch: int, accum_steps: int) -> dict[str, Any]:
    with HFRunner(settings(root, micro_batch, accum_steps), kind) as runner:
        runner.train()
        val = runner.evaluate("val")["val"]["loss"]
        return {
            "gradients": runner.gradients,
            "loss": runner.results[1]["train"]["loss"],
            "val": val,
        }


def by_hand(kind: str) -> dict[str, Any]:
    """One batch of all samples, a loop of one step."""
    model = model_of(kind).double()
    collate = collator_of(kind, model)
    loss = model(**collate(rows_of(kind, 20))).loss
    loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.eval()
    with torch.no_grad():
        val = float(model(**collate(rows_of(kind, 7, seed=3))).loss)
    return {"gradients": gradients, "loss": float(loss.detach()), "val": val}


def assert_same_update(made: dict[str, Any], expected: dict[str, Any]) -> None:
    """transformers computes losses in float32, so a rounding of 1e-7 is its own."""
    assert made["gradients"].keys() == expected["gradients"].keys()
    scale = max(float(gradient.abs().max()) for gradient in expected["gradients"].values())
    for name, gradient in expected["gradients"].items():
        torch.testing.assert_close(
            made["gradients"][name], gradient, rtol=1e-6, atol=1e-6 * scale, msg=name
        )
    assert made["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert made["val"] == pytest.approx(expected["val"], rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_update_of_micro_batches_equals_one_of_a_large_batch(kind: str, tmp_path: Path) -> None:
    expected = by_hand(kind)
    for micro_batch, accum_steps in ((20, 1), (3, 7)):
        assert_same_update(updated(str(tmp_path), kind, micro_batch, accum_steps), expected)


def hits(logits: Tensor, labels: Tensor) -> Tensor:
    """A metric is handed the logits, not the output."""
    return (logits.argmax(-1) == labels).double().mean()


def test_metrics_a_criterion_and_predictions_are_handed_logits(tmp_path: Path) -> None:
    with HFRunner(settings(tmp_path, 3, 7), "classes") as plain:
        plain.train()

    class Own(HFRunner):
        def __init__(self, config: dict[str, Any], kind: str) -> None:
            super().__init__(config, kind)
            self.criterion = nn.CrossEntropyLoss()
            self.metrics = {"acc": hits}

    with Own(settings(tmp_path, 3, 7), "classes") as runner:
        runner.train()
        for name, gradient in plain.gradients.items():
            torch.testing.assert_close(runner.gradients[name], gradient, rtol=1e-12, atol=1e-14)
        figures, predicted = runner.evaluate("val")["val"], runner.infer("val")
        rows = rows_of("classes", 7, seed=3)
        right = sum(int(p["logits"].argmax()) == row["label"] for p, row in zip(predicted, rows))
        assert figures["acc"] == pytest.approx(right / 7)


def test_already_shifted_labels_weigh_as_given(tmp_path: Path) -> None:
    """As sequence parallelism and packing hand them over: transformers takes `shift_labels` in the place of `labels`."""

    def collate(rows: list[dict[str, Any]]) -> Any:
        batch = collator_of("causal")(rows)
        batch["shift_labels"] = nn.functional.pad(batch["labels"], (0, 1), value=-100)[
            :, 1:
        ].contiguous()
        batch["shift_labels"][0, ::2] = -100
        return batch

    class Shifted(HFRunner):
        def __init__(self, config: dict[str, Any], kind: str) -> None:
            super().__init__(config, kind)
            self.config.dataloader.collate_fn = collate

    model = model_of("causal").double()
    rows = rows_of("causal", 20)
    batches = [collate(rows[begin : begin + 3]) for begin in range(0, 20, 3)]
    counts = [int((batch["shift_labels"] != -100).sum()) for batch in batches]
    for batch, count in zip(batches, counts):
        (model(**batch).loss * count / sum(counts)).backward()
    with Shifted(settings(tmp_path, 3, 7), "causal") as runner:
        runner.train()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(runner.gradients[name], parameter.grad, rtol=1e-6, atol=1e-7)


class Masking(Seeing):
    """Masks are drawn where batches are made, from the stream of the process or from a generator of the collator's own."""

    def __init__(self, config: dict[str, Any], own_seed: int | None) -> None:
        super().__init__(config)
        self.model = model_of("masked", hidden_dropout_prob=0.1)
        self.datasets = {
            "train": [{"input_ids": row["input_ids"]} for row in rows_of("causal", 24)]
        }
        collate = DataCollatorForLanguageModeling(tokenizer(), mlm_probability=0.4, seed=own_seed)
        self.config.dataloader.collate_fn = collate

    def values(self, data: Any) -> list[Tensor]:
        return [data["labels"].flatten()]


@pytest.mark.parametrize("own_seed", [None, pytest.param(5, marks=pytest.mark.slow)])
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_masks_are_those_of_the_uninterrupted_run(
    own_seed: int | None, workers: int, tmp_path: Path
) -> None:
    assert_goes_on_alike(partial(Masking, own_seed=own_seed), tmp_path, workers=workers)


def trained(tmp_path: Path, kind: str, model: Any = None, **more: Any) -> HFRunner:
    runner = HFRunner(settings(tmp_path, dir=str(tmp_path / "run"), **more), kind, model)
    runner.train()
    return runner


def assert_loads_as(auto: Any, directory: Path, model: Any, **options: Any) -> Any:
    loaded, report = auto.from_pretrained(directory, output_loading_info=True, **options)
    assert not any(report.values()), report
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert (
            torch.equal(loaded.state_dict()[name], weight)
            and loaded.state_dict()[name].dtype == weight.dtype
        ), name
    return loaded


SAVED = [
    ("causal", AutoModelForCausalLM),
    pytest.param("seq2seq", AutoModelForSeq2SeqLM, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("road", ["save_pretrained", "export"])
@pytest.mark.parametrize(("kind", "auto"), SAVED)
def test_from_pretrained_loads_the_trained_weights(
    kind: str, auto: Any, road: str, tmp_path: Path
) -> None:
    """Tied weights, resized embeddings and the precision come back."""
    model = model_of(kind).to(torch.bfloat16)
    model.resize_token_embeddings(SIZE + 3)
    with trained(tmp_path, kind, model) as runner:
        out = tmp_path / "out"
        if road == "save_pretrained":
            runner.save_pretrained(out)
        else:
            runner.checkpoint_manager.wait()
            assert main(["export", str(tmp_path / "run"), str(out), "--format", "hf"]) == 0
        loaded = assert_loads_as(auto, out, runner.unwrapped_model)
        assert type(loaded) is type(model) and loaded.config.vocab_size == SIZE + 3
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
        assert loaded.generation_config.eos_token_id == model.generation_config.eos_token_id


@pytest.mark.parametrize(
    "kind", ["causal", "masked", pytest.param("seq2seq", marks=pytest.mark.slow)]
)
def test_tied_weights_saved_under_one_name_are_loaded(kind: str, tmp_path: Path) -> None:
    published = model_of(kind)
    with torch.no_grad():
        for parameter in published.parameters():
            parameter.add_(torch.randn_like(parameter))
    published.save_pretrained(tmp_path / "published")
    with HFRunner(
        settings(tmp_path, pretrained=str(tmp_path / "published")), kind, model_of(kind)
    ) as runner:
        expected = published.state_dict()
        found = runner.model_state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_checkpoint_without_the_frozen_weights_is_no_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = model_of("llama")
    model.get_input_embeddings().weight.requires_grad_(False)
    with trained(tmp_path, "llama", model, checkpoint={"trainable_only": True}) as runner:
        runner.checkpoint_manager.wait()
        assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "hf"]) == 2
        assert "Expected all weights of the model for --format hf" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
        runner.save_pretrained(tmp_path / "out")
        assert_loads_as(AutoModelForCausalLM, tmp_path / "out", runner.unwrapped_model)


def test_averaged_weights_and_another_precision_are_exported(tmp_path: Path) -> None:
    with trained(tmp_path, "llama", ema={"enabled": True, "decay": 0.5}) as runner:
        runner.checkpoint_manager.wait()
        runner.save_pretrained(tmp_path / "averaged")
        runner.save_pretrained(tmp_path / "trained", averaged=False)
        assert_loads_as(AutoModelForCausalLM, tmp_path / "trained", runner.unwrapped_model)
        assert (
            main(
                ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--format", "hf", "--ema"]
            )
            == 0
        )
        with runner.ema.applied():
            assert_loads_as(AutoModelForCausalLM, tmp_path / "averaged", runner.unwrapped_model)
            assert_loads_as(AutoModelForCausalLM, tmp_path / "out", runner.unwrapped_model)
        options = ["--format", "hf", "--dtype", "bf16", "--trained"]
        assert main(["export", str(tmp_path / "run"), str(tmp_path / "bf16"), *options]) == 0
        assert_loads_as(
            AutoModelForCausalLM, tmp_path / "bf16", runner.unwrapped_model.to(torch.bfloat16)
        )


def saved_by_shards(root: str) -> None:
    more = {"stack": "parallel", "parallel": {"axes": {"shard": 2}}, "dir": f"{root}/run"}
    with HFRunner(settings(root, 2, 5, **more), "causal", model_of("causal")) as runner:
        runner.train()
        runner.save_pretrained(f"{root}/out")
        runner.checkpoint_manager.wait()


@pytest.mark.slow
def test_a_divided_model_is_written_whole(tmp_path: Path) -> None:
    run_processes(saved_by_shards, str(tmp_path), world_size=2, timeout=120)
    with trained(tmp_path / "alone", "causal", model_of("causal"), accum_steps=5) as runner:
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert (
            main(["export", str(tmp_path / "run"), str(tmp_path / "exported"), "--format", "hf"])
            == 0
        )
        assert_loads_as(AutoModelForCausalLM, tmp_path / "exported", saved)
        assert Counter(map(type, [saved])) == {type(runner.unwrapped_model): 1}
        for name, weight in runner.unwrapped_model.state_dict().items():
            torch.testing.assert_close(saved.state_dict()[name], weight, rtol=1e-4, atol=1e-6)


SMALL = {
    "vocab_size": 32,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
}
ARCHITECTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", SMALL),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 32, "n_embd": 8, "n_layer": 2, "n_head": 2}),
    "llama": ("LlamaForCausalLM", {**SMALL, "attention_bias": True}),
    "t5": (
        "T5ForConditionalGeneration",
        {"vocab_size": 32, "d_model": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2},
    ),
}


def groups_of_the_page() -> list[dict[str, Any]]:
    """Return the groups that the page about the Trainer names in the place of its `weight_decay`."""
    page = Path(__file__).parents[2] / "docs" / "migrating" / "hf_trainer.md"
    (row,) = (line for line in page.read_text().splitlines() if "optim.param_groups=" in line)
    text = row.partition("optim.param_groups=")[2].partition("`")[0].replace("\\|", "|")
    groups: list[dict[str, Any]] = json.loads(text)
    return groups


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_groups_of_the_page_decay_the_same_weights_as_the_trainer(kind: str) -> None:
    name, options = ARCHITECTURES[kind]
    model = getattr(transformers, name)(transformers.AutoConfig.for_model(kind, **options))
    names = {id(parameter): each for each, parameter in model.named_parameters()}
    groups = build_param_groups(
        model.named_parameters(), lr=0.1, weight_decay=0.1, groups=groups_of_the_page()
    )
    (usual,) = (
        group for group in groups if "weight_decay" not in group
    )  # it takes the decay of the optimizer
    decayed = {names[id(parameter)] for parameter in usual["params"]}
    trainer = transformers.Trainer.__new__(transformers.Trainer)
    assert decayed == set(trainer.get_decay_parameter_names(model)) & set(names.values())
    assert 0 < len(decayed) < len(names)
