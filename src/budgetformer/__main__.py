"""python -m budgetformer: the command line."""

from budgetformer.cli import main

main()
