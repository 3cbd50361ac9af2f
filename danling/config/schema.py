"""Every key of the library with its type, its default and, under it, its help text: the sections, and the top level."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Generic, Literal, TypeVar, overload

from .hints import Bounds, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from .sections import ClosedSection, OpenSection

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Self

    S = TypeVar("S")

    class Nested(Generic[S]):
        """A key that holds a section: it reads as the section, and is set to one or to a mapping, `config.optim = {"lr": 0.1}`."""

        @overload
        def __get__(self, owner: None, kind: type) -> Self: ...
        @overload
        def __get__(self, owner: object, kind: type) -> S: ...
        def __get__(self, owner: object, kind: type) -> object: ...
        def __set__(self, owner: object, value: S | Mapping[str, Any]) -> None: ...

else:

    class Nested:
        """The section's own class, which is all that a configuration asks for."""

        def __class_getitem__(cls, section):
            return section


_PRECISIONS = {
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "fp32": None,
    "float32": None,
    "no": None,
}
Precision = Annotated[Literal["fp16", "bf16"] | None, _PRECISIONS]


class WandbConfig(ClosedSection, path="wandb"):
    """Weights & Biases."""

    enabled: bool = False
    """Log scalars to Weights & Biases."""
    project: str | None = None
    """Project; none takes the lineage."""
    entity: str | None = None
    """User or team."""
    group: str | None = None
    """Group; none takes the experiment."""
    name: str | None = None
    """Display name; none takes the run's id."""
    job_type: str | None = None
    """Job type."""
    tags: list[str] | None = None
    """Tags of the run."""
    dir: str | None = None
    """Local directory; none takes the run directory."""
    mode: Literal["online", "offline", "disabled", "shared"] | None = None
    """Mode of wandb."""


class MlflowConfig(ClosedSection, path="mlflow"):
    """MLflow."""

    enabled: bool = False
    """Log metrics to MLflow."""
    uri: str | None = None
    """Store, such as sqlite:////data/mlflow.db or http://host:5000; none: MLFLOW_TRACKING_URI, else mlflow.db in the run directory."""
    experiment: str | None = None
    """Experiment of MLflow; none takes the lineage."""
    name: str | None = None
    """Display name; none takes the run's id."""


class TrackioConfig(ClosedSection, path="trackio"):
    """trackio."""

    enabled: bool = False
    """Log metrics to trackio, into the directory that TRACKIO_DIR names."""
    project: str | None = None
    """Project; none takes the lineage."""
    group: str | None = None
    """Group; none takes the experiment."""
    space_id: str | None = None
    """Space of Hugging Face to log to, instead of locally."""
    server_url: str | None = None
    """Server of trackio to log to, instead of locally."""


class EmaConfig(ClosedSection, path="ema"):
    """Exponential moving average of the weights."""

    enabled: bool = False
    """Keep an exponential moving average (EMA) of the weights, which evaluation uses."""
    decay: Annotated[float, Bounds(0, 1, open_high=True)] = 0.999
    """Share of the old average that an update keeps, in [0, 1)."""
    warmup: bool = False
    """Ramp the decay up over the first updates."""
    interval: PositiveInt = 1
    """The average takes in the weights every so many updates."""
    buffers: Literal["copy", "average"] = "copy"
    """Copy the buffers of the model, or average the floating ones too; values that are not finite are copied."""


class RemoteConfig(ClosedSection, path="checkpoint.remote"):
    """A copy of the run in an object store, from which it goes on where its machine is gone."""

    url: str | None = None
    """Where runs are: s3://bucket/prefix, gs://, abfss://, file:///; the run goes below it, as lineage/id."""
    required: bool = False
    """End the training when a save cannot be copied there, instead of going on."""
    keep_latest_k: NonNegativeInt = 0
    """History checkpoints to keep there; 0 keeps all."""
    interval: PositiveInt = 1
    """Copy every so many of the saves that are neither history nor best; the last is always copied."""
    part_size: Annotated[int, Bounds(5 << 20)] = 16 << 20
    """Bytes of a part of an upload, at least 5 MiB, which S3 requires; larger files go up in several parts at once."""
    timeout_seconds: PositiveFloat = 120.0
    """Longest time of one request, such as a part of an upload."""
    retries: NonNegativeInt = 5
    """How often a request is tried again that failed for a reason that may pass."""


