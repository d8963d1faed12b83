"""One model, one short file. The file's name is the model's name; machinery starts with `_`."""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from rarebit.data.schema import Schema
from rarebit.errors import SettingsError
from rarebit.models._base import RankingModel
from rarebit.settings import keyword_arguments, suggest

__all__ = ["build_model", "model_class", "model_names", "model_settings"]


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


def build_model(
    name: str, schema: Schema, settings: Mapping[str, Any] | None = None
) -> RankingModel:
    """Build a model by name for the fields of a data set.

    >>> from rarebit import Field
    >>> schema = Schema((Field(name="user", rows=9), Field(name="item", rows=7)))
    >>> type(build_model("deepfm", schema, {"dim": 4})).__name__
    'DeepFM'
    """
    return model_class(name)(schema, **model_settings(name, settings or {}))


def model_settings(name: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model, checked: names, and types."""
    return keyword_arguments(model_class(name).__init__, values, where=f"model {name}")
