"""The report: whole for every kind of task, safe with any text, the same for the same JSON."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from budgetformer.errors import ModelError
from budgetformer.report import write_report

EVIL = "<script>alert(1)</script>"
NAMES = ["World", "Sports", "Business", "Sci/Tech"]
CONFUSION = [[1740, 40, 70, 50], [14, 1870, 9, 7], [60, 8, 1660, 172], [55, 12, 140, 1693]]
SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"


def proportion(value: float) -> dict[str, float]:
    return {"value": value, "low": value - 0.007, "high": value + 0.006}


def quality(task: str, names: list[str], confusion: list[list[int]]) -> tuple[str, float, dict[str, Any]]:
    if task == REGRESSION:
        return "r2", 0.42, {"mse": {"value": 0.31, "low": 0.28, "high": 0.34}, "mae": 0.4, "r2": 0.42}
    classes = [{"label": n, "rows": 1900, "precision": 0.9, "recall": 0.92, "f1": 0.91} for n in names]
    if task == MULTI:
        exact = proportion(0.62)
        return "micro_f1", 0.71, {"micro_f1": 0.71, "macro_f1": 0.6, "exact_match": exact, "per_class": classes}
    accuracy = sum(row[i] for i, row in enumerate(confusion)) / max(1, sum(map(sum, confusion)))
    details = {"accuracy": proportion(accuracy), "per_class": classes, "labels": names, "confusion": confusion}
    return "accuracy", accuracy, details


def evaluation(
    task: str = SINGLE, split: str = "test", names: list[str] = NAMES, confusion: list[list[int]] = CONFUSION
) -> dict[str, Any]:
    metric, score, details = quality(task, names, confusion)
    by_layer = [0.59, 0.18, 0.125, 0.125]
    budget: dict[str, Any] = {
        "heads": 8, "s_mean": 0.198, "s_per_layer": [0.58, 0.11, 0.05, 0.04],
        "s_std_per_layer": [0.1, 0.05, 0.01, 0.01],
        "k_over_h": 0.255, "k_over_h_per_layer": by_layer, "entropy_per_layer": [1.0, 0.9, 0.8, 0.7],
    }  # fmt: skip
    if task == SINGLE:
        budget["by_class"] = [
            {"label": n, "rows": 1900, "s_per_layer": by_layer,
             "k_over_h_per_layer": [v * (0.8 + i / 9) for v in by_layer]}
            for i, n in enumerate(names)
        ]  # fmt: skip
    answer: Any = {SINGLE: names[0], MULTI: names[:2], REGRESSION: 3.25}[task]
    hardest = [
        {"row": 7, "line": 8, "loss": 9.13, "label": answer, "predicted": answer, "file": "test.csv",
         "text": "Stocks fell after the match was called off. " * 3, "text_pair": None},
        {"row": 9, "line": 10, "loss": 8.5, "label": answer, "predicted": answer, "file": None, "text": "Short.",
         "text_pair": "And a partner."},
    ]  # fmt: skip
    cost = {
        "flops_per_text": 2.61e7, "flops_per_text_dense": 3.4e7, "flops_ratio": 0.768,
        "flops_per_text_paper_style": 3.3e7, "attention_flops_ratio": 0.33, "attention_share_of_dense": 0.35,
        "papers_count_per_text": 1.2e7, "mean_tokens": 52.4,
    }  # fmt: skip
    return {
        "split": split, "rows": 7600, "dial": "learned", "task": task, "metric": metric, "score": score,
        "quality": details, "budget": budget, "cost": cost, "hardest": hardest,
    }  # fmt: skip


def history(epochs: int = 3, lift: float = 0.0) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for epoch in range(1, epochs + 1):
        for i in range(20):
            step = (epoch - 1) * 200 + 10 * i
            parts = {"task": 1.0, "budget": 0.01, "entropy": 0.001}
            loss = 1.4 / (1 + step / 80) + 0.03 * ((step * 7) % 11) / 11
            lines.append({"kind": "step", "step": step, "epoch": epoch, "loss": loss, "parts": parts, "s_mean": 0.4})
        s = 0.5 / epoch + 0.03
        lines.append(
            {
                "kind": "epoch", "epoch": epoch, "step": epoch * 200, "best": epoch == epochs,
                "train": {"loss": 0.5 / epoch, "s_mean": s},
                "validation": {"metric": "accuracy", "score": 0.92 - 0.06 / epoch + lift,
                               "score_full": 0.921 - 0.05 / epoch, "loss": 0.3 + 0.1 / epoch,
                               "s_mean": s - 0.02, "k_over_h": s + 0.03},
            }
        )  # fmt: skip
    return lines


def dials(metric_value: float) -> list[dict[str, Any]]:
    table = [("fixed:0.125", 0.125, -0.05), ("fixed:0.25", 0.25, -0.01), ("fixed:0.5", 0.5, 0.001),
             ("full", 1.0, 0.002), ("max:0.25", 0.18, -0.012), ("max:0.5", 0.22, -0.003)]  # fmt: skip
    return [
        {"dial": name, "split": "test", "score": metric_value + d, "low": metric_value + d - 0.007,
         "high": metric_value + d + 0.007, "k_over_h": k, "flops_ratio": 0.66 + 0.35 * k, "s_mean": k}
        for name, k, d in table
    ]  # fmt: skip


def facts(task: str = SINGLE, names: list[str] = NAMES) -> dict[str, Any]:
    return {
        "budgetformer": "0.1.0", "name": "ag-news", "status": "done", "data": {"data": "news.csv", "text": "title"},
        "task": task, "labels": names, "splits": {"train": 108000, "validation": 12000, "test": 7600},
        "columns": "text from 'title', label from 'class'", "warnings": ["12 rows were repeated and dropped"],
        "cut": {"train": 31, "validation": 2, "test": 0}, "max_length": 128,
        "model": {"parameters": 4743812, "allocator": "learned", "layers": 4, "heads": 8, "width": 128},
        "recipe": {"learning_rate": 0.001, "schedule": {"warmup": 200, "decay": "linear"}, "freeze": []}, "seed": 0,
        "training": {"steps": 600, "planned_steps": 600, "progress": 1.0, "epochs": 3, "seconds": 1080.4,
                     "tokens_per_second": 15800.2, "best_epoch": 3, "stopped_early": False},
        "environment": {"python": "3.11.9", "torch": "2.13.0", "commit": "93be5be", "threads": 2, "cpu": "x86_64"},
        "data_fingerprint": "sha256:0123abcd",
    }  # fmt: skip


def write(
    run: Path, facts_: dict[str, Any], results: dict[str, Any], lines: list[dict[str, Any]], twin: Any = None
) -> str:
    run.mkdir(parents=True, exist_ok=True)
    (run / "run.json").write_text(json.dumps(facts_), encoding="utf-8")
    (run / "evaluation.json").write_text(json.dumps(results), encoding="utf-8")
    (run / "history.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")
    if twin:
        (run / "baseline").mkdir(exist_ok=True)
        (run / "baseline" / "history.jsonl").write_text("".join(json.dumps(x) + "\n" for x in twin), encoding="utf-8")
    page = write_report(run)
    assert page == run / "report.html"
    return page.read_text(encoding="utf-8")


def complete() -> dict[str, Any]:
    ours, theirs = evaluation(), evaluation()
    theirs |= {"score": 0.9195, "hardest": [], "cost": theirs["cost"] | {"papers_count_per_text": 1.6e7}}
    return {
        "test": ours,
        "validation": evaluation(split="validation"),
        "dials": dials(ours["score"]),
        "baseline": {"test": theirs, "validation": theirs},
        "versus_baseline": {
            "only_ours_right": 160, "only_baseline_right": 178, "difference": -0.0023, "p_value": 0.35,
            "verdict": "not significantly different from the dense twin (-0.23 points, p = 0.35)",
        },
    }  # fmt: skip


class Words(HTMLParser):
    """The page's visible words, and whether every tag that opens also closes."""

    VOID = frozenset({"meta", "link", "path", "use", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.words: list[str] = []
        self.tags: set[str] = set()
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.ids += [str(v) for k, v in attrs if k == "id"]
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.ids += [str(v) for k, v in attrs if k == "id"]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.stack:
            self.words.append(data)


def parse(page: str) -> tuple[str, Words]:
    parser = Words()
    parser.feed(page)
    parser.close()
    assert parser.stack == []
    assert len(parser.ids) == len(set(parser.ids))
    return " ".join(" ".join(parser.words).replace("\N{NO-BREAK SPACE}", " ").split()), parser


def test_a_complete_run_says_everything(tmp_path: Path) -> None:
    page = write(tmp_path, facts(), complete(), history(), history(lift=0.01))
    text, _ = parse(page)
    assert page.count("<svg") == 4
    for words in (
        "A Transformer of 4 layers with 8 heads each and 4,743,812 parameters",
        "trained on 108,000 texts from news.csv to predict one of 4 classes",
        "95 % interval 90.9 to 92.2 %",
        "This model is not significantly different from the dense twin (-0.23 points, p = 0.35).",
        "best after epoch 3 (90.0 %)",
        "from 12.5 % of the heads (accuracy 86.6 %) to 100.0 % (91.8 %); left to itself the model runs 25.5 %",
        "Layer 1 runs the most heads (59.0 %)",
        "6,963 of 7,600 test texts were answered right",
        "the most common mistake is “Business” taken for “Sci/Tech” (172 of them).",
        "A text costs 26.1 M FLOPs instead of 34 M, 76.8 % of the dense twin",
        "ceiling: if attention cost nothing 22.1 M 34 M 65.0 %",
        "The paper's own count (counted, not timed)",
        "the paper's count 12 M 16 M 75.0 %",
        "Stocks fell after the match",
        "schedule.warmup 200",
        "12 rows were repeated and dropped",
        "sha256:0123abcd",
        "dense twin",
    ):
        assert words in text
    assert list(tmp_path.glob(".report*")) == []


def test_without_a_baseline_or_a_test_split(tmp_path: Path) -> None:
    results = {"test": None, "validation": evaluation(split="validation"), "dials": [], "baseline": None}
    text, _ = parse(write(tmp_path, facts() | {"status": "interrupted"}, results, []))
    assert "There is no test split" in text
    assert "No dense twin was evaluated" in text
    assert "not finished (interrupted, at 100 % of its plan)" in text
    assert "No history was recorded" in text
    assert "evaluated at one budget only" in text
    assert "validation accuracy" in text


def test_regression(tmp_path: Path) -> None:
    mine = evaluation(REGRESSION)
    results = {"test": mine, "validation": mine, "dials": dials(0.42), "baseline": {"test": mine}}
    text, _ = parse(write(tmp_path, facts(REGRESSION, []), results, history()))
    assert "mean squared error 0.310 (95 % interval 0.280 to 0.340)" in text
    assert "R² 0.420 here, 0.420 there; no paired test was made" in text
    assert "This task has no classes to confuse" in text
    assert "to predict a number for each text" in text
    assert "Confusion matrix" not in text


def test_multi_label(tmp_path: Path) -> None:
    results = complete() | {"test": evaluation(MULTI)}
    text, _ = parse(write(tmp_path, facts(MULTI), results, history()))
    assert "all labels right 62.0 %" in text
    assert "counting texts with all labels right" in text
    assert "World, Sports" in text
    assert "Class by class" in text
    assert "Confusion matrix" not in text


def test_many_classes_show_the_worst_pairs(tmp_path: Path) -> None:
    names = [f"intent {i}" for i in range(77)]
    confusion = [[30 if i == j else int((i * j) % 9 == 4) for j in range(77)] for i in range(77)]
    mine = evaluation(names=names, confusion=confusion)
    text, _ = parse(write(tmp_path, facts(names=names), {"test": mine}, history(1)))
    assert "The most confused pairs" in text
    assert "Of 77 classes, the 30 largest." in text
    assert "Confusion matrix" not in text


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    names = [EVIL, "$x_{", '"quoted" & more', "'"]
    mine = evaluation(names=names)
    mine["hardest"][0] |= {"text": EVIL, "file": EVIL}
    made = facts(names=names) | {"name": EVIL, "warnings": [EVIL], "data": {"data": EVIL, EVIL: EVIL}, "columns": EVIL}
    made["recipe"] = {EVIL: EVIL}
    page = write(tmp_path, made, complete() | {"test": mine}, history())
    text, parser = parse(page)
    assert "script" not in parser.tags
    assert EVIL in text
    assert "{{" not in write(tmp_path, made | {"name": "{{ 7 * 7 }}"}, complete(), []).replace("{{ 7 * 7 }}", "")


def test_the_page_needs_nothing_but_itself(tmp_path: Path) -> None:
    page = write(tmp_path, facts(), complete(), history(), history())
    bare = re.sub(r'xmlns(:xlink)?="[^"]*"', "", page)
    assert "http://" not in bare
    assert "https://" not in bare
    assert re.findall(r"(?:href|src)=\"(?!#|data:,)", bare) == []
    assert re.findall(r"url\((?!#)|@import|<script|<iframe|<img", bare) == []


def test_the_same_json_gives_the_same_bytes(tmp_path: Path) -> None:
    here = write(tmp_path / "a", facts(), complete(), history(), history())
    write(tmp_path / "b", facts(), complete(), history(), history())
    code = "import sys, pathlib; from budgetformer.report import write_report; write_report(pathlib.Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "b")], check=True)
    assert (tmp_path / "b" / "report.html").read_text(encoding="utf-8") == here


def blanked(tree: Any) -> Any:
    """The same JSON with every number unknown."""
    if isinstance(tree, dict):
        return {k: blanked(v) for k, v in tree.items()}
    if isinstance(tree, list):
        return [blanked(v) for v in tree]
    return tree if isinstance(tree, str) else None


def test_missing_numbers_and_missing_parts_leave_a_page(tmp_path: Path) -> None:
    results = complete()
    results["test"]["quality"]["confusion"] = []
    results = blanked(results)
    parse(write(tmp_path, blanked(facts()), results, blanked(history())))
    text, _ = parse(write(tmp_path, {}, {}, []))
    assert "The model has not been evaluated yet." in text
    mine = evaluation() | {"score": float("nan")}
    mine["quality"]["accuracy"]["high"] = float("inf")
    text, _ = parse(write(tmp_path, facts(), {"test": mine}, []))
    assert "nan" not in text
    assert "inf " not in text


@pytest.mark.parametrize("name", ["run.json", "history.jsonl", "evaluation.json"])
@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_missing_or_broken_file_is_named(tmp_path: Path, name: str, content: str | None) -> None:
    write(tmp_path, facts(), complete(), history(1))
    old = (tmp_path / "report.html").read_bytes()
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=re.escape(str(tmp_path / name)) + r".*: (a report needs|restore)"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_bytes() == old


def test_importing_the_room_loads_no_plotting() -> None:
    code = "import sys, budgetformer.report; sys.exit('matplotlib' in sys.modules or 'jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
