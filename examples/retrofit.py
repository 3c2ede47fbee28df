"""An encoder that you have, at a fraction of its cost: fine-tune it with exits and narrower layers, see
what early answers cost, use it.

python examples/retrofit.py MODEL_OR_DIR reviews.csv
budgetformer serve runs/retrofit --budget 0.3
"""

import sys

import budgetformer

base, data = sys.argv[1:]
run = budgetformer.train(data, base=base, output="runs/retrofit", resume=True)
run.calibrate()
answers = run.predict(["a superb story"], budget=0.3)
print(f"{answers.labels[0]}, answered after {answers.exits[0]} at {answers.cost[0]:.0%} of the cost")
