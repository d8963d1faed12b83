"""One command for several budgets: what is asked for, what is shared, what is left in the folder."""

import json
import os
import signal

import pytest
import torch
from capabilities import slow_after
from hypothesis import given, settings
from hypothesis import strategies as st

import rarebit as rb
from rarebit.errors import ModelFileError, SettingsError, TrainingInterrupted
from rarebit.pruning.pruned import (
    PruneSettings,
    TicketFolder,
    explain_pruning,
    prune_run,
    read_prune,
    read_scans,
)
from rarebit.tables.table import full_table
from rarebit.training.fit import Silence
from rarebit.training.settings import RunSettings, load_splits

LOG = rb.data.SyntheticLog(rows=1200)
TABLE_ROWS = 12_003 + 2503 + 303 + 43 + 103 + 8 + 27 + 103
WIDTH = 4
TOTAL = TABLE_ROWS * WIDTH


def settings_of(*methods: rb.Method, **training) -> RunSettings:
    options = {"epochs": 2, "batch_size": 128, "lr": 0.02} | training
    return RunSettings(
        model="fm",
        model_settings={"dim": WIDTH},
        data=LOG,
        training=rb.Training(**options),
        methods=methods,
    )


def silence(line: str) -> None:
    del line


def pruned(folder, pruning: PruneSettings, *methods: rb.Method, **options):
    options = {"progress": False, "say": silence} | options
    return prune_run(settings_of(*methods), pruning, folder=folder, **options)


def left(model) -> int:
    return sum(int((full_table(t) != 0).sum()) for t in model.backbone.tables.tables())


def wide_bytes(model) -> int:
    return sum(info.num_bytes for info in rb.find_tables(model) if info.width > 1)


