"""The operations that `danling doctor --determinism` makes again and again. Not meant to be called by hand.

python -m danling.cli.repeatability_job --device cpu --threads 2 --repeats 10 [--only NAME ...] [--deterministic]
python -m danling.cli.repeatability_job --describe

Prints one line of JSON an operation: its name, and the digest of outputs and gradients of each repetition, or the error. All of
them begin with the same inputs, whatever process computes them. `--describe` prints the devices and the number of threads.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional

from danling.data.randomness import deterministic_kernels
from danling.training.frozen import digest_of

ROWS, PLACES, WIDTH = 60_000, 50, 16
"""Many values go to few places, so that several threads meet there."""


class Draws:
    """Inputs of operations: drawn on the CPU, so that they are the same everywhere.

    Args:
        device: Where they go.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._generator = torch.Generator().manual_seed(0)

    def values(self, *shape: int) -> Tensor:
        """Return normal values that ask for a gradient."""
        return torch.randn(*shape, generator=self._generator).to(self.device).requires_grad_()

    def places(self, rows: int = ROWS, low: int = 0, high: int = PLACES) -> Tensor:
        """Return random integers."""
        return torch.randint(low, high, (rows,), generator=self._generator).to(self.device)

    def module(self, module: nn.Module) -> nn.Module:
        """Return a module with small normal weights."""
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=self._generator) / 8)
        return module.to(self.device)


Operation = Callable[[Draws], tuple[Tensor, ...]]
"""Returns the inputs whose gradients are compared, and the output behind them."""


