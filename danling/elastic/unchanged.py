"""What an update must leave as it is until its step: weights and large attributes, which are not put back where it is made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from danling.training.attributes import REMEMBERED_BYTES
from danling.utils.trees import tensors

if TYPE_CHECKING:
    from danling.runners.torch_runner import TorchRunner
    from danling.training.attributes import KeptAttributes

_WATCHED = 2
"""Updates of a process before which the weights are digested. Later ones follow where one has written to them."""


class UnchangedUntilStep:
    """Finds weights and large attributes that a program changes in place before the step of the optimizer.

    torch counts what is written to a tensor, but not what is written through `.data`. An evaluation with averaged weights writes to them
    and puts them back: where something was written, digests tell whether they differ.

    Args:
        runner: The runner.
        attributes: Know which attributes are not put back.
        digest: Returns a digest of the weights.
    """

    def __init__(
        self, runner: TorchRunner, attributes: KeptAttributes, digest: Callable[[], str]
    ) -> None:
        self._runner, self._attributes, self._digest = runner, attributes, digest
        self._parameters: list[nn.Parameter] = [*runner.unwrapped_model.parameters()]
        self._versions: list[int] = []
        self._large: list[tuple[str, Tensor, int]] = []
        self._before: str | None = None
        """Digest of the weights where the open update began; `None` where it is not known."""
        self._watched = 0

    def note(self) -> None:
        """Note where an update begins what it must leave as it is."""
        self._versions = [parameter._version for parameter in self._parameters]
        self._before = self._digest() if self._watched < _WATCHED else None
        self._watched += 1
        self._large = []
        for name in sorted(self._attributes.too_large):
            found = tensors(getattr(self._runner, name, None))
            # Those made in inference mode have no version.
            counted = [tensor for _, tensor in found if not tensor.is_inference()]
            self._large += [(f"self.{name}", tensor, tensor._version) for tensor in counted]

    def note_evaluation(self) -> None:
        """Digest the weights before an evaluation within an update, which may write averaged ones to them."""
        if self._before is None and not self._is_written():
            self._before = self._digest()

    def check(self, *, is_made_again: bool) -> None:
        """Refuse an update that has changed it. Called before the step, and where the update is taken back.

        Raises:
            ValueError: If it has.
        """
        changed = {name for name, tensor, version in self._large if tensor._version != version}
        is_written = self._is_written()
        if is_written:
            self._watched = 0
        differs = is_written and is_made_again
        if self._before is not None:
            differs = self._digest() != self._before
        if differs:
            changed.add("the weights of the model")
        if changed:
            raise ValueError(
                f"Expected weights, and attributes beyond {REMEMBERED_BYTES >> 20} MiB in sum, that change after the step of the "
                "optimizer only, with elastic.enabled: an update that is made again would change them twice. Received: "
                f"{', '.join(sorted(changed))}, changed in place before the step. Change them in step() after super().step(), or unset "
                "elastic.enabled."
            )

    def _is_written(self) -> bool:
        """Whether something was written to the weights since the update began."""
        return self._versions != [parameter._version for parameter in self._parameters]
