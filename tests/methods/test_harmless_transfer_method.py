"""Harmless transfer as a method of runs: what it attaches, beside which methods, and its limit cases."""

import math
from dataclasses import replace

import pytest
import torch

import rarebit as rb
from rarebit.callbacks import TrainingData
from rarebit.errors import NoTableError, SettingsError
from rarebit.methods.harmless_transfer import HarmlessTransfer
from rarebit.technique import (
    compositions,
    parse_techniques,
    technique_class,
    technique_name,
    technique_names,
    technique_text,
)
from rarebit.training.run import start_model, train_model
from rarebit.training.settings import RunSettings, load_splits

SETTINGS = RunSettings(
    model="fm",
    model_settings={"dim": 4},
    data=rb.data.SyntheticLog(rows=1500),
    training=rb.Training(epochs=2, batch_size=128, lr=0.02),
)
TRAIN, VALID, _ = load_splits(SETTINGS.data)
LARGE = {"user", "item", "brand", "city", "tags"}
"""Fields of the generated log with more than 100 values."""
TRANSFER = "harmless-transfer"


def silence(line):
    del line


def settings_with(*methods, **others):
    return replace(SETTINGS, methods=methods, **others)


def train(*methods, **others):
    settings = settings_with(*methods, **others)
    return train_model(settings, TRAIN, VALID, progress=False, say=silence)


def assert_same_weights(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_is_what_the_same_loop_by_hand_is():
    found, history = train(HarmlessTransfer(loss="mmd", alpha=3.0, samples=64))
    model = start_model(SETTINGS, TRAIN.schema, say=silence)
    settings = rb.HarmlessTransfer(loss=rb.transfer.MMD(), alpha=3.0, samples=64)
    with settings.start(model, TRAIN) as transfer:
        rb.fit(
            model,
            TRAIN,
            VALID,
            settings=SETTINGS.training,
            backward=transfer.backward,
            progress=False,
        )
    assert_same_weights(found, model)
    assert history.reports == {TRANSFER: transfer.ledger.read()}


def test_fit_takes_a_transfer_that_has_started_as_a_callback():
    found, history = train(HarmlessTransfer(loss="moments"))
    model = start_model(SETTINGS, TRAIN.schema, say=silence)
    transfer = HarmlessTransfer(loss="moments").start(model, TRAIN)
    own = rb.fit(
        model, TRAIN, VALID, settings=SETTINGS.training, callbacks=[transfer], progress=False
    )
    assert_same_weights(found, model)
    assert list(own.reports.values()) == [history.reports[TRANSFER]]


def test_fields_choose_tables_in_an_own_loop_and_where_overrides_them():
    model = start_model(SETTINGS, TRAIN.schema, say=silence)
    with HarmlessTransfer(fields="item").start(model, TRAIN) as transfer:
        assert [name for group in transfer.groups for name in group.names] == [
            "backbone.tables.item"
        ]
    with HarmlessTransfer(fields="item").start(
        model, TRAIN, where=lambda t: t.field == "user" and t.width > 1
    ) as transfer:
        assert transfer.groups[0].names == ("backbone.tables.user",)
    with pytest.raises(SettingsError, match="there is no table for 'itm'"):
        HarmlessTransfer(fields="itm").start(model, TRAIN)


def test_a_run_takes_a_loss_by_name_only():
    with pytest.raises(
        SettingsError, match=r"loss goes by name, got loss=MMD\(.*; use one of 'adv"
    ):
        settings_with(HarmlessTransfer(loss=rb.transfer.MMD(sample=3)))


def test_a_sum_without_transfer_is_plain_training_to_the_last_bit():
    plain, _ = train()
    assert_same_weights(train(HarmlessTransfer(rule="sum", scale=0.0))[0], plain)


def test_the_barrier_alone_is_not_plain_training():
    plain, found = train()[0].state_dict(), train(HarmlessTransfer(scale=0.0))[0].state_dict()
    assert any(not torch.equal(found[name], plain[name]) for name in plain)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss": "adversarial-mlp"},
        {"loss": "cos-reg"},
        {"loss": "moments"},
        {"loss": "sliced-wasserstein"},
        {"loss": "relatives"},
        {"select": "frequency"},
        {"rule": "global"},
        {"scale": 10.0},
        {"alpha": 0.5},
        {"lr": 0.5},
        {"samples": 3},
        {"both": True},
        {"absent": 5},
        {"absent": "all"},
        {"fields": "item"},
    ],
    ids=str,
)
def test_every_setting_changes_the_training(changes):
    usual, found = (
        train(HarmlessTransfer())[0].state_dict(),
        train(HarmlessTransfer(**changes))[0].state_dict(),
    )
    assert any(not torch.equal(found[name], usual[name]) for name in usual)


