"""Finished cells without their weights, a file for each data set: to publish, and to go on from on another machine."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from budgetformer.errors import UsageError
from budgetformer.runs.files import named_write_errors, read_json, write_bytes
from budgetformer_reproduction.cells import REMEDY, check_outcome
from budgetformer_reproduction.scale import DATASETS

_RECORD = ("status", "seed", "labels", "model", "recipe", "environment", "data_fingerprint", "training")


def pack(source: Path, target: Path, datasets: Sequence[str] = DATASETS) -> list[Path]:
    """Write TARGET/DATASET.zip with what tables and figures read of the finished cells in SOURCE; no text, no path.

    Unpacked into another folder they are finished cells there, but for the attention maps, which need weights.
    """
    done = [folder for folder in sorted((source / "cells").glob("*")) if _is_done(folder)]
    if not done:
        raise UsageError(f"{source} holds no finished cells (cells/*/run.json): reproduce an experiment into it first")
    with named_write_errors(target):
        target.mkdir(parents=True, exist_ok=True)
    files = []
    for dataset in datasets:
        if folders := [folder for folder in done if folder.name.startswith(f"{dataset}-")]:
            content = io.BytesIO()
            with zipfile.ZipFile(content, "w") as archive:
                for folder in folders:
                    for name, data in _files(folder).items():
                        info = zipfile.ZipInfo(f"cells/{folder.name}/{name}")  # of a fixed date: same cells, same bytes
                        archive.writestr(info, data, zipfile.ZIP_DEFLATED, 9)
            files.append(target / f"{dataset}.zip")
            write_bytes(files[-1], content.getvalue())
    return files


def _is_done(folder: Path) -> bool:
    file = folder / "run.json"
    return file.exists() and (folder / "probes.json").exists() and read_json(file, REMEDY)["status"] == "done"


def _files(folder: Path) -> dict[str, bytes]:
    """What is read of a cell, by file name."""
    check_outcome(folder)
    record: dict[str, Any] = {k: v for k, v in read_json(folder / "run.json", REMEDY).items() if k in _RECORD}
    if "recipe" in record:
        record["recipe"] = {**record["recipe"], "tokenizer": None}  # where it lay
    files = {name: (folder / name).read_bytes() for name in ("probes.json", "outcome.npz")}
    for name in ("history.jsonl", "config.json"):
        if (folder / name).exists():
            files[name] = (folder / name).read_bytes()
    if (folder / "evaluation.json").exists():
        test = read_json(folder / "evaluation.json", REMEDY)["test"]
        files["evaluation.json"] = json.dumps({"test": {key: test[key] for key in ("budget", "cost")}}).encode()
    return {**files, "run.json": json.dumps(record).encode()}  # last: it says that the others are there
