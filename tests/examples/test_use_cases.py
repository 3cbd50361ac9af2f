"""The examples by use as programs: short runs of each, and what each of them is there to show."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.programs import numbers_in
from support.toys import differences

EXAMPLES = Path(__file__).parents[2] / "examples"


def latest(directory: str) -> dict[str, Any]:
    payload: dict[str, Any] = torch.load(f"{directory}/checkpoints/latest.pth", weights_only=True)
    return payload


def test_images_are_turned_alike_after_a_resume_and_by_workers(run_example: Callable[..., str]) -> None:
    schedule = ("--scheduler.total_steps", "28", "--ema.enabled", "false")
    output = run_example("images", "--epochs", "4", *schedule, "--dir", "whole")
    (accuracy,) = numbers_in(output, r"test accuracy (\S+) of 797")
    assert accuracy > 0.2
    run_example("images", "--epochs", "2", *schedule, "--dir", "parts")
    workers = ("--dataloader.num_workers", "1", "--auto_resume", "true")
    run_example("images", "--epochs", "4", *schedule, *workers, "--dir", "parts")
    assert not differences(latest("whole")["model"], latest("parts")["model"])
    run_example("images", "--epochs", "4", "--data.augment", "false", *schedule, "--dir", "plain")
    assert not torch.equal(latest("whole")["model"]["0.weight"], latest("plain")["model"]["0.weight"])


def test_views_of_an_image_are_learned_to_be_alike(run_example: Callable[..., str]) -> None:
    output = run_example("contrastive", "--epochs", "4")
    learned, untrained, pixels = numbers_in(output, r"accuracy (\S+) on the learned features, (\S+) on.*, (\S+) on the")
    assert learned > untrained + 0.03 and pixels > 0.8


def test_intervals_hold_about_as_many_targets_as_they_say(run_example: Callable[..., str]) -> None:
    output = run_example("uncertainty", "--epochs", "12")
    nats, without, share = numbers_in(output, r"test: (\S+) nats a patient \((\S+) for.*, (\d+)% within")
    assert nats < without - 0.15 and 75 < share < 98


def test_a_mixture_goes_on_where_each_source_was(run_example: Callable[..., str]) -> None:
    small = ("--model.width", "16", "--model.depth", "1", "--model.context", "16", "--evaluate_interval", "10")
    small += ("--scheduler.total_steps", "20", "--dataloader.batch_size", "4")
    output = run_example("mixture", "--steps", "20", *small, "--dir", "whole")
    text, code = numbers_in(output, r"bits a byte: (\S+) of text, (\S+) of code; after 20 updates")
    assert text < 8 and code < 8
    run_example("mixture", "--steps", "11", *small, "--dir", "parts")
    run_example("mixture", "--steps", "20", *small, "--auto_resume", "true", "--dir", "parts")
    assert not differences(latest("whole")["model"], latest("parts")["model"])


def test_adapters_alone_are_trained_and_saved(run_example: Callable[..., str]) -> None:
    from support.language_models import model_of, tokenizer

    model_of("llama").save_pretrained("base")
    tokenizer().save_pretrained("base")
    Path("notes.txt").write_text("a b c d e f g h i j k l " * 60)
    small = ("--data.context", "8", "--lora.rank", "2", "--dataloader.batch_size", "8", "--dir", "adapted")
    output = run_example("lora", "--base.path", "base", "--data.path", "notes.txt", *small)
    before, after = numbers_in(output, r"(\S+) -> (\S+) bits a token of the new text")
    assert after < before
    assert all("lora_" in name for name in latest("adapted")["model"])
    assert (Path("adapted/adapters/adapter_model.safetensors")).exists()


def test_graphs_of_all_kinds_have_as_many_edges_and_are_told_apart(run_example: Callable[..., str]) -> None:
    pytest.importorskip("torch_geometric")
    made = runpy.run_path(str(EXAMPLES / "graphs.py"))
    for graph in made["make_graphs"](30, seed=5):
        edges = set(map(tuple, graph.edge_index.T.tolist()))
        assert len(edges) == 2 * made["EDGES"] and all(a != b and (b, a) in edges for a, b in edges)
        assert len({a for a, _ in edges}) <= made["NODES"] == graph.num_nodes
    output = run_example("graphs", "--epochs", "4", "--ema.enabled", "false")
    (accuracy,) = numbers_in(output, r"test accuracy (\S+) of 600 graphs")
    assert accuracy > 0.5
