"""One model, one short file. The file's name is the model's name; machinery starts with `_`.

`name@preset` is a model with the settings of a paper, which its file lists: `deepfm@pep`.
"""

from rarebit.models._base import build_model, model_class, model_names, model_settings, preset_names

__all__ = ["build_model", "model_class", "model_names", "model_settings", "preset_names"]
