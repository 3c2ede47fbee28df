"""BudgetFormerClassifier in a pipeline: clean texts, cross-validate, and turn the dial after one fit."""

import random

import numpy as np
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from budgetformer import BudgetFormerClassifier

draw = random.Random(0)
words = ["the", "film", "story", "music", "light", "town", "people", "was", "with", "some"]
verdicts = ["good", "bad"] * 100
praise = {"good": ["lovely", "superb"], "bad": ["dull", "awful"]}
texts = [" ".join([*draw.choices(words, k=8), draw.choice(praise[v]), "<br>", draw.choice(words)]) for v in verdicts]


def without_tags(texts: list[str]) -> np.ndarray:
    return np.char.replace(texts, "<br>", " ")


classifier = BudgetFormerClassifier("tiny", epochs=6, max_length=32, random_state=0)
model = make_pipeline(FunctionTransformer(without_tags), classifier)
print("accuracy in three folds:", cross_val_score(model, texts, verdicts, cv=3).round(2))

seen, unseen, seen_verdicts, unseen_verdicts = train_test_split(texts, verdicts, random_state=0)
model.fit(seen, seen_verdicts)
for budget in ("learned", "fixed:0.25", "full"):
    model.set_params(budgetformerclassifier__budget=budget)
    print(f"{budget}: {model.score(unseen, unseen_verdicts):.2f}")
