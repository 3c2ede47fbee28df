"""Head budgets for an encoder that you have: fine-tune it, find the cheapest setting that is good enough, serve it.

python examples/retrofit.py MODEL_OR_DIR reviews.csv
curl localhost:8000/predict -H 'content-type: application/json' -d '{"text": "a fine film"}'
"""

import sys
from pathlib import Path

from budgetformer.calibrate import calibrate, write_calibration
from budgetformer.data import DataSource, encode, open_data
from budgetformer.runs.run import load_run
from budgetformer.serving.server import serve
from budgetformer.serving.settings import Settings
from budgetformer.training.recipe import Recipe
from budgetformer.training.run import train

base, data = sys.argv[1:]
run = Path("runs/retrofit")
train(DataSource(data), Recipe.make(base=base), run, resume=True)

model, tokenizer, record = load_run(run)
reviews = open_data(DataSource(data))
held_out = encode(reviews.splits["validation"], reviews, tokenizer, record["max_length"])
write_calibration(run, calibrate(model, held_out, split="validation", max_drop=[0.5]))

serve(Settings(run, budget="max-drop-0.5"), host="127.0.0.1", port=8000)
