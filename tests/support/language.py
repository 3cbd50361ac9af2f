"""A small language model and its batches, which behave as those of transformers do."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCABULARY = 11


class Encoding(UserDict):  # type: ignore[type-arg]
    """A batch as tokenizers return it: a mapping that is no `dict`, and moves itself."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Encoding:
        self.data = {
            name: value.to(device, non_blocking=non_blocking) for name, value in self.data.items()
        }
        return self


class Output(OrderedDict):  # type: ignore[type-arg]
    """What a model returns: entries and attributes; what is `None` is an attribute only."""

    def __init__(self, **entries: Any) -> None:
        super().__init__({name: value for name, value in entries.items() if value is not None})
        for name, value in entries.items():
            object.__setattr__(self, name, value)


class Tokens(nn.Module):
    """Reads tokens one by one, and the mean of those that are attended to."""

    def __init__(self, *, double: bool = True) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.config = SimpleNamespace(is_decoder=False, is_encoder_decoder=False)
        self.embedding = nn.Embedding(VOCABULARY, 6)
        self.head = nn.Linear(6, VOCABULARY)
        if double:
            self.double()

    def logits(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.embedding(input_ids) * attention_mask[..., None]
        out: Tensor = self.head(torch.tanh(hidden.cumsum(1)))
        return out


class TinyForCausalLM(Tokens):
    """Predicts the next token: its labels are shifted inside."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> Output:
        logits = self.logits(input_ids, attention_mask)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(
                logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100
            )
        return Output(loss=loss, logits=logits)


class NextTokens(Tokens):
    """Predicts the next token, and has a name that does not tell."""

    shifts_labels: bool | None = True

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> Output:
        logits = self.logits(input_ids, attention_mask)
        return Output(
            loss=None if labels is None else self.loss(logits[:, :-1], labels[:, 1:]), logits=logits
        )

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class OwnTokens(NextTokens):
    """Predicts the tokens themselves, and has a name that does not tell."""

    shifts_labels = False

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> Output:
        logits = self.logits(input_ids, attention_mask)
        return Output(loss=None if labels is None else self.loss(logits, labels), logits=logits)


class UntoldTokens(NextTokens):
    """Does not tell whether it shifts its labels."""

    shifts_labels = None


class TinyForMaskedLM(Tokens):
    """Predicts the tokens themselves: its labels are not shifted."""

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None
    ) -> Output:
        logits = self.logits(input_ids, attention_mask)
        loss = (
            F.cross_entropy(logits.flatten(0, 1), labels.flatten()) if labels is not None else None
        )
        return Output(loss=loss, logits=logits)


def sentences(number: int, *, length: int = 7) -> list[dict[str, Tensor]]:
    """Return samples of unequal lengths, padded, with labels of -100 where they do not count."""
    generator = torch.Generator().manual_seed(8)
    rows = []
    for _ in range(number):
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator)
        used = int(torch.randint(2, length + 1, (), generator=generator))
        prompt = int(torch.randint(0, used, (), generator=generator))
        mask = (torch.arange(length) < used).long()
        labels = ids.where((mask > 0) & (torch.arange(length) >= prompt), -100)
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return rows


def encode(rows: list[dict[str, Tensor]]) -> Encoding:
    return Encoding({name: torch.stack([row[name] for row in rows]) for name in rows[0]})
