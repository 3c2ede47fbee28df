"""Head budgets for an encoder that you have: fine-tune it, find the cheapest setting that is good enough, use it.

python examples/retrofit.py MODEL_OR_DIR reviews.csv
"""

import sys
from pathlib import Path

from budgetformer.calibration import calibrate, read_dial, write_calibration
from budgetformer.data import DataSource, encode, open_data
from budgetformer.training.recipe import Recipe
from budgetformer.training.run import load_run, train

base, data = sys.argv[1:]
run = Path("runs/retrofit")
train(DataSource(data), Recipe.make(base=base), run, resume=True)

model, tokenizer, record = load_run(run)
reviews = open_data(DataSource(data))
held_out = encode(reviews.splits["validation"], reviews, tokenizer, record["max_length"])
write_calibration(run, calibrate(model, held_out, split="validation", max_drop=[0.5]))

batch = tokenizer(["a fine film", "two hours of my life"], padding=True, return_tensors="pt")
output = model(batch["input_ids"], batch["attention_mask"], budget=read_dial("max-drop-0.5", run))
for scores, heads in zip(output.logits, sum(a.heads for a in output.allocations), strict=True):
    print(model.config.id2label[int(scores.argmax())], f"with {int(heads)} heads in all")
