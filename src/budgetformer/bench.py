"""How fast heads are that do not run: the attention block, the whole model, and a run from text to label.

Every figure is a ratio of medians in one process where the rivals take turns. The dense rivals are our own encoder with
all heads (SDPA), `torch.nn.TransformerEncoder`'s fast path, and a `transformers` BERT of the same shape; for exported
graphs, the dense graph; for a run, its dense twin.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from budgetformer.cost.flops import Shape, count
from budgetformer.cost.measure import in_fresh_process, measure_energy, peak, reset_peak, take_turns
from budgetformer.dial import Dial
from budgetformer.engine.answers import predicted
from budgetformer.engine.onnx import session
from budgetformer.engine.scores import score
from budgetformer.errors import ModelError, UsageError
from budgetformer.evaluate import cost_of
from budgetformer.models.model import BudgetFormerConfig, BudgetFormerForSequenceClassification
from budgetformer.nn.allocation import AllHeads, Allocation, LearnedHeads
from budgetformer.nn.attention import BudgetedAttention
from budgetformer.nn.feedforward import BudgetedFeedForward
from budgetformer.nn.ranking import FrozenHeads
from budgetformer.nn.selective import evaluate_active
from budgetformer.runs.provenance import environment
from budgetformer.runs.run import Run

Calls = dict[str, Callable[[], object]]  # the rivals, one of them "selective"
Prepare = Callable[[int, int, int], Calls]  # for a batch size, a length and a number of heads
Row = dict[str, Any]  # of a table: what was compared, times and ratios
_POSITIONS = 8192
_RUN_BATCHES = (1, 8, 32)
_GROUP_SIZE = 64  # feed-forward neurons that are left out together
_READ_AHEAD = 64  # batches whose texts are tokenised and sorted together


def compare(calls: Mapping[str, Callable[[], object]], seconds: float, most: int, least: int = 5) -> Row:
    """A row: the call "selective" against the fastest of its dense rivals, which take turns."""
    with torch.inference_mode():
        ms = take_turns(calls, seconds=seconds, least=least, most=most)
    ours = ms.pop("selective")
    best = min(ms.values())
    return {"dense_ms": best, "selective_ms": ours, "speedup": best / ours, "rivals_ms": ms}


def model_config(shape: Shape, **options: Any) -> BudgetFormerConfig:
    """A model of this shape that reads long texts, with its gates as after training."""
    options = {"num_labels": shape.labels, "training_progress": 1.0, "max_position_embeddings": _POSITIONS, **options}
    return BudgetFormerConfig(
        hidden_size=shape.width, num_attention_heads=shape.heads, num_hidden_layers=shape.layers,
        intermediate_size=shape.inner, vocab_size=shape.vocab, **options,
    )  # fmt: skip


def random_heads(batch: int, heads: int, k: int) -> Tensor:
    """A different random set of k heads for every sample. (B, H) bool."""
    order = torch.rand(batch, heads).argsort(dim=1)
    return order < k


def speed_rows(
    what: str, shape: Shape, batches: Iterable[int], lengths: Iterable[int], ks: Iterable[int], engine: str = "torch"
) -> Iterator[Row]:
    """Heads that are chosen at random for each sample against all heads, by batch size, length and number of heads.

    `what` is the "attention" block, projections included and gates excluded, or the whole "model" with its gates.
    `ideal` is the ratio of counted FLOPs.
    """
    torch.manual_seed(0)
    prepare = _CALLS[what, engine](shape)
    seconds, most = (1.5, 100) if what == "attention" else (4.0, 40)
    counted = replace(shape, scorer=engine != "torch")  # heads drawn at random need no scorer
    for batch, length, k in itertools.product(batches, lengths, ks):
        ideal = shape.heads / k
        if what == "model":
            ideal = count(counted, length, [], "dense").total / count(counted, length, [k] * shape.layers).total
        sizes = {"what": what, "engine": engine, "batch": batch, "length": length, "heads": shape.heads, "k": k}
        yield {**sizes, **compare(prepare(batch, length, k), seconds, most), "ideal": ideal}


def unit_rows(shape: Shape, batches: Iterable[int], lengths: Iterable[int]) -> Iterator[Row]:
    """What a head and a group of feed-forward neurons cost by the clock, as if cut out of the matrices.

    It is the time that half of them save. `groups_price` is what all groups of a layer cost of all its units, for the
    gates' option of that name; `flops_price` the same by FLOPs.
    """
    groups = shape.inner // _GROUP_SIZE
    if shape.heads < 2 or groups < 2 or shape.inner % _GROUP_SIZE:
        raise UsageError(
            f"{shape.heads} heads and {shape.inner} feed-forward neurons: to time half of them, give a shape of two "
            f"heads or more and neurons in groups of {_GROUP_SIZE}, such as 384x12x6"
        )

    def attention(held: range) -> nn.Module:
        return BudgetedAttention(shape.width, FrozenHeads(shape.heads, held), held=held)

    def feedforward(held: range) -> nn.Module:
        inner, outer = nn.Linear(shape.width, shape.inner), nn.Linear(shape.inner, shape.width)
        return BudgetedFeedForward(FrozenHeads(groups, held), inner, outer, nn.functional.gelu)

    parts = {"head": (attention, shape.heads), "group": (feedforward, groups)}
    layers = {(unit, held): make(range(held)).train(False) for unit, (make, units) in parts.items()
              for held in (units, units // 2)}  # fmt: skip
    for batch, length in itertools.product(batches, lengths):
        x_BND = torch.randn(batch, length, shape.width)
        calls = {f"{unit} {held}": partial(layer, x_BND, None, 1.0) for (unit, held), layer in layers.items()}
        with torch.inference_mode():
            ms = take_turns(calls, seconds=3.0, most=1000)
        saved = {unit: ms[f"{unit} {n}"] - ms[f"{unit} {n // 2}"] for unit, (_, n) in parts.items()}
        if min(saved.values()) <= 0:
            raise ModelError(f"{batch} x {length} tokens: half of the units took as long as all; time a larger batch")
        each = {f"{unit}_ms": saved[unit] / (n - n // 2) for unit, (_, n) in parts.items()}
        priced = {"groups_price": saved["group"] / sum(saved.values()),
                  "flops_price": shape.inner / (shape.inner + 2 * shape.width + length)}  # fmt: skip
        yield {"what": "units", "batch": batch, "length": length, "group_size": _GROUP_SIZE, **each, **priced}


def _attention_in_torch(shape: Shape) -> Prepare:
    layer = BudgetedAttention(shape.width, AllHeads(shape.heads)).eval()

    def prepare(batch: int, length: int, k: int) -> Calls:
        x_BND, active_BH = torch.randn(batch, length, shape.width), random_heads(batch, shape.heads, k)
        every_head = layer.allocator(x_BND, None, 1.0)
        chosen = Allocation(every_head.budget, every_head.relevance, active_BH.sum(1), active_BH, active_BH.float())
        dense = partial(layer.evaluate, x_BND, None, every_head)
        return {"dense": dense, "selective": partial(selective, layer, x_BND, chosen)}

    return prepare


def selective(layer: BudgetedAttention, x_BND: Tensor, allocation: Allocation) -> Tensor:
    """What the layer does at evaluation, its gate excluded."""
    y_BND = evaluate_active(x_BND, None, allocation.active, allocation.weights, layer.qkv, layer.out)
    return layer.evaluate(x_BND, None, allocation) if y_BND is None else y_BND


def _attention_in_onnx(shape: Shape) -> Prepare:
    from budgetformer.export.builder import BOOL, FLOAT, INT64, Graph
    from budgetformer.export.network import Gates, Padding, attention

    layer, H, D = BudgetedAttention(shape.width, AllHeads(shape.heads)), shape.heads, shape.width

    def graph(gated: bool) -> Any:
        g = Graph()
        x = g.input("x", FLOAT, ["batch", "length", D])
        padding = Padding.of(g, g.input("attention_mask", INT64, ["batch", "length"]))
        gates = Gates(g.input("active", BOOL, ["batch", H]), g.input("weights", FLOAT, ["batch", H])) if gated else None
        g.output("y", attention(g, x, padding, gates, layer), FLOAT, ["batch", "length", D])
        return session(g.finish().SerializeToString(), torch.get_num_threads())

    dense, gated = graph(False), graph(True)

    def prepare(batch: int, length: int, k: int) -> Calls:
        active = random_heads(batch, H, k).numpy()
        feed = {"x": torch.randn(batch, length, D).numpy(), "attention_mask": np.ones((batch, length), np.int64)}
        gates = {"active": active, "weights": active.astype(np.float32)}
        return {"dense": partial(dense.run, None, feed), "selective": partial(gated.run, None, {**feed, **gates})}

    return prepare


def _model_in_torch(shape: Shape) -> Prepare:
    budgeted = BudgetFormerForSequenceClassification(model_config(shape, gates={"kind": "random"})).train(False)
    rivals = dense_rivals(shape)

    def prepare(batch: int, length: int, k: int) -> Calls:
        ids_BN = torch.randint(1, shape.vocab, (batch, length))
        dense = {name: partial(model, ids_BN) for name, model in rivals.items()}
        return {**dense, "selective": partial(budgeted, ids_BN, budget=Dial("fixed", k / shape.heads))}

    return prepare


def _model_in_onnx(shape: Shape) -> Prepare:
    """Random scorers choose the heads; the budget is an input of the graph."""
    from budgetformer.export.network import build

    def graph(kind: str) -> Any:
        model = BudgetFormerForSequenceClassification(model_config(shape, gates={"kind": kind}))
        for module in model.modules():
            if isinstance(module, LearnedHeads):  # far apart, so that texts differ in the heads that they get
                nn.init.normal_(module.scorer.weight)
        return session(build(model, Dial("full")).SerializeToString(), torch.get_num_threads())

    dense, gated = graph("all"), graph("learned")

    def prepare(batch: int, length: int, k: int) -> Calls:
        ids = torch.randint(1, shape.vocab, (batch, length)).numpy()
        feed = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        limited = {**feed, "budget_max": np.array(k / shape.heads)}
        return {"dense": partial(dense.run, None, feed), "selective": partial(gated.run, None, limited)}

    return prepare


_CALLS = {
    ("attention", "torch"): _attention_in_torch,
    ("attention", "onnx"): _attention_in_onnx,
    ("model", "torch"): _model_in_torch,
    ("model", "onnx"): _model_in_onnx,
}


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

    labels: dict[str, Any] = {"num_labels": shape.labels, "attn_implementation": "sdpa"}
    bert = BertConfig(
        vocab_size=shape.vocab, hidden_size=shape.width, num_hidden_layers=shape.layers, hidden_act="relu",
        num_attention_heads=shape.heads, intermediate_size=shape.inner, max_position_embeddings=_POSITIONS, **labels,
    )  # fmt: skip
    rivals = {
        "ours": BudgetFormerForSequenceClassification(model_config(shape, gates={"kind": "all"})),
        "torch": _TorchEncoder(shape),
        "bert": BertForSequenceClassification(bert),
    }
    return {name: model.train(False) for name, model in rivals.items()}


def run_bench(run: Run, *, texts: int, carbon: str | None = None) -> dict[str, Any]:
    """A run and its dense twin on the run's held-out texts, from text to label, timed. `carbon`: energy too."""
    if run.baseline is None:
        raise ModelError(f"{run.folder} has no dense twin to compare with: train it with --with-baseline")
    held_out = run.held_out().sample(texts)
    examples = list(held_out.data.splits[held_out.split].examples())
    scorers = {"dense": run.baseline.scorer(), "selective": run.scorer()}

    def answer(name: str, batch: int) -> None:
        """All texts as a service would: tokenise, sort by length, batch, pad, classify."""
        scorer, size = scorers[name], _READ_AHEAD * batch
        for some in (examples[start : start + size] for start in range(0, len(examples), size)):
            table = scorer.encode([e.text for e in some], [e.text_pair or "" for e in some] if run.pairs else None)
            predicted(score(scorer.engine, table, batch_size=batch).probabilities, run.task)

    rows = []
    for batch in _RUN_BATCHES:
        row = compare({name: partial(answer, name, batch) for name in scorers}, 20, 9, 3)
        del row["rivals_ms"]  # there is one alone
        rows.append({"batch": batch, **row, "texts_per_second": 1000 * len(examples) / row["selective_ms"]})
    scores = score(scorers["selective"].engine, run.encode(held_out))
    cost = cost_of(scores, scorers["selective"].config)
    energy = {
        name: measure_energy(partial(answer, name, 32), len(examples), carbon)
        for name in ("selective", "dense")
        if carbon
    }
    return {
        "run": str(run.folder), "split": held_out.split, "texts": len(examples), "mean_tokens": cost["mean_tokens"],
        "k_over_h": float((scores.heads / scores.num_heads).mean()),
        "ideal": 1 / cost["flops_ratio"], "ceiling": 1 / (1 - cost["attention_share_of_dense"]),
        "rows": rows, "energy": energy or None, "environment": environment(),
    }  # fmt: skip


