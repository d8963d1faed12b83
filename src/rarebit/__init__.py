"""Embedding tables that are better on rare items, smaller, and able to grow.

The names you need are here, listed in `_api.py`. More is one level down: `data`, `transfer`, `pruning`, `research`, `training`,
`tables`, `codes`, `row_gradients`, and `testing`.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rarebit._api import *  # noqa: F403  # it has `__all__`
    from rarebit._api import __all__ as __all__
else:  # torch takes seconds to import, and the help of the command line does without it

    def _function_like(folder: str) -> property:
        """Return the function that has the name of its folder, also where the folder was imported first."""

        def get(_: ModuleType) -> Any:
            return getattr(import_module(f"rarebit.{folder}.{folder}"), folder)

        return property(get, lambda *_: None)  # the folder is ignored

    class _Package(ModuleType):
        """Imports the library when one of its names is first used."""

        def __getattr__(self, name: str) -> Any:
            if name == "__all__" or not name.startswith("_"):
                vars(self).update(_public())  # its imports also bind the folders
                if name not in vars(self) and find_spec(f"rarebit.{name}"):
                    import_module(f"rarebit.{name}")
            if name in vars(self):
                return vars(self)[name]
            raise AttributeError(f"module 'rarebit' has no attribute {name!r}")

        def __dir__(self) -> list[str]:
            return sorted({*super().__dir__(), *_public()})

        export, report, study = (_function_like(folder) for folder in ("export", "report", "study"))

    def _public() -> dict[str, Any]:
        names = vars(import_module("rarebit._api"))
        known = names.get("__all__", ())  # nothing while it is being imported
        return {name: names[name] for name in ("__all__", *known) if known}

    sys.modules[__name__].__class__ = _Package
