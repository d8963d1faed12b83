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

PANELS = {
    "Start here": ("data", "improve", "train", "export", "serve"),
    "Measure": ("compare", "backtest", "diagnose", "report", "predict"),
    "Smaller tables": ("compress", "prune"),
    "Every day, every machine": ("update", "reshard"),
    "Look around": ("demo", "methods", "bench"),
}
"""The commands as the help shows them: those that people need first, then the rest."""

EXAMPLES = """[bold]From a log to scores[/bold]

rarebit data prepare clicks.csv --label click --out data/clicks

rarebit compare --data data/clicks --methods baseline,tail --seeds 3

rarebit train --data data/clicks --out runs/clicks

rarebit export runs/clicks --to onnx --out clicks.onnx

rarebit serve clicks.onnx --check

Each command has examples of its own: rarebit train --help.
"""
OF_COMMANDS = {
    "train": (
        "train --model dcn_v2 --data data/clicks --methods tail --out runs/tail",
        "train --rows 20000 --epochs 2 --out runs/generated",
        "train --resume runs/generated",
    ),
    "compare": ("compare --data data/clicks --model fm --methods baseline,low-rank --seeds 2",),
    "diagnose": ("diagnose runs/clicks", "diagnose runs/clicks --out diagnosis"),
    "report": ("report runs/clicks --out clicks.html",),
    "predict": (
        "predict --model runs/clicks --input clicks.csv --out scores.csv",
        "predict --model clicks.onnx --input clicks.csv --out onnx-scores.csv",
    ),
    "prune": (
        "prune --data data/clicks --model fm --sparsity 0.5,0.9 --epochs 2 --out runs/pruned",
    ),
    "methods": ("methods", "methods --json"),
    "export": (
        "export runs/clicks --to onnx --out clicks.onnx",
        "export runs/clicks --to triton --out models/clicks",
        "export runs/clicks --to torch --out plain",
    ),
    "serve": ("serve clicks.onnx --check", "serve models --port 8000"),
    "demo": ("demo", "demo --rows 20000 --seeds 2"),
    "bench": ("bench import", "bench train --json"),
}
"""Examples of the commands whose files have none."""


class _Commands(TyperGroup):
    """All commands in their order; Ctrl-C ends them with one line, where Typer prints nothing."""

    def list_commands(self, ctx: Any) -> list[str]:
        del ctx
        return [name for names in PANELS.values() for name in names]

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


def _add(name: str, command: Any, examples: str = "") -> None:
    """Add a command to its panel, with its examples."""
    lines = "\n\n".join(f"rarebit {line}" for line in OF_COMMANDS.get(name, ()))
    app.command(
        name=name,
        rich_help_panel=_panel(name),
        epilog=examples or (f"[bold]Examples[/bold]\n\n{lines}\n" if lines else None),
    )(command)


def _panel(name: str) -> str:
    return next(panel for panel, names in PANELS.items() if name in names)


app.add_typer(
    typer.Typer(
        name="data",
        cls=_Data,
        no_args_is_help=True,
        help="Prepare a raw click log for training, and show it.",
    ),
    rich_help_panel=_panel("data"),
)
_add("improve", improve, IMPROVE_EXAMPLES)
_add("train", train)
_add("export", export_command)
_add("serve", serve)
_add("compare", compare)
_add("backtest", backtest_command, BACKTEST_EXAMPLES)
_add("diagnose", diagnose_command)
_add("report", report_command)
_add("predict", predict_)
_add("compress", compress, COMPRESS_EXAMPLES)
_add("prune", prune)
_add("update", update, UPDATE_EXAMPLES)
_add("reshard", reshard)
_add("demo", demo)
_add("methods", methods)
_add("bench", bench)
