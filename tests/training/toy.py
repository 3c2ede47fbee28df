"""Data made for the tests: a word decides the label."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

GOOD, BAD = ("great", "lovely", "superb"), ("awful", "dull", "poor")
REST = ("the", "film", "was", "a", "story", "of", "some", "people", "in", "town", "with", "music", "and", "light")


def write_reviews(path: Path, rows: int = 200, seed: int = 0) -> Path:
    """A CSV of short reviews, no two the same."""
    rng = random.Random(seed)
    lines = ["review,sentiment"]
    for number in range(rows):
        good = number % 2
        words = [*rng.choices(REST, k=rng.randint(3, 12)), rng.choice(GOOD if good else BAD), str(number)]
        rng.shuffle(words)
        lines.append(f"{' '.join(words)},{'pos' if good else 'neg'}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def review_rows(rows: int, noise: float, seed: int = 0) -> list[dict[str, Any]]:
    """Reviews as JSON rows; some hold a word of the other kind too, and the first of the two decides."""
    rng = random.Random(seed)
    result = []
    for number in range(rows):
        good = number % 2
        decisive, other = (GOOD, BAD) if good else (BAD, GOOD)
        words = [*rng.choices(REST, k=rng.randint(3, 12)), rng.choice(decisive), str(number)]
        rng.shuffle(words)
        if rng.random() < noise:
            first = next(place for place, word in enumerate(words) if word in decisive)
            words.insert(rng.randint(first + 1, len(words)), rng.choice(other))
        result.append({"text": " ".join(words), "label": "pos" if good else "neg"})
    return result
