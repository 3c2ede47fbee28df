"""Files and named data sets -> examples -> token ids -> batches.

Names are loaded when first used: the command line reads `DataSource` for its flags and needs nothing heavier.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_NAMES = {
    "batches": ("Batch", "collate", "eval_plan", "plan_epoch"),
    "check": ("CheckReport", "check_data"),
    "dataset": ("DataSet", "Leak", "Split", "open_data", "open_labelled", "stream_examples"),
    "encoded": ("Encoded", "encode"),
    "examples": ("Example",),
    "locate": ("DataSource",),
    "sources": ("BadRow", "RawRow", "read_rows"),
    "tokenizer": ("load_tokenizer", "train_tokenizer"),
}
_HOMES = {name: f"budgetformer.data.{home}" for home, names in _NAMES.items() for name in names}
__all__ = [*_HOMES]

if TYPE_CHECKING:
    from budgetformer.data.batches import Batch as Batch
    from budgetformer.data.batches import collate as collate
    from budgetformer.data.batches import eval_plan as eval_plan
    from budgetformer.data.batches import plan_epoch as plan_epoch
    from budgetformer.data.check import CheckReport as CheckReport
    from budgetformer.data.check import check_data as check_data
    from budgetformer.data.dataset import DataSet as DataSet
    from budgetformer.data.dataset import Leak as Leak
    from budgetformer.data.dataset import Split as Split
    from budgetformer.data.dataset import open_data as open_data
    from budgetformer.data.dataset import open_labelled as open_labelled
    from budgetformer.data.dataset import stream_examples as stream_examples
    from budgetformer.data.encoded import Encoded as Encoded
    from budgetformer.data.encoded import encode as encode
    from budgetformer.data.examples import Example as Example
    from budgetformer.data.locate import DataSource as DataSource
    from budgetformer.data.sources import BadRow as BadRow
    from budgetformer.data.sources import RawRow as RawRow
    from budgetformer.data.sources import read_rows as read_rows
    from budgetformer.data.tokenizer import load_tokenizer as load_tokenizer
    from budgetformer.data.tokenizer import train_tokenizer as train_tokenizer


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'budgetformer.data' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
