"""Backtest: whole policies for ids that keep arriving, compared on a log in order of time (`rarebit backtest`).

The log is cut into periods. Every row is scored before any model has trained on its label, and figures are over all rows after the
warm-up, the first period (progressive validation).

    grow        tables grow: a new id starts as the row of unknown values, at the prior, at noise, or like the ids of its group
    restart     as grow, with a fresh optimizer in each period
    fixed       the vocabulary of the warm-up: later ids are unknown
    hashing     ids of fields that grow share rows at random, in tables as large as those of grow are at the end
    retrain     from scratch on all earlier periods before each period, or each few of them; ids new since then are unknown
    frozen      trained on the warm-up, never again

All policies but retrain train in one pass over the log. They see the same encoded rows, and with one seed they start with the same
weights, as far as their tables have the same size.

    data/             the periods, encoded once: `data/prepare.py:prepare_periods`
    runs/KEY.json     the result of a policy with a seed: it is never run again
    results.json      everything
"""

import hashlib
import math
import os
import statistics
import time as clock
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rarebit.data.dataset import Dataset
from rarebit.data.order import random_bits, stream_key
from rarebit.data.prepare import changes_of, prepare_periods, read_periods
from rarebit.data.prepared import PreparedFolder, no_progress
from rarebit.data.prepared import Progress as DataProgress
from rarebit.data.schema import FIRST_VALUE, UNKNOWN, Schema
from rarebit.errors import SettingsError, StudyError, StudyInterrupted
from rarebit.machine import choose_device, commit, default_workers, machine
from rarebit.settings import check_types, from_mapping, require, size, suggest
from rarebit.storage.files import file_lock, make_folder, read_json, write_json
from rarebit.study.pool import Pool, StudyLines, StudyProgress
from rarebit.study.results import ends, formatted, with_spread
from rarebit.study.runs import KEY_DIGITS, UNREADABLE, run_key
from rarebit.study.statistics import Comparison, judge, scipy_special
from rarebit.tables.apply import table_bytes
from rarebit.tables.table import Method
from rarebit.technique import BASELINE, needed_modules, parse_techniques, read_value, split_text
from rarebit.text import TextTable
from rarebit.training.fit import make_optimizer
from rarebit.training.metrics import measure, predict
from rarebit.training.run import finish_model, train_model
from rarebit.training.settings import PreparedLog, RunSettings
from rarebit.training.update import (
    Learner,
    Start,
    check_like,
    counts_before,
    like_group,
    new_rows_of,
)
from rarebit.training.update import refuse_stages as refuse_methods

if TYPE_CHECKING:
    from rarebit.data.log_schema import LogSchema
    from rarebit.data.raw.periods import By
    from rarebit.data.raw.vocabulary import DayChanges, Growth

