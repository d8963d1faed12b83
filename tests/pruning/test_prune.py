"""Pruning and training again: what tickets hold, where they start, what stays zero."""

import copy
import json
import os
import signal
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from watching import Watch

import rarebit as rb
from rarebit.errors import CheckpointError, SettingsError, TrainingError, TrainingInterrupted
from rarebit.models.deepfm import DeepFM
from rarebit.pruning.pep import count_nonzero, thresholded_tables
from rarebit.pruning.pruned import TicketFolder, read_scans
from rarebit.tables.table import full_table
from rarebit.training.fit import Silence

FIELDS = (
    rb.data.Field(name="user", rows=40),
    rb.data.Field(name="tags", kind="multi", rows=9, max_length=3),
    rb.data.Field(name="item", rows=12),
)
SCHEMA = rb.data.Schema(FIELDS)
NAMES = [f"backbone.tables.{field.name}" for field in FIELDS]
WIDTH, TOTAL = 4, (40 + 9 + 12) * 4
SEEN = 25
"""Users below this one are in the log; the others are never seen."""
SHORT = {"epochs": 2, "batch_size": 32, "lr": 0.02}
STEPS = 2 * 8


def log(rows: int = 256, seed: int = 3) -> rb.Dataset:
    chance = torch.Generator().manual_seed(seed)
    users = torch.randint(SEEN, (rows, 1), generator=chance)
    tags = torch.randint(9, (rows, 3), generator=chance)
    items = torch.randint(12, (rows, 1), generator=chance)
    noise = torch.rand(rows, generator=chance) < 0.2
    label = ((users + items).squeeze(1) % 2 == 0) ^ noise
    return rb.Dataset(SCHEMA, torch.cat([users, tags, items], dim=1), label=label)


TRAIN, VALID = log(), log(96, seed=4)


def build() -> DeepFM:
    torch.manual_seed(5)
    return DeepFM(SCHEMA, dim=WIDTH, hidden=(6,), dropout=0.1)


def first_values() -> dict[str, Tensor]:
    tables = build().backbone.tables.tables()
    return {name: full_table(table).clone() for name, table in zip(NAMES, tables, strict=True)}


def pruned(folder=None, *, model: nn.Module | None = None, **options):
    """Prune the small model; return it and what came out."""
    model = build() if model is None else model
    torch.manual_seed(6)
    options = {"budgets": [100, 30], "progress": False} | SHORT | options
    return model, rb.pruning.prune(model, TRAIN, folder=folder, **options)


def learning() -> DeepFM:
    model = build()
    rb.apply_(model, rb.PEP(granularity="dimension", init=-5.0), verbose=False)
    return model


# thresholds that rise by their weight decay fast enough for a short test
FAST = {"threshold_weight_decay": 1.0, "table_weight_decay": 0.05, "table_lr": 0.05}
FAST |= {"epochs": 6, "every": 1}


def assert_same_tickets(found, expected) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        for part in ("kept", "start", "levels"):
            mine, theirs = getattr(one, part), getattr(other, part)
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[name], theirs[name]) for name in mine)
        assert one.facts == other.facts


def assert_same_weights(model: nn.Module, expected: nn.Module) -> None:
    found = model.state_dict()
    assert all(torch.equal(found[name], value) for name, value in expected.state_dict().items())


def test_tickets_are_what_is_not_zero_when_a_budget_is_met():
    model, found = pruned(every=1)
    assert [ticket.facts["budget"] for ticket in found.tickets] == [100, 30]
    assert [ticket.num_kept for ticket in found.tickets] == [100, 30]
    assert found.tickets[1].facts["step"] == STEPS
    assert count_nonzero(model) == 30
    for name, table in thresholded_tables(model).items():
        assert torch.equal(full_table(table) != 0, found.tickets[1].kept[name])
    assert list(found.tickets[0].kept) == NAMES


def test_a_ticket_on_the_way_is_that_of_a_training_that_ends_there():
    _, found = pruned(every=1)
    at = found.tickets[0].facts["step"]
    assert 1 < at < STEPS
    model = build()
    rb.apply_(model, rb.PEP(schedule="given"), verbose=False)
    pruner = rb.pruning.Pruner(model, [100, 30], steps=STEPS, every=1)
    torch.manual_seed(6)

    def until_there(step: int) -> bool:
        pruner.after_step(step)
        return step == at

    options = SHORT | {"tables": "rowwise", "patience": None}
    rb.fit(model, TRAIN, callbacks=[Watch(until_there)], progress=False, **options)
    for name, table in thresholded_tables(model).items():
        row = full_table(table.inner).abs() > found.tickets[0].facts["threshold"]
        assert torch.equal(row, found.tickets[0].kept[name])


