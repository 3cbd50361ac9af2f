"""The pieces that a model on a mesh is prepared with: policies, initialisation, recomputation, choice of parts, the optimizer."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

import danling as dl
from danling.config import RunnerConfig
from danling.distributed import LocalDomain
from danling.mesh import Topology, preparation
from danling.mesh.model_parts import choose_parts, recompute_blocks, recomputes
from danling.mesh.preparation import MeshPreparation, initialize_weights, rebind_optimizer


def test_policies_of_fsdp() -> None:
    def runner_with(**fsdp: Any) -> Any:
        return SimpleNamespace(config=RunnerConfig({"fsdp": fsdp}), device=torch.device("cpu"))

    def mixed_precision_policy(given: Any) -> Any:
        return dl.ParallelRunner.build_mixed_precision_policy(runner_with(mp_policy=given))

    def offload_policy(given: Any) -> Any:
        return dl.ParallelRunner.build_offload_policy(runner_with(offload_policy=given))

    assert mixed_precision_policy(None) == MixedPrecisionPolicy()
    given = mixed_precision_policy(
        {"param_dtype": "bf16", "reduce_dtype": "float32", "cast_forward_inputs": False}
    )
    assert (given.param_dtype, given.reduce_dtype, given.cast_forward_inputs) == (
        torch.bfloat16,
        torch.float32,
        False,
    )
    own = MixedPrecisionPolicy(output_dtype=torch.float16)
    assert mixed_precision_policy(own) is own
    for wrong in ("bf16", {"dtype": "bf16"}, {"param_dtype": "bf17"}):
        with pytest.raises(ValueError, match=r"fsdp.mp_policy.*param_dtype"):
            mixed_precision_policy(wrong)
    assert offload_policy(None) is None and offload_policy(False) is None
    assert offload_policy("CPU") == CPUOffloadPolicy(pin_memory=False) == offload_policy(True)
    with pytest.raises(ValueError, match="fsdp.offload_policy='disk'"):
        offload_policy("disk")


def weights_on(rank: int, degrees: dict[str, int], number: int = 0) -> Tensor:
    """Weights of a layer that a rank of two initialises."""
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    try:
        layer = nn.Linear(3, 3, device="meta").to_empty(device="cpu")
        initialize_weights(layer, Topology(degrees), seed=7, number=number)
        return layer.weight.detach().clone()
    finally:
        dist.destroy_process_group()


def test_copies_begin_alike_and_parts_apart() -> None:
    for axis in ("replicate", "context"):
        assert torch.equal(weights_on(0, {axis: 2}), weights_on(1, {axis: 2}))
    for axis in ("shard", "pipeline", "tensor", "expert", "expert_tensor"):
        assert not torch.equal(weights_on(0, {axis: 2}), weights_on(1, {axis: 2}))
    # Two parts of one rank of an interleaved pipeline.
    assert not torch.equal(weights_on(0, {"pipeline": 2}), weights_on(0, {"pipeline": 2}, number=1))


def test_module_without_initialisation_is_named() -> None:
    class Silent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

    with pytest.raises(ValueError, match="init_weights.*none on 0"):
        initialize_weights(nn.Sequential(Silent()), Topology({}), seed=1)


def test_a_recomputed_block_gives_the_same_gradient_and_counts_a_batch_once() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    again = copy.deepcopy(plain)
    recompute_blocks(again, list(again.children()), compiled=False)
    assert recomputes([plain, again]) and not recomputes([plain])
    data = torch.randn(6, 3)
    for model in (plain, again):
        model(data).sum().backward()
    for mine, other in zip(plain.parameters(), again.parameters()):
        assert mine.grad is not None and other.grad is not None
        torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0)
    for buffer, other_buffer in zip(plain.buffers(), again.buffers()):
        assert torch.equal(buffer, other_buffer)


def test_modules_of_a_stage() -> None:
    class Named(nn.Sequential):
        def pipeline_modules(self, number: int) -> list[list[str]]:
            return [["0"], ["1", "2"], ["3"]][:number]

    model = Named(*(nn.Linear(2, 2) for _ in range(4)))
    assert choose_parts(model, 3) == [["0"], ["1", "2"], ["3"]]
    assert choose_parts(model, 2, [["0", "1"], ["2", "3"]]) == [["0", "1"], ["2", "3"]]
    assert choose_parts(nn.Sequential(*model), 2) == [["0", "1"], ["2", "3"]]
    with pytest.raises(ValueError, match=r"pipeline_modules\(4\).*Received: 3"):
        choose_parts(model, 4)


def test_an_optimizer_follows_the_names_of_its_parameters() -> None:
    before = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(
        [{"params": before[0].parameters(), "lr": 1.0}, {"params": before[1].parameters()}], 0.1
    )
    names = {id(parameter): name for name, parameter in before.named_parameters()}
    # The part of another rank is gone, and the rest has kept its names.
    now = nn.Sequential(nn.Linear(2, 2), nn.Identity())
    rebind_optimizer(optimizer, names, now, list(now.parameters()), pipeline=LocalDomain())
    assert [[id(p) for p in group["params"]] for group in optimizer.param_groups] == [
        [id(p) for p in now[0].parameters()],
        [],
    ]
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.1]
    with pytest.raises(ValueError, match="would train nothing"):
        rebind_optimizer(optimizer, {}, now, [], pipeline=LocalDomain())
    now(torch.ones(1, 2)).sum().backward()
    stepped = torch.optim.Adam(now.parameters())
    stepped.step()
    with pytest.raises(ValueError, match="Adam that has stepped"):
        rebind_optimizer(stepped, names, now, list(now.parameters()), pipeline=LocalDomain())


def test_communicating_axes_and_axes_without_effect() -> None:
    fsdp = {"reshard_after_forward": True, "blocks": ["Layer"]}
    config = RunnerConfig(
        {"stack": "parallel", "fsdp": fsdp, "fsdp_notes": {"by": "me"}, "compile": {"enable": True}}
    )

    def runner_on(topology: Topology) -> Any:
        pipeline = topology.domain("pipeline")
        return SimpleNamespace(
            topology=topology, world=LocalDomain(), pipeline_domain=pipeline, config=config
        )

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    try:
        reasons = {}
        for axis in ("replicate", "shard", "context", "pipeline", "tensor"):
            prepared = MeshPreparation(runner_on(Topology({axis: 4})))
            reasons[axis] = prepared.forward_communicates(nn.Identity())
        assert reasons.pop("replicate") is None
        assert reasons == {axis: f"parallel.axes.{axis}=4" for axis in reasons}
        cut = runner_on(Topology({"pipeline": 2, "shard": 2}))
        cut.build_mixed_precision_policy = cut.build_offload_policy = lambda: None
        with pytest.raises(ValueError, match="fsdp.reshard_after_forward=True.*pipeline=2"):
            dl.ParallelRunner.fsdp_kwargs(cut)
    finally:
        dist.destroy_process_group()
    alone = MeshPreparation(runner_on(Topology({})))
    assert [line.partition(" ")[0] for line in alone.idle_settings()] == [
        "fsdp.reshard_after_forward"
    ]
    model = nn.Linear(2, 2)
    assert alone.whole_parameters(model.named_parameters()) is None
    with alone.whole_weights(model, modify=True):
        model.weight.fill_(3.0)
    assert torch.all(model.weight == 3.0)


def test_an_evaluation_raises_its_own_error_where_torch_cannot_leave_its_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[object] = []

    def reshard(model: object) -> None:
        calls.append(model)
        if len(calls) > 1:
            raise RuntimeError("cannot leave a forward")

    monkeypatch.setattr(preparation, "reshard", reshard)
    prepared = MeshPreparation.__new__(MeshPreparation)
    prepared.order = None
    with pytest.raises(ValueError, match="a bad sample"), prepared.evaluating(None):
        raise ValueError("a bad sample")
    assert len(calls) == 2
