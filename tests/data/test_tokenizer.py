"""Tokenizers load from what people have, and train to the same bytes every time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from budgetformer.data.locate import DataSource
from budgetformer.data.tokenizer import load_tokenizer, train_tokenizer
from budgetformer.errors import DataError, ModelError, UsageError

TEXTS = [f"The {a} fox jumped over {b} lazy dogs, naïvely: {a}{b}!" for a in ("quick", "Brown") for b in range(40)]
PIECES = ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "hello", "world", "##ly", ",", "你"]


@pytest.fixture
def vocabulary(tmp_path: Path) -> Path:
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(PIECES) + "\n", encoding="utf-8")
    return path


def test_a_vocabulary_file_is_berts_tokenizer(vocabulary: Path) -> None:
    tokenizer = load_tokenizer(vocabulary)
    assert len(tokenizer) == len(PIECES)
    encoded = tokenizer("Héllo, WORLDLY", "你 nope")
    assert tokenizer.convert_ids_to_tokens(encoded["input_ids"]) == [
        "[CLS]", "hello", ",", "world", "##ly", "[SEP]", "你", "[UNK]", "[SEP]",
    ]  # fmt: skip
    assert encoded["token_type_ids"] == [0] * 6 + [1] * 3
    assert tokenizer.pad_token_id == 0


def test_saved_and_loaded_again_it_is_the_same(vocabulary: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    first = load_tokenizer(vocabulary)
    first.save_pretrained(tmp_path / "saved")
    assert sorted(p.name for p in (tmp_path / "saved").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    for second in (AutoTokenizer.from_pretrained(tmp_path / "saved"), load_tokenizer(tmp_path / "saved")):
        assert dict(second("hello", "world")) == dict(first("hello", "world"))
        assert second.backend_tokenizer.to_str() == first.backend_tokenizer.to_str()


def test_a_trained_tokenizer_knows_its_texts() -> None:
    tokenizer = train_tokenizer(iter(TEXTS), vocab_size=200)
    assert tokenizer.convert_ids_to_tokens(range(5)) == ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert len(tokenizer) <= 200
    ids = tokenizer("the QUICK fox jumped naively")["input_ids"]
    assert tokenizer.convert_ids_to_tokens(ids) == ["[CLS]", "the", "quick", "fox", "jumped", "naively", "[SEP]"]
    assert tokenizer("a", "b")["token_type_ids"] == [0, 0, 0, 1, 1]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the quick fox jumped naively"


def test_training_gives_the_same_bytes_in_every_process() -> None:
    code = (
        "import hashlib\nfrom budgetformer.data.tokenizer import train_tokenizer\n"
        f"t = train_tokenizer(iter({TEXTS!r}), vocab_size=150)\n"
        "print(hashlib.sha256(t.backend_tokenizer.to_str().encode()).hexdigest())"
    )
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(2)]
    assert runs[0].stdout == runs[1].stdout


def test_nothing_is_learned_from_words_that_are_too_long_to_be_read() -> None:
    """Learning from 300,000 times the same letter would take minutes; 40,000 show it."""
    endless = ["x" * 40_000, "😀" * 40_000, "y" * 150 + "-fine-" + "z" * 150]
    with_them = train_tokenizer([*TEXTS, *endless], vocab_size=300)
    without = train_tokenizer([*TEXTS, "x 😀 y z -fine-"], vocab_size=300)
    assert max(map(len, with_them.get_vocab())) < 20
    assert with_them.tokenize("fine") == ["fine"]
    assert with_them.tokenize("The quick fox") == without.tokenize("The quick fox")
    assert with_them.tokenize("x" * 101) == ["[UNK]"]


def test_a_long_word_in_which_every_part_is_short_is_learned_from() -> None:
    address = "https://example.org/" + "/".join(["directory"] * 30)
    assert train_tokenizer([address] * 3, vocab_size=200).tokenize("directory") == ["directory"]


def test_training_says_that_it_trains_a_tokenizer(tmp_path: Path) -> None:
    from budgetformer.training.prepare import prepare
    from budgetformer.training.recipe import Recipe

    (tmp_path / "d.csv").write_text("text,label\n" + "".join(f"text {i},{'ab'[i % 2]}\n" for i in range(50)))
    (tmp_path / "run").mkdir()
    lines: list[str] = []
    prepare(DataSource(str(tmp_path / "d.csv")), Recipe.make(vocab_size=200), tmp_path / "run", lines.append)
    assert "training the tokenizer on 40 texts" in lines


def test_rare_characters_do_not_fill_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    from budgetformer.data import tokenizer as module

    monkeypatch.setattr(module, "MAX_ALPHABET", 10)
    tokenizer = train_tokenizer(["aaa bbb ab ba " * 5 + "".join(map(chr, range(0x400, 0x450)))], vocab_size=60)
    assert len(tokenizer) <= 60
    assert "[UNK]" in tokenizer.convert_ids_to_tokens(tokenizer("Ӿ")["input_ids"])


@pytest.mark.parametrize(
    ("texts", "size", "error", "message"),
    [([], 100, DataError, "there is no text"), (TEXTS, 20, UsageError, "vocab_size is 20: the characters")],
)
def test_training_on_too_little_is_refused(texts: list[str], size: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        train_tokenizer(iter(texts), vocab_size=size)


def test_what_is_no_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("hello\nworld\n")
    (tmp_path / "twice.txt").write_text("\n".join([*PIECES, "hello"]), encoding="utf-8")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("vocab.txt", r"no \[PAD\], \[UNK\].*BERT's"),
        ("twice.txt", "'hello' occurs twice"),
        ("latin.txt", r"'utf-8' codec can't decode byte 0xe9 in position 3.*: a vocabulary is UTF-8"),
        ("tokenizer.json", "a directory, a name on the hub, or a vocabulary file"),
        ("empty", "no tokenizer can be loaded in this directory"),
    ):
        with pytest.raises(ModelError, match=message):
            load_tokenizer(tmp_path / name)
    with pytest.raises(ModelError, match=r"in the hub's cache \(offline\)"):
        load_tokenizer("nobody/nothing-of-this-name", offline=True)


def test_a_vocabulary_that_may_not_be_read_is_said_to_be_so(vocabulary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> str:
        raise PermissionError(13, "Permission denied", str(vocabulary))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(ModelError, match=r"vocab.txt cannot be read: permission denied; let this user read it"):
        load_tokenizer(vocabulary)


def test_it_works_inside_a_pipeline(vocabulary: Path) -> None:
    from transformers import BertConfig, BertForSequenceClassification, pipeline

    config = BertConfig(vocab_size=len(PIECES), hidden_size=8, num_hidden_layers=1, num_attention_heads=1,
                        intermediate_size=8)  # fmt: skip
    classify = pipeline(
        "text-classification", model=BertForSequenceClassification(config), tokenizer=load_tokenizer(vocabulary)
    )
    assert len(classify(["hello", "hello, world"], batch_size=2)) == 2
