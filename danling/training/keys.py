"""Random numbers by place: the streams are seeded where a pass, a micro-batch, an optimizer step or an evaluation begins."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, cast
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from danling.data import derive_seed, mix_seed, seed_streams
from danling.data.randomness import (
    LEAVES,
    Generators,
    generator_state,
    seed_device,
    seed_generator,
    seed_host_streams,
    seed_torch,
    set_generator_state,
)
from danling.utils.tensors import canonical_name, is_sharded

from .object_parts import OF_MODULE
from .user_code import runs_user_code

if TYPE_CHECKING:
    from contextlib import ExitStack

    from danling.runners.base_runner import BaseRunner
    from danling.runners.torch_runner import TorchRunner

    from .session import TrainingSession

try:
    import numpy
except ImportError:
    numpy = None  # type: ignore[assignment]


class RandomKeys:
    """Seeds the streams of torch, NumPy, `random` and the device by the place of the next computation.

    A key is made of the seed of the run and of where the run is, never of a state that a stream was left in. So a resumed run draws
    what the uninterrupted one draws, and noise does not depend on the rank that draws it. `docs/guides/data.md` has the table of keys.
    """

    def __init__(
        self, runner: BaseRunner, session: TrainingSession, extensions: Sequence[object]
    ) -> None:
        self._runner = runner
        self._session = session
        self._extensions = extensions
        self.key = 0
        """Key of the open micro-batch or of the batch that is evaluated."""
        self._ordinal = self._phase = 0
        self._places: dict[int, tuple[int, ...]] = {}
        self.in_update = False
        """Whether an optimizer step of the runner is under way."""
        self.has_stepped = False
        """Whether an optimizer has begun a step there since the open update began."""
        self.called: tuple[object, ...] = ()
        """What an update calls, other than model, criterion, optimizer and schedule; `None` for each that the run does not have."""
        self._generators: list[tuple[Any, int]] | None = None
        self._only_torch = False
        """Whether nothing in an update of the loop under way can draw from NumPy's stream or from that of `random`."""

    # Training

    def between_updates(self) -> None:
        """Seed where a run begins or is restored, and around the evaluations of a loop: `(seed, "pass", updates attempted)`."""
        seed_streams(self._key("pass"), self._runner.device)

    def begin_pass(self, split: str) -> None:
        """Seed where a pass begins, or goes on after a restore: `(seed, "pass", split, pass)`."""
        self._look_for_generators()
        runner = cast("TorchRunner", self._runner)  # which alone has passes
        self._only_torch = not runs_user_code(runner, (*self.called, *self._extensions))
        base, number = _base(self._runner.seed, "pass", split), self._runner.source(split).epoch
        seed_streams(mix_seed(base, number), self._runner.device)

    def begin_micro_batch(self, data: object, place: tuple[int, ...], ordinal: int) -> None:
        """Seed for a micro-batch: `(seed, "train", updates attempted, *place)`, and the replica group."""
        runner, placement = self._runner, self._runner.placement
        if ordinal == 0:
            self._places.clear()
        # A closure of the optimizer runs its micro-batches again, with their first noise. Batches of a loop by hand have no place.
        place = (
            place
            or (self._places.get(id(data)) if self.in_update else None)
            or (placement.data.rank, ordinal)
        )
        # The batches of an update are alive until it ends, so their ids are theirs.
        self._places[id(data)] = place
        train, base = runner.state.train, _base(runner.seed, "train", placement.replica_group[0])
        key = mix_seed(
            base, train.global_step + train.skipped_updates, *place, *placement.forward_place
        )
        self.key, self._ordinal, self._phase = key, ordinal, 0
        if self._generators is None or self._generators:
            self._seed_generators()
        # Seeding NumPy and `random` costs more than seeding torch: left out where no code of the user's could draw.
        only_torch = self._only_torch and self._session.running
        if only_torch and type(data) is not Tensor:
            # A tensor of a class of the user's runs its code.
            only_torch = type(data) in (tuple, list) and {
                *map(type, cast("Sequence[object]", data))
            } == {Tensor}
        if only_torch:
            seed_torch(key, runner.device)
            return
        seed_host_streams(key)
        if runner.device.type != "cpu":
            seed_device(key, runner.device)

    def begin_update(self, name: str = "update") -> None:
        """Seed torch's streams for clipping and the step of the runner's optimizer: `(seed, "update", updates attempted)`.

        Ranks with copies of the same parameters get the same key. The name is `step` for a `step` of the program's, which may draw before.
        """
        runner, train = self._runner, self._runner.state.train
        attempted = train.global_step + train.skipped_updates
        place = runner.placement.update_place
        if self._session.in_step:
            # The update of one of several optimizers, whose noise is not that of the others.
            place = (self._phase, *place)
        key = mix_seed(_base(runner.seed, name), attempted, *place)
        torch.default_generator.manual_seed(key)
        if runner.device.type != "cpu":
            seed_device(key, runner.device)

    def seed_early_steps(self, own: object, closers: ExitStack) -> None:
        """Seed for each optimizer step within `train_step`, and for what follows in the micro-batch.

        Refuses a step there of the runner's own optimizer, but for that of a phase: the runner has not weighed its gradient yet.
        """
        session = self._session
        after_hooks: list[RemovableHandle] = []
        refused = {id(own), *(id(member) for member in getattr(own, "optimizers", ()))}

        def before(optimizer: Optimizer, *_: Any) -> None:
            if self.in_update:
                self.has_stepped = True
            if session.in_step:
                if id(optimizer) in refused and not self.in_update:
                    raise RuntimeError(
                        "Expected `train_step` to leave the update to the runner, which weighs, checks and clips the gradient. Received: a "
                        f"step of {type(optimizer).__name__} inside of it. Remove optimizer.step() or self.step(), which follows by "
                        "itself; `with self.optimizing(name)` steps one of several optimizers, and your own update goes into "
                        "`optimizer_step`."
                    )
                # Ranks with shards of one parameter must draw different noise, ranks with copies the same.
                shards = any(
                    is_sharded(each) for group in optimizer.param_groups for each in group["params"]
                )
                place = self._runner.placement.update_place if shards else ()
                place = (self._ordinal, self._phase, *place)
                seed_torch(self._key("early update", place=place), self._runner.device)
                if not after_hooks:
                    # Only for programs with such steps: it is called in each update. torch calls it after this step already.
                    after_hooks.append(register_optimizer_step_post_hook(after))
                    closers.callback(after_hooks[0].remove)

        def after(*_: Any) -> None:
            if session.in_step:
                self._phase += 1
                seed_streams(mix_seed(self.key, self._phase), self._runner.device)

        closers.callback(register_optimizer_step_pre_hook(before).remove)

    # Evaluation

    def begin_batch(self, verb: str, split: str, place: tuple[int, ...]) -> None:
        """Seed for a batch that is evaluated or predicted: `(seed, verb, split, updates attempted, *place)`."""
        self.key = self._key(verb, split, place=(*place, *self._runner.placement.forward_place))
        self._seed_generators()
        seed_streams(self.key, self._runner.device)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Evaluate inside, wherever that is: afterwards the streams and the generators of modules are what they were before."""
        self._look_for_generators()
        # The generators of modules are put back too: an evaluation within an update must not move them.
        key, kept = self.key, [(each, generator_state(each)) for each, _ in self._generators or ()]
        with preserved_streams(self._runner.device):
            try:
                yield
            finally:
                self.key = key
                for generator, state in kept:
                    set_generator_state(generator, state)

    # Generators that modules hold

    def _look_for_generators(self) -> None:
        """Look for generators in attributes of model and criterion: the forward seeds them, as the reading those of a dataset."""
        runner: Any = self._runner
        roots = {
            f"{root}.{canonical_name(name)}.{attribute}": value
            for root, module in (("model", runner.unwrapped_model), ("criterion", runner.criterion))
            if isinstance(module, nn.Module)
            for name, part in module.named_modules()
            for attribute, value in vars(part).items()
            if attribute not in OF_MODULE and not isinstance(value, LEAVES)
        }
        # Most models have nothing to look at.
        found = Generators(roots).found if roots else {}
        self._generators = [(generator, crc32(path.encode())) for path, generator in found.items()]

    def _seed_generators(self) -> None:
        if self._generators is None:
            self._look_for_generators()
        for generator, salt in self._generators or ():
            seed_generator(generator, mix_seed(self.key, salt))

    def _key(self, *parts: int | str, place: tuple[int, ...] = ()) -> int:
        """Return the key `(seed, *parts, updates attempted, *place)`."""
        train = self._runner.state.train
        return mix_seed(
            _base(self._runner.seed, *parts), train.global_step + train.skipped_updates, *place
        )


@lru_cache(maxsize=256)
def _base(*parts: int | str) -> int:
    return derive_seed(*parts)


@contextmanager
def preserved_streams(device: torch.device) -> Iterator[None]:
    """Put the streams of torch, NumPy, `random` and a device back on exit."""
    put_back: list[Callable[[], object]] = [
        partial(torch.default_generator.set_state, torch.default_generator.get_state()),
        partial(random.setstate, random.getstate()),
    ]
    if numpy is not None:
        put_back.append(partial(numpy.random.set_state, numpy.random.get_state()))
    if device.type != "cpu":
        module = torch.get_device_module(device)
        put_back.append(partial(module.set_rng_state, module.get_rng_state(device), device))
    try:
        yield
    finally:
        for each in put_back:
            each()
