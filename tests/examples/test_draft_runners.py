"""Runners of the draft models on a target that can be learned: acceptance, weights, anchors, resuming, ranks, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from speculative.acceptance import acceptance_length
from speculative.runners import RUNNERS, DFlashRunner, DominoRunner, collate
from speculative.target import TargetEnds, spread_layers
from support.drafts import LENGTH, captured, draft_config, with_samples, write_target
from support.processes import run_processes
from torch import Tensor

from danling.checkpoints import import_weights

KINDS = sorted(RUNNERS)


@pytest.fixture(autouse=True)
def _target() -> None:
    write_target("target")


def weights_of(runner: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in runner.unwrapped_model.state_dict().items()}


def same(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("kind", [pytest.param("dflash", marks=pytest.mark.slow), "domino", "eagle3"])
def test_acceptance_rises_on_a_target_that_can_be_learned(kind: str) -> None:
    with with_samples(RUNNERS[kind], captured(240, 1), captured(16, 2))(draft_config(60, 8)) as runner:
        before = runner.evaluate("val")["val"]
        runner.train()
        after = runner.evaluate("val")["val"]
    assert before["acceptance_length"] < 1.4 and before["expected_length"] < 1.4
    # Of 5 tokens at most: where the chain takes the less likely way, nobody who does not see it goes along.
    assert after["acceptance_length"] > (3.5 if kind == "eagle3" else 2.5), after
    assert after["expected_length"] > 1.5, after
    rates = [after[f"accepted_{position}"] for position in range(1, runner.positions + 1)]
    assert after["acceptance_length"] == pytest.approx(acceptance_length(rates))


@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_make_the_update_of_one_batch(kind: str) -> None:
    samples = captured(8, 1)
    for number, sample in enumerate(samples):
        sample["loss_mask"][: 2 * number] = False
    ends = []
    for batch_size, accum_steps in ((8, 1), (2, 4)):
        config = draft_config(1, batch_size, accum_steps=accum_steps, lineage=f"by{batch_size}", max_grad_norm=None)
        config.optim, config.scheduler = {"type": "sgd", "lr": 1.0}, {}
        with with_samples(RUNNERS[kind], samples)(config) as runner:
            runner.train()
            ends.append((weights_of(runner), runner.latest_result["train"]["loss"]))
    assert ends[0][1] == pytest.approx(ends[1][1], rel=1e-5)
    for name, value in ends[0][0].items():
        torch.testing.assert_close(value, ends[1][0][name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_samples_without_anything_to_predict_change_nothing(kind: str) -> None:
    config = draft_config(None, epochs=1)
    config.dataloader.shuffle = False
    silent = captured(4, 1, prompt=LENGTH)
    with with_samples(RUNNERS[kind], silent + captured(2, 2))(config) as runner:
        before, steps = weights_of(runner), []
        runner.step = _noting(runner.step, lambda: steps.append(same(weights_of(runner), before)))
        runner.train()
    assert steps == [True, True, False]


def _noting(step: Any, note: Any) -> Any:
    def noted() -> Any:
        outcome = step()
        note()
        return outcome

    return noted


def test_shorter_sequences_are_filled_up_without_a_trace() -> None:
    long, short = captured(2, 1)
    short = {name: value[:15] if value.ndim else value for name, value in short.items()}
    for kind in KINDS:
        with with_samples(RUNNERS[kind], [long])(draft_config(1, 1, lineage=kind)) as runner:
            together = runner.evaluate_step(collate([long, short]))[0]
            alone = runner.evaluate_step(collate([short]))[0]
        for first, second in zip(
            *(([pred] if isinstance(pred, Tensor) else [*pred.values()]) for pred in (together, alone))
        ):
            own = first[1, :, :10] if kind == "eagle3" else first[1]
            torch.testing.assert_close(own, second[0, :, :10] if kind == "eagle3" else second[0], rtol=1e-4, atol=1e-5)


def test_anchors_are_a_samples_own_in_training_and_fixed_in_evaluation() -> None:
    samples = captured(4, 1)
    with with_samples(DFlashRunner, samples)(draft_config(1)) as runner:
        runner.mode = "train"
        whole = runner.to_device(collate(samples))["input"]["anchors"]
        alone = [runner.to_device(collate([sample]))["input"]["anchors"][0] for sample in samples]
        assert torch.equal(whole, torch.stack(alone))
        runner.state.train.epoch = 1
        assert not torch.equal(whole, runner.to_device(collate(samples))["input"]["anchors"])
        runner.mode = "evaluate"
        fixed = runner.to_device(collate(samples))["input"]["anchors"]
        assert all(torch.equal(fixed[0], row) for row in fixed)
        runner.seed += 1
        assert torch.equal(fixed, runner.to_device(collate(samples))["input"]["anchors"])


def test_dominos_loss_follows_the_horizon_of_the_run() -> None:
    samples = captured(2, 1)
    with with_samples(DominoRunner, samples)(draft_config(8)) as runner:
        torch.nn.init.normal_(runner.unwrapped_model.correction[2].weight)
        batch = runner.to_device(collate(samples))
        pred, target = runner.model(**batch["input"]), batch["target"]
        base = DFlashRunner.compute_loss.__get__(_BaseOnly(runner))(pred, target)
        final = DFlashRunner.compute_loss(runner, pred, target)
        assert abs(base - final) > 0.1
        for step, share in ((0, 1.0), (1, 0.75), (4, 0.0), (8, 0.0)):
            runner.state.train.global_step = step
            torch.testing.assert_close(runner.compute_loss(pred, target), (1 - share) * final + share * base)


class _BaseOnly:
    """A DFlash runner's scores for the predictions of Domino."""

    def __init__(self, runner: DominoRunner) -> None:
        self.target = runner.target

    def drafted_scores(self, pred: dict[str, Tensor]) -> Tensor:
        return self.target.scores(pred["hidden"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_run_goes_on_bitwise(kind: str) -> None:
    ends = []
    for name, stops in (("whole", [False]), ("parts", [True, False])):
        for number, stop in enumerate(stops):
            config = draft_config(6, dir=name, auto_resume=number > 0)
            with with_samples(RUNNERS[kind], captured(8, 1))(config) as runner:
                runner.step = _noting(runner.step, runner.stop if stop else lambda: None)
                runner.train()
                assert (runner.state.train.global_step < 6) == stop
        ends.append(weights_of(runner))
    assert same(*ends)


def test_the_draft_is_exported_as_safetensors() -> None:
    for kind in KINDS:
        with with_samples(RUNNERS[kind], captured(8, 1))(draft_config(1, lineage=kind)) as runner:
            runner.train()
            runner.export(f"{kind}.safetensors")
        assert same(import_weights(f"{kind}.safetensors"), weights_of(runner))
    names = import_weights("eagle3.safetensors")
    assert names["vocabulary.t2d"].sum() == len(names["vocabulary.d2t"]) == 10


def _evaluate(kind: str, directory: str) -> dict[str, float]:
    with with_samples(RUNNERS[kind], captured(4, 1), captured(9, 2))(draft_config(2, dir=directory)) as runner:
        figures: dict[str, float] = runner.evaluate("val")["val"]
        return figures


@pytest.mark.parametrize("kind", ["eagle3", pytest.param("domino", marks=pytest.mark.slow)])
def test_ranks_count_acceptance_together(kind: str) -> None:
    ranks = run_processes(_evaluate, kind, "two", world_size=2)
    assert ranks[0] == ranks[1] == pytest.approx(_evaluate(kind, "one"), rel=1e-6)


def test_ends_of_a_target_are_read_from_shards_and_tied_weights(tmp_path: Path) -> None:
    embedding, head = torch.randn(2, 5, 4)
    (tmp_path / "tied").mkdir()
    save_file({"model.embed_tokens.weight": embedding}, tmp_path / "tied" / "model.safetensors")
    ends = TargetEnds.load(tmp_path / "tied")
    assert torch.equal(ends.head, embedding)
    save_file({"model.embed_tokens.weight": embedding}, tmp_path / "a.safetensors")
    save_file({"lm_head.weight": head}, tmp_path / "b.safetensors")
    names = {"model.embed_tokens.weight": "a.safetensors", "lm_head.weight": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    ends = TargetEnds.load(tmp_path)
    assert torch.equal(ends.head, head) and torch.equal(ends.embedding, embedding)


def test_captured_layers_are_spread() -> None:
    assert spread_layers(6, 3) == [1, 2, 3]
    assert spread_layers(36, 5) == [1, 9, 17, 25, 33]
    assert spread_layers(2, 2) == [0, 1]
    with pytest.raises(ValueError, match="at most as many"):
        spread_layers(2, 3)
