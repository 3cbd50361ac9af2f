"""A batch that is evaluated on a mesh, without a runner: whole where parameters are divided, through the stages in a pipeline."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.processes import run_processes
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from danling.mesh import Topology
from danling.mesh.model_parts import ModelParts
from danling.mesh.pipeline import Pipeline, StagePlan, resolve_schedule
from danling.mesh.preparation import MeshForward, whole_tensors

CPU = torch.device("cpu")
INPUTS = torch.arange(8.0).reshape(4, 2)
TARGETS = torch.ones(4, 2)


def forward_of(model: nn.Module, topology: Topology, stages: StagePlan, pipeline: Pipeline | None) -> MeshForward:
    return MeshForward(
        model=lambda: model,
        bare=lambda: model,
        context=lambda: None,
        loss=lambda pred, target: nn.functional.mse_loss(pred, target) if target is not None else None,
        topology=topology,
        stages=stages,
        pipeline=lambda: pipeline,
    )


def test_without_a_pipeline_a_batch_is_evaluated_as_by_one_process() -> None:
    model = nn.Linear(2, 2)
    forward = forward_of(model, Topology({}, device=CPU), StagePlan(resolve_schedule("1F1B")), None)
    pred, loss = forward.evaluate((INPUTS, TARGETS))
    assert torch.equal(pred, model(INPUTS)) and loss is not None
    assert torch.equal(loss, nn.functional.mse_loss(model(INPUTS), TARGETS))
    assert forward.evaluate(INPUTS)[1] is None
    assert torch.equal(forward.infer({"input": INPUTS}), model(INPUTS))
    assert forward.counted([1]) == [1] and forward.shared([2]) == [2]


@pytest.mark.parametrize(("has_last", "counted"), [(True, [1, 2]), (False, [])])
def test_predictions_count_on_the_last_stage_alone(has_last: bool, counted: list[int]) -> None:
    stages: Any = SimpleNamespace(has_last=has_last)
    forward = forward_of(nn.Linear(2, 2), Topology({}, device=CPU), stages, SimpleNamespace())  # type: ignore[arg-type]
    assert forward.counted([1, 2]) == counted


def divided_and_staged() -> dict[str, Any]:
    """Evaluate a batch on both stages of a pipeline, and make a divided prediction whole."""
    torch.manual_seed(3)
    parts = [nn.Linear(2, 3), nn.Linear(3, 2)]
    topology = Topology({"pipeline": 2}, device=CPU)
    kind = resolve_schedule("1F1B")
    stages = StagePlan(kind, 2, (topology.coordinate["pipeline"],))
    mine = parts[topology.coordinate["pipeline"]]
    pipeline = Pipeline(
        [mine],
        stages.indices,
        num_stages=2,
        domain=topology.domain("pipeline"),
        schedule=kind,
        microbatch_size=2,
        n_microbatches=None,
        key=lambda: 0,
        device=CPU,
    )
    forward = forward_of(ModelParts([mine]), topology, stages, pipeline)
    with torch.no_grad():
        pred, loss = forward.evaluate((INPUTS, TARGETS))
        predicted = forward.infer((INPUTS, TARGETS))
        expected = parts[1](parts[0](INPUTS))
    rows = forward.counted(list(predicted) if isinstance(predicted, Tensor) else [])
    mesh = topology.view("pipeline")
    assert mesh is not None
    piece = DTensor.from_local(torch.full((1, 2), float(topology.rank)), mesh, [Shard(0)])
    return {
        "last": stages.has_last,
        "same": pred is not None and torch.allclose(pred, expected) and torch.allclose(predicted, expected),
        "loss": None if loss is None else float(loss - nn.functional.mse_loss(expected, TARGETS)),
        "shared": torch.allclose(torch.stack(forward.shared(rows)), expected),
        "whole": whole_tensors({"logits": [piece, "text"]}),
    }


@pytest.mark.timeout(120)
def test_through_the_stages_the_last_one_predicts_and_all_are_told() -> None:
    first, last = run_processes(divided_and_staged, world_size=2, init_process_group=True)
    assert (first["last"], first["same"], first["loss"]) == (False, False, None)
    assert last["last"] and last["same"] and last["loss"] == pytest.approx(0.0, abs=1e-6)
    for rank in (first, last):
        assert rank["shared"] and rank["whole"]["logits"][1] == "text"
        assert rank["whole"]["logits"][0].tolist() == [[0.0, 0.0], [1.0, 1.0]]