class CheckpointConfig(ClosedSection, path="checkpoint"):
    """Checkpoint policy."""

    dir_name: str = "checkpoints"
    """Subdirectory of the run directory."""
    backend: Literal["auto", "file", "dcp"] = "auto"
    """Format: file, dcp (sharded); auto takes dcp for the parallel stack and file otherwise."""
    interval: PositiveInt | None = None
    """Epochs or steps between periodic saves; none: each epoch, or a twentieth of the steps."""
    before_evaluation: bool = True
    """Save before each evaluation if a save needs all ranks, so that a failing evaluation loses nothing."""
    trainable_only: bool = False
    """Save only trained parameters, and a checksum of the frozen ones, which a resumed run compares."""
    keep_latest_k: NonNegativeInt = 0
    """History checkpoints to keep; 0 keeps all."""
    load_only: bool = False
    """Never write a checkpoint."""
    verify: Literal["full", "size", "none"] = "full"
    """Checks of a checkpoint before it is loaded: full (SHA-256 checksums), size, or none."""
    trust: bool = False
    """Let DeepSpeed's converters unpickle engine files, which can run code in them; never taken from a checkpoint."""
    async_enabled: bool = True
    """Write in the background."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] | None = None
    """Background writes: by a thread (async) or, for dcp, by a process (async_with_pinned_mem); none follows async_enabled."""
    dedicated_async_process_group: bool = True
    """Give the background writer of sharded checkpoints its own process group."""
    async_process_group_backend: str = "gloo"
    """Backend of that process group."""
    wait_timeout: NonNegativeFloat | None = None
    """Seconds to wait for the writer at close; none waits until it is done."""
    exclude_from_loading: list[str] | None = None
    """Keys or dotted paths of a checkpoint that are not loaded; checkpoints of runs that left the same out are loaded whole."""
    last_save_model_only: bool = False
    """Write the trained model, without training state, as an export next to the last checkpoint."""
    export_dtype: str | None = None
    """Floating dtype of that export, such as bfloat16; none keeps each tensor's own."""
    enable_ft_dataloader_checkpoints: bool = False
    """Save the loader state of a replica group; with ft.enabled every group does."""
    ft_replica_id: str | None = None
    """Name of this replica group in those checkpoints; none takes ft.replica_id."""
    ft_dataloader_checkpoint_prefix: str = "ft-replica"
    """Prefix of their directories."""
    remote: Nested[RemoteConfig]
    """A copy of the run in an object store."""


class AxesConfig(ClosedSection, path="parallel.axes"):
    """Degrees of parallelism; one may be -1 and is filled from the world size."""

    replicate: int = 1
    """Replicas of the model (DDP, HSDP)."""
    shard: int = 1
    """Shards of parameters and optimizer state (FSDP)."""
    context: int = 1
    """Ranks that have slices of one sequence."""
    pipeline: int = 1
    """Ranks that have stages of the model."""
    tensor: int = 1
    """Ranks that have parts of each layer."""
    expert: int = 1
    """Ranks that have some of the experts."""
    expert_tensor: int = 1
    """Ranks that have parts of each expert."""


class ParallelConfig(ClosedSection, path="parallel"):
    """The device mesh of the parallel stack."""

    axes: Nested[AxesConfig]
    """Degrees of parallelism; one may be -1 and is filled from the world size."""
    pipeline_schedule: str = "1F1B"
    """Any schedule class of torch.distributed.pipelining, by name."""
    pipeline_microbatch_size: PositiveInt = 1
    """Samples of a pipeline micro-batch."""
    pipeline_n_microbatches: PositiveInt | None = None
    """Pipeline micro-batches of a batch; none follows from their size."""
    module_fqns_per_model_part: list[list[str]] | None = None
    """Module names of every stage; the outer length is the number of stages."""
    activation_checkpointing: bool = False
    """Recompute the activations of each block in the backward instead of keeping them."""
    mesh_device_type: str | None = None
    """Device type of the mesh; none takes the runner's device."""
    allow_degree_change: bool = False
    """Resume at other degrees even if that cannot be exact."""


