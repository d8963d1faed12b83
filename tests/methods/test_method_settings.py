"""Any value for any setting of any method is taken and works, or is refused in one sentence."""

import dataclasses
import json
import math
import warnings

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import rarebit as rb
from rarebit.errors import RarebitError, SettingsError
from rarebit.tables.table import Method
from rarebit.technique import (
    technique_class,
    technique_from_mapping,
    technique_names,
    technique_to_mapping,
)

NEEDED = {
    "cafe": {"buckets": 5},
    "darts-emb": {"width": 3.0},
    "dhe": {"hidden": 2, "hashes": 2, "layers": 1},
    "dpq": {"pieces": 2},
    "hashing": {"buckets": 5},
    "low-rank": {"rank": 2},
    "mgqe": {"pieces": 2, "centroids": 4, "tail_centroids": 2},
    "mixed-dimensions": {"full": 2.0},
    "mpe": {"bits": 2.0},
    "pruned": {"keep": 20},
    "qr": {"buckets": 3},
    "robe": {"size": 24},
}
ODD = st.one_of(
    st.sampled_from(
        [
            math.nan,
            math.inf,
            -math.inf,
            -1,
            0,
            1,
            2,
            2**31,
            2**53 + 1,
            2**62,
            2**63,
            2**64,
            -(2**63),
        ]
    ),
    st.sampled_from([10**400, -(10**5000), True, False, None, "", "x", "8", [], [1], {}, b"1", 1j]),
    st.floats(),
    st.integers(),
)


def settings_of(name: str) -> list[str]:
    return [field.name for field in dataclasses.fields(technique_class(name)) if field.init]


def model() -> nn.Module:
    torch.manual_seed(0)
    made = nn.Module()
    made.backbone = nn.Sequential(nn.Embedding(13, 6), nn.Linear(6, 4), nn.ReLU())
    made.head = nn.Linear(4, 1)
    return made


@pytest.mark.parametrize("name", technique_names())
@settings(max_examples=12)
@given(data=st.data())
def test_any_value_works_or_is_refused_in_one_sentence(name, data):
    setting = data.draw(st.sampled_from(settings_of(name)))
    value = data.draw(ODD)
    # what a machine can hold is built: thousands of embedding sets one by one, gigabytes of factors
    sized = setting in ("num_sets", "inner_dim") and isinstance(value, int)
    assume(not sized or not 50 < value < 2**40)
    method, refusal = None, None
    try:
        method = technique_class(name)(**NEEDED.get(name, {}) | {setting: value})
    except SettingsError as error:
        refusal = str(error)
    if refusal is not None:
        assert setting in refusal
        assert "\n" not in refusal
        assert len(refusal) < 400
    elif isinstance(method, Method) and setting != "ticket":
        if setting not in ("counts", "project"):  # which a file does not hold
            values = json.loads(json.dumps(technique_to_mapping(method)))
            assert technique_from_mapping(values) == method
        works_or_is_refused(method)


def works_or_is_refused(method: Method) -> None:
    made, refusal = model(), ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            rb.apply_(made, method, verbose=False)
        except RarebitError as error:
            refusal = str(error)
    assert "\n" not in refusal
    if not refusal:
        with torch.no_grad():
            assert bool(made.backbone(torch.tensor([0, 12, 3])).isfinite().all())
