"""What the page is told about a text, against the model itself; the file that needs no server; the command."""

from __future__ import annotations

import base64
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.test_train import command
from tests.models.tiny import tiny
from tests.serving.small import TEXTS, small, write_run

from budgetformer.dial import Dial
from budgetformer.engine.scores import probabilities_of, score
from budgetformer.errors import ModelError, UsageError
from budgetformer.evaluate import cost_of
from budgetformer.exits import ExitOptions, Exits
from budgetformer.explain import Explainer, describe, page, slider, stored_examples
from budgetformer.models.model import retrofit
from budgetformer.nn.allocation import Selection
from budgetformer.runs.run import Run


@pytest.mark.parametrize("dial", ["learned", "max:0.25", "fixed:0.5", "full"])
def test_it_tells_what_the_model_did(dial: str, tmp_path: Path) -> None:
    model, tokenizer = small()
    explanation = Explainer(model, tokenizer).explain(TEXTS[0], budget=dial)
    ids = torch.tensor([tokenizer.encode(TEXTS[0]).ids])
    with torch.inference_mode():
        out = model(ids, budget=dial)
    assert explanation["dial"] == dial
    assert list(explanation["probabilities"].values()) == pytest.approx(out.logits.softmax(-1)[0].tolist(), abs=6e-7)
    assert explanation["label"] == max(explanation["probabilities"], key=explanation["probabilities"].get)
    for layer, allocation in zip(explanation["layers"], out.allocations, strict=True):
        assert layer["s"] == pytest.approx(float(allocation.budget))
        assert layer["k"] == sum(layer["active"]) == int(allocation.heads)
        assert layer["weights"] == pytest.approx(allocation.weights[0].tolist())
        assert layer["relevance"] == pytest.approx(allocation.relevance[0].tolist())
    cost = cost_of(Run.open(write_run(tmp_path / "run")).scorer(dial).score(TEXTS[:1]), model.config.spec)
    flops = explanation["flops"]
    assert flops["used"] == cost["flops_per_text"]
    assert flops["used"] / flops["dense"] == pytest.approx(cost["flops_ratio"])
    assert flops["attention_used"] / flops["attention_dense"] == pytest.approx(cost["attention_flops_ratio"])
    assert json.loads(json.dumps(explanation)) == explanation


@pytest.mark.parametrize("dial", ["learned", "max:0.25"])
def test_a_map_is_that_head_s_alone_whether_it_ran_or_not(dial: str) -> None:
    model, tokenizer = small()
    with torch.inference_mode():
        every = model(torch.tensor([tokenizer.encode(TEXTS[1]).ids]), budget=dial, output_attentions=True).attentions
    for layer in range(2):
        for head in range(4):
            one = Explainer(model, tokenizer).attention(TEXTS[1], None, layer, head, dial)
            np.testing.assert_allclose(one["map"], every[layer][0, head].numpy(), atol=6e-5)
    assert len(one["map"]) == len(one["tokens"])


def test_tokens_are_as_written_and_training_s_own() -> None:
    model, tokenizer = small(segment_embeddings=True)
    pieces = Explainer(model, tokenizer).read("The Train, LOVELY view", "Over \U0001f600")
    words = "".join(("" if j else " ") + t for t, j in zip(pieces.tokens, pieces.joined, strict=True)).split()
    assert words == ["[CLS]", "The", "Train[UNK]", "LOVELY", "view", "[SEP]", "Over", "[UNK]", "[SEP]"]
    assert [part for part in pieces.parts if part is not None] == sorted(p for p in pieces.parts if p is not None)
    encoded = tokenizer.encode("The Train, LOVELY view", "Over \U0001f600")
    assert pieces.ids == encoded.ids
    explanation = Explainer(model, tokenizer).explain("The Train, LOVELY view", "Over \U0001f600")
    with torch.inference_mode():
        logits = model(torch.tensor([encoded.ids]), token_type_ids=torch.tensor([encoded.type_ids])).logits
    assert list(explanation["probabilities"].values()) == pytest.approx(logits.softmax(-1)[0].tolist(), abs=6e-7)


def test_neurons_that_ran_are_told_and_tell_budgets_apart() -> None:
    gates = {"kind": "order", "group_size": 16, "keep_heads": True, "target_budget": 0.75, "groups_price": 0.5}
    model = retrofit(tiny("bert", vocab_size=120), gates=gates, training_progress=1.0).eval()
    explainer = Explainer(model, small()[1], 12)
    told = {dial: [layer["neurons"] for layer in explainer.explain(TEXTS[0], budget=dial)["layers"]]
            for dial in ("learned", "full")}  # fmt: skip
    assert told["full"] == [1.0] * 3
    assert sum(told["learned"]) == pytest.approx(1.5, abs=0.34)
    data = explainer.precompute([(TEXTS[0], None)])
    learned, full = (data["texts"][0]["places"][data["slider"].index(dial)] for dial in ("learned", "full"))
    assert learned != full  # with the same heads
    assert Explainer(*small()).explain(TEXTS[0])["layers"][0]["neurons"] is None