def test_all_first_values_are_those_before_training():
    _, found = pruned()
    for ticket in found.tickets:
        assert list(ticket.start) == NAMES
        for name, values in first_values().items():
            assert torch.equal(ticket.start[name], values)


def test_of_learned_thresholds_the_first_values_are_those_that_were_not_cut():
    model, found = pruned(model=learning(), **FAST)
    for name, values in first_values().items():
        assert torch.equal(found.tickets[0].start[name], values)
    assert found.tickets[0].levels[NAMES[0]].shape == (WIDTH,)
    assert [ticket.facts["budget"] for ticket in found.tickets] == [100, 30]
    assert all(0 < ticket.num_kept <= ticket.facts["budget"] for ticket in found.tickets)
    assert count_nonzero(model) == found.tickets[1].num_kept
    assert found.history.stopped_early


def test_learned_tickets_are_taken_at_the_first_look_with_so_few():
    _, found = pruned(model=learning(), **FAST)
    for ticket in found.tickets:
        met = [s["step"] for s in found.scans if s["kept"] <= ticket.facts["budget"]]
        assert ticket.facts["step"] == met[0]
        [scan] = [s for s in found.scans if s["step"] == met[0]]
        assert ticket.num_kept == scan["kept"]
    assert found.scans[-1]["step"] == found.tickets[-1].facts["step"]


@pytest.mark.parametrize(("decoupled", "decay"), [(False, 0.5), (True, 50.0)])
def test_rows_never_seen_keep_their_first_values_by_rows_and_vanish_otherwise(decoupled, decay):
    never = first_values()[NAMES[0]][SEEN:]
    options = {"weight_decay": decay, "decoupled": decoupled, "epochs": 12, "lr": 1e-3}
    model, _ = pruned(**options)
    by_rows = thresholded_tables(model)[NAMES[0]].inner
    assert torch.equal(full_table(by_rows)[SEEN:], never)
    model, _ = pruned(tables="dense", **options)
    densely = thresholded_tables(model)[NAMES[0]].inner
    assert full_table(densely)[SEEN:].abs().mean() < 0.2 * never.abs().mean()


def test_a_ticket_says_what_it_is_worth_before_it_is_trained_again():
    model = build()
    torch.manual_seed(6)
    found = rb.pruning.prune(model, TRAIN, VALID, budgets=[100, 30], progress=False, **SHORT)
    assert found.tickets[1].facts["valid_auc"] == rb.evaluate(model, VALID).auc
    assert found.tickets[0].facts["valid_auc"] != found.tickets[1].facts["valid_auc"]
    _, without = pruned()
    assert "valid_auc" not in without.tickets[0].facts
    # measuring changes nothing
    for one, other in zip(found.tickets, without.tickets, strict=True):
        assert all(torch.equal(one.kept[name], other.kept[name]) for name in NAMES)


def test_training_does_not_stop_before_the_budget_is_met():
    _, found = pruned(patience=1, epochs=5)
    assert len(found.history.epochs) == 5
    assert not found.history.stopped_early
    assert found.history.best_epoch is None


def test_scans_are_every_look_with_what_is_left_by_frequency():
    _, found = pruned(every=3)
    assert [scan["step"] for scan in found.scans] == [3, 6, 9, 12, 15, 16]
    kept = [scan["kept"] for scan in found.scans]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] == 30
    shares = [scan["by_frequency"] for scan in found.scans]
    assert all(0 <= share <= 1 for scan in shares for share in scan)
    # rows never seen are the first group: the 15 users, as the other fields are all seen
    kept_of_never = int(found.tickets[1].kept[NAMES[0]][SEEN:].sum())
    assert shares[-1][0] == kept_of_never / (15 * WIDTH)


class Lines(Silence):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def test_progress_tells_what_is_left_and_the_next_budget():
    lines = Lines()
    pruned(every=1, progress=lines)
    told = [line for line in lines.lines if "entries left" in line]
    assert told[0].endswith("next budget 100")
    assert told[-1].startswith("step ")
    left = [int(line.split(": ")[1].split(" entries")[0]) for line in told]
    assert all(later <= 0.8 * earlier for earlier, later in pairwise(left))
    middle = [line for line, entries in zip(told, left, strict=True) if 30 < entries <= 100]
    assert middle
    assert all(line.endswith("next budget 30") for line in middle)
    assert any(line.startswith("PEP(schedule='given'): 3 of 6 tables") for line in lines.lines)