def attached(method, seed):
    model = start_model(SETTINGS, TRAIN.schema, say=silence)
    data = TrainingData(train=TRAIN, valid=None, batch_size=9, steps_per_epoch=1, seed=seed)
    return model, method.start(model, data)


@pytest.mark.parametrize(
    ("loss", "name"), [("adversarial", "weight"), ("adversarial-mlp", "weights")]
)
def test_the_seed_of_the_run_is_that_of_the_discriminators(loss, name):
    def first_weights(seed):
        _, found = attached(HarmlessTransfer(loss=loss, fields="item"), seed)
        [state] = found.state_dict()["losses"].values()
        found.close()
        return state[name]

    assert torch.equal(first_weights(3), first_weights(3))
    assert not torch.equal(first_weights(3), first_weights(4))


def test_the_seed_of_the_run_is_that_of_the_samples():
    def gradient(seed):
        model, found = attached(HarmlessTransfer(loss="moments", fields="item", samples=2), seed)
        found.backward(model(TRAIN[slice(200)]).square().mean())
        found.close()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])

    assert torch.equal(gradient(3), gradient(3))
    assert not torch.equal(gradient(3), gradient(4))


def tables_in(history):
    return set(history.reports[TRANSFER]["tables"])


def test_large_fields_take_part_and_first_order_weights_do_not():
    _, history = train(HarmlessTransfer())
    assert tables_in(history) == {f"backbone.tables.{name}" for name in LARGE}


@pytest.mark.parametrize("fields", ["device", ("item", "device")])
def test_fields_that_are_named_take_part_however_small(fields):
    _, history = train(HarmlessTransfer(fields=fields))
    names = (fields,) if isinstance(fields, str) else fields
    assert tables_in(history) == {f"backbone.tables.{name}" for name in names}


def test_a_field_that_is_not_there_is_told_with_the_nearest():
    with pytest.raises(SettingsError, match="there is no table for 'itm'; did you mean 'item'"):
        train(HarmlessTransfer(fields="itm"))


def test_a_model_of_small_fields_has_no_rare_ones():
    small = rb.Dataset.from_columns({"a": [0, 1, 2, 1], "b": [1, 0, 1, 0]}, label=[0, 1, 0, 1])
    with pytest.raises(
        NoTableError,
        match=r"more than 100 rows, and the model has \S+a \(\d+ rows\), .*name smaller tables",
    ):
        train_model(settings_with(HarmlessTransfer()), small, None, progress=False, say=silence)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("harmless-transfer:fields=zip", "zip"),
        ('harmless-transfer:fields=["zip"]', "zip"),
        ('harmless-transfer:fields=["zip","item"]', ("zip", "item")),
        ("harmless-transfer", ()),
    ],
)
def test_fields_can_be_typed(text, fields):
    [expression] = parse_techniques(text)
    [method] = expression.build([], 0.5)
    assert method.fields == fields
    [again] = parse_techniques(technique_text(method))
    assert again.build([], 0.5) == (method,)


@pytest.mark.parametrize("absent", [0, 7, "all"])
def test_absent_rows_can_be_typed(absent):
    [expression] = parse_techniques(f"harmless-transfer:absent={absent}")
    [method] = expression.build([], 0.5)
    assert method.absent == absent
    assert technique_text(method) == TRANSFER + (f":absent={absent}" if absent else "")


def test_a_settings_file_holds_it():
    values = {"methods": [{"method": TRANSFER, "fields": ["zip", "item"], "scale": 1}]}
    settings = RunSettings.from_mapping(values)
    assert settings.methods == (HarmlessTransfer(fields=("zip", "item"), scale=1.0),)
    assert RunSettings.from_mapping(settings.to_mapping()) == settings


def test_thresholds_that_are_learned_to_the_end_are_refused():
    with pytest.raises(SettingsError, match=r"still being learned; .*pep\+pruned\+harmless"):
        settings_with(rb.PEP(), HarmlessTransfer())
    settings_with(rb.PEP(), rb.pruning.Pruned(keep=10), HarmlessTransfer())


