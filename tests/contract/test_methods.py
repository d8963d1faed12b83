"""`rarebit.testing` for every method of ours, and what needs a line per method. A new method adds one to METHODS."""

import json
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import pytest
from capabilities import needs_cuda

import rarebit as rb
from rarebit import testing as checks
from rarebit.callbacks import TrainingMethod
from rarebit.errors import SettingsError
from rarebit.research.darts_emb import widths_of
from rarebit.sets.sets import SetsMethod
from rarebit.technique import (
    technique_class,
    technique_from_mapping,
    technique_names,
    technique_to_mapping,
)

EXPECTED = 2
"""Methods there are at least: a search that finds none must not pass."""


@dataclass(frozen=True)
class Line:
    """What the contract must know of a method."""

    settings: dict[str, Any]
    """Settings that suit a table of 9 rows and width 6."""
    stored: Callable[[int, int], int]
    """Weights stored for a table of so many rows and so wide, in all sets."""
    bad: tuple[tuple[dict[str, Any], str], ...]
    """Settings that are refused, and a part of the message."""


METHODS = {
    "adam-ar": Line(
        settings={"alpha": 0.05},
        stored=lambda rows, width: rows * width,
        bad=(({"alpha": 1.5}, "alpha must be from 0 to 1, got alpha=1.5"),),
    ),
    "aligned-sets": Line(
        settings={"num_sets": 3, "weight": 0.5},
        stored=lambda rows, width: 3 * rows * width,
        bad=(
            ({"num_sets": 0}, "num_sets must be at least 1, got num_sets=0"),
            ({"weight": -1.0}, "weight must be 0 or more and finite, got weight=-1.0"),
            ({"weight": float("inf")}, "weight must be finite, got inf"),
        ),
    ),
    "cafe": Line(
        settings={"buckets": 5, "hot": 0.5},
        stored=lambda rows, width: 5 * width,
        bad=(
            ({"buckets": 0}, "buckets must be at least 1, got buckets=0"),
            ({"buckets": 5, "hot": 1.0}, "hot must be from 0 to less than 1, got hot=1.0"),
        ),
    ),
    "dhe": Line(
        settings={"hidden": 2, "hashes": 2, "layers": 1},
        stored=lambda rows, width: 3 * 2 + 3 * width,
        bad=(
            ({"hidden": 0}, "hidden must be at least 1, got hidden=0"),
            ({"hidden": 2, "hashes": 0}, "hashes must be at least 1, got hashes=0"),
            ({"hidden": 2, "layers": 0}, "layers must be at least 1, got layers=0"),
        ),
    ),
    "dpq": Line(
        settings={"pieces": 2, "bits": 2, "frozen": False},
        stored=lambda rows, width: rows * width + 2 * 4 * width,
        bad=(
            ({"pieces": 0}, "pieces must be at least 1, got pieces=0"),
            ({"pieces": 2, "bits": 9}, "bits must be from 1 to 8, got bits=9"),
        ),
    ),
    "evidence-coding": Line(
        settings={"size": 0.9, "counts": 7, "sensitivity": None},
        stored=lambda rows, width: rows * width,
        bad=(
            ({"size": 1.5}, "size must be a share above 0 and at most 1, got size=1.5"),
            ({"size": "1/0"}, "size must be a share above 0 and at most 1, got size='1/0'"),
            ({"size": "0 MB"}, "size must be above 0, got size='0 MB'"),
            ({"size": "small"}, 'size must be like "1/16", "2 MB" or 0.05, got size=\'small\''),
        ),
    ),
    "forgetting": Line(
        settings={"c": 3.0},
        stored=lambda rows, width: rows * width,
        bad=(
            ({"c": -1.0}, "c must be 0 or more and finite, got c=-1.0"),
            ({"c": float("inf")}, "c must be finite, got inf"),
            ({"c": "auto"}, "c must be float, got 'auto'"),
        ),
    ),
    "frequency-decay": Line(
        settings={"strength": 0.5, "c": 3.0},
        stored=lambda rows, width: rows * width,
        bad=(
            ({"strength": -1.0}, "strength must be 0 or more and finite, got strength=-1.0"),
            ({"c": float("inf")}, "c must be finite, got inf"),
        ),
    ),
    "fresh-tables": Line(
        settings={"keep": 0.25, "sets": 2},
        stored=lambda rows, width: rows * width,
        bad=(
            ({"sets": -1}, "sets must be 0 or more, got sets=-1"),
            ({"keep": -0.1}, "keep must be from 0 to 1, got keep=-0.1"),
            ({"keep": 1.5}, "keep must be from 0 to 1, got keep=1.5"),
        ),
    ),
    "group-stopping": Line(
        settings={"groups": 3},
        stored=lambda rows, width: rows * width,
        bad=(
            ({"groups": 0}, "groups must be at least 1, got groups=0"),
            ({"groups": 2.5}, "groups must be int, got 2.5"),
        ),
    ),
    "harmless-transfer": Line(
        settings={
            "loss": "adversarial",
            "select": "frequency",
            "rule": "global",
            "scale": 0.5,
            "alpha": 3.0,
            "lr": 0.1,
            "samples": 20,
            "absent": 0,
            "both": True,
            "compile": False,
            "fields": ["item", "user"],
        },
        stored=lambda rows, width: rows * width,
        bad=(
            ({"loss": "gan"}, "loss must be 'adversarial' or .* got 'gan'"),
            ({"select": "all"}, "select must be one of 'co-occurrence', 'frequency', got 'all'"),
            ({"rule": "mean"}, "rule must be one of 'lexico', 'global', 'sum', got 'mean'"),
            ({"scale": -1.0}, "scale must be 0 or more and finite, got scale=-1.0"),
            ({"alpha": 0.0}, "alpha must be above 0 and finite, got alpha=0.0"),
            ({"lr": 0.0}, "lr must be above 0 and finite, got lr=0.0"),
            ({"samples": 0}, "samples must be at least 1, got samples=0"),
            ({"fields": [1]}, "fields must be str or tuple, got"),
            (
                {"loss": "mmd", "lr": 0.1},
                "lr is that of the discriminator of loss='adversarial', got loss='mmd'",
            ),
            (
                {"loss": "relatives", "select": "frequency"},
                "loss='relatives' needs to know the relatives, which select='co-occurrence' finds",
            ),
        ),
    ),
    "hashing": Line(
        settings={"buckets": 5},
        stored=lambda rows, width: 5 * width,
        bad=(
            ({"buckets": 0}, "buckets must be at least 1, got buckets=0"),
            ({"buckets": -3}, "got buckets=-3"),
            ({"buckets": 2.5}, "buckets must be int, got 2.5"),
            ({"buckets": "5"}, "buckets must be int, got '5'"),
        ),
    ),
    "id-dropout": Line(
        settings={"c": 2.0},
        stored=lambda rows, width: rows * width,
        bad=(({"c": -1.0}, "c must be 0 or more and finite, got c=-1.0"),),
    ),
    "low-rank": Line(
        settings={"rank": 2, "after_training": False},
        stored=lambda rows, width: (rows + width) * 2,
        bad=(
            ({"rank": 0}, "rank must be at least 1, got rank=0"),
            ({"rank": 2.5}, "rank must be int, got 2.5"),
            ({"rank": 2, "after_training": 1}, "after_training must be bool, got 1"),
        ),
    ),
    "masked": Line(
        settings={"ticket": None},
        stored=lambda rows, width: rows * width,
        bad=(({"ticket": 3}, "ticket must be Ticket or str or none, got 3"),),
    ),
    "mgqe": Line(
        settings={
            "pieces": 2,
            "centroids": 4,
            "tail_centroids": 2,
            "head": 0.3,
            "frozen": False,
        },
        stored=lambda rows, width: rows * width + 4 * width,
        bad=(
            ({"pieces": 0}, "pieces must be at least 1, got pieces=0"),
            ({"pieces": 2, "centroids": 257}, "centroids must be from 1 to 256, got centroids=257"),
            (
                {"pieces": 2, "centroids": 4},
                "tail_centroids must be from 1 to 4, got tail_centroids=16",
            ),
            ({"pieces": 2, "head": 1.0}, "head must be from 0 to less than 1, got head=1.0"),
        ),
    ),
    "mixed-dimensions": Line(
        settings={"full": 0.5, "alpha": 0.5},
        stored=lambda rows, width: rows + width,
        bad=(
            ({"full": 0.0}, "full must be above 0, got full=0.0"),
            ({"full": 3, "alpha": 0.0}, "alpha must be above 0, got alpha=0.0"),
        ),
    ),
    "mlet": Line(
        settings={"inner_dim": 8, "std": 0.5, "init": "keep"},
        stored=lambda rows, width: (rows + width) * 8,
        bad=(
            ({"inner_dim": 0}, "inner_dim must be at least 1, got inner_dim=0"),
            ({"inner_dim": 2.5}, "inner_dim must be int, got 2.5"),
            ({"std": 0.0}, "std must be more than 0 and finite, got std=0.0"),
            ({"std": float("inf")}, "std must be finite, got inf"),
            ({"init": "old"}, "init must be one of 'fresh', 'keep', got 'old'"),
        ),
    ),
    "darts-emb": Line(
        settings={"width": 1.5, "group": 4, "search": 2, "stage": "settled"},
        stored=lambda rows, width: rows * width + (len(widths_of(width)) - 1) * width**2,
        bad=(
            ({"width": 0.5}, "width must be at least 1, got 0.5"),
            ({"width": 2.0, "group": 0}, "group must be at least 1, got group=0"),
            ({"width": 2.0, "search": 0}, "search must be at least 1, got search=0"),
            ({"width": 2.0, "stage": "done"}, "stage must be .* got 'done'"),
        ),
    ),
    "mpe": Line(
        settings={"bits": 2.5, "group": 4, "search": 2, "stage": "settled"},
        stored=lambda rows, width: rows * width + width + 6,
        bad=(
            ({"bits": 0.0}, "bits must be above 0 and at most 6, got 0.0"),
            ({"bits": 2.0, "group": 0}, "group must be at least 1, got group=0"),
            ({"bits": 2.0, "search": 0}, "search must be at least 1, got search=0"),
            ({"bits": 2.0, "stage": "done"}, "stage must be .* got 'done'"),
        ),
    ),
    "multi-embedding": Line(
        settings={"num_sets": 3, "project": None},
        stored=lambda rows, width: 3 * rows * width,
        bad=(
            ({"num_sets": 0}, "num_sets must be at least 1, got num_sets=0"),
            ({"num_sets": 2.5}, "num_sets must be int, got 2.5"),
            ({"project": "mlp"}, "project must be Callable or none, got 'mlp'"),
        ),
    ),
    "pep": Line(
        settings={
            "granularity": "feature_dimension",
            "init": -2.0,
            "schedule": None,
            "decay": 0.5,
        },
        stored=lambda rows, width: 2 * rows * width,
        bad=(
            (
                {"granularity": "entry"},
                "granularity must be one of 'global', 'dimension'.* got 'entry'",
            ),
            ({"init": float("inf")}, "init must be finite, got inf"),
            ({"init": "low"}, "init must be float, got 'low'"),
            ({"decay": -1.0}, "decay must be 0 or more, got decay=-1.0"),
            ({"schedule": "linear"}, "schedule must be .*, got 'linear'"),
            (
                {"schedule": "given", "granularity": "global"},
                "granularity, init and decay are for learned thresholds, and schedule='given' has none",
            ),
        ),
    ),
    "product-start": Line(
        settings={"inner_dim": 8, "std": 0.5},
        stored=lambda rows, width: rows * width,
        bad=(
            ({"inner_dim": 0}, "inner_dim must be at least 1, got inner_dim=0"),
            ({"std": -1.0}, "std must be more than 0 and finite, got std=-1.0"),
        ),
    ),
    "pruned": Line(
        settings={"keep": 20, "by": "magnitude", "start": "random", "epochs": 3, "tables": None},
        stored=lambda rows, width: rows * width,
        bad=(
            ({"keep": 0}, "at least one entry must be kept, got keep=0"),
            ({"keep": 0.5}, "keep must be int, got 0.5"),
            ({"keep": 9, "by": "size"}, "by must be one of 'threshold', 'magnitude', got 'size'"),
            ({"keep": 9, "epochs": 0}, "epochs must be at least 1, got epochs=0"),
            (
                {"keep": 9, "by": "magnitude", "tables": "dense"},
                "tables='dense' is for pruning by a threshold; with by='magnitude' the run's own",
            ),
        ),
    ),
    "qr": Line(
        settings={"buckets": 3, "combine": "mult"},
        stored=lambda rows, width: (3 + -(-rows // 3)) * width,
        bad=(
            ({"buckets": 0}, "buckets must be at least 1, got buckets=0"),
            ({"buckets": 3, "combine": "concat"}, "combine must be one of 'mult', 'add', got"),
        ),
    ),
    "quantize": Line(
        settings={"bits": 4},
        stored=lambda rows, width: rows * width + 1,
        bad=(
            ({"bits": 16}, "bits must be one of 8, 4, got 16"),
            ({"bits": "8"}, "bits must be one of 8, 4, got '8'"),
        ),
    ),
    "robe": Line(
        settings={"size": 24, "block": 6},
        stored=lambda rows, width: 24,
        bad=(
            ({"size": 24, "block": 0}, "block must be at least 1, got block=0"),
            ({"size": 3}, "size must be at least that of a block, 8, got size=3"),
        ),
    ),
    "row-rate": Line(
        settings={"counts": 7, "c": 3.0},
        stored=lambda rows, width: rows * width,
        bad=(
            ({"counts": -1}, "counts must be 0 or more, got counts=-1"),
            ({"c": -1.0}, "c must be 0 or more and finite, got c=-1.0"),
            ({"c": "learned"}, "c must be float, got 'learned'"),
        ),
    ),
    "shared-sets": Line(
        settings={"num_sets": 3},
        stored=lambda rows, width: 3 * rows * width,
        bad=(({"num_sets": -1}, "num_sets must be at least 1, got num_sets=-1"),),
    ),
    "shrinkage": Line(
        settings={"counts": 7, "c": 3.0, "prior": "mean"},
        stored=lambda rows, width: (rows + 1) * width,
        bad=(
            ({"counts": -1}, "counts must be 0 or more, got counts=-1"),
            ({"counts": 2.5}, "counts must be .*, got 2.5"),
            ({"c": -1.0}, "c must be 0 or more and finite, got c=-1.0"),
            ({"c": float("inf")}, "c must be finite, got inf"),
            ({"c": {"user": "learned"}}, "c must be a number for each table, got 'learned'"),
            ({"c": "best"}, "c must be .*, got 'best'"),
            ({"prior": "median"}, "prior must be 'mean' or 'zero', got 'median'"),
            ({"prior": "parent"}, "got 'parent'; 'parent' was removed: no study used it"),
        ),
    ),
    "tail": Line(
        settings={
            "counts": 7,
            "c": 3.0,
            "prior": "mean",
            "forget": 5.0,
            "memory": 0.5,
            "average": "rows-anew",
        },
        stored=lambda rows, width: (rows + 1) * width,
        bad=(
            ({"c": "best"}, "c must be .*, got 'best'"),
            ({"forget": 0.0}, "forget must be above 0 and finite, got forget=0.0"),
            ({"memory": float("inf")}, "memory must be finite, got inf"),
            ({"average": "rows"}, "average must be one of 'network', 'known', .*, got 'rows'"),
        ),
    ),
    "tt-rec": Line(
        settings={"rank": 2},
        # 9 to 11 rows are 2 x 2 x 3, 13 are 3 x 2 x 3; a width of 6 is 2 x 1 x 3
        stored=lambda rows, width: (2 + (rows > 12)) * 2 * 2 + 2 * 1 * 4 + 3 * 3 * 2,
        bad=(({"rank": 0}, "rank must be at least 1, got rank=0"),),
    ),
}


def line_of(name: str) -> Line:
    assert name in METHODS, (
        f"methods/{name}.py is not under contract: add a line to METHODS in "
        "tests/contract/test_methods.py with settings for a table of 9 x 6, the number of weights "
        "it stores, and settings it refuses"
    )
    return METHODS[name]


def method_of(name: str) -> rb.Method:
    return technique_class(name)(**line_of(name).settings)


SETS_METHODS = [name for name in technique_names() if issubclass(technique_class(name), SetsMethod)]
TRAINING_METHODS = [
    name for name in technique_names() if issubclass(technique_class(name), TrainingMethod)
]
TABLE_METHODS = [
    name for name in technique_names() if name not in (*SETS_METHODS, *TRAINING_METHODS)
]
every_method = pytest.mark.parametrize("name", technique_names())
every_table_method = pytest.mark.parametrize("name", TABLE_METHODS)
every_sets_method = pytest.mark.parametrize("name", SETS_METHODS)


def test_all_methods_are_found_and_none_is_missing():
    assert len(technique_names()) >= EXPECTED
    assert set(METHODS) <= set(technique_names()), "METHODS names a file that is not there"


def test_a_method_without_a_line_fails():
    with pytest.raises(AssertionError, match=r"methods/unheard_of\.py is not under contract: add"):
        line_of("unheard_of")


PROMISES = [
    pytest.param(check, id=f"{name}-{what}")
    for name in technique_names()
    for what, check in checks.method_checks(method_of(name))
    if not what.startswith("composition")  # test_declarations.py tries every pair once
]


@pytest.mark.parametrize("check", PROMISES)
def test_contract(check):
    check()


@pytest.mark.parametrize("stops", [(1,), (3, 2), (5,)])
@pytest.mark.parametrize("name", TRAINING_METHODS)
@pytest.mark.slow
def test_a_run_resumes_to_the_same_bits_wherever_it_was_stopped(name, stops):
    checks.check_resumes(method_of(name), stops)


@every_table_method
def test_the_weights_stored_are_those_of_the_formula(name):
    checks.check_count(method_of(name), line_of(name).stored)


@every_sets_method
def test_the_weights_of_all_sets_are_those_of_the_formula(name):
    method = method_of(name)
    model = checks.small_model(method)
    plain = rb.find_tables(model.backbone)
    rb.apply_(model, method, verbose=False)
    found = rb.find_tables(model.backbone)
    stored = sum(line_of(name).stored(info.rows, info.width) for info in plain)
    assert sum(info.num_parameters for info in found) == stored
    assert sum(info.num_bytes for info in found) == 4 * stored


@every_method
def test_settings_round_trip(name):
    method = method_of(name)
    values = json.loads(json.dumps(technique_to_mapping(method)))
    assert values == {"method": name.replace("-", "_")} | line_of(name).settings
    assert technique_from_mapping(values) == method


@every_method
def test_bad_settings_are_refused(name):
    assert line_of(name).bad, "name a setting that the method refuses"
    for settings, message in line_of(name).bad:
        with pytest.raises(SettingsError, match=message):
            technique_class(name)(**settings)
        with pytest.raises(SettingsError, match=message):
            technique_from_mapping({"method": name} | settings)


@every_method
def test_an_unknown_setting_is_refused_with_a_suggestion(name):
    known = fields(technique_class(name))[0].name
    with pytest.raises(SettingsError, match=f"unknown setting '{known}s'.*did you mean '{known}'"):
        technique_from_mapping({"method": name, f"{known}s": 1})


@every_method
def test_a_setting_of_the_wrong_type_is_refused(name):
    for key in line_of(name).settings:
        with pytest.raises(SettingsError, match=f"method {name}: {key} must be "):
            technique_from_mapping({"method": name} | line_of(name).settings | {key: [[]]})


@every_method
def test_a_method_is_public_and_its_file_says_what_it_computes(name):
    cls = technique_class(name)
    assert any(getattr(place, cls.__name__, None) is cls for place in (rb, rb.pruning, rb.research))
    assert "=" in (__import__(cls.__module__, fromlist=["_"]).__doc__ or "")


@needs_cuda
@every_table_method
def test_a_table_stays_on_its_device(name):
    checks.check_dtype(method_of(name), device="cuda")


@needs_cuda
@every_table_method
def test_all_of_a_collection_stays_on_its_device(name):
    tables = checks.small_model().backbone.tables.cuda()
    rb.apply_(tables, method_of(name), where=lambda t: t.field != "item", verbose=False)
    places = {tensor.device.type for tensor in (*tables.parameters(), *tables.buffers())}
    assert places == {"cuda"}
    assert tables(checks.small_batch().ids.cuda()).is_cuda


def test_an_unknown_method_is_refused_with_a_suggestion():
    with pytest.raises(SettingsError, match="unknown method 'hashin'; did you mean 'hashing'"):
        technique_from_mapping({"method": "hashin", "buckets": 3})


def test_a_mapping_must_name_its_method():
    with pytest.raises(SettingsError, match='a method is named by the key "method", got'):
        technique_from_mapping({"buckets": 3})


def test_a_method_may_be_named_with_a_hyphen():
    assert technique_from_mapping({"method": "low-rank", "rank": 3}) == rb.LowRank(rank=3)