DATA, RUNS, RESULTS = "data", "runs", "results.json"
FORMAT = 1
YOUNG = {"day": 7}
"""Periods, this one included, in which an id was admitted that is at most a week old; one for other periods than days."""
SETTINGS = {
    "grow": ("start", "like"),
    "restart": ("start", "like"),
    "fixed": (),
    "hashing": (),
    "retrain": ("every", "epochs", "seeds"),
    "frozen": (),
}
"""The policies, and the settings of each."""
FIGURES = {"auc": "all rows", "young_auc": "young ids", "other_auc": "other rows"}
"""The figures that are compared, and of which rows they are."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What to do with ids that keep arriving.

    >>> Policy.parse("grow:start=noise").start
    'noise'
    >>> str(Policy(name="retrain", every=4))
    'retrain:every=4'
    """

    name: Literal["grow", "restart", "fixed", "hashing", "retrain", "frozen"]
    """What it does."""
    start: Start = "unknown"
    """How rows of new ids start."""
    like: str = ""
    """A field and another one that groups its ids, such as item/category: a new item starts at the mean of the known items of its
    category."""
    every: int = 1
    """Periods between two trainings from scratch."""
    epochs: int | None = None
    """Epochs of a training from scratch; those of the training settings if not given."""
    seeds: int | None = None
    """Seeds of a policy that is too expensive for all of them."""

    def __post_init__(self) -> None:
        check_types(self, where=f"policy {self.name}")
        for name in ("every", "epochs", "seeds"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name} must be at least 1, got {name}={value}")
        parts = self.like.split("/")
        require(
            not self.like or (len(parts) == 2 and all(parts)),
            f"like takes a field and its group, such as like=item/category, got {self.like!r}",
        )

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """Read a policy as people type it: its name, and settings after colons."""
        name, *assignments = split_text(text, ":")
        if name not in SETTINGS:
            raise SettingsError(f"unknown policy {name!r}{suggest(name, list(SETTINGS))}")
        given: dict[str, Any] = {}
        for assignment in assignments:
            key, _, value = (word.strip() for word in assignment.partition("="))
            require(bool(key and value), f"expected setting=value after each colon, got {text!r}")
            if key not in SETTINGS[name]:
                known = SETTINGS[name]
                hint = suggest(key, known) if known else "; it has none"
                raise SettingsError(f"the policy {name} has no setting {key!r}{hint}")
            given[key] = read_value(value)
        return from_mapping(cls, {"name": name, **given}, where=f"policy {name}")

    def __str__(self) -> str:
        fields = type(self).__dataclass_fields__
        changed = [key for key in SETTINGS[self.name] if getattr(self, key) != fields[key].default]
        return ":".join([self.name, *(f"{key}={getattr(self, key)}" for key in changed)])

    @property
    def grows(self) -> bool:
        """Whether its tables get rows for new ids."""
        return self.name in ("grow", "restart")

    @property
    def groups(self) -> dict[str, str]:
        """The field that groups the ids of another one."""
        return dict([self.like.split("/")]) if self.like else {}


class PeriodLog:
    """The encoded periods of a log: the first is the warm-up."""

    def __init__(self, folder: Path) -> None:
        self.folder, found = folder, read_periods(folder)
        self.starts: list[str] = found["starts"]
        self.by: By = found["asked"]["by"]
        folders = [folder / f"{number:04}" for number in range(len(self.starts))]
        self.data = [Dataset.open(one, verify=False) for one in folders]
        self.changes: list[DayChanges | None] = [None, *map(changes_of, folders[1:])]
        checksums = "+".join(PreparedFolder(one).checksum for one in folders)
        self.checksum = hashlib.sha256(checksums.encode()).hexdigest()[:KEY_DIGITS]

    def __len__(self) -> int:
        return len(self.data)

    def change(self, number: int) -> "DayChanges":
        """Return what a period did to the vocabularies."""
        found = self.changes[number]
        assert found is not None, "the warm-up starts the vocabularies"
        return found

    def young(self, number: int) -> Tensor:
        """Return which rows of a period have an id that is at most a week old, or new in this period where periods are longer."""
        latest, first = self.change(number), number - YOUNG.get(str(self.by), 1) + 1
        window = [self.change(one).columns for one in range(max(first, 1), number + 1)]
        columns = {
            name: replace(day, new=np.concatenate([past[name].new for past in window]))
            for name, day in latest.columns.items()
        }
        return new_rows_of(self.data[number], replace(latest, columns=columns))

    def counts_before(self, number: int) -> dict[str, Tensor]:
        """Return how often each id of the period before was seen until then, by field."""
        from rarebit.data.raw.encoder import encoder_of

        encoder = encoder_of(self.data[number - 1])
        return counts_before(encoder, encoder.fields)

    @property
    def unknown_share(self) -> float:
        """Share of the ids seen once that a new vocabulary leaves unknown."""
        from rarebit.data.raw.encoder import encoder_of

        return encoder_of(self.data[0]).schema.unknown_share

    @property
    def growing(self) -> list[str]:
        """The fields that got an id after the warm-up."""
        first, last = self.data[0].schema, self.data[-1].schema
        return [field.name for field in last.table_fields if field.rows > first[field.name].rows]

    def until(self, number: int) -> Dataset:
        """Return all rows before a period, with the vocabulary of that time; some ids seen once are unknown, as in a new log."""
        parts, schema = self.data[:number], self.data[number - 1].schema
        arrays = ("ids", "numeric", "label")
        ids, numeric, label = (torch.cat([getattr(one, a) for one in parts]) for a in arrays)
        share = self.unknown_share
        for field in schema.table_fields:
            own = ids[:, schema.slots[field.name]]
            once = own.reshape(-1).bincount(minlength=field.rows) == 1
            bits = random_bits(
                stream_key(0, "retrain", field.name), np.arange(field.rows, dtype=np.uint64)
            )
            once &= torch.from_numpy(bits < np.uint64(share * 2.0**63) * np.uint64(2))
            once[:FIRST_VALUE] = False
            ids[:, schema.slots[field.name]] = own.masked_fill(once[own.long()], UNKNOWN)
        return Dataset(schema, ids, numeric, label)


