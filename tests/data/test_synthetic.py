"""The generated click log: the same bits everywhere, long tails, dials that do what they say."""

import hashlib
import itertools
from collections import Counter

import numpy as np
import pytest
import torch

from rarebit.data import SyntheticLog, generate, synthetic
from rarebit.data.schema import FIRST_VALUE, MISSING, PADDING, UNKNOWN
from rarebit.data.synthetic import (
    CLICK_RATE,
    DrawnColumn,
    Teacher,
    draw_column,
    draw_effects,
    draw_topics,
    logistic,
    parent_ids,
)
from rarebit.errors import SettingsError
from rarebit.training.metrics import auc

DIALS = {"seed": 0, "tail_similarity": 0.7, "redundancy": 0.2, "num_patterns": 3}


def checksum(splits):
    digest = hashlib.sha256()
    for part in splits:
        for array in (part.ids, part.numeric, part.label, part.probability):
            digest.update(array.numpy().tobytes())
    return digest.hexdigest()[:16]


def ceiling(**dials):
    test = generate(SyntheticLog(rows=40_000, **dials)).train
    return auc(test.probability, test.label)


def effects_of(column, **dials):
    return draw_effects([column], **(DIALS | {"num_patterns": 0} | dials))[0][column.name]


CHECKSUMS = {
    "default": ({}, "4ff6795fdedadc02"),
    "another seed": ({"seed": 1}, "3f297b5a72c2cb15"),
    "criteo": ({"preset": "criteo"}, "0030d8e776a2acbe"),
    "dials": (
        {"tail_similarity": 0.1, "redundancy": 0.5, "num_patterns": 7, "noise": 0.3},
        "ebaeff584e739f62",
    ),
    "additive": ({"num_patterns": 0}, "fe4f2230732672ed"),
}


@pytest.mark.parametrize(("dials", "expected"), CHECKSUMS.values(), ids=CHECKSUMS)
def test_a_seed_gives_these_bits_on_every_machine(dials, expected):
    assert checksum(generate(SyntheticLog(rows=5_000, **dials))) == expected


@pytest.mark.threads(3)
def test_chunks_and_threads_leave_no_trace(monkeypatch):
    whole = checksum(generate(SyntheticLog(rows=3_001)))
    monkeypatch.setattr(synthetic, "_CHUNK_ROWS", 100)
    torch.set_num_threads(1)
    assert checksum(generate(SyntheticLog(rows=3_001))) == whole


def test_the_dials_change_labels_and_never_the_values():
    plain = generate(SyntheticLog(rows=2_000)).train
    dialled = generate(SyntheticLog(rows=2_000, noise=0.4, num_patterns=1)).train
    assert torch.equal(plain.ids, dialled.ids)
    assert torch.equal(plain.numeric, dialled.numeric)
    assert not torch.equal(plain.probability, dialled.probability)


def test_splits_are_eight_to_one_to_one():
    assert [len(part) for part in generate(SyntheticLog(rows=1_003))] == [802, 100, 101]


@pytest.mark.parametrize("power", [1, 3, 10])
def test_the_top_fifth_of_the_values_holds_the_share_of_a_power_law(power):
    column = DrawnColumn("x", 1_000, power=power)
    counters = np.arange(40_000, dtype=np.uint64)
    ids = draw_column(column, 0, counters, draw_topics(0, counters))
    share = (ids - FIRST_VALUE < 200).mean()
    assert share == pytest.approx(0.2 ** (1 / power), abs=0.02)


def test_the_criteo_preset_has_39_fields_and_967_795_values():
    schema = generate(SyntheticLog(preset="criteo", rows=10)).train.schema
    assert [field.name for field in schema.fields][:14] == [*(f"I{i}" for i in range(1, 14)), "C1"]
    assert len(schema.fields) == 39
    assert sum(field.rows - FIRST_VALUE for field in schema.fields) == 967_795


def test_the_default_log_has_fields_of_all_kinds():
    fields = generate(SyntheticLog(rows=10)).train.schema.fields
    assert len(fields) == 10
    assert {field.kind for field in fields} == {"categorical", "multi", "numeric"}


def test_labels_are_drawn_from_the_probabilities():
    train = generate(SyntheticLog(rows=50_000)).train
    probability = train.probability.double()
    deviation = (probability * (1 - probability)).sum().sqrt() / len(train)
    assert abs(train.label.mean() - probability.mean()) < 4 * deviation
    assert probability.mean() == pytest.approx(CLICK_RATE, abs=0.02)
    for part in probability.argsort().chunk(5):  # calibrated where chances are low and high
        assert train.label[part].mean() == pytest.approx(float(probability[part].mean()), abs=0.02)


