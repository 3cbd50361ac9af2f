"""The private names of torch that the library uses, with the releases of torch that have each of them.

torch may rename them in any release. `danling doctor` and the tests look each name up in the torch that runs; the tests also refuse a
private name in the sources of the library that is not listed here.
"""

from __future__ import annotations

from importlib import import_module
from types import CodeType, ModuleType
from typing import Any

_ALL = "2.11 2.12 2.13 2.14 2.15"
_ELASTIC = "2.14 2.15"
_FSDP = "torch.distributed.fsdp._fully_shard"
_WORKERS = "torch.utils.data.dataloader._MultiProcessingDataLoaderIter"

PRIVATE_NAMES: dict[str, str] = {
    "torch.Tensor._backward_hooks": _ALL,
    "torch.Tensor._indices": _ALL,
    "torch.Tensor._post_accumulate_grad_hooks": _ALL,
    "torch.Tensor._values": _ALL,
    "torch.Tensor._version": _ALL,
    "torch._C._current_graph_task_id": _ALL,
    "torch._C._autograd._top_saved_tensors_default_hooks": _ALL,
    "torch._C._distributed_c10d.HashStore": _ALL,
    "torch._C._distributed_c10d.PrefixStore": _ALL,
    "torch._C._distributed_c10d.Reducer._check_reducer_finalized": _ALL,
    "torch._C._distributed_c10d.Store": _ALL,
    "torch._C._distributed_c10d.TCPStore": _ALL,
    "torch._dynamo.config": _ALL,
    "torch._dynamo.exc": _ALL,
    "torch._dynamo.utils.counters": _ALL,
    "torch._foreach_add_": _ALL,
    "torch._foreach_clamp_max_": _ALL,
    "torch._foreach_clamp_min_": _ALL,
    "torch._foreach_copy_": _ALL,
    "torch._foreach_lerp_": _ALL,
    "torch._foreach_mul_": _ALL,
    "torch._foreach_norm": _ALL,
    "torch._functorch.config": _ALL,
    "torch._inductor.config": _ALL,
    "torch._inductor.runtime.cache_dir_utils.default_cache_dir": _ALL,
    "torch.amp.GradScaler._per_optimizer_states": _ALL,
    "torch.cuda.memory._dump_snapshot": _ALL,
    "torch.cuda.memory._record_memory_history": _ALL,
    "torch.distributed.ProcessGroup._get_backend": _ALL,
    "torch.distributed.ProcessGroupGloo._Options._timeout": _ALL,
    "torch.distributed._functional_collectives.all_gather_tensor_autograd": _ALL,
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.CheckpointWrapper": _ALL,
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.apply_activation_checkpointing": _ALL,
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper.checkpoint_wrapper": _ALL,
    "torch.distributed.checkpoint.filesystem._StorageInfo": _ALL,
    "torch.distributed.checkpoint.filesystem._StoragePrefix": _ALL,
    "torch.distributed.device_mesh.DeviceMesh._flatten": _ALL,
    "torch.distributed._get_reconfigure_handle": _ELASTIC,
    "torch.distributed._reconfigure": _ELASTIC,
    "torch.distributed.distributed_c10d._get_default_store": _ALL,
    "torch.distributed.distributed_c10d._set_pg_timeout": _ALL,
    "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._exit_barrier": _ELASTIC,
    "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._monitor_workers": _ELASTIC,
    "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._pcontext": _ELASTIC,
    "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._shutdown": _ELASTIC,
    "torch.distributed.elastic.agent.server.local_elastic_agent.LocalElasticAgent._start_workers": _ELASTIC,
    "torch.distributed.elastic.multiprocessing.SubprocessContext._numa_options": _ELASTIC,
    "torch.distributed.elastic.multiprocessing.SubprocessContext._running_local_ranks": _ELASTIC,
    "torch.distributed.fsdp.FSDPModule._get_fsdp_state": _ALL,
    "torch.distributed.fsdp.FullyShardedDataParallel._use_orig_params": _ALL,
    "torch.distributed.fsdp._flat_param.FlatParameter._unpadded_unsharded_size": _ALL,
    f"{_FSDP}._fsdp_api.ReduceScatter": _ALL,
    f"{_FSDP}._fsdp_collectives.DefaultAllGather": _ALL,
    f"{_FSDP}._fsdp_common.TrainingState": _ALL,
    f"{_FSDP}._fsdp_param.FSDPParam._unsharded_param": _ALL,
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup._all_gather_comm": _ALL,
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup._partial_reduce_output": _ALL,
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup._reduce_dtype": _ALL,
    f"{_FSDP}._fsdp_param_group.FSDPParamGroup._training_state": _ALL,
    f"{_FSDP}._fsdp_state.FSDPState._fsdp_param_group": _ALL,
    f"{_FSDP}._fsdp_state.FSDPState._is_root": _ALL,
    f"{_FSDP}._fsdp_state.FSDPState._training_state": _ALL,
    f"{_FSDP}._fsdp_state.FSDPState._fsdp_param_groups": "2.12 2.13 2.14 2.15",
    "torch.distributed.tensor.DTensor._local_tensor": _ALL,
    "torch.distributed.tensor.DTensor._spec": _ALL,
    "torch.distributed.tensor._random.OffsetBasedRNGTracker": _ALL,
    "torch.distributed.tensor._random._rng_tracker": _ALL,
    "torch.distributed.tensor._random.is_rng_supported_mesh": _ALL,
    "torch.distributed.tensor._utils.compute_local_shape_and_global_offset": _ALL,
    "torch.nn.Module._apply": _ALL,
    "torch.nn.Module._buffers": _ALL,
    "torch.nn.Module._call_impl": _ALL,
    "torch.nn.Module._compiled_call_impl": _ALL,
    "torch.nn.Module._load_from_state_dict": _ALL,
    "torch.nn.Module._modules": _ALL,
    "torch.nn.Module._non_persistent_buffers_set": _ALL,
    "torch.nn.Module._parameters": _ALL,
    "torch.nn.modules.batchnorm._BatchNorm": _ALL,
    "torch.nn.modules.batchnorm._NormBase": _ALL,
    "torch.nn.modules.loss._Loss": _ALL,
    "torch.nn.modules.module._has_any_global_hook": _ALL,
    "torch.nn.parallel.DistributedDataParallel._comm_hooks": _ALL,
    "torch.optim.Optimizer._optimizer_load_state_dict_post_hooks": _ALL,
    "torch.optim.Optimizer._optimizer_load_state_dict_pre_hooks": _ALL,
    "torch.optim.Optimizer._optimizer_state_dict_post_hooks": _ALL,
    "torch.optim.Optimizer._optimizer_state_dict_pre_hooks": _ALL,
    "torch.optim.Optimizer._optimizer_step_post_hooks": _ALL,
    "torch.optim.Optimizer._optimizer_step_pre_hooks": _ALL,
    "torch.optim._muon._adjust_lr": _ALL,
    "torch.optim._muon._zeropower_via_newtonschulz": _ALL,
    "torch.optim.lr_scheduler.LRScheduler._last_lr": _ALL,
    "torch.optim.lr_scheduler.SequentialLR._milestones": _ALL,
    "torch.optim.lr_scheduler.SequentialLR._schedulers": _ALL,
    "torch.optim.optimizer._global_optimizer_post_hooks": _ALL,
    "torch.optim.optimizer._global_optimizer_pre_hooks": _ALL,
    "torch.overrides._get_current_function_mode_stack": _ALL,
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack": _ALL,
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": _ALL,
    "torch.utils._pytree.tree_leaves": _ALL,
    "torch.utils._pytree.tree_map": _ALL,
    "torch.utils._pytree.tree_map_only": _ALL,
    "torch.utils._triton.has_triton": _ALL,
    "torch.utils.data.DataLoader._get_iterator": _ALL,
    "torch.utils.data.DataLoader._iterator": _ALL,
    "torch.utils.data.RandomSampler._num_samples": _ALL,
    "torch.utils.data._utils.collate.collate": _ALL,
    "torch.utils.data._utils.collate.default_collate": _ALL,
    "torch.utils.data._utils.collate.default_collate_fn_map": _ALL,
    "torch.utils.data._utils.collate.default_convert": _ALL,
    "torch.utils.tensorboard.SummaryWriter._get_file_writer": _ALL,
    "torch.utils.data.dataloader._BaseDataLoaderIter": _ALL,
    f"{_WORKERS}._shutdown_workers": _ALL,
    f"{_WORKERS}._workers": _ALL,
}


