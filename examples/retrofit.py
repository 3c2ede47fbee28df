"""Head budgets for an encoder that you have: fine-tune it, find the cheapest setting that is good enough, serve it.

python examples/retrofit.py MODEL_OR_DIR reviews.csv
curl localhost:8000/predict -H 'content-type: application/json' -d '{"text": "a fine film"}'
"""

import sys

import budgetformer
from budgetformer.serving.server import serve
from budgetformer.serving.settings import Settings

base, data = sys.argv[1:]
run = budgetformer.train(data, base=base, output="runs/retrofit", resume=True)
run.calibrate(max_drop=[0.5])
serve(Settings(run.folder, budget="max-drop-0.5"))