def test_padding_only_ends_a_list():
    splits = generate(SyntheticLog(rows=5_000))
    tags = splits.train[slice(0, None)]["tags"]
    there = (tags != PADDING).int()
    assert bool((there.diff(dim=1) <= 0).all())
    lengths = there.sum(dim=1).bincount()
    assert len(lengths) == 5
    assert bool((lengths > len(tags) // 8).all())  # empty lists too


def test_some_cities_are_missing_and_numbers_are_finite():
    train = generate(SyntheticLog(rows=20_000)).train
    assert (train[slice(0, None)]["city"] == MISSING).float().mean() == pytest.approx(
        1 / 64, abs=0.005
    )
    assert train.numeric.mean(dim=0).abs().max() < 0.05
    assert train.numeric.var(dim=0).tolist() == pytest.approx([1, 1], abs=0.05)


def test_values_too_rare_in_training_are_unknown_everywhere():
    train, valid, test = generate(SyntheticLog(rows=20_000))
    counts = train.counts()
    for name, count in counts.items():
        assert int(count[FIRST_VALUE:][count[FIRST_VALUE:] > 0].min()) >= synthetic.MIN_COUNT
        for part in (valid, test):
            ids = part[slice(0, None)][name].long()
            assert bool((count[ids[ids != PADDING]] > 0).all())
    assert counts["user"][UNKNOWN] > 0  # so its row is trained


def test_noise_takes_the_ceiling_down_to_a_coin_flip():
    clean, noisy, coin = ceiling(), ceiling(noise=0.5), ceiling(noise=1.0)
    assert 0.78 < clean < 0.88
    assert noisy < clean - 0.05
    assert coin is None or coin == pytest.approx(0.5, abs=1e-6)


def test_without_patterns_effects_are_additive():
    """Two rows that swap a value change the score by the same amount in any company."""
    columns = [DrawnColumn("a", 5), DrawnColumn("b", 5)]
    counters = np.arange(2_000, dtype=np.uint64)
    sample = {c.name: draw_column(c, 0, counters, draw_topics(0, counters)) for c in columns}

    def interaction(num_patterns):
        effects = draw_effects(columns, **(DIALS | {"num_patterns": num_patterns}))
        teacher = Teacher(effects, sample, noise=0.0)
        rows = {"a": np.array([[3, 3, 4, 4]]), "b": np.array([[5, 6, 5, 6]])}
        chance = teacher.probability(rows)
        logit = np.log(chance / (1 - chance))
        return abs(logit[0] - logit[1] - logit[2] + logit[3])

    assert interaction(0) < 1e-3
    assert interaction(1) > 1e-2


def test_redundant_values_have_no_effect():
    column = DrawnColumn("x", 5_000)
    for share in (0.0, 0.3, 1.0):
        effects = effects_of(column, redundancy=share)[FIRST_VALUE:]
        assert (effects == 0).mean() == pytest.approx(share, abs=0.03)


def test_tail_similarity_is_the_correlation_with_the_parent():
    column = DrawnColumn("x", 20_000)
    parents = parent_ids(column, seed=0)
    rare = np.arange(FIRST_VALUE + column.num_frequent, column.field.rows)
    assert (parents[rare] < FIRST_VALUE + column.num_frequent).all()
    for similarity in (0.0, 0.6, 1.0):
        effects = effects_of(column, tail_similarity=similarity, redundancy=0.0)
        correlation = np.corrcoef(effects[rare], effects[parents[rare]])[0, 1]
        assert correlation == pytest.approx(similarity, abs=0.05)


def test_a_rare_value_keeps_the_company_of_its_parent():
    """Cosine of co-occurrence with another field's values: the parent against other frequent ones."""
    item, brand = DrawnColumn("item", 400, power=1), DrawnColumn("brand", 200)
    counters = np.arange(60_000, dtype=np.uint64)
    topics = draw_topics(0, counters)
    items, brands = (draw_column(c, 0, counters, topics)[0] for c in (item, brand))
    met = np.zeros((item.field.rows, brand.field.rows))
    np.add.at(met, (items, brands), 1)
    met /= np.linalg.norm(met, axis=1, keepdims=True) + 1e-12
    parents = parent_ids(item, seed=0)
    rare = np.arange(FIRST_VALUE + item.num_frequent, item.field.rows)
    frequent = np.arange(FIRST_VALUE, FIRST_VALUE + item.num_frequent)
    with_parent = (met[rare] * met[parents[rare]]).sum(axis=1)
    with_others = (met[rare] @ met[frequent].T).mean(axis=1)
    assert (with_parent > with_others).mean() > 0.9


def test_logistic_is_the_logistic_function():
    scores = np.linspace(-8, 8, 101)
    assert logistic(scores) == pytest.approx(1 / (1 + np.exp(-scores)), rel=1e-4)


def test_progress_ends_at_the_last_row():
    told = []
    generate(SyntheticLog(rows=70_000), progress=lambda done, total: told.append((done, total)))
    assert told == [(32_768, 70_000), (65_536, 70_000), (70_000, 70_000)]


@pytest.mark.parametrize("rows", [20, 20_000])
@pytest.mark.parametrize(
    "column", [c for c in synthetic.PRESETS["default"] if c.num_values], ids=lambda c: c.name
)
def test_unknown_is_decided_by_training_counts_alone(column, rows):
    counters = np.arange(rows, dtype=np.uint64)
    drawn = draw_column(column, 0, counters, draw_topics(0, counters)).T
    seen = Counter(drawn[: rows * 8 // 10].ravel().tolist())
    expected = [
        [i if i < FIRST_VALUE or seen[i] >= synthetic.MIN_COUNT else UNKNOWN for i in row]
        for row in drawn.tolist()
    ]
    splits = generate(SyntheticLog(rows=rows))
    slots = splits.train.schema.slots[column.name]
    assert torch.cat([part.ids[:, slots] for part in splits]).tolist() == expected


def test_a_value_that_is_missing_once_stays_missing():
    counts = generate(SyntheticLog(rows=20)).train.counts()["city"]
    assert counts[MISSING] == 1 < synthetic.MIN_COUNT


def test_a_longer_log_begins_with_the_rows_of_a_shorter_one():
    short, long = (
        torch.cat([part.probability for part in generate(SyntheticLog(rows=rows))])
        for rows in (500, 900)
    )
    assert torch.equal(short, long[:500])


@pytest.mark.parametrize("preset", ["default", "criteo"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_ceiling_and_click_rate_are_those_of_a_real_log(preset, seed):
    train = generate(SyntheticLog(rows=10_000, preset=preset, seed=seed)).train
    assert 0.22 < float(train.label.mean()) < 0.28
    assert 0.78 < auc(train.probability, train.label) < 0.88


MISTAKES = [
    ({"preset": "avazu"}, "preset must be one of 'default', 'criteo', got"),
    ({"rows": 9}, "rows must be at least 10, got rows=9"),
    ({"rows": 1e6}, "rows must be int, got 1000000.0"),
    ({"seed": -1}, "seed must be at least 0, got seed=-1"),
    ({"num_patterns": -1}, "num_patterns must lie between 0 and 100, got num_patterns=-1"),
    ({"noise": 1.5}, "noise must lie between 0 and 1, got noise=1.5"),
    ({"redundancy": -0.1}, "redundancy must lie between 0 and 1, got redundancy=-0.1"),
    ({"tail_similarity": float("nan")}, "tail_similarity must be finite, got nan"),
]


@pytest.mark.parametrize(("settings", "message"), MISTAKES)
def test_settings_out_of_range_are_told(settings, message):
    with pytest.raises(SettingsError, match=message):
        SyntheticLog(**settings)


def test_clicks_drift_from_one_teacher_to_another():
    rows = 20_000
    still, drifting, other = (
        torch.cat([part.probability for part in generate(SyntheticLog(rows=rows, **dials))])
        for dials in ({}, {"drift": 1.0}, {"drift": 0.5})
    )
    tenths = [slice(start, start + rows // 10) for start in range(0, rows, rows // 10)]

    def agreement(chances):
        pairs = [torch.stack([still[part], chances[part]]) for part in tenths]
        return [float(torch.corrcoef(pair)[0, 1]) for pair in pairs]

    whole, half = agreement(drifting), agreement(other)
    assert whole[0] > 0.95  # a twentieth of the way
    assert abs(whole[-1]) < 0.3  # nothing of the first effects is left
    assert all(later < earlier for earlier, later in itertools.pairwise(whole[::3]))
    assert half[0] > 0.95
    assert 0.5 < half[-1] < 0.9  # half of each
    assert drifting.std() == pytest.approx(float(still.std()), rel=0.1)


def test_a_row_between_two_teachers_by_hand():
    columns = [DrawnColumn("user", 50)]
    counters = np.arange(2000, dtype=np.uint64)
    rows = {"user": draw_column(columns[0], 0, counters, draw_topics(0, counters))}
    first, later = (
        Teacher(draw_effects(columns, **DIALS | {"num_patterns": 0, "seed": seed}), rows, noise=0.0)
        for seed in (0, 1)
    )
    share = np.full(2000, 0.25)
    mixed = (0.75 * first._scores(rows) + 0.25 * later._scores(rows)) / (0.75**2 + 0.25**2) ** 0.5
    expected = logistic(0.75 * first._bias + 0.25 * later._bias + mixed)
    np.testing.assert_allclose(first.probability(rows, later, share), expected)
    np.testing.assert_array_equal(
        first.probability(rows, later, 0 * share), first.probability(rows)
    )
