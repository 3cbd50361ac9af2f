"""Runs the script of a program and records what the run leaves; each program runs in a fork, with a hard end."""

from __future__ import annotations

import contextlib
import gc
import linecache
import logging
import math
import os
import pickle
import resource
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from support.patience import patience
from support.process_tree import die_with_parent, kill_tree
from support.processes import run_outcomes, server_processes
from torch import Tensor, nn
from torch.nn import functional as F

from danling.utils.observers import Observer

from .planted_form import active
from .script import render, state_value
from .spec import Evaluation, MicroBatch, Program, Record, Update

PLACE = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


# A run


def namespace(program: Program, directory: str = "run") -> dict[str, Any]:
    """Execute the script of a program as a module, and return its names."""
    text = render(program, directory)
    file = f"<program {abs(hash(text))}>"
    # Tracebacks and `inspect` read the source from here.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    names: dict[str, Any] = {"__name__": "program", "__file__": file}
    module = type(sys)("program")
    module.__dict__.update(names)
    sys.modules["program"] = module
    exec(compile(text, file, "exec"), module.__dict__)
    return module.__dict__


UNSAVED = "No checkpoint of this run contains"
"""How the line of the log begins that names what is not saved."""


class Warned(logging.Handler):
    """Keeps the warnings of the library and of torch, and the line that names what is not saved."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.levelno >= logging.WARNING or text.startswith(UNSAVED):
            self.lines.append(text)


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    handler, log = Warned(), logging.getLogger("danling")
    log.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as others:
            warnings.simplefilter("default")
            yield handler.lines
        handler.lines += [f"{each.category.__name__}: {each.message}" for each in others]
    finally:
        log.removeHandler(handler)


class _Sizes(Observer):
    """Is told how many samples the next micro-batch has; not for padding."""

    def __init__(self) -> None:
        self.samples = 0

    def micro_batch_started(self, data: object, *, read: object, samples: float) -> None:
        self.samples = int(samples)


def copied(data: Any) -> Any:
    if isinstance(data, Tensor):
        return _whole(data.detach()).clone()
    if isinstance(data, Mapping):
        return {name: copied(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return tuple(copied(item) for item in data)
    return data


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def weights_of(runner: Any) -> dict[str, Tensor]:
    """Return copies of the parameters and buffers of model and criterion by name; of shards the whole."""
    found: dict[str, Tensor] = {}
    criterion = runner.criterion
    holders = [("", runner.unwrapped_model)]
    if isinstance(criterion, nn.Module):
        holders.append(("criterion.", criterion))
    for prefix, module in holders:
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            found[prefix + name] = _whole(tensor.detach()).clone()
    return found


def averages_of(runner: Any) -> dict[str, Tensor]:
    if runner.ema is None:
        return {}
    return {name: _whole(tensor.detach()).clone() for name, tensor in runner.ema.weights.items()}


def recorded(base: Any, record: Record, *, kill_at: int | None = None) -> Any:
    """Return a subclass of a program's runner that keeps a record by overriding what users override."""
    sizes = _Sizes()
    window: dict[str, Any] = {"before": None, "count": 0}

    class Recorded(base):  # type: ignore[misc]
        def train_step(self, data: Any) -> Any:
            if window["count"] == 0:
                window["before"] = weights_of(self)
                window["epoch"] = self.train_state.epoch
                window["rates"] = [float(group["lr"]) for group in self.optimizer.param_groups]
            window["count"] += 1
            samples, sizes.samples = sizes.samples, 0
            micro = MicroBatch(self.rank, copied(data), samples, [])
            record.micro_batches.append(micro)
            with drawing(self.unwrapped_model, micro.draws):
                returned = super().train_step(data)
            if isinstance(returned[1], Tensor):
                micro.loss = float(returned[1].detach())
            return returned

        def optimizer_step(self) -> None:
            if kill_at is not None and self.train_state.global_step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            super().optimizer_step()

        def step(self) -> Any:
            outcome = super().step()
            weight = float(outcome.weight)
            update = Update(
                micro_batches=window["count"],
                committed=bool(outcome.committed),
                grad_norm=None if outcome.grad_norm is None else float(_whole(outcome.grad_norm)),
                loss=float(outcome.loss_sum) / weight if weight else None,
                rates=window["rates"],
                before=window["before"],
                after=weights_of(self),
                averages=averages_of(self),
                epoch=window["epoch"],
            )
            record.updates.append(update)
            window["count"] = 0
            return outcome

    Recorded.__name__ = Recorded.__qualname__ = base.__name__
    for hook in ("train_step", "step", "optimizer_step"):
        # The library asks whether a hook is the program's own, and is to take the same road as without the record.
        getattr(Recorded, hook).__module__ = getattr(base, hook).__module__
    Recorded.sizes_of_record = property(lambda self: sizes)
    return Recorded