def assert_same_runs(found, expected) -> None:
    assert list(found.pruned) == list(expected.pruned)
    pairs = [(found.unpruned, expected.unpruned)]
    pairs += [(found.pruned[budget], expected.pruned[budget]) for budget in found.pruned]
    for one, other in pairs:
        assert one.test == other.test
        weights = other.model.state_dict()
        assert all(torch.equal(value, weights[n]) for n, value in one.model.state_dict().items())


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A pruning to two budgets, made once."""
    folder = tmp_path_factory.mktemp("two")
    said: list[str] = []
    return pruned(folder, PruneSettings(budgets=(500, 3000, 500)), say=said.append), said


def test_two_budgets_share_the_first_stage(two):
    result, said = two
    assert list(result.pruned) == [3000, 500]
    assert {budget: left(found.model) for budget, found in result.pruned.items()} == {
        3000: 3000,
        500: 500,
    }
    assert {path.name for path in result.folder.iterdir()} == {
        "lock", "prune.json", "pruning", "unpruned", "3000", "500",
    }  # fmt: skip
    for budget in result.pruned:
        assert not (result.folder / str(budget) / "pruning").exists()
        assert (
            rb.pruning.load_ticket(result.folder / "pruning" / "tickets" / str(budget)).num_kept
            == budget
        )
    assert [line for line in said if line in {"3000:", "500:", "unpruned:"}] == [
        "3000:", "500:", "unpruned:",
    ]  # fmt: skip
    assert result.entries == TOTAL
    assert sum(info.rows for info in result.tables) == TABLE_ROWS


def test_the_unpruned_run_is_the_run_without_pruning(two):
    result, _ = two
    plain = rb.run(settings_of(), progress=False, say=silence)
    assert result.unpruned.test == plain.test
    assert left(result.unpruned.model) > 0.9 * TOTAL


def test_what_came_out_is_written_down_and_asked_again(two):
    result, _ = two
    stored = json.loads((result.folder / "prune.json").read_text("utf-8"))
    assert stored["result"]["entries"] == TOTAL
    assert list(stored["result"]["budgets"]) == ["3000", "500"]
    for budget, found in result.pruned.items():
        figures = stored["result"]["budgets"][str(budget)]
        assert figures["test"]["overall"]["auc"] == found.test.overall.auc
        assert figures["table_bytes"] == found.table_bytes
        assert figures["best_epoch"] == found.history.best_epoch
        loaded = rb.load_model(result.folder / str(budget))
        assert rb.evaluate(loaded, load_splits(LOG).test).overall == found.test.overall
    assert stored["result"]["unpruned"]["num_parameters"] == result.unpruned.num_parameters
    settings, pruning = read_prune(result.folder)
    assert settings == settings_of()
    assert pruning == PruneSettings(budgets=(500, 3000, 500))


def test_a_used_folder_is_refused_and_left_alone(two):
    result, _ = two
    before = (result.folder / "prune.json").read_bytes()
    with pytest.raises(ModelFileError, match="holds a pruning already; resume it"):
        pruned(result.folder, PruneSettings(budgets=(77,)))
    assert (result.folder / "prune.json").read_bytes() == before
    assert not (result.folder / "77").exists()


def test_resumed_when_all_is_done_it_gives_the_same(two):
    result, _ = two
    again = pruned(result.folder, PruneSettings(budgets=(3000, 500)), resume=True)
    assert_same_runs(again, result)


class StopAt(Silence):
    """Sends a signal to this process when so many epochs have begun."""

    def __init__(self, begun: int) -> None:
        self.left = begun

    def start_epoch(self, epoch: int, epochs: int, rows: int) -> None:
        del epoch, epochs, rows
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)


# two epochs of pruning, two of each budget, two of the unpruned model
@pytest.mark.parametrize("begun", slow_after([3, 1, 5, 8]))
def test_stopped_anywhere_it_goes_on_to_the_same_bits(tmp_path, two, begun):
    pruning = PruneSettings(budgets=(500, 3000, 500))
    with pytest.raises(TrainingInterrupted):
        pruned(tmp_path, pruning, progress=StopAt(begun))
    assert "result" not in json.loads((tmp_path / "prune.json").read_text("utf-8"))
    found = pruned(tmp_path, pruning, resume=True)
    assert_same_runs(found, two[0])
    assert read_scans(tmp_path / "pruning") == read_scans(two[0].folder / "pruning")


@pytest.mark.slow
def test_not_trained_again_each_budget_has_its_own_first_stage(tmp_path):
    result = pruned(tmp_path, PruneSettings(budgets=(3000, 500), start="trained", epochs=1))
    assert not (tmp_path / "pruning").exists()
    for budget, found in result.pruned.items():
        assert left(found.model) == budget
        assert list(TicketFolder(tmp_path / str(budget) / "pruning" / "tickets")) == [budget]
        assert len(found.history.epochs) == 1
    files = explain_pruning(result, load_splits(LOG).train, plots=False)
    assert [path.name for path in files] == ["insight.json"]


def test_a_random_start_is_asked_for(tmp_path):
    result = pruned(tmp_path, PruneSettings(budgets=(500,), start="random"))
    [method] = RunSettings.from_mapping(
        json.loads((tmp_path / "500" / "run.json").read_text("utf-8"))["settings"]
    ).methods
    assert method == rb.pruning.Pruned(keep=500, start="random")
    assert left(result.pruned[500].model) == 500


def test_shares_of_zeros_are_met(tmp_path):
    result = pruned(tmp_path, PruneSettings(sparsity=(0.99,), epochs=1))
    [(budget, found)] = result.pruned.items()
    assert left(found.model) == budget == round(0.01 * TOTAL)


@pytest.mark.parametrize("size", [70_000, 100_000])
def test_bytes_are_not_passed(tmp_path, size):
    result = pruned(tmp_path, PruneSettings(num_bytes=(size,), epochs=1))
    [found] = result.pruned.values()
    assert wide_bytes(found.model) <= size
    assert wide_bytes(result.unpruned.model) == 4 * TOTAL


shapes = st.lists(st.tuples(st.integers(1, 200), st.integers(2, 64)), min_size=1, max_size=3)


@pytest.mark.filterwarnings("ignore:the largest")
@settings(max_examples=40)
@given(shapes=shapes, share=st.floats(0.05, 0.95))
def test_bytes_are_not_passed_where_no_row_is_empty(shapes, share):
    """Entries that are spread over all rows: the most that so many of them can take."""
    size = int(share * 4 * sum(rows * width for rows, width in shapes))
    try:
        [keep] = PruneSettings(num_bytes=(size,)).entries(shapes)
    except SettingsError:
        return  # too few bytes for the rows alone, or enough for all entries
    tables = {}
    for number, (rows, width) in enumerate(shapes):
        weight = torch.rand(rows, width)
        weight[:, 0] += 1.0  # an entry of each row is among the largest
        tables[str(number)] = torch.nn.Embedding.from_pretrained(weight)
    method = rb.pruning.Pruned(keep=keep)
    served = [method.serve(table) for table in method.wrap_all(tables)]
    model = torch.nn.ModuleList(served)
    assert sum(info.num_bytes for info in rb.find_tables(model)) <= size


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"budgets": (5, 50, 5)}, (50, 5)),
        ({"sparsity": (0.99, 0.9)}, (6400, 640)),
        ({"sparsity": (0.9999,)}, (6,)),
    ],
)
def test_budgets_counted_by_hand(options, expected):
    assert PruneSettings(**options).entries([(1000, 32), (500, 64)]) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "one of budgets, sparsity and bytes, got none"),
        ({"budgets": (5,), "sparsity": (0.5,)}, "got budgets and sparsity"),
        ({"budgets": (5,), "num_bytes": (5,)}, "got budgets and num_bytes"),
        ({"sparsity": (0.5, 1.0)}, r"sparsity must lie in \(0, 1\), got sparsity=1.0"),
        ({"sparsity": (0.0,)}, r"sparsity must lie in \(0, 1\), got sparsity=0.0"),
        ({"sparsity": (float("nan"),)}, "sparsity must be finite, got nan"),
        ({"budgets": (5,), "start": "build"}, "start"),
        ({"budgets": (5,), "epochs": 0}, "epochs must be at least 1, got epochs=0"),
    ],
)
def test_what_cannot_be_asked_is_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        PruneSettings(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budgets": (640, 3)}, "a budget must be below the 640 entries that the tables have"),
        ({"budgets": (5, 0)}, "a budget must be at least 1 entry, got 0"),
        ({"budgets": (-4,)}, "a budget must be at least 1 entry, got -4"),
        ({"sparsity": (0.9999,)}, "a budget must be at least 1 entry, got 0"),
        ({"num_bytes": (300,)}, "tables of 80 rows take 342 bytes before the first entry is kept"),
        ({"num_bytes": (10**6,)}, "a budget must be below the 640 entries"),
    ],
)
def test_what_no_table_can_meet_is_refused(options, message):
    with pytest.raises(SettingsError, match=message):
        PruneSettings(**options).entries([(80, 8)])


def test_nothing_is_written_for_budgets_that_cannot_be_met(tmp_path):
    with pytest.raises(SettingsError, match=f"a budget must be below the {TOTAL:,} entries"):
        pruned(tmp_path / "new", PruneSettings(budgets=(TOTAL,)))
    assert not (tmp_path / "new").exists()


def test_pruned_has_no_place_among_the_methods(tmp_path):
    with pytest.raises(SettingsError, match="leave it out of the methods"):
        pruned(tmp_path / "new", PruneSettings(budgets=(500,)), rb.pruning.Pruned(keep=9))
    assert not (tmp_path / "new").exists()


def test_below_a_product_the_same_entries_are_counted(tmp_path):
    result = pruned(tmp_path, PruneSettings(budgets=(500,), epochs=1), rb.MLET(inner_dim=6))
    assert result.entries == TOTAL
    assert left(result.pruned[500].model) == 500


def test_a_folder_without_pruning_or_with_a_damaged_one_is_told(tmp_path):
    with pytest.raises(ModelFileError, match=r"holds no pruning: prune.json is missing"):
        read_prune(tmp_path)
    for text in ("{", "[]", "{}", '{"settings": {}}'):
        (tmp_path / "prune.json").write_text(text)
        with pytest.raises(ModelFileError, match="is damaged"):
            read_prune(tmp_path)
    (tmp_path / "prune.json").unlink()
    (tmp_path / "prune.json").mkdir()
    with pytest.raises(ModelFileError, match="cannot read"):
        read_prune(tmp_path)
