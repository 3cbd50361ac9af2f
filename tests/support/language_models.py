"""Models and a tokenizer of transformers, small, random and made from a configuration: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

WORDS = ["[PAD]", "[BOS]", "[EOS]", "[MASK]", "[UNK]", *"abcdefghijkl"]
SIZE = len(WORDS)


def tokenizer() -> Any:
    model = Tokenizer(
        WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]")
    )
    model.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token="[PAD]",
        bos_token="[BOS]",
        eos_token="[EOS]",
        mask_token="[MASK]",
        unk_token="[UNK]",
    )


def model_of(kind: str, **settings: Any) -> Any:
    """Return a model, the same one each time."""
    torch.manual_seed(0)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    gpt: dict[str, Any] = {"n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
    gpt |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    sizes = {
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
    bert = {
        **sizes,
        "max_position_embeddings": 16,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    t5 = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    made: dict[str, Callable[[], Any]] = {
        "causal": lambda: GPT2LMHeadModel(
            GPT2Config(**{"vocab_size": SIZE, **special, **gpt, **settings})
        ),
        "llama": lambda: LlamaForCausalLM(
            LlamaConfig(**{"vocab_size": SIZE, **special, **sizes, **settings})
        ),
        "masked": lambda: BertForMaskedLM(BertConfig(**{"vocab_size": SIZE, **bert, **settings})),
        "classes": lambda: BertForSequenceClassification(
            BertConfig(**{"vocab_size": SIZE, "num_labels": 3, **bert, **settings})
        ),
        "seq2seq": lambda: T5ForConditionalGeneration(
            T5Config(
                **{"vocab_size": SIZE, "decoder_start_token_id": 0, **special, **t5, **settings}
            )
        ),
    }
    return made[kind]()


def collator_of(kind: str, model: Any = None, **settings: Any) -> Any:
    """Return the collator that people use for a kind of model."""
    if kind == "masked":
        return DataCollatorForTokenClassification(tokenizer(), **settings)
    if kind == "classes":
        return DataCollatorWithPadding(tokenizer(), **settings)
    if kind == "seq2seq":
        return DataCollatorForSeq2Seq(tokenizer(), model=model, **settings)
    return DataCollatorForLanguageModeling(tokenizer(), mlm=False, **settings)


def rows_of(kind: str, number: int, *, seed: int = 8) -> list[dict[str, Any]]:
    """Return samples of unequal lengths as a tokenizer gives them, with the labels of a kind of model."""
    generator = torch.Generator().manual_seed(seed)

    def below(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    encode, rows = tokenizer(), []
    for _ in range(number):
        words = [WORDS[below(5, SIZE)] for _ in range(below(3, 11))]
        row = dict(encode(" ".join(words)))
        row.pop("token_type_ids", None)
        ids = row["input_ids"]
        if kind == "masked":
            begin = below(0, len(ids))
            row["labels"] = [-100] * begin + ids[begin:]
        elif kind == "classes":
            row["label"] = below(0, 3)
        elif kind == "seq2seq":
            row["labels"] = ids[: below(1, len(ids) + 1)][::-1]
        rows.append(row)
    return rows
