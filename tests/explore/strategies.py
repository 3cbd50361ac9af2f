"""Draws programs. Each is one that torch itself can run; whether the library takes it is for the search to find out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from .spec import (
    Average,
    Criterion,
    Data,
    Event,
    Model,
    Optimizer,
    Part,
    Program,
    Schedule,
    Settings,
    Stack,
    State,
    flat,
)

RUNNER_STATE = (
    "int",
    "float",
    "list",
    "tuple",
    "set",
    "dict",
    "tensor",
    "array",
    "np_int",
    "object",
    "nested",
    "deque",
    "enum",
    "bytes",
    "generator",
    "stateful",
    "text",
    "by_object",
)
VECTOR_PARTS = (
    "linear",
    "tanh",
    "relu",
    "dropout",
    "layer_norm",
    "batch_norm",
    "group_norm",
    "residual",
    "sometimes",
    "shared",
    "noise",
    "frozen",
    "scale",
    "spectral",
    "counter",
    "memory",
    "running",
    "mask",
    "complex",
)
IMAGE_PARTS = ("conv", "relu", "batch_norm", "group_norm", "layer_norm", "dropout", "noise", "tanh")
TOKEN_PARTS = (
    "linear",
    "tanh",
    "attention",
    "layer_norm",
    "dropout",
    "residual",
    "sometimes",
    "shared",
    "frozen",
    "scale",
    "noise",
    "spectral",
    "counter",
    "running",
    "mask",
    "memory",
)
NESTING = ("residual", "sometimes", "shared")
WHOLE_BATCH = ("batch_norm",)
DRAWS = {"dropout", "noise"}
PER_STAGE = (*DRAWS, "sometimes", "batch_norm", "counter", "memory", "running", "spectral")
"""What depends on how a batch is divided: a pipeline divides it once more."""


def maybe(
    strategy: st.SearchStrategy[Any], one_in: int = 2, default: Any = None
) -> st.SearchStrategy[Any]:
    """Draw a default, or one time in some something else."""
    return st.integers(0, one_in - 1).flatmap(
        lambda n: strategy if n == one_in - 1 else st.just(default)
    )


@st.composite
def parts(draw: Any, kinds: Sequence[str]) -> Part:
    """Draw a part."""
    kind = draw(st.sampled_from(kinds))
    if kind in NESTING:
        flat = [each for each in kinds if each not in NESTING and each not in ("batch_norm",)]
        inner = tuple(draw(st.lists(parts(flat), min_size=1, max_size=2)))
        return Part(kind, flag=kind == "sometimes" and draw(st.booleans()), parts=inner)
    if kind == "dropout":
        return Part(kind, p=draw(st.sampled_from([0.5, 0.2])))
    if kind in ("running", "noise"):
        return Part(kind, flag=draw(st.booleans()))
    return Part(kind)


@st.composite
def models(draw: Any, inputs: str) -> Model:
    """Draw a model for a kind of data."""
    dtype = draw(maybe(st.sampled_from(["float64", "bfloat16", "float16"]), 3, "float32"))
    tasks = draw(maybe(st.just(True), 8, False))
    if inputs == "image":
        spatial = draw(st.lists(parts(IMAGE_PARTS), max_size=3))
        kinds = [each for each in VECTOR_PARTS if each != "complex" or dtype == "float32"]
        rest = draw(st.lists(parts(kinds), max_size=2))
        return Model(parts=(*spatial, *rest), dtype=dtype, tasks=tasks)
    kinds = list(VECTOR_PARTS if inputs == "vector" else TOKEN_PARTS)
    if dtype != "float32" and "complex" in kinds:
        kinds.remove("complex")
    chosen = tuple(draw(st.lists(parts(kinds), max_size=4)))
    if inputs == "vector":
        return Model(parts=chosen, dtype=dtype, tasks=tasks)
    per_position = draw(st.booleans())
    return Model(
        parts=chosen, dtype=dtype, tied=draw(st.booleans()), per_position=per_position, tasks=tasks
    )


@st.composite
def criteria(draw: Any, model: Model, inputs: str) -> Criterion:
    """Draw a criterion that a model can be trained with."""
    kinds = ["mse", "cross_entropy", "l1", "bce", "own_function", "own_module", "in_model", "nll"]
    if model.per_position:
        kinds = ["cross_entropy", "in_model", "mse", "own_function"]
    kind = draw(st.sampled_from(kinds))
    if kind in ("own_function", "own_module"):
        weighs = kind == "own_function" and not model.per_position and draw(st.booleans())
        return Criterion(kind, sample_weights=weighs)
    if kind == "in_model":
        return Criterion(kind)
    reduction = draw(maybe(st.just("sum"), 4, "mean"))
    if kind not in ("cross_entropy", "nll"):
        return Criterion(kind, reduction)
    if kind == "cross_entropy" and not model.per_position and draw(maybe(st.just(True), 5, False)):
        return Criterion(kind, sample_weights=True)
    return Criterion(
        kind,
        reduction,
        ignore_index=draw(maybe(st.sampled_from([-100, 1]), 2)),
        class_weights=draw(maybe(st.just(True), 3, False)),
        label_smoothing=draw(maybe(st.just(0.1), 3, 0.0)) if kind == "cross_entropy" else 0.0,
    )


@st.composite
def datas(draw: Any, inputs: str, model: Model, criterion: Criterion) -> Data:
    """Draw datasets that a model and a criterion can take."""
    form, source = "pair", draw(st.sampled_from(["tensors", "dataset", "list", "iterable"]))
    if criterion.kind == "in_model":
        form, source = "keywords", source if source != "tensors" else "dataset"
    elif source != "tensors":
        form = draw(st.sampled_from(["pair", "mapping", "nested"]))
    augment: tuple[str, ...] = ()
    if source in ("dataset", "iterable") and inputs != "tokens":
        names = ["torch", "numpy", "random", "generator", "numpy_generator"]
        augment = tuple(sorted(draw(st.sets(st.sampled_from(names))), key=names.index))
    by_class = criterion.kind in ("cross_entropy", "nll", "in_model")
    ignored = criterion.ignore_index == -100 or criterion.kind == "in_model"
    target_dtype = "int64"
    if by_class and not ignored and not criterion.class_weights:
        target_dtype = draw(maybe(st.just("uint8"), 3, "int64"))
    train = draw(st.integers(4, 17))
    nans: tuple[int, ...] = ()
    if inputs != "tokens" and draw(maybe(st.just(True), 6, False)):
        nans = (draw(st.integers(0, train - 1)),)
    return Data(
        inputs=inputs,
        train=train,
        val=draw(st.sampled_from([0, 7, 5, 1, 12])),
        form=form,
        source=source,
        augment=augment,
        target_dtype=target_dtype,
        sampler=draw(maybe(st.sampled_from(["by_length", "weighted"]), 5))
        if source != "iterable"
        else None,
        ragged=inputs == "tokens"
        and not model.per_position
        and source != "tensors"
        and draw(st.booleans()),
        nan_samples=nans,
    )


@st.composite
def optimizers(draw: Any, model: Model, criterion: Criterion, data: Data) -> Optimizer:
    """Draw an optimizer."""
    kinds = ["sgd", "momentum", "adamw", "adam", "adagrad", "rmsprop", "nesterov", "lookahead"]
    if data.form == "pair" and not model.tied and criterion.kind != "own_module":
        kinds.append("two")
    if not any(part.kind == "complex" for part in flat(model.parts)):
        kinds.append("wide")
    kind = draw(st.sampled_from(kinds))
    lr = (
        draw(st.sampled_from([0.1, 0.03]))
        if kind in ("sgd", "lookahead")
        else draw(st.sampled_from([0.02, 0.01]))
    )
    if kind == "two":
        return Optimizer(kind, lr, by_config=False)
    if kind in ("lookahead", "wide"):
        return Optimizer(
            kind, lr, by_config=False, lenient=kind == "lookahead" and draw(st.booleans())
        )
    by_config = draw(st.booleans())
    can_fuse = kind in ("sgd", "momentum", "adam", "adamw", "adagrad") and not any(
        part.kind == "complex" for part in flat(model.parts)
    )
    # torch's fused SGD fails where some weights have a momentum and others get their first gradient: "Expected Tensor as element".
    can_fuse = can_fuse and not (kind == "momentum" and model.leaves_out)
    return Optimizer(
        kind,
        lr,
        weight_decay=draw(maybe(st.just(0.1), 3, 0.0)),
        groups=draw(maybe(st.just(True), 3, False)),
        by_config=by_config,
        fused=not by_config and can_fuse and draw(st.booleans()),
        no_eps=kind in ("adam", "adamw") and draw(maybe(st.just(True), 4, False)),
    )


@st.composite
def schedules(draw: Any, data: Data, optimizer: Optimizer, by_epochs: bool) -> Schedule:
    """Draw a schedule."""
    kinds = ["linear", "cosine", "constant", "wsd", "step", "exponential"]
    if data.source == "iterable" and by_epochs:
        kinds = ["step", "exponential"]  # the others need the length of the run
    if data.val:
        kinds.append("plateau")
    if not optimizer.by_config and optimizer.kind != "two":
        kinds.append("lambda")
    kind = draw(st.sampled_from(kinds))
    library = kind in ("linear", "cosine", "constant", "wsd")
    intervals = ["step"] if kind != "plateau" else []
    if by_epochs or not library:
        intervals.append("epoch")
    if data.val:
        intervals.append("validation")
    interval = draw(maybe(st.sampled_from(intervals), 3))
    return Schedule(
        kind, warmup=draw(maybe(st.integers(1, 3), 3, 0)) if library else 0, interval=interval
    )


def sizes_fit(data: Data, settings: Settings, readers: int) -> bool:
    """Whether no micro-batch has a single sample, which batch statistics cannot take."""
    batch = settings.batch_size or settings.global_batch_size or 1
    if settings.global_batch_size is not None and settings.accum_steps > 1:
        return False
    if settings.micro_batch_size is not None:
        return False
    if readers > 1:
        return batch > 1 and settings.batch_size is not None and settings.drop_last is not False
    return (
        batch > 1
        and data.train >= batch
        and (settings.drop_last is not False or data.train % batch != 1)
    )


@st.composite
def all_settings(
    draw: Any, model: Model, criterion: Criterion, data: Data, optimizer: Optimizer
) -> Settings:
    """Draw the settings of a run."""
    by_epochs = draw(st.booleans())
    own_order = data.source != "iterable" and data.sampler is None
    whole = own_order and draw(maybe(st.just(True), 3, False))
    batch = draw(st.integers(1, min(6, data.train)))
    accum = draw(st.sampled_from([1, 2, 3]))
    micro = None
    if whole and accum == 1:
        micro = draw(maybe(st.integers(1, 4), 2))
    schedule = draw(maybe(schedules(data, optimizer, by_epochs), 2))
    has_complex = any(part.kind == "complex" for part in flat(model.parts))
    average = draw(
        maybe(
            st.builds(
                Average,
                decay=st.sampled_from([0.5, 0.9]),
                warmup=maybe(st.just(True), 4, False),
                interval=st.sampled_from([1, 1, 2]),
                buffers=maybe(st.just("average"), 5, "copy"),
            ),
            3,
        )
    )
    # Two workers of a stream take turns, so that its predictions have an order of their own.
    workers = draw(maybe(st.integers(1, 1 if data.source == "iterable" else 2), 12, 0))
    return Settings(
        epochs=draw(st.integers(1, 3)) if by_epochs else None,
        steps=None if by_epochs else draw(st.integers(1, 7)),
        batch_size=None if whole else batch,
        global_batch_size=min(batch * accum, data.train) if whole else None,
        micro_batch_size=micro,
        accum_steps=accum if not whole or batch * accum <= data.train else 1,
        max_grad_norm=draw(maybe(st.sampled_from([0.5, 0.1]), 3)),
        max_grad_value=None if has_complex else draw(maybe(st.just(0.05), 6)),
        precision=draw(maybe(st.sampled_from(["bf16", "fp16"]), 6))
        if model.dtype == "float32"
        else None,
        skip_nonfinite_grad=bool(data.nan_samples) and draw(maybe(st.just(False), 6, True)),
        drop_last=draw(maybe(st.booleans(), 2)),
        shuffle=draw(maybe(st.booleans(), 3))
        if data.source != "iterable" and data.sampler is None
        else None,
        num_workers=workers,
        persistent_workers=bool(workers) and draw(st.booleans()),
        keyed=draw(maybe(st.sampled_from(["sample", "batch"]), 4))
        if data.source in ("dataset",)
        else None,
        evaluate_interval=draw(maybe(st.integers(1, 3), 2)) if not by_epochs and data.val else None,
        patience=draw(maybe(st.integers(1, 2), 4)) if data.val else None,
        score_max=bool(data.val) and draw(maybe(st.just(True), 4, False)),
        schedule=schedule,
        ema=average,
        gradient_sum=draw(st.sampled_from(["canonical", "canonical", "fast"]))
        if micro is not None
        else "fast",
        checkpoint_interval=draw(maybe(st.integers(1, 3), 3)),
        checkpoint_backend=draw(maybe(st.just("dcp"), 8, "auto")),
        async_mode=draw(maybe(st.just("disabled"), 3)),
        seed=draw(st.integers(1, 3)),
    )


@st.composite
def states(draw: Any, data: Data) -> tuple[State, ...]:
    """Draw what the user counts."""
    found: list[State] = []
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        # A dataset that has a state and is read by workers is refused: rarely.
        has_one = any(state.where == "dataset" for state in found)
        if data.source == "dataset" and not has_one and draw(maybe(st.just(True), 4, False)):
            found.append(State("dataset", draw(st.sampled_from(["int", "plain"]))))
        elif data.val and draw(maybe(st.just(True), 8, False)):
            found.append(State("evaluation", "int"))
        else:
            found.append(State("runner", draw(st.sampled_from(RUNNER_STATE))))
    return tuple(dict.fromkeys(found))


@st.composite
def events(draw: Any, data: Data, settings: Settings) -> tuple[Event, ...]:
    """Draw what happens in a run."""
    if draw(maybe(st.just(True), 10, False)):
        # A mistake, which is to be refused before the first update.
        mistakes = ["zero_grad"]
        if settings.schedule is not None and settings.schedule.kind != "plateau":
            mistakes.append("schedule_step")
        return (Event(draw(st.sampled_from(mistakes)), 0),)
    kinds = ["stop", "checkpoint", "kill", "delete"]
    kinds += ["evaluate", "infer"] if data.val else []
    if (settings.epochs or settings.steps or 0) > 1:
        kinds.append("budget")
    found = draw(st.lists(st.sampled_from(kinds), max_size=2, unique=True))
    limit = (settings.epochs or settings.steps or 2) - 1
    return tuple(
        Event(kind, draw(st.integers(1, limit)) if kind == "budget" else draw(st.integers(0, 4)))
        for kind in sorted(found)
    )


def updates_of_pass(data: Data, settings: Settings) -> int:
    """Return about how many updates a pass has."""
    batch = settings.global_batch_size or (settings.batch_size or 1)
    batches = data.train // batch if settings.drop_last is not False else -(-data.train // batch)
    return max(-(-batches // (1 if settings.global_batch_size else settings.accum_steps)), 0)


@st.composite
def programs(draw: Any, stacks: bool = False) -> Program:
    """Draw a program; on one process unless `stacks`."""
    inputs = draw(st.sampled_from(["vector", "vector", "image", "tokens"]))
    model = draw(models(inputs))
    criterion = draw(criteria(model, inputs))
    data = draw(datas(inputs, model, criterion))
    optimizer = draw(optimizers(model, criterion, data))
    settings = draw(all_settings(model, criterion, data, optimizer))
    stack = draw(all_stacks(model, criterion, data, optimizer)) if stacks else Stack()
    if settings.batch_size is not None and stack.readers > 1:
        settings = replace(
            settings, batch_size=max(min(settings.batch_size, data.train // stack.readers), 1)
        )
    if settings.global_batch_size is not None:
        settings = replace(
            settings, global_batch_size=max(settings.global_batch_size, stack.readers)
        )
    if any(part.kind in WHOLE_BATCH for part in flat(model.parts)) and not sizes_fit(
        data, settings, stack.readers
    ):
        model = replace(
            model, parts=tuple(part for part in model.parts if part.kind not in WHOLE_BATCH)
        )
    if stack.ranks > 1 and data.source == "iterable":
        # Each rank reads all of it, in an evaluation too.
        data = replace(data, val=0)
        settings = replace(settings, evaluate_interval=None, patience=None, score_max=False)
        schedule = settings.schedule
        if schedule is not None and (
            schedule.kind == "plateau" or schedule.interval == "validation"
        ):
            settings = replace(settings, schedule=None)
    if stack.kind == "parallel" and stack.shard > 1 and draw(maybe(st.just(True), 3, False)):
        # A mesh gathers and reduces block by block.
        left_out = Part("sometimes", flag=draw(st.booleans()), parts=(Part("linear"),))
        model = replace(model, parts=(*model.parts, left_out))
        optimizer = replace(optimizer, fused=optimizer.fused and optimizer.kind != "momentum")
    if stack.kind == "graph":
        # What is drawn within a graph cannot be recorded.
        model = replace(
            model, parts=tuple(part for part in model.parts if not DRAWS & {*kinds_of(part)})
        )
    state = draw(states(data))
    happens = draw(events(data, settings))
    return Program(model, criterion, data, optimizer, settings, state, happens, stack)


def kinds_of(part: Part) -> list[str]:
    """Return the kinds of a part and of those within."""
    return [each.kind for each in flat((part,))]


@st.composite
def all_stacks(
    draw: Any, model: Model, criterion: Criterion, data: Data, optimizer: Optimizer
) -> Stack:
    """Draw a stack that a model can be trained on."""
    kinds = ["ddp", "accelerate", "graph"] * 2 if optimizer.kind != "two" else ["ddp"]
    # An optimizer that copies weights when it is built, or makes state of its own of gradients, has to know DTensor.
    if optimizer.kind != "lookahead":
        kinds += ["shard", "replicate"] * 2
    if not model.tied and optimizer.kind not in ("lookahead", "wide"):
        kinds += ["tensor"] * 2
    is_chain = (
        data.inputs == "vector" and data.form in ("pair", "mapping") and optimizer.kind != "two"
    )
    is_chain = is_chain and not model.tasks
    if (
        is_chain
        and not any(part.kind in PER_STAGE for part in flat(model.parts))
        and criterion.kind != "own_module"
    ):
        kinds += ["pipeline"] * 2
    if optimizer.by_config and model.dtype == "float32":
        kinds += ["deepspeed"] * 2
    kind = draw(st.sampled_from(kinds))
    if kind == "ddp":
        return Stack(
            kind,
            ranks=draw(st.integers(2, 3)),
            find_unused=model.leaves_out and draw(st.booleans()),
        )
    if kind == "shard":
        size = draw(st.integers(2, 3))
        return Stack("parallel", ranks=size, shard=size)
    if kind == "replicate":
        shard = draw(st.sampled_from([1, 2]))
        return Stack("parallel", ranks=2 * shard, replicate=2, shard=shard)
    if kind == "tensor":
        return Stack("parallel", ranks=2, tensor=2)
    if kind == "pipeline":
        return Stack("parallel", ranks=2, pipeline=2)
    return Stack(kind, ranks=1 if kind == "graph" else draw(st.integers(1, 2)))
