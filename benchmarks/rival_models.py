"""The rivals of benchmarks/rivals.py: how they are fitted, and what opens them with as few imports as they need."""

from __future__ import annotations

import json
import os
import pickle
import re
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from budgetformer.runs.files import write_text
from budgetformer.speed import Answer, open_scorer

FITTED = ("tfidf", "static", "frozen")  # nothing in them is random
Embed = Callable[[Sequence[str], int], Any]


def joined(texts: Sequence[str], pairs: Sequence[str] | None) -> list[str]:
    return [f"{text} {pair}" for text, pair in zip(texts, pairs or [""] * len(texts), strict=True)]


def features(embed: Embed, texts: Sequence[str], pairs: Sequence[str] | None, batch: int) -> Any:
    """(T, D), or (T, 4 D) of pairs; every text's vector has the length 1."""
    vectors = [embed(part, batch) for part in (texts, pairs) if part is not None]
    vectors = [v / np.maximum(np.linalg.norm(v, axis=1, keepdims=True), 1e-9) for v in vectors]
    if pairs is None:
        return vectors[0]
    u, v = vectors
    return np.hstack([u, v, abs(u - v), u * v])


def encoder(folder: Path) -> tuple[Any, Any]:
    """The encoder that base.json names, and its tokenizer."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModel
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    base = json.loads((folder / "base.json").read_text(encoding="utf-8"))
    tokenizer = Tokenizer.from_file(str(Path(base["base"]) / "tokenizer.json"))
    tokenizer.enable_truncation(base["max_length"])
    tokenizer.enable_padding()
    return AutoModel.from_pretrained(base["base"]).eval(), tokenizer


def mean_states(model: Any, ids: Any, mask: Any) -> Any:
    import torch

    with torch.inference_mode():
        states = model(input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask)).last_hidden_state.numpy()
    weights = np.asarray(mask, np.float32)[:, :, None]
    return (states * weights).sum(1) / weights.sum(1)


def frozen(folder: Path) -> Embed:
    model, tokenizer = encoder(folder)

    def embed(texts: Sequence[str], batch: int) -> Any:
        order, result = np.argsort([len(text) for text in texts]), [np.empty(0)] * len(texts)
        for start in range(0, len(texts), batch):
            rows = order[start : start + batch]
            encoded = tokenizer.encode_batch([texts[row] for row in rows])
            means = mean_states(model, [e.ids for e in encoded], [e.attention_mask for e in encoded])
            for row, vector in zip(rows, means, strict=True):
                result[row] = vector
        return np.stack(result)

    return embed


def static(folder: Path) -> Embed:
    from tokenizers import Tokenizer

    tokenizer, table = Tokenizer.from_file(str(folder / "tokenizer.json")), np.load(folder / "table.npy")
    tokenizer.no_truncation()
    tokenizer.no_padding()

    def embed(texts: Sequence[str], batch: int) -> Any:
        encoded = tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return np.stack([table[e.ids].sum(0) for e in encoded])  # the mean but for a factor, which `features` removes

    return embed


def write_static(folder: Path, width: int = 256) -> None:
    """Every word piece through the encoder, between the marks of beginning and end."""
    from sklearn.decomposition import PCA

    model, tokenizer = encoder(folder)
    first, last = (tokenizer.encode("").ids[place] for place in (0, -1))
    size = tokenizer.get_vocab_size()
    parts = [[[first, piece, last] for piece in part] for part in np.array_split(np.arange(size), -(-size // 512))]
    vectors = np.concatenate([mean_states(model, ids, np.ones_like(ids)) for ids in parts])
    vectors = PCA(min(width, *vectors.shape), random_state=0).fit_transform(vectors)
    frequency = 1 / np.arange(2, size + 2)  # Zipf: a vocabulary is sorted by how often its pieces occur
    weights = 1e-4 / (1e-4 + frequency / frequency.sum())
    for piece, place in tokenizer.get_vocab().items():
        weights[place] *= not re.fullmatch(r"\[.+\]", piece)  # [UNK], [PAD], [unused7] say nothing
    np.save(folder / "table.npy", (vectors * weights[:, None]).astype(np.float32))
    tokenizer.save(str(folder / "tokenizer.json"))


def opened(rival: str, folder: Path, budget: str | None = None) -> Answer:
    """What answers texts with the names of labels."""
    if rival not in FITTED:
        scorer = open_scorer(folder, budget)
        names = np.array(scorer.labels)
        return lambda texts, pairs, batch: names[scorer.answer(texts, pairs, batch)]
    if rival == "tfidf":
        model = pickle.loads((folder / "model.pickle").read_bytes())
        return lambda texts, pairs, batch: model.predict(joined(texts, pairs))
    embed, saved = {"static": static, "frozen": frozen}[rival](folder), np.load(folder / "head.npz")
    names, weights, bias = (saved[name] for name in ("names", "weights", "bias"))
    return lambda texts, pairs, batch: names[(features(embed, texts, pairs, batch) @ weights + bias).argmax(1)]


def rows_of(data: Any, split: str) -> tuple[list[str], list[str] | None, Any]:
    examples = list(data.splits[split].examples())
    pairs = [e.text_pair for e in examples]
    return [e.text for e in examples], None if None in pairs else pairs, np.array([str(e.label) for e in examples])


def fit(options: Namespace, dataset: str, rival: str, folder: Path) -> None:
    """A rival without random numbers; its regularisation is chosen on validation rows (of TF-IDF it is fixed)."""
    from retrofit import fit_tfidf, source
    from sklearn.linear_model import LogisticRegression
    from stages import LENGTH

    from budgetformer.data.dataset import open_data

    data = open_data(source(options, dataset))
    texts, pairs, labels = rows_of(data, "train")
    if rival == "tfidf":
        (folder / "model.pickle").write_bytes(pickle.dumps(fit_tfidf(joined(texts, pairs), list(labels))))
        return
    base = {"base": str(Path(options.base).resolve()), "max_length": LENGTH.get(dataset, 128)}
    write_text(folder / "base.json", json.dumps(base))
    if rival == "static":
        write_static(folder)
    embed = {"static": static, "frozen": frozen}[rival](folder)
    x, tried = features(embed, texts, pairs, 32), []
    texts, pairs, held_out = rows_of(data, "validation")
    y = features(embed, texts, pairs, 32)
    for strength in (1, 10, 100):
        model = LogisticRegression(C=strength, max_iter=1000).fit(x, labels)
        tried.append((model.score(y, held_out), -strength, model))
    model = max(tried, key=lambda one: one[:2])[2]
    weights, bias = model.coef_.T, model.intercept_
    if len(model.classes_) == 2:
        weights, bias = np.hstack([0 * weights, weights]), np.append(0, bias)
    np.savez(folder / "head.npz", names=model.classes_, weights=weights.astype(np.float32), bias=bias)
