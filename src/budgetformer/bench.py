"""How fast heads are that do not run: the attention block, the whole model, and a run from text to label.

Every figure is a ratio of medians in one process where the rivals take turns. The dense rivals are our own encoder with
all heads (SDPA), `torch.nn.TransformerEncoder`'s fast path, and a `transformers` BERT of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from budgetformer.cost.flops import Shape, count
from budgetformer.cost.memory import in_fresh_process
from budgetformer.cost.timing import take_turns
from budgetformer.models.model import BudgetFormerConfig, BudgetFormerForSequenceClassification
from budgetformer.nn.allocation import AllHeads, Allocation
from budgetformer.nn.attention import BudgetedAttention
from budgetformer.nn.selective import evaluate_active


@dataclass(frozen=True)
class Row:
    """One comparison. `speedup` is against the fastest dense rival; `ideal` is the ratio of counted FLOPs."""

    what: str  # "attention" or "model"
    batch: int
    length: int
    heads: int
    k: int
    dense_ms: float  # the fastest dense rival
    selective_ms: float
    speedup: float
    ideal: float
    rivals_ms: dict[str, float]

    @property
    def slower(self) -> bool:
        return self.speedup < 1.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def model_config(shape: Shape, **options: Any) -> BudgetFormerConfig:
    """A model of this shape that reads long texts, with its gates as after training."""
    options = {"num_labels": shape.labels, "training_progress": 1.0, "max_position_embeddings": 8192, **options}
    return BudgetFormerConfig(
        hidden_size=shape.width, num_attention_heads=shape.heads, num_hidden_layers=shape.layers,
        intermediate_size=shape.inner, vocab_size=shape.vocab, **options,
    )  # fmt: skip


def random_heads(batch: int, heads: int, k: int) -> Tensor:
    """A different random set of k heads for every sample. (B, H) bool."""
    order = torch.rand(batch, heads).argsort(dim=1)
    return order < k


def attention_rows(shape: Shape, batches: Iterable[int], lengths: Iterable[int], ks: Iterable[int]) -> Iterable[Row]:
    """The attention block, projections included and gates excluded, against the dense block."""
    torch.manual_seed(0)
    layer = BudgetedAttention(shape.width, AllHeads(shape.heads)).eval()
    for batch in batches:
        for length in lengths:
            x = torch.randn(batch, length, shape.width)
            everything = layer.allocator(x, None, 1.0)
            for k in ks:
                active = random_heads(batch, shape.heads, k)
                allocation = Allocation(everything.budget, everything.relevance, active.sum(1), active, active.float())
                with torch.inference_mode():
                    ms = take_turns(
                        {
                            "dense": partial(layer.evaluate, x, None, everything),
                            "selective": partial(selective, layer, x, allocation),
                        },
                        seconds=1.5,
                        most=100,
                    )
                yield Row(
                    "attention", batch, length, shape.heads, k, ms["dense"], ms["selective"],
                    ms["dense"] / ms["selective"], shape.heads / max(k, 1), {"dense": ms["dense"]},
                )  # fmt: skip


def selective(layer: BudgetedAttention, x_BND: Tensor, allocation: Allocation) -> Tensor:
    """What the layer does at evaluation, its gate excluded."""
    y_BND = evaluate_active(x_BND, None, allocation.active, allocation.weights, layer.qkv, layer.out)
    return layer.evaluate(x_BND, None, allocation) if y_BND is None else y_BND


def model_rows(shape: Shape, batches: Iterable[int], lengths: Iterable[int], ks: Iterable[int]) -> Iterable[Row]:
    """The whole model, gates included, with a random set of k heads for each sample and layer, against all rivals."""
    torch.manual_seed(0)
    budgeted = BudgetFormerForSequenceClassification(model_config(shape, gates={"kind": "random"})).train(False)
    rivals = dense_rivals(shape)
    counted = replace(shape, scorer=False)
    for batch in batches:
        for length in lengths:
            ids = torch.randint(1, shape.vocab, (batch, length))
            calls: dict[str, Callable[[], object]] = {name: partial(model, ids) for name, model in rivals.items()}
            for k in ks:
                dial = f"fixed:{k / shape.heads}"
                with torch.inference_mode():
                    ms = take_turns({**calls, "selective": partial(budgeted, ids, budget=dial)}, seconds=4.0, most=40)
                ours = ms.pop("selective")
                best = min(ms.values())
                dense = count(counted, length, [], "dense").total
                ideal = dense / count(counted, length, [k] * shape.layers).total
                yield Row("model", batch, length, shape.heads, k, best, ours, best / ours, ideal, ms)


class _TorchEncoder(nn.Module):
    """`torch.nn.TransformerEncoder` of the same shape; without gradients it takes its own fast path."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocab, shape.width)
        layer = nn.TransformerEncoderLayer(shape.width, shape.heads, shape.inner, 0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, shape.layers)
        self.classifier = nn.Linear(shape.width, shape.labels)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.encoder(self.tokens(ids)).mean(dim=1))
        return logits


def dense_rivals(shape: Shape) -> dict[str, nn.Module]:
    """Three dense models of one shape: ours, torch's and Hugging Face's."""
    from transformers import BertConfig, BertForSequenceClassification

    options: dict[str, Any] = {
        "num_labels": shape.labels,
        "attn_implementation": "sdpa",
        "max_position_embeddings": 8192,
    }
    bert = BertConfig(
        vocab_size=shape.vocab, hidden_size=shape.width, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, intermediate_size=shape.inner, hidden_act="relu", **options,
    )  # fmt: skip
    rivals = {
        "ours": BudgetFormerForSequenceClassification(model_config(shape, gates={"kind": "all"})),
        "torch": _TorchEncoder(shape),
        "bert": BertForSequenceClassification(bert),
    }
    return {name: model.train(False) for name, model in rivals.items()}


_MEASURE = """
import json, sys, torch
from budgetformer import Dial
from budgetformer.bench import BudgetFormerForSequenceClassification, Shape, model_config
from budgetformer.cost.memory import peak, reset_peak
shape, batch, length, k, block = json.loads(sys.argv[1])
shape = Shape(**shape)
torch.manual_seed(0)
dense = k == 0
model = BudgetFormerForSequenceClassification(model_config(shape, gates={"kind": "all" if dense else "random"})).eval()
ids = torch.randint(1, shape.vocab, (batch, length))
with torch.inference_mode():
    model(ids[:1, :8])  # libraries allocate what they keep
    x = model.base.encoder.embedding(ids)
    before = reset_peak()
    if block:
        model.attentions[0](x, None, 1.0, None if dense else Dial("fixed", k / shape.heads))
    else:
        model(ids, budget=None if dense else f"fixed:{k / shape.heads}")
    print(json.dumps({"peak": max(0, peak() - before)}))
"""


def peak_memory(shape: Shape, batch: int, length: int, k: int, *, block: bool = False) -> float:
    """MiB that one forward pass needs above what stood before, in a fresh process; k = 0 is the dense model."""
    found = in_fresh_process(_MEASURE, [asdict(shape), batch, length, k, block])
    return float(found["peak"]) / 2**20


def memory_row(shape: Shape, batch: int, length: int, k: int) -> dict[str, Any]:
    """Peak memory of the attention block and of the whole model; k = 0 is the dense model."""
    mib = {name: peak_memory(shape, batch, length, k, block=name == "block_mib") for name in ("block_mib", "model_mib")}
    return {"batch": batch, "length": length, "k": k or None, **mib}
