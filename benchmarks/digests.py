"""What digests cost: one digest of weights and both moments of AdamW, the time of an update, and its share at an interval.

    python benchmarks/digests.py                          # GPT-2 (124 M) on a GPU; 4 blocks of it on the CPU
    python benchmarks/digests.py --layers 12 --tokens 4096 --interval 100

Prints one JSON object: seconds of an update, of a digest (`device`: until it is computed; `host`: until the call returns, which is what an
update waits for on an accelerator), and the share of each of them in `--interval` updates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from danling.audit.hashing import Hasher, key_of

WIDTH, HEADS, WORDS = 768, 12, 50257


class Block(nn.Module):
    """A block of GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Attend, then transform; `x` has shape `(batch, sequence, width)`."""
        shape = (*x.shape[:2], HEADS, WIDTH // HEADS)
        q, k, v = (
            part.reshape(shape).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended: Tensor = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        inner: Tensor = self.down(nn.functional.gelu(self.up(self.norm2(x))))
        return x + inner


class Gpt(nn.Module):
    """GPT-2 with tied words.

    Args:
        layers: Number of blocks; 12 is the model of 124 million parameters.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(1024, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits of tokens of shape `(batch, sequence)`."""
        x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
        logits: Tensor = nn.functional.linear(self.norm(self.blocks(x)), self.words.weight)
        return logits


def seconds(call: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, float]:
    """Return the medians of the seconds until a call returns, and until the device has done it."""
    times = []
    for _ in range(repeats + 1):
        wait(device)
        start = time.perf_counter()
        call()
        returned = time.perf_counter()
        wait(device)
        times.append((returned - start, time.perf_counter() - start))
    host, whole = zip(*times[1:])
    return statistics.median(host), statistics.median(whole)


def wait(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    """Measure and print."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=12 if on_gpu else 4)
    parser.add_argument(
        "--tokens", type=int, default=131072 if on_gpu else 1024, help="tokens of an update"
    )
    parser.add_argument("--sequence", type=int, default=1024 if on_gpu else 256)
    parser.add_argument("--micro-batches", type=int, default=8 if on_gpu else 1)
    parser.add_argument("--interval", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    device = torch.device("cuda" if on_gpu else "cpu")
    torch.manual_seed(0)
    model = Gpt(options.layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=on_gpu)
    shape = (options.tokens // options.sequence // options.micro_batches, options.sequence)
    batches = [torch.randint(WORDS, shape, device=device) for _ in range(options.micro_batches)]

    def update() -> None:
        for batch in batches:
            with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
                loss = nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
            torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    hasher = Hasher(device)

    def digest() -> Tensor:
        tensors = [
            (name, tensor)
            for name, p in model.named_parameters()
            for tensor in (p, *optimizer.state[p].values())
        ]
        values = [
            (hasher.digest(tensor).to(device, non_blocking=True), key_of(name))
            for name, tensor in tensors
        ]
        return torch.stack([value for value, _ in values]) * torch.tensor(
            [key for _, key in values], device=device
        )

    of_update = seconds(update, device, options.repeats)
    of_digest = seconds(digest, device, options.repeats)
    shown = {
        "device": torch.cuda.get_device_name()
        if on_gpu
        else f"cpu, {torch.get_num_threads()} threads",
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": options.tokens,
        "update_seconds": round(of_update[1], 4),
        "digest_device_seconds": round(of_digest[1], 4),
        "digest_host_seconds": round(of_digest[0], 4),
        "interval": options.interval,
        "percent": round(100 * of_digest[1] / (options.interval * of_update[1]), 4),
    }
    print(json.dumps(shown))


if __name__ == "__main__":
    main()
