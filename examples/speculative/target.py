"""The frozen target: a model of transformers, what is captured of it, and the two ends of it that a trainer needs.

Only `build_target` and what calls the model import transformers; a trainer reads embedding and head from the file of the weights.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional as F

from danling.stream.hooks import capture_hidden_states


def build_target(tokens: int, *, width: int = 64, depth: int = 6, heads: int = 4) -> Any:
    """Return a small Llama with random weights.

    Args:
        tokens: V.
        width: d.
        depth: Layers.
        heads: Attention heads.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=tokens,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=depth,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config)


def load_target(path: str | Path) -> Any:
    """Return a causal language model of transformers with its weights frozen, in evaluation mode.

    Args:
        path: A directory that `save_pretrained` wrote.
    """
    from transformers import AutoModelForCausalLM

    model: nn.Module = AutoModelForCausalLM.from_pretrained(path, local_files_only=True)
    return model.eval().requires_grad_(False)


def spread_layers(depth: int, count: int) -> list[int]:
    """Return evenly spaced layers, neither the first nor the last two where there are enough of them.

    Args:
        depth: Layers of the target.
        count: How many are captured.

    Raises:
        ValueError: If there are fewer.
    """
    if count > depth:
        raise ValueError(
            f"Expected at most as many captured layers as the target has. Received: {count} of {depth}."
        )
    first, last = (1, depth - 3) if depth - 3 >= count else (0, depth - 1)
    return [first + (last - first) * number // max(count - 1, 1) for number in range(count)]


@torch.no_grad()
def capture(model: Any, tokens: Tensor, layers: list[int]) -> dict[str, Tensor]:
    """Return what drafts are trained on.

    Args:
        model: A causal language model of transformers.
        tokens: int64 (B, S).
        layers: Whose outputs are captured, m of them.

    Returns:
        `features`, (B, S, m * d), and `final`, the output of the last norm, (B, S, d). Of it a trainer makes the scores with the frozen
        head: they would be 304 KB a token for a vocabulary of 152,000, and it is 8 KB at d = 4,096.
    """
    with capture_hidden_states(model.base_model, layers) as states:
        final = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    return {"features": torch.cat([states[layer] for layer in layers], -1), "final": final}


@dataclass(frozen=True)
class TargetEnds:
    """Embedding and head of a target, frozen.

    Attributes:
        embedding: (V, d).
        head: (V, d); the same tensor where they are tied.
    """

    embedding: Tensor
    head: Tensor

    @classmethod
    def load(cls, path: str | Path, device: torch.device | None = None) -> TargetEnds:
        """Read the ends alone, from one file of safetensors or from several with an index.

        Args:
            path: The directory of the target.
            device: Where to.

        Raises:
            FileNotFoundError: If there are no weights.
        """
        directory = Path(path)
        index = directory / "model.safetensors.index.json"
        files = json.loads(index.read_text())["weight_map"] if index.is_file() else {}

        def read(name: str) -> Tensor | None:
            with safe_open(
                str(directory / files.get(name, "model.safetensors")),
                "pt",
                device=str(device or "cpu"),
            ) as weights:
                tensor: Tensor | None = weights.get_tensor(name) if name in weights.keys() else None  # noqa: SIM118
                return tensor

        embedding = read("model.embed_tokens.weight")
        if embedding is None:
            raise FileNotFoundError(
                f"Expected 'model.embed_tokens.weight' in {directory}. Received: none. Name a target's directory."
            )
        head = read("lm_head.weight")
        return cls(embedding, embedding if head is None else head)

    @property
    def width(self) -> int:
        """d."""
        return self.embedding.shape[1]

    @property
    def tokens(self) -> int:
        """V."""
        return len(self.embedding)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return (..., d) of tokens (...)."""
        return F.embedding(tokens, self.embedding)

    def scores(self, states: Tensor) -> Tensor:
        """Return (..., V) of normed states (..., d)."""
        return F.linear(states, self.head)
