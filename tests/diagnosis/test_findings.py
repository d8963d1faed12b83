"""What is said about tables: when, in which words, in which order."""

import re

import pytest
import torch
from torch import nn

import rarebit as rb
from rarebit.diagnosis.diagnose import diagnose
from rarebit.diagnosis.report import find_waste
from rarebit.technique import technique_class, technique_names

OFTEN = {"user": torch.full((400,), 50)}


def model_of(weight, name="user"):
    return nn.ModuleDict({name: nn.Embedding.from_pretrained(weight, freeze=False)})


def finding_of(weight, counts=None):
    [finding] = diagnose(model_of(weight), counts=counts).findings
    return finding


def test_nothing_is_found_in_a_random_table_and_that_is_said():
    found = diagnose(model_of(torch.randn(400, 8)), counts=OFTEN)
    assert found.findings == ()
    assert "No problem found" in str(found)


def test_a_collapsed_table_could_be_narrower():
    weight = torch.randn(400, 2) @ torch.randn(2, 8)
    finding = finding_of(weight)
    assert finding.kind == "collapsed"
    assert finding.wasted_bytes == 400 * 8 * 4 * 6 // 8
    assert "2 of 8 directions hold 99 %" in finding.problem
    assert "LowRank(rank=2), or a width of 2" in finding.advice
    rb.apply_(model_of(weight), rb.LowRank(rank=2), verbose=False)  # what is advised can be done


def test_a_table_with_one_long_direction_is_not_said_to_be_wasted():
    weight = torch.randn(400, 8)
    weight[:, 0] *= 4
    weight[:, 1] *= 0.2
    found = diagnose(model_of(weight), counts=OFTEN)
    assert found.tables[0].abundance_ratio < 0.5
    assert found.tables[0].directions == 7
    assert found.findings == ()
    table = found.tables[0]
    figures = f"IA {table.information_abundance:.1f} of {table.random_abundance:.1f}"
    reason = "one direction outweighs the others, but they are in use"
    assert found.excused == (f"Collapsed but no problem: {reason}: user ({figures}).",)


@pytest.mark.parametrize(
    ("never", "once", "words", "advice"),
    [
        (300, 0, "of 400 rows, 300 were never trained, 9.6 kB of 12.8 kB", "training rows only"),
        (0, 300, "of 400 rows, 300 were seen once in training, 9.6 kB", "min_count = 2"),
        (100, 200, "100 were never trained and 200 were seen once in training", "min_count = 2"),
        (
            200,
            100,
            "200 were never trained and 100",
            "min_count = 2 when the log is prepared, or ids",
        ),
    ],
)
def test_rows_that_are_rare_could_share(never, once, words, advice):
    counts = torch.full((400,), 50)
    counts[:never], counts[never : never + once] = 0, 1
    finding = finding_of(torch.randn(400, 8), {"user": counts})
    assert finding.kind == "rare"
    assert words in finding.problem
    assert advice in finding.advice
    assert finding.wasted_bytes == (never + once) * 32
    assert f"Hashing(buckets={200})" in finding.advice


@pytest.mark.parametrize(("rare", "found"), [(133, 0), (134, 1)])
def test_a_third_of_the_rows_is_many(rare, found):
    counts = torch.full((400,), 50)
    counts[:rare] = 1
    findings = diagnose(model_of(torch.randn(400, 8)), counts={"user": counts}).findings
    assert len(findings) == found


def test_hashing_is_not_advised_where_it_saves_little():
    counts = torch.full((400,), 50)
    counts[:150] = 0
    finding = finding_of(torch.randn(400, 8), {"user": counts})
    assert finding.advice == "Try ids that are made from the training rows only"


@pytest.mark.parametrize(("dead", "found"), [(19, 0), (20, 1), (400, 1)])
def test_dead_rows_are_told_from_a_twentieth_on(dead, found):
    weight = torch.randn(400, 8)
    weight[:dead] *= 0.0
    findings = diagnose(model_of(weight), counts=OFTEN).findings
    assert [finding.kind for finding in findings] == ["dead"] * found
    if found:
        assert f"{dead} of 400 rows" in findings[0].problem
        assert 'tables="rowwise", or with table_weight_decay=0' in findings[0].advice


def test_weight_decay_is_what_kills_rows():
    model = nn.Sequential(nn.Embedding(200, 4), nn.Flatten(), nn.Linear(4, 1))
    nn.init.normal_(model[0].weight, std=0.03)
    optimizer = rb.optimizer(model, weight_decay=1e-5)
    for _ in range(300):
        optimizer.zero_grad()
        (model(torch.arange(100).unsqueeze(1)) - 1).square().sum().backward()
        optimizer.step()
    assert diagnose(model).tables[0].dead_rows == 100


