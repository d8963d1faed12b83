"""What a study is to compare: methods, on models and logs, with seeds and tuning trials.

As a TOML file, everything but the methods with a default:

    methods = ["baseline", "low-rank", "hashing:buckets=1000+low-rank"]
    seeds = 5

    [[model]]                # one table, or several: every model on every log
    name = "deepfm"
    dim = 16

    [[data]]
    folder = "data/clicks"

    [training]
    epochs = 10
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rarebit.data.synthetic import SyntheticLog
from rarebit.errors import SettingsError
from rarebit.settings import check_types, from_mapping, read_toml, require, suggest, to_mapping
from rarebit.technique import Expression, parse_techniques
from rarebit.training.settings import RunSettings

__all__ = ["StudyPlan", "StudySettings", "read_plan", "section_tables"]

SECTIONS = ("model", "data", "training")
WORDS = {"model": "name", "data": "folder"}
"""The setting that a word in place of a table stands for."""
OWN = "own"
"""The control that each method names itself."""


@dataclass(frozen=True, kw_only=True)
class StudySettings:
    """How a study compares."""

    seeds: int = 5
    """Runs of each side. A seed draws the initial weights and the order of the rows, for all sides alike."""
    first_seed: int = 0
    """The first of them; the others follow."""
    trials: int = 1
    """Settings tried for each side, the same number for all; the best on validation is compared."""
    tuning_seeds: int = 1
    """Seeds on which trials are tried: the first ones."""
    sweeps: bool = True
    """Whether controls with a dial of their own, matched-rate, tuned and plain-sum, try several values; else
    they have the first: a quick look, which may be unfair to them."""
    share: float = 0.5
    """Bytes of the tables that a method which shrinks them may keep, where its size is not given."""
    control: str = OWN
    """What every method is held against: a side of the study, or "own", the control each method names."""
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
    """What is compared: methods, or combinations of them; "baseline" is none."""
    runs: tuple[RunSettings, ...]
    """A run without methods for each model and log."""
    settings: StudySettings = StudySettings()

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "StudyPlan":
        """Read a plan as a TOML file holds it.

        Methods may be one text with commas; a model its name; data the folder of a prepared log.
        """
        values = dict(values)
        methods = values.pop("methods", None)
        require(bool(methods), 'a study needs methods = ["baseline", ...]')
        sections = {name: values.pop(name) for name in SECTIONS if name in values}
        known = [*StudySettings.__dataclass_fields__, "methods", *SECTIONS]
        for key in values:
            if key not in known:
                raise SettingsError(f"study: unknown setting {key!r}{suggest(key, known)}")
        return cls(
            methods=_expressions(methods),
            runs=tuple(_runs(sections)),
            settings=from_mapping(StudySettings, values, where="study"),
        )

    def to_mapping(self) -> dict[str, Any]:
        """Return the plan as plain values, to be read back by `from_mapping`."""
        runs = [run.to_mapping() for run in self.runs]
        return {
            "methods": [method.text for method in self.methods],
            **to_mapping(self.settings),
            "model": _distinct(run["model"] for run in runs),
            "data": _distinct(run["data"] for run in runs),
            "training": runs[0]["training"],
        }


def read_plan(path: str | os.PathLike[str]) -> StudyPlan:
    """Read a plan from a TOML file."""
    return StudyPlan.from_mapping(read_toml(Path(path)))


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
    require(
        found[0].training.seed == 0,
        "study: its seeds are given by seeds and first_seed, "
        f"got training.seed={found[0].training.seed}",
    )
    twice = [run for number, run in enumerate(found) if run in found[:number]]
    require(not twice, f"study: {twice[0].model if twice else ''} is given twice on the same log")
    return found


def section_tables(section: str, values: object) -> list[Mapping[str, Any]]:
    """Return the tables of a section: one or several; a word stands for the setting it is named by.

    >>> section_tables("model", ["fm", {"name": "dnn", "dim": 4}])
    [{'name': 'fm'}, {'name': 'dnn', 'dim': 4}]
    """
    several = values if isinstance(values, list | tuple) else [values]
    require(len(several) > 0, f"study: {section} must not be empty")
    return [_table(section, value) for value in several]


def _table(section: str, value: object) -> Mapping[str, Any]:
    if section == "data" and isinstance(value, SyntheticLog):
        return {"source": "synthetic", **to_mapping(value)}
    if section == "data" and value == "synthetic":
        return {"source": "synthetic"}
    if isinstance(value, str | os.PathLike):
        return {WORDS[section]: os.fspath(value)}
    if not isinstance(value, Mapping):
        raise SettingsError(f"study: [{section}] must be a table, got {value!r}")
    return value


def _distinct(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found