def memory_row(shape: Shape, batch: int, length: int, k: int) -> dict[str, Any]:
    """MiB that one forward pass of the attention block, and of the whole model, needs above what stood before.

    In fresh processes; k = 0 is the dense model.
    """
    row = {"batch": batch, "length": length, "k": k or None}
    for part in ("block", "model"):
        arguments = {"batch": batch, "length": length, "k": k, "part": part}
        row[f"{part}_mib"] = in_fresh_process(["-m", __name__], [asdict(shape), arguments])["bytes"] / 2**20
    return row


def _bytes_of_one_pass(shape: Shape, batch: int, length: int, k: int, part: str) -> int:
    torch.manual_seed(0)
    dial = Dial("fixed", k / shape.heads) if k else None
    config = model_config(shape, gates={"kind": "random" if k else "all"})
    model = BudgetFormerForSequenceClassification(config).train(False)
    ids = torch.randint(1, shape.vocab, (batch, length))
    with torch.inference_mode():
        model(ids[:1, :8])  # libraries allocate what they keep
        x = model.base.encoder.embedding(ids)
        before = reset_peak()
        if part == "block":
            model.attentions[0](x, None, 1.0, dial)
        else:
            model(ids, budget=dial)
        return max(0, peak() - before)


if __name__ == "__main__":
    sizes, options = json.loads(sys.argv[1])
    print(json.dumps({"bytes": _bytes_of_one_pass(Shape(**sizes), **options)}))
