"""The ledger of a transfer for people: its figures, and what they mean."""

import pytest
import torch
from torch import nn

import rarebit as rb
from rarebit.diagnosis.report import Diagnosis
from rarebit.transfer.ledger import explain_ledger


def table(**changes):
    """What a ledger says of a table; nothing of it is suspicious."""
    values = {
        "rows": 1234,
        "steps": 10,
        "opposed": 0.25,
        "lambda": {"0": 0.5, "inf": 0.5},
        "not_finite": 0,
        "main_norm": 0.5,
        "transfer_norm": 1.0,
        "transfer_loss": -0.6931,
        "discriminator_accuracy": 0.8,
        "realised_kept": 0.125,
        "realised_over_promised": 0.666,
    }
    return values | changes


def tables_of(ledger):
    return [part for part in explain_ledger(ledger) if not isinstance(part, str)]


def notes_of(ledger):
    return [part for part in explain_ledger(ledger) if isinstance(part, str)]


def ledger(**tables):
    return {"steps": 1200, "main_loss": 0.45678, "tables": tables}


def test_figures_are_those_of_the_ledger():
    found = tables_of(ledger(**{"backbone.tables.user": table(), "item": table(rows=7)}))[0]
    assert dict(zip(found.header, found.rows[0], strict=True)) == {
        "table": "user",
        "rare": "1,234",
        "opposed": "25 %",
        "realised": "0.67",
        "met": "12 %",
        "strength": "2",
        "loss": "-0.693",
        "accuracy": "80 %",
    }
    assert found.rows[1][:2] == ["item", "7"]


def test_a_table_without_rare_rows_has_no_figures():
    nothing = dict.fromkeys(table(), None) | {"rows": 0, "not_finite": 0}
    [found] = tables_of(ledger(item=nothing))
    assert found.rows == [["item", "0", *["-"] * 6]]
    assert notes_of(ledger(item=nothing))[1:] == [
        "item: no batch had a rare row with a main gradient."
    ]


def test_bins_of_lambda_are_added_up():
    ends = ("0", "0.25", "0.5", "0.75", "0.999", "1.001", "1.5", "2", "5", "20", "100", "inf")
    spread = {end: 0.01 * (place + 1) for place, end in enumerate(ends)}
    [line] = tables_of(ledger(item=table(**{"lambda": spread})))[1].rows
    assert line == ["item", "1 %", "14 %", "6 %", "15 %", "42 %"]


def test_bins_are_those_of_a_real_ledger():
    model = nn.Sequential(nn.Embedding(200, 4), nn.Linear(4, 1))
    with rb.HarmlessTransfer().start(model, counts=torch.arange(200).flip(0)) as transfer:
        transfer.backward(model(torch.arange(100, 180)).square().mean())
    [line] = tables_of(transfer.ledger.read())[1].rows
    assert sum(float(cell.strip("<> %")) for cell in line[1:]) == pytest.approx(100, abs=3)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"discriminator_accuracy": 0.54}, "the discriminator is at chance"),
        ({"discriminator_accuracy": 0.46}, "the discriminator is at chance"),
        (
            {"transfer_norm": 0.004},
            "the transfer gradient is negligible compared with the main one",
        ),
        ({"not_finite": 1500}, "1,500 rows had a non-finite transfer gradient"),
    ],
)
def test_what_is_suspicious_is_said_of_its_table(changes, note):
    first, *notes = notes_of(ledger(user=table(), item=table(**changes)))
    assert first == "1,200 transfer steps, mean main loss 0.4568."
    assert len(notes) == 1
    assert notes[0].startswith(f"item: {note}")


def test_tables_that_took_no_part_are_told():
    said = notes_of(ledger(user=table()) | {"left_out": ["backbone.tables.item"]})
    assert said[1:] == ["item: skipped, because it has no frequent rows to learn from."]


@pytest.mark.parametrize(
    "changes",
    [{"discriminator_accuracy": None}, {"discriminator_accuracy": 0.56}, {"transfer_norm": 0.006}],
)
def test_what_is_not_suspicious_is_not(changes):
    assert len(notes_of(ledger(item=table(**changes)))) == 1


def test_a_diagnosis_tells_and_keeps_the_ledger():
    reports = {"harmless-transfer": ledger(item=table())}
    told = Diagnosis(tables=(), reports=reports)
    for words in ("Harmless transfer", "Lambda: ", "1,234", "1,200 transfer steps"):
        assert words in str(told)
    assert told.to_mapping()["reports"] == reports
    assert "reports" not in Diagnosis(tables=()).to_mapping()
    assert "Harmless" not in str(Diagnosis(tables=()))