TESTED = tuple(_ALL.split())
"""The releases of torch that the library was tested with."""


def missing_names(version: str) -> list[str]:
    """Return the names that a version of torch should have, by its release or the newest tested one, and has not here."""
    release = ".".join(version.split(".")[:2])
    expected = release if release in TESTED else TESTED[-1]
    return [
        name
        for name, releases in PRIVATE_NAMES.items()
        if expected in releases.split() and not has_name(name)
    ]


def has_name(dotted: str) -> bool:
    """Return whether torch has a name: in a module, in a class, or given to instances by a method of the class.

    A name whose module needs a package that is not installed, such as tensorboard, counts as one that torch has.
    """
    parts = dotted.split(".")
    found: Any = import_module(parts[0])
    for place, name in enumerate(parts[1:], 2):
        if hasattr(found, name):
            found = getattr(found, name)
        elif isinstance(found, ModuleType):
            try:
                # torch.optim deletes the names of its modules.
                found = import_module(".".join(parts[:place]))
            except ModuleNotFoundError as error:
                return not str(error.name).startswith("torch")
        else:
            return (
                isinstance(found, type) and place == len(parts) and name in _used_by_methods(found)
            )
    return True


def _used_by_methods(kind: type) -> set[str]:
    codes = [
        getattr(getattr(value, "__func__", value), "__code__", None)
        for base in kind.__mro__
        for value in vars(base).values()
    ]
    # An attribute that a method sets on `self` is among the names of its code.
    return {name for code in codes if isinstance(code, CodeType) for name in code.co_names}