def test_long_texts_are_cut_and_say_so() -> None:
    model, tokenizer = small()
    assert not Explainer(model, tokenizer).explain(TEXTS[2])["cut"]
    explanation = Explainer(model, tokenizer, 8).explain(TEXTS[2])
    assert explanation["cut"]
    assert len(explanation["tokens"]) == 8
    assert explanation["tokens"][-1] == "[SEP]"
    longest = Explainer(model, tokenizer, 500).explain("lake " * 500)["tokens"]
    assert len(longest) == 128  # the model's positions


def test_every_kind_of_answer_and_gate() -> None:
    several = Explainer(*small(problem_type="multi_label_classification")).explain(TEXTS[0])
    assert several["label"] == [name for name, p in several["probabilities"].items() if p > 0.5]
    number = Explainer(*small(id2label={0: "x"}, problem_type="regression")).explain(TEXTS[0])
    assert isinstance(number["label"], float)
    assert number["probabilities"] == {}
    dense = Explainer(*small(gates={"kind": "all"})).explain(TEXTS[0])
    assert not dense["gated"]
    assert dense["layers"][0]["weights"] == [1.0] * 4
    assert dense["flops"]["used"] == dense["flops"]["dense"]
    random = Explainer(*small(gates={"kind": "random"}))
    assert random.explain(TEXTS[0]) == random.explain(TEXTS[0])


@pytest.mark.parametrize("budget", ["learned", "exit:0", "exit:inf", "full", "max:0.25"])
def test_a_text_that_leaves_early_is_explained_as_it_is_predicted(tiny_staged: Path, budget: str) -> None:
    run, text = Run.open(tiny_staged), "a superb story of town"
    explainer, config = Explainer(run.model, run.tokenizer, run.max_length), run.config
    answer, scores = explainer.explain(text, budget=budget), run.scorer(budget).score([text])
    assert answer["exit"] == config.stages.names[scores.exits[0]]
    assert (answer["exit"] == "words") == (budget == "exit:inf" or scores.exits[0] == 0)
    assert [layer["k"] for layer in answer["layers"]] == scores.heads[0].tolist()
    assert answer["label"] == run.predict([text], budget=budget).labels[0]
    assert answer["flops"]["used"] == int(cost_of(scores, config)["flops_per_text"])
    assert answer["flops"]["used"] / answer["flops"]["dense"] == pytest.approx(cost_of(scores, config)["flops_ratio"])
    for layer in range(config.num_hidden_layers):
        assert sum(explainer.attention(text, None, layer, 1, budget)["map"][0]) == pytest.approx(1, abs=0.01)
    everything = score(run.engine(), run.scorer().encode([text]), "exit:0").stage_logits
    assert everything is not None
    last = config.stages.names.index(answer["exit"])
    for number, stage in enumerate(answer["stages"]):
        assert (stage["stage"], stage["layers"]) == (config.stages.names[number], config.stages.depths[number])
        assert stage["ran"] == (number <= last)
        if not stage["ran"] or (budget in ("full", "max:0.25") and number):  # other heads, other answers
            assert stage["ran"] or (stage["label"], stage["probabilities"], stage["risk"]) == (None, {}, None)
            continue
        logits = everything[:, number]
        chances = probabilities_of(logits / config.stages.temperatures[number], config.task)[0]
        assert list(stage["probabilities"].values()) == pytest.approx(chances.tolist(), abs=1e-5)
        assert stage["label"] == config.label_names[chances.argmax()]
        risk = None if number == 2 else pytest.approx(config.stages.risk(number, logits)[0], abs=1e-4)
        assert stage["risk"] == risk
    assert answer["stages"][last]["probabilities"] == answer["probabilities"]
    data = explainer.precompute([(text, None)], budget)
    assert data["texts"][0]["results"][data["texts"][0]["places"][data["start"]]]["exit"] == answer["exit"]


def test_the_description_says_where_texts_left(tiny_staged: Path) -> None:
    config = Run.open(tiny_staged).config
    assert describe(config, tiny_staged).startswith("A text leaves this model as soon as its answer is trusted")
    assert re.search(r"Of its \d+ test texts \d+% left at words, \d+% left at layer 1", describe(config, tiny_staged))


