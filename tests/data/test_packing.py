"""Blocks without padding, and batches of a number of tokens: each document once, the same at any number of ranks, exact resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.datasets import drain, source_over
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from danling.data import Mixture, Packed, TokenBudget, build_dataloader, cu_seqlens
from danling.data.packing import best_fit

LENGTH, DOCUMENTS = 32, 300


class Documents(Dataset[dict[str, Tensor]]):
    """Documents of 1 to 30 tokens that begin with their index; a few are empty."""

    def __init__(self, number: int = DOCUMENTS, longest: int = 30, offset: int = 0) -> None:
        generator = torch.Generator().manual_seed(number)
        self.lengths = torch.randint(1, longest + 1, (number,), generator=generator)
        self.lengths[::50] = 0
        self.offset = offset

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        size = int(self.lengths[index])
        return {
            "input_ids": torch.arange(size) + 1000 * (index + 1) + self.offset,
            "kind": torch.full((size,), index % 3),
        }


def packed(data: Documents | None = None, **settings: Any) -> Packed:
    data = Documents() if data is None else data
    return Packed(data, LENGTH, data.lengths, **{"chunk": 64, **settings})


def documents_of(dataset: Packed | TokenBudget, epoch: int = 0) -> list[int]:
    dataset.set_epoch(epoch)
    return [
        piece.document for position in range(len(dataset)) for piece in dataset.pieces(position)
    ]


@pytest.mark.parametrize(
    "make",
    [packed, lambda **more: TokenBudget(Documents(), 64, Documents().lengths, chunk=64, **more)],
)
def test_each_document_comes_once_an_epoch_in_an_order_of_its_own(make: Any) -> None:
    data, filled = make(), [index for index in range(DOCUMENTS) if index % 50]
    orders = [documents_of(data, epoch) for epoch in range(3)]
    data.set_seed(1)
    orders.append(documents_of(data, 0))
    assert all(sorted(order) == filled for order in orders)
    assert len(set(map(tuple, orders))) == 4
    in_turn = make(shuffle=False)
    assert documents_of(in_turn, 1) == documents_of(in_turn, 0)
    assert {index // 64 for index in documents_of(in_turn)[:40]} == {0}


def test_block_equals_its_pieces() -> None:
    data = packed(
        keys=("input_ids", "kind"), fields=("position_ids", "labels", "document_ids"), pad=-7
    )
    for position in range(len(data)):
        block, at = data[position], 0
        for number, piece in enumerate(data.pieces(position)):
            part = slice(at, at + piece.size)
            document = data.dataset[piece.document]
            assert torch.equal(block["input_ids"][part], document["input_ids"])
            assert torch.equal(block["kind"][part], document["kind"])
            assert block["position_ids"][part].tolist() == list(range(piece.size))
            assert block["labels"][part].tolist() == [-100, *document["input_ids"][1:].tolist()]
            assert block["document_ids"][part].unique().tolist() == [number]
            at += piece.size
        rest = slice(at, LENGTH)
        assert (block["input_ids"][rest] == -7).all() and (block["labels"][rest] == -100).all()
        assert all(len(tensor) == LENGTH for tensor in block.values())
        sizes = [piece.size for piece in data.pieces(position)]
        ends = cu_seqlens(block["document_ids"]).tolist()
        assert (
            ends[: len(sizes) + 1] == [sum(sizes[:number]) for number in range(len(sizes) + 1)]
            and ends[-1] == LENGTH
        )
    rows = torch.tensor([[0, 0, 1], [1, 1, 1]])
    assert cu_seqlens(rows).tolist() == [0, 2, 3, 6] and cu_seqlens(rows).dtype == torch.int32


def test_long_documents_are_split_into_blocks_and_a_rest() -> None:
    data = Documents(40, longest=100)
    blocks = Packed(data, LENGTH, data.lengths, too_long="split")
    tokens = torch.cat(
        [
            block["input_ids"][block["input_ids"] > 0]
            for block in map(blocks.__getitem__, range(len(blocks)))
        ]
    )
    expected = torch.cat([data[index]["input_ids"] for index in range(40)])
    assert torch.equal(tokens.sort().values, expected.sort().values)
    assert blocks.efficiency == len(expected) / (len(blocks) * LENGTH)


def test_best_fit_fills_better_than_first_fit_and_cannot_be_far_from_full() -> None:
    """Against the least number of blocks that could hold the tokens, which no packing can be below."""
    sizes = sorted(
        (torch.rand(2000, generator=torch.Generator().manual_seed(0)).pow(2) * 31 + 1)
        .int()
        .tolist(),
        reverse=True,
    )
    blocks = best_fit(sizes, LENGTH)
    assert sorted(number for block in blocks for number in block) == list(range(2000))
    assert max(sum(sizes[number] for number in block) for block in blocks) <= LENGTH
    assert len(blocks) <= -(-sum(sizes) // LENGTH) * 1.01
    assert best_fit([5, 5, 4, 3, 3], 10) == [[0, 1], [2, 3, 4]]


def test_batches_of_a_number_of_tokens() -> None:
    data = Documents()
    batches = TokenBudget(data, 64, data.lengths, keys=("input_ids", "kind"), chunk=64)
    spread = []
    for position in range(len(batches)):
        documents = batches[position]
        sizes = [len(document["input_ids"]) for document in documents]
        assert len(sizes) * max(sizes) <= 64
        spread.append(max(sizes) - min(sizes))
        batch = batches.collate(documents)
        assert batch["attention_mask"].sum(1).tolist() == sizes
        assert torch.equal(batch["labels"] == -100, batch["attention_mask"] == 0)
        assert torch.equal(batch["input_ids"][0][: sizes[0]], documents[0]["input_ids"])
        assert batch["kind"].shape == batch["input_ids"].shape == (len(sizes), max(sizes))
    assert sum(spread) / len(spread) < 6, "of similar length: drawn at random it is more than 20"


def test_mask_of_a_padded_batch_is_that_of_the_first_key() -> None:
    documents = [
        {"input_ids": [11, 12, 13], "summary": [21]},
        {"input_ids": [14], "summary": [22, 23, 24]},
    ]
    budget = TokenBudget(documents, 8, [3, 1], keys=("input_ids", "summary"), pad=9)
    batch = {name: values.tolist() for name, values in budget.collate(documents).items()}
    assert batch == {
        "input_ids": [[11, 12, 13], [14, 9, 9]],
        "summary": [[21, 9, 9], [22, 23, 24]],
        "attention_mask": [[1, 1, 1], [1, 0, 0]],
        "labels": [[11, 12, 13], [14, -100, -100]],
    }


def test_batches_of_a_budget_have_little_padding() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = (torch.randn(9000, generator=generator) * 0.9 + 4).exp().clamp(1, 2048).int()
    batches = TokenBudget(range(9000), 8192, lengths)
    padded = [pieces[0].size * len(pieces) for pieces in map(batches.pieces, range(len(batches)))]
    assert sum(padded) * 0.98 <= batches.tokens_in_all, (
        "0.97 where each batch takes as much as it can"
    )
    assert max(padded) <= 8192 and len(batches) <= sum(padded) / 8192 * 1.3


# Reading


def ids(batches: list[dict[str, Tensor]]) -> list[list[int]]:
    return [row.tolist() for batch in batches for row in batch["input_ids"]]


def mixed() -> Mixture:
    return Mixture(
        {"web": packed(), "code": packed(Documents(60, offset=500_000))},
        {"web": 0.5, "code": 0.5},
        length=150,
    )


@pytest.mark.parametrize("make", [packed, mixed])
def test_blocks_are_the_same_for_any_number_of_ranks_and_workers_and_after_a_resume(
    make: Any,
) -> None:
    whole = source_over(make(), batch_size=6, drop_last=False)
    expected = []
    for _ in range(2):
        expected += ids(drain(whole))
        whole.finish_pass()
    first = source_over(make(), batch_size=6, num_workers=2, drop_last=False)
    taken = ids(drain(first))
    first.finish_pass()
    taken += ids(drain(first, 4))
    state = first.state_dict()
    first.close()
    by_rank = []
    for rank in range(2):
        source = source_over(make(), rank, 2, batch_size=3, drop_last=False)
        source.load_state_dict(state)
        by_rank.append(ids(drain(source)))
    for begin in range(0, len(by_rank[0]), 3):
        taken += by_rank[0][begin : begin + 3] + by_rank[1][begin : begin + 3]
    assert taken == expected


def test_batches_of_a_budget_are_the_same_with_workers_and_after_a_resume() -> None:
    def make(**settings: Any) -> Any:
        data = Documents()
        return source_over(TokenBudget(data, 64, data.lengths, chunk=64), **settings)

    expected = [batch["input_ids"].tolist() for batch in drain(make())]
    first = make(num_workers=2)
    taken = [batch["input_ids"].tolist() for batch in drain(first, 9)]
    second = make(batch_size=None, collate_fn=lambda documents: documents)
    second.load_state_dict(first.state_dict())
    first.close()
    rest = drain(second)
    assert taken == expected[:9]
    collate = TokenBudget(Documents(), 64).collate
    assert [collate(documents)["input_ids"].tolist() for documents in rest] == expected[9:]


def test_lengths_come_as_a_function_or_are_counted_and_kept(tmp_path: Path) -> None:
    data, path = Documents(), tmp_path / "lengths.pt"
    for lengths in (
        data.lengths.numpy(),
        lambda index: int(data.lengths[index]),
        None,
        path,
        str(path),
    ):
        assert torch.equal(Packed(data, LENGTH, lengths).lengths, data.lengths)  # type: ignore[arg-type]
    assert torch.load(path, weights_only=True).dtype == torch.int32
    assert len(Packed([[1, 2], [3]], 4)) == 1, "documents may be their tokens"
    changed = Documents(20)
    with pytest.raises(
        ValueError, match="for each of the 20 documents .* Received: .*300.* delete the file"
    ):
        Packed(changed, LENGTH, path)


def test_another_packing_is_refused() -> None:
    source = source_over(packed(), batch_size=4)
    drain(source, 2)
    state = source.state_dict()
    other = Documents()
    other.lengths = other.lengths.flip(0)
    for data, what in (
        (packed(other), "documents"),
        (packed(chunk=65), "documents of a chunk"),
        (packed(shuffle=False), "shuffle"),
    ):
        with pytest.raises(ValueError, match=f"{what}|samples"):
            source_over(data, batch_size=4).load_state_dict(state)


class Endless(IterableDataset[Any]):
    """Has no documents by index."""

    def __iter__(self) -> Any:
        return iter(())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Packed(Endless(), 4), "map-style dataset"),
        (lambda: Packed([[1]], 0), "a positive number of tokens. Received: 0"),
        (
            lambda: Packed([[1] * 9, [1] * 7, []], 4),
            "at most 4 tokens. Received: 2 longer ones, the longest at index 0 with 9 .*'split'",
        ),
        (
            lambda: TokenBudget([[1] * 9], 4),
            "at most 4 tokens. Received: 1 longer ones.* raise tokens",
        ),
        (lambda: Packed([[1]], 4, too_long="cut"), "'error' or 'split'"),
        (lambda: Packed([[1]], 4, fields=("mask",)), r"fields out of .* Received: \['mask'\]"),
        (lambda: Packed([[]], 4), "documents with tokens"),
        (lambda: Packed([[1]], 4, [1, 2]), "each of the 1 documents of list"),
        (lambda: Packed([[1]], 4, [-1]), "at least 0"),
        (
            lambda: Packed([[1, 2], [3]], 4, [2, 2])[0],
            "document 1 to have 2 tokens, as in `lengths`",
        ),
        (
            lambda: source_over(TokenBudget([[1]], 4), batch_size=2),
            r"dataloader.batch_size=2. Set dataloader.train.batch_size to None",
        ),
        (
            lambda: source_over(TokenBudget([[1]], 4), global_batch_size=2),
            "Received: dataloader.global_batch_size",
        ),
        (lambda: source_over(packed(), batch_size=2, shuffle=True), "a Packed has its own order"),
        (
            lambda: build_dataloader(
                TokenBudget([[1]], 4), {}, split="a", train=True, seed=3, canonical=True
            ),
            "gradient_sum='canonical'. Received: a TokenBudget",
        ),
    ],
)
def test_mistakes_are_named(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


# Training


def test_losses_of_packed_blocks_are_those_of_single_documents() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 50,
        "hidden_size": 16,
        "intermediate_size": 32,
        "max_position_embeddings": 64,
    }
    config = transformers.LlamaConfig(
        **sizes, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double().eval()
    data = Documents(40)
    tokens = [data[index]["input_ids"] * 7 % 50 for index in range(40)]

    def total(**batch: Tensor) -> tuple[float, int]:
        logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits[
            :, :-1
        ]
        labels = batch["labels"][:, 1:]
        loss = nn.functional.cross_entropy(
            logits.transpose(1, 2), labels, reduction="sum", ignore_index=-100
        )
        return float(loss), int((labels != -100).sum())

    with torch.no_grad():
        alone = [total(input_ids=each[None], labels=each[None]) for each in tokens if len(each) > 1]
        blocks = Packed(tokens, LENGTH)
        packs = [
            total(**{name: value[None] for name, value in blocks[number].items()})
            for number in range(len(blocks))
        ]
        budget = TokenBudget(tokens, 64)
        batches = [total(**budget.collate(budget[number])) for number in range(len(budget))]
    expected = [sum(column) for column in zip(*alone)]
    for found in (packs, batches):
        assert [sum(column) for column in zip(*found)] == pytest.approx(
            expected, rel=1e-9, abs=1e-6
        )