def _onto(add: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Operation:
    """Return an operation that adds rows to places of a table."""

    def operation(draws: Draws) -> tuple[Tensor, ...]:
        places, rows = draws.places(), draws.values(ROWS, WIDTH)
        return rows, add(torch.zeros(PLACES, WIDTH, device=draws.device), places, rows)

    return operation


def _through(call: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Operation:
    """Return an operation on normal random inputs of these shapes."""

    def operation(draws: Draws) -> tuple[Tensor, ...]:
        inputs = [draws.values(*shape) for shape in shapes]
        return *inputs, call(*inputs)

    return operation


def _module(make: Callable[[], nn.Module], *shape: int) -> Operation:
    """Return an operation that is a module with weights of its own."""

    def operation(draws: Draws) -> tuple[Tensor, ...]:
        module = draws.module(make())
        data = draws.values(*shape)
        found = module(data)
        return data, *module.parameters(), found[0] if isinstance(found, tuple) else found

    return operation


def _embedding(draws: Draws) -> tuple[Tensor, ...]:
    places, table = draws.places(), draws.values(PLACES, WIDTH)
    return table, functional.embedding(places, table)


def _embedding_bag(draws: Draws) -> tuple[Tensor, ...]:
    places, table = draws.places(), draws.values(PLACES, WIDTH)
    return table, functional.embedding_bag(places.view(-1, 4), table, mode="mean")


def _indexed(draws: Draws) -> tuple[Tensor, ...]:
    places, table = draws.places(), draws.values(PLACES, WIDTH)
    return table, table[places]


def _gathered(draws: Draws) -> tuple[Tensor, ...]:
    places, table = draws.places(), draws.values(PLACES, WIDTH)
    return table, table.gather(0, places[:, None].expand(-1, WIDTH))


def _counted(draws: Draws) -> tuple[Tensor, ...]:
    return (torch.bincount(draws.places(), weights=draws.values(ROWS).detach().double()),)


def _ctc(draws: Draws) -> tuple[Tensor, ...]:
    scores = draws.values(50, 16, 20)
    targets = draws.places(16 * 20, 1, 20).view(16, 20)
    lengths = torch.full((16,), 50), torch.full((16,), 20)
    return scores, functional.ctc_loss(scores.log_softmax(2), targets, *lengths)


def _cross_entropy(draws: Draws) -> tuple[Tensor, ...]:
    scores = draws.values(4096, PLACES)
    return scores, functional.cross_entropy(scores, draws.places(4096))


def _cross_entropy_of_pixels(draws: Draws) -> tuple[Tensor, ...]:
    scores = draws.values(8, PLACES, 32, 32)
    return scores, functional.cross_entropy(scores, draws.places(8 * 32 * 32).view(8, 32, 32))


OPERATIONS: dict[str, Operation] = {
    "matmul": _through(torch.matmul, (256, 2048), (2048, 64)),
    "linear": _module(lambda: nn.Linear(512, 256), 256, 512),
    "convolution": _module(lambda: nn.Conv2d(8, 16, 3), 8, 8, 32, 32),
    "transposed convolution": _module(lambda: nn.ConvTranspose2d(8, 16, 3), 8, 8, 16, 16),
    "batch norm": _module(lambda: nn.BatchNorm2d(16), 16, 16, 16, 16),
    "layer norm": _module(lambda: nn.LayerNorm(256), 512, 256),
    "group norm": _module(lambda: nn.GroupNorm(4, 16), 16, 16, 16, 16),
    "attention": _through(functional.scaled_dot_product_attention, *[(2, 4, 128, 32)] * 3),
    "lstm": _module(lambda: nn.LSTM(32, 32), 24, 16, 32),
    "gru": _module(lambda: nn.GRU(32, 32), 24, 16, 32),
    "softmax": _through(lambda x: x.softmax(1), (512, 512)),
    "sum": _through(torch.sum, (1_000_003,)),
    "norm": _through(torch.linalg.vector_norm, (1_000_003,)),
    "cumsum": _through(lambda x: x.cumsum(0), (200_003,)),
    "sort": _through(lambda x: x.sort(dim=0, stable=True).values, (100_000,)),
    "median": _through(lambda x: x.median(dim=0).values, (501, 64)),
    "embedding": _embedding,
    "embedding bag": _embedding_bag,
    "indexing, table[places]": _indexed,
    "gather": _gathered,
    "index_add": _onto(lambda table, places, rows: table.index_add(0, places, rows)),
    "scatter_add": _onto(lambda table, places, rows: table.scatter_add(0, places[:, None].expand_as(rows), rows)),
    "scatter_reduce": _onto(
        lambda table, places, rows: table.scatter_reduce(0, places[:, None].expand_as(rows), rows, "mean")
    ),
    "index_put, accumulate": _onto(lambda table, places, rows: table.index_put((places,), rows, accumulate=True)),
    "put, accumulate": _onto(lambda table, places, rows: table.put(places, rows[:, 0].contiguous(), accumulate=True)),
    "bincount with weights": _counted,
    "cross entropy": _cross_entropy,
    "cross entropy of pixels": _cross_entropy_of_pixels,
    "ctc loss": _ctc,
    "max pooling": _module(lambda: nn.MaxPool2d(3, stride=1), 8, 8, 32, 32),
    "adaptive average pooling": _module(lambda: nn.AdaptiveAvgPool2d(7), 8, 8, 32, 32),
    "bilinear interpolation": _through(
        lambda x: functional.interpolate(x, scale_factor=2.5, mode="bilinear"), (4, 8, 24, 24)
    ),
    "reflection padding": _module(lambda: nn.ReflectionPad2d(3), 8, 8, 24, 24),
    "grid sampling": _through(
        lambda x, grid: functional.grid_sample(x, grid, align_corners=False), (4, 8, 24, 24), (4, 24, 24, 2)
    ),
}
"""By name, what a training is made of, and what torch names as not deterministic on some device."""


def digest(operation: Operation, device: torch.device) -> str:
    """Return the digest of an operation's output and of the gradients of its inputs.

    Args:
        operation: What is computed.
        device: Where.
    """
    *inputs, output = operation(Draws(device))
    found = {"output": output}
    if output.requires_grad:
        towards = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
        gradients = torch.autograd.grad((output * towards).sum(), inputs)
        found |= {f"gradient {place}": gradient for place, gradient in enumerate(gradients)}
    return digest_of(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the operations and print their digests.

    Args:
        arguments: Options; `None` takes those of this process.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--describe", action="store_true")
    parser.add_argument("--only", nargs="+", default=tuple(OPERATIONS))
    options = parser.parse_args(arguments)
    if options.describe:
        print(json.dumps([["cpu"] + ["cuda"] * torch.cuda.is_available(), options.threads]))
        return
    torch.set_num_threads(options.threads)
    with warnings.catch_warnings(), deterministic_kernels() if options.deterministic else nullcontext():
        warnings.simplefilter("ignore")
        for name in options.only:
            said: dict[str, object] = {"name": name}
            try:
                said["digests"] = [digest(OPERATIONS[name], options.device) for _ in range(options.repeats)]
            except RuntimeError as error:
                said["error"] = str(error).splitlines()[0]
            print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