def evaluated(folder: Path, least: Any, most: Any, rows: Any = 40) -> Path:
    result = {
        "rows": rows,
        "split": "test",
        "budget": {"heads_per_text": {"least": least, "most": most}, "k_over_h": 0.5},
    }
    folder.mkdir()
    (folder / "evaluation.json").write_text(json.dumps({"test": result, "validation": None}))
    return folder


def test_the_description_says_what_happened(tmp_path: Path) -> None:
    learned, static, dense = (small(gates={"kind": kind})[0].config.spec for kind in ("learned", "static", "all"))
    assert describe(dense, tmp_path) == "This model has no gates: all 8 heads run, whatever the text."
    assert describe(learned, tmp_path).startswith("For each text this model chooses the heads")
    assert describe(static, tmp_path).startswith("This model runs the same heads for every text")
    varied = describe(learned, evaluated(tmp_path / "varied", 2, 6))
    assert varied.endswith("For its 40 test texts it ran 2 to 6 of 8 heads, 4 on average.")
    same = describe(learned, evaluated(tmp_path / "same", 4, 4))
    assert same == "This model ran 4 of 8 heads for each of its 40 test texts, and never computes the rest."


WRONG = ["", "{", "[]", "null", '{"test": [1], "validation": 0}', '{"examples": 3}', '{"examples": [{"text": "a"}]}',
         '{"examples": [7]}', '{"test": {"budget": 1}}']  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_damaged_files_of_a_run_are_named(wrong: str, tmp_path: Path) -> None:
    for name, read in (("evaluation.json", partial(describe, small()[0].config)), ("examples.json", stored_examples)):
        (tmp_path / name).write_text(wrong)
        with pytest.raises(ModelError, match=name):
            read(tmp_path)


@given(heads=st.integers(1, 96), data=st.data())
def test_the_slider_goes_from_one_head_to_all(heads: int, data: st.DataObject) -> None:
    positions, learned = slider(None, heads)
    place = data.draw(st.integers(0, heads))
    assert slider(positions[place], heads) == (positions, place)
    assert positions[learned] == "learned"
    asked = torch.tensor([data.draw(st.integers(1, heads))])
    runs = [int(Selection().apply_budget(asked, Dial.parse(p), heads)) for p in positions]
    assert runs == [*(min(most, int(asked)) for most in range(1, heads)), int(asked), heads]


def test_a_mean_over_layers_has_its_own_place_on_the_slider() -> None:
    assert slider("mean:0.3", 3) == (
        ["max:0.3333333333333333", "max:0.6666666666666666", "mean:0.3", "learned", "full"],
        2,
    )


def test_budgets_of_depth_are_on_the_slider_in_the_order_of_their_limits(tiny_staged: Path) -> None:
    stages = Run.open(tiny_staged).config.stages
    budgets, start = slider(None, 4, stages)
    assert (budgets[start], budgets[-1], len(budgets)) == ("learned", "full", 8)
    limits = [stages.limit(Dial.parse(budget)) for budget in budgets]
    assert limits == sorted(limits, reverse=True)
    budgets, start = slider("exit:inf", 4, stages)
    assert (budgets[start], len(budgets)) == ("exit:inf", 9)
    assert slider("full", 4, stages)[1] == 7
    unfitted = Exits(ExitOptions(layers=[1]), 2, stages.task)
    assert slider(None, 4, unfitted) == (["learned", "full"], 0)


def test_a_file_holds_every_position_and_every_map() -> None:
    model, tokenizer = small()
    data = Explainer(model, tokenizer).precompute([(TEXTS[0], None), (TEXTS[1], None)], "max:0.5")
    assert (data["start"], data["maps"]) == (1, "all")
    for one in data["texts"]:
        for dial, place in zip(data["slider"], one["places"], strict=True):
            stored, explanation = one["results"][place], Explainer(model, tokenizer).explain(one["text"], budget=dial)
            assert stored["label"] == explanation["label"]
            assert [layer["active"] for layer in stored["layers"]] == [
                layer["active"] for layer in explanation["layers"]
            ]
            n = len(stored["tokens"])
            maps = np.frombuffer(base64.b64decode(stored["maps"]), np.uint8).reshape(2, 4, n, n) / 255
            true = Explainer(model, tokenizer).attention(one["text"], None, 1, 2, dial)["map"]
            np.testing.assert_allclose(maps[1, 2], true, atol=0.5 / 255 + 1e-4)
    assert len(data["texts"][0]["results"]) < 5  # equal ones are held once


