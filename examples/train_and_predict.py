"""From a CSV file to answers in Python: what the verbs train and predict do on the command line."""

import csv
import random
import tempfile
from pathlib import Path

import budgetformer

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

    run = budgetformer.train(file, output=folder, preset="tiny", epochs=6, max_length=32, quiet=True)
    test = run.evaluate()["evaluations"][0]
    print(f"accuracy {test['score']:.2f} on {test['rows']} rows, k/H {test['budget']['k_over_h']:.2f}")

    texts = ["a superb story", "the music was awful"]
    answers = run.predict(texts, budget="max:0.5")
    for text, label, heads in zip(texts, answers.labels, answers.heads, strict=True):
        print(f"{text!r}: {label}, {heads:.0%} of the heads")
