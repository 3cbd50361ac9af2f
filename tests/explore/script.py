"""Renders a program as the script that a user could have written. The search runs this text and no other."""

from __future__ import annotations

from pprint import pformat
from textwrap import dedent, indent
from typing import Any

from .spec import CHANNELS, CLASSES, LENGTH, SIDE, TOKENS, WIDTH, Part, Program, State

SPATIAL = ("conv", "batch_norm", "layer_norm", "group_norm", "relu", "tanh", "dropout", "noise")
"""Parts that images go through before they are flattened, up to the first other part."""

AUGMENTS = ("torch", "numpy", "random", "generator", "numpy_generator")
"""What an augmentation draws from; number n is added to element n + 1 of the sample."""

LIBRARY_SCHEDULES = ("linear", "cosine", "constant", "wsd")

_IMPORTS = """
import copy
import enum
import random
from collections import deque

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler, TensorDataset, WeightedRandomSampler

import danling as dl
"""
_PARALLELIZE = """
    def parallelize(self, topology):
        style = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(self, topology.mesh("tensor"), {"head": style})
"""

_LOADS = """
    def load_state_dict(self, state):
        self.made = state["made"]
        for slow, stored in zip(self.slow, state["slow"]):
            slow.copy_(stored)
        super().load_state_dict({name: state[name] for name in ("state", "param_groups")})
"""
_LOADS_LENIENTLY = """
    def load_state_dict(self, state):
        # A state of plain SGD is taken too.
        self.made = state.get("made", 0)
        for slow, stored in zip(self.slow, state.get("slow", [])):
            slow.copy_(stored)
        super().load_state_dict({name: state[name] for name in ("state", "param_groups")})
"""

_CLASSES = {
    "complex": """
        class Complex(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.randn(6, 6, dtype=torch.complex64) / 6)

            def forward(self, x):
                return (x.to(self.weight.dtype) @ self.weight).real
    """,
    "scale": """
        class Scale(nn.Module):
            def __init__(self):
                super().__init__()
                self.factor = nn.Parameter(torch.tensor(1.5))

            def forward(self, x):
                return x * self.factor
    """,
    "noise": """
        class Noise(nn.Module):
            def __init__(self, own=False):
                super().__init__()
                self.generator = torch.Generator().manual_seed(3) if own else None

            def forward(self, x):
                if not self.training:
                    return x
                return x + 0.1 * torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
    """,
    "residual": """
        class Residual(nn.Module):
            def __init__(self, *parts):
                super().__init__()
                self.inner = nn.Sequential(*parts)

            def forward(self, x):
                return x + self.inner(x)
    """,
    "sometimes": """
        class Sometimes(nn.Module):
            def __init__(self, *parts):
                super().__init__()
                self.inner = nn.Sequential(*parts)

            def forward(self, x):
                return x + self.inner(x)
    """,
    "alternating": """
        class Alternating(nn.Module):
            def __init__(self, *parts):
                super().__init__()
                self.inner = nn.Sequential(*parts)

            def forward(self, x):
                return x + self.inner(x)
    """,
    "shared": """
        class Shared(nn.Module):
            def __init__(self, *parts):
                super().__init__()
                self.inner = nn.Sequential(*parts)

            def forward(self, x):
                return self.inner(self.inner(x))
    """,
    "counter": """
        class Counter(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("count", torch.tensor(0))

            def forward(self, x):
                factor = 1 + 0.1 * (self.count % 3)
                if self.training:
                    self.count += 1
                return x * factor.to(x.dtype)
    """,
    "memory": """
        class Memory(nn.Module):
            def __init__(self):
                super().__init__()
                self.count = 0

            def get_extra_state(self):
                return torch.tensor(self.count)

            def set_extra_state(self, state):
                self.count = int(state)

            def forward(self, x):
                factor = 1 + 0.1 * (self.count % 3)
                if self.training:
                    self.count += 1
                return x * factor
    """,
    "running": """
        class Running(nn.Module):
            def __init__(self, persistent=True):
                super().__init__()
                self.register_buffer("mean", torch.zeros(6), persistent=persistent)

            def forward(self, x):
                if self.training:
                    mean = x.detach().flatten(0, -2).mean(0)
                    self.mean.lerp_(mean.to(self.mean.dtype), 0.3)
                return x - self.mean
    """,
    "mask": """
        class Mask(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("mask", torch.tensor([0.0, 0.0, float("-inf"), 0.0, 0.0, 0.0]))

            def forward(self, x):
                return (x + self.mask).softmax(-1)
    """,
    "attention": """
        class Attention(nn.Module):
            def __init__(self):
                super().__init__()
                self.project = nn.Linear(6, 18)
                self.out = nn.Linear(6, 6)

            def forward(self, x):
                query, key, value = self.project(x).chunk(3, -1)
                return x + self.out(F.scaled_dot_product_attention(query, key, value))
    """,
}


