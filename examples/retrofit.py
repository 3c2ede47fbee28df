"""Head budgets for an encoder that you have: fine-tune it, find the cheapest setting that is good enough, use it.

python examples/retrofit.py MODEL_OR_DIR reviews.csv
budgetformer serve runs/retrofit --budget max-drop-0.5
"""

import sys

import budgetformer

base, data = sys.argv[1:]
run = budgetformer.train(data, base=base, output="runs/retrofit", resume=True)
run.calibrate(max_drop=[0.5])
answers = run.predict(["a superb story"], budget="max-drop-0.5")
print(f"{answers.labels[0]}, {answers.heads[0]:.0%} of the heads")
