"""From a CSV file to answers in Python: what the verbs train and predict do on the command line."""

import csv
import random
import tempfile
from pathlib import Path

from budgetformer.data import DataSource
from budgetformer.engine.scorer import Scorer
from budgetformer.training.recipe import Recipe
from budgetformer.training.run import train

draw = random.Random(0)
words = ["the", "film", "story", "music", "light", "town", "people", "was", "with", "some"]
praise = {"good": ["lovely", "superb"], "bad": ["dull", "awful"]}

with tempfile.TemporaryDirectory() as name:
    file, folder = Path(name, "reviews.csv"), Path(name, "run")
    with file.open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(["review", "verdict"])
        for _ in range(100):
            writer.writerows([" ".join([*draw.choices(words, k=9), draw.choice(praise[v])]), v] for v in praise)

    result = train(DataSource(str(file)), Recipe.make("tiny", epochs=6, max_length=32), folder, quiet=True)
    test = result["test"]
    print(f"accuracy {test['score']:.2f} on {test['rows']} rows, k/H {test['budget']['k_over_h']:.2f}")

    scorer = Scorer.from_run(folder, budget="max:0.5")
    texts = ["a superb story", "the music was awful"]
    scores = scorer.score(texts)
    for text, probabilities, heads in zip(texts, scores.probabilities, scores.heads, strict=True):
        label = scorer.labels[probabilities.argmax()]
        print(f"{text!r}: {label} ({probabilities.max():.2f}), heads by layer {heads.tolist()}")