@contextlib.contextmanager
def drawing(model: nn.Module, draws: list[Tensor]) -> Iterator[None]:
    """Note what the modules that draw will draw: the same draw is made first, and the stream put back."""

    def note(module: nn.Module, given: tuple[Any, ...]) -> None:
        if not module.training:
            return
        own = getattr(module, "generator", None)
        generator = torch.default_generator if own is None else own
        state = generator.get_state()
        (x,) = given
        if isinstance(module, nn.Dropout):
            draws.append(F.dropout(torch.ones_like(x), module.p, True))
        else:
            draws.append(torch.randn(x.shape, generator=own, dtype=x.dtype))
        generator.set_state(state)

    found = [
        each
        for each in model.modules()
        if isinstance(each, nn.Dropout) or type(each).__name__ == "Noise"
    ]
    handles = [each.register_forward_pre_hook(note) for each in found]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run(
    program: Program,
    directory: Path,
    *,
    record: bool = True,
    resume: bool = False,
    trains: bool = True,
    kill_at: int | None = None,
    **settings: Any,
) -> Record:
    """Run the script of a program in this process, or only construct it, and return its record. `settings` replace some of the script."""
    left = Record()
    with warned() as lines:
        try:
            # Not in the repository of the tests, whose state each run would read.
            with active(), contextlib.chdir(directory.parent):
                _run(
                    program,
                    directory,
                    left,
                    record=record,
                    resume=resume,
                    trains=trains,
                    kill_at=kill_at,
                    **settings,
                )
        except Exception as error:
            left.refused = f"{type(error).__name__}: {error}"
            left.refused_after = sum(update.committed for update in left.updates)
            left.trace = traceback.format_exc()
    left.named = list(lines)
    return left


def _run(
    program: Program,
    directory: Path,
    left: Record,
    *,
    record: bool,
    resume: bool,
    trains: bool,
    kill_at: int | None,
    **settings: Any,
) -> None:
    import danling as dl

    names = namespace(program, str(directory))
    kind = recorded(names["Program"], left, kill_at=kill_at) if record else names["Program"]
    config = dl.RunnerConfig(names["SETTINGS"])
    config.merge(settings)
    if resume:
        config.auto_resume = True
    with kind(config) as runner:
        if record:
            runner.observers.append(runner.sizes_of_record)
        left.initial = weights_of(runner)
        if not trains:
            return
        names["run"](runner)
        left.final, left.averages = weights_of(runner), averages_of(runner)
        left.steps = runner.train_state.global_step
        read_results(runner, left)
        if "val" in runner.datasets:
            predicted = [
                each["logits"] if isinstance(each, dict) else each for each in runner.infer("val")
            ]
            left.predictions = torch.stack([each.float() for each in predicted])
        left.state = state_of(runner)
        left.state["counts"] = [state_value(runner, state) for state in program.state]
        left.state["has_warm"] = hasattr(runner, "warm")
    read_checkpoint(directory, left)


def state_of(runner: Any) -> dict[str, Any]:
    """Return the state of a run, less what tells attempts apart."""
    payload = copied(runner.state_dict())
    payload.pop("runner", None)
    payload["state"].pop("elastic", None)
    # Whether batches have a target, which is learnt only where `train_step` is the library's.
    payload["state"].pop("bare", None)
    return payload  # type: ignore[no-any-return]


def read_results(runner: Any, left: Record) -> None:
    made = {index: index for index in runner.results}
    if runner.config.epochs is not None:
        # The updates that were committed up to the end of each pass.
        made = {
            index: sum(update.committed for update in left.updates if update.epoch < index)
            for index in made
        }
    for index, result in runner.results.items():
        after = made[index]
        for split, figures in result.items():
            if split.startswith("train"):
                left.pass_losses.append(float(figures.get("loss", math.nan)))
            else:
                left.evaluations.append(
                    Evaluation(split, int(after), {k: float(v) for k, v in figures.items()})
                )


def read_checkpoint(directory: Path, left: Record) -> None:
    file = directory / "checkpoints" / "latest.pth"
    if file.is_file():
        payload = torch.load(file, weights_only=True)
        left.checkpoint = {
            "model": payload["model"],
            "ema": (payload.get("ema") or {}).get("weights", {}),
        }


# Several processes


class RankRefused(Exception):
    """A rank was refused; with the record that it has left."""


def run_rank(text: str, place: str, options: dict[str, Any]) -> Record:
    """Run a program as one rank of several, which have `RANK` and the like in the environment."""
    _be_quiet()
    left = run(Program.from_json(text), Path(place), **options)
    if left.refused is not None:
        raise RankRefused(left)
    return left


