"""Hand-written explanations of what the reproduction found, by the key that the claim's code gives it.

Each was tried on the runs in docs/results (CPU scale, two seeds); the figures are those of docs/reproduction.md.
"""

from __future__ import annotations

EXPLANATIONS: dict[str, str] = {
    "accuracy": (
        "Tried: is it top-k? No: the same models with all heads weighted score the same within 0.2 points (Table "
        "2, soft). Is it learning s? On SNLI, yes: with s fixed at 0.25 and trained so the model has 0.5987, the "
        "Transformer 0.6002, the learned one 0.5892 (Table 3). Seeds alone move these by a point."
    ),
    "fixed-trained": (
        "Tried: what s does while it is learned. It scales the output of attention, and falls from 0.5 to 0.17 "
        "while heads are still being learned (Figure 2). Models whose s is small from the first step on (0.1 and "
        "0.25) are the best, those whose s is large (0.75 and 1) no better than the learned one: a small s helps "
        "here, finding it for each input does not. Within a layer s hardly differs between inputs (standard "
        "deviation at most 0.07, Figure 4)."
    ),
    "fixed-overridden": (
        "Tried: how far the override is from the learned mean. It hurts where that is far, most on DBpedia, at s "
        "= 0.1 and at s = 1, and is free close to it. The collapse that the paper reports on DBpedia at s = 1 "
        "(0.167) has no counterpart in models that were trained so (SNLI), and a small one here: the paper "
        "probably overrode s at evaluation."
    ),
    "random-evaluated": (
        "Tried: does IMDB need its heads? Hardly: with one head a layer the same models have 0.7585 of 0.7588, "
        "with attention in the first layer alone 0.7628 (what the trained models need). Random heads can do "
        "little harm there."
    ),
    "dynamics": (
        "Tried: how much was learned by then. IMDB and Yelp have 375 and 228 steps. On SNLI s falls with the "
        "steps: 0.379, 0.369, 0.322 and 0.155 after 87, 213, 423 and 846 (Table 6), and with a quarter of the "
        "learning rate it stands above 0.5 after 846 too, at an accuracy of 0.5 (Table 5). s falls once the model "
        "has learned something."
    ),
    "complexity": (
        "Tried: s against the model's own confidence. It rises with it (+0.53 on AG News, +0.55 on IMDB, +0.56 on "
        "Yelp), and at equal confidence next to nothing is left of its correlation with difficulty (-0.06, -0.03, "
        "-0.06). s is a gain: where the model is sure, more of it lowers the loss further, and texts that are "
        "hard get less."
    ),
    "complexity-length": (
        "Tried: length is not what hides it, since at equal length the correlations stay as they are. Confidence "
        "is, as above."
    ),
    "controls": (
        "Tried: what the controls share. All but TF-IDF are Transformers of the same training, and with so few "
        "steps seeds differ by more than the methods do (SNLI: learned 0.585 and 0.594, dense 0.608 and 0.592). "
        "What stands out is only the static allocator, which fails with one of two seeds on each data set, and "
        "that a dense model with a narrower feed-forward saves the same FLOPs at no loss: at this size a budget "
        "for each input is not needed to save them."
    ),
}
