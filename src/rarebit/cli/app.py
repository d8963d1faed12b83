"""The commands of `rarebit`, one file each."""

import json
import warnings
from functools import cached_property
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from rarebit import __version__
from rarebit.bench import bench_names, run_bench
from rarebit.cli import options as opt
from rarebit.cli import screen
from rarebit.cli.backtest import EXAMPLES as BACKTEST_EXAMPLES
from rarebit.cli.backtest import backtest_command
from rarebit.cli.compare import compare
from rarebit.cli.compress import EXAMPLES as COMPRESS_EXAMPLES
from rarebit.cli.compress import compress
from rarebit.cli.demo import demo
from rarebit.cli.diagnose import diagnose_command
from rarebit.cli.export import export_command
from rarebit.cli.improve import EXAMPLES as IMPROVE_EXAMPLES
from rarebit.cli.improve import improve
from rarebit.cli.methods import methods
from rarebit.cli.predict import predict_
from rarebit.cli.prune import prune
from rarebit.cli.report import report_command
from rarebit.cli.reshard import reshard
from rarebit.cli.serve import serve
from rarebit.cli.train import train
from rarebit.cli.update import EXAMPLES as UPDATE_EXAMPLES
from rarebit.cli.update import update
from rarebit.errors import RarebitError

EXAMPLES = """[bold]Examples[/bold]

rarebit demo

rarebit data prepare clicks.csv --label click --out data/clicks

rarebit compare --data data/clicks --model deepfm --methods baseline,low-rank,hashing --seeds 5

rarebit improve --data data/clicks --model dcn_v2 --size 1/16 --minutes 60 --out improved

rarebit backtest clicks.parquet --label click --time timestamp --by week --policies grow,fixed,retrain

rarebit train --data data/clicks --out runs/clicks

rarebit update --model runs/clicks --data tomorrow.csv --out runs/tomorrow

rarebit diagnose runs/clicks

rarebit prune --data data/clicks --model deepfm --sparsity 0.9,0.99 --out runs/pruned

rarebit compress runs/clicks --size 1/16 --out runs/small

rarebit export runs/clicks --to onnx --out clicks.onnx

rarebit predict --model clicks.onnx --input new.csv --out scores.csv

rarebit report runs/clicks --open
"""


class _Commands(TyperGroup):
    """All commands; Ctrl-C ends them with one line, where Typer prints nothing."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            opt.stop("stopped; no unfinished output is left behind", code=130)


class _Data(TyperGroup):
    """The commands of `rarebit data`, imported when one is called: they need torch."""

    def list_commands(self, ctx: Any) -> list[str]:
        return self._imported.list_commands(ctx)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return self._imported.get_command(ctx, cmd_name)

    @cached_property
    def _imported(self) -> TyperGroup:
        from rarebit.cli.data import data_app

        return typer.main.get_group(data_app)


app = typer.Typer(
    name="rarebit",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def start() -> None:
    """Run a command; a mistake of the user ends it with one line and exit code 2, no traceback."""
    warnings.showwarning = _show_warning
    try:
        app(prog_name="rarebit")
    except RarebitError as error:
        opt.stop(str(error), code=2)


def _show_warning(message: Warning | str, *_: object, **__: object) -> None:
    screen.line(f"warning: {message}", to=screen.errors)


def _show_version(wanted: bool) -> None:
    if wanted:
        screen.console.print(__version__)
        raise typer.Exit


@app.callback(epilog=EXAMPLES)
def _rarebit(
    version: Annotated[
        bool,
        Option(
            "--version", callback=_show_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Embedding tables that are better on rare items, smaller, and able to grow."""
    del version


def bench(
    name: Annotated[str, Argument(help=f"One of {', '.join(bench_names())}.")],
    json_: opt.Json = False,
) -> None:
    """Measure one capability against its reference. The last line of the output is JSON."""
    print(json.dumps(run_bench(name, say=(lambda _: None) if json_ else screen.errors.print)))


app.command()(demo)
app.add_typer(
    typer.Typer(
        name="data",
        cls=_Data,
        no_args_is_help=True,
        help="Prepare a raw click log for training, and show it.",
    )
)
app.command()(train)
app.command()(reshard)
app.command(epilog=IMPROVE_EXAMPLES)(improve)
app.command(epilog=UPDATE_EXAMPLES)(update)
app.command(epilog=COMPRESS_EXAMPLES)(compress)
app.command()(prune)
app.command()(compare)
app.command(name="backtest", epilog=BACKTEST_EXAMPLES)(backtest_command)
app.command(name="diagnose")(diagnose_command)
app.command(name="report")(report_command)
app.command()(methods)
app.command(name="export")(export_command)
app.command(name="predict")(predict_)
app.command()(serve)
app.command()(bench)
