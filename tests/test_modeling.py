"""The model behind Hugging Face's interfaces: sizes, invariances, gradients, round trips, Trainer and pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from budgetformer import BudgetFormerConfig, BudgetFormerForSequenceClassification, ProgressCallback
from budgetformer_reproduction.published import parameters
from tests.gates import sorted_options

KINDS = [{"kind": "learned"}, {"kind": "all"}, {"kind": "fixed", "fixed_budget": 0.5}, {"kind": "random"},
         {"kind": "static"}]  # fmt: skip


def build(**options: Any) -> BudgetFormerForSequenceClassification:
    torch.manual_seed(1)
    defaults = {"vocab_size": 100, "num_labels": 3, "training_progress": 1.0}
    return BudgetFormerForSequenceClassification(
        BudgetFormerConfig.preset("tiny", **sorted_options(**{**defaults, **options}))
    ).eval()


def batch(lengths: list[int], width: int | None = None) -> tuple[Tensor, Tensor]:
    width = width or max(lengths)
    generator = torch.Generator().manual_seed(sum(lengths))
    ids = torch.randint(1, 100, (len(lengths), width), generator=generator)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return ids * mask, mask.long()


@pytest.mark.parametrize(("kind", "count"), [("all", 51_794_691), ("learned", 54_184_743)])
def test_the_papers_model_has_the_papers_size(kind: str, count: int) -> None:
    with torch.device("meta"):
        model = BudgetFormerForSequenceClassification(BudgetFormerConfig.paper(num_labels=3, gates={"kind": kind}))
    assert sum(p.numel() for p in model.parameters()) == count
    assert parameters(3, gated=kind == "learned") == count


@settings(max_examples=25)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=5), st.integers(0, 9), st.data())
def test_a_text_gets_the_same_answer_in_any_company(lengths: list[int], extra: int, data: st.DataObject) -> None:
    """Padding, batch and place change logits by rounding only (1e-5), and the chosen heads not at all."""
    model = build()
    ids, mask = batch(lengths, max(lengths) + extra)
    place = data.draw(st.integers(0, len(lengths) - 1))
    with torch.inference_mode():
        together = model(ids, mask)
        alone = model(ids[place : place + 1, : lengths[place]])
    torch.testing.assert_close(together.logits[place], alone.logits[0], atol=1e-5, rtol=1e-5)
    for a, b in zip(together.allocations, alone.allocations, strict=True):
        assert torch.equal(a.active[place], b.active[0])
        assert a.heads[place] == b.heads[0]


@pytest.mark.parametrize("gates", KINDS, ids=lambda gates: gates["kind"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"topk_from": 0.0},
        {"topk_from": 0.0, "renormalize": True, "min_heads": 0, "s_min": 0.0, "cost_weight": 0.1},
        {"topk_from": 0.0, "min_heads": 0, "rounding": "ceil", "entropy": "off", "target_budget": 0.3},
        {"budget_as": "count", "topk_from": 0.5, "min_heads": 0, "cost_weight": 0.1},
        {"entropy": "printed", "pool_padding": True, "pooling": "first", "scale_embeddings": True},
    ],
    ids=lambda o: ",".join(o) or "paper",
)
def test_every_parameter_gets_a_gradient_in_every_step(gates: dict[str, Any], options: dict[str, Any]) -> None:
    model = build(**gates, **options).train()
    ids, mask = batch([5, 2, 9])
    for progress in (0.0, 0.5, 1.0):
        model.zero_grad()
        model(ids, mask, torch.tensor([0, 1, 2]), progress=progress).loss.backward()
        assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("budget_as", ["gain", "count"])
def test_gradients_exist_even_where_no_sample_uses_any_head(budget_as: Any) -> None:
    model = build(topk_from=0.0, min_heads=0, budget_as=budget_as).train()
    with torch.no_grad():
        for attention in model.attentions:
            attention.allocator.budget_net[2].bias.fill_(-50.0)
    ids, mask = batch([5, 2])
    output = model(ids, mask, torch.tensor([0, 1]), progress=1.0)
    assert not any(a.active.any() for a in output.allocations)
    output.loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_the_loss_is_the_sum_of_its_named_parts() -> None:
    model = build(cost_weight=0.2, target_budget=[0.2, 0.4])
    ids, mask = batch([4, 7])
    output = model(ids, mask, torch.tensor([2, 0]))
    assert set(output.loss_parts) == {"task", "budget", "entropy", "cost", "target"}
    torch.testing.assert_close(output.loss, sum(output.loss_parts.values()))
    assert set(build(kind="all")(ids, mask, torch.tensor([2, 0])).loss_parts) == {"task"}


def test_allocations_tell_what_happened_in_every_layer() -> None:
    output = build()(*batch([4, 7]), budget="fixed:0.5")
    assert len(output.allocations) == 2
    for a in output.allocations:
        assert a.budget.shape == (2,)
        assert a.relevance.shape == a.weights.shape == a.active.shape == (2, 4)
        assert a.heads.tolist() == [2, 2]
        assert a.active.sum(-1).tolist() == [2, 2]


def test_the_full_dial_is_the_soft_forward_of_training() -> None:
    model = build(dropout=0.0)
    ids, mask = batch([4, 7])
    soft = model.train()(ids, mask, progress=1.0).logits  # at progress 1 there is no noise
    torch.testing.assert_close(model.eval()(ids, mask, budget="full").logits, soft)
    assert not torch.allclose(model(ids, mask, budget="learned").logits, soft)


def test_evaluation_uses_the_temperature_of_the_stored_progress() -> None:
    ids, mask = batch([4, 7])
    early, late = build(training_progress=0.0), build(training_progress=1.0)
    assert torch.equal(late(ids, mask).logits, early(ids, mask, progress=1.0).logits)
    hot, cold = (m(ids, mask).allocations[0].relevance.max() for m in (early, late))
    assert cold > hot


@pytest.mark.parametrize("gates", KINDS, ids=lambda gates: gates["kind"])
def test_save_and_load_give_identical_logits(gates: dict[str, Any], tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForSequenceClassification

    model = build(**gates, id2label={0: "no", 1: "maybe", 2: "yes"}, topk_from=0.7, renormalize=True)
    model.save_pretrained(tmp_path)
    assert [f.suffix for f in tmp_path.iterdir() if "model" in f.name] == [".safetensors"]
    ids, mask = batch([4, 7])
    for loaded in (
        BudgetFormerForSequenceClassification.from_pretrained(tmp_path),
        AutoModelForSequenceClassification.from_pretrained(tmp_path),
    ):
        assert loaded.config.to_diff_dict() == model.config.to_diff_dict()
        torch.manual_seed(3)
        expected = model(ids, mask).logits
        torch.manual_seed(3)
        assert torch.equal(loaded.eval()(ids, mask).logits, expected)
    assert AutoConfig.from_pretrained(tmp_path).id2label == {0: "no", 1: "maybe", 2: "yes"}


def test_the_first_token_is_the_first_real_one_where_padding_is_on_the_left() -> None:
    model = build(pooling="first", num_labels=3)
    ids, mask = batch([4, 9])
    left, padding = ids.flip(1), mask.flip(1)
    with torch.inference_mode():
        model.base.encoder.embedding.positions.zero_()  # a text on the right stands at later positions
        alone = torch.cat([model(left[row : row + 1, -n:]).logits for row, n in enumerate((4, 9))])
        torch.testing.assert_close(model(left, padding).logits, alone, atol=1e-5, rtol=1e-5)


def test_half_precision_keeps_its_gates_in_fp32(tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    model = BudgetFormerForSequenceClassification.from_pretrained(tmp_path, dtype=torch.float16)
    kinds = {("allocator" in name): p.dtype for name, p in model.named_parameters()}
    assert kinds == {True: torch.float32, False: torch.float16}


def test_attention_maps_on_request() -> None:
    model = build()
    ids, mask = batch([4, 7])
    assert model(ids, mask).attentions is None
    assert {k: v.shape for k, v in model(ids, mask, attention_heads={1: [3]}).attentions.items()} == {1: (2, 1, 7, 7)}
    every = model(ids, mask, output_attentions=True).attentions
    assert {k: v.shape for k, v in every.items()} == {0: (2, 4, 7, 7), 1: (2, 4, 7, 7)}
    assert (every[0][0, :, :, 4:] == 0).all()


def test_a_tuple_is_returned_on_request() -> None:
    ids, mask = batch([4, 7])
    logits, allocations = build()(ids, mask, return_dict=False)
    assert logits.shape == (2, 3)
    assert len(allocations) == 2


def test_segments_reach_the_model() -> None:
    ids, mask = batch([6, 6])
    types = (torch.arange(6) > 2).long().expand(2, 6)
    with_segments, without = build(segment_embeddings=True), build()
    assert not torch.allclose(with_segments(ids, mask, token_type_ids=types).logits, with_segments(ids, mask).logits)
    assert torch.equal(without(ids, mask, token_type_ids=types).logits, without(ids, mask).logits)


def test_gradient_checkpointing_changes_no_gradient() -> None:
    ids, mask = batch([5, 8])
    grads = []
    for checkpointing in (False, True):
        model = build().train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        torch.manual_seed(5)
        model(ids, mask, torch.tensor([0, 1]), progress=0.3).loss.backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, msg=name)


@pytest.mark.parametrize(
    ("options", "labels"),
    [
        ({"num_labels": 1}, torch.tensor([0.5, -1.0])),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, torch.tensor([[1, 0, 1], [0, 0, 0]])),
        ({"num_labels": 3, "label_smoothing": 0.1, "class_weights": [1.0, 2.0, 3.0]}, torch.tensor([0, 2])),
    ],
)
def test_other_tasks_learn(options: dict[str, Any], labels: Tensor) -> None:
    model = build(**options, dropout=0.0).train()
    ids, mask = batch([5, 8])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(15):
        loss = model(ids, mask, labels, progress=1.0).loss_parts["task"]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        ids = torch.full((6,), 10 + i % 2)
        return {"input_ids": ids, "attention_mask": torch.ones(6, dtype=torch.long), "labels": torch.tensor(i % 2)}


def test_trainer_can_train_it(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    model = build(num_labels=2, training_progress=0.0)
    arguments = TrainingArguments(
        tmp_path, num_train_epochs=6, per_device_train_batch_size=8, learning_rate=3e-3, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True, seed=0,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=Rows(), eval_dataset=Rows(), callbacks=[ProgressCallback()])
    trainer.train()
    assert model.config.training_progress == 1.0
    logits = trainer.predict(Rows()).predictions
    assert (logits.argmax(-1) == [i % 2 for i in range(32)]).all()


def test_pipeline_classifies_text_from_the_directory(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    words = ["[PAD]", "[UNK]", "good", "bad", "film"]
    backend = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(tmp_path)
    model = build(id2label={0: "neg", 1: "pos"}, num_labels=2)
    model.save_pretrained(tmp_path)
    classify = pipeline("text-classification", model=str(tmp_path), device="cpu")
    answers = classify(["good film", "bad"], batch_size=2)
    expected = model(torch.tensor([[2, 4]])).logits.softmax(-1)[0]
    assert answers[0]["label"] == ("neg", "pos")[int(expected.argmax())]
    assert answers[0]["score"] == pytest.approx(expected.max().item(), abs=1e-5)
