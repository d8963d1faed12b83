"""One measurement, one file. The file's name is the bench's name; machinery starts with `_`.

A bench is a function `run(say)` that returns its figures. A name that Python keeps for itself has
an underscore at the end of its file: `import_.py` is "import".
"""

import importlib

from rarebit.bench._frame import BenchResult, Say, print_to_stderr, result_of
from rarebit.errors import SettingsError
from rarebit.registry import offered
from rarebit.settings import suggest

__all__ = ["BenchResult", "bench_names", "run_bench"]


def bench_names() -> list[str]:
    """Return the names of all benches: the files of this folder.

    >>> bench_names()
    ['checkpoint', 'data', 'ema', 'forgetting', 'import', 'mlet', 'models', 'multi_embedding', 'packed', 'pep',
     'quantize', 'row_gradients', 'rows', 'shrinkage', 'spectrum', 'study', 'train',
     'transfer']
    """
    return sorted(_files())


def run_bench(name: str, *, say: Say = print_to_stderr) -> BenchResult:
    """Run a bench and return its figures, flat and ready for JSON; `say` is told how it goes."""
    file = _files().get(name.replace("-", "_"))
    if file is None:
        raise SettingsError(f"unknown bench {name!r}{suggest(name, bench_names())}")
    module = importlib.import_module(f"{__name__}.{file}")
    return result_of(name, module.run, say)


def _files() -> dict[str, str]:
    """Return the file of each bench, by the bench's name."""
    return {file.removesuffix("_"): file for file in offered(__path__)}
