"""The reference: a training run as the loop of a textbook, in float64. It imports nothing of danling.

It is given what a loop cannot know: the program, the namespace of its script, the initial weights, the batches in the order in which they
were read, and what dropout and noise drew. With `exact=False` it runs in the dtypes of the program: the difference is its rounding noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .spec import (
    ADAPTIVE,
    Evaluation,
    MicroBatch,
    Optimizer,
    Program,
    Record,
    Schedule,
    Update,
    taken_apart,
)

Window = list[
    list[MicroBatch]
]  # of an update: for each pass through `train_step`, the micro-batches of the ranks
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9}),
    "nesterov": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "adam": ("Adam", {}),
    "adamw": ("AdamW", {}),
    "adagrad": ("Adagrad", {}),
    "rmsprop": ("RMSprop", {}),
}


def expected(
    program: Program, parts: Mapping[str, Any], given: Record, *, exact: bool = True
) -> Record:
    """Return what a run of a program should leave; of the record, what it marks as given is read."""
    return Run(program, parts, given, exact=exact).train()


def windows(program: Program, given: Record, ranks: int) -> Iterator[tuple[Window, bool]]:
    """Yield the micro-batches of each update, and whether it is the last one of its pass."""
    settings, size = program.settings, program.settings.batch_size or 1
    batch = settings.global_batch_size or size * ranks
    shares, stretch = [program.data.train], batch
    if (
        program.data.source == "iterable" or program.data.sampler
    ):  # each rank reads all of it, each worker its part
        workers = 1 if program.data.sampler else settings.num_workers or 1
        shares, stretch = (
            [len(range(worker, program.data.train, workers)) for worker in range(workers)] * ranks,
            size,
        )
    keeps = settings.drop_last is False  # the default drops what does not fill a batch
    length = sum(share if keeps else share - share % stretch for share in shares)
    window: Window = []
    read = in_window = 0
    for row in zip(
        *([micro for micro in given.micro_batches if micro.rank == rank] for rank in range(ranks))
    ):
        window.append(list(row))
        samples = sum(micro.samples for micro in row)
        read, in_window = read + samples, in_window + samples
        is_full = (
            in_window >= batch
            if settings.global_batch_size
            else len(window) == settings.accum_steps
        )
        if is_full or read >= length:
            yield window, read >= length
            window, in_window, read = [], 0, read if read < length else 0


def batches_of_evaluation(samples: list[Any], held: int, ranks: int) -> Iterator[list[Any]]:
    """Yield the batches in which ranks evaluate: what all of them hold at once, cut as evenly as possible."""
    for start in range(0, len(samples), held * ranks):
        row = samples[start : start + held * ranks]
        shares = torch.arange(len(row)).tensor_split(ranks)
        yield from ([row[place] for place in places] for places in shares if len(places))


def in_float64(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: in_float64(item) for name, item in value.items()}
    if value.is_complex():
        return value.to(torch.complex128)
    return value.double() if value.is_floating_point() else value


def weight_of(program: Program, target: Tensor) -> float:
    """Return what the mean of the criterion is taken over."""
    criterion = program.criterion
    if criterion.sample_weights:
        first = target if target.ndim == 1 else target[:, 0]
        return float(torch.where(first > 0, 2.0, 0.5).double().sum())
    if target.is_floating_point():
        return float(target.numel())
    classes, ignored = (
        target.long(),
        -100 if criterion.kind == "in_model" else criterion.ignore_index,
    )
    if ignored is not None:
        classes = classes[classes != ignored]
    weights = torch.tensor(criterion.weights, dtype=torch.float64)
    return float(weights[classes % 4].sum()) if criterion.class_weights else float(classes.numel())


def factor_of(schedule: Schedule, n: int, total: int) -> float:
    """Return the factor of the rate after `n` steps of a schedule over `total`."""
    torchs = {"step": 0.5 ** (n // 2), "exponential": 0.9**n, "lambda": 1 / (1 + n)}
    if schedule.kind in torchs:
        return float(torchs[schedule.kind])
    if n < schedule.warmup:
        return (n + 1) / schedule.warmup
    start = (
        max(total - round(0.1 * total), schedule.warmup)
        if schedule.kind == "wsd"
        else schedule.warmup
    )
    done = max(n - start, 0) / max(total - start, 1) if n < total else 1.0
    shapes = {
        "constant": 1.0,
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "linear": 1 - done,
        "wsd": 1 - done,
    }
    return shapes[schedule.kind]


def make_optimizers(
    settings: Optimizer, named: Mapping[str, Tensor], own: Any
) -> list[torch.optim.Optimizer]:
    """Return the optimizers over named parameters, one for each phase of an update; `own` is the class of the user's."""

    def of(kind: str, *groups: dict[str, Any]) -> Any:
        name, options = OPTIMIZERS.get(kind, ("", {}))
        options = {**options, "eps": 0.0} if settings.no_eps else options
        return (getattr(torch.optim, name) if name else own)(list(groups), **options)

    def group(is_member: Callable[[str], bool], lr: float, decay: float) -> dict[str, Any]:
        return {
            "params": [each for name, each in named.items() if is_member(name)],
            "lr": lr,
            "weight_decay": decay,
        }

    lr, decay = settings.lr, settings.weight_decay
    if settings.kind == "two":
        head, rest = (
            group(lambda name: name[:5] == "head.", lr, 0.0),
            group(lambda name: name[:5] != "head.", lr, 0.0),
        )
        return [of("sgd", head), of("adam", rest)]
    if not settings.groups:
        return [of(settings.kind, group(lambda name: True, lr, decay))]
    others, biases = (
        group(lambda name: "bias" not in name, lr, decay),
        group(lambda name: "bias" in name, 2 * lr, 0.0),
    )
    is_kept = (
        bool(biases["params"]) or not settings.by_config
    )  # a configuration makes no group of nothing
    return [of(settings.kind, others, biases) if is_kept else of(settings.kind, others)]