def as_known_to(schema: Schema, data: Dataset) -> Dataset:
    """Return rows as an older vocabulary encodes them: later ids are unknown."""
    limits = [field.rows for field in schema.table_fields for _ in range(field.max_length)]
    ids = torch.where(data.ids < torch.tensor(limits), data.ids, UNKNOWN)
    return Dataset(schema, ids, data.numeric, data.label)


def hashed(log: PeriodLog, data: Dataset) -> Dataset:
    """Return rows whose ids share those of the last period at random, in the fields that grow."""
    schema, ids = log.data[-1].schema, data.ids.clone()
    for name in log.growing:
        own = ids[:, schema.slots[name]].numpy()
        bits = random_bits(stream_key(0, "backtest", name), own.astype(np.uint64))
        shared = FIRST_VALUE + bits % np.uint64(schema[name].rows - FIRST_VALUE)
        found = np.where(own < FIRST_VALUE, own, shared.astype(np.int32))
        ids[:, schema.slots[name]] = torch.from_numpy(found.astype(np.int32))
    return Dataset(schema, ids, data.numeric, data.label)


class Scored(NamedTuple):
    """A period after a policy scored it."""

    scores: Tensor
    """Of each row, by a model that had not seen its label."""
    trained: int
    """Rows trained on since the period before, as often as each was."""
    model: nn.Module


def progressive(
    policy: Policy,
    settings: RunSettings,
    log: PeriodLog,
    *,
    device: torch.device | str = "cpu",
) -> Iterator[Scored]:
    """Yield the scores of each period after the warm-up, period by period."""
    if policy.name == "retrain":
        yield from _retrained(policy, settings, log, device)
        return
    first = _as_seen(policy, log, 0)
    learner, trained = Learner.start(settings, first, device=device), len(first)
    learner.learn(first, progress=False)
    for number in range(1, len(log)):
        data = _as_seen(policy, log, number)
        if policy.grows:
            changes = log.change(number)
            rows = {one: like_group(data, changes, one, by) for one, by in policy.groups.items()}
            counts = log.counts_before(number) if policy.start == "prior" else None
            learner.grow(data.schema, changes, start=policy.start, rows=rows, counts=counts)
        if policy.name == "restart":
            learner.optimizer = make_optimizer(learner.model, settings.training)
        if policy.name == "frozen":
            scores = predict(learner.model, data)
        else:
            found = learner.learn(data, progress=False).scores
            assert found is not None, "a learner trains in one pass"
            scores, trained = found, trained + len(data)
        yield Scored(scores.cpu(), trained, learner.model)
        trained = 0


def _as_seen(policy: Policy, log: PeriodLog, number: int) -> Dataset:
    """Return the rows of a period as the tables of a policy take them."""
    data = log.data[number]
    if policy.name in ("fixed", "frozen"):
        return as_known_to(log.data[0].schema, data)
    return hashed(log, data) if policy.name == "hashing" else data


