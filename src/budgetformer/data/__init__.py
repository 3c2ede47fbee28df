"""Files and named data sets -> examples -> token ids -> batches.

Names are loaded when first used: the command line reads `DataSource` for its flags and needs nothing heavier.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from budgetformer.data.batches import Batch, collate, eval_plan, plan_epoch
    from budgetformer.data.dataset import DataSet, Split, open_data, open_labelled, stream_examples
    from budgetformer.data.examples import Example
    from budgetformer.data.locate import DataSource
    from budgetformer.data.tokenizer import load_tokenizer, train_tokenizer
    from budgetformer.data.tokens import TextEncoder, TextError, TokenTable, encode_split

__all__ = [
    "Batch", "DataSet", "DataSource", "Example", "Split", "TextEncoder", "TextError", "TokenTable", "collate",
    "encode_split", "eval_plan", "load_tokenizer", "open_data", "open_labelled", "plan_epoch", "stream_examples",
    "train_tokenizer",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for home in ("locate", "examples", "tokenizer", "dataset", "tokens", "batches") if name in __all__ else ():
        if hasattr(module := import_module(f"budgetformer.data.{home}"), name):
            return getattr(module, name)
    raise AttributeError(f"module 'budgetformer.data' has no attribute {name!r}")
