"""The example of preference optimization makes the right rows."""

from __future__ import annotations

from tests.test_examples import loaded


def test_rows_of_a_pair_are_as_long_as_asked_and_end() -> None:
    example = loaded("dpo.py")
    _, tokenizer = example.load(None)
    pairs = [
        {"prompt": "abc", "chosen": "de", "rejected": "fghi"},
        {"prompt": "a" * 50, "chosen": "b" * 50, "rejected": "c"},
    ]
    rows = [example.tokens_of(pair, tokenizer, 16) for pair in pairs]
    texts = [[tokenizer.decode(tokens) for tokens, _ in row] for row in rows]
    assert texts == [["abcde<end>", "abcfghi<end>"], ["a" * 8 + "b" * 8, "a" * 8 + "c<end>"]]
    batch = example.collate(rows, tokenizer.pad_token_id)
    assert {name: tuple(column.shape) for name, column in batch.items()} == dict.fromkeys(batch, (2, 2, 16))
    assert batch["answer"].sum(-1).tolist() == [[3, 5], [8, 2]]
    assert batch["attention_mask"].sum(-1).tolist() == [[6, 8], [16, 10]]