class Script:
    """Writes the text of a program; `text()` is the whole."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.lines: list[str] = []

    def text(self, directory: str = "run") -> str:
        """Return the script, which trains and then predicts."""
        blocks = [
            self._parts_of_model(),
            self._net(),
            self._criterion(),
            self._samples(),
            self._helpers(),
        ]
        blocks += [self._runner(), self._main(directory)]
        body = "\n\n\n".join(block.strip("\n") for block in blocks if block.strip())
        return _used_imports(body) + "\n\n\n" + body + "\n"

    # The model

    def _kinds(self) -> list[str]:
        found: list[str] = []

        def walk(parts: tuple[Part, ...]) -> None:
            for part in parts:
                if class_of(part) not in found:
                    found.append(class_of(part))
                walk(part.parts)

        walk(self.program.model.parts)
        return found

    def _parts_of_model(self) -> str:
        return "\n\n".join(dedent(_CLASSES[kind]) for kind in self._kinds() if kind in _CLASSES)

    def _module(self, part: Part, spatial: bool) -> str:
        inner = ", ".join(self._module(each, spatial) for each in part.parts)
        fixed = {
            "linear": f"nn.Linear({WIDTH}, {WIDTH}, bias={not part.flag})",
            "frozen": f"nn.Linear({WIDTH}, {WIDTH}).requires_grad_(False)",
            "spectral": f"nn.utils.parametrizations.spectral_norm(nn.Linear({WIDTH}, {WIDTH}))",
            "relu": "nn.ReLU()",
            "tanh": "nn.Tanh()",
            "batch_norm": f"nn.BatchNorm2d({CHANNELS})" if spatial else f"nn.BatchNorm1d({WIDTH})",
            "layer_norm": f"nn.LayerNorm([{CHANNELS}, {SIDE}, {SIDE}])"
            if spatial
            else f"nn.LayerNorm({WIDTH})",
            "group_norm": f"nn.GroupNorm(2, {CHANNELS})"
            if spatial
            else f"nn.GroupNorm(2, {WIDTH})",
            "dropout": f"nn.Dropout({part.p})",
            "conv": f"nn.Conv2d({CHANNELS}, {CHANNELS}, 3, padding=1)",
            "running": f"Running(persistent={not part.flag})",
            "noise": f"Noise(own={part.flag})",
        }
        return fixed.get(part.kind) or f"{class_of(part).capitalize()}({inner})"

    def _outputs(self) -> int:
        return TOKENS if self.program.model.tied else CLASSES

    def _net(self) -> str:
        program, model = self.program, self.program.model
        inputs, in_model = program.data.inputs, program.criterion.kind == "in_model"
        modules, spatial = [], inputs == "image"
        if not spatial:
            enter = (
                f"nn.Linear({WIDTH}, {WIDTH})"
                if inputs == "vector"
                else f"nn.Embedding({TOKENS}, {WIDTH})"
            )
        for part in model.parts:
            if spatial and part.kind not in SPATIAL:
                modules.append(
                    f"nn.Sequential(nn.Flatten(), nn.Linear({CHANNELS * SIDE * SIDE}, {WIDTH}))"
                )
                spatial = False
            modules.append(self._module(part, spatial))
        if spatial:
            modules.append(
                f"nn.Sequential(nn.Flatten(), nn.Linear({CHANNELS * SIDE * SIDE}, {WIDTH}))"
            )
        lines = ["class Net(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        if inputs != "image":
            lines.append(f"        self.enter = {enter}")
        used = {
            "vector": f"{self._first_input()}[0, 1] >= 0",
            "image": f"{self._first_input()}[0, 0, 0, 1] >= 0",
            "tokens": f"{self._first_input()}[0].sum() % 2 == 0",
        }
        reasons = {"Sometimes": "used", "Alternating": "is_due"}
        sometimes = {class_of(part).capitalize() for part in model.parts} & reasons.keys()
        holder = "nn.ModuleList" if sometimes else "nn.Sequential"
        if modules:
            listed = (
                ["[", *(f"    {each}," for each in modules), "]"]
                if sometimes
                else [f"{each}," for each in modules]
            )
            lines.append(f"        self.body = {holder}(")
            lines += [f"            {each}" for each in listed]
            lines.append("        )")
        if model.tasks:
            lines.append(
                f"        self.tasks = nn.ModuleList([nn.Linear({WIDTH}, {WIDTH}) for _ in range(2)])"
            )
        if "Alternating" in sometimes:
            lines.append('        self.register_buffer("forwards", torch.tensor(0))')
        lines.append(
            f"        self.head = nn.Linear({WIDTH}, {self._outputs()}, bias={not model.tied})"
        )
        if model.tied:
            lines.append("        self.head.weight = self.enter.weight")
        name = self._first_input()
        lines += ["", f"    def forward(self, {name}{', labels=None' if in_model else ''}):"]
        if inputs == "image":
            lines.append(f"        x = {name}")
        else:
            lines.append(f"        x = self.enter({name})")
        if model.tasks or "Sometimes" in sometimes:
            lines.append(f"        used = bool({used[inputs]})")
        if "Alternating" in sometimes:
            lines.append("        is_due = not self.training or int(self.forwards) % 2 == 0")
            lines += ["        if self.training:", "            self.forwards += 1"]
        if sometimes:
            runs = [
                f"{reasons[kind]} or not isinstance(part, {kind})" for kind in sorted(sometimes)
            ]
            condition = runs[0] if len(runs) == 1 else " and ".join(f"({each})" for each in runs)
            lines.append("        for part in self.body:")
            lines.append(f"            if {condition}:")
            lines.append("                x = part(x)")
        elif modules:
            lines.append("        x = self.body(x)")
        if inputs == "tokens" and not model.per_position:
            lines.append("        x = x.mean(1)")
        if model.tasks:
            lines.append("        x = self.tasks[int(used)](x)")
        if in_model:
            lines.append("        logits = self.head(x)")
            lines.append("        if labels is None:")
            lines.append('            return {"loss": None, "logits": logits}')
            lines.append("        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())")
            lines.append('        return {"loss": loss, "logits": logits}')
        else:
            lines.append("        return self.head(x)")
        if program.stack.tensor > 1:
            lines += _PARALLELIZE.rstrip("\n").split("\n")
        cast = f".to(torch.{model.dtype})" if model.dtype != "float32" else ""
        return "\n".join([*lines, "", "", "def make_model():", f"    return Net(){cast}"])

    def _first_input(self) -> str:
        """Return the name of the first parameter of `forward`."""
        return "first" if self.program.data.form == "nested" else "inputs"

    # The criterion

    def _classes(self) -> bool:
        return self.program.criterion.kind in ("cross_entropy", "nll", "in_model")

    def _criterion(self) -> str:
        criterion = self.program.criterion
        options = [] if criterion.reduction == "mean" else [f'reduction="{criterion.reduction}"']
        if criterion.ignore_index is not None:
            options.append(f"ignore_index={criterion.ignore_index}")
        if criterion.class_weights:
            weights = (criterion.weights * 3)[: self._outputs()]
            options.append(
                f"weight=torch.tensor({weights}, dtype=torch.{self.program.model.dtype})"
            )
        if criterion.label_smoothing:
            options.append(f"label_smoothing={criterion.label_smoothing}")
        given = ", ".join(options)
        head = "def make_criterion():\n"
        if criterion.kind == "in_model":
            return head + "    return None"
        if criterion.sample_weights:
            return self._weighted_criterion()
        if criterion.kind == "cross_entropy" and self.program.model.per_position:
            return self._token_criterion(f"nn.CrossEntropyLoss({given})", head)
        if criterion.kind == "nll":
            return dedent(f"""
                class LogLoss(nn.NLLLoss):
                    def forward(self, pred, target):
                        return super().forward(pred.log_softmax(-1), target)


                def make_criterion():
                    return LogLoss({given})
            """)
        if criterion.kind == "own_function":
            return dedent("""
                def squares(pred, target):
                    return (pred - target).square().mean()


                def make_criterion():
                    return squares
            """)
        if criterion.kind == "own_module":
            return dedent(f"""
                class Uncertain(nn.Module):
                    def __init__(self):
                        super().__init__()
                        self.s = nn.Parameter(torch.tensor(0.1, dtype=torch.{self.program.model.dtype}))

                    def forward(self, pred, target):
                        return (pred - target).square().mean() * torch.exp(-self.s) + self.s


                def make_criterion():
                    return Uncertain()
            """)
        name = {
            "cross_entropy": "CrossEntropyLoss",
            "mse": "MSELoss",
            "l1": "L1Loss",
            "bce": "BCEWithLogitsLoss",
        }
        return head + f"    return nn.{name[criterion.kind]}({given})"

    def _token_criterion(self, made: str, head: str) -> str:
        return dedent(f"""
            class TokenLoss(nn.CrossEntropyLoss):
                def forward(self, pred, target):
                    return super().forward(pred.flatten(0, 1), target.flatten())


            def make_criterion():
                return {made.replace("nn.CrossEntropyLoss", "TokenLoss")}
        """)

    def _weighted_criterion(self) -> str:
        per_sample = "(pred - target).square().mean(1)"
        if self._classes():
            per_sample = 'F.cross_entropy(pred, target, reduction="none")'
        return dedent(f"""
            def weighted(pred, target):
                loss = {per_sample}
                return (loss * target_weights(target)).sum() / target_weights(target).sum()


            def target_weights(target):
                # Each sample weighs what follows from its target.
                first = target if target.ndim == 1 else target[:, 0]
                return torch.where(first > 0, 2.0, 0.5).to(first.dtype if first.is_floating_point() else torch.float32)


            def make_criterion():
                return weighted
        """)

    # The data

    def _samples(self) -> str:
        program, data = self.program, self.program.data
        dtype = program.model.dtype
        lines = [
            "def make_tensors(split):",
            f'    count = {{"train": {data.train}, "val": {data.val}}}[split]',
        ]
        lines.append(
            '    generator = torch.Generator().manual_seed({"train": 11, "val": 12}[split])'
        )
        if data.inputs == "tokens":
            lines.append(
                f"    inputs = torch.randint(1, {TOKENS}, (count, {LENGTH}), generator=generator)"
            )
            if data.ragged:
                lines.append(
                    f"    lengths = torch.randint(2, {LENGTH + 1}, (count,), generator=generator)"
                )
        else:
            shape = f"{WIDTH}" if data.inputs == "vector" else f"{CHANNELS}, {SIDE}, {SIDE}"
            lines.append(f"    inputs = torch.randn(count, {shape}, generator=generator)")
        positions = f", {LENGTH}" if program.model.per_position else ""
        if self._classes():
            lines.append(
                f"    targets = torch.randint({self._outputs()}, (count{positions}), generator=generator)"
            )
            if not positions:
                lines[-1] = (
                    f"    targets = torch.randint({self._outputs()}, (count,), generator=generator)"
                )
            else:
                lines[-1] = (
                    f"    targets = torch.randint({self._outputs()}, (count{positions}), generator=generator)"
                )
            ignored = (
                -100 if program.criterion.kind == "in_model" else program.criterion.ignore_index
            )
            if ignored is not None:
                lines.append(
                    f"    targets[torch.rand(targets.shape, generator=generator) < 0.3] = {ignored}"
                )
            if data.target_dtype != "int64":
                lines.append(f"    targets = targets.to(torch.{data.target_dtype})")
        else:
            lines.append(
                f"    targets = torch.randn(count{positions}, {self._outputs()}, generator=generator)"
            )
            if program.criterion.kind == "bce":
                lines.append("    targets = (targets > 0).float()")
            if dtype != "float32":
                lines.append(f"    targets = targets.to(torch.{dtype})")
        if data.nan_samples and data.inputs != "tokens":
            lines.append('    if split == "train":')
            lines.append(f"        inputs.flatten(1)[{list(data.nan_samples)}, 2] = float('nan')")
        if dtype != "float32" and data.inputs != "tokens":
            lines.append(f"    inputs = inputs.to(torch.{dtype})")
        if data.ragged:
            lines.append(
                "    inputs = [row[:length] for row, length in zip(inputs, lengths.tolist())]"
            )
        lines.append("    return inputs, targets")
        return "\n".join(lines) + "\n\n\n" + self._dataset()

    def _keys(self) -> tuple[str, str]:
        if self.program.criterion.kind == "in_model":
            return "inputs", "labels"
        return {
            "mapping": ("input", "target"),
            "keywords": ("inputs", "labels"),
            "nested": ("input", "target"),
        }.get(self.program.data.form, ("", ""))

    def _sample(self, inputs: str, targets: str) -> str:
        form, (first, second) = self.program.data.form, self._keys()
        if form == "pair":
            return f"{inputs}, {targets}"
        if form == "nested":
            return f'{{"{first}": {{"first": {inputs}}}, "{second}": {targets}}}'
        return f'{{"{first}": {inputs}, "{second}": {targets}}}'

    def _dataset(self) -> str:
        data = self.program.data
        if data.source == "tensors":
            return "def make_dataset(split):\n    return TensorDataset(*make_tensors(split))"
        if data.source == "list":
            sample = self._sample("x", "y")
            sample = f"({sample})" if data.form == "pair" else sample
            return f"def make_dataset(split):\n    return [{sample} for x, y in zip(*make_tensors(split))]"
        iterable = data.source == "iterable"
        lines = [
            f"class Samples({'IterableDataset' if iterable else 'Dataset'}):",
            "    def __init__(self, split):",
        ]
        lines.append("        self.split = split")
        lines.append("        self.inputs, self.targets = make_tensors(split)")
        if "generator" in data.augment:
            lines.append("        self.generator = torch.Generator().manual_seed(3)")
        if "numpy_generator" in data.augment:
            lines.append("        self.numpy_generator = np.random.default_rng(3)")
        if any(state.where == "dataset" for state in self.program.state):
            lines.append("        self.count = 0")
        if State("dataset", "int") in self.program.state:
            lines += ["", "    def state_dict(self):", '        return {"count": self.count}']
            lines += [
                "",
                "    def load_state_dict(self, state):",
                '        self.count = state["count"]',
            ]
        draws = {
            "torch": "torch.randint(256, ()).item()",
            "numpy": "np.random.randint(256)",
            "random": "random.randrange(256)",
            "generator": "torch.randint(256, (), generator=self.generator).item()",
            "numpy_generator": "self.numpy_generator.integers(256)",
        }
        body = ["x = self.inputs[index].clone()"]
        if data.augment:
            body.append('if self.split == "train":')
            body += [
                f"    x.view(-1)[{AUGMENTS.index(kind) + 1}] += {draws[kind]} / 512 - 0.25"
                for kind in data.augment
            ]
        sample = self._sample("x", "self.targets[index]")
        if iterable:
            lines += [
                "",
                "    def __iter__(self):",
                "        worker = torch.utils.data.get_worker_info()",
            ]
            lines.append(
                "        first, step = (worker.id, worker.num_workers) if worker else (0, 1)"
            )
            lines.append("        for index in range(first, len(self.inputs), step):")
            lines += [f"            {line}" for line in [*body, f"yield {sample}"]]
        else:
            lines += ["", "    def __len__(self):", "        return len(self.inputs)", ""]
            lines.append("    def __getitem__(self, index):")
            lines += [f"        {line}" for line in [*body, f"return {sample}"]]
        return "\n".join([*lines, "", "", "def make_dataset(split):", "    return Samples(split)"])

    def _helpers(self) -> str:
        program, blocks = self.program, []
        if program.data.ragged:
            inputs, targets = ("sample[0]", "sample[1]")
            if program.data.form != "pair":
                first, second = self._keys()
                inner = '["first"]' if program.data.form == "nested" else ""
                inputs, targets = f'sample["{first}"]{inner}', f'sample["{second}"]'
            made = self._sample("inputs", "targets")
            blocks.append(
                dedent(f"""
                def collate(samples):
                    rows = [{inputs} for sample in samples]
                    inputs = nn.utils.rnn.pad_sequence(rows, batch_first=True)
                    targets = torch.stack([torch.as_tensor({targets}) for sample in samples])
                    return {made}
            """)
            )
        if program.data.sampler == "by_length":
            blocks.append(
                dedent("""
                class Zigzag(Sampler):
                    def __init__(self, count):
                        self.count, self.epoch = count, 0

                    def set_epoch(self, epoch):
                        self.epoch = epoch

                    def __len__(self):
                        return self.count

                    def __iter__(self):
                        first = self.epoch % 2
                        return iter([*range(first, self.count, 2), *range(1 - first, self.count, 2)])
            """)
            )
        if program.optimizer.kind == "lookahead":
            loads = _LOADS_LENIENTLY if program.optimizer.lenient else _LOADS
            blocks.append(
                dedent("""
                class Lookahead(torch.optim.SGD):
                    def __init__(self, params, **options):
                        super().__init__(params, **options)
                        self.made = 0
                        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

                    @torch.no_grad()
                    def step(self, closure=None):
                        super().step()
                        self.made += 1
                        if self.made % 2 == 0:
                            fast = [p for group in self.param_groups for p in group["params"]]
                            for slow, weight in zip(self.slow, fast):
                                slow.lerp_(weight, 0.5)
                                weight.copy_(slow)

                    def state_dict(self):
                        return {**super().state_dict(), "made": self.made, "slow": [s.clone() for s in self.slow]}
            """).rstrip("\n ")
                + "\n"
                + indent(dedent(loads), "    ")
            )
        if program.optimizer.kind == "wide":
            blocks.append(
                dedent("""
                class Wide(torch.optim.SGD):
                    @torch.no_grad()
                    def step(self, closure=None):
                        for group in self.param_groups:
                            for weight in group["params"]:
                                if weight.grad is not None:
                                    state = self.state[weight]
                                    before = state.get("wide", torch.zeros_like(weight, dtype=torch.float32))
                                    state["wide"] = 0.9 * before + weight.grad
                                    weight -= group["lr"] * state["wide"]
            """)
            )
        blocks += [
            dedent(_STATE_CLASSES[state.kind])
            for state in program.state
            if state.kind in _STATE_CLASSES
        ]
        return "\n\n\n".join(dict.fromkeys(block.strip("\n") for block in blocks))

    # The runner

    def _runner(self) -> str:
        program = self.program
        splits = ("train", "val") if program.data.val else ("train",)
        lines = ["class Program(dl.Runner):"]
        if program.criterion.kind == "in_model" and program.model.per_position:
            lines += ["    shifts_labels = False", ""]
        lines += ["    def __init__(self, config):", "        super().__init__(config)"]
        lines.append(
            f"        self.datasets = {{split: make_dataset(split) for split in {splits!r}}}"
        )
        lines.append("        self.model = make_model()")
        if program.criterion.kind != "in_model":
            lines.append("        self.criterion = make_criterion()")
        if program.data.val:
            lines.append(
                '        self.metrics = {"mean": lambda pred, target: pred.float().flatten(1).mean(1)}'
            )
        lines += [f"        {line}" for line in self._optimizer()]
        for state in program.state:
            start = _STATE_START[state.kind] if state.where == "runner" else None
            if start:
                lines.append(f"        self.{state.kind} = {start}")
            if state.where == "evaluation":
                lines.append("        self.evaluated = 0")
        if any(event.kind == "delete" for event in program.events):
            lines.append("        self.warm = 1")
        lines += self._methods()
        return "\n".join(lines)

    def _optimizer(self) -> list[str]:
        optimizer, lines = self.program.optimizer, []
        if not optimizer.by_config:
            lines = [*self._built_optimizer()]
        schedule = self.program.settings.schedule
        if schedule is not None and schedule.kind == "lambda":
            lines.append(
                "self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 1 / (1 + n))"
            )
        return lines

    def _built_optimizer(self) -> list[str]:
        optimizer = self.program.optimizer
        names = {
            "sgd": "torch.optim.SGD",
            "momentum": "torch.optim.SGD",
            "nesterov": "torch.optim.SGD",
        }
        names |= {
            "adam": "torch.optim.Adam",
            "adamw": "torch.optim.AdamW",
            "adagrad": "torch.optim.Adagrad",
        }
        names |= {"rmsprop": "torch.optim.RMSprop", "lookahead": "Lookahead", "wide": "Wide"}
        options = {"lr": optimizer.lr, "weight_decay": optimizer.weight_decay}
        if optimizer.no_eps:
            options["eps"] = 0.0
        if optimizer.kind in ("momentum", "nesterov"):
            options["momentum"] = 0.9
        if optimizer.kind == "nesterov":
            options["nesterov"] = True
        if optimizer.fused:
            options["fused"] = True
        given = ", ".join(f"{name}={value!r}" for name, value in options.items())
        if optimizer.kind == "two":
            return [
                "head = list(self.model.head.parameters())",
                "rest = [p for n, p in self.model.named_parameters() if not n.startswith('head.')]",
                f'self.optimizer = {{"head": torch.optim.SGD(head, lr={optimizer.lr}), '
                f'"rest": torch.optim.Adam(rest, lr={optimizer.lr})}}',
            ]
        params = "self.model.parameters()"
        if self.program.criterion.kind == "own_module":
            params = "[*self.model.parameters(), *self.criterion.parameters()]"
        if not optimizer.groups:
            return [f"self.optimizer = {names[optimizer.kind]}({params}, {given})"]
        extra = (
            ", *self.criterion.parameters()" if self.program.criterion.kind == "own_module" else ""
        )
        return [
            'biases = [p for n, p in self.model.named_parameters() if "bias" in n]',
            f'others = [*(p for n, p in self.model.named_parameters() if "bias" not in n){extra}]',
            f'biases = {{"params": biases, "lr": {2 * optimizer.lr!r}, "weight_decay": 0.0}}',
            f'self.optimizer = {names[optimizer.kind]}([biases, {{"params": others}}], {given})',
        ]

    def _methods(self) -> list[str]:
        program, methods = self.program, []
        if program.criterion.sample_weights:
            methods.append(
                ["def batch_weight(self, data, target):", "    return target_weights(target).sum()"]
            )
        if program.data.sampler is not None:
            made = {
                "weighted": "WeightedRandomSampler([1.0 + index % 3 for index in range(len(dataset))], len(dataset))",
                "by_length": "Zigzag(len(dataset))",
            }[program.data.sampler]
            body = [
                '    if split != "train":',
                "        return super().build_datasampler(split, dataset)",
            ]
            methods.append(
                ["def build_datasampler(self, split, dataset):", *body, f"    return {made}"]
            )
        steps = self._train_step()
        if steps:
            methods.append(["def train_step(self, data):", *(f"    {line}" for line in steps)])
        if any(state.where == "evaluation" for state in program.state):
            body = ["    self.evaluated += 1", "    return super().evaluate_step(data)"]
            methods.append(["def evaluate_step(self, data):", *body])
        counted = [state for state in program.state if state.where != "evaluation"]
        if counted:
            factors = ["    if self.mode == 'train':"]
            for state in counted:
                holder = {"runner": "self", "dataset": 'self.datasets["train"]'}[state.where]
                read = (
                    _STATE_READ[state.kind].replace("self", holder, 1)
                    if state.where == "runner"
                    else f"{holder}.count"
                )
                factors.append(f"        loss = loss * (1 + 0.1 * (({read} - 1) % 3))")
            methods.append(
                [
                    "def compute_loss(self, pred, target):",
                    "    loss = super().compute_loss(pred, target)",
                    *factors,
                    "    return loss",
                ]
            )
        if program.stack.find_unused:
            methods.append(
                [
                    "def ddp_kwargs(self):",
                    '    return {**super().ddp_kwargs(), "find_unused_parameters": True}',
                ]
            )
        saves = [event for event in program.events if event.kind == "checkpoint"]
        if saves:
            body = [
                "    outcome = super().step()",
                f"    if self.train_state.global_step == {saves[0].at + 1}:",
            ]
            methods.append(
                ["def step(self):", *body, "        self.save_checkpoint()", "    return outcome"]
            )
        return [
            line
            for method in methods
            for line in ["", *(f"    {each}" if each else "" for each in method)]
        ]

    def _train_step(self) -> list[str]:
        program, lines = self.program, []
        for event in program.events:
            if event.kind in ("evaluate", "infer", "stop", "delete", "zero_grad", "schedule_step"):
                call = {
                    "delete": 'vars(self).pop("warm", None)',
                    "zero_grad": "self.optimizer.zero_grad()",
                    "schedule_step": "self.scheduler.step()",
                    "evaluate": "self.looked = self.evaluate()",
                    "infer": 'self.infer("val")',
                    "stop": "self.stop()",
                }[event.kind]
                lines += [f"if self.train_state.global_step == {event.at}:", f"    {call}"]
        for state in program.state:
            if state.where != "evaluation":
                step = (
                    _STATE_STEP[state.kind]
                    if state.where == "runner"
                    else 'self.datasets["train"].count += 1'
                )
                lines.append(step)
        if program.optimizer.kind == "two":
            lines.append("inputs, target = data")
            lines.append("for name in ('head', 'rest'):")
            lines.append("    with self.optimizing(name):")
            lines.append("        with self.forward_context():")
            lines.append("            pred = self.model(inputs)")
            lines.append("            loss = self.compute_loss(pred, target)")
            lines.append("        self.backward(loss)")
            lines.append("return pred, None")
        elif lines:
            lines.append("return super().train_step(data)")
        return lines

    # Settings

    def settings(self, directory: str = "run") -> dict[str, Any]:
        """Return the plain configuration."""
        program, settings = self.program, self.program.settings
        loader: dict[str, Any] = {}
        for name in (
            "batch_size",
            "global_batch_size",
            "micro_batch_size",
            "drop_last",
            "shuffle",
            "keyed",
        ):
            if getattr(settings, name) is not None:
                loader[name] = getattr(settings, name)
        if settings.num_workers:
            loader["num_workers"] = settings.num_workers
            if settings.persistent_workers:
                loader["persistent_workers"] = True
        made: dict[str, Any] = {
            "dir": directory,
            "seed": settings.seed,
            "log": False,
            "dataloader": loader,
        }
        for name in (
            "epochs",
            "steps",
            "max_grad_norm",
            "max_grad_value",
            "precision",
            "evaluate_interval",
            "patience",
        ):
            if getattr(settings, name) is not None:
                made[name] = getattr(settings, name)
        if settings.accum_steps != 1:
            made["accum_steps"] = settings.accum_steps
        if settings.score_max:
            made["score_name"] = "mean"
        if settings.skip_nonfinite_grad:
            made["skip_nonfinite_grad"] = True
        if settings.gradient_sum != "fast":
            made["gradient_sum"] = settings.gradient_sum
        if program.optimizer.by_config:
            made["optim"] = self._optim_section()
        if settings.schedule is not None:
            made["scheduler"] = self._scheduler_section()
        if settings.ema is not None:
            ema = settings.ema
            made["ema"] = {"enabled": True, "decay": ema.decay}
            if ema.warmup:
                made["ema"]["warmup"] = True
            if ema.interval != 1:
                made["ema"]["interval"] = ema.interval
            if ema.buffers != "copy":
                made["ema"]["buffers"] = ema.buffers
        checkpoint: dict[str, Any] = {}
        if settings.checkpoint_interval is not None:
            checkpoint["interval"] = settings.checkpoint_interval
        if settings.checkpoint_backend != "auto":
            checkpoint["backend"] = settings.checkpoint_backend
        if settings.async_mode is not None:
            checkpoint["async_mode"] = settings.async_mode
        if checkpoint:
            made["checkpoint"] = checkpoint
        stack = program.stack
        if stack.kind != "ddp":
            made["stack"] = stack.kind
        if stack.kind == "graph":
            made["compile"] = {"backend": "eager"}
        if stack.kind == "parallel":
            axes = {
                name: getattr(stack, name) for name in ("replicate", "shard", "tensor", "pipeline")
            }
            made["parallel"] = {"axes": {name: size for name, size in axes.items() if size != 1}}
        if stack.shard > 1 and program.model.chooses_blocks:
            # Ranks that gather different blocks may wait for each other: the log says for what.
            made["comm"] = {"init_timeout_seconds": 20.0, "train_timeout_seconds": 20.0}
        if stack.pipeline > 1:
            body = ["body"] if program.model.parts else []
            made["parallel"]["module_fqns_per_model_part"] = [["enter"], [*body, "head"]]
        return made

    def _optim_section(self) -> dict[str, Any]:
        optimizer = self.program.optimizer
        kind = "sgd" if optimizer.kind in ("momentum", "nesterov") else optimizer.kind
        section: dict[str, Any] = {
            "type": kind,
            "lr": optimizer.lr,
            "weight_decay": optimizer.weight_decay,
        }
        if optimizer.no_eps:
            section["eps"] = 0.0
        if optimizer.kind in ("momentum", "nesterov"):
            section["momentum"] = 0.9
        if optimizer.kind == "nesterov":
            section["nesterov"] = True
        if optimizer.groups:
            group = {"pattern": "bias", "lr_multiplier": 2.0, "weight_decay_multiplier": 0.0}
            section["param_groups"] = [group]
        return section

    def _scheduler_section(self) -> dict[str, Any]:
        schedule = self.program.settings.schedule
        assert schedule is not None
        section: dict[str, Any] = {}
        if schedule.kind in LIBRARY_SCHEDULES:
            section = {"type": schedule.kind}
            if schedule.warmup:
                section["warmup_steps"] = schedule.warmup
        elif schedule.kind == "step":
            section = {"type": "steplr", "step_size": 2, "gamma": 0.5}
        elif schedule.kind == "exponential":
            section = {"type": "exponentiallr", "gamma": 0.9}
        elif schedule.kind == "plateau":
            section = {"type": "reducelronplateau", "factor": 0.5, "patience": 0}
        if schedule.interval is not None:
            section["interval"] = schedule.interval
        return section

    def _main(self, directory: str) -> str:
        program = self.program
        text = "SETTINGS = " + pformat(self.settings(directory), width=100, sort_dicts=False)
        if program.data.ragged:
            text += '\nSETTINGS["dataloader"]["collate_fn"] = collate'
        train = ["runner.train()"]
        for event in program.events:
            if event.kind == "budget":
                unit = "steps" if program.settings.steps is not None else "epochs"
                text += f'\nBUDGET = SETTINGS["{unit}"]\nSETTINGS["{unit}"] = {event.at}'
                train += [f"runner.config.{unit} = BUDGET", "runner.train()"]
        body = "\n".join(f"    {line}" for line in train)
        text += f"\n\n\ndef run(runner):\n{body}"
        last = (
            '        print(runner.infer("val"))'
            if program.data.val
            else "        print(runner.results)"
        )
        text += '\n\n\nif __name__ == "__main__":\n    with Program(dl.RunnerConfig(SETTINGS)) as runner:\n'
        return text + f"        run(runner)\n{last}"


_STATE_START = {
    "int": "0",
    "float": "0.0",
    "list": "[]",
    "tuple": "()",
    "set": "set()",
    "dict": '{"count": 0}',
    "tensor": "torch.zeros(())",
    "array": "np.zeros(2)",
    "np_int": "np.int64(0)",
    "object": "Held()",
    "nested": '{"held": [Held()]}',
    "deque": "deque(maxlen=3)",
    "enum": "Phase.A",
    "bytes": 'b""',
    "generator": "torch.Generator().manual_seed(5)",
    "stateful": "Stateful()",
    "text": '""',
    "by_object": "{Held(): 0}",
}
_STATE_STEP = {
    "int": "self.int += 1",
    "float": "self.float += 1.0",
    "list": "self.list.append(len(self.list))",
    "tuple": "self.tuple = (*self.tuple, 1)",
    "set": "self.set.add(len(self.set))",
    "dict": 'self.dict["count"] += 1',
    "tensor": "self.tensor += 1",
    "array": "self.array[0] += 1",
    "np_int": "self.np_int = self.np_int + 1",
    "object": "self.object.count += 1",
    "nested": 'self.nested["held"][0].count += 1',
    "deque": "self.deque.append((self.deque[-1] + 1) if self.deque else 1)",
    "enum": "self.enum = Phase((self.enum.value + 1) % 3)",
    "bytes": 'self.bytes += b"x"',
    "generator": "self.drawn = torch.randint(1000, (), generator=self.generator).item()",
    "stateful": "self.stateful.count += 1",
    "text": 'self.text += "x"',
    "by_object": "self.by_object[next(iter(self.by_object))] += 1",
}
_STATE_READ = {
    "int": "self.int",
    "float": "self.float",
    "list": "len(self.list)",
    "tuple": "len(self.tuple)",
    "set": "len(self.set)",
    "dict": 'self.dict["count"]',
    "tensor": "self.tensor.item()",
    "array": "self.array[0]",
    "np_int": "int(self.np_int)",
    "object": "self.object.count",
    "nested": 'self.nested["held"][0].count',
    "deque": "self.deque[-1]",
    "enum": "self.enum.value",
    "bytes": "len(self.bytes)",
    "generator": "self.drawn",
    "stateful": "self.stateful.count",
    "text": "len(self.text)",
    "by_object": "sum(self.by_object.values())",
}
_HELD = """
    class Held:
        def __init__(self):
            self.count = 0
