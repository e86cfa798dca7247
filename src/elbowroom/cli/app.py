"""The command line. Answers go to standard output; complaints are one line on standard error.

Exit status: 0 answered, 2 bad input, 3 nothing fits the budget, 1 a verification that failed or anything that is our
fault. Only the commands that take a model import torch, and only once they run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any

import typer

from elbowroom import __version__
from elbowroom.cli.demos import demo_command
from elbowroom.cli.output import INFEASIBLE, AsJson, complain
from elbowroom.cli.problems import simulate_command, solve_command
from elbowroom.cli.training_steps import explain_command, plan_command, sweep_command, verify_command
from elbowroom.errors import BudgetTooSmall, ElbowroomError, InputError

app = typer.Typer(add_completion=False, help="Train in the memory you have.")
for name, command in (
    ("solve", solve_command),
    ("simulate", simulate_command),
    ("plan", plan_command),
    ("explain", explain_command),
    ("sweep", sweep_command),
    ("verify", verify_command),
    ("demo", demo_command),
):
    app.command(name)(command)


@app.callback(invoke_without_command=True)
def begin(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and leave.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:  # bad input, so that a script that lost its command does not go on
        print(context.get_help())
        raise typer.Exit(2)


@app.command("version")
def version_command(as_json: AsJson = False) -> None:
    """Print the version."""
    print(json.dumps({"version": __version__}) if as_json else __version__)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit status."""
    sys.exit(run(list(sys.argv[1:] if arguments is None else arguments)))


@cache
def _parser() -> Callable[..., Any]:
    """Made of the commands above, which takes three times as long as a small problem."""
    return typer.main.get_command(app)


def run(arguments: list[str]) -> int:
    """Run the command line; the exit status is returned, and complaints are one line each."""
    try:
        outcome = _parser()(args=arguments, standalone_mode=False)
        sys.stdout.flush()
        return outcome if isinstance(outcome, int) else 0
    except typer.Exit as leave:
        return leave.exit_code
    except InputError as error:
        return complain(str(error), 2)
    except BudgetTooSmall as error:
        return complain(str(error), INFEASIBLE)
    except ElbowroomError as error:
        return complain(f"this is a bug in elbowroom, please report it: {error}", 1)
    except MemoryError:
        return complain("not enough memory for this problem; try fewer --slots", 1)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except Exception as error:  # the parser's usage errors, whichever package it comes from
        describe = getattr(error, "format_message", None)
        if describe is None:
            raise
        return complain(str(describe()), 2)
