"""What the page is told about a text, against the model itself; the file that needs no server; the command."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.cli.test_train import command
from tests.serving.small import TEXTS, small, write_run

from budgetformer.errors import UsageError
from budgetformer.evaluate import cost_of
from budgetformer.explain import attention, dials, explain, page, precompute, read, slider
from budgetformer.nn.allocation import Dial, Selection


@pytest.mark.parametrize("dial", ["learned", "max:0.25", "fixed:0.5", "full"])
def test_it_tells_what_the_model_did(dial: str) -> None:
    model, tokenizer = small()
    told = explain(model, tokenizer, TEXTS[0], budget=dial)
    ids = torch.tensor([tokenizer(TEXTS[0])["input_ids"]])
    with torch.inference_mode():
        out = model(ids, budget=dial)
    assert told["dial"] == dial
    assert list(told["probabilities"].values()) == pytest.approx(out.logits.softmax(-1)[0].tolist())
    assert told["label"] == max(told["probabilities"], key=told["probabilities"].get)
    for layer, allocation in zip(told["layers"], out.allocations, strict=True):
        assert layer["s"] == pytest.approx(float(allocation.budget))
        assert layer["k"] == sum(layer["active"]) == int(allocation.heads)
        assert layer["weights"] == pytest.approx(allocation.weights[0].tolist())
        assert layer["relevance"] == pytest.approx(allocation.relevance[0].tolist())
    k = np.array([[layer["k"] for layer in told["layers"]]])
    cost = cost_of(k, np.full(k.shape, 0.5, np.float32), np.array([ids.shape[1]]), model.config)
    flops = told["flops"]
    assert flops["used"] == cost["flops_per_text"]
    assert flops["used"] / flops["dense"] == pytest.approx(cost["flops_ratio"])
    assert flops["attention_used"] / flops["attention_dense"] == pytest.approx(cost["attention_flops_ratio"])
    assert json.loads(json.dumps(told)) == told


@pytest.mark.parametrize("dial", ["learned", "max:0.25"])
def test_a_map_is_that_head_s_alone_whether_it_ran_or_not(dial: str) -> None:
    model, tokenizer = small()
    with torch.inference_mode():
        every = model(torch.tensor([tokenizer(TEXTS[1])["input_ids"]]), budget=dial, output_attentions=True).attentions
    for layer in range(2):
        for head in range(4):
            one = attention(model, tokenizer, TEXTS[1], None, layer, head, dial)
            np.testing.assert_allclose(one["map"], every[layer][0, head].numpy(), atol=6e-5)
    assert len(one["map"]) == len(one["tokens"])


def test_tokens_are_as_written_and_training_s_own() -> None:
    model, tokenizer = small(segment_embeddings=True)
    pieces = read(model, tokenizer, "The Train, LOVELY view", "Over \U0001f600")
    words = "".join(("" if j else " ") + t for t, j in zip(pieces.tokens, pieces.joined, strict=True)).split()
    assert words == ["[CLS]", "The", "Train[UNK]", "LOVELY", "view", "[SEP]", "Over", "[UNK]", "[SEP]"]
    assert [part for part in pieces.parts if part is not None] == sorted(p for p in pieces.parts if p is not None)
    encoded = tokenizer("The Train, LOVELY view", "Over \U0001f600", return_tensors="pt")
    assert pieces.ids == encoded["input_ids"][0].tolist()
    told = explain(model, tokenizer, "The Train, LOVELY view", "Over \U0001f600")
    with torch.inference_mode():
        logits = model(encoded["input_ids"], token_type_ids=encoded["token_type_ids"]).logits
    assert list(told["probabilities"].values()) == pytest.approx(logits.softmax(-1)[0].tolist())


def test_long_texts_are_cut_and_say_so() -> None:
    model, tokenizer = small()
    assert not explain(model, tokenizer, TEXTS[2])["cut"]
    told = explain(model, tokenizer, TEXTS[2], max_length=8)
    assert told["cut"]
    assert len(told["tokens"]) == 8
    assert told["tokens"][-1] == "[SEP]"
    assert len(explain(model, tokenizer, "lake " * 500, max_length=500)["tokens"]) == 128  # the model's positions


def test_every_kind_of_answer_and_gate() -> None:
    several = explain(*small(problem_type="multi_label_classification"), TEXTS[0])
    assert several["label"] == [name for name, p in several["probabilities"].items() if p > 0.5]
    number = explain(*small(id2label={0: "x"}, problem_type="regression"), TEXTS[0])
    assert isinstance(number["label"], float)
    assert number["probabilities"] == {}
    dense = explain(*small(gates={"kind": "all"}), TEXTS[0])
    assert not dense["gated"]
    assert dense["layers"][0]["weights"] == [1.0] * 4
    assert dense["flops"]["used"] == dense["flops"]["dense"]
    random = small(gates={"kind": "random"})
    assert explain(*random, TEXTS[0]) == explain(*random, TEXTS[0])


@given(heads=st.integers(1, 96), data=st.data())
def test_the_slider_goes_from_one_head_to_all(heads: int, data: st.DataObject) -> None:
    positions = dials(heads)
    place = data.draw(st.integers(0, heads))
    assert slider(positions[place], heads) == place
    wanted = torch.tensor([data.draw(st.integers(1, heads))])
    runs = [int(Selection().apply_budget(wanted, Dial.parse(p), heads)) for p in positions]
    assert runs == [*(min(most, int(wanted)) for most in range(1, heads)), int(wanted), heads]


def test_a_file_holds_every_position_and_every_map() -> None:
    model, tokenizer = small()
    data = precompute(model, tokenizer, [(TEXTS[0], None), (TEXTS[1], None)], "max:0.5")
    assert (data["start"], data["maps"]) == (1, "all")
    for one in data["texts"]:
        for dial, place in zip(dials(4), one["places"], strict=True):
            kept, told = one["results"][place], explain(model, tokenizer, one["text"], budget=dial)
            assert kept["label"] == told["label"]
            assert [layer["active"] for layer in kept["layers"]] == [layer["active"] for layer in told["layers"]]
            n = len(kept["tokens"])
            maps = np.frombuffer(base64.b64decode(kept["maps"]), np.uint8).reshape(2, 4, n, n) / 255
            true = attention(model, tokenizer, one["text"], None, 1, 2, dial)["map"]
            np.testing.assert_allclose(maps[1, 2], true, atol=0.5 / 255 + 1e-4)
    assert len(data["texts"][0]["results"]) < 5  # equal ones are held once


def test_maps_that_are_too_large_are_left_out_of_a_file() -> None:
    model, tokenizer = small()
    one = 2 * 4 * len(tokenizer(TEXTS[0])["input_ids"]) ** 2 * 4 // 3
    some = precompute(model, tokenizer, [(TEXTS[0], None)], map_bytes=one)
    assert some["maps"] == "chosen"
    text = some["texts"][0]
    assert [place for place, r in enumerate(text["results"]) if "maps" in r] == [text["places"][3]]
    none = precompute(model, tokenizer, [(TEXTS[0], None)], map_bytes=one - 1)
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
        ({"text": "a", "max_length": 2}, "max_length is 2"),
    ],
)
def test_wrong_texts(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        explain(*small(), **arguments)


@pytest.mark.parametrize(("layer", "head", "message"), [(2, 0, "layer 2 does not"), (0, 4, "head 4 does not")])
def test_wrong_heads(layer: int, head: int, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        attention(*small(), TEXTS[0], None, layer, head)


def test_the_command_writes_a_page_and_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, file = write_run(tmp_path / "run"), tmp_path / "heads.html"
    words = ["explain", str(run), "--text", TEXTS[0], "--compare", "lake " * 40]
    capsys.readouterr()
    assert command(*words, "-o", str(file)) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (f"{file}\n", "")
    data = json.loads(file.read_text(encoding="utf-8").split('type="application/json">')[1].split("</script>")[0])
    assert [len(text["results"][0]["tokens"]) for text in data["texts"]][1] == 24
    assert data["info"] == {"labels": ["travel", "film", "money"], "heads": 4, "layers": 2, "max_tokens": 24}
    assert command(*words, "--budget", "fixed:0.5", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["dial"] == "fixed:0.5"
    assert told["compare"]["cut"]


def test_two_long_texts_stay_below_two_megabytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, file = write_run(tmp_path / "run", max_length=512, max_position_embeddings=512), tmp_path / "heads.html"
    words = ["explain", str(run), "--text", "lake " * 600, "--compare", "view " * 300, "-o", str(file)]
    assert command(*words) == 0
    assert "left out to keep the file small" in capsys.readouterr().err
    assert file.stat().st_size < 2e6


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["{missing}", "--text", "a"], 4, "give the directory of a run"),
        (["{run}"], 2, "--text"),
        (["{run}", "--text", ""], 2, "text is empty"),
        (["{run}", "--text", "a", "--text-pair", "b"], 2, "reads single texts"),
        (["{pairs}", "--text", "a"], 2, "reads pairs: give the second with --text-pair"),
        (["{run}", "--text", "a", "--compare-pair", "b"], 2, "--compare-pair without --compare"),
        (["{run}", "--text", "a", "--budget", "fixed:0.5"], 2, "not on the page's slider"),
        (["{run}", "--text", "a", "-o", "{missing}/heads.html"], 4, "cannot be written"),
    ],
)
def test_wrong_commands(
    words: list[str], code: int, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    places = {"run": write_run(tmp_path / "run"), "pairs": write_run(tmp_path / "pairs", pairs=True)}
    assert command("explain", *(word.format(missing=tmp_path / "missing", **places) for word in words)) == code
    assert message in capsys.readouterr().err
