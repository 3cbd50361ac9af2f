"""The smaller examples as programs: short runs, and what each of them is there to show."""

from __future__ import annotations

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.programs import number_in, numbers_in, run_program
from support.toys import differences

import danling as dl

EXAMPLES = Path(__file__).parents[2] / "examples"


def saved_in(directory: str) -> dict[str, Any]:
    (file,) = Path().glob(f"{directory}/checkpoints/latest.pth")
    payload: dict[str, Any] = torch.load(file, weights_only=True)
    return payload


def test_finetune_freezes_and_groups(run_example: Callable[..., str]) -> None:
    output = run_example("finetune", "--epochs", "12", "--workspace_root", "experiments")
    assert number_in(output, r"finetuned: test accuracy (\S+)") > number_in(
        output, r"scratch: test accuracy (\S+)"
    )
    state = saved_in("experiments/finetune/*")["optimizer"]
    groups = {tuple(group["params"]): group for group in state["param_groups"]}
    assert not any("first" in name for names in groups for name in names)
    rate = groups[("head.weight",)]["lr"]
    assert groups[("second.weight",)]["lr"] == pytest.approx(rate / 10)
    assert groups[("second.bias", "head.bias")]["weight_decay"] == 0.0


def test_early_stop_ends_before_its_budget_and_keeps_the_average(
    run_example: Callable[..., str],
) -> None:
    output = run_example("early_stop")
    stopped = number_in(output, r"stopped after epoch (\d+)")
    best = number_in(output, r"the best was epoch (\d+)")
    assert stopped == best + 8
    assert number_in(output, r"at a rate of (\S+);") < 5e-3
    assert number_in(output, r"averaged weights (\S+)") > 0.85
    assert set(saved_in("experiments/early_stop/*")["ema"]["weights"]) == {
        "0.weight",
        "0.bias",
        "2.weight",
        "2.bias",
    }


def test_stream_continues_bitwise_at_its_position(run_example: Callable[..., str]) -> None:
    steps = ("--scheduler.total_steps", "60", "--evaluate_interval", "20")
    run_example("streaming", "--steps", "60", *steps, "--dir", "whole")
    run_example("streaming", "--steps", "35", *steps, "--dir", "parts")
    resumed = run_example(
        "streaming", "--steps", "60", *steps, "--dir", "parts", "--auto_resume", "true"
    )
    assert "Resumed from" in resumed
    assert "cannot be positioned" not in resumed
    whole, parts = saved_in("whole"), saved_in("parts")
    assert whole["state"]["train"]["samples"] == parts["state"]["train"]["samples"] == 60 * 64
    assert not differences(whole["model"], parts["model"])


def test_actor_and_critics_resume_bitwise(tmp_path: Path) -> None:
    runner_class = runpy.run_path(str(EXAMPLES / "actor_critic.py"))["TD3"]

    def trained(name: str, **more: Any) -> Any:
        given = {
            "seed": 1,
            "steps": 6,
            "dir": str(tmp_path / name),
            "log": False,
            "dataloader.batch_size": 32,
        }
        with runner_class(dl.RunnerConfig({**given, **more})) as runner:
            runner.train()
            return [*runner.unwrapped_model.parameters(), *runner.target.parameters()]

    whole = trained("whole")
    trained("parts", steps=3)
    assert all(map(torch.equal, whole, trained("parts", auto_resume=True)))


def test_gan_learns_on_two_processes() -> None:
    args = (
        "--steps",
        "200",
        "--evaluate_interval",
        "100",
        "--dataloader.batch_size",
        "16",
        "--ema.enabled",
        "false",
    )
    exit_code, output = run_program(
        EXAMPLES / "gan.py", *args, "--checkpoint.interval", "100", nproc_per_node=2
    )
    assert exit_code == 0, output
    assert number_in(output, r"distance (\S+) at") < 0.9 * number_in(output, r", (\S+) untrained")
    assert output.count("untrained") == 1


def test_uneven_shards_end_together_and_are_evaluated_whole() -> None:
    exit_code, output = run_program(EXAMPLES / "uneven.py", nproc_per_node=2)
    assert exit_code == 0, output
    assert "this pass ends early on rank 0" in output
    # 300 samples are 19 batches of at most 16, the last one of 12 beside a full one on the other rank.
    assert "3020 samples in 95 updates" in output
    assert number_in(output, r"validation accuracy (\S+)") > 0.85


def test_images_are_turned_alike_after_a_resume_and_by_workers(
    run_example: Callable[..., str],
) -> None:
    schedule = ("--scheduler.total_steps", "28", "--ema.enabled", "false")
    output = run_example("images", "--epochs", "4", *schedule, "--dir", "whole")
    (accuracy,) = numbers_in(output, r"test accuracy (\S+) of 797")
    assert accuracy > 0.2
    run_example("images", "--epochs", "2", *schedule, "--dir", "parts")
    workers = ("--dataloader.num_workers", "1", "--auto_resume", "true")
    run_example("images", "--epochs", "4", *schedule, *workers, "--dir", "parts")
    assert not differences(saved_in("whole")["model"], saved_in("parts")["model"])
    run_example("images", "--epochs", "4", "--data.augment", "false", *schedule, "--dir", "plain")
    assert not torch.equal(
        saved_in("whole")["model"]["0.weight"], saved_in("plain")["model"]["0.weight"]
    )


