"""The page in a real browser: with a model behind its requests, and as a file of its own."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.models.tiny import tiny
from tests.serving.small import TEXTS, small

from budgetformer.errors import UsageError
from budgetformer.explain import Explainer, page, slider
from budgetformer.models.model import retrofit
from budgetformer.runs.run import Run

api = pytest.importorskip("playwright.sync_api", reason="the page's tests need playwright: pip install -e '.[dev]'")
FLAGS = (
    "--disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync"
)
EXAMPLES: list[dict[str, str | None]] = [
    {"text": "The train was two hours late, but the view over the lake made up for all of it.", "text_pair": None},
    {"text": "The midfielder scored twice in extra time.", "text_pair": None},
]
PAIRS: list[dict[str, str | None]] = [
    {"text": "A woman is repairing a bicycle in the rain.", "text_pair": "Somebody is working outside."},
    {"text": "Two boys are asleep on a bus.", "text_pair": "The boys are playing football."},
]
PHONE = {"viewport": {"width": 320, "height": 640}, "has_touch": True}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    result = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if result is None:
        pytest.skip("the page's tests need a browser: apt-get install chromium")
    api.expect.set_options(timeout=30_000)  # a busy machine is slow, not wrong
    with api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=result, args=FLAGS.split(), chromium_sandbox=False)
        yield started
        started.close()


class Shown:
    """A page of a model behind its requests; `asked` holds the requests, `faults` what went wrong in the page."""

    def __init__(
        self, browser: Any, model: Any, tokenizer: Any, examples: list[dict[str, str | None]] = EXAMPLES, **options: Any
    ) -> None:
        self.asked: list[str] = []
        self.faults: list[str] = []
        self.examples = examples
        self.config, self.explainer = model.config, Explainer(model, tokenizer, 24)
        self.page = browser.new_context(reduced_motion="reduce", **options).new_page()
        self.page.set_default_timeout(30_000)
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.route("http://page.test/**", self._answer)

    def _answer(self, route: Any) -> None:
        path, body = route.request.url.removeprefix("http://page.test/"), route.request.post_data_json
        self.asked.append(path)
        config, heads = self.config, self.config.num_attention_heads
        if path == "":
            route.fulfill(body=page(), content_type="text/html; charset=utf-8")
        elif path == "info":
            route.fulfill(
                json={
                    "labels": config.label_names, "pairs": config.segment_embeddings, "max_tokens": 24,
                    "heads": heads, "layers": config.num_hidden_layers, "slider": slider(None, heads)[0],
                    "start": heads - 1, "description": "It chooses heads.", "examples": self.examples,
                }
            )  # fmt: skip
        elif path in ("explain", "attention"):
            try:
                route.fulfill(json=getattr(self.explainer, path)(**{"text_pair": None, **body}))
            except UsageError as error:
                route.fulfill(status=422, json={"error": {"message": str(error), "hint": "change it"}})
        else:
            route.fulfill(status=404)

    def sees(self, selector: str, words: str | re.Pattern[str]) -> None:
        api.expect(self.page.locator(selector).first).to_have_text(words)


@pytest.fixture
def shown(browser: Any) -> Iterator[Shown]:
    shown = Shown(browser, *small())
    shown.page.goto("http://page.test/")
    yield shown
    assert shown.faults == []
    shown.page.context.close()


def test_type_and_predict(shown: Shown) -> None:
    explanation = shown.explainer.explain(TEXTS[1])
    shown.page.locator("textarea[name=text]").fill(TEXTS[1])
    shown.page.get_by_role("button", name="Predict").click()
    shown.sees(".heads .big", f"{sum(layer['k'] for layer in explanation['layers'])} of 8")
    shown.sees(".answer .big", explanation["label"])
    shown.sees(".cost .big", f"{100 * explanation['flops']['used'] / explanation['flops']['dense']:.0f} %")
    assert [float(p) for p in shown.page.locator(".answer .figure").all_inner_texts()] == pytest.approx(
        list(explanation["probabilities"].values()), abs=6e-4
    )
    lit = [head.get_attribute("class") == "head on" for head in shown.page.locator(".head").all()]
    assert lit == [on for layer in explanation["layers"] for on in layer["active"]]
    shown.page.get_by_role("button", name="The midfielder").click()
    api.expect(shown.page.locator("textarea[name=text]")).to_have_value(re.compile("midfielder"))
    assert set(shown.asked) == {"", "info", "explain", "attention"}


def test_slide(shown: Shown) -> None:
    slider = shown.page.get_by_role("slider")
    slider.focus()
    shown.page.keyboard.press("Home")
    shown.sees("#budget-words", "at most 1 of 4")
    shown.sees(".heads .big", "2 of 8")
    shown.page.keyboard.press("End")
    shown.sees("#budget-words", "all 4")
    shown.sees(".heads .big", "8 of 8")
    assert slider.get_attribute("aria-valuetext") == "all 4"


def test_a_head_by_mouse_and_by_keyboard(shown: Shown) -> None:
    grid = shown.page.get_by_role("grid")
    shown.sees(".look .big", re.compile("Layer 1, head"))
    grid.get_by_role("gridcell", name=re.compile("Layer 2, head 3 ")).click()
    shown.sees(".look .big", "Layer 2, head 3")
    heads = shown.page.locator(".head")
    assert [h.get_attribute("tabindex") for h in heads.all()].count("0") == 1
    heads.first.focus()
    for key in ("ArrowDown", "ArrowRight", "Home", "ArrowUp", "End"):
        shown.page.keyboard.press(key)
    shown.page.keyboard.press("Enter")
    shown.sees(".look .big", "Layer 1, head 4")
    assert heads.nth(3).get_attribute("aria-selected") == "true"
    assert [h.get_attribute("tabindex") for h in heads.all()].count("0") == 1


def test_a_token_shows_where_it_looks(shown: Shown) -> None:
    shown.sees(".whose", "All tokens together look at")
    shown.page.locator(".token").first.focus()
    shown.page.keyboard.press("ArrowRight")
    shown.sees(".whose", "“The” looks at")
    shown.page.keyboard.press("Enter")
    shown.page.get_by_role("slider").focus()
    shown.sees(".whose", "“The” looks at")
    layer, head = (int(n) - 1 for n in re.findall(r"\d+", shown.page.locator(".look .big").inner_text()))
    text = shown.page.locator("textarea[name=text]").input_value()
    row = shown.explainer.attention(text, None, layer, head)["map"][1]
    assert shown.page.locator(".look .figure").first.inner_text() == f"{100 * max(row):.1f} %"
    shown.page.keyboard.press("End")
    shown.sees(".heads .big", "8 of 8")
    shown.sees(".whose", "“The” looks at")  # the token stays chosen when the budget moves


def test_compare(shown: Shown) -> None:
    shown.page.get_by_role("button", name="Compare two texts").click()
    results = shown.page.locator(".result")
    api.expect(results).to_have_count(2)
    api.expect(shown.page.locator("#shared")).to_contain_text("in common")
    shown.page.locator("textarea[name=text]").nth(1).fill(TEXTS[2])
    explanation = [shown.explainer.explain(t) for t in (
        shown.page.locator("textarea[name=text]").first.input_value(), TEXTS[2])]  # fmt: skip
    k = [sum(layer["k"] for layer in one["layers"]) for one in explanation]
    api.expect(results.nth(1).locator(".heads .big")).to_have_text(f"{k[1]} of 8")
    both = sum(a and b for x, y in zip(*(t["layers"] for t in explanation), strict=True)
               for a, b in zip(x["active"], y["active"], strict=True))  # fmt: skip
    api.expect(shown.page.locator("#shared")).to_contain_text(f"{k[0] - both} ran for text A alone")
    assert results.nth(0).locator(".head.only").count() == k[0] - both
    results.nth(1).locator(".head").nth(6).click()
    for number in (0, 1):
        api.expect(results.nth(number).locator(".look .big")).to_have_text("Layer 2, head 3")
    shown.page.get_by_role("button", name="One text only").click()
    api.expect(results).to_have_count(1)
    api.expect(shown.page.locator("#shared")).to_be_hidden()


def test_what_the_service_refuses_is_said(shown: Shown) -> None:
    shown.page.route("**/explain", lambda route: route.fulfill(
        status=422, json={"error": {"message": "the text is odd", "hint": "write another"}}))  # fmt: skip
    shown.page.locator("textarea[name=text]").fill("something new")
    api.expect(shown.page.get_by_role("alert")).to_have_text("the text is odd: write another")


def test_pairs_on_a_phone(browser: Any) -> None:
    shown = Shown(browser, *small(segment_embeddings=True), PAIRS, **PHONE, color_scheme="dark")
    shown.page.goto("http://page.test/")
    shown.sees(".look .big", re.compile("Layer 1"))
    api.expect(shown.page.locator("textarea[name=text_pair]")).to_have_value("Somebody is working outside.")
    assert shown.page.locator(".token.second").count() > 0
    assert shown.page.evaluate("document.documentElement.scrollWidth") == 320
    assert min(box["width"] for head in shown.page.locator(".head").all() if (box := head.bounding_box())) >= 24
    shown.page.get_by_role("button", name="Two boys").tap()
    api.expect(shown.page.locator("textarea[name=text_pair]")).to_have_value("The boys are playing football.")
    shown.page.get_by_role("button", name="Compare two texts").tap()
    api.expect(shown.page.locator(".result")).to_have_count(2)
    assert shown.page.evaluate("document.documentElement.scrollWidth") == 320
    assert shown.faults == []


def test_without_examples_a_text_can_be_typed(browser: Any) -> None:
    shown = Shown(browser, *small(), [])
    shown.page.goto("http://page.test/")
    shown.sees("#description", "It chooses heads.")
    assert shown.page.locator(".chip").count() == 0
    api.expect(shown.page.locator(".result")).to_be_hidden()
    shown.page.get_by_role("button", name="Compare two texts").click()
    for number, text in enumerate(TEXTS[:2]):
        shown.page.locator("textarea[name=text]").nth(number).fill(text)
    api.expect(shown.page.locator("#shared")).to_contain_text("in common")
    shown.page.locator("textarea[name=text]").nth(1).fill(TEXTS[0])
    ran = sum(layer["k"] for layer in shown.explainer.explain(TEXTS[0])["layers"])
    shown.sees("#shared", f"Both texts ran the same {ran} heads.")
    assert shown.faults == []


def test_a_dense_model_has_nothing_to_slide(browser: Any) -> None:
    shown = Shown(browser, *small(gates={"kind": "all"}))
    shown.page.goto("http://page.test/")
    shown.sees(".heads .big", "8 of 8")
    api.expect(shown.page.get_by_role("slider")).to_be_disabled()
    shown.sees(".cost .big", "100 %")
    assert shown.faults == []


def test_neurons_that_ran_are_shown_by_layer(browser: Any) -> None:
    base, gates = tiny("bert", vocab_size=120), {"kind": "order", "group_size": 16}
    shown = Shown(browser, retrofit(base, gates=gates, training_progress=1.0).eval(), small()[1], PAIRS)
    shown.page.goto("http://page.test/")
    layers = shown.explainer.explain(**PAIRS[0])["layers"]  # type: ignore[arg-type]
    assert 0 < sum(layer["neurons"] for layer in layers) < 3
    figures = [f"neurons {100 * layer['neurons']:.0f} %k {layer['k']} of 4" for layer in layers]
    api.expect(shown.page.locator(".figures")).to_have_text(figures)
    shown.sees(".heads .note", re.compile("the share of its feed-forward neurons"))
    assert shown.faults == []


def test_a_text_that_leaves_early_says_so(browser: Any, tiny_staged: Path, tmp_path: Path) -> None:
    run, file = Run.open(tiny_staged), tmp_path / "heads.html"
    shown = Shown(browser, run.model, run.tokenizer, **PHONE)
    data = shown.explainer.precompute([("a superb story of town", None)], "exit:inf")
    file.write_text(page({**data, "description": ""}), encoding="utf-8")
    shown.page.goto(file.as_uri())
    shown.sees(".heads .big", "0 of 8")
    shown.sees("#budget-words", "texts leave at the limit inf")
    shown.sees(".stages .big", "Its words alone decided it")
    said = shown.explainer.explain("a superb story of town", budget="exit:inf")["stages"]
    api.expect(shown.page.locator(".path .says")).to_have_text([said[0]["label"], "not run", "not run"])
    api.expect(shown.page.locator(".path .exit .stage")).to_have_text("Wordsleft here")
    shown.sees(".path .note", re.compile(r"\d+ % chance that the last stage answers differently"))
    assert shown.page.locator(".path .figure").all_inner_texts() == [
        f"{p:.2f}" for p in sorted(said[0]["probabilities"].values(), reverse=True)
    ]
    shown.page.locator(".head").nth(5).click()
    shown.sees(".look .readout", "It was not computed for this text; this is where it would have looked.")
    shown.page.get_by_role("slider").focus()
    shown.page.keyboard.press("End")
    shown.sees(".heads .big", "8 of 8")
    shown.sees("#budget-words", "every layer, all heads")
    said = shown.explainer.explain("a superb story of town", budget="full")["stages"]
    api.expect(shown.page.locator(".path .says")).to_have_text([stage["label"] for stage in said])
    api.expect(shown.page.locator(".path .exit .stage")).to_have_text("Layer 2left here")
    shown.sees("h1", "How far did this text go?")
    assert shown.page.evaluate("document.documentElement.scrollWidth") == 320
    assert shown.faults == []


def test_a_model_without_exits_has_no_stages_to_show(shown: Shown) -> None:
    shown.sees(".heads .big", re.compile("of 8"))
    api.expect(shown.page.locator(".stages")).to_be_hidden()
    shown.sees("h1", "Which heads ran for this text?")


def test_a_file_needs_no_server(browser: Any, tmp_path: Path) -> None:
    model, tokenizer = small()
    file, evil = tmp_path / "heads.html", "</script> <b>lake</b> & view"
    explainer = Explainer(model, tokenizer)
    data = explainer.precompute([(TEXTS[0], None), (evil, None)], "full")
    file.write_text(page({**data, "description": "<i>It</i> chooses."}), encoding="utf-8")
    shown = Shown(browser, model, tokenizer)
    shown.page.goto(file.as_uri())
    api.expect(shown.page.locator(".result")).to_have_count(2)
    shown.sees("#description", "<i>It</i> chooses.")
    api.expect(shown.page.locator("textarea[name=text]").nth(1)).to_have_value(evil)
    shown.sees(".heads .big", "8 of 8")
    shown.page.get_by_role("slider").focus()
    shown.page.keyboard.press("Home")
    shown.sees(".heads .big", "2 of 8")
    explanation = explainer.explain(TEXTS[0], budget="max:0.25")
    shown.sees(".answer .big", explanation["label"])
    shown.page.locator(".head").nth(5).click()
    shown.sees(".look .big", "Layer 2, head 2")
    shown.page.locator(".token").nth(2).click()
    row = explainer.attention(TEXTS[0], None, 1, 1, "max:0.25")["map"][2]
    first = float(shown.page.locator(".result").first.locator(".look .figure").first.inner_text().split()[0])
    assert first == pytest.approx(100 * max(row), abs=0.3)
    shown.page.get_by_role("button", name="One text only").click()
    api.expect(shown.page.locator(".result")).to_have_count(1)
    assert shown.faults == []
    assert shown.asked == []