class FsdpConfig(ClosedSection, path="fsdp"):
    """FSDP2 wrapping on the parallel stack."""

    enabled: bool = False
    """Shard parameters, gradients and optimizer state."""
    reshard_after_forward: bool | int | None = None
    """Free the gathered parameters after the forward; an integer reshards to that many ranks."""
    mp_policy: Any = None
    """Mixed precision policy."""
    offload_policy: Any = None
    """CPU offload policy."""
    blocks: list[str] | None = None
    """Modules that are gathered one by one, by class or dotted name; none takes the layers of every module list."""
    gradient_sync: Literal["every", "last", "last_all_reduce"] = "last_all_reduce"
    """When gradients are reduced: every micro-batch, last only, or last_all_reduce (reduce-scatter each, all-reduce over replicas last)."""


class CompileConfig(ClosedSection, path="compile"):
    """torch.compile."""

    enable: bool = False
    """Compile the model."""
    backend: str | None = None
    """Compiler backend; none takes torch's default."""
    fullgraph: bool | None = None
    """Require a single graph."""
    dynamic: bool | None = None
    """Compile for varying shapes."""
    mode: str | None = None
    """Mode of torch.compile, such as reduce-overhead."""
    options: dict[str, Any] | None = None
    """Options of the compiler backend."""
    optimize_ddp: str | bool | None = "ddp_optimizer"
    """How the compiler splits graphs for DDP."""
    precompile_artifact_dir: str | None = None
    """Directory of compiled code that runs share, in files that only this user can write. None: the run's own; '': not kept."""
    memory_policy: str | None = None
    """What the graph stack keeps for the backward: default, budget:<x> with 0 < x < 1, recompute."""


class CommConfig(ClosedSection, path="comm"):
    """Timeouts of process groups, and messages about ranks that others wait for."""

    init_timeout_seconds: PositiveFloat | None = None
    """Timeout during start-up; none takes torch's default."""
    train_timeout_seconds: PositiveFloat | None = None
    """Timeout from the first update of this process on."""
    slow_rank_share: PositiveFloat | None = 0.1
    """Share of the time that a rank may cost the others until log lines name it; none measures no times of ranks."""
    hang_warning_seconds: PositiveFloat | None = 120.0
    """Seconds, and ten times the longest update of late, after which one warning says what ranks do in an update; none gives none."""


class GcConfig(ClosedSection, path="gc"):
    """Python's garbage collection."""

    interval: PositiveInt | None = None
    """Steps between collections; none leaves collection to Python."""
    generation: Annotated[int, Bounds(0, 2)] = 1
    """Generation that is collected, 0 to 2."""
    disable_automatic: bool = True
    """Switch automatic collection off while interval is in use."""


class ProfilingConfig(ClosedSection, path="profiling"):
    """torch.profiler."""

    enabled: bool = False
    """Trace some steps."""
    wait: NonNegativeInt = 1
    """Steps before warm-up."""
    warmup: NonNegativeInt = 1
    """Steps of warm-up."""
    active: PositiveInt = 3
    """Steps traced."""
    repeat: NonNegativeInt | None = None
    """Number of cycles; none: one, 0: to the end of the run."""
    record_shapes: bool = False
    """Record the shapes of tensors."""
    profile_memory: bool = False
    """Record memory."""
    with_stack: bool = False
    """Record Python stacks."""
    with_flops: bool = False
    """Estimate floating-point operations."""
    trace_dir: str = "profiles"
    """Directory of the traces, in the run directory unless it is absolute."""


class HeartbeatConfig(ClosedSection, path="heartbeat"):
    """A file per rank with its progress."""

    enabled: bool = False
    """Write it."""
    interval_seconds: PositiveFloat = 60.0
    """Seconds between writes."""
    dir_name: str = "heartbeats"
    """Subdirectory of the run directory."""