def _retrained(
    policy: Policy, settings: RunSettings, log: PeriodLog, device: torch.device | str
) -> Iterator[Scored]:
    """Yield the scores of models that are trained from scratch on all rows before their first period."""
    training = replace(
        settings.training, one_pass=False, epochs=policy.epochs or settings.training.epochs
    )
    settings = replace(settings, training=training)
    for number in range(1, len(log)):
        trained = 0
        if (number - 1) % policy.every == 0:
            before = log.until(number)
            model, history = train_model(
                settings, before, None, device=device, progress=False, say=lambda _: None
            )
            finish_model(settings, model, say=lambda _: None)
            trained = len(before) * len(history.epochs)
        scores = predict(model, as_known_to(before.schema, log.data[number]))
        yield Scored(scores.cpu(), trained, model)


@dataclass(frozen=True, kw_only=True)
class PolicyRun:
    """The result of a policy with a seed. Figures are over all rows after the warm-up."""

    key: str
    seed: int
    auc: float
    logloss: float
    young_auc: float | None
    """On rows with an id that is at most a week old; None where there are none."""
    young_logloss: float | None
    other_auc: float | None
    """On the other rows."""
    period_aucs: tuple[float | None, ...]
    """In each period after the warm-up."""
    period_young_aucs: tuple[float | None, ...]
    trained_rows: int
    """Rows that it trained on, warm-up included, as often as each was."""
    seconds: float
    """Time of all training and scoring."""
    table_bytes: int
    """Bytes of its tables at the end."""
    device: str
    torch: str
    commit: str | None

    @property
    def summary(self) -> str:
        """The result in a line."""
        young = formatted(self.young_auc, ".4f")
        return f"AUC {self.auc:.4f}, young ids {young}, {self.trained_rows:,} rows trained in {self.seconds:.0f} s"


class Variant(NamedTuple):
    """A policy with methods."""

    name: str
    policy: Policy
    settings: RunSettings

    def at(self, seed: int) -> "PlannedRun":
        """Return its run with a seed."""
        training = replace(self.settings.training, seed=seed)
        return PlannedRun(
            f"{self.name}, seed {seed}", self.policy, replace(self.settings, training=training)
        )


