"""The command line: one thin file per verb; heavy imports happen inside the verb."""

from __future__ import annotations

import sys
import warnings
from importlib.metadata import entry_points
from typing import Any

import typer

from budgetformer import __version__
from budgetformer.cli.process import INTERRUPTED, interruptible, leave_process_group, set_environment
from budgetformer.errors import BudgetFormerError, BudgetFormerWarning

app = typer.Typer(
    name="budgetformer",
    help="Text classifiers that spend on each text only what it needs: words, layers, attention heads.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line; a user's error becomes one line on stderr and its own exit code."""
    set_environment()
    default = warnings.showwarning

    def show(message: Warning | str, category: type[Warning], *place: Any) -> None:
        ours = issubclass(category, BudgetFormerWarning)
        print(f"warning: {message}", file=sys.stderr) if ours else default(message, category, *place)

    warnings.showwarning = show  # type: ignore[assignment]
    try:
        with interruptible():
            app()
    except BudgetFormerError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    finally:
        leave_process_group()


# Verbs register themselves on `app`.
from budgetformer.cli import bench, calibrate, check, eval, explain, export, predict, serve, train  # noqa: E402, F401

for _verb in entry_points(group="budgetformer.verbs"):  # of distributions that build on this one
    app.command(_verb.name)(_verb.load())
