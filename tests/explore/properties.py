"""What holds for every program, each a function of a program and of the record of its run; `check` asks all of them."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from support.toys import differences
from torch import Tensor

from . import by_hand, comparing
from .running import UNSAVED, Died, directory, in_fork, namespace, run, run_ranks, without_events
from .script import AUGMENTS
from .spec import ADAPTIVE, Optimizer, Program, Record, Settings, Stack, State, flat

DRAWING = ("dropout", "noise")
PER_FORWARD = ("batch_norm", "sometimes", "counter", "memory", "running", "spectral", *DRAWING)
"""Parts whose result depends on how the samples are divided into micro-batches."""
DEPENDS_ON_PROCESSES = "changed within the first update"
"""A part of the sentence that names what makes the bits depend on the number of processes."""
OTHER_MODULES = "Not all ranks run the same modules in the same order"
"""How the report of a hang names ranks that use different blocks."""
HUGE = 1e17
"""A loss of a program whose gradients will not be finite."""
UNSAVED_STATES = {
    State("runner", "by_object"): UNSAVED,
    State("dataset", "plain"): "has no state_dict",
}
"""What no checkpoint holds, with a part of the sentence that says so."""

EXPLAINED = {
    "reference": (
        "DeepSpeed takes zeros",
        "each rank changes its own",
        "returns something else on other ranks",
    ),
    "resumed_is_the_same": ("returns something else on other ranks",),
}
"""By property parts of the warnings that name why a program of several ranks, or with an engine, does not have it."""


@dataclass
class Verdict:
    """What became of a program.

    Attributes:
        kind: `right`, `refused` (before the first update), `named` (a warning says what differs), `differs` or `died`.
        text: The reason of a refusal, the warning, or the differences.
        broken: The property that does not hold.
        seconds: How long it took.
        processor: How many seconds of the processor that were, less those of workers, ranks and killed processes.
        named: Warnings of the whole run.
    """

    kind: str
    text: str = ""
    broken: str = ""
    seconds: float = 0.0
    processor: float = 0.0
    named: list[str] = field(default_factory=list)


class Refused(Exception):
    """A further run of a program was refused before its first update."""


class Runs:
    """The runs of a program, each made when it is first asked for."""

    def __init__(self, program: Program, place: Path) -> None:
        self.program, self.place = program, place
        self.plain = without_events(program, "stop", "kill", "budget")
        self.count = 0

    def fresh(self) -> Path:
        """Return a directory for one more run."""
        self.count += 1
        return self.place / f"run{self.count}"

    def run(self, program: Program, place: Path | None = None, **options: Any) -> Record:
        """Run a program that is to be like the whole run; an error is `Refused`, or `Late` after the first update."""
        left = self._run(program, place or self.fresh(), **options)
        if left.refused is not None:
            trace = getattr(left, "trace", "")
            raise Late(left) if left.refused_after else Refused(f"{left.refused}\n{trace}")
        return left

    def _run(self, program: Program, place: Path, **options: Any) -> Record:
        if program.stack.ranks > 1:
            return run_ranks(program, place, **options)
        if is_of_several(self.program):
            left: Record = in_fork(partial(run, **options), program, place)
            return left
        return run(program, place, **options)

    @cached_property
    def parts(self) -> dict[str, Any]:
        return namespace(self.plain)

    @cached_property
    def first(self) -> Path:
        """The directory of the whole run."""
        return self.fresh()

    @cached_property
    def whole(self) -> Record:
        return self._run(self.plain, self.first)


def is_of_several(program: Program) -> bool:
    """Whether some run of a program has several processes, which are forks of the server."""
    return program.stack.ranks > 1 or program.settings.is_canonical


class Late(Exception):
    """A run was ended by an error after its first update."""

    def __init__(self, left: Record) -> None:
        super().__init__(f"{left.refused}\n{getattr(left, 'trace', '')}")
        self.left = left


# Properties


def reference(runs: Runs) -> list[str]:
    """The weights, losses, rates, averages, evaluations and predictions are those of a loop by hand."""
    program, whole = runs.plain, runs.whole
    if program.optimizer.no_eps:
        return []  # whether a gradient is 0, by which it is divided, is decided by rounding
    if program.settings.precision == "fp16" and program.optimizer.kind == "two":
        return []  # which of the two parts of an update overflows, only the run knows
    exact = by_hand.expected(program, runs.parts, whole)
    own = by_hand.expected(program, runs.parts, whole, exact=False)
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
        program.settings.precision or "", torch.float64
    )
    decay = None
    if program.optimizer.kind in ADAPTIVE:
        decay = 0.0 if program.optimizer.kind == "adamw" else program.optimizer.weight_decay
    cancels = program.criterion.kind == "l1"
    return comparing.differences(
        whole, exact, own, torch.finfo(precision).eps, decay=decay, cancels=cancels
    )


def each_sample_once(runs: Runs) -> list[str]:
    """Each pass has each sample once, but for those that a last batch would not be filled with."""
    program = runs.program
    settings, data = program.settings, program.data
    ranks = runs.program.stack.readers
    own = data.source == "iterable" or data.sampler is not None
    if (
        data.sampler == "weighted"
        or (own and ranks > 1)
        or (data.source == "iterable" and settings.num_workers > 1)
    ):
        return []
    known = first_elements(runs.parts["make_tensors"]("train")[0])
    if len(set(known)) < len(known):
        return []
    read: list[float] = []
    by_rank = [
        [micro for micro in runs.whole.micro_batches if micro.rank == rank] for rank in range(ranks)
    ]
    for micro in (micro for row in zip(*by_rank) for micro in row):
        if micro.samples:
            read += first_elements(inputs_of(micro.data))[: micro.samples]
    batch = settings.global_batch_size or (settings.batch_size or 1) * ranks
    dropped = 0 if settings.drop_last is False else len(known) % batch
    length, found = len(known) - dropped, []
    for start in range(0, len(read), length):
        of_pass = read[start : start + length]
        if len(set(of_pass)) < len(of_pass) or not set(of_pass) <= set(known):
            found.append(
                f"pass {start // length} reads {len(of_pass)} samples, {len(set(of_pass))} different ones"
            )
    return found


def independent_draws(runs: Runs) -> list[str]:
    """The draws of different streams, and those of different places, are independent."""
    data = runs.program.data
    if not data.augment or data.sampler == "weighted":
        return []
    base = runs.parts["make_tensors"]("train")[0]
    keys = dict(zip(first_elements(base), base))
    drawn: dict[str, list[int]] = {kind: [] for kind in data.augment}
    for micro in runs.whole.micro_batches:
        rows = inputs_of(micro.data)[: micro.samples]
        for row in rows:
            start = keys.get(float(row.flatten()[0]))
            if start is None or not bool(torch.isfinite(row).all()):
                continue
            moved = (row.double() - start.double()).flatten()
            for kind in data.augment:
                value = (float(moved[AUGMENTS.index(kind) + 1]) + 0.25) * 512
                drawn[kind].append(round(value))
    found, kinds = [], list(drawn)
    exact = runs.program.model.dtype in ("float32", "float64")
    for place, first in enumerate(kinds):
        values = drawn[first]
        of_256 = 256 * (1 - (255 / 256) ** len(values))  # different ones, on average
        if exact and len(values) >= 8 and len(set(values)) < of_256 / 2:
            found.append(
                f"{first} draws {len(set(values))} different numbers of {len(values)}: {values[:12]}"
            )
        for second in kinds[place + 1 :]:
            same = sum(a == b for a, b in zip(values, drawn[second]))
            if exact and len(values) >= 4 and same > len(values) / 4 + 1:
                found.append(f"{first} and {second} draw the same {same} times of {len(values)}")
    masks = [
        draw
        for micro in runs.whole.micro_batches
        if micro.samples
        for draw in micro.draws
        if draw.numel() >= 20
    ]
    found += [
        f"draws {n} and {m} of modules are equal"
        for n, one in enumerate(masks)
        for m, other in enumerate(masks[:n])
        if one.shape == other.shape and torch.equal(one, other)
    ][:3]
    return found


def checkpoint_holds_the_run(runs: Runs) -> list[str]:
    """The last checkpoint has the weights and averages that the run ended with."""
    whole, held = runs.whole, runs.whole.checkpoint
    if not held:
        return []
    found = []
    for name, tensor in held["model"].items():
        now = whole.final.get(name)
        if isinstance(tensor, Tensor) and now is not None and not same(tensor, now):
            found.append(f"model {name}")
    for name, tensor in held["ema"].items():
        if not same(tensor, whole.averages[name]):
            found.append(f"average {name}")
    return found


def skipped_leaves_no_trace(runs: Runs) -> list[str]:
    """A skipped update changes no weight and no buffer."""
    found = []
    for number, update in enumerate(runs.whole.updates):
        if not update.committed:
            found += [
                f"update {number}: {n}"
                for n, t in update.before.items()
                if not same(t, update.after[n])
            ]
    return found


def nothing_between_updates(runs: Runs) -> list[str]:
    """Weights change in updates only."""
    found, updates = [], runs.whole.updates
    for number, (update, following) in enumerate(pairwise(updates)):
        found += [
            f"after update {number}: {n}"
            for n, t in update.after.items()
            if not same(t, following.before[n])
        ]
    return found


def looking_changes_nothing(runs: Runs) -> list[str]:
    """Without record, evaluations, predictions and saves by hand, trial and log lines, the run is bitwise the same."""
    unseen: dict[str, Any] = {"record": False, "try_evaluation": False, "log_interval": 1}
    counts_evaluations = any(state.where == "evaluation" for state in runs.program.state)
    looks = () if counts_evaluations else ("evaluate", "infer", "checkpoint")
    plain = runs.run(without_events(runs.plain, *looks) if looks else runs.plain, **unseen)
    states = []
    for left in (runs.whole, plain):
        state = without(left.state["state"], "metrics_mark")
        # What the run was told to look at is an attribute of it.
        attributes = without(left.state.get("attributes") or {}, "looked")
        states.append({**left.state, "state": state, "attributes": attributes})
    return state_differences(*states)


def resumed_is_the_same(runs: Runs) -> list[str]:
    """Stopped or killed at an update and resumed, the run is bitwise the same."""
    found: list[str] = []
    if set(runs.program.state) & UNSAVED_STATES.keys():
        return []
    for event in runs.program.events:
        # The record of a run kills it, and there is none of a pipeline.
        if event.kind != "stop" and (event.kind != "kill" or runs.program.stack.pipeline > 1):
            continue
        place = runs.fresh()
        stopping = replace(
            runs.plain,
            events=(*runs.plain.events, event) if event.kind == "stop" else runs.plain.events,
        )
        if event.kind == "kill":
            try:
                if runs.plain.stack.ranks > 1:
                    run_ranks(runs.plain, place, kill_at=event.at)
                else:
                    in_fork(_killed, runs.plain, place, event.at)
            except Died as death:
                if "ended with -9" not in str(death) and "exit code -9" not in str(death):
                    raise
        else:
            runs.run(stopping, place)
        # What stops a run may come again: at an update that was skipped, and before an evaluation that is still due.
        # Where nearly every update is skipped, it would come more often than can be waited for.
        for resumed in [stopping] * 12 + [runs.plain]:
            parts = runs.run(resumed, place, resume=True)
            states = [runs.whole.state, parts.state]
            if any(each.kind == "checkpoint" for each in runs.program.events):
                # A save in an override of `step` is made before the update's line in metrics.jsonl is, which a kill then loses.
                states = [
                    {**state, "state": without(state["state"], "metrics_mark")} for state in states
                ]
            differing = state_differences(*states)
            if not differing or not parts.micro_batches:
                break
        found += [f"{event.kind}: {each}" for each in differing]
        found += predictions_differ(runs.whole, parts)
    return found


def unsaved_is_named(runs: Runs) -> list[str]:
    """What no checkpoint holds is named once."""
    said, present = runs.whole.named, set(runs.program.state) & UNSAVED_STATES.keys()
    awaited = [UNSAVED_STATES[state] for state in present]
    return [f"no line says {text!r}" for text in awaited if not any(text in line for line in said)]


def saved_is_finite(runs: Runs) -> list[str]:
    """Weights that are not finite are not published."""
    trained = {name for name, tensor in runs.whole.initial.items() if bool(tensor.isfinite().all())}
    model = runs.whole.checkpoint.get("model", {})
    tensors = {
        name: each for name, each in model.items() if name in trained and isinstance(each, Tensor)
    }
    return [
        f"{name} is not finite" for name, each in tensors.items() if not bool(each.isfinite().all())
    ]


def pretrained_is_what_was_evaluated(runs: Runs) -> list[str]:
    """A run that begins with the checkpoint of another has the weights that were evaluated."""
    averages, file = runs.whole.averages, runs.first / "checkpoints" / "latest.pth"
    if not averages or not file.is_file():
        return []
    begun = runs.run(runs.plain, trains=False, pretrained=str(file)).initial
    return [
        name
        for name, average in averages.items()
        if not same(average.to(begun[name].dtype), begun[name])
    ]


def _killed(program: Program, place: Path, at: int) -> None:
    left = run(program, place, kill_at=at)
    if left.refused is not None:
        raise RuntimeError(left.refused)


def larger_budget(runs: Runs) -> list[str]:
    """A budget that is raised in the process is a resume with the larger budget."""
    events = [event for event in runs.program.events if event.kind == "budget"]
    if not events or set(runs.program.state) & UNSAVED_STATES.keys():
        return []
    unit = "steps" if runs.program.settings.steps is not None else "epochs"
    raised = runs.run(without_events(runs.program, "stop", "kill"))
    place = runs.fresh()
    runs.run(runs.plain, place, **{unit: events[0].at})
    resumed = runs.run(runs.plain, place, resume=True)
    return state_differences(raised.state, resumed.state)


def divided_is_the_same(runs: Runs) -> list[str]:
    """An update in smaller micro-batches is the update of the whole batch."""
    program, settings = runs.program, runs.program.settings
    if not can_be_divided(program):
        return []
    batch = settings.global_batch_size or settings.batch_size or 1
    whole = replace(
        settings, batch_size=None, global_batch_size=batch, micro_batch_size=None, accum_steps=1
    )
    whole = without_scores(replace(whole, gradient_sum="fast", keyed=None))
    states = tuple(state for state in program.state if state.where == "nothing")
    records = []
    for micro in (None, 1 + program.data.train % 2):
        divided = replace(
            program, settings=replace(whole, micro_batch_size=micro), events=(), state=states
        )
        divided = replace(divided, optimizer=steady(program.optimizer))
        records.append(runs.run(divided))
    whole_batch, in_pieces = records
    return moved_alike(whole_batch, in_pieces, program)


def steady(optimizer: Optimizer) -> Optimizer:
    """Return SGD in the place of an optimizer that divides by the gradient: that makes much of the rounding of one that is zero."""
    return (
        replace(optimizer, kind="sgd", fused=False, no_eps=False)
        if optimizer.kind in ADAPTIVE
        else optimizer
    )


def without_scores(settings: Settings) -> Settings:
    """Return settings by which no score decides: a run by updates evaluates as many samples as its micro-batches have."""
    schedule = settings.schedule
    follows = schedule is not None and schedule.kind == "plateau"
    return replace(settings, patience=None, schedule=None if follows else schedule)


def can_be_divided(program: Program) -> bool:
    """Whether a program's updates do not depend on how they are divided."""
    kinds = {part.kind for part in flat(program.model.parts)}
    exact = program.model.dtype in ("float32", "float64") and program.settings.precision is None
    own_order = program.data.source != "iterable" and program.data.sampler is None
    # The second of two optimizers computes with what the first one has made, in the last micro-batch alone.
    own_order = own_order and program.optimizer.kind != "two"
    batch = program.settings.global_batch_size or program.settings.batch_size or 1
    return (
        exact
        and own_order
        and batch > 1
        and not kinds & set(PER_FORWARD)
        and not program.model.tasks
        and not program.data.nan_samples
        and not program.data.ragged
    )