def test_maps_that_are_too_large_are_left_out_of_a_file() -> None:
    model, tokenizer = small()
    one = 2 * 4 * len(tokenizer.encode(TEXTS[0]).ids) ** 2 * 4 // 3
    some = Explainer(model, tokenizer).precompute([(TEXTS[0], None)], map_bytes=one)
    assert some["maps"] == "chosen"
    text = some["texts"][0]
    assert [place for place, r in enumerate(text["results"]) if "maps" in r] == [text["places"][3]]
    none = Explainer(model, tokenizer).precompute([(TEXTS[0], None)], map_bytes=one - 1)
    assert none["maps"] == "none"
    assert not any("maps" in r for r in none["texts"][0]["results"])


def test_a_text_cannot_break_out_of_the_file() -> None:
    evil = "</script><script>bad()</script>"
    html = page({"text": evil})
    assert evil not in html
    assert json.loads(html.split('type="application/json">')[1].split("</script>")[0]) == {"text": evil}


def test_the_page_fetches_nothing_from_elsewhere() -> None:
    assert "https://" not in page()
    assert page().count("http://") == page().count("http://www.w3.org/2000/svg")  # a name, not an address


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"text": " "}, "text is empty"),
        ({"text": "a", "text_pair": ""}, "text_pair is empty"),
        ({"text": "a \udc80"}, "text is not valid Unicode"),
        ({"text": "a", "budget": "half"}, "budget 'half' is not known"),
    ],
)
def test_wrong_texts(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Explainer(*small()).explain(**arguments)


def test_too_short_a_length() -> None:
    with pytest.raises(UsageError, match="max_length is 2"):
        Explainer(*small(), 2)


@pytest.mark.parametrize(("layer", "head", "message"), [(2, 0, "layer 2 does not"), (0, 4, "head 4 does not")])
def test_wrong_heads(layer: int, head: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Explainer(*small()).attention(TEXTS[0], None, layer, head)


def test_the_command_writes_a_page_and_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, file = write_run(tmp_path / "run"), tmp_path / "heads.html"
    words = ["explain", str(run), "--text", TEXTS[0], "--text", "lake " * 40]
    capsys.readouterr()
    assert command(*words, "-o", str(file)) == 0
    out, err = capsys.readouterr()
    assert out == f"{file}\n"
    assert err == f"next: open {file} in a browser; for other texts: budgetformer serve {run}\n"
    data = json.loads(file.read_text(encoding="utf-8").split('type="application/json">')[1].split("</script>")[0])
    assert [len(text["results"][0]["tokens"]) for text in data["texts"]][1] == 24
    assert data["info"] == {"labels": ["travel", "film", "money"], "heads": 4, "layers": 2, "max_tokens": 24}
    assert command(*words, "--budget", "fixed:0.5", "--json") == 0
    explanation = json.loads(capsys.readouterr().out)
    assert explanation["dial"] == "fixed:0.5"
    assert explanation["compare"]["cut"]


def test_two_long_texts_stay_below_two_megabytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, file = write_run(tmp_path / "run", max_length=512, max_position_embeddings=512), tmp_path / "heads.html"
    words = ["explain", str(run), "--text", "lake " * 600, "--text", "view " * 300, "-o", str(file)]
    assert command(*words) == 0
    assert "left out to keep the file small" in capsys.readouterr().err
    assert file.stat().st_size < 2e6


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["{missing}", "--text", "a"], 4, "give the directory of a run"),
        (["{run}"], 2, "--text"),
        (["{run}", "--text", ""], 2, "text is empty"),
        (["{run}", "--text", "a", "--text-pair", "b"], 2, "trained on single texts: leave --text-pair out"),
        (["{pairs}", "--text", "a"], 2, "trained on pairs of texts: give the second one with --text-pair"),
        (["{pairs}", "--text", "a", "--text", "b", "--text-pair", "c"], 2, "--text-pair as often"),
        (["{run}", "--text", "a", "--text", "b", "--text", "c"], 2, "give --text once, or twice to compare"),
        (["{run}", "--text", "a", "--budget", "mean:0.5"], 2, "ranked across layers"),
        (["{run}", "--text", "a", "--budget", "fixed:0.5"], 2, "not on the page's slider"),
        (
            ["{run}", "--text", "a", "-o", "{missing}/heads.html"],
            4,
            "cannot be written (No such file or directory). Give another file with -o",
        ),
    ],
)
def test_wrong_commands(
    words: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"run": write_run(tmp_path / "run"), "pairs": write_run(tmp_path / "pairs", pairs=True)}
    assert command("explain", *(word.format(missing=tmp_path / "missing", **places) for word in words)) == code
    assert message in capsys.readouterr().err
