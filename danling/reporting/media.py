"""Images, histograms, texts and tables for trackers, each as the tracker's own kind.

The tracker classes take their methods from here. A tracker of the user's may have methods of these names, `log_image(name, pixels, step)`
and so on; it is given what `pixels_of`, `numbers_of` and `Rows` return.
"""

from __future__ import annotations

import html
import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

logger = logging.getLogger("danling")

KINDS = ("log_image", "log_histogram", "log_text", "log_table")
"""Methods of a tracker that takes media."""

# The default of `wandb.Histogram`.
_BINS = 64


class Rows(NamedTuple):
    """A table: the names of its columns, and its rows."""

    columns: list[str]
    rows: list[list[Any]]


def pixels_of(image: Any) -> Any:
    """Return an image as a NumPy array of uint8, (height, width, 3), or 4 with transparency; grey becomes three equal channels.

    Args:
        image: A tensor (channels, height, width) or (height, width); an array (height, width, channels) or (height, width); or an image of
            PIL. Floating values are in [0, 1], others in [0, 255].

    Raises:
        ValueError: If it has another shape, or values outside.
    """
    import numpy
    from torch import Tensor

    if isinstance(image, Tensor):
        tensor = image.detach().cpu()
        # NumPy has no bfloat16.
        tensor = tensor.float() if tensor.is_floating_point() else tensor
        array = (tensor.permute(1, 2, 0) if tensor.ndim == 3 else tensor).numpy()
    else:
        array = numpy.asarray(image)
    if array.ndim == 2:
        array = array[:, :, None]
    if array.ndim != 3 or array.shape[2] not in (1, 3, 4) or 0 in array.shape:
        raise ValueError(
            "Expected an image: a tensor (channels, height, width) or an array (height, width, channels), with 1, 3 or 4 channels, or one "
            f"of PIL. Received: shape {tuple(getattr(image, 'shape', array.shape))}. Log the images of a batch one by one, or as a grid."
        )
    if array.dtype == bool:
        array = array * 255
    is_floating = numpy.issubdtype(array.dtype, numpy.floating)
    low, high = array.min(), array.max()
    largest = 1 if is_floating else 255
    # In this form, so that NaN is refused too.
    if not (low >= 0 and high <= largest):
        raise ValueError(
            f"Expected values of an image in [0, {largest}], since its dtype is {array.dtype}. Received: "
            f"{low:.6g} to {high:.6g}. Scale them, for example by (image - image.min()) / (image.max() - image.min())."
        )
    if is_floating:
        array = (array * 255).round()
    array = array.astype(numpy.uint8)
    return array.repeat(3, axis=2) if array.shape[2] == 1 else array


def numbers_of(values: Any) -> Any:
    """Return the finite numbers in a tensor, an array or a list, as a NumPy array of float64 of one dimension."""
    import torch

    flat = torch.as_tensor(values).detach().cpu().double().reshape(-1)
    # A histogram has no bin for the others, and NumPy's fails on them.
    return flat[torch.isfinite(flat)].numpy()


def rows_of(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Rows:
    """Return a table of plain values.

    Raises:
        ValueError: If a row has another length than there are columns.
    """
    wrong = next((number for number, row in enumerate(rows) if len(row) != len(columns)), None)
    if wrong is not None:
        raise ValueError(
            f"Expected rows of {len(columns)} values, one a column. Received: {len(rows[wrong])} values in row {wrong}."
        )
    plain = [[value.item() if hasattr(value, "item") else value for value in row] for row in rows]
    return Rows([str(column) for column in columns], plain)


class TensorBoardMedia:
    """Media of TensorBoard."""

    _writer: Any

    def log_image(self, name: str, pixels: Any, step: int) -> None:
        """Write an image."""
        self._writer.add_image(name, pixels, step, dataformats="HWC")

    def log_histogram(self, name: str, numbers: Any, step: int) -> None:
        """Write a histogram."""
        self._writer.add_histogram(name, numbers, step)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Write a text, which TensorBoard reads as Markdown."""
        self._writer.add_text(name, text, step)

    def log_table(self, name: str, table: Rows, step: int) -> None:
        """Write a table of Markdown."""
        self._writer.add_text(name, _markdown(table), step)


class WandbMedia:
    """Media of Weights & Biases."""

    run: Any

    def log_image(self, name: str, pixels: Any, step: int) -> None:
        """Send an image."""
        import wandb

        self.run.log({name: wandb.Image(pixels)}, step=step)

    def log_histogram(self, name: str, numbers: Any, step: int) -> None:
        """Send a histogram."""
        import wandb

        self.run.log({name: wandb.Histogram(np_histogram=_histogram(numbers))}, step=step)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Send a text."""
        import wandb

        self.run.log({name: wandb.Html(f"<pre>{html.escape(text)}</pre>", inject=False)}, step=step)

    def log_table(self, name: str, table: Rows, step: int) -> None:
        """Send a table."""
        import wandb

        self.run.log({name: wandb.Table(columns=[*table.columns], data=table.rows)}, step=step)


class MlflowMedia:
    """Media of MLflow, which are artifacts of the run but for images. A store that does not take one ends no training: it is logged."""

    _client: Any
    run_id: str

    def log_image(self, name: str, pixels: Any, step: int) -> None:
        """Send an image."""
        self._send("log_image", pixels, key=_file_name(name), step=step)

    def log_histogram(self, name: str, numbers: Any, step: int) -> None:
        """Send a histogram, as its counts and the edges of its bins."""
        counts, edges = _histogram(numbers)
        content = {"counts": counts.tolist(), "edges": edges.tolist()}
        self._send("log_dict", content, f"histograms/{_file_name(name)}/{step:012d}.json")

    def log_text(self, name: str, text: str, step: int) -> None:
        """Send a text."""
        self._send("log_text", text, f"texts/{_file_name(name)}/{step:012d}.txt")

    def log_table(self, name: str, table: Rows, step: int) -> None:
        """Send a table, in the form of MLflow's own."""
        content = {"columns": table.columns, "data": table.rows}
        self._send("log_dict", content, f"tables/{_file_name(name)}/{step:012d}.json")

    def _send(self, method: str, *arguments: Any, **options: Any) -> None:
        try:
            getattr(self._client, method)(self.run_id, *arguments, **options)
        except Exception as error:
            logger.warning("MLflow has not taken %s: %s", method.removeprefix("log_"), error)


class TrackioMedia:
    """Media of trackio."""

    run: Any

    def log_image(self, name: str, pixels: Any, step: int) -> None:
        """Send an image."""
        import trackio

        self.run.log({name: trackio.Image(pixels)}, step=step)

    def log_histogram(self, name: str, numbers: Any, step: int) -> None:
        """Send a histogram."""
        import trackio

        self.run.log({name: trackio.Histogram(np_histogram=_histogram(numbers))}, step=step)

    def log_text(self, name: str, text: str, step: int) -> None:
        """Send a text, which trackio reads as Markdown."""
        import trackio

        self.run.log({name: trackio.Markdown(text)}, step=step)

    def log_table(self, name: str, table: Rows, step: int) -> None:
        """Send a table."""
        import trackio

        self.run.log({name: trackio.Table(columns=table.columns, data=table.rows)}, step=step)


def _histogram(numbers: Any) -> tuple[Any, Any]:
    import numpy

    return numpy.histogram(numbers, bins=_BINS)


def _markdown(table: Rows) -> str:
    lines = [table.columns, ["---"] * len(table.columns), *table.rows]
    cells = [
        [str(value).replace("|", "\\|").replace("\n", " ") for value in line] for line in lines
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _file_name(name: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in name)
