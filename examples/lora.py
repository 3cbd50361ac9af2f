"""Finetuning a causal language model of transformers with LoRA (peft): weights of the adapters alone are trained, saved and exported.

python examples/lora.py --base.path Qwen/Qwen3-0.6B --data.path notes.txt     # any model, by name or directory, and any text
python examples/lora.py                                   # 110 s of processor time

Without a path it first trains a small model on English (1.95 bits a byte) and then adapts it to Python code: 3.08 bits a byte become 2.40
by 9.7 % of the parameters.

Needs transformers and peft: `pip install -e '.[hf]'` in a clone.
"""

from __future__ import annotations

import argparse
import inspect
import math
import typing
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    ByT5Tokenizer,
    LlamaConfig,
    LlamaForCausalLM,
)

import danling as dl


class LanguageRunner(dl.Runner):
    """Trains a causal language model on a text, and validates on its end.

    Args:
        config: Settings.
        model: The model, as transformers or peft makes it: what requires no gradient stays as it is.
        tokenizer: Its tokenizer.
        text: The text.
    """

    def __init__(self, config: dl.RunnerConfig, model: Any, tokenizer: Any, text: str) -> None:
        super().__init__(config)
        tokens = torch.tensor(tokenizer(text, add_special_tokens=False).input_ids)
        rows = tokens.unfold(0, self.config.data.context, self.config.data.context)
        samples = [{"input_ids": row, "labels": row} for row in rows]
        held_out = max(len(samples) // 10, 1)
        self.datasets = {"train": samples[:-held_out], "val": samples[-held_out:]}
        self.model = model


def bits(runner: LanguageRunner) -> float:
    """Return bits a token on the end of the text."""
    return float(runner.evaluate("val")["val"]["loss"]) / math.log(2)


def small_base(config: dl.RunnerConfig) -> Path:
    """Return the directory of a small model that has learned English, and its tokenizer; made where there is none."""
    config = config.copy()
    config.lineage, config.dir = "lora-base", None
    config.optim.lr = 4e-3
    torch.manual_seed(0)
    tokenizer = ByT5Tokenizer(extra_ids=0)
    shape = {
        "hidden_size": 96,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=config.data.context, **shape)
    )
    text = "\n".join(topics[name] for name in sorted(topics))
    with LanguageRunner(config, model, tokenizer, text[:300_000]) as runner:
        runner.train()
        directory: Path = runner.workspace.dir / "model"
        runner.save_pretrained(directory)
        if runner.is_main_process:
            tokenizer.save_pretrained(directory)
        runner.print(f"the base: {bits(runner):.2f} bits a byte of English")
    return directory


def read_text(path: str | None) -> str:
    """Return the text to learn: a file, or the code of two modules of this Python."""
    return (
        Path(path).read_text() if path else inspect.getsource(argparse) + inspect.getsource(typing)
    )


class LoRAConfig(dl.RunnerConfig):
    """Settings of this example; the command line goes above them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lineage = "lora"
        self.seed = 1
        self.epochs = 3
        self.max_grad_norm = 1.0
        self.base.path = None
        self.data.path = None
        self.data.context = 64
        self.lora.rank = 8
        self.lora.alpha = 16
        self.dataloader.batch_size = 16
        self.optim = {"type": "adamw", "lr": 1e-2}
        self.scheduler = {"type": "cosine", "warmup_steps": 0.1}


def main() -> None:
    """Adapt a base, and print what the adapters are worth and what they weigh."""
    config = LoRAConfig()
    config.parse()
    path = config.base.path or small_base(config)
    config.checkpoint.trainable_only = True
    tokenizer = AutoTokenizer.from_pretrained(path)
    torch.manual_seed(0)
    adapters = LoraConfig(
        r=config.lora.rank,
        lora_alpha=config.lora.alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(path), adapters)
    trained, whole = model.get_nb_trainable_parameters()
    with LanguageRunner(config, model, tokenizer, read_text(config.data.path)) as runner:
        before = bits(runner)
        runner.train()
        after = bits(runner)
        runner.save_pretrained(runner.workspace.dir / "adapters")
        runner.print(
            f"{before:.2f} -> {after:.2f} bits a token of the new text, by {trained / whole:.1%} of the parameters; "
            f"adapters in {runner.workspace.dir / 'adapters'}"
        )


if __name__ == "__main__":
    main()