def run_ranks(program: Program, place: Path, *, timeout: float = 120.0, **options: Any) -> Record:
    """Run a program on its processes, and return the record of rank 0 with the micro-batches of all."""
    options = {**options, "record": False} if program.stack.pipeline > 1 else options
    given = program.to_json(), str(place), options
    outcomes = run_outcomes(run_rank, *given, world_size=program.stack.ranks, timeout=timeout)
    outcomes = sorted(outcomes, key=lambda outcome: outcome.rank)
    records = [
        each.error.args[0] if isinstance(each.error, RankRefused) else each.value
        for each in outcomes
    ]
    # The other ranks see the connection break.
    refused = [
        record
        for record in records
        if record and record.refused and "Connection" not in record.refused
    ]
    failed = [each for each in outcomes if each.error is not None]
    died = [
        each
        for each in failed
        if not isinstance(each.error, RankRefused) and (each.exit_code or 0) < 0
    ]
    if failed and not refused:
        first = (died or failed)[0]
        raise Died(
            f"rank {first.rank}: {first.error}; ended with {first.exit_code}\n{first.traceback}"
        )
    if refused:
        left: Record = refused[0]
        readers = [record for record in records[: program.stack.readers] if record]
        left.micro_batches = [micro for record in readers for micro in record.micro_batches]
        left.named = [line for record in records if record for line in record.named]
        return left
    for record in records:
        # Each rank of a pipeline has its own stages.
        records[0].initial |= record.initial | records[0].initial
        records[0].final |= record.final | records[0].final
    # Ranks of `tensor` and `pipeline` read the same samples.
    readers = records[: program.stack.readers]
    records[0].micro_batches = [micro for record in readers for micro in record.micro_batches]
    whole: Record = records[0]
    return whole


# Forks


class Died(Exception):
    """A fork died or did not end."""


def in_fork(function: Callable[..., Any], *args: Any, timeout: float = 60.0) -> Any:
    """Return what a function returns in a fork; `Died` where it raises, hangs or is killed."""
    ours, theirs = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        _be_fork(theirs, function, args)
    os.close(theirs)
    try:
        return _received(ours, pid, min(patience(timeout), 4 * timeout))
    finally:
        os.close(ours)


def _be_quiet() -> None:
    """Write to the file that `EXPLORE_OUTPUT` names, or nowhere."""
    quiet = os.open(
        os.environ.get("EXPLORE_OUTPUT", os.devnull), os.O_WRONLY | os.O_CREAT | os.O_APPEND
    )
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    sys.stdout = open(1, "w", 1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, closefd=False)  # noqa: SIM115


def _be_fork(pipe: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    code = 1
    try:
        # A full collection, of which every run makes some, would copy all that the search has loaded.
        gc.freeze()
        die_with_parent()
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _be_quiet()
        torch.set_num_threads(1)
        message = pickle.dumps(("value", function(*args)))
        code = 0
    except BaseException as error:
        message = pickle.dumps(
            ("error", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
        )
    with contextlib.suppress(BrokenPipeError):
        view = memoryview(message)
        while view:
            view = view[os.write(pipe, view) :]
    os._exit(code)


def _received(pipe: int, pid: int, timeout: float) -> Any:
    end, parts, hung = time.monotonic() + timeout, [], False
    while True:
        ready, _, _ = select.select([pipe], [], [], max(end - time.monotonic(), 0))
        if not ready:
            hung = True
            kill_tree(pid)
            break
        part = os.read(pipe, 1 << 20)
        if not part:
            break
        parts.append(part)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)  # workers of its loaders
    if hung:
        raise Died(f"did not end in {timeout:g} s")
    if not parts:
        raise Died(f"ended with {os.waitstatus_to_exitcode(status)}")
    kind, value = pickle.loads(b"".join(parts))
    if kind == "error":
        raise Died(value)
    return value


def processor_seconds() -> float:
    """Return what this process, its forks that have ended and the ranks have used of the processor; of killed loaders' workers nothing."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(each.ru_utime + each.ru_stime for each in used)
    for server in server_processes():
        # User and system time of the server, then those of the ranks that it has waited for.
        fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
        seconds += sum(int(ticks) for ticks in fields[11:15]) / os.sysconf("SC_CLK_TCK")
    return seconds


@contextlib.contextmanager
def directory() -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="explore-", dir=PLACE))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


def without_events(program: Program, *kinds: str) -> Program:
    """Return a program without events of some kinds; of all kinds if none is named."""
    return replace(
        program, events=tuple(each for each in program.events if kinds and each.kind not in kinds)
    )
