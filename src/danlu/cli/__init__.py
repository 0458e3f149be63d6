"""Layer 6: the command line, one file a command. No logic: a command reads words and calls one function below.

Every command's module is imported for ``danlu --help``, so none imports anything heavy at its top: torch, transformers
and pydantic are imported inside the functions. A test holds ``danlu --help`` under 0.4 seconds.

Exit codes: 0 done, 1 it ran and failed, 2 the user's input is wrong.
"""

from __future__ import annotations

import sys

import typer

from danlu.base.errors import DanluError
from danlu.base.log import print_error, print_result, setup_log
from danlu.cli import (
    chat,
    config_schema,
    config_show,
    data_build,
    data_finance,
    data_inspect,
    data_tokenizer,
    doctor_parity,
    eval_model,
    export,
    plan_schedule,
    report,
    run,
    train,
)
from danlu.version import __version__

app = typer.Typer(
    name="danlu",
    help="Train, shrink and ship large language models on the GPUs you have.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
data = typer.Typer(help="Turn files into packed, tokenized rows.", no_args_is_help=True)
config = typer.Typer(help="Look at configs.", no_args_is_help=True)
plan = typer.Typer(help="Know what a training costs before paying for it.", no_args_is_help=True)
doctor = typer.Typer(help="Find out what is wrong with a run.", no_args_is_help=True)

app.command("train")(train.command)
app.command("eval")(eval_model.command)
app.command("chat")(chat.command)
app.command("export")(export.command)
app.command("run")(run.command)
app.command("report")(report.command)
app.add_typer(data, name="data")
data.command("build")(data_build.command)
data.command("inspect")(data_inspect.command)
data.command("tokenizer")(data_tokenizer.command)
data.command("finance")(data_finance.command)
app.add_typer(config, name="config")
config.command("schema")(config_schema.command)
config.command("show")(config_show.command)
app.add_typer(plan, name="plan")
plan.command("schedule")(plan_schedule.command)
app.add_typer(doctor, name="doctor")
doctor.command("parity")(doctor_parity.command)


def _version(wanted: bool) -> None:
    if wanted:
        print_result(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Print the version."),
) -> None:
    setup_log()


def main() -> None:
    """Run the command line and exit."""
    try:
        app()
    except DanluError as error:
        print_error(f"error: {error}")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
