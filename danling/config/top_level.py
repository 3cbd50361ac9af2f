"""Every setting of a run that stands in no section, and the sections."""

from __future__ import annotations

from typing import Literal

from .fields import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from .own import WatchedSection
from .schema import (
    AccelerateConfig,
    AuditConfig,
    CheckpointConfig,
    CommConfig,
    CompileConfig,
    DataLoaderConfig,
    DeepSpeedConfig,
    EmaConfig,
    FsdpConfig,
    FtConfig,
    GcConfig,
    HeartbeatConfig,
    MlflowConfig,
    Nested,
    OptimConfig,
    ParallelConfig,
    ProfilingConfig,
    SchedulerConfig,
    TrackioConfig,
    WandbConfig,
)


class TopLevelConfig(WatchedSection):
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
    precision: Literal["fp16", "bf16"] | None = None
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
    """Metric that selects the best model."""
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
    """Directory under the workspace root."""
    experiment: str = "exp"
    """Name of the experiment."""
    workspace_root: str = "experiments"
    """Directory of all runs."""
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
    backend: str | None = None
    """Process-group backend; none: nccl with CUDA, else gloo."""
    init_method: str | None = None
    """Rendezvous of the processes, such as tcp://host:port; none: that of torchrun."""
    secret_keys: list[str] | None = None
    """Further keys, by last name or dotted, whose text is kept out of files, trackers and the run's id, like token and api_key."""
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
    deepspeed: Nested[DeepSpeedConfig]
    accelerate: Nested[AccelerateConfig]