def layout_is_the_same(runs: Runs) -> list[str]:
    """On several processes the updates are those of one."""
    program, settings = runs.program, runs.program.settings
    if program.stack.ranks == 1 or not can_be_divided(program):
        return []
    batch = max(
        settings.global_batch_size or (settings.batch_size or 1) * program.stack.ranks,
        program.stack.ranks,
    )
    if batch > program.data.train:
        return []
    whole = replace(
        settings, batch_size=None, global_batch_size=batch, micro_batch_size=None, accum_steps=1
    )
    whole = without_scores(replace(whole, gradient_sum="fast", keyed=None))
    several = replace(
        program, settings=whole, events=(), state=(), optimizer=steady(program.optimizer)
    )
    one = replace(several, stack=Stack())
    return moved_alike(runs.run(several), runs.run(one), program)


def any_number_of_processes(runs: Runs) -> list[str]:
    """With one order of addition, two processes end in the bits of one, also where the run was begun on one."""
    alone, whole = runs.plain, runs.whole
    if not alone.settings.is_canonical or any(DEPENDS_ON_PROCESSES in line for line in whole.named):
        return []
    two = replace(alone, stack=Stack(ranks=2))
    found = [f"on two: {each}" for each in ends_differ(whole, runs.run(two))]
    if set(runs.program.state) & UNSAVED_STATES.keys():
        return found
    for event in (event for event in runs.program.events if event.kind == "stop"):
        place = runs.fresh()
        runs.run(replace(alone, events=(*alone.events, event)), place)
        rest = runs.run(two, place, resume=True)
        found += [f"resumed on two: {each}" for each in ends_differ(whole, rest)]
    return found


