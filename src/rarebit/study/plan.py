"""The plan of a study: which methods to compare, on which models and logs, with how many seeds and trials.

A plan is a TOML file, or the same values by name; `docs/studies.md` shows one.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rarebit.data.synthetic import SyntheticLog
from rarebit.errors import SettingsError
from rarebit.settings import check_types, from_mapping, require, suggest, to_mapping
from rarebit.technique import Expression, parse_techniques
from rarebit.training.settings import RunSettings

SECTIONS = ("model", "data", "training")
OWN = "own"
"""Each method is compared with the control that it names."""


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """How a study compares."""

    seeds: int = 5
    """Runs of each variant. A seed draws the initial weights and the batch order, the same for all variants."""
    first_seed: int = 0
    """The first seed; the others follow it."""
    trials: int = 1
    """Settings tried for each variant, the same number for all; the best on validation is compared."""
    tuning_seeds: int = 1
    """Seeds used for tuning: the first ones."""
    sweeps: bool = True
    """Whether controls that are tuned by definition (matched-rate, tuned, plain-sum) try all their values. Else
    they use the first value: quick, and maybe unfair to them."""
    share: float = 0.5
    """Share of the tables' bytes that a compressing method keeps, where its size is not given."""
    control: str = OWN
    """The control of every method: a variant of the study, or "own" for the control that each method names."""
    minimum_effect: float = 0.0005
    """The smallest difference in AUC worth having."""

    def __post_init__(self) -> None:
        check_types(self, where="study")
        for name in ("seeds", "trials", "tuning_seeds"):
            value = getattr(self, name)
            require(value >= 1, f"study: {name} must be at least 1, got {name}={value}")
        require(
            self.tuning_seeds <= self.seeds,
            f"study: tuning_seeds must be among the seeds, got {self.tuning_seeds} of {self.seeds}",
        )
        require(self.first_seed >= 0, f"study: first_seed must be 0 or more, got {self.first_seed}")
        require(0.0 < self.share < 1.0, f"study: share must lie in (0, 1), got share={self.share}")
        require(
            self.minimum_effect > 0.0,
            f"study: minimum_effect must be above 0, got minimum_effect={self.minimum_effect}",
        )


@dataclass(frozen=True, kw_only=True)
class StudyPlan:
    """Everything a study depends on.

    >>> plan = StudyPlan.from_mapping({"methods": "baseline,low-rank", "model": "fm", "seeds": 3})
    >>> [method.text for method in plan.methods], plan.runs[0].model, plan.settings.seeds
    (['baseline', 'low-rank'], 'fm', 3)
    """

    methods: tuple[Expression, ...]
    """The methods to compare, alone or combined; "baseline" is none."""
    runs: tuple[RunSettings, ...]
    """A run without methods for each model and log."""
    settings: StudySettings = StudySettings()

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "StudyPlan":
        """Read a plan in the form of a TOML file.

        Methods may be one string with commas, a model its name, and data the folder of a prepared log.
        """
        values = dict(values)
        methods = values.pop("methods", None)
        require(bool(methods), 'a study needs methods = ["baseline", ...]')
        sections = {name: values.pop(name) for name in SECTIONS if name in values}
        known = [*StudySettings.__dataclass_fields__, "methods", *SECTIONS]
        for key in values:
            if key not in known:
                raise SettingsError(f"study: unknown setting {key!r}{suggest(key, known)}")
        expressions = _expressions(methods)
        parts = [part for expression in expressions for part in expression.parts]
        # all variants have the patience of the method that asks for most
        asked = max((part.technique.patience for part in parts), default=0)
        return cls(
            methods=expressions,
            runs=tuple(
                replace(run, training=run.training.with_patience(asked)) for run in _runs(sections)
            ),
            settings=from_mapping(StudySettings, values, where="study"),
        )

    def to_mapping(self) -> dict[str, Any]:
        """Return the plan as plain values that `from_mapping` reads."""
        runs = [run.to_mapping() for run in self.runs]
        models, logs = ({repr(run[name]): run[name] for run in runs} for name in ("model", "data"))
        return {
            "methods": [method.text for method in self.methods],
            **to_mapping(self.settings),
            "model": list(models.values()),
            "data": list(logs.values()),
            "training": runs[0]["training"],
        }


def _expressions(methods: object) -> tuple[Expression, ...]:
    texts = [methods] if isinstance(methods, str) else methods
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise SettingsError(f"study: methods must be a list of names, got {methods!r}")
    found = parse_techniques(",".join(texts))
    names = [expression.text for expression in found]
    twice = sorted({name for name in names if names.count(name) > 1})
    require(not twice, f"study: {', '.join(twice)} given twice")
    return found


def _runs(sections: Mapping[str, Any]) -> list[RunSettings]:
    """Return a run for every model on every log."""
    training = sections.get("training", {})
    found = [
        RunSettings.from_mapping({"model": model, "data": log, "training": training})
        for log in section_tables("data", sections.get("data", {}))
        for model in section_tables("model", sections.get("model", {}))
    ]
    seed = found[0].training.seed
    require(seed == 0, f"study: seeds are given by seeds and first_seed, got training.seed={seed}")
    for place, run in enumerate(found):
        require(run not in found[:place], f"study: {run.model} is given twice on the same log")
    return found


def section_tables(section: str, values: object) -> list[Mapping[str, Any]]:
    """Return the tables of a section: one or several; a plain string is a model's name or a log's folder."""
    several = values if isinstance(values, list | tuple) else [values]
    require(len(several) > 0, f"study: {section} must not be empty")
    found: list[Mapping[str, Any]] = []
    for value in several:
        if section == "data" and isinstance(value, SyntheticLog):
            found.append({"source": "synthetic", **to_mapping(value)})
        elif section == "data" and value == "synthetic":
            found.append({"source": "synthetic"})
        elif isinstance(value, str | os.PathLike):
            found.append({"name" if section == "model" else "folder": os.fspath(value)})
        elif isinstance(value, Mapping):
            found.append(value)
        else:
            raise SettingsError(f"study: [{section}] must be a table, got {value!r}")
    return found