SMALL = {
    "aligned-sets": rb.research.AlignedSets(num_sets=2),
    "cafe": rb.research.CAFE(buckets=50),
    "dhe": rb.research.DHE(hidden=6, hashes=6),
    "evidence-coding": rb.EvidenceCoding(size=0.9),
    "hashing": rb.Hashing(buckets=50),
    "low-rank": rb.LowRank(rank=2, after_training=False),
    "masked": rb.pruning.Masked(),
    "mgqe": rb.research.MGQE(pieces=2, centroids=16),
    "mixed-dimensions": rb.research.MixedDimensions(full=20),
    "dpq": rb.research.DPQ(pieces=2, bits=2),
    "mpe": rb.research.MPE(bits=2.0),
    "mlet": rb.MLET(inner_dim=6),
    "multi-embedding": rb.MultiEmbedding(num_sets=2),
    "product-start": rb.research.ProductStart(inner_dim=6),
    "pruned": rb.pruning.Pruned(keep=3000),
    "qr": rb.research.QR(buckets=50),
    "quantize": rb.Quantize(bits=8),
    "robe": rb.research.ROBE(size=200, block=4),
    "row-rate": rb.research.RowRate(),
    "shared-sets": rb.research.SharedSets(num_sets=2),
    "shrinkage": rb.Shrinkage(),
    "tail": rb.Tail(),
    "tt-rec": rb.research.TTRec(rank=2),
}
OF_SETS = {"aligned-sets", "multi-embedding", "shared-sets"}


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_an_allowed_pair_trains_whatever_the_order(name, is_first):
    first, then = (TRANSFER, name) if is_first else (name, TRANSFER)
    assert compositions()[first, then] is None
    methods = (HarmlessTransfer(), SMALL[name]) if is_first else (SMALL[name], HarmlessTransfer())
    model = {"model": "dcn_v2", "model_settings": {"dim": 4, "hidden": (4,)}}
    _, history = train(*methods, **(model if name in OF_SETS else {}))
    ledger = history.reports[TRANSFER]
    assert {table.rpartition(".")[2] for table in ledger["tables"]} == LARGE
    assert all(table["rows"] > 0 for table in ledger["tables"].values())
    assert math.isfinite(ledger["main_loss"])


def test_all_pairs_are_tried():
    tried = {*SMALL, "pep", TRANSFER}
    neighbours = {"adam-ar", "forgetting", "frequency-decay", "fresh-tables", "group-stopping"}
    neighbours |= {"id-dropout"}
    neighbours |= {"darts-emb"}  # refused, see below
    names = {technique_name(technique_class(name)) for name in technique_names()}
    assert names - neighbours == tried


@pytest.mark.parametrize("other", [TRANSFER, "darts-emb"])
def test_a_refused_pair_is_told_why(other):
    words = compositions()[other, TRANSFER]
    with pytest.raises(SettingsError, match=f"{other}\\+{TRANSFER} is refused: {words}"):
        parse_techniques(f"{other}+{TRANSFER}")


def masked_but(*fields):
    """Return a method that leaves the first seven rows of some fields, and nothing of the others."""
    model = start_model(SETTINGS, TRAIN.schema, say=silence)
    kept = {
        info.name: torch.arange(info.rows).unsqueeze(1).expand(-1, info.width)
        < 7 * (info.field in fields)
        for info in rb.find_tables(model)
        if info.width > 1
    }
    return rb.pruning.Masked(rb.pruning.Ticket(kept))


@pytest.mark.filterwarnings("ignore:.* makes all rows")
def test_a_table_of_which_no_frequent_row_is_left_takes_no_part_and_is_told():
    _, history = train(masked_but("item"), HarmlessTransfer())
    assert tables_in(history) == {"backbone.tables.item"}
    left_out = history.reports[TRANSFER]["left_out"]
    assert set(left_out) == {f"backbone.tables.{name}" for name in LARGE - {"item"}}


@pytest.mark.filterwarnings("ignore:.* makes all rows")
def test_where_nothing_is_left_to_learn_from_the_run_is_a_plain_one():
    with pytest.warns(
        UserWarning, match=r"no frequent row is left in .*, so harmless-transfer has"
    ):
        model, history = train(masked_but(), HarmlessTransfer())
    assert_same_weights(model, train(masked_but())[0])
    report = history.reports[TRANSFER]
    assert (report["steps"], report["tables"], len(report["left_out"])) == (0, {}, len(LARGE))
