"""A program as data, and what a run of it leaves behind.

`Program` is a tree of frozen dataclasses of plain values: `strategies` draws it, `script` renders it as the text that a
user could have written, `running` executes that text and records it, `properties` and `by_hand` say what the record
should be.

What the reference in `by_hand` gets, and nothing else:

* the `Program`, from which the rest follows: micro-batches of an update, weights, accumulation, clipping, schedule,
  averages, evaluation;
* the namespace of the script's parts, which import nothing of danling: `make_model()`, `make_criterion()`,
  `make_dataset(split)`. Modules are to be built, given `Record.initial`, and cast to float64;
* of `Record`, only the fields marked **given**: the initial weights, the batches in the order in which they were read,
  and the draws.

All other fields of `Record` are what the library did, to be compared with.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

WIDTH = 6
"""Features of a sample of `vector` data, and the width of every hidden layer."""
CLASSES = 4
"""Classes of a classification, and outputs of a regression."""
TOKENS = 11
"""Tokens of the vocabulary of `tokens` data; 0 is padding."""
LENGTH = 5
"""The most positions of a sample of `tokens` data."""
CHANNELS, SIDE = 2, 4
"""Images of `image` data are (CHANNELS, SIDE, SIDE)."""


ADAPTIVE = ("adam", "adamw", "adagrad", "rmsprop", "two")
"""Optimizers that divide by the gradient, or the second of which does."""


@dataclass(frozen=True)
class Part:
    """A module of the model.

    Attributes:
        kind: One of
            `linear`, `frozen` (a linear layer that requires no gradient), `spectral` (with spectral norm), `complex` (a
            complex weight, of whose product the real part is taken), `scale` (one parameter of no dimension); `relu`,
            `tanh`; `batch_norm`, `layer_norm`, `group_norm`; `dropout`, `noise` (adds 0.1 * randn in training);
            `residual` (its input plus its parts), `sometimes` (a residual block that is left out for batches whose
            first input, element 1, is negative; for `tokens` where the sum of the first sample's tokens is odd; with `flag`
            in every second training forward, by a buffer that counts them),
            `shared` (its parts twice, the same modules); `counter` (an integer buffer, +1 each training forward; output
            * (1 + 0.1 * (counter % 3))); `running` (a float buffer: running mean of the input, momentum 0.3, which is
            subtracted; not persistent with `flag`); `mask` (a buffer with 0 and -inf, which is added before a softmax
            over the features); `memory` (a plain attribute of Python as `counter`, which `get_extra_state` returns);
            `conv` (images only, 3x3, padding 1), `attention` (tokens only, one head).
        p: The rate of `dropout`.
        flag: The variant of a kind: not persistent for `running`, without bias for `linear`, from a generator of its own for
            `noise`, by the number of the forward for `sometimes`.
        parts: The modules within.
    """

    kind: str
    p: float = 0.0
    flag: bool = False
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Model:
    """The model: an input layer for the kind of data, `parts` in a row, and a head.

    Attributes:
        parts: What is between. For images flattened before the first part that is neither `conv` nor a norm nor an
            activation.
        dtype: `float32`, `float64`, `bfloat16` or `float16`: the dtype of weights, and of inputs that are floating.
        returns: `tensor`, or `dict` (with `loss` and `logits`, for the criterion `in_model`).
        tied: For tokens: the head has the weight of the embedding.
        per_position: For tokens: one prediction for each position (target of shape (batch, LENGTH)); else the mean over
            the positions.
        tasks: Before the head one of two layers of one shape, as the batch says by what leaves out a `sometimes`.
    """

    parts: tuple[Part, ...] = ()
    dtype: str = "float32"
    returns: str = "tensor"
    tied: bool = False
    per_position: bool = False
    tasks: bool = False

    @property
    def chooses_blocks(self) -> bool:
        """Whether the data of a batch choose the blocks that it uses."""
        return self.tasks or any(part.kind == "sometimes" and not part.flag for part in self.parts)

    @property
    def leaves_out(self) -> bool:
        """Whether an update may use a part of the blocks."""
        return self.tasks or any(part.kind == "sometimes" for part in flat(self.parts))


@dataclass(frozen=True)
class Criterion:
    """The criterion.

    Attributes:
        kind: `cross_entropy`, `nll` (of log_softmax in the criterion), `mse`, `l1`, `bce` (with logits, of targets 0
            and 1), `own_function` (a function: mean of squares), `own_module` (a module of the user's: mean of squares
            times a learnt positive factor plus its
            penalty: `loss * exp(-s) + s`, with the parameter s of no dimension), `in_model` (no criterion: the model
            returns its cross entropy over labels other than -100).
        reduction: `mean` or `sum`.
        ignore_index: Some targets have this value and are left out; `None`: none are.
        class_weights: The classes weigh 1, 2, 0.5 and 0; the last one 0.25 with label smoothing, which counts its samples.
        label_smoothing: As in torch.
        sample_weights: The criterion is a function that weighs each sample by its target: 2 where the target, or its
            first element, is above 0, else 0.5. It returns the weighted mean of each sample's mean square (classes: of
            its cross entropy), and `batch_weight` returns the sum of the weights.
    """

    kind: str = "mse"
    reduction: str = "mean"
    ignore_index: int | None = None
    class_weights: bool = False
    label_smoothing: float = 0.0
    sample_weights: bool = False

    @property
    def weights(self) -> list[float]:
        """The weights of four classes in a row."""
        return [1.0, 2.0, 0.5, 0.25 if self.label_smoothing else 0.0]


@dataclass(frozen=True)
class Data:
    """The datasets `train` and, unless `val` is 0, `val`; `infer` predictions are those of the split `val`.

    Attributes:
        inputs: `vector`, `image` or `tokens`.
        train: Samples to train on.
        val: Samples to evaluate.
        form: What a sample is: `pair`, `mapping` (input and target), `keywords` (the names of `forward`'s parameters),
            `nested` (input is a mapping).
        source: `tensors` (a TensorDataset), `dataset` (map-style), `iterable` (with `__len__`-less IterableDataset),
            `list`.
        augment: What the training samples draw from, any of `torch`, `numpy`, `random`, `generator` (a torch generator
            that the dataset holds), `numpy_generator`. Number n of this list adds k / 512 - 0.25 to element n + 1 of
            the flattened sample, for an integer k in 0 to 255.
        target_dtype: For classes: `int64`, `int32`, `uint8`.
        sampler: `None`, or of the user's: `weighted` (torch's WeightedRandomSampler), `by_length` (a sampler of the
            user's, with set_epoch).
        ragged: For tokens: samples have 2 to LENGTH tokens, padded with 0 by a `collate_fn`.
        nan_samples: Indices of training samples with a NaN.
    """

    inputs: str = "vector"
    train: int = 12
    val: int = 0
    form: str = "pair"
    source: str = "tensors"
    augment: tuple[str, ...] = ()
    target_dtype: str = "int64"
    sampler: str | None = None
    ragged: bool = False
    nan_samples: tuple[int, ...] = ()


@dataclass(frozen=True)
class Optimizer:
    """The optimizer.

    Attributes:
        kind: `sgd`, `momentum` (sgd with momentum 0.9), `nesterov`, `adam`, `adamw`, `adagrad`, `rmsprop`, `lookahead`
            (of the user's: sgd, every 2 steps the slow weights move half-way), `two` (a dictionary: sgd for the head,
            adam for the rest), `wide` (of the user's: sgd with a momentum of 0.9 in float32).
        lr: Learning rate.
        weight_decay: Of all weights, or with `groups` of those that are no bias.
        groups: Two groups: no decay and twice the rate for names with `bias`.
        by_config: Whether `config.optim` describes it; else the program builds it.
        fused: With torch's fused implementation (built by the program).
        no_eps: Adam's `eps` is 0: a weight whose gradient is 0 in the first update becomes NaN.
        lenient: `load_state_dict` of `lookahead` takes a state without its own entries, as published ones do.
    """

    kind: str = "sgd"
    lr: float = 0.1
    weight_decay: float = 0.0
    groups: bool = False
    by_config: bool = True
    fused: bool = False
    no_eps: bool = False
    lenient: bool = False


@dataclass(frozen=True)
class Schedule:
    """A schedule of the learning rate.

    Attributes:
        kind: `linear`, `cosine`, `constant`, `wsd` (of the library, by config), `step` (torch's StepLR, step_size 2,
            gamma 0.5), `exponential` (gamma 0.9), `plateau` (ReduceLROnPlateau of the score, factor 0.5, patience 0),
            `lambda` (LambdaLR of the user's: 1 / (1 + n)).
        warmup: Steps of warm-up, for the library's.
        interval: `None` (the default of its kind), `step`, `epoch`, `validation`.
    """

    kind: str
    warmup: int = 0
    interval: str | None = None


@dataclass(frozen=True)
class Average:
    """`config.ema`: its settings of the same names."""

    decay: float = 0.5
    warmup: bool = False
    interval: int = 1
    buffers: str = "copy"


@dataclass(frozen=True)
class Settings:
    """Settings of the run, by their names in `RunnerConfig`. Exactly one of `epochs` and `steps`, and of `batch_size`
    and `global_batch_size`. With `score_max` the score is the metric `mean`, whose best is the highest."""

    epochs: int | None = 1
    steps: int | None = None
    batch_size: int | None = 4
    global_batch_size: int | None = None
    micro_batch_size: int | None = None
    accum_steps: int = 1
    max_grad_norm: float | None = None
    max_grad_value: float | None = None
    precision: str | None = None
    skip_nonfinite_grad: bool = False
    drop_last: bool | None = None
    shuffle: bool | None = None
    num_workers: int = 0
    persistent_workers: bool = False
    keyed: str | None = None
    evaluate_interval: int | None = None
    patience: int | None = None
    score_max: bool = False
    schedule: Schedule | None = None
    ema: Average | None = None
    gradient_sum: str = "fast"
    checkpoint_interval: int | None = None
    checkpoint_backend: str = "auto"
    async_mode: str | None = None
    seed: int = 1

    @property
    def is_canonical(self) -> bool:
        """Whether any number of processes adds gradients in one order."""
        return self.gradient_sum == "canonical"

    def held_at_once(self, readers: int) -> int:
        """Return the most samples that a rank holds at once, in training and in an evaluation."""
        if self.is_canonical:
            return self.micro_batch_size or 1
        share = math.ceil((self.global_batch_size or 1) / readers)
        return self.batch_size or min(
            self.micro_batch_size or share, math.ceil(share / self.accum_steps)
        )


@dataclass(frozen=True)
class State:
    """Something of the user's that counts training micro-batches, from 0: its loss is `loss * (1 + 0.1 * (count % 3))`,
    count before adding 1.

    Attributes:
        where: `runner`, `criterion` (by get_extra_state), `dataset` (with state_dict unless its kind is `plain`; it is advanced by the
            runner, not by reading), `evaluation` (an attribute of the runner that `evaluate_step` counts, and no loss reads).
        kind: How the count is kept: `int`, `float`, `list` (appended), `dict`, `tensor`, `array` (NumPy), `object` (a
            plain object's attribute), `nested` (object in list in dictionary), `deque`, `enum` (a member for the count
            % 3), `bytes`, `generator` (count draws of a torch generator seeded with 5), `stateful` (an object with
            state_dict and load_state_dict), `np_int`, `set`, `tuple`, `by_object` (a dictionary by an object, which no
            checkpoint holds).
    """

    where: str
    kind: str

    @property
    def is_put_back(self) -> bool:
        """Whether it is put back after a skipped update: on the runner, and of a kind that can be saved."""
        return self.where == "runner" and self.kind != "by_object"

    def factor(self, count: int) -> float:
        """Return what a loss is multiplied with after so many micro-batches."""
        if self.kind == "generator":
            drawn = torch.randint(1000, (count + 1,), generator=torch.Generator().manual_seed(5))
            count = int(drawn[-1]) - 1
        return 1 + 0.1 * (count % 3)


@dataclass(frozen=True)
class Event:
    """Something that happens in the run.

    Attributes:
        kind: `stop` (`self.stop()` in `train_step` of the update), `kill` (SIGKILL in `optimizer_step`), `budget` (the
            budget is only reached by `runner.config.epochs` or `steps` being raised after `train()` returned),
            `evaluate` and `infer` (`self.evaluate()` in `train_step` before the forward), `checkpoint`
            (`self.save_checkpoint()` in an override of `step`), `delete` (an attribute is deleted in `train_step`); mistakes in
            `train_step`, before the forward: `zero_grad` and `schedule_step`.
        at: The committed update, from 0, at which it happens.
    """

    kind: str
    at: int = 1


@dataclass(frozen=True)
class Stack:
    """`config.stack`, the number of processes and `parallel.axes`.

    Attributes:
        kind: `ddp`, `parallel`, `accelerate`, `graph`, `deepspeed`.
        ranks: Processes.
        replicate, shard, tensor, pipeline: Axes for `parallel`.
        find_unused: For `ddp`: `find_unused_parameters`, as torch's error says where a rank leaves out a block.
    """

    kind: str = "ddp"
    ranks: int = 1
    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    find_unused: bool = False

    @property
    def readers(self) -> int:
        """How many ranks read different samples."""
        return self.ranks // self.tensor // self.pipeline


@dataclass(frozen=True)
class Program:
    """A whole program."""

    model: Model = Model()
    criterion: Criterion = Criterion()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    settings: Settings = Settings()
    state: tuple[State, ...] = ()
    events: tuple[Event, ...] = ()
    stack: Stack = Stack()

    def to_json(self) -> str:
        """Return the program as one line; what has its default is left out."""
        return json.dumps(_plain(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Program:
        """Return the program of `to_json`."""
        program: Program = _made(cls, json.loads(text))
        return program


def flat(given: tuple[Part, ...]) -> list[Part]:
    """Return all parts at any depth."""
    return [each for part in given for each in (part, *flat(part.parts))]


# What a run leaves


@dataclass
class MicroBatch:
    """What one rank handed to one call of `train_step`.

    Attributes:
        rank: The rank. **given**
        data: The batch as `train_step` got it, detached copies. **given**
        samples: Real samples in it; 0 for padding, which weighs nothing. **given**
        draws: What modules of the model drew in its forward, in the order of the calls: for each `dropout` the factors
            by which its input was multiplied (0 or 1 / (1 - p)), for each `noise` the values that were added (before
            0.1). **given**
        loss: The loss that `train_step` returned.
    """

    rank: int
    data: Any
    samples: int
    draws: list[Tensor]
    loss: float | None = None


@dataclass
class Update:
    """One attempted update.

    Attributes:
        micro_batches: How many calls of `train_step` each rank made for it, as the library divided them (the reference
            divides by itself).
        committed: Whether it was made.
        grad_norm: The norm of the gradient before clipping.
        loss: The loss of the update: the weighted mean over its micro-batches and ranks.
        rates: The learning rate of each group with which it was made.
        before, after: Parameters and buffers by name before the first forward, and after the step.
        averages: The averages after it, by name; empty without.
        epoch: Completed passes before it.
        gradients: What the weights were moved by; only in what the reference computes.
    """

    micro_batches: int
    committed: bool
    grad_norm: float | None
    loss: float | None
    rates: list[float]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    averages: dict[str, Tensor] = field(default_factory=dict)
    epoch: int = 0
    gradients: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Evaluation:
    """An evaluation of a split that the run made (or an `evaluate` event).

    Attributes:
        split: The split.
        after: Updates that were committed before it.
        result: What it returned, such as `{"loss": ..., "mean": ...}`: `mean` is a metric of the script, the mean over
            the samples of the mean of the prediction's elements.
    """

    split: str
    after: int
    result: dict[str, float]


@dataclass
class Record:
    """What a run left; of several ranks, the fields are those of rank 0 but for `micro_batches`, which has all.

    Attributes:
        initial: Parameters and buffers by name after construction (those of the criterion under `criterion.`).
            **given**
        micro_batches: In the order of their reading; by rank within. **given**
        updates: Attempted updates.
        evaluations: Evaluations in order.
        predictions: What `infer("val")` returned after the training, stacked.
        pass_losses: `train.loss` of each pass, as in the results of the run.
        final: Parameters and buffers at the end; `averages` at the end.
        steps: `train_state.global_step` at the end.
        checkpoint: What the last checkpoint holds: `model`, `ema`, flat by name.
        state: The state of the run at its end, as a checkpoint has it.
        named: Warnings of the library, in order.
        refused: The error that ended the run, `Type: text`; `None` for none.
        trace: Where it was raised.
        refused_after: Committed updates before the error.
    """

    initial: dict[str, Tensor] = field(default_factory=dict)
    micro_batches: list[MicroBatch] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    predictions: Tensor | None = None
    pass_losses: list[float] = field(default_factory=list)
    final: dict[str, Tensor] = field(default_factory=dict)
    averages: dict[str, Tensor] = field(default_factory=dict)
    steps: int = 0
    checkpoint: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    trace: str = ""
    named: list[str] = field(default_factory=list)
    refused: str | None = None
    refused_after: int = 0


def taken_apart(data: Any) -> tuple[Any, Tensor]:
    """Return input and target of a batch; an input is a tensor, or a mapping of keywords."""
    if not isinstance(data, Mapping):
        return data[0], data[1]
    return data.get("input", {"inputs": data.get("inputs")}), data.get("target", data.get("labels"))


# Plain values


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        pairs = [(each, getattr(value, each.name)) for each in dataclasses.fields(value)]
        return {each.name: _plain(held) for each, held in pairs if held != each.default}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _made(kind: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        return kind(**{name: _made(hints[name], held) for name, held in value.items()})  # type: ignore[operator]
    if get_origin(kind) is tuple:
        return tuple(_made(get_args(kind)[0], item) for item in value)
    held = [each for each in get_args(kind) if dataclasses.is_dataclass(each)]
    return _made(held[0], value) if held and value is not None else value
