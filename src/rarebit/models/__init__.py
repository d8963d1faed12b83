"""One model, one short file. The file's name is the model's name; machinery starts with `_`.

`name@preset` is a model with the settings of a paper, which its file lists: `deepfm@pep`.
"""

from collections.abc import Mapping
from typing import Any

from rarebit.data.schema import Schema
from rarebit.errors import SettingsError
from rarebit.models._base import RankingModel
from rarebit.settings import find_class, keyword_arguments, offered, suggest

__all__ = ["build_model", "model_class", "model_names", "model_settings", "preset_names"]


def model_names() -> list[str]:
    """Return the names of all models: the files of this folder.

    >>> model_names()
    ['autoint', 'dcn', 'dcn_v2', 'deepfm', 'dlrm', 'dnn', 'ffm', 'final_mlp', 'fm', 'fwfm', 'ipnn', 'lr',
     'nfm', 'nfwfm', 'wide_deep', 'xdeepfm']
    """
    return offered(__path__)


def preset_names() -> list[str]:
    """Return the names of all models with the settings of a paper.

    >>> "deepfm@pep" in preset_names()
    True
    """
    return [f"{name}@{preset}" for name in model_names() for preset in model_class(name).presets]


def model_class(name: str) -> type[RankingModel]:
    """Return the class of a model by its name, with or without a preset."""
    return find_class(__name__, name.partition("@")[0], RankingModel, what="model")


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
    """Return the settings of a model, checked: names, and types. Those of a preset come first."""
    _, at, preset = name.partition("@")
    presets = model_class(name).presets
    if at and preset not in presets:
        raise SettingsError(f"unknown preset {name!r}{suggest(preset, presets)}")
    checked = keyword_arguments(model_class(name).__init__, values, where=f"model {name}")
    return {**presets.get(preset, {}), **checked}