def test_all_budgets_met_is_told():
    lines = Lines()
    pruned(budgets=[100], every=16, progress=lines)
    assert f"step {STEPS}: 100 entries left, all budgets met" in lines.lines


def test_resumed_it_is_not_told_again_which_tables_are_cut(tmp_path):
    with pytest.raises(TrainingInterrupted):
        pruned(tmp_path, model=stopping(build(), 3))
    lines = Lines()
    pruned(tmp_path, resume=True, progress=lines)
    assert any(line.startswith("resumed from ") for line in lines.lines)
    assert not any(line.startswith("PEP(") for line in lines.lines)


def test_with_a_folder_all_of_it_is_there_and_the_same(tmp_path):
    model, found = pruned(tmp_path / "here")
    twin, expected = pruned()
    assert_same_tickets(found.tickets, expected.tickets)
    assert_same_weights(model, twin)
    assert found.scans == expected.scans == tuple(read_scans(tmp_path / "here"))
    kept = TicketFolder(tmp_path / "here" / "tickets")
    assert (list(kept), len(kept)) == ([30, 100], 2)
    assert_same_tickets([kept[100].with_start(expected.tickets[0].start)], expected.tickets[:1])
    start = rb.pruning.load_ticket(tmp_path / "here" / "start")
    assert start.num_kept == TOTAL
    assert all(torch.equal(start.start[name], value) for name, value in first_values().items())
    names = {path.name for path in (tmp_path / "here").iterdir()}
    assert names == {"checkpoints", "start", "tickets", "scans.jsonl"}


def test_tickets_are_stored_in_a_folder(tmp_path):
    tickets = TicketFolder(tmp_path / "tickets")
    assert tickets == {}
    tickets[50] = rb.pruning.Ticket({"user": torch.eye(3).bool()})
    tickets[9] = rb.pruning.Ticket({"user": torch.eye(2).bool()})
    (tmp_path / "tickets" / "5").mkdir()  # a process that was killed while it wrote
    (tmp_path / "tickets" / "notes").mkdir()
    (tmp_path / "tickets" / "notes" / "ticket.json").touch()
    again = TicketFolder(tmp_path / "tickets")
    assert {n: ticket.num_kept for n, ticket in again.items()} == {9: 2, 50: 3}
    assert {n: ticket.num_kept for n, ticket in tickets.items()} == {9: 2, 50: 3}


@pytest.mark.parametrize("resume", [False, True])
def test_a_used_folder_is_refused_or_gone_on_with(tmp_path, resume):
    _, first = pruned(tmp_path)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    if not resume:
        with pytest.raises(CheckpointError, match="holds a pruning already; resume it with"):
            pruned(tmp_path)
    else:
        model, again = pruned(tmp_path, resume=True)
        assert_same_tickets(again.tickets, first.tickets)
        assert again.scans == first.scans
        assert count_nonzero(model) == 30
    assert sorted(path.name for path in tmp_path.rglob("*")) == before


def test_an_empty_folder_is_as_good_as_none(tmp_path):
    (tmp_path / "here").mkdir()
    _, found = pruned(tmp_path / "here")
    assert len(found.tickets) == 2


class StopAt:
    """Sends a signal to this process while it makes a certain step."""

    def __init__(self, step: int) -> None:
        self.step, self.made = step, 0

    def __call__(self, module, inputs) -> None:
        if module.training:
            self.made += 1
            if self.made == self.step:
                os.kill(os.getpid(), signal.SIGTERM)


def stopping(model: nn.Module, step: int) -> nn.Module:
    model.register_forward_pre_hook(StopAt(step))
    return model


@pytest.mark.parametrize("step", [1, 5, 8, 9, STEPS - 1])
@pytest.mark.parametrize("thresholds", ["scheduled", "learned"])
def test_a_pruning_that_was_stopped_goes_on_to_the_same_bits(tmp_path, thresholds, step):
    make, options = (build, {"every": 2}) if thresholds == "scheduled" else (learning, FAST)
    model, expected = pruned(tmp_path / "whole", model=make(), **options)
    with pytest.raises(TrainingInterrupted):
        pruned(tmp_path / "stopped", model=stopping(make(), step), **options)
    twin, found = pruned(tmp_path / "stopped", model=make(), resume=True, **options)
    assert_same_tickets(found.tickets, expected.tickets)
    assert found.scans == expected.scans
    assert_same_weights(twin, model)


