"""`rarebit reshard`: the plain model of a run whose tables were spread over processes."""

from pathlib import Path
from typing import Annotated

from typer import Argument

from rarebit.cli import screen
from rarebit.settings import size


def reshard(
    run: Annotated[
        Path, Argument(help="The folder of a run of several processes.", readable=False)
    ],
) -> None:
    """Join the pieces of a run of several processes into its plain model, in one process without TorchRec.

    Needed where the model did not fit the first process, or the run was interrupted. To continue a run on another number of
    processes, resume it: they read the same checkpoints.
    """
    from rarebit.training.run import reshard as join

    result = join(run, say=screen.line)
    figures = screen.evaluation_figures(result.test)
    figures |= {
        "parameters": f"{result.num_parameters:,}",
        "bytes of tables": size(result.table_bytes),
    }
    screen.figures("The plain model on the test split", figures)
    screen.line(f"\nSaved in {result.folder}. To score data with it:")
    screen.command("predict", "--model", str(result.folder))
