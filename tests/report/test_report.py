"""The report and the card: complete for every kind of task, safe with any text, the same for the same JSON."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.tables import make_table

from budgetformer import BudgetFormerConfig
from budgetformer.engine.scores import Scores
from budgetformer.errors import ModelError
from budgetformer.evaluate import Evaluation, mcnemar, summarize
from budgetformer.report import write_card, write_report
from budgetformer.training.record import dial_point

EVIL = "<script>alert(1)</script>"
NAMES = ["World", "Sports", "Business", "Sci/Tech"]
CONFUSION = [[174, 4, 7, 5], [1, 187, 1, 1], [6, 1, 166, 17], [5, 1, 14, 170]]
SINGLE, MULTI, REGRESSION = "single_label_classification", "multi_label_classification", "regression"
HEADS = np.array([[5, 1, 1, 1], [4, 2, 1, 1], [5, 1, 1, 1], [6, 2, 1, 1]], np.int16)  # by class and layer, of 8
Json = dict[str, Any]


def evaluation(task: str, logits: Any, labels: Any, names: list[str], split: str = "test", dial: str = "learned",
               heads: Any = None) -> Evaluation:  # fmt: skip
    """What the program says of a model with eight heads in each of four layers that answered so."""
    rows = len(logits)
    logits, lengths = np.asarray(logits, np.float32), 20 + np.arange(rows) % 30
    heads = HEADS[np.arange(rows) % 4] if heads is None else np.full((rows, 4), heads, np.int16)
    options = {"num_labels": 1} if task == REGRESSION else {"id2label": dict(enumerate(names))}
    config = BudgetFormerConfig(
        hidden_size=64, num_hidden_layers=4, num_attention_heads=8, intermediate_size=128, vocab_size=50,
        problem_type=task, **options,
    )  # fmt: skip
    table = make_table(np.ones(lengths.sum()), lengths, labels)
    budget = (heads / 8).astype(np.float32)
    scores = Scores(table, task, 8, logits, heads, budget, np.ones((rows, 4), np.float32))
    result = summarize(scores, config.spec, split=split, dial=dial, hardest=2)
    texts = [
        {"file": "test.csv", "text": "Stocks fell after the match was called off. " * 30, "text_pair": None},
        {"file": None, "text": "Short.", "text_pair": "And a partner."},
    ]
    return replace(result, hardest=[row | text for row, text in zip(result.hardest, texts, strict=False)])


def single(names: list[str] = NAMES, confusion: list[list[int]] = CONFUSION, **options: Any) -> Evaluation:
    """Answers with this confusion matrix; rows are shuffled over the classes."""
    cells = [(i, j) for i, row in enumerate(confusion) for j, n in enumerate(row) for _ in range(n)]
    labels, answers = np.random.default_rng(0).permutation(cells).T
    return evaluation(SINGLE, np.eye(len(names))[answers], labels, names, **options)


def multi() -> Evaluation:
    """Two labels a text, of which every third text misses one."""
    labels = np.eye(4)[np.arange(90) % 4] + np.eye(4)[(np.arange(90) + 1) % 4]
    logits = np.where(labels > 0, 2.0, -2.0)
    logits[::3, 0] = -2.0
    return evaluation(MULTI, logits, labels.astype(np.uint8), NAMES)


def regression(rows: int = 60) -> Evaluation:
    values = np.linspace(0, 5, rows, dtype=np.float32)
    return evaluation(REGRESSION, (values + 0.5 * (-1) ** np.arange(rows))[:, None], values, [])


def curve(make: Callable[..., Evaluation]) -> list[Json]:
    """Positions of the dial as training writes them."""
    heads = {"learned": None, "fixed:0.125": 1, "max:0.25": 2, "fixed:0.5": 4, "full": 8}
    return [dial_point(make(dial=dial, heads=k)) for dial, k in heads.items()]


def results(final: Evaluation, twin: Evaluation | None = None, **changes: Any) -> Json:
    """evaluation.json with this evaluation of the test split."""
    versus = mcnemar([True] * 5 + [False] * 7, [False] * 5 + [True] * 7) if twin and final.task != REGRESSION else None
    baseline = {"test": asdict(twin), "validation": asdict(twin)} if twin else None
    validation = asdict(replace(final, split="validation"))
    made = {"test": asdict(final), "validation": validation, "dials": [], "baseline": baseline, "depth": None}
    made["comparison"] = [{"model": "dense twin", **dial_point(twin)}] if twin else []
    made["comparison"].append({"model": "learned", **dial_point(final)})
    return {**made, "versus_baseline": versus, **changes}


def complete() -> Json:
    return results(single(), single(heads=8), dials=curve(single))


def copy(tiny_run: Path, run: Path) -> Path:
    shutil.copytree(tiny_run, run, ignore=shutil.ignore_patterns("*.safetensors", "checkpoints"))
    return run


def change(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(content | changes), encoding="utf-8")


def make_run(tiny_run: Path, run: Path, evaluation: Json, **changes: Any) -> Path:
    """A run with these results, and a record that is a real one with some changes."""
    copy(tiny_run, run)
    labels = evaluation["validation"]["quality"].get("labels", [])
    change(run / "run.json", **{"task": evaluation["validation"]["task"], "labels": labels, **changes})
    (run / "evaluation.json").write_text(json.dumps(evaluation), encoding="utf-8")
    return run


def write(tiny_run: Path, run: Path, evaluation: Json, **changes: Any) -> str:
    """The page of such a run."""
    page = write_report(make_run(tiny_run, run, evaluation, **changes))
    assert page == run / "report.html"
    return page.read_text(encoding="utf-8")


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


def test_a_complete_run_says_everything(tiny_run: Path, tmp_path: Path) -> None:
    page = write(tiny_run, tmp_path / "run", complete(), warnings=["3 rows have an empty text"], cut={"train": 31})
    text, _ = parse(page)
    assert page.count("<svg") == 4
    for words in (
        "A Transformer of 2 layers with 4 heads each and",
        "trained on 160 texts from",
        "reviews.csv to predict one of 4 classes",
        "test accuracy, 95 % interval FLOPs, share of dense heads run",
        "dense twin 91.7 % 89.5 to 93.5 % 100.5 % 100.0 %",
        "this model, as learned 91.7 % 89.5 to 93.5 % 59.3 % 26.6 %",
        "the same Transformer without budgets, exits or words. As learned: the default budget. Measured on 760 test",
        "This model is not significantly different from the dense twin (-16.67 points, p = 0.77).",
        "The validation accuracy was best after epoch",
        "from 12.5 % of the heads (accuracy 91.7 %) to 100.0 % (91.7 %); left to itself the model runs 26.6 %",
        "Measured on the 760 rows of the test split. Choosing heads costs a little too",
        "Layer 1 runs the most heads (62.5 %) and layer 3 the fewest (12.5 %);",
        "by class the mean goes from 26.4 % (“World”) to 26.9 % (“Business”).",
        "697 of 760 test texts were answered right",
        "the most common mistake is “Business” taken for “Sci/Tech” (17 of them).",
        "A text costs 6.1 M FLOPs instead of 10.3 M, 59.3 % of the dense twin",
        "ceiling: if attention cost nothing 4.51 M 10.3 M 43.8 %",
        "The paper's own count (counted, not timed)",
        "the paper's count 2.45 M",
        "Stocks fell after the match",
        "match … (test.csv, line ",
        "Short. And a partner. (line ",
        "learning_rate",
        "warning 3 rows have an empty text",
        "train texts cut 31",
        "fingerprint",
        "commit",
    ):
        assert words in text
    assert list((tmp_path / "run").glob(".*")) == []


def test_a_real_run_says_what_its_json_holds(tiny_run: Path) -> None:
    files = (tiny_run / name for name in ("run.json", "evaluation.json"))
    record, made = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    text, _ = parse((tiny_run / "report.html").read_text(encoding="utf-8"))
    assert f"this model, as learned {100 * made['test']['score']:.1f} %" in text
    assert f"dense twin {100 * made['baseline']['test']['score']:.1f} %" in text
    assert made["versus_baseline"]["verdict"] in text
    assert record["data_fingerprint"] in text
    for point in made["dials"]:
        assert f"{point['dial']} {100 * point['k_over_h']:.1f} %" in text
    twin, _ = parse((tiny_run / "baseline" / "report.html").read_text(encoding="utf-8"))
    assert "evaluated at one budget only" in twin


def test_a_staged_run_opens_on_words_twin_and_budgets(tiny_staged: Path) -> None:
    made = json.loads((tiny_staged / "evaluation.json").read_text(encoding="utf-8"))
    text, parser = parse((tiny_staged / "report.html").read_text(encoding="utf-8"))
    card = (tiny_staged / "README.md").read_text(encoding="utf-8").replace("\N{NO-BREAK SPACE}", " ")
    shown = {"words": "words alone", "dense twin": "dense twin", "learned": "this model, as learned",
             "full": "this model, full"}  # fmt: skip
    assert [entry["model"] for entry in made["comparison"]] == list(shown)
    assert made["test"]["cost"]["flops_ratio"] < 0.3  # otherwise there is a cheaper budget beside
    opening = text.split("How far texts go")[0]
    for entry in made["comparison"]:
        assert entry["rows"] == made["test"]["rows"]
        score, cost = (f"{100 * entry[key]:.1f} %" for key in ("score", "flops_ratio"))
        assert re.search(rf"{shown[entry['model']]} {score} [0-9. to%]+ {cost}", opening)
        assert re.search(rf"\| {shown[entry['model']]} \| {score} \([0-9. to%]+\) \| {cost} \|", card)
        if entry["exits"]:
            assert " ".join(f"{100 * share:.1f} %" for share in entry["exits"]) in opening
    words, full = made["comparison"][0], made["comparison"][-1]
    assert words["exits"] == [1, 0, 0]
    assert words["flops_ratio"] < 0.05
    assert full["exits"] == [0, 0, 1]
    learned = f"exit:{float(made['depth']['learned']['dial'].removeprefix('exit:')):.3g}"
    assert f"The learned budget is {learned}, the fastest that gave another label to at most 0.5 %" in text
    assert f"The learned budget is `{learned}`." in card
    for stage, share in zip(made["depth"]["stages"], made["test"]["exits"]["share"], strict=True):
        assert f"{stage['stage']} {100 * share:.1f} %" in text
        assert f"| {stage['stage']} | {100 * share:.1f} % |" in card
    for group in made["depth"]["reliability"]:
        pair = f"{100 * group['predicted']:.2f} % {100 * group['observed']:.2f} %"
        assert f"{group['stage']} {group['rows']} {pair}" in text
    assert "svg" in parser.tags


@pytest.mark.parametrize(
    ("low", "twin", "said"), [(-0.004, 0.914, True), (-0.006, 0.914, False), (-0.004, 0.95, False)]
)
def test_words_that_suffice_are_said_to(low: float, twin: float, said: bool, tiny_staged: Path, tmp_path: Path) -> None:
    made = json.loads((tiny_staged / "evaluation.json").read_text(encoding="utf-8"))
    made["depth"]["stages"][0] |= {"score": 0.91, "versus_full": {"value": 0.0, "low": low, "high": 0.004}}
    made["baseline"]["test"]["score"] = twin
    run = make_run(tiny_staged, tmp_path / "run", made)
    for file in (write_report(run), write_card(run)):
        assert ("These data do not need a Transformer: the words alone reach 0.9100" in file.read_text()) == said


def test_few_rows_are_told_of_pretrained_encoders(tiny_staged: Path, tmp_path: Path) -> None:
    hint = "a pretrained encoder adds what it has read elsewhere: train with --base"
    assert hint in (tiny_staged / "report.html").read_text(encoding="utf-8")
    many = make_run(tiny_staged, tmp_path / "run", json.loads((tiny_staged / "evaluation.json").read_text()),
                    splits={"train": 20000, "validation": 9, "test": 9})  # fmt: skip
    assert hint not in write_report(many).read_text(encoding="utf-8")


def test_without_a_baseline_or_a_test_split(tiny_run: Path, tmp_path: Path) -> None:
    text, _ = parse(write(tiny_run, tmp_path / "run", results(single()) | {"test": None}))
    assert "There is no test split" in text
    assert "No dense twin was trained, so this page cannot say" in text
    assert "evaluated at one budget only" in text
    assert "validation accuracy, 95 % interval" in text


def test_a_curve_of_some_rows_says_so(tiny_run: Path, tmp_path: Path) -> None:
    points = [point | {"rows": 500} for point in curve(single)]
    text, _ = parse(write(tiny_run, tmp_path / "run", results(single(), dials=points)))
    assert "Measured on a sample of 500 rows of the test split." in text


def test_regression(tiny_run: Path, tmp_path: Path) -> None:
    text, _ = parse(write(tiny_run, tmp_path / "run", results(regression(), regression())))
    assert "this model, as learned 0.884" in text
    assert "60 test texts; mean squared error 0.250 (95 % interval 0.250 to 0.250)." in text
    assert "R² 0.884 here, 0.884 there; no paired test was made" in text
    assert "This task has no classes to confuse" in text
    assert "to predict a number for each text" in text
    assert "0.000 0.500 0.25" in text
    assert "Confusion matrix" not in text


def test_multi_label(tiny_run: Path, tmp_path: Path) -> None:
    text, _ = parse(write(tiny_run, tmp_path / "run", results(multi(), multi())))
    assert "this model, as learned 0.953" in text
    assert "90 test texts; all labels right 82.2 % (95 % interval 73.1 to 88.8 %)." in text
    assert "(counting texts with all labels right)." in text
    assert "World, Sports" in text
    assert "any of 4 labels" in text
    assert "Class by class" in text
    assert "Confusion matrix" not in text


def test_many_classes_show_the_worst_pairs(tiny_run: Path, tmp_path: Path) -> None:
    names = [f"intent {i}" for i in range(77)]
    confusion = [[30 if i == j else int((i * j) % 9 == 4) for j in range(77)] for i in range(77)]
    text, _ = parse(write(tiny_run, tmp_path / "run", results(single(names, confusion))))
    assert "The most confused pairs" in text
    assert "Of 77 classes, the 30 largest." in text
    assert "Confusion matrix" not in text


def test_hostile_text_stays_text(tiny_run: Path, tmp_path: Path) -> None:
    final = single([EVIL, "$x_{", '"quoted" & more', "'"])
    final.hardest[0].update(text=EVIL, file=EVIL)
    changes = {"name": EVIL, "warnings": [EVIL], "data": {"data": EVIL, EVIL: EVIL}, "columns": EVIL}
    text, parser = parse(write(tiny_run, tmp_path / "a", results(final), recipe={EVIL: EVIL}, **changes))
    assert "script" not in parser.tags
    assert EVIL in text
    page = write(tiny_run, tmp_path / "b", complete(), name="{{ 7 * 7 }}")
    assert "{{" not in page.replace("{{ 7 * 7 }}", "")


def test_the_page_needs_nothing_but_itself(tiny_run: Path, tmp_path: Path) -> None:
    page = write(tiny_run, tmp_path / "run", complete())
    bare = re.sub(r'xmlns(:xlink)?="[^"]*"', "", page)
    assert "http://" not in bare
    assert "https://" not in bare
    assert re.findall(r"(?:href|src)=\"(?!#|data:,)", bare) == []
    assert re.findall(r"url\((?!#)|@import|<script|<iframe|<img", bare) == []


def test_the_same_json_gives_the_same_bytes(tiny_run: Path, tmp_path: Path) -> None:
    page, card = (tiny_run / "report.html").read_bytes(), (tiny_run / "README.md").read_bytes()
    run = copy(tiny_run, tmp_path / "run")
    code = (
        "import sys, pathlib\nfrom budgetformer.report import write_card, write_report\n"
        "run = pathlib.Path(sys.argv[1])\n"
        "write_report(run)\nwrite_card(run)"
    )
    subprocess.run([sys.executable, "-c", code, str(run)], check=True)
    assert (run / "report.html").read_bytes() == page
    assert (run / "README.md").read_bytes() == card


def test_an_interval_without_end_is_not_shown(tiny_run: Path, tmp_path: Path) -> None:
    text, _ = parse(write(tiny_run, tmp_path / "run", results(regression(1))))
    assert "no interval computed" in text
    assert re.findall(r"\b(inf|nan)\b", text) == []


@pytest.mark.parametrize("name", ["run.json", "history.jsonl", "evaluation.json"])
@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_missing_or_broken_file_is_named(tiny_run: Path, tmp_path: Path, name: str, content: str | None) -> None:
    run = copy(tiny_run, tmp_path / "run")
    old = (run / "report.html").read_bytes()
    (run / name).unlink()
    if content is not None:
        (run / name).write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=re.escape(str(run / name)) + r".*: restore it or train again"):
        write_report(run)
    assert (run / "report.html").read_bytes() == old


@pytest.mark.parametrize(
    ("file", "keys"),
    [("evaluation.json", ("test", "score")), ("evaluation.json", ("comparison",)),
     ("evaluation.json", ("dials",)), ("run.json", ("model", "parameters")), ("run.json", ("training",))],
)  # fmt: skip
@pytest.mark.parametrize("make", [write_report, write_card])
def test_a_missing_key_is_named(tiny_run: Path, tmp_path: Path, file: str, keys: tuple[str, ...], make: Any) -> None:
    run = copy(tiny_run, tmp_path / "run")
    content = json.loads((run / file).read_text(encoding="utf-8"))
    place = content
    for key in keys[:-1]:
        place = place[key]
    del place[keys[-1]]
    (run / file).write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ModelError, match=re.escape(f"{run / file} has no key {keys[-1]!r}: restore it")):
        make(run)


def test_the_card_survives_any_label(tiny_run: Path, tmp_path: Path) -> None:
    names = ["plain", "a|b", "tick ` tock", "``", "two\nlines", "<b>"]
    confusion = [[5 * (i == j) for j in range(6)] for i in range(6)]
    made = results(single(names, confusion))
    run = make_run(tiny_run, tmp_path / "run", made, name="my_run *1*", warnings=["a | b\n# c"])
    card = write_card(run).read_text(encoding="utf-8")
    assert "Labels: `plain`, `a|b`, `` tick ` tock ``, ``` `` ```, `two lines`, `<b>`.\n" in card
    assert "# my_run \\*1\\*\n" in card
    assert "\n- a \\| b # c\n" in card


def test_the_card_says_how_to_load_the_model(tiny_run: Path) -> None:
    card = (tiny_run / "README.md").read_text(encoding="utf-8")
    code = card.split("```python\n")[1].split("```")[0].replace("PATH/TO/THIS/DIRECTORY", str(tiny_run))
    answers: Json = {}
    exec(code.replace('classify("a text")', 'answer = classify("a text")'), answers)
    assert set(answers["answer"][0]) == {"label", "score"}


def test_importing_the_room_loads_no_plotting() -> None:
    code = "import sys, budgetformer.report; sys.exit('matplotlib' in sys.modules or 'jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
