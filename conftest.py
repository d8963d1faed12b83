"""What pytest leaves out: examples in files that need an optional package, where it is not installed."""

import importlib.util

collect_ignore_glob: list[str] = []
if importlib.util.find_spec("polars") is None:
    collect_ignore_glob += [
        "src/rarebit/data/prepare.py",
        "src/rarebit/data/raw/*",
        "src/rarebit/data/sources/*_*.py",
        "src/rarebit/data/sources/[a-z]*.py",
        "src/rarebit/training/score.py",
    ]
if importlib.util.find_spec("orjson") is None:
    collect_ignore_glob += ["src/rarebit/serving/*"]
