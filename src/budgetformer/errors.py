"""What a user can do wrong, by exit code. A message names the field, its value and the remedy."""

from __future__ import annotations


class BudgetFormerError(Exception):
    """An error that the user can fix; anything else that escapes is a bug (exit code 1)."""

    exit_code = 1


class BudgetFormerWarning(UserWarning):
    """What a user should know, with the remedy, and may go on without."""


class UsageError(BudgetFormerError, ValueError):
    """A wrong flag, config value or argument."""

    exit_code = 2


class DataError(BudgetFormerError, ValueError):
    """A data file, row, column or label that cannot be used."""

    exit_code = 3


class ModelError(BudgetFormerError, ValueError):
    """A model, checkpoint or other file that cannot be read or written."""

    exit_code = 4


class MissingExtraError(BudgetFormerError, ImportError):
    """An optional dependency is not installed."""

    exit_code = 5

    def __init__(self, extra: str, package: str) -> None:
        super().__init__(
            f"this needs the package {package!r}, which is not installed: install budgetformer with its extra "
            f"{extra!r}, from a checkout by pip install '.[{extra}]'"
        )
