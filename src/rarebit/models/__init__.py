"""One model, one short file. The file's name is the model's name; machinery starts with `_`."""

import importlib
import inspect
import pkgutil
from collections.abc import Mapping
from typing import Any

from rarebit.data.schema import Schema
from rarebit.errors import SettingsError
from rarebit.models._base import RankingModel
from rarebit.settings import suggest

__all__ = ["build_model", "model_class", "model_names"]


def model_names() -> list[str]:
    """Return the names of all models: the files of this folder.

    >>> model_names()
    ['dcn_v2', 'deepfm', 'dnn', 'fm']
    """
    found = [module.name for module in pkgutil.iter_modules(__path__)]
    return sorted(name for name in found if not name.startswith("_"))


def model_class(name: str) -> type[RankingModel]:
    """Return the class of a model by its name."""
    file = name.replace("-", "_")
    if file not in model_names():
        raise SettingsError(f"unknown model {name!r}{suggest(name, model_names())}")
    module = importlib.import_module(f"{__name__}.{file}")
    for attribute in module.__all__:
        found = getattr(module, attribute)
        if isinstance(found, type) and issubclass(found, RankingModel):
            return found
    raise AssertionError(f"models/{file}.py lists no RankingModel in __all__")


def build_model(name: str, schema: Schema, settings: Mapping[str, Any] | None = None) -> RankingModel:
    """Build a model by name for the fields of a data set.

    >>> from rarebit import Field
    >>> schema = Schema((Field(name="user", rows=9), Field(name="item", rows=7)))
    >>> type(build_model("deepfm", schema, {"dim": 4})).__name__
    'DeepFM'
    """
    cls, settings = model_class(name), dict(settings or {})
    known = [key for key in inspect.signature(cls).parameters if key != "schema"]
    for key in settings:
        if key not in known:
            raise SettingsError(f"model {name}: unknown setting {key!r}{suggest(key, known)}")
    return cls(schema, **settings)