def test_resuming_starts_from_the_values_that_were_saved_not_from_those_of_the_model(tmp_path):
    with pytest.raises(TrainingInterrupted):
        pruned(tmp_path, model=stopping(build(), 3))
    other = build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    _, found = pruned(tmp_path, model=other, resume=True)
    for name, values in first_values().items():
        assert torch.equal(found.tickets[0].start[name], values)


def test_a_process_killed_while_it_saved_the_first_values_is_gone_on_with(tmp_path):
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / ".tensors.7.writing").write_bytes(b"half")
    _, found = pruned(tmp_path, resume=True)
    _, expected = pruned()
    assert_same_tickets(found.tickets, expected.tickets)


def test_a_line_that_was_half_written_costs_no_other(tmp_path):
    with pytest.raises(TrainingInterrupted):
        pruned(tmp_path, model=stopping(build(), 8), every=2)
    scans = tmp_path / "scans.jsonl"
    lines = scans.read_text().splitlines()
    scans.write_text("\n".join(lines) + '\n{"step": 10, "ke')
    _, found = pruned(tmp_path, resume=True, every=2)
    _, expected = pruned(every=2)
    assert found.scans == expected.scans


def test_a_step_made_again_counts_once_and_scans_are_in_order(tmp_path):
    lines = [{"step": 4, "kept": 9}, {"step": 2, "kept": 20}, {"step": 4, "kept": 8}]
    text = "\n".join(json.dumps(line) for line in lines)
    (tmp_path / "scans.jsonl").write_text(text + '\n{"step": 6, ')
    assert read_scans(tmp_path) == [{"step": 2, "kept": 20}, {"step": 4, "kept": 8}]
    assert read_scans(tmp_path / "nowhere") == []


def test_learned_thresholds_that_do_not_get_there_are_told_and_go_on(tmp_path):
    slow = FAST | {"epochs": 1}
    with pytest.raises(TrainingError, match="have not met the budget of 30 entries in 1 epochs"):
        pruned(tmp_path, model=learning(), budgets=[170, 30], **slow)
    assert list(TicketFolder(tmp_path / "tickets")) == [170]
    options = FAST | {"epochs": 6, "budgets": [170, 30]}
    twin, found = pruned(tmp_path, model=learning(), resume=True, **options)
    model, expected = pruned(model=learning(), **options)
    assert_same_tickets(found.tickets, expected.tickets)
    assert found.scans == expected.scans
    assert_same_weights(twin, model)


def test_what_makes_no_sense_is_refused(tmp_path):
    with pytest.raises(SettingsError, match="resume=True needs the folder of the pruning"):
        pruned(resume=True)
    with pytest.raises(SettingsError, match=f"a budget must be below the {TOTAL} entries"):
        pruned(budgets=[TOTAL])
    with pytest.raises(SettingsError, match="every must be at least 1 step"):
        pruned(every=0)


def test_a_pruned_model_goes_on_being_cut_after_pruning():
    model, found = pruned()
    rb.merge_(model, verbose=False)
    for name, table in zip(NAMES, model.backbone.tables.tables(), strict=True):
        assert torch.equal(table.weight != 0, found.tickets[1].kept[name])


# training again


@pytest.fixture(scope="module")
def ticket() -> rb.pruning.Ticket:
    return pruned()[1].tickets[1]


def named_tables(model: DeepFM) -> dict[str, nn.Module]:
    return dict(zip(NAMES, model.backbone.tables.tables(), strict=True))


OPTIMIZERS = {
    "Adam": {"optimizer": "adam", "weight_decay": 0.1},
    "AdamW": {"optimizer": "adam", "weight_decay": 0.1, "decoupled": True},
    "SGD": {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1},
    "Adagrad": {"optimizer": "adagrad", "weight_decay": 0.1},
    "averaged": {"optimizer": "adam", "ema_decay": 0.9},
}