def test_views_of_an_image_are_learned_to_be_alike(run_example: Callable[..., str]) -> None:
    output = run_example("contrastive", "--epochs", "4")
    learned, untrained, pixels = numbers_in(
        output, r"accuracy (\S+) on the learned features, (\S+) on.*, (\S+) on the"
    )
    assert learned > untrained + 0.03 and pixels > 0.8


def test_intervals_hold_about_as_many_targets_as_they_say(run_example: Callable[..., str]) -> None:
    output = run_example("uncertainty", "--epochs", "12")
    nats, without, share = numbers_in(
        output, r"test: (\S+) nats a patient \((\S+) for.*, (\d+)% within"
    )
    assert nats < without - 0.15 and 75 < share < 98


def test_mixture_continues_at_the_position_of_each_source(run_example: Callable[..., str]) -> None:
    small = (
        "--model.width",
        "16",
        "--model.depth",
        "1",
        "--model.context",
        "16",
        "--evaluate_interval",
        "10",
    )
    small += ("--scheduler.total_steps", "20", "--dataloader.batch_size", "4")
    output = run_example("mixture", "--steps", "20", *small, "--dir", "whole")
    text, code = numbers_in(output, r"bits a byte: (\S+) of text, (\S+) of code; after 20 updates")
    assert text < 8 and code < 8
    run_example("mixture", "--steps", "11", *small, "--dir", "parts")
    run_example("mixture", "--steps", "20", *small, "--auto_resume", "true", "--dir", "parts")
    assert not differences(saved_in("whole")["model"], saved_in("parts")["model"])


def test_adapters_alone_are_trained_and_saved(run_example: Callable[..., str]) -> None:
    from support.language_models import model_of, tokenizer

    model_of("llama").save_pretrained("base")
    tokenizer().save_pretrained("base")
    Path("notes.txt").write_text("a b c d e f g h i j k l " * 60)
    small = (
        "--data.context",
        "8",
        "--lora.rank",
        "2",
        "--dataloader.batch_size",
        "8",
        "--dir",
        "adapted",
    )
    output = run_example("lora", "--base.path", "base", "--data.path", "notes.txt", *small)
    before, after = numbers_in(output, r"(\S+) -> (\S+) bits a token of the new text")
    assert after < before
    assert all("lora_" in name for name in saved_in("adapted")["model"])
    assert (Path("adapted/adapters/adapter_model.safetensors")).exists()


def test_graphs_of_all_kinds_have_as_many_edges_and_are_told_apart(
    run_example: Callable[..., str],
) -> None:
    pytest.importorskip("torch_geometric")
    made = runpy.run_path(str(EXAMPLES / "graphs.py"))
    for graph in made["make_graphs"](30, seed=5):
        edges = set(map(tuple, graph.edge_index.T.tolist()))
        assert len(edges) == 2 * made["EDGES"] and all(a != b and (b, a) in edges for a, b in edges)
        assert len({a for a, _ in edges}) <= made["NODES"] == graph.num_nodes
    output = run_example("graphs", "--epochs", "4", "--ema.enabled", "false")
    (accuracy,) = numbers_in(output, r"test accuracy (\S+) of 600 graphs")
    assert accuracy > 0.5


def test_a_student_comes_near_its_teacher(run_example: Callable[..., str]) -> None:
    output = run_example(
        "streams/distillation",
        "--steps",
        "150",
        "--evaluate_interval",
        "150",
        "--teacher.steps",
        "200",
    )
    teacher, student, alone = (
        float(found) for found in re.findall(r"test accuracy (\S+) of", output)
    )
    assert teacher > 0.88 and student > 0.82 and student > alone, output


def test_embeddings_are_computed_once(run_example: Callable[..., str]) -> None:
    first = run_example("streams/embeddings", "--epochs", "1", "--features.images", "400")
    again = run_example("streams/embeddings", "--epochs", "1", "--features.images", "400")
    assert "\n400 embeddings were computed, 400 are there" in first
    assert "\n0 embeddings were computed, 400 are there" in again
    accuracies = [re.findall(r"test accuracy (\S+) on", output) for output in (first, again)]
    assert accuracies[0] == accuracies[1] and float(accuracies[0][0]) > 0.5


@pytest.mark.parametrize(
    ("played", "oldest"), [("64", 3), pytest.param("16", 0, marks=pytest.mark.slow)]
)
def test_a_policy_learns_from_episodes_of_its_own(
    played: str, oldest: int, run_example: Callable[..., str]
) -> None:
    output = run_example("streams/rollouts", "--steps", "150", "--rollouts.played", played)
    found = re.search(r"moves (\S+) -> (\S+), 5.1 is the shortest way", output)
    assert found is not None, output
    assert float(found[1]) > 13 and float(found[2]) < 8, output
    assert f"up to {oldest} updates ago" in output