class EndOfRun(Exception):
    """The run is over before its budget is used up."""


class Phase:
    """The part of an update that one optimizer makes."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.parameters = [
            parameter for group in optimizer.param_groups for parameter in group["params"]
        ]
        self.gradients: dict[int, Tensor] = {}
        self.loss = self.weight = self.norm = 0.0
        self.is_made = False

    def add(self, loss: Tensor, weight: float, factor: float) -> None:
        """Add the gradient of a micro-batch, times a factor."""
        found = torch.autograd.grad(loss * factor, self.parameters, allow_unused=True)
        for number, gradient in enumerate(found):
            if gradient is not None:
                self.gradients[number] = self.gradients.get(number, 0) + gradient
        self.loss, self.weight = self.loss + float(loss.detach()) * factor, self.weight + weight

    def divide(self, by: float) -> None:
        """Divide the gradient, and look whether the update can be made."""
        self.gradients = {number: gradient / by for number, gradient in self.gradients.items()}
        self.norm = math.sqrt(
            sum(float(each.abs().double().square().sum()) for each in self.gradients.values())
        )
        self.is_made = self.weight > 0 and math.isfinite(self.norm) and math.isfinite(self.loss)

    def step(self, max_norm: float | None, max_value: float | None) -> None:
        """Clip, and move the weights."""
        for number, parameter in enumerate(self.parameters):
            gradient = self.gradients.get(number)
            if gradient is not None and max_norm is not None:
                gradient = gradient * min(max_norm / (self.norm + 1e-6), 1.0)
            if gradient is not None and max_value is not None:
                gradient = gradient.clamp(-max_value, max_value)
            parameter.grad = gradient
        self.optimizer.step()


class Run:
    def __init__(
        self, program: Program, parts: Mapping[str, Any], given: Record, *, exact: bool
    ) -> None:
        self.program, self.settings, self.parts, self.given, self.exact = (
            program,
            program.settings,
            parts,
            given,
            exact,
        )
        self.model, self.criterion = parts["make_model"](), parts["make_criterion"]()
        criterion = {"criterion": self.criterion} if isinstance(self.criterion, nn.Module) else {}
        self.whole = nn.ModuleDict({"model": self.model, **criterion})
        self.put_back(given.initial)
        if exact:
            self.whole._apply(in_float64)  # type: ignore[no-untyped-call]
        trained = {name: each for name, each in self.tensors().items() if each.requires_grad}
        self.optimizers = make_optimizers(
            program.optimizer, trained, parts.get("Lookahead", parts.get("Wide"))
        )
        self.base_rates = [group["lr"] for group in self.groups()]
        for module in self.model.modules():
            if isinstance(module, nn.Dropout) or type(module).__name__ == "Noise":
                module.register_forward_hook(self.draw)
        self.ranks = max((micro.rank for micro in given.micro_batches), default=0) + 1
        self.windows = windows(program, given, self.ranks)
        ends = (
            number
            for number, (_, ends_pass) in enumerate(windows(program, given, self.ranks), 1)
            if ends_pass
        )
        self.updates_of_pass = next(ends, 0)
        self.held = program.settings.held_at_once(self.ranks)
        self.evaluating = (
            1 if program.settings.is_canonical else self.ranks
        )  # ranks of an evaluation
        self.counts = [[0] * len(program.state) for _ in range(self.ranks)]
        self.memories = [
            module for module in self.model.modules() if type(module).__name__ == "Memory"
        ]
        self.remembered = [[0] * len(self.memories) for _ in range(self.ranks)]
        self.passes = self.position = self.rank = 0
        one = torch.optim.SGD([torch.zeros(())], lr=1.0)
        self.plateau = ReduceLROnPlateau(
            one, "max" if self.settings.score_max else "min", 0.5, patience=0, eps=0
        )
        self.averages = in_float64(
            {k: v.detach().clone() for k, v in self.saved().items() if self.settings.ema}
        )
        self.loss_sum = self.weight_sum = 0.0
        self.scores, self.left = list[float](), Record()
        self.is_coarse = bool(program.settings.precision) or program.optimizer.kind in ADAPTIVE
        self.is_coarse |= any(each.itemsize == 2 for each in given.initial.values())

    def tensors(self) -> dict[str, Tensor]:
        """Return parameters and buffers by name, those of the criterion under `criterion.`."""
        named = {**dict(self.whole.named_parameters()), **dict(self.whole.named_buffers())}
        return {name.removeprefix("model."): tensor for name, tensor in named.items()}

    def saved(self) -> dict[str, Tensor]:
        """Return the parameters of the model and its persistent buffers."""
        return {
            name: tensor
            for name, tensor in self.tensors().items()
            if name in self.model.state_dict()
        }

    def copies(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.tensors().items()}

    @torch.no_grad()
    def put_back(self, copies: Mapping[str, Tensor], *, weights: bool = True) -> None:
        for name, tensor in self.tensors().items():
            if name in copies and (weights or not isinstance(tensor, nn.Parameter)):
                tensor.copy_(copies[name])

    def groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    def draw(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        """Return the output of a module that draws, with what was drawn in the run."""
        if not module.training:
            return output
        drawn = next(self.draws[self.rank]).to(inputs[0].dtype)
        return inputs[0] * drawn if isinstance(module, nn.Dropout) else inputs[0] + 0.1 * drawn

    def forward(self, data: Any) -> tuple[Tensor, Tensor]:
        """Return the prediction of a batch, and its loss as the criterion reduces it."""
        inputs, target = map(in_float64, taken_apart(data)) if self.exact else taken_apart(data)
        arguments, keywords = ((), dict(inputs)) if isinstance(inputs, Mapping) else ((inputs,), {})
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.settings.precision or "")
        with nullcontext() if dtype is None or self.exact else torch.autocast("cpu", dtype):
            if self.criterion is None:
                output = self.model(*arguments, **keywords, labels=target)
                return output["logits"], output["loss"]
            prediction = self.model(*arguments, **keywords)
            return prediction, self.criterion(prediction, target)

    def update(self, window: Window) -> bool:
        """Make an update, or skip it; return whether it was made."""
        self.whole.train()
        before, counts = self.copies(), [list(each) for each in self.counts]
        rates, self.buffers = [group["lr"] for group in self.groups()], [before] * self.ranks
        phases = [Phase(optimizer) for optimizer in self.optimizers]
        for row in window:
            self.draws = {micro.rank: iter(micro.draws) for micro in row}
            for phase in phases:
                for micro in row:
                    self.micro_batch(micro, phase)
                if row is window[-1]:
                    self.decide(phase)
            self.counts = [[count + 1 for count in of_rank] for of_rank in self.counts]
        self.put_back(self.buffers[0], weights=False)
        is_made = any(phase.is_made for phase in phases)
        loss, weight = sum(phase.loss / (phase.weight or 1.0) for phase in phases), phases[0].weight
        if not all(phase.is_made for phase in phases):
            self.put_back(before, weights=False)  # a skipped update leaves no trace
        made, number = self.copies(), len(self.left.updates)
        for update in self.given.updates[number : number + 1] if self.is_coarse else ():
            self.put_back(
                update.after
            )  # a digit in 16 bits, or the sign of a gradient that is rounding, would go on
        if is_made:
            self.left.steps += 1
            self.loss_sum, self.weight_sum = self.loss_sum + loss * weight, self.weight_sum + weight
            self.advance("step")
            self.average()
        else:
            for now, old in zip(self.counts, counts):
                now[:] = [
                    o if s.is_put_back else n for n, o, s in zip(now, old, self.program.state)
                ]
        norm, averages = math.hypot(*(phase.norm for phase in phases)), dict(self.averages)
        gradients = {
            name: each.grad for name, each in self.tensors().items() if each.grad is not None
        }
        self.left.updates.append(
            Update(len(window), is_made, norm, loss, rates, before, made, averages, 0, gradients)
        )
        return is_made

    def micro_batch(self, micro: MicroBatch, phase: Phase) -> None:
        """Run a micro-batch forward and backward."""
        self.rank = micro.rank
        self.put_back(self.buffers[micro.rank], weights=False)
        for module, count in zip(self.memories, self.remembered[micro.rank]):
            module.count = count
        prediction, loss = self.forward(micro.data)
        self.buffers[micro.rank] = self.copies()
        self.remembered[micro.rank] = [module.count for module in self.memories]
        for state, count in zip(self.program.state, self.counts[micro.rank]):
            loss = loss if state.where == "evaluation" else loss * state.factor(count)
        weight = weight_of(self.program, taken_apart(micro.data)[1])
        if micro.samples and weight:
            phase.add(loss, weight, weight if self.program.criterion.reduction == "mean" else 1.0)
        elif (
            micro.samples
        ):  # its loss may be 0/0; the gradient of its prediction is 0, times what may be NaN
            phase.add(prediction.nan_to_num(0.0, 0.0, 0.0).sum(), 0.0, 0.0)

    def decide(self, phase: Phase) -> None:
        phase.divide(by=phase.weight or 1.0 if self.program.criterion.reduction == "mean" else 1.0)
        if (
            self.settings.precision == "fp16" and phase.weight
        ):  # nothing but the run itself knows what overflows
            phase.is_made = self.given.updates[len(self.left.updates)].committed
        elif not (phase.is_made or self.settings.skip_nonfinite_grad) and phase.weight:
            self.left.refused = "NonFiniteError"
            raise EndOfRun
        if phase.is_made:
            phase.step(self.settings.max_grad_norm, self.settings.max_grad_value)
        for name, tensor in self.tensors().items():
            if tensor.requires_grad and self.given.initial[name].dtype.itemsize == 2:
                tensor.data.copy_(
                    tensor.data.to(self.given.initial[name].dtype)
                )  # what the program's weights can hold

    def average(self) -> None:
        ema = self.settings.ema
        if ema is None or self.left.steps % ema.interval:
            return
        rounds = self.left.steps // ema.interval
        decay = min(ema.decay, (1 + rounds) / (10 + rounds)) if ema.warmup else ema.decay
        for name, value in self.saved().items():
            before, live = self.averages[name], value.detach().clone()
            self.averages[name] = live
            if (
                isinstance(value, nn.Parameter) or ema.buffers == "average"
            ) and live.dtype != torch.int64:
                mean = decay * before + (1 - decay) * live
                self.averages[name] = torch.where(mean.isfinite(), mean, live)

    def advance(self, boundary: str, score: float | None = None) -> None:
        """Advance the schedule if it goes by a boundary: a `step`, an `epoch`, a `pass` of a run by steps, a `validation`."""
        schedule = self.settings.schedule
        if schedule is None:
            return
        goes_by = {
            "step": ("step",),
            "epoch": ("epoch", "pass"),
            "validation": ("epoch", "validation"),
        }
        if schedule.kind == "plateau" and score is not None:
            self.plateau.step(score)
        elif schedule.kind != "plateau" and boundary in goes_by[schedule.interval or "step"]:
            self.position += 1
        self.set_rates()

    def set_rates(self) -> None:
        schedule, factor = self.settings.schedule, self.plateau.optimizer.param_groups[0]["lr"]
        if schedule is not None and schedule.kind != "plateau":
            by_updates = self.settings.epochs is not None and schedule.interval != "epoch"
            factor = factor_of(
                schedule, self.position, self.budget * (self.updates_of_pass if by_updates else 1)
            )
        for base, group in zip(self.base_rates, self.groups()):
            group["lr"] = base * factor

    def evaluate(self, limit: int | None = None) -> tuple[dict[str, float], Tensor]:
        """Return metrics and predictions of the split `val` in its own order, or of its first samples."""
        collate = self.parts.get("collate", torch.utils.data.default_collate)
        samples = list(self.parts["make_dataset"]("val"))[:limit]
        trained, predictions, loss_sum, weight_sum = self.copies(), list[Tensor](), 0.0, 0.0
        self.put_back(self.averages)
        self.whole.eval()
        for batch in batches_of_evaluation(samples, self.held, self.evaluating):
            data = collate(batch)
            with torch.no_grad():
                prediction, loss = self.forward(data)
            if weight := weight_of(self.program, taken_apart(data)[1]):
                loss_sum += float(loss) * (
                    weight if self.program.criterion.reduction == "mean" else 1.0
                )
            predictions, weight_sum = [*predictions, *prediction], weight_sum + weight
        self.put_back(trained)
        mean = sum(float(each.double().mean()) for each in predictions) / len(predictions)
        return {
            "loss": loss_sum / weight_sum if weight_sum else math.nan,
            "mean": mean,
        }, torch.stack(predictions)

    def close(self, boundary: str, limit: int | None = None) -> None:
        """Evaluate, advance what goes by evaluations, and end the run if its patience is used up."""
        self.left.pass_losses.append(
            self.loss_sum / self.weight_sum if self.weight_sum else math.nan
        )
        self.loss_sum = self.weight_sum = 0.0
        if not self.program.data.val:
            return self.advance(boundary)
        result = self.evaluate(limit)[0]
        self.left.evaluations.append(Evaluation("val", self.left.steps, result))
        name, better = ("mean", max) if self.settings.score_max else ("loss", min)
        score, number = result[name], len(self.scores)
        if self.is_coarse and number < len(self.given.evaluations):
            score = self.given.evaluations[number].result[
                name
            ]  # what is better is decided by the last digit
        self.scores.append(score)
        self.advance(boundary, score)
        numbers = [score for score in self.scores if not math.isnan(score)]
        since = len(self.scores) - (1 + self.scores.index(better(numbers)) if numbers else 0)
        if since >= (self.settings.patience or math.inf):
            raise EndOfRun

    def train(self) -> Record:
        """Train to the end of the budget, or of each budget."""
        budgets = [event.at for event in self.program.events if event.kind == "budget"]
        with suppress(EndOfRun):
            for budget in [*budgets, self.settings.epochs or self.settings.steps or 0]:
                self.budget = budget
                self.set_rates()
                while (self.left.steps if self.settings.epochs is None else self.passes) < budget:
                    self.train_on(*next(self.windows))
        self.left.final, self.left.averages = self.copies(), self.averages
        if self.program.data.val and self.left.refused is None:
            self.left.predictions = self.evaluate()[1]
        return self.left

    def train_on(self, window: Window, ends_pass: bool) -> None:
        """Make an update, and what is due after it."""
        settings, is_made = self.settings, self.update(window)
        self.passes += ends_pass
        if settings.epochs is not None:
            return self.close("epoch") if ends_pass else None
        every = (
            settings.evaluate_interval
            or settings.checkpoint_interval
            or math.ceil(self.budget / 20)
        )
        is_last = self.left.steps == self.budget
        if ends_pass and is_last:
            self.advance("pass")
        if is_made and (is_last or self.left.steps % every == 0):
            self.close("validation", limit=max(self.budget // 20, 1) * self.held * self.evaluating)
        if ends_pass and not is_last:
            self.advance("pass")