def ends_differ(first: Record, second: Record) -> list[str]:
    """Return what differs between the ends of two runs."""
    found = [] if first.steps == second.steps else [f"{first.steps} and {second.steps} updates"]
    found += [name for name, tensor in first.final.items() if not same(tensor, second.final[name])]
    found += [
        f"average {name}"
        for name, tensor in first.averages.items()
        if not same(tensor, second.averages[name])
    ]
    found += predictions_differ(first, second)
    last = [
        [(each.split, str(each.result)) for each in record.evaluations[-1:]]
        for record in (first, second)
    ]
    return found if last[0] == last[1] else [*found, f"last evaluation {last[0]} and {last[1]}"]


PROPERTIES: tuple[Callable[[Runs], list[str]], ...] = (
    unsaved_is_named,
    saved_is_finite,
    checkpoint_holds_the_run,
    nothing_between_updates,
    skipped_leaves_no_trace,
    each_sample_once,
    independent_draws,
    reference,
    pretrained_is_what_was_evaluated,
    looking_changes_nothing,
    resumed_is_the_same,
    divided_is_the_same,
    larger_budget,
    any_number_of_processes,
    layout_is_the_same,
)
"""The cheapest first: a program that does not have one is asked no other."""


ON_SEVERAL = (
    checkpoint_holds_the_run,
    nothing_between_updates,
    skipped_leaves_no_trace,
    each_sample_once,
    reference,
    resumed_is_the_same,
    layout_is_the_same,
)
"""Those that are asked of several processes: what takes further runs and is decided before the ranks is left out."""

