"""An export answers in a process that can import neither torch nor transformers, as it does beside them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.processes import command
from tests.serving.small import TEXTS, write_run

import budgetformer

ROOT = Path(__file__).parents[2]
ABSENT = ("torch", "transformers", "accelerate", "sklearn", "scipy", "matplotlib", "jinja2", "pandas", "onnx")
BLOCKED = f"import sys\nsys.modules.update(dict.fromkeys({ABSENT}))\n"
CLI = BLOCKED + "from budgetformer.cli import main\nmain()"
SEVERAL = {"problem_type": "multi_label_classification"}
NUMBER = {"problem_type": "regression", "id2label": {0: "value"}}
STAGED = {"exits": {"layers": [1], "word_bits": 8}}


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Exports an untrained run."""

    def make(*, pairs: bool = False, **options: Any) -> Path:
        folder = tmp_path_factory.mktemp("exports")
        assert command("export", write_run(folder / "run", pairs=pairs, **options), "-o", folder / "export") == 0
        return folder / "export"

    return make


def test_the_runtime_requires_nothing_that_the_package_does_not() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    known = {re.split("[<>=]", name)[0] for name in (*project["dependencies"], *extras["onnx"], *extras["serve"])}
    lines = (ROOT / "requirements-runtime.txt").read_text(encoding="utf-8").splitlines()
    names = {line for line in lines if not line.startswith(("#", "-c "))}
    assert names <= known
    absent = {"torch", "transformers", "accelerate", "scipy", "scikit-learn", "matplotlib", "jinja2", "onnx"}
    assert known - names == absent


def asked(url: str, body: Any = None) -> Any:
    """What a service answers as soon as it is ready."""
    data = None if body is None else json.dumps(body).encode()
    while True:
        try:
            request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=60) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            if error.code != 503:
                raise


@pytest.mark.parametrize("options", [{}, {"pairs": True}, SEVERAL, NUMBER, STAGED], ids=str)
def test_predict_writes_the_same_file(export: Callable[..., Path], options: dict[str, Any], tmp_path: Path) -> None:
    folder, names = export(**options), ("a", "b")[: 1 + ("pairs" in options)]
    rows = [dict.fromkeys(names, text) for text in (*TEXTS, "lake " * 40)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ["predict", folder, tmp_path / "in.jsonl", *("--text", "a", *["--text-pair", "b"][: 2 * len(names) - 2])]
    words += [] if options is NUMBER else ["--probabilities"]
    assert command(*words, "-o", tmp_path / "with.jsonl") == 0
    subprocess.run([sys.executable, "-c", CLI, *words, "-o", tmp_path / "without.jsonl"], check=True)
    assert (tmp_path / "without.jsonl").read_bytes() == (tmp_path / "with.jsonl").read_bytes()
    assert len((tmp_path / "with.jsonl").read_text().splitlines()) == len(rows)


def test_texts_leave_early(tiny_staged: Path, tmp_path: Path) -> None:
    assert command("export", tiny_staged, "-o", tmp_path / "export") == 0
    texts = [
        f"a {word} story of town {number}" for number, word in enumerate(["superb", "dull", "great", "plain"] * 20)
    ]
    code = f"import json, budgetformer\nanswers = budgetformer.load({str(tmp_path / 'export')!r}).predict({texts})\n"
    code = BLOCKED + code + "print(json.dumps([answers.labels, answers.exits, answers.cost.tolist()]))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    expected = budgetformer.load(tiny_staged).predict(texts)
    labels, exits, cost = json.loads(done.stdout)
    assert (labels, exits) == (expected.labels, expected.exits)
    assert len(set(exits)) > 1
    assert cost == pytest.approx(expected.cost.tolist())


def test_the_service_answers(export: Callable[..., Path]) -> None:
    folder = export()
    expected = budgetformer.load(folder).predict(TEXTS)
    service = subprocess.Popen(
        [sys.executable, "-c", CLI, "serve", folder, "--port", "0"], stderr=subprocess.PIPE, text=True
    )
    try:
        assert service.stderr is not None
        line = service.stderr.readline()
        url = re.search(r"at (http://\S+)", line)
        assert url, line
        answers = asked(f"{url[1]}/predict", {"texts": TEXTS})["predictions"]
        assert [answer["label"] for answer in answers] == expected.labels
        assert expected.probabilities is not None
        chances = [sorted(answer["probabilities"].values()) for answer in answers]
        assert chances == [pytest.approx(sorted(row), abs=2e-6) for row in expected.probabilities]
        assert asked(f"{url[1]}/info")["labels"] == ["travel", "film", "money"]
    finally:
        service.send_signal(signal.SIGTERM)
        assert service.wait(60) == 0


def test_a_run_without_an_export_says_what_is_missing(tmp_path: Path) -> None:
    words = ["predict", write_run(tmp_path / "run"), "--text", "a fine film"]
    done = subprocess.run([sys.executable, "-c", CLI, *words], capture_output=True, text=True)
    assert done.returncode == 4
    remedy = "install budgetformer with its dependencies, or give an export\n"
    assert done.stderr.endswith(f"is run by torch, which is not installed: {remedy}")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": "many"}, "export.json has model.vocab_size 'many' (Input should be a valid integer"),
        ({"gate": {"kind": "all"}}, "export.json has no key 'model.gate.selects'"),
        ({"label_names": ["a", "b", "c"]}, "in the record and ['a', 'b', 'c'] in export.json"),
        ({"max_position_embeddings": 8}, "max_length is 24 in the record and 8 in export.json"),
    ],
    ids=str,
)  # fmt: skip
def test_a_manifest_of_another_model_is_refused(
    export: Callable[..., Path], change: dict[str, Any], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = export() / "export.json"
    record = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**record, "model": {**record["model"], **change}}), encoding="utf-8")
    assert command("predict", file.parent, "--text", TEXTS[0]) == 4
    assert message in capsys.readouterr().err