"""
_STATE_CLASSES = {
    "object": _HELD,
    "nested": _HELD,
    "by_object": _HELD,
    "enum": """
        class Phase(enum.Enum):
            A = 0
            B = 1
            C = 2
    """,
    "stateful": """
        class Stateful:
            def __init__(self):
                self.count = 0

            def state_dict(self):
                return {"count": self.count}

            def load_state_dict(self, state):
                self.count = state["count"]
    """,
}


def class_of(part: Part) -> str:
    """Return the kind of a part, or the variant of it that has a class of its own."""
    return "alternating" if part.kind == "sometimes" and part.flag else part.kind


def state_value(runner: Any, state: State) -> Any:
    """Return what a run has counted."""
    if state.where == "evaluation":
        return runner.evaluated
    starts_empty = {"deque": "deque", "generator": "drawn"}
    if (
        state.where == "runner"
        and state.kind in starts_empty
        and not getattr(runner, starts_empty[state.kind], None)
    ):
        return None  # each of its updates was skipped
    holder = runner if state.where == "runner" else runner.datasets["train"]
    return eval(
        _STATE_READ[state.kind] if state.where == "runner" else "self.count", {"self": holder}
    )


def _used_imports(body: str) -> str:
    """Return the imports that a body uses."""
    lines: list[str] = []
    for line in _IMPORTS.strip("\n").split("\n"):
        if line.startswith("from ") and line.count(",") + 1 > 1:
            head, names = line.split(" import ")
            used = [name for name in names.split(", ") if name in body]
            if used:
                lines.append(f"{head} import {', '.join(used)}")
            continue
        name = line.split()[-1] if line else ""
        if not line or f"{name}." in body or f"{name}(" in body:
            lines.append(line)
    while lines and not lines[0]:
        lines.pop(0)
    return "\n".join(lines)


def render(program: Program, directory: str = "run") -> str:
    """Return the script of a program."""
    return Script(program).text(directory)
