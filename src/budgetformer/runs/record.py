"""run.json and export.json: what a directory says of itself, checked before anything else in it is opened."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from budgetformer.errors import ModelError
from budgetformer.runs.files import WEIGHTS, check_hashes, read_json
from budgetformer.spec import ModelSpec

FORMAT_VERSION = 1  # of run.json and export.json
TASKS = {"single": "single_label_classification", "multi": "multi_label_classification", "regression": "regression"}
_REMEDY = "give the directory of a run or an export"


class _Run(BaseModel):
    """The keys of run.json that answers depend on."""

    model_config = ConfigDict(strict=True)

    name: str
    task: Literal["single_label_classification", "multi_label_classification", "regression"]
    labels: list[str]
    pairs: bool
    max_length: int = Field(ge=1)
    text_columns: list[str] | None = None
    data: dict[str, Any] | None = None
    data_digests: dict[str, str] | None = None
    sha256: dict[str, str] = {}


class _Export(_Run):
    """Those of export.json."""

    dial: str
    model: ModelSpec
    format: str
    precision: str
    graphs: list[dict[str, Any]]
    sha256: dict[str, str]


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a finished run or an export whose other files are those that were written.

    The weights of a run are not looked at here: who loads them verifies them.
    """
    file = folder / ("export.json" if (folder / "export.json").exists() else "run.json")
    record = read_json(file, _REMEDY)
    check_format(folder, record)
    exported = file.name == "export.json"
    if not exported and not (folder / "config.json").exists():
        raise ModelError(f"{folder} is not finished (status: {record.get('status')}): continue it with --resume")
    record = read_json(file, f"{_REMEDY}{', or export it again' * exported}", _Export if exported else _Run)
    check_hashes(folder, record.get("sha256", {}), ".json", *(WEIGHTS if exported else ()))
    return record


def check_format(folder: Path, record: Mapping[str, Any]) -> None:
    """Refuse a run that another version of this package wrote in another format."""
    if (version := record.get("format_version")) != FORMAT_VERSION:
        what = "no format version" if version is None else f"the format version {version!r:.20}"
        raise ModelError(
            f"{folder} has {what}, and this budgetformer reads version {FORMAT_VERSION}: train the run again, or use "
            "the budgetformer that wrote it"
        )