IN_A_PIPELINE = (checkpoint_holds_the_run, resumed_is_the_same, layout_is_the_same)
"""Those that need no record: a pipeline divides a batch once more, and calls `train_step` for a part of it."""


# Comparisons


def state_differences(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Return where two states of runs are not bitwise the same.

    An attribute that is back at its first value is saved by a run that has saved another value of it, and by no other: `counts` has
    the values themselves.
    """
    attributes = [state.get("attributes") or {} for state in (first, second)]
    common = attributes[0].keys() & attributes[1].keys()
    one, other = (
        {**state, "attributes": {name: held[name] for name in common}}
        for state, held in zip((first, second), attributes)
    )
    return differences(one, other)


def same(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors are bitwise the same, NaN included."""
    return first.dtype == second.dtype and torch.equal(
        torch.nan_to_num(first), torch.nan_to_num(second)
    )


def without(values: Any, name: str) -> Any:
    return (
        {key: value for key, value in values.items() if key != name}
        if isinstance(values, dict)
        else values
    )


def inputs_of(data: Any) -> Tensor:
    """Return the input tensor of a batch."""
    first = data
    while not isinstance(first, Tensor):
        first = next(iter(first.values())) if isinstance(first, dict) else first[0]
    return first


def first_elements(rows: Any) -> list[float]:
    """Return what tells samples apart: their first element, which no augmentation changes; of tokens all."""
    if isinstance(rows, Tensor) and rows.is_floating_point():
        return [float(row.flatten()[0]) for row in rows]
    return [float(hash(tuple(token for token in row.tolist() if token))) for row in rows]


def predictions_differ(first: Record, second: Record) -> list[str]:
    if first.predictions is None or second.predictions is None:
        return []
    return [] if same(first.predictions, second.predictions) else ["predictions"]


def moved_alike(first: Record, second: Record, program: Program) -> list[str]:
    """Return where two runs differ by more than rounding, relative to how far the weights have moved."""
    tolerance = 1e-9 if program.model.dtype == "float64" else 2e-3
    found = []
    if first.steps != second.steps:
        found.append(f"{first.steps} and {second.steps} updates")
    for name, start in first.initial.items():
        one, other = first.final[name], second.final[name]
        moved = (
            float((one.double() - start.double()).abs().max()) if not one.is_complex() else math.inf
        )
        if not bool(torch.isfinite(one).all()):
            continue
        off = float((one - other).abs().max())
        if off > tolerance * moved + 1e-6 * (tolerance > 1e-6):
            found.append(f"{name}: off by {off:.3g}, moved by {moved:.3g}")
    return found


# A program


def check(program: Program) -> Verdict:
    """Run a program in all the ways that its properties need, in this process, and return what became of it."""
    begun, used = time.monotonic(), time.process_time()
    with directory() as place:
        verdict = _check(program, place)
    verdict.seconds, verdict.processor = time.monotonic() - begun, time.process_time() - used
    return verdict


def _check(program: Program, place: Path) -> Verdict:
    runs = Runs(program, place)
    whole = runs.whole
    if whole.refused is not None:
        return refusal(runs, whole)
    refused: Verdict | None = None
    named: Verdict | None = None
    asked = PROPERTIES if program.stack.ranks == 1 else ON_SEVERAL
    for holds in asked if program.stack.pipeline == 1 else IN_A_PIPELINE:
        try:
            found = holds(runs)
        except Refused as error:
            # Such as a resume of what no checkpoint holds; the other properties must hold all the same.
            if is_raw(str(error)):
                return Verdict("differs", str(error), holds.__name__, named=whole.named)
            refused = refused or Verdict(
                "refused", f"{holds.__name__}: {error}", holds.__name__, named=whole.named
            )
            continue
        except Late as error:
            losses = [abs(each.loss or 0.0) for each in error.left.micro_batches[-1:]]
            if str(error).startswith("NonFiniteError") and max(losses, default=0.0) > HUGE:
                # Rounding decides in which update it is not finite any more, and so in which division.
                named = named or Verdict("named", str(error), named=whole.named)
                continue
            return Verdict("differs", str(error), holds.__name__, named=whole.named)
        reasons = EXPLAINED.get(holds.__name__, ()) if program.stack != Stack() else ()
        lines = [line for line in whole.named if any(reason in line for reason in reasons)]
        if found and not lines:
            return Verdict("differs", "\n".join(found[:12]), holds.__name__, named=whole.named)
        if found:
            named = named or Verdict("named", lines[0], named=whole.named)
    return refused or named or Verdict("right", named=whole.named)


RAW = (
    "AssertionError",
    "AttributeError",
    "IndexError",
    "KeyError",
    "NameError",
    "TypeError",
    "UnboundLocalError",
)


def is_raw(text: str) -> bool:
    """Whether an error says what went wrong within some code, and not what a program is to change."""
    says = text.split("\n")[0]
    return says.startswith(RAW) and not any(word in says for word in ("Expected", "expects"))


def has_diverged(runs: Runs, left: Record) -> bool:
    """Whether the loop by hand, in the dtypes of the program, has no finite update either where the run was ended."""
    if not left.updates or not left.initial:
        return False
    # In which update the squares of its gradients are too large for float32, rounding decides.
    if abs(left.micro_batches[-1].loss or 0.0) > HUGE:
        return True
    own = by_hand.expected(runs.plain, runs.parts, left, exact=False)
    return own.refused is not None and own.steps == left.refused_after


def refusal(runs: Runs, left: Record) -> Verdict:
    """Return whether an error came in time: before the first update, or when the event came that it names."""
    program = runs.program
    text = left.refused or ""
    trace = getattr(left, "trace", "")
    half = program.model.dtype == "float16" or program.settings.precision == "fp16"
    may_be_infinite = bool(program.data.nan_samples) or half or program.optimizer.no_eps
    of_graph = program.stack.kind == "graph" and "Expected batches of a few sizes" in text
    # Which blocks a rank uses follows from its data: torch ends the run at the first update in which one is left out, with the setting.
    of_ddp = program.stack.kind in ("ddp", "accelerate") and "find_unused_parameters" in text
    # And FSDP2 cannot have ranks run different blocks: the update in which they first do is refused.
    # Where the blocks have other sizes, the ranks wait for each other up to the time limit, and one of them has said so before.
    waits = "Timed out waiting" in text and any(OTHER_MODULES in line for line in left.named)
    of_shards = program.stack.shard > 1 and program.model.chooses_blocks
    of_shards = of_shards and (waits or text.startswith("UnitOrderError"))
    if is_raw(text) or ("Timed out waiting" in text and not of_shards):
        return Verdict("differs", f"{text}\n{trace}", "refused_in_time", named=left.named)
    if left.refused_after == 0:
        return Verdict("refused", f"{text}\n{trace}", named=left.named)
    if of_graph or of_ddp or of_shards:
        return Verdict("named", text, named=left.named)
    if text.startswith("NonFiniteError") and (may_be_infinite or has_diverged(runs, left)):
        return Verdict("named", text, named=left.named)
    return Verdict("differs", f"late: {text}\n{trace}", "refused_in_time", named=left.named)


def checked(program: Program, timeout: float = 60.0) -> Verdict:
    """Check a program in a fork; what has several processes in forks of the server."""
    begun = time.monotonic()
    try:
        # The ranks of several are processes of their own.
        several = is_of_several(program)
        verdict: Verdict = check(program) if several else in_fork(check, program, timeout=timeout)
    except Died as death:
        # Ranks of shards that run blocks of other sizes in one update end in gloo's native code, and the guide says so.
        aborted = (
            program.stack.shard > 1
            and program.model.chooses_blocks
            and "ended with -6" in str(death)
        )
        verdict = Verdict("named", str(death)) if aborted else Verdict("died", str(death), "ends")
    except Exception:
        verdict = Verdict("died", traceback.format_exc(), "ends")
    verdict.seconds = time.monotonic() - begun
    return verdict