class PlannedRun(NamedTuple):
    """A policy with a seed, finished or not."""

    name: str
    policy: Policy
    settings: RunSettings

    @property
    def key(self) -> str:
        """Its name on disk: the same for equal settings, policy and data."""
        policy = replace(self.policy, seeds=None)
        text = f"{FORMAT} {policy} {run_key(self.settings)}"
        return hashlib.sha256(text.encode()).hexdigest()[:KEY_DIGITS]

    def read(self, folder: Path) -> PolicyRun | None:
        """Return its result; None where it is not finished."""
        path = folder / RUNS / f"{self.key}.json"
        try:
            return from_mapping(PolicyRun, read_json(path)["result"])
        except FileNotFoundError:
            return None
        except (OSError, *UNREADABLE) as error:
            raise StudyError(
                f"{str(path)!r} cannot be read: {error}; remove it to run it again"
            ) from None

    def make(
        self,
        folder: Path,
        log: PeriodLog,
        *,
        device: torch.device,
        tell: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> PolicyRun:
        """Run the policy over all periods, and write its result."""
        begin, scores, young, labels = clock.perf_counter(), [], [], []
        aucs, young_aucs, trained, model = [], [], 0, None
        for number, found in enumerate(
            progressive(self.policy, self.settings, log, device=device), 1
        ):
            scores.append(found.scores)
            labels.append(log.data[number].label)
            young.append(log.young(number))
            model, trained = found.model, trained + found.trained
            aucs.append(_auc(scores[-1], labels[-1]))
            young_aucs.append(_auc(scores[-1][young[-1]], labels[-1][young[-1]]))
            tell({"epoch": number, "epochs": len(log) - 1, "valid_auc": aucs[-1]})
        seconds = clock.perf_counter() - begin
        assert model is not None, "there is a period after the warm-up"
        finish_model(self.settings, model, say=lambda _: None)
        every, label, is_young = torch.cat(scores), torch.cat(labels), torch.cat(young)
        overall = measure(every, label)
        assert overall.auc is not None, "every period has both labels"
        has_young = bool(is_young.any())
        on_young = measure(every[is_young], label[is_young]) if has_young else None
        record = PolicyRun(
            key=self.key,
            seed=self.settings.training.seed,
            auc=overall.auc,
            logloss=overall.logloss,
            young_auc=None if on_young is None else on_young.auc,
            young_logloss=None if on_young is None else on_young.logloss,
            other_auc=_auc(every[~is_young], label[~is_young]),
            period_aucs=tuple(map(_short, aucs)),
            period_young_aucs=tuple(map(_short, young_aucs)),
            trained_rows=trained,
            seconds=round(seconds, 2),
            table_bytes=table_bytes(model),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            torch=str(torch.__version__),
            commit=commit(),
        )
        values = {
            "name": self.name,
            "settings": self.settings.to_mapping(),
            "result": asdict(record),
        }
        write_json(folder / RUNS / f"{self.key}.json", values, error=StudyError)
        return record

    def task(self, folder: Path) -> dict[str, Any]:
        """Return what a worker needs to make it."""
        return {
            "backtest": str(folder.absolute()),
            "name": self.name,
            "policy": str(self.policy),
            "settings": self.settings.to_mapping(),
            "modules": needed_modules(self.settings.methods),
        }

    @classmethod
    def of_task(cls, task: Mapping[str, Any]) -> "PlannedRun":
        """Return the run that a task describes."""
        settings = RunSettings.from_mapping(task["settings"])
        return cls(task["name"], Policy.parse(task["policy"]), settings)


def _auc(scores: Tensor, labels: Tensor) -> float | None:
    return measure(scores, labels).auc if len(labels) else None


def _short(value: float | None) -> float | None:
    return None if value is None else round(value, 5)


@dataclass(frozen=True, kw_only=True)
class PeriodFacts:
    """A period after the warm-up."""

    start: str
    """Time of its first row."""
    rows: int
    young_rows: int
    """Rows with an id that is at most a week old, or new in this period where periods are longer."""
    new_ids: int
    """Ids admitted in it, over all fields."""


@dataclass(frozen=True, kw_only=True)
class PolicyResult:
    """The runs of a policy."""

    name: str
    runs: tuple[PolicyRun, ...]

    def figures(self, figure: str) -> dict[int, float]:
        """Return one figure of every run that has it, by seed."""
        get = attrgetter(figure)
        return {run.seed: get(run) for run in self.runs if get(run) is not None}

    def mean(self, figure: str) -> float | None:
        """Return the mean of a figure over seeds."""
        values = list(self.figures(figure).values())
        return statistics.fmean(values) if values else None


@dataclass(frozen=True, kw_only=True)
class BacktestResult:
    """The result of a backtest. `str()` is its tables."""

    plan: Mapping[str, Any]
    periods: tuple[PeriodFacts, ...]
    policies: tuple[PolicyResult, ...]
    control: str
    """The policy that all others are compared with."""
    missing: tuple[str, ...] = ()
    """Runs that are missing, and why."""

    @property
    def minimum_effect(self) -> float:
        """The smallest difference in AUC worth having."""
        return float(self.plan["minimum_effect"])

    def policy(self, name: str) -> PolicyResult:
        """Return a policy by its name."""
        return {policy.name: policy for policy in self.policies}[name]

    def compare(self, figure: str = "auc", control: str | None = None) -> dict[str, Comparison]:
        """Return the verdict on every other policy by one figure, corrected for their number."""
        theirs = self.policy(control or self.control).figures(figure)
        differences = {}
        for policy in self.policies:
            ours = policy.figures(figure)
            if policy.name != (control or self.control):
                both = sorted(ours.keys() & theirs.keys())
                differences[policy.name] = [ours[seed] - theirs[seed] for seed in both]
        return judge(differences, minimum_effect=self.minimum_effect)

    def __str__(self) -> str:
        parts = [figure_table(self), *([difference_table(self)] if len(self.policies) > 1 else [])]
        return "\n\n".join([*map(str, parts), *(f"missing: {line}" for line in self.missing)])

    def to_mapping(self) -> dict[str, Any]:
        """Return plain values for JSON. Means and differences are for people and pages; runs have everything."""
        against = {
            one.name: {figure: self.compare(figure, one.name) for figure in FIGURES}
            for one in self.policies
        }
        policies = [
            {
                "name": policy.name,
                "n": len(policy.runs),
                **{name: policy.mean(name) for name in (*FIGURES, "logloss", "young_logloss")},
                **{name: policy.mean(name) for name in ("trained_rows", "seconds", "table_bytes")},
                "against": [
                    {
                        "control": control,
                        **{name: _plain(found[name][policy.name]) for name in FIGURES},
                    }
                    for control, found in against.items()
                    if control != policy.name
                ],
                "runs": [asdict(run) for run in policy.runs],
            }
            for policy in self.policies
        ]
        return {
            "format": FORMAT,
            "plan": dict(self.plan),
            "control": self.control,
            "periods": [asdict(period) for period in self.periods],
            "policies": policies,
            "missing": list(self.missing),
        }


def _plain(found: Comparison) -> dict[str, Any]:
    """Return a comparison for JSON, which has no infinities."""
    names = ("mean", "low", "high", "n", "wins", "confidence", "verdict")
    values = {name: getattr(found, name) for name in names} | {"words": found.summary}
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def figure_table(result: BacktestResult) -> TextTable:
    """Return the figures of each policy: mean and standard deviation over its seeds."""
    least = min((policy.mean("trained_rows") or math.inf for policy in result.policies), default=1)
    rows = []
    for policy in result.policies:
        trained, table, seconds = (
            policy.mean(name) for name in ("trained_rows", "table_bytes", "seconds")
        )
        figures = [with_spread(policy.figures(name).values()) for name in (*FIGURES, "logloss")]
        rows.append(
            (
                policy.name,
                str(len(policy.runs)),
                *figures,
                formatted(None if trained is None else trained / least, ".1f"),
                formatted(seconds, ".0f"),
                size(int(table)) if table is not None else "-",
            )
        )
    header = ("policy", "n", *FIGURES.values(), "logloss", "trained", "s", "tables")
    rows_scored = sum(period.rows for period in result.periods)
    young = sum(period.young_rows for period in result.periods)
    note = (
        f"AUC of {rows_scored:,} rows in {len(result.periods)} periods, each scored before training on it; "
        f"{young:,} of them with an id at most a week old, or new in its period. trained: rows trained on, the least is 1."
    )
    return TextTable("Progressive AUC", header, rows, note)


def difference_table(result: BacktestResult) -> TextTable:
    """Return each policy against the control: differences in AUC, paired by seed."""
    found = {figure: result.compare(figure) for figure in FIGURES}
    rows = []
    for name in found["auc"]:
        row = [name, str(found["auc"][name].n)]
        for figure in FIGURES:
            one = found[figure][name]
            row += [formatted(one.mean, "+.4f"), ends(one if one.n > 1 else None)]
            row += [one.verdict] if figure != "other_auc" else []
        rows.append(tuple(row))
    header = (
        *("policy", "n", "all rows", "interval", "verdict"),
        *("young ids", "its interval", "its verdict", "other rows", "interval of others"),
    )
    least = 100 * min(
        (one.confidence for by_name in found.values() for one in by_name.values()), default=0.95
    )
    note = (
        f"intervals: over seeds, {least:.4g} % or more, corrected for {len(found['auc'])} policies."
    )
    return TextTable(f"Difference to {result.control}", header, rows, note)


def variants_of(policies: str, methods: str, base: RunSettings) -> list[Variant]:
    """Return every policy with every method, by the names that people see."""
    found: dict[str, Variant] = {}
    expressions = parse_techniques(methods)
    for policy in map(Policy.parse, split_text(policies, ",")):
        for expression in expressions:
            for part in expression.parts:
                require(part.is_sized, f"{part.name} needs its size here, got {part.text!r}")
            built = tuple(part.build() for part in expression.parts)
            for method in built:
                require(
                    not (isinstance(method, Method) and method.after_training),
                    f"{part.text} changes trained tables; a backtest compares how they are trained",
                )
            if policy.name != "retrain":
                refuse_methods(built)
            name = str(replace(policy, seeds=None))
            name += "" if expression.text == BASELINE else f"+{expression.text}"
            require(name not in found, f"the policy {name} is given twice")
            found[name] = Variant(name, policy, replace(base, methods=built))
    return list(found.values())


def choose_control(variants: Sequence[Variant], control: str | None) -> str:
    """Return the name of the control: the one given, else the first that grows from noise, else the first."""
    names = [variant.name for variant in variants]
    if control is not None:
        if control not in names:
            raise SettingsError(
                f"the control {control!r} is no policy here{suggest(control, names)}"
            )
        return control
    noise = [one.name for one in variants if one.policy.grows and one.policy.start == "noise"]
    return [*noise, *names][0]


def backtest(
    log: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    label: str | None = None,
    time: str | None = None,
    by: "By" = "day",
    warm_up: int = 1,
    schema: "LogSchema | None" = None,
    growth: "Growth | None" = None,
    policies: str = "grow,grow:start=noise,fixed",
    methods: str = BASELINE,
    model: str | Mapping[str, Any] = "deepfm",
    training: Mapping[str, Any] | None = None,
    seeds: int = 5,
    first_seed: int = 0,
    control: str | None = None,
    minimum_effect: float = 0.0005,
    workers: int | None = None,
    threads: int = 1,
    device: torch.device | str = "auto",
    progress: StudyProgress | bool = True,
    data_progress: DataProgress = no_progress,
) -> BacktestResult:
    r"""Compare policies for new ids on a raw log in order of time, with paired seeds, and return the result.

    policies    separated by commas, with settings after colons: `Policy`
    methods     each policy is run with each of these training methods
    by          "day", "week", "month", or a number of parts with equally many rows
    warm_up     periods that start the vocabulary; they are not scored
    control     the policy that others are compared with: grow:start=noise if it is there, else the first

    Finished runs are kept in the folder and never repeated: the same call resumes a backtest.

    >>> import random, tempfile
    >>> draw = random.Random(0)
    >>> folder = Path(tempfile.mkdtemp())
    >>> rows = [f"{n},u{draw.randrange(n // 20 + 2)},{draw.randrange(2)}" for n in range(300)]
    >>> _ = (folder / "log.csv").write_text("\n".join(["time,user,click", *rows]))
    >>> found = backtest(
    ...     folder / "log.csv", folder / "out", label="click", time="time", by=3, policies="grow,fixed",
    ...     model={"name": "fm", "dim": 2}, seeds=2, workers=1, device="cpu", progress=False)
    >>> [(policy.name, len(policy.runs)) for policy in found.policies], found.control
    ([('grow', 2), ('fixed', 2)], 'grow')
    """
    require(seeds >= 1, f"seeds must be at least 1, got seeds={seeds}")
    require(threads >= 1, f"threads must be at least 1, got threads={threads}")
    require(workers is None or workers >= 1, f"workers must be at least 1, got workers={workers}")
    named = {"name": model} if isinstance(model, str) else dict(model)
    base = RunSettings.from_mapping({"model": named, "training": dict(training or {})})
    variants = variants_of(policies, methods, base)
    chosen = choose_control(variants, control)
    if growth is not None and growth.drop_after is not None:
        stays = [variant.name for variant in variants if not variant.policy.grows]
        require(
            not stays,
            f"growth.drop_after gives ids to other values, which {', '.join(stays)} cannot follow; leave one out",
        )
    scipy_special()  # reports a missing package before any run
    device = choose_device(device)
    where = Path(folder)
    try:
        make_folder(where / RUNS)
    except OSError as error:
        raise StudyError(f"cannot write to the folder {str(where)!r}: {error.strerror}") from None
    with file_lock(where / "lock"):
        prepare_periods(
            log,
            where / DATA,
            label=label,
            time=time,
            by=by,
            warm_up=warm_up,
            schema=schema,
            growth=growth,
            progress=data_progress,
        )
        periods = PeriodLog(where / DATA)
        for variant in variants:
            for pair in variant.policy.groups.items():
                check_like(periods.data[0].schema, *pair)
        data = PreparedLog(folder=str((where / DATA).absolute()), checksum=periods.checksum)
        variants = [one._replace(settings=replace(one.settings, data=data)) for one in variants]
        wanted = {
            one.name: [
                one.at(first_seed + number)
                for number in range(min(one.policy.seeds or seeds, seeds))
            ]
            for one in variants
        }
        by_seed = [runs[n] for n in range(seeds) for runs in wanted.values() if n < len(runs)]
        failures: dict[str, str] = {}
        workers = workers or default_workers(device, threads)
        if isinstance(progress, bool):
            progress = StudyLines() if progress else StudyProgress()
        start = clock.monotonic()
        with Pool(workers, str(device), threads) as pool:
            made = _make(pool, where, by_seed, progress, failures)
        found = {name: [(run, run.read(where)) for run in runs] for name, runs in wanted.items()}
        result = BacktestResult(
            plan={
                "policies": [str(one.policy) for one in variants],
                "methods": methods,
                "label": label or (schema and schema.label),
                "time": time,
                "by": by,
                "warm_up": warm_up,
                "seeds": seeds,
                "first_seed": first_seed,
                "growth": {} if growth is None else asdict(growth),
                "minimum_effect": minimum_effect,
                "model": base.to_mapping()["model"],
                "training": base.to_mapping()["training"],
                "data": periods.checksum,
            },
            periods=tuple(_facts(periods)),
            policies=tuple(
                PolicyResult(name=name, runs=tuple(one for _, one in runs if one is not None))
                for name, runs in found.items()
            ),
            control=chosen,
            missing=tuple(
                f"{run.name}: {failures.get(run.key, 'not run yet')}"
                for runs in found.values()
                for run, one in runs
                if one is None
            ),
        )
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        facts = machine() | {"device": name, "threads": threads, "runs_made": made}
        facts["minutes"] = str(round((clock.monotonic() - start) / 60, 2))
        stored = {"machine": facts, "backtest": result.to_mapping()}
        write_json(where / RESULTS, stored, error=StudyError)
    if pool.interrupted:
        raise StudyInterrupted(f"stopped; finished runs are saved in {str(where)!r}")
    return result


def _make(
    pool: Pool,
    folder: Path,
    runs: Sequence[PlannedRun],
    progress: StudyProgress,
    failures: dict[str, str],
) -> int:
    """Make the runs that are missing, in parallel; return how many."""
    missing = {run.key: run for run in runs if run.read(folder) is None}
    made = 0

    def hear(key: str, answer: Mapping[str, Any]) -> None:
        nonlocal made
        run = missing[key]
        match answer:
            case {"started": _}:
                progress.start(run.name)
            case {"epoch": _}:
                progress.epoch(run.name, answer)
            case {"done": _}:
                record = run.read(folder)
                assert record is not None, "a worker is done when its result is written"
                made += 1
                progress.finish(run.name, record)
            case {"diverged": str(why)} | {"failed": str(why)} | {"died": str(why)}:
                failures[key] = why
                progress.fail(run.name, why)

    progress.plan(len(runs), len(runs) - len(missing))
    pool.run({key: run.task(folder) for key, run in missing.items()}, hear, None)
    return made


def _facts(log: PeriodLog) -> Iterator[PeriodFacts]:
    for number in range(1, len(log)):
        yield PeriodFacts(
            start=log.starts[number],
            rows=len(log.data[number]),
            young_rows=int(log.young(number).sum()),
            new_ids=sum(len(day.new) for day in log.change(number).columns.values()),
        )
