"""Tokenizers: any Hugging Face one, a BERT vocabulary file, or a WordPiece trained on the data itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from budgetformer.errors import DataError, ModelError, UsageError
from budgetformer.runs.files import named_read_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MAX_ALPHABET = 1000
MAX_WORD = 100  # characters of a word; WordPiece reads a longer one as [UNK]


def load_tokenizer(name: str | Path, *, offline: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer from a directory, a BERT vocabulary file (one piece per line), or the hub by its name.

    The hub is asked only for a name that is no path here, and never if `offline`.
    """
    path = Path(name).expanduser()
    if path.is_file() and path.suffix == ".txt":
        return _from_vocabulary(path)
    if path.is_file():
        raise ModelError(f"{path}: a tokenizer is a directory, a name on the hub, or a vocabulary file (.txt)")
    from transformers import AutoTokenizer

    local = path.is_dir()
    if local and (file := path / "tokenizer.json").exists():
        with named_read_errors(file, "copy or save it again"):
            file.open("rb").close()
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(path if local else name), local_files_only=local or offline)
    except (OSError, ValueError, KeyError, AttributeError) as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        where = "in this directory" if local else "in the hub's cache (offline)" if offline else "on the hub"
        raise ModelError(f"{name}: no tokenizer can be loaded {where} ({reason}): check the path or name") from None
    if not tokenizer.is_fast:
        raise ModelError(f"{name}: this tokenizer has no fast (Rust) version: choose one with a tokenizer.json")
    if tokenizer.pad_token_id is None:
        raise ModelError(f"{name}: this tokenizer has no padding token, which batches need: choose another")
    return tokenizer  # type: ignore[no-any-return]


def tokenizer_files(folder: Path) -> dict[str, bytes]:
    """A saved tokenizer as its files, by name."""
    names = [*folder.glob("tokenizer*.json"), *folder.glob("special_tokens_map.json")]
    return {file.name: file.read_bytes() for file in sorted(names)}


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = 8192) -> PreTrainedTokenizerFast:
    """A lower-casing WordPiece trained on the texts: the same texts give the same bytes, in any process.

    The texts are read twice: those of an iterator are held in memory, those of anything else are not.
    """
    from tokenizers import trainers

    texts = list(texts) if iter(texts) is texts else texts
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    by_frequency = sorted((char for char in counts if not char.isspace()), key=lambda char: (-counts[char], char))
    if not by_frequency:
        raise DataError("a tokenizer cannot be trained: there is no text")
    alphabet, dropped = sorted(by_frequency[:MAX_ALPHABET]), dict.fromkeys(map(ord, by_frequency[MAX_ALPHABET:]))
    special = {piece: number for number, piece in enumerate(SPECIAL)}
    rust, untrained = _wordpiece(special), _wordpiece(special)  # nobody may ask anything of the one that trains
    continued = _continuations(untrained, alphabet)
    least = len(SPECIAL) + len(alphabet) + len(continued)
    if vocab_size < least:
        raise UsageError(f"vocab_size is {vocab_size}: the characters of these texts alone need {least}")
    # The trainer numbers the pieces "##x" in the order of a randomly seeded hash map, and breaks ties
    # between merges by those numbers: given as special tokens they have their numbers beforehand.
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=[*SPECIAL, *continued], show_progress=False
    )
    rust.train_from_iterator((_readable(text, untrained).translate(dropped) for text in texts), trainer)
    vocabulary = rust.get_vocab(with_added_tokens=True)
    return _fast(_wordpiece(dict(sorted(vocabulary.items(), key=lambda item: item[1]))))


def _readable(text: str, rust: Tokenizer) -> str:
    """The text without words that are too long to be read: time and memory of training grow with their square.

    Words are joined by blanks: Python knows more white space than the tokenizer, which drops some of it.
    """
    words = text.split()
    for place, word in enumerate(words):
        if len(word) > MAX_WORD:
            parts = [part for part, _ in rust.pre_tokenizer.pre_tokenize_str(rust.normalizer.normalize_str(word))]
            if any(len(part) > MAX_WORD for part in parts):
                words[place] = " ".join(part for part in parts if len(part) <= MAX_WORD)
    return " ".join(words)


def _continuations(rust: Tokenizer, alphabet: Iterable[str]) -> list[str]:
    """The pieces of one character that may follow another within a word."""
    following: set[str] = set()
    for char in alphabet:
        word = rust.normalizer.normalize_str(f"a{char}a")
        for piece, _ in rust.pre_tokenizer.pre_tokenize_str(word):
            following.update(piece[1:])
    return [f"##{char}" for char in sorted(following)]


def _from_vocabulary(path: Path) -> PreTrainedTokenizerFast:
    with named_read_errors(path, "a vocabulary is UTF-8, one piece per line"):
        text = path.read_text(encoding="utf-8")
    pieces = [piece.rstrip("\r") for piece in text.rstrip("\r\n").split("\n")]
    missing = [piece for piece in SPECIAL if piece not in pieces]
    if missing:
        raise ModelError(f"{path}: no {', '.join(missing)} in this vocabulary: is it BERT's, one piece per line?")
    twice, count = Counter(pieces).most_common(1)[0]
    if count > 1:
        raise ModelError(f"{path}: the piece {twice!r} occurs twice: every line must be different")
    return _fast(_wordpiece({piece: number for number, piece in enumerate(pieces)}))


def _wordpiece(vocabulary: dict[str, int]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    rust = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]", max_input_chars_per_word=MAX_WORD))
    rust.normalizer = normalizers.BertNormalizer(lowercase=True)
    rust.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    rust.decoder = decoders.WordPiece()
    rust.post_processor = processors.TemplateProcessing(
        single="[CLS]:0 $A:0 [SEP]:0",
        pair="[CLS]:0 $A:0 [SEP]:0 $B:1 [SEP]:1",
        special_tokens=[(piece, vocabulary[piece]) for piece in ("[CLS]", "[SEP]")],
    )
    return rust


def _fast(rust: Tokenizer) -> PreTrainedTokenizerFast:
    from transformers import PreTrainedTokenizerFast

    names = {f"{piece.strip('[]').lower()}_token": piece for piece in SPECIAL}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=rust, model_input_names=inputs, **names)
