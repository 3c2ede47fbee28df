"""Encoding gives what the tokenizer itself gives, in flat arrays, row by row with the examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, BertTokenizer, RobertaTokenizer, XLMRobertaTokenizer

from budgetformer.data import tokens
from budgetformer.data.batches import collate, eval_plan
from budgetformer.data.dataset import DataSet, open_data
from budgetformer.data.locate import DataSource
from budgetformer.data.tokenizer import train_tokenizer
from budgetformer.data.tokens import TextEncoder, TokenTable, encode_split
from budgetformer.errors import UsageError

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]


def make(tmp_path: Path, pair: bool = False, **label: Any) -> DataSet:
    labels = label.get("label", ["b", "a"])
    made = [
        {"text": " ".join(WORDS[: 1 + i % 10]) + f" {i}", "label": labels[i % len(labels)]}
        | ({"text_pair": " ".join(WORDS[i % 7 :])} if pair else {})
        for i in range(60)
    ]
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return open_data(DataSource(str(path)))


def tokens_of(result: TokenTable, row: int) -> list[int]:
    return result.tokens[result.offsets[row] : result.offsets[row + 1]].tolist()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer([" ".join(WORDS) + " 0123456789"] * 5, vocab_size=200)


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("max_length", [6, 9, 128])
def test_it_equals_the_tokenizers_own_answer(
    pair: bool, max_length: int, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "CHUNK_ROWS", 7)  # several chunks, the last one short
    data = make(tmp_path, pair)
    split = data.splits["train"]
    result = encode_split(split, data, tokenizer.backend_tokenizer, max_length)
    examples = list(split.examples())
    assert len(result) == split.rows == len(examples)
    cut = 0
    for row, example in enumerate(examples):
        expected = tokenizer(example.text, example.text_pair, truncation=True, max_length=max_length)
        assert tokens_of(result, row) == expected["input_ids"]
        assert result.lengths[row] <= max_length
        start = result.pair_start[row]
        assert expected["token_type_ids"] == [int(bool(start) and i >= start) for i in range(result.lengths[row])]
        cut += len(tokenizer(example.text, example.text_pair)["input_ids"]) > max_length
    assert result.truncated.sum() == cut
    assert result.lines.tolist() == [example.line for example in examples]
    assert result.tokens.dtype == np.int32
    assert result.has_pairs == pair


@pytest.mark.parametrize("long", ["cut", "head-tail", "windows"])
def test_what_is_cut_from_single_texts_is_kept_for_the_words(long: str, tokenizer: Any) -> None:
    texts = [" ".join(WORDS[:3]), " ".join(WORDS), " ".join(reversed(WORDS))]
    table = tokens.TextEncoder(tokenizer.backend_tokenizer, 7, long).encode(texts)
    if long == "windows":  # which leave nothing out
        assert table.rest is None
        assert table.untruncated() is table
        return
    complete = [sorted(tokenizer(text)["input_ids"]) for text in texts]
    again = table.select(np.array([2, 0, 1]))
    for part, rows in ((table, [0, 1, 2]), (again, [2, 0, 1]), (TokenTable.join([again, table]), [2, 0, 1, 0, 1, 2])):
        all_of_it = part.untruncated()
        for row, text in enumerate(rows):
            assert sorted(tokens_of(all_of_it, row)) == complete[text]
            assert tokens_of(all_of_it, row)[: part.lengths[row]] == tokens_of(part, row)
    pairs = tokens.TextEncoder(tokenizer.backend_tokenizer, 7, long, pair=True).encode(texts, texts)
    assert pairs.truncated.all()
    assert pairs.rest is None


def test_the_tokenizer_is_left_as_it_was(tokenizer: Any, tmp_path: Path) -> None:
    tokenizer("one")  # resets what an earlier call with truncation left behind
    before = tokenizer.backend_tokenizer.to_str()
    data = make(tmp_path)
    encode_split(data.splits["train"], data, tokenizer.backend_tokenizer, 6)
    assert tokenizer.backend_tokenizer.to_str() == before


def test_memory_is_about_four_bytes_a_token(tokenizer: Any, tmp_path: Path) -> None:
    data = make(tmp_path)
    result = encode_split(data.splits["train"], data, tokenizer.backend_tokenizer, 64)
    assert result.tokens.nbytes == 4 * result.offsets[-1]
    assert result.nbytes <= 4 * len(result.tokens) + 32 * len(result) + 16


def test_labels_by_task(tokenizer: Any, tmp_path: Path) -> None:
    expected = {
        "single": (["b", "a"], np.int32, {"b": 1, "a": 0}),
        "regression": ([0.5, 1.25], np.float32, {0.5: 0.5, 1.25: 1.25}),
        "multi": ([["x", "y"], ["y"], []], np.uint8, {("x", "y"): [1, 1], ("y",): [0, 1], (): [0, 0]}),
    }
    for task, (labels, dtype, values) in expected.items():
        data = make(tmp_path, label=labels)
        assert data.task == task
        result = encode_split(data.splits["train"], data, tokenizer.backend_tokenizer, 32)
        assert result.labels.dtype == dtype
        labels_expected = [values[example.label] for example in data.splits["train"].examples()]  # type: ignore[index]
        assert result.labels.tolist() == labels_expected


def test_batches_of_a_split_hold_its_rows(tokenizer: Any, tmp_path: Path) -> None:
    data = make(tmp_path, pair=True)
    result = encode_split(data.splits["train"], data, tokenizer.backend_tokenizer, 16)
    seen = 0
    for rows in eval_plan(result.lengths, token_budget=64):
        batch = collate(result, rows, tokenizer.pad_token_id)
        expected = tokenizer.pad({"input_ids": [tokens_of(result, row) for row in rows]})
        assert batch.input_ids.tolist() == expected["input_ids"]
        assert batch.attention_mask.astype(int).tolist() == expected["attention_mask"]
        seen += len(rows)
    assert seen == len(result)


def test_a_length_without_room_for_text_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    data = make(tmp_path, pair=True)
    with pytest.raises(UsageError, match="max_length is 4: it must be at least 5"):
        encode_split(data.splits["train"], data, tokenizer.backend_tokenizer, 4)


HARD = [
    "the small train was late", "Ein sch\u00f6ner Zug, NA\u00cfVE caf\u00e9 \u2603 100%", "x",
    "  two  spaces\tand\na line ", "<s> [SEP] <mask> [MASK] </s>", "\u4e2d\u6587 and \U0001f600",
    "one two three four five six seven eight nine ten " * 3,
]  # fmt: skip
ROBERTA = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def made(kind: str) -> Any:
    """A tiny tokenizer of a family as transformers makes it."""
    if kind in ("trained", "cased WordPiece"):
        trained = train_tokenizer(HARD, vocab_size=300)
        return trained if kind == "trained" else BertTokenizer(vocab=trained.get_vocab(), do_lower_case=False)
    options: dict[str, Any] = {"special_tokens": ROBERTA, "show_progress": False}
    if kind == "byte-level BPE":
        rust, alphabet = Tokenizer(models.BPE()), pre_tokenizers.ByteLevel.alphabet()
        rust.pre_tokenizer = pre_tokenizers.ByteLevel()
        rust.train_from_iterator(HARD, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet, **options))
        merges = [tuple(pair) for pair in json.loads(rust.to_str())["model"]["merges"]]
        return RobertaTokenizer(vocab=rust.get_vocab(), merges=merges)
    rust = Tokenizer(models.Unigram())
    rust.pre_tokenizer = pre_tokenizers.Metaspace()
    rust.train_from_iterator(HARD, trainers.UnigramTrainer(vocab_size=90, unk_token="<unk>", **options))
    return XLMRobertaTokenizer(vocab=[tuple(piece) for piece in json.loads(rust.to_str())["model"]["vocab"]])


@pytest.mark.parametrize("kind", ["trained", "cased WordPiece", "byte-level BPE", "Unigram"])
def test_the_file_alone_gives_the_ids_that_transformers_gives(kind: str, tmp_path: Path) -> None:
    made(kind).save_pretrained(tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    rust = Tokenizer.from_str((tmp_path / "tokenizer.json").read_text(encoding="utf-8"))
    for pairs in (None, HARD[::-1]):
        for length in (8, 64):
            table = TextEncoder(rust, length, pair=pairs is not None).encode(HARD, pairs)
            expected = theirs(HARD, pairs, truncation=True, max_length=length)
            assert [tokens_of(table, row) for row in range(len(HARD))] == expected["input_ids"]
        for long in ("head-tail", "windows"):
            if pairs is None or long != "windows":
                tables = [TextEncoder(each, 8, long).encode(HARD, pairs) for each in (rust, theirs.backend_tokenizer)]
                for name in ("tokens", "offsets", "pair_start", "truncated"):
                    np.testing.assert_array_equal(*(getattr(table, name) for table in tables))