class GradientsConfig(ClosedSection, path="audit.gradients"):
    """The gradients of the first updates, recorded as `danling check-layout` asks for; the program ends after them."""

    dir: str | None = None
    """Directory to record them in; none: they are not recorded."""
    updates: PositiveInt = 2
    """Number of updates."""
    weights: str | None = None
    """File with the weights to begin from; none writes those that the run has."""
    dtype: str | None = None
    """Floating dtype of torch that model and batches are cast to, such as float64; none keeps theirs."""
    samples: PositiveInt | None = None
    """Samples of an update over all ranks; none: as the loader says."""
    replicas: PositiveInt = 1
    """Ranks over which these samples are not to be divided evenly, so that a wrong divisor shows."""
    reversed: bool = False
    """Give each micro-batch the other order of samples, which shows what rounding changes."""


class AuditConfig(ClosedSection, path="audit"):
    """Checks of a run while it trains."""

    digest_interval: PositiveInt | None = None
    """Updates between digests of samples, loss, weights and optimizer state in digests.jsonl, compared between replicas; none: never."""
    replay_interval: PositiveInt | None = None
    """Updates between those whose gradient is computed again and compared bitwise before the optimizer steps; none: never."""
    replays: PositiveInt = 1
    """How often such a gradient is computed again."""
    gradient_spread: PositiveFloat | None = 1e-3
    """Largest relative difference between ranks that hold copies in the norm of a gradient, compared in the collective of the next update;
    none: not compared."""
    until: list[int] | None = None
    """Updates and completed epochs at which a checkpoint is saved and the run ends, as `danling audit` asks for; none: the budget."""
    quick: PositiveInt | None = None
    """Updates after which a new run is saved and the program ends, and those from there to an evaluation, a save and the end of a resumed
    one, as `danling doctor --quick` asks for; an evaluation reads as many batches. None: the budget."""
    gradients: Nested[GradientsConfig]
    """The gradients of the first updates, as `danling check-layout` asks for."""


class FtConfig(ClosedSection, path="ft"):
    """Fault tolerance by TorchFT."""

    enabled: bool = False
    """Train in fault-tolerant replica groups."""
    process_group: Literal["gloo", "nccl"] = "gloo"
    """Backend of the groups' communication."""
    process_group_timeout_ms: PositiveInt = 10000
    """Its timeout, in milliseconds."""
    replica_id: NonNegativeInt = 0
    """Number of this replica group, from 0."""
    group_size: PositiveInt = 1
    """Number of replica groups when none is missing."""
    min_replica_size: PositiveInt = 1
    """Healthy replica groups that an update needs."""


class ElasticConfig(ClosedSection, path="elastic"):
    """Ranks that may end while the others continue in place."""

    enabled: bool = False
    """Leave a rank behind that ends, and take in its replacement; needs torch 2.14, `danling run` and gradient_sum=canonical."""
    min_ranks: PositiveInt = 1
    """With fewer ranks the run waits, then saves and ends with exit code 143."""
    wait_seconds: PositiveFloat = 60.0
    """How long it waits, and how long a rank that is alive may leave the others without an answer."""
    fence_seconds: PositiveFloat = 15.0
    """A rank that is stopped for so long while others wait for it is killed."""
    replacements: NonNegativeInt | None = None
    """How many ranks that end are replaced; none is no limit."""
    shard_state: bool = False
    """Keep the state of the optimizer for a rank's own parameters and those of the next rank, instead of all of it on each rank."""


class OptimConfig(OpenSection, path="optim"):
    """The optimizer: `type` and its arguments. Open: other keys are passed to its constructor."""

    type: str
    """Optimizer of torch by lower-case name, such as adamw or sgd."""
    lr: float
    """Learning rate."""
    weight_decay: float
    """Weight decay."""
    betas: list[float]
    """Betas of Adam and similar optimizers."""
    param_groups: list[dict[str, Any]] | None
    """List of {pattern, options, lr_multiplier, weight_decay_multiplier, beta1, beta2}; pattern is a regular expression."""