@pytest.mark.parametrize("tables", ["dense", "rowwise"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_what_was_cut_stays_exactly_zero(ticket, optimizer, tables):
    # momentum by rows is refused by the optimizer, decay decoupled is for Adam alone
    options = dict(optimizer)
    if tables == "rowwise":
        options.pop("momentum", None)
    looked = []

    def build_watched() -> DeepFM:
        model = build()
        looked.append(model)
        return model

    model, history = rb.pruning.retrain(
        build_watched, ticket, TRAIN, VALID, tables=tables, progress=False, **SHORT, **options
    )
    assert looked == [model]
    assert len(history.epochs) == 2
    for name, table in named_tables(model).items():
        assert not bool(full_table(table)[~ticket.kept[name]].any())
        moved = full_table(table) != ticket.start[name]
        assert bool(moved[ticket.kept[name]].any())
    rb.merge_(model, verbose=False)
    for name, table in named_tables(model).items():
        assert type(table) is nn.Embedding
        assert not bool(table.weight[~ticket.kept[name]].any())


def before_training(start: str, ticket: rb.pruning.Ticket) -> DeepFM:
    """Return the model as training finds it: what a step without learning leaves."""
    model, _ = rb.pruning.retrain(
        build, ticket, TRAIN, start=start, epochs=1, optimizer="sgd", lr=1e-300, progress=False
    )
    return model


def test_survivors_start_from_the_ticket_and_all_else_from_the_model(ticket):
    other = {name: torch.randn_like(values) for name, values in ticket.start.items()}
    model, plain = before_training("ticket", ticket.with_start(other)), build()
    for name, table in named_tables(model).items():
        expected = torch.where(ticket.kept[name], other[name], 0.0)
        if table.padding_idx is not None:
            expected[table.padding_idx] = 0.0
        assert torch.equal(full_table(table), expected)
    tables = tuple(f"{name}." for name in NAMES)
    rest = [n for n, _ in plain.named_parameters() if not n.startswith("backbone.tables")]
    assert len(rest) > 4
    for name in rest:
        assert not name.startswith(tables)
        assert torch.equal(model.state_dict()[name], plain.state_dict()[name])


def test_survivors_start_from_the_model_where_that_is_wanted(ticket):
    other = {name: torch.randn_like(values) for name, values in ticket.start.items()}
    drawn = first_values()
    for given in (ticket.with_start(other), ticket.with_start(None)):
        for name, table in named_tables(before_training("build", given)).items():
            assert torch.equal(full_table(table), torch.where(given.kept[name], drawn[name], 0.0))


def test_a_winning_ticket_is_not_changed_by_training(ticket):
    before = copy.deepcopy(ticket)
    rb.pruning.retrain(build, ticket, TRAIN, progress=False, **SHORT)
    assert_same_tickets([ticket], [before])


def test_training_again_is_what_a_loop_of_ones_own_does(ticket):
    torch.manual_seed(7)
    found, _ = rb.pruning.retrain(build, ticket, TRAIN, VALID, progress=False, **SHORT)
    model = build()
    rb.apply_(
        model, rb.pruning.Masked(ticket), where=lambda t: t.name in ticket.kept, verbose=False
    )
    rb.fit(model, TRAIN, VALID, progress=False, **SHORT)
    assert_same_weights(found, model)


def test_training_again_goes_on_where_it_was_stopped(ticket, tmp_path):
    whole, history = rb.pruning.retrain(build, ticket, TRAIN, VALID, progress=False, **SHORT)
    options = SHORT | {"folder": tmp_path, "progress": False}
    with pytest.raises(TrainingInterrupted):
        rb.pruning.retrain(lambda: stopping(build(), 11), ticket, TRAIN, VALID, **options)
    again, resumed = rb.pruning.retrain(build, ticket, TRAIN, VALID, resume=True, **options)
    assert_same_weights(again, whole)
    assert resumed.best_epoch == history.best_epoch


def test_a_start_that_is_none_is_refused(ticket):
    with pytest.raises(
        SettingsError, match="start must be 'ticket' or 'build', got start='random'"
    ):
        rb.pruning.retrain(build, ticket, TRAIN, start="random")
    with pytest.raises(SettingsError, match="the ticket has no initial values to start from"):
        rb.pruning.retrain(build, ticket.with_start(None), TRAIN)


def test_a_budget_that_a_schedule_went_past_is_told(tmp_path):
    rb.pruning.prune(build(), TRAIN, budgets=[60], epochs=2, folder=tmp_path / "p", progress=False)
    with pytest.raises(
        TrainingError, match=r"has passed the budget of 90 entries, .* prune in another folder"
    ):
        rb.pruning.prune(
            build(),
            TRAIN,
            budgets=[90],
            epochs=2,
            folder=tmp_path / "p",
            resume=True,
            progress=False,
        )
