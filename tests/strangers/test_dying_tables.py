"""Tables that a method or its thresholds would leave without a gradient: warned of by name, and never left empty."""

import warnings

import pytest
import torch
from torch import nn

import rarebit as rb
from rarebit.errors import SettingsError
from rarebit.models.fm import FM
from rarebit.pruning import Masked, Pruned, Ticket
from rarebit.pruning.pep import Pruner, count_nonzero, thresholded_tables

ALL_IDS = {"user": torch.arange(30), "item": torch.arange(20)}


def two_tables(user: float = 1.0, item: float = 1.0) -> nn.ModuleDict:
    model = nn.ModuleDict({"user": nn.Embedding(30, 4), "item": nn.Embedding(20, 4)})
    with torch.no_grad():
        model["user"].weight.mul_(user)
        model["item"].weight.mul_(item)
    return model


def left(model: nn.ModuleDict) -> dict[str, int]:
    return {name: int(torch.count_nonzero(table.weight)) for name, table in model.items()}


def gradients(model: nn.ModuleDict, name: str) -> float:
    model[name](ALL_IDS[name]).sum().backward()
    found = [p.grad for p in model[name].parameters() if p.grad is not None]
    return sum(float(gradient.abs().sum()) for gradient in found)


@pytest.mark.parametrize(
    "granularity",
    ["feature_dimension", "feature", "field", "field_dimension", "dimension", "global"],
)
def test_thresholds_above_all_weights_start_below_them_instead(granularity):
    model = two_tables(1e-4, 1e-4)
    with pytest.warns(
        UserWarning, match="would cut every entry of 'user', 'item' before the first"
    ):
        rb.apply_(model, rb.PEP(granularity=granularity, init=-4.0), verbose=False)
    assert left(model)["user"] >= 12
    assert left(model)["item"] >= 8
    assert min(gradients(model, name) for name in model) > 0


def test_thresholds_of_one_small_table_are_lowered_and_others_stay():
    model = two_tables(1.0, 1e-4)
    with pytest.warns(UserWarning, match=r"every entry of 'item' before .* Use a lower init"):
        rb.apply_(model, rb.PEP(init=-4.0), verbose=False)
    assert set(model["user"].levels.weight.flatten().tolist()) == {-4.0}
    assert float(model["item"].levels.weight.detach().max()) < -8.0
    assert left(model)["item"] >= 8
    # with one threshold for all tables there is none to lower: only the name is left to say
    model = two_tables(1.0, 1e-4)
    with pytest.warns(UserWarning, match="makes all rows of 'item' equal"):
        rb.apply_(model, rb.PEP(granularity="global", init=-4.0), verbose=False)