class SchedulerConfig(OpenSection, path="scheduler"):
    """The learning rate schedule: `type` and its arguments. Open: other keys are passed to its constructor."""

    type: str
    """linear, cosine, constant, wsd, or a scheduler of torch by lower-case name."""
    interval: Literal["step", "epoch", "validation"] | None
    """When it advances; default: step, or epoch for schedulers that monitor a metric."""
    monitor: str | None
    """Metric that such a scheduler monitors, such as val.loss."""


class DataLoaderConfig(OpenSection, path="dataloader"):
    """Arguments of the loaders; a section named after a split overrides them for it. Open."""

    batch_size: PositiveInt | None
    """Samples of a batch, on each rank."""
    global_batch_size: PositiveInt | None
    """Instead of batch_size: samples of an update over all ranks and micro-batches; the same updates at any number of processes."""
    micro_batch_size: PositiveInt | Literal["auto"] | None
    """The most samples of such an update that a rank holds at once; auto halves it when memory runs out."""
    keyed: Literal["batch", "sample"] | None
    """What reading is seeded by; default: sample with global_batch_size, else batch."""
    own_state: bool
    """Read a StatefulDataLoader of yours itself and save its own state, whose format plain scripts exchange."""
    shuffle: bool | None
    """Shuffle in training (default), and with a section of its name a split that is evaluated."""
    drop_last: bool | None
    """Drop a smaller last batch in training (default), and with a section of its name of a split that is evaluated."""
    num_workers: int
    """Worker processes."""
    persistent_workers: bool
    """Keep the workers between epochs."""
    prefetch_factor: int | None
    """Batches each worker reads ahead."""
    pin_memory: bool
    """Use pinned memory; on by default with CUDA."""
    in_order: bool
    """Yield batches in order."""
    snapshot_every_n_steps: int
    """Steps between snapshots of a user's own stateful loader."""
    timeout: float
    """Seconds to wait for a batch."""

    @classmethod
    def section_type(cls) -> Any:
        """Return the class of the sections of splits."""
        return DataLoaderConfig


class DeepSpeedConfig(OpenSection, path="deepspeed"):
    """Merged over what the DeepSpeed runner derives from its own keys. Open; a contradiction is an error."""


class AccelerateConfig(OpenSection, path="accelerate"):
    """Arguments of `Accelerator`, or a file of `accelerate config`. Open; what the library decides itself is an error."""