def test_numbers_that_are_not_finite_come_first():
    weight = torch.randn(400, 2) @ torch.randn(2, 8)
    model = nn.ModuleDict(
        {
            "large": nn.Embedding.from_pretrained(weight),
            "bad": nn.Embedding.from_pretrained(torch.full((3, 2), float("nan"))),
        }
    )
    first, second = diagnose(model).findings
    assert (first.table, first.kind, second.table) == ("bad", "not finite", "large")
    assert "3 of 3 rows hold NaN or infinite numbers" in first.problem
    assert "lr" in first.advice
    assert "clip_norm" in first.advice


def test_the_most_bytes_come_first_and_little_is_left_out():
    def collapsed(rows):
        return nn.Embedding.from_pretrained(torch.randn(rows, 1) @ torch.randn(1, 8))

    model = nn.ModuleDict(
        {"b": collapsed(100), "a": collapsed(1000), "c": collapsed(9), "d": collapsed(200)}
    )
    assert [finding.table for finding in diagnose(model).findings] == ["a", "d", "b"]


def test_what_a_method_did_on_purpose_is_not_told():
    model = model_of(torch.randn(400, 8))
    rb.apply_(model, rb.LowRank(rank=1), verbose=False)
    found = diagnose(model, counts={"user": torch.zeros(400, dtype=torch.int64)})
    assert found.tables[0].abundance_ratio < 0.2
    assert found.findings == ()
    collapsed, rare = found.excused
    reason = "a method makes the table smaller on purpose: user"
    assert collapsed.startswith(f"Collapsed but no problem: {reason} (IA ")
    assert rare.startswith(f"Rare but no problem: {reason}")


def test_dead_rows_of_a_small_or_pruned_table_are_explained():
    large, small = torch.randn(400, 8), torch.randn(9, 4)
    large[:244], small[:5] = 0, 0
    model = nn.ModuleDict(
        {
            name: nn.Embedding.from_pretrained(weight)
            for name, weight in (("user", large), ("os", small))
        }
    )
    rb.apply_(model, rb.pruning.Masked(), where=lambda table: table.name == "user", verbose=False)
    found = diagnose(model)
    assert found.findings == ()
    assert found.excused == (
        "Dead but no problem: a method sets entries to zero on purpose: user (61 %).",
        "Dead but no problem: less than 1 % of the bytes of all tables could be saved: os (56 %).",
    )
    assert all(note in str(found) for note in found.excused)
    assert found.to_mapping()["excused"] == list(found.excused)


def test_many_tables_are_named_in_one_note():
    tables = {f"t{n}": nn.Embedding.from_pretrained(torch.zeros(3, 2)) for n in range(9)}
    found = diagnose(nn.ModuleDict({"large": nn.Embedding(5000, 8), **tables}))
    [note] = found.excused
    assert note.endswith("t4 (100 %), t5 (100 %) and 3 more.")


def test_the_thresholds_are_stated_with_the_figures():
    counts = {"user": torch.randint(2, (400,))}
    words = str(diagnose(model_of(torch.randn(400, 8)), counts=counts))
    assert "a table has collapsed below 50 % of random" in words
    assert "a problem from 5 % on" in words
    assert "seen once make 33 % of the rows" in words


@pytest.mark.parametrize("with_table", [True, False])
def test_first_order_weights_say_it_only_where_no_table_of_the_field_does(with_table):
    parts = {"wide": nn.ModuleDict({"user": nn.Embedding(400, 1)})}
    if with_table:
        parts["deep"] = nn.ModuleDict({"user": nn.Embedding(400, 8)})
    rare = {"user": torch.ones(400, dtype=torch.int64)}
    findings = diagnose(nn.ModuleDict(parts), counts=rare).findings
    assert [f.table for f in findings] == ["deep.user" if with_table else "wide.user"]


def test_advice_names_what_the_library_has():
    torch.manual_seed(0)
    counts = torch.ones(400, dtype=torch.int64)
    collapsed = diagnose(model_of(torch.randn(400, 1) @ torch.randn(1, 8)), counts={"user": counts})
    advice = " ".join(finding.advice for finding in collapsed.findings)
    classes = {technique_class(name).__name__ for name in technique_names()}
    named = set(re.findall(r"([A-Z]\w+)\(", advice))
    assert named
    assert named <= classes
    assert {"tables", "table_weight_decay", "clip_norm", "lr"} <= set(
        rb.Training.__dataclass_fields__
    )
    assert "min_count" in rb.data.Column.__dataclass_fields__


def test_a_finding_names_its_table_first():
    finding = finding_of(torch.randn(400, 2) @ torch.randn(2, 8))
    assert str(finding).startswith("user: its spectrum has collapsed")


def test_no_tables_have_no_findings():
    assert find_waste([]) == ((), ())


def test_rows_that_are_zero_on_purpose_are_no_waste():
    model = nn.Sequential(nn.Embedding(400, 8))
    with torch.no_grad():
        model[0].weight[:300] = 0.0
    assert "dead" in [finding.kind for finding in diagnose(model).findings]
    rb.apply_(model, rb.pruning.Masked(), verbose=False)
    assert [finding.kind for finding in diagnose(model).findings] == []
    rb.pack_(model, verbose=False)
    assert [finding.kind for finding in diagnose(model).findings] == []