def test_a_table_of_zeros_is_named_by_methods_that_give_zeros_no_gradient():
    for method in (rb.PEP(), rb.PEP(schedule="given"), Masked(), Pruned(keep=50)):
        with pytest.warns(UserWarning, match="makes all rows of 'item' equal"):
            rb.apply_(two_tables(item=0.0), method, verbose=False)
    model = two_tables(item=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rb.apply_(model, rb.LowRank(rank=2), verbose=False)  # zeros that learn are none of these
    assert gradients(model, "item") > 0


def test_a_budget_that_would_empty_a_table_leaves_it_its_largest_entry():
    model = two_tables(1.0, 1e-3)
    largest = int(model["item"].weight.abs().argmax())
    with pytest.warns(
        UserWarning, match=r"largest 110 entries .* others than 'item', of which only"
    ):
        rb.apply_(model, Pruned(keep=110), verbose=False)
    assert left(model) == {"user": 109, "item": 1}  # the budget is exact
    assert int(model["item"].weight.abs().argmax()) == largest
    assert gradients(model, "item") > 0


def test_a_budget_below_the_number_of_tables_names_those_it_empties():
    with pytest.warns(UserWarning, match="makes all rows of 'item' equal"):
        rb.apply_(two_tables(1.0, 1e-3), Pruned(keep=1), verbose=False)


def test_a_rising_threshold_leaves_each_table_an_entry_at_exactly_the_budget():
    model = two_tables(1.0, 1e-3)
    rb.apply_(model, rb.PEP(schedule="given"), verbose=False)
    pruner = Pruner(model, [60, 10], steps=40, every=1)
    for step in range(1, 41):
        pruner.after_step(step)
        assert min(left(model).values()) >= 1
    assert count_nonzero(model) == 10
    assert [ticket.num_kept for ticket in pruner.tickets.values()] == [60, 10]
    # the same in the stack of a model of ours
    schema = rb.data.Schema(tuple(rb.data.Field(name=n, rows=r) for n, r in (("a", 30), ("b", 20))))
    ours = FM(schema, dim=4)
    with torch.no_grad():
        ours.backbone.tables.tables()[1].weight.mul_(1e-3)
    rb.apply_(ours, rb.PEP(schedule="given"), verbose=False)
    Pruner(ours, [10], steps=1).after_step(1)
    tables = thresholded_tables(ours).values()
    assert [int(torch.count_nonzero(table.weight)) for table in tables] == [9, 1]


@pytest.mark.parametrize(
    ("method", "names"),
    [
        (rb.Hashing(buckets=1), "'user', 'item'"),
        (rb.Shrinkage(counts=0), "'user', 'item'"),
        (rb.Shrinkage(counts=9, c=1e30, prior="zero"), "'user', 'item'"),
        (rb.MLET(inner_dim=8, std=1e-30), "'user', 'item'"),
        (Masked(Ticket({"user": torch.ones(30, 4).bool(), "item": torch.zeros(20, 4).bool()})), "'item'"),
    ],
    ids=["one bucket", "never seen", "all prior", "no projection", "empty mask"],
)  # fmt: skip
def test_rows_that_a_method_makes_equal_are_named(method, names):
    with pytest.warns(UserWarning, match=f"makes all rows of {names} equal.* use other settings"):
        rb.apply_(two_tables(), method, verbose=False)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: rb.LowRank(rank=0), "rank must be at least 1"),
        (lambda: rb.Hashing(buckets=0), "buckets must be at least 1"),
        (lambda: rb.MLET(inner_dim=0), "inner_dim must be at least 1"),
        (lambda: rb.MLET(std=0.0), "std must be more than 0"),
        (lambda: Pruned(keep=0), "at least one entry must be kept"),
        (lambda: rb.Quantize(bits=0), "bits must be one of 8, 4"),
    ],
)
def test_settings_that_leave_nothing_are_refused_at_once(make, match):
    with pytest.raises(SettingsError, match=match):
        make()


class Scored(nn.Module):
    """A stranger's model of two fields."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(30, 4), nn.Embedding(20, 4)

    def forward(self, batch):
        return (self.user(batch["user"]) * self.item(batch["item"])).sum(dim=-1)


def test_a_table_that_learned_thresholds_overtake_is_named_after_the_epoch_and_in_the_report():
    users, items = torch.arange(60) % 30, torch.arange(60) % 20
    data = rb.Dataset.from_columns({"user": users, "item": items}, label=users % 2)
    model, method = Scored(), rb.PEP(granularity="field", init=-4.0)
    with torch.no_grad():
        model.item.weight.mul_(0.05)
    rb.apply_(model, method, verbose=False)
    options = {"threshold_weight_decay": 1.0, "optimizer": "sgd", "lr": 0.1, "batch_size": 10}
    with pytest.warns(
        UserWarning, match=r"leave no entry of 'item' after epoch \d, so it no longer"
    ):
        history = rb.fit(model, data, epochs=4, callbacks=[method], progress=False, **options)
    assert history.reports["pep"] == {"empty_tables": ["item"]}
    assert left(nn.ModuleDict({"user": model.user}))["user"] > 0


def test_counts_of_zero_are_named_when_they_are_set():
    model = two_tables()
    rb.apply_(model, rb.Shrinkage(), verbose=False)
    counts = {"user": torch.zeros(30).long(), "item": torch.ones(20).long()}
    with pytest.warns(UserWarning, match="all counts of 'user' are 0, so its rows get no weight"):
        rb.set_counts_(model, counts)


def test_forgetting_that_leaves_nothing_of_a_table_names_it():
    model = two_tables()
    counts = {"user": torch.full((30,), 9), "item": torch.full((20,), 10**9)}
    with pytest.warns(
        UserWarning, match=r"with c=1e\+08 no row of 'user' keeps anything of itself"
    ):
        rb.forget_(model, torch.optim.SGD(model.parameters(), lr=0.1), counts, c=1e8)
    assert float(model["item"].weight.detach().abs().max()) > 0.1