class TopLevelConfig(ClosedSection):
    """The library's own keys at the top level of `RunnerConfig`; a docstring under a key is its help text."""

    stack: str = "auto"
    """Stack that trains: auto (ddp), ddp or torch, parallel, deepspeed or ds, accelerate, graph."""
    seed: NonNegativeInt | None = None
    """Base seed, the same on all ranks; none: one is drawn and stored."""
    deterministic: bool = False
    """Deterministic kernels; an operation that has none is an error."""
    steps: NonNegativeInt | None = None
    """Optimizer step at which training ends (step mode)."""
    epochs: NonNegativeInt | None = None
    """Epoch at which training ends (epoch mode); set steps or epochs, not both."""
    max_time: float | str | None = None
    """Seconds, or HH:MM:SS, after which training stops with a checkpoint."""
    accum_steps: PositiveInt = 1
    """Micro-batches of an optimizer update."""
    gradient_sum: Literal["fast", "canonical"] = "fast"
    """canonical: sums in one order, so that a run has the same bits at any number of processes; needs dataloader.global_batch_size."""
    precision: Precision = None
    """Autocast: fp16, bf16, or none."""
    max_grad_norm: PositiveFloat | None = None
    """Clip gradients to this norm."""
    max_grad_value: PositiveFloat | None = None
    """Clip gradients to this absolute value."""
    skip_nonfinite_grad: bool = False
    """Skip updates whose loss or gradient is not finite; false: raise an error that names the step."""
    max_skipped_updates: PositiveInt | None = 100
    """Skipped updates in a row that are an error; none: never."""
    patience: NonNegativeFloat = float("inf")
    """Stop after so many evaluations without a better score."""
    min_delta: NonNegativeFloat = 0.0
    """Least difference by which a score counts as better."""
    score_split: str | None = None
    """Split that selects the best model; none: val, validation, or the first evaluation split."""
    score_name: str = "loss"
    """Metric that selects the best model, also with its split as logs write it: val.acc."""
    score_mode: Literal["min", "max"] | None = None
    """min or max; none: min for losses, errors and perplexities, else max."""
    evaluate_interval: PositiveInt | None = None
    """Step mode: steps between evaluations; none takes the checkpoint interval."""
    try_evaluation: bool = True
    """Evaluate one batch of each split before the first update, so that errors in evaluation show before training."""
    train_metrics: bool | list[str] = False
    """Compute self.metrics on the batches that are trained on too: true for all, or their names."""
    train_splits: list[str] | None = None
    """Splits to train on; none: inferred from the datasets."""
    evaluate_splits: list[str] | None = None
    """Splits to evaluate; none: inferred from the datasets."""
    name: str | None = None
    """Name of the run."""
    lineage: str = "lin"
    """Name of the project: runs are in the directory of this name under the workspace root."""
    experiment: str = "exp"
    """Name of the experiment, which trackers and, if it is set, log lines and the bar have."""
    workspace_root: str = "experiments"
    """Directory of all runs. In paths, ~ and variables such as $HOME are replaced when they are set."""
    dir: str | None = None
    """Run directory, instead of the one under the workspace root."""
    checkpoint_dir: str | None = None
    """Directory of checkpoints, instead of the one in the run directory."""
    log_file: str | None = None
    """Log file, instead of the one in the run directory."""
    resume: str | None = None
    """Checkpoint to resume from, with its full state."""
    auto_resume: bool = False
    """Resume from this run's own newest intact checkpoint, if there is one."""
    pretrained: str | None = None
    """Checkpoint whose weights to start from; nothing else is loaded."""
    pretrained_averages: bool = True
    """Take its averaged weights if it has any, which its run evaluated; false takes the trained ones."""
    backend: str | None = None
    """Process-group backend; none: nccl with CUDA, else gloo."""
    init_method: str | None = None
    """Rendezvous of the processes, such as tcp://host:port; none: that of torchrun."""
    secret_keys: list[str] | None = None
    """Further keys, by last name or dotted, whose text is kept out of files, trackers and the run's id, like token and api_key."""
    local_keys: list[str] | None = None
    """More keys that may differ between ranks, by last name or dotted; paths, loader workers, devices and output may in any case."""
    git_diff: bool = True
    """Save the uncommitted changes of the code in metadata/git.diff, without lines that look like secrets."""
    log: bool = True
    """Write a log file."""
    log_interval: PositiveInt | None = None
    """Updates between two records of metrics; none: about 100 records in a run."""
    log_seconds: NonNegativeFloat = 5.0
    """Least seconds between two lines of metrics on the console and in the log; metrics.jsonl has all records. 0 prints all."""
    tensorboard: bool = False
    """Write scalars for TensorBoard."""

    wandb: Nested[WandbConfig]
    mlflow: Nested[MlflowConfig]
    trackio: Nested[TrackioConfig]
    optim: Nested[OptimConfig]
    scheduler: Nested[SchedulerConfig]
    ema: Nested[EmaConfig]
    dataloader: Nested[DataLoaderConfig]
    checkpoint: Nested[CheckpointConfig]
    parallel: Nested[ParallelConfig]
    fsdp: Nested[FsdpConfig]
    compile: Nested[CompileConfig]
    comm: Nested[CommConfig]
    gc: Nested[GcConfig]
    profiling: Nested[ProfilingConfig]
    heartbeat: Nested[HeartbeatConfig]
    audit: Nested[AuditConfig]
    ft: Nested[FtConfig]
    elastic: Nested[ElasticConfig]
    deepspeed: Nested[DeepSpeedConfig]
    accelerate: Nested[AccelerateConfig]
