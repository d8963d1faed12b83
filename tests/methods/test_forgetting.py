"""A row keeps n / (n + c) of itself from one epoch to the next, and the optimizer starts again with it."""

import copy

import hypothesis
import pytest
import torch
from capabilities import needs_cuda
from hypothesis import strategies as st
from methods.shrunk_models import FIELDS, deepfm
from methods.training_data import rows_of, steps_before_changes, training_data
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.nn.utils.parametrize import register_parametrization
from torch.testing import assert_close

import rarebit as rb
from rarebit.errors import DataError, OptimizerError, SettingsError, UnsupportedTableError
from rarebit.methods.forgetting import Forgetting, forget_, restart_, stored_rows
from rarebit.pruning.masked import Ticket
from rarebit.tables.apply import Site, find_sites, table_parameters
from rarebit.tables.table import full_table
from rarebit.training.run import train_model
from rarebit.training.settings import RunSettings

STEPS = 8
"""Steps of an epoch of 64 rows."""


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def rows_by_table(model: nn.Module) -> dict[str, Tensor]:
    """Return the rows of all ids `(N, D)` as they are looked up, by table."""
    return {site.info.name: full_table(site.table).detach().clone() for site in find_sites(model)}


def after(model: nn.Module, train: rb.Dataset, c: float) -> nn.Module:
    """Return a copy of a model after a step at which rows are forgotten."""
    model = copy.deepcopy(model)
    forgetting = Forgetting(c=c).start(model, training_data(train))
    forgetting.between_epochs(2, torch.optim.SGD(model.parameters()))
    forgetting.close()
    return model


def times_seen(train: rb.Dataset, site: Site, i: int) -> int:
    """Return how often the rows have an id, or one of its bucket, with loops."""
    field = next(field for field in FIELDS if field.name == site.info.field)
    buckets = 5 if any("Hashing" in method for method in site.info.methods) else field.rows
    padding = 0 if field.kind == "multi" else None
    values = [value for value in train[:][field.name].flatten().tolist() if value != padding]
    return sum(value % buckets == i % buckets for value in values)


def ticket(width: int) -> Ticket:
    """Return a mask that cuts every third entry of tables so wide."""
    entries = {
        f"backbone.tables.{field.name}": torch.arange(field.rows * width) for field in FIELDS
    }
    return Ticket({name: (each % 3 != 0).view(-1, width) for name, each in entries.items()})


APPLIED = {
    "plain": (),
    "hashing": (rb.Hashing(buckets=5),),
    "low-rank": (rb.LowRank(rank=2, after_training=False),),
    "mlet": (rb.MLET(inner_dim=6),),
    "product-start": (rb.research.ProductStart(inner_dim=6),),
    "row-rate": (rb.research.RowRate(counts=7, c=3.0),),
    "masked": (rb.pruning.Masked(),),
    "pruned": (rb.pruning.Pruned(keep=60),),
    "multi-embedding": (rb.MultiEmbedding(num_sets=2),),
    "shared-sets": (rb.research.SharedSets(num_sets=2),),
    "hashing+mlet": (rb.Hashing(buckets=5), rb.MLET(inner_dim=6)),
    "multi-embedding+mlet": (rb.MultiEmbedding(num_sets=2), rb.MLET(inner_dim=6)),
    "multi-embedding+hashing": (rb.MultiEmbedding(num_sets=2), rb.Hashing(buckets=5)),
    "multi-embedding+hashing+masked": (
        rb.MultiEmbedding(num_sets=2),
        rb.Hashing(buckets=5),
        rb.pruning.Masked(ticket(8)),  # both sets side by side
    ),
    "shrinkage:prior=zero": (rb.Shrinkage(counts=7, c=3.0, prior="zero"),),
}


@pytest.mark.parametrize("methods", APPLIED.values(), ids=APPLIED)
def test_each_row_keeps_its_share_row_by_row(methods):
    model, train = deepfm(*methods).double(), rows_of(64)
    before, now = rows_by_table(model), after(model, train, c=4.0)
    for site in find_sites(now):
        found = full_table(site.table)
        for i, row in enumerate(before[site.info.name]):
            n = times_seen(train, site, i)
            assert_close(found[i], row * (n / (n + 4.0)))
    tables = set(table_parameters(model))
    for name, value in weights(now).items():
        if name not in tables:
            assert torch.equal(value, weights(model)[name])


def test_by_hand():
    model = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 1))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[3.0, 6.0], [3.0, -6.0], [2.0, 4.0], [8.0, 1.0]]))
    forget_(model, torch.optim.SGD(model.parameters()), torch.tensor([0, 1, 2, 6]), c=2)
    expected = torch.tensor([[0.0, 0.0], [1.0, -2.0], [1.0, 2.0], [6.0, 0.75]])
    assert_close(model[0].weight.detach(), expected)


def test_rows_are_forgotten_before_each_epoch_but_the_first():
    assert steps_before_changes(deepfm(), Forgetting().callback()) == [STEPS, 2 * STEPS]


def test_with_c_zero_rows_stay_to_the_bit_and_the_optimizer_starts_again():
    model, train = deepfm(), rows_of(64)
    optimizer = rb.optimizer(model, lr=0.1)
    forgetting = Forgetting(c=0.0).start(model, training_data(train))
    model(train[:8]).sum().backward()
    optimizer.step()
    before = weights(model)
    forgetting.between_epochs(2, optimizer)
    forgetting.close()
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    [stack] = model.backbone.tables.stacks
    assert not any(value.any() for value in optimizer.state[stack.embedding.weight].values())


@pytest.mark.filterwarnings("ignore:with c=")
@pytest.mark.parametrize("c", [1e-300, 1e-50, 0.1, 1e300])
def test_an_id_that_was_never_seen_is_zero(c):
    table = nn.Embedding(2, 3)
    optimizer = torch.optim.SGD(table.parameters())
    before = table.weight.detach().clone()
    forget_(table, optimizer, torch.tensor([0, 10**6]), c=c)
    assert torch.equal(table.weight[0], torch.zeros(3))
    assert_close(table.weight[1].detach(), before[1] * (1e6 / (1e6 + c)))


def test_padding_stays_zero_and_tables_can_be_changed_afterwards():
    model, train = deepfm(), rows_of(64)
    with torch.no_grad():
        for tables in (model.backbone.tables, model.wide.tables):
            tables.stacks[0].embedding.weight[20] = 0.0  # the first row of the second field
    model = after(model, train, c=1.0)
    rows = model.backbone.tables.tables()[1].weight
    assert not bool(rows[0].any())
    assert bool(rows.any())
    assert rb.apply_(model, rb.Hashing(buckets=4), verbose=False)


def test_what_is_cut_stays_zero_while_the_rest_is_forgotten():
    cut = ticket(4)
    now = rows_by_table(after(deepfm(rb.pruning.Masked(cut)), rows_of(64), c=4.0))
    for name, mask in cut.kept.items():
        assert not bool(now[name][~mask].any())
        assert bool(now[name][mask].any())


@pytest.mark.parametrize("tables", ["dense", "rowwise"])
@pytest.mark.parametrize("kind", ["adam", "adagrad", "sgd"])
def test_the_optimizer_forgets_rows_and_nothing_else(tables, kind):
    model, train = deepfm(), rows_of(64)
    optimizer = rb.optimizer(model, lr=0.1, kind=kind, tables=tables, momentum=0.9)
    forgetting = Forgetting().start(model, training_data(train))
    for _ in range(3):
        model(train[:8]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    forgetting.between_epochs(2, optimizer)
    forgetting.close()
    held = {id(parameter) for parameter in table_parameters(model).values()}
    order = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(before) == len(order)
    for place, parameter in enumerate(order):
        for key, value in optimizer.state[parameter].items():
            if id(parameter) in held:
                assert bool(before[place][key].any()), key
                assert not bool(value.any()), key
            else:
                assert torch.equal(value, before[place][key])


def test_a_shrunk_row_forgets_its_own_part_and_the_prior_continues():
    model, train = deepfm(rb.Shrinkage(counts=7, c=3.0)), rows_of(64)
    optimizer = rb.optimizer(model, lr=0.1)
    forgetting = Forgetting(c=4.0).start(model, training_data(train))
    model(train[:8]).sum().backward()
    optimizer.step()
    stack = model.backbone.tables.stacks[0]
    own, shared = stack.inner.embedding.weight, next(stack.prior.parameters())
    before, of_prior = own.detach().clone(), shared.detach().clone()
    state = {key: value.clone() for key, value in optimizer.state[shared].items()}
    forgetting.between_epochs(2, optimizer)
    forgetting.close()
    seen = torch.cat(list(train.counts().values())).unsqueeze(1)
    padding = 20
    seen[padding] = 0
    assert_close(own.detach(), before * seen / (seen + 4.0))
    assert torch.equal(shared.detach(), of_prior)
    assert bool(state["exp_avg"].any())
    assert all(torch.equal(optimizer.state[shared][key], value) for key, value in state.items())
    assert not any(value.any() for value in optimizer.state[own].values())


class Scorer(nn.Module):
    """A model of one's own: an embedding, a bag and a layer."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        self.user = nn.Embedding(6, 3, sparse=sparse)
        self.tags = nn.EmbeddingBag(5, 3, mode="sum", sparse=sparse)
        self.layer = nn.Linear(3, 1)

    def forward(self, users: Tensor, tags: Tensor) -> Tensor:
        return self.layer(torch.tanh(self.user(users) + self.tags(tags)))


OWN_COUNTS = {"user": torch.tensor([0, 1, 2, 3, 50, 9]), "tags": torch.tensor([4, 0, 30, 1, 7])}


def own_steps(model: Scorer, *optimizers: torch.optim.Optimizer) -> None:
    generator = torch.Generator().manual_seed(5)
    for _ in range(4):
        users = torch.randint(6, (8,), generator=generator)
        tags = torch.randint(5, (8, 2), generator=generator)
        model(users, tags).sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def optimizers_of(model: Scorer, *, sparse: bool) -> list[torch.optim.Optimizer]:
    """Return the optimizer of the tables and that of the layer."""
    kind = torch.optim.SparseAdam if sparse else torch.optim.Adam
    held = [model.user.weight, model.tags.weight]
    return [kind(held, lr=0.1), torch.optim.Adam(model.layer.parameters(), lr=0.1)]


@pytest.mark.parametrize("sparse", [False, True])
def test_in_a_loop_of_ones_own_tables_go_on_as_with_a_new_optimizer(sparse):
    model = Scorer(sparse=sparse)
    of_tables, of_layer = optimizers_of(model, sparse=sparse)
    own_steps(model, of_tables, of_layer)
    expected = copy.deepcopy(model)
    forget_(model, of_tables, OWN_COUNTS, c=5.0)
    with torch.no_grad():
        for name, counts in OWN_COUNTS.items():
            for i, n in enumerate(counts.tolist()):
                getattr(expected, name).weight[i] *= n / (n + 5.0)
    anew, its_layer = optimizers_of(expected, sparse=sparse)
    its_layer.load_state_dict(copy.deepcopy(of_layer.state_dict()))
    for name, value in weights(model).items():
        assert_close(value, weights(expected)[name])
    own_steps(model, of_tables, of_layer)
    own_steps(expected, anew, its_layer)
    for name, value in weights(model).items():
        assert_close(value, weights(expected)[name])


def test_wrong_counts_are_refused_before_anything_is_changed():
    model = Scorer(sparse=False)
    optimizer = torch.optim.Adam(model.parameters())
    own_steps(model, optimizer)
    before, state = weights(model), copy.deepcopy(optimizer.state_dict()["state"])
    wrong = [
        ({"user": OWN_COUNTS["user"]}, "no counts for 'tags', only for user"),
        (
            OWN_COUNTS | {"tags": torch.arange(4)},
            "one number for each of its 5 rows, got the shape",
        ),
        (OWN_COUNTS | {"tags": torch.ones(5)}, "must be integers, got torch.float32"),
        (OWN_COUNTS | {"tags": torch.arange(5) - 1}, "must be 0 or more, got -1"),
    ]
    for counts, message in wrong:
        with pytest.raises(DataError, match=message):
            forget_(model, optimizer, counts)
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())
    for place, values in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state[place][key]) for key, value in values.items())


@pytest.mark.parametrize("c", [-1.0, float("inf"), float("nan")])
def test_a_c_that_is_none_is_refused(c):
    table = nn.Embedding(3, 2)
    with pytest.raises(SettingsError, match=f"c must be 0 or more and finite, got c={c}"):
        forget_(table, torch.optim.SGD(table.parameters()), 7, c=c)


def test_an_optimizer_without_the_tables_is_refused():
    model = Scorer(sparse=False)
    before = weights(model)
    with pytest.raises(OptimizerError, match=r"the optimizer does not hold user\.weight, tags\.we"):
        forget_(model, torch.optim.SGD(model.layer.parameters()), OWN_COUNTS)
    assert all(torch.equal(value, before[name]) for name, value in weights(model).items())


def test_what_cannot_be_done_is_refused():
    other = rb.Dataset.from_columns({"place": torch.arange(64)}, label=torch.arange(64) % 2)
    with pytest.raises(UnsupportedTableError, match="no table of this model stores rows"):
        Forgetting().start(nn.Linear(2, 2), training_data(rows_of(64)))
    with pytest.raises(DataError, match="no counts for 'user', only for"):
        Forgetting().start(Scorer(sparse=False), training_data(other))


@pytest.mark.filterwarnings("ignore:with c=")
@hypothesis.given(
    st.lists(st.integers(0, 10**9), min_size=2, max_size=20),
    st.floats(0, allow_infinity=False, allow_nan=False),
)
def test_a_row_never_grows_and_more_evidence_keeps_more(counts, c):
    counts = sorted(counts)
    table = nn.Embedding.from_pretrained(torch.full((len(counts), 2), -3.0), freeze=False)
    forget_(table, torch.optim.SGD(table.parameters()), torch.tensor(counts), c=c)
    sizes = table.weight.detach().abs()
    assert bool((sizes >= 0).all())
    assert bool((sizes <= 3.0).all())
    assert bool((sizes[1:] >= sizes[:-1]).all())


@needs_cuda
def test_rows_on_a_gpu_are_forgotten_there():
    model = Scorer(sparse=False)
    on_gpu = copy.deepcopy(model).cuda()
    for one in (model, on_gpu):
        forget_(one, torch.optim.Adam(one.parameters()), OWN_COUNTS, c=5.0)
    for name, value in weights(on_gpu).items():
        assert value.is_cuda
        assert_close(value.cpu(), weights(model)[name])


def noisy_log(seed: int) -> rb.Dataset:
    """Return rows whose label depends on a frequent item, and in no way on the user, who is seen twice."""
    generator = torch.Generator().manual_seed(seed)
    users = torch.arange(1000).repeat(2)[torch.randperm(2000, generator=generator)]
    items = torch.randint(10, (2000,), generator=generator)
    chance = 0.3 + 0.4 * (items % 2)
    label = (torch.rand(2000, generator=generator) < chance).float()
    return rb.Dataset.from_columns({"user": users, "item": items}, label=label)


def losses(*methods: rb.Method) -> list[tuple[float, float]]:
    """Return the loss in training and on validation rows, of each of six epochs."""
    settings = RunSettings(
        model="deepfm",
        model_settings={"dim": 8, "hidden": (16,)},
        data=rb.data.SyntheticLog(rows=1500),
        training=rb.Training(epochs=6, batch_size=50, lr=0.01, patience=None),
        methods=methods,
    )
    train, valid = noisy_log(1), noisy_log(2)
    _, history = train_model(settings, train, valid, progress=False, say=lambda line: None)
    return [(epoch.train_loss, epoch.valid.logloss) for epoch in history.epochs]


def test_labels_are_not_remembered_from_one_epoch_to_the_next():
    plain, forgetting = losses(), losses(Forgetting(c=30.0))
    assert forgetting[0] == plain[0]  # nothing is forgotten before the first epoch was measured
    gaps = [valid - train for train, valid in (plain[-1], forgetting[-1])]
    assert gaps[0] > 0.5
    assert gaps[1] < 0.3 * gaps[0]
    assert forgetting[-1][1] < plain[-1][1] - 0.2


def left_of_a_row(decay: float, c: float | None) -> float:
    """Return what is left of a row that one step looked up, long after it, as a part of it."""
    table = nn.Embedding.from_pretrained(torch.zeros(2, 1), freeze=False)
    adam = torch.optim.Adam(table.parameters(), lr=1e-3, weight_decay=decay)

    def step(*ids: int) -> None:
        adam.zero_grad()
        table(torch.tensor(ids)).sum().mul(-0.1).backward()
        adam.step()

    step(0, 1)
    for _ in range(200):  # until its momentum is spent
        step(0)
    before = table.weight[1].item()
    if c is not None:
        forget_(table, adam, torch.tensor([300, 1]), c=c)
    for _ in range(100):
        step(0)
    return table.weight[1].item() / before


def test_weight_decay_takes_all_of_a_row_after_a_restart_and_nothing_before():
    # Adam divides a decay that is part of the gradient by the moments, which are those of the row's one gradient
    assert left_of_a_row(decay=1e-5, c=None) == pytest.approx(1, abs=1e-3)
    # after a restart they are those of the decay itself: a step of the learning rate towards zero, every time
    assert abs(left_of_a_row(decay=1e-5, c=0.0)) < 0.01
    assert left_of_a_row(decay=0.0, c=0.0) == 1
    assert left_of_a_row(decay=0.0, c=3.0) == pytest.approx(1 / 4)


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1, amsgrad=True),
    "fused adam": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.1),
    "adamax": lambda params: torch.optim.Adamax(params, lr=0.1),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.1),
    "radam": lambda params: torch.optim.RAdam(params, lr=0.1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "adagrad from 3": lambda params: torch.optim.Adagrad(
        params, lr=0.1, initial_accumulator_value=3.0
    ),
    "adadelta": lambda params: torch.optim.Adadelta(params, lr=0.1),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.9, centered=True),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.1),
    "asgd": lambda params: torch.optim.ASGD(params, lr=0.1, t0=2),
    "sparse adam": lambda params: torch.optim.SparseAdam(params, lr=0.1),
}


def steps(table: nn.Embedding, optimizer: torch.optim.Optimizer, target: Tensor) -> None:
    for number in range(7):
        one_step(table, optimizer, target, number)


def one_step(
    table: nn.Embedding, optimizer: torch.optim.Optimizer, target: Tensor, number: int
) -> None:
    ids = torch.tensor([number % 5, 2])
    (table(ids) - target[ids]).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_every_optimizer_goes_on_as_a_new_one(kind):
    table, target = nn.Embedding(5, 3, sparse=kind == "sparse adam"), torch.randn(5, 3)
    optimizer = OPTIMIZERS[kind](table.parameters())
    steps(table, optimizer, target)
    expected, goes_on = copy.deepcopy(table), copy.deepcopy(table)
    new, old = OPTIMIZERS[kind](expected.parameters()), OPTIMIZERS[kind](goes_on.parameters())
    old.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    restart_(optimizer, stored_rows(table, "a test"))
    steps(goes_on, old, target)
    for number in range(7):
        one_step(table, optimizer, target, number)
        one_step(expected, new, target, number)
        assert torch.equal(table.weight, expected.weight)
        assert str(optimizer.state_dict()["state"]) == str(new.state_dict()["state"])
    assert not torch.allclose(table.weight, goes_on.weight)


def test_a_state_stays_in_its_memory():
    table = nn.Embedding(5, 3)
    optimizer = torch.optim.Adam(table.parameters())
    steps(table, optimizer, torch.randn(5, 3))
    before = {key: value.data_ptr() for key, value in optimizer.state[table.weight].items()}
    restart_(optimizer, stored_rows(table, "a test"))
    now = optimizer.state[table.weight]
    assert {key: value.data_ptr() for key, value in now.items()} == before
    assert not any(value.any() for value in now.values())


def test_an_optimizer_that_has_made_no_step_has_nothing_to_forget():
    table = nn.Embedding(5, 3)
    optimizer = torch.optim.Adam(table.parameters())
    restart_(optimizer, stored_rows(table, "a test"))
    assert not optimizer.state


def test_weights_of_the_network_in_the_same_memory_are_none_of_the_tables():
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 1))
    vector_to_parameters(parameters_to_vector(model.parameters()).detach(), model.parameters())
    table, layer = model[0].weight, model[1].weight
    assert table.untyped_storage().data_ptr() == layer.untyped_storage().data_ptr()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.tensor([1, 3])).sum().backward()
    optimizer.step()
    restart_(optimizer, stored_rows(model, "a test"))
    assert not bool(optimizer.state[table]["exp_avg"].any())
    assert bool(optimizer.state[layer]["exp_avg"].any())


def test_of_several_optimizers_the_one_of_the_tables_starts_again():
    model, train = deepfm(), rows_of(64)
    tables = {
        id(p): p for p in (*model.backbone.tables.parameters(), *model.wide.tables.parameters())
    }
    network = [p for p in model.parameters() if id(p) not in tables]
    optimizers = [torch.optim.Adam(network), torch.optim.Adam(tables.values())]
    forgetting = Forgetting().start(model, training_data(train))
    model(train[:8]).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        forgetting.between_epochs(2, optimizer)
    forgetting.close()
    of_network, of_tables = (optimizer.state for optimizer in optimizers)
    assert all(bool(of_network[p]["step"].any()) for p in network)
    assert not any(bool(of_tables[p]["step"].any()) for p in tables.values())


def test_all_rows_are_found_where_they_are_trained():
    model = deepfm(rb.Shrinkage(counts=7, c=3.0))
    own = [
        tables.stacks[0].inner.embedding.weight
        for tables in (model.backbone.tables, model.wide.tables)
    ]
    found = stored_rows(model, "a test")
    assert [id(rows.parameter) for rows in found] == [
        id(weight) for weight in own for _ in range(3)
    ]
    for rows in found:
        rows.weight.fill_(5.0)
    assert all(bool((weight == 5.0).all()) for weight in own)


def test_a_table_that_is_used_twice_is_changed_once():
    table = nn.Embedding(5, 3)
    model = nn.ModuleDict({"query": table, "document": table})
    assert len(stored_rows(model, "a test")) == 1
    model["document"] = nn.Embedding(5, 3)
    model["document"].weight = table.weight
    with pytest.raises(
        UnsupportedTableError,
        match="a test changes each row once, and the tables 'query' and 'document' share their",
    ):
        stored_rows(model, "a test")


def quantised() -> nn.Embedding:
    holder = nn.Sequential(nn.Embedding(5, 3))
    rb.apply_(holder, rb.Quantize(bits=8), verbose=False)
    return holder[0]


@pytest.mark.parametrize(
    "make", [quantised, lambda: nn.Embedding.from_pretrained(torch.ones(5, 3))]
)
def test_a_table_that_is_not_trained_is_refused_also_beside_others(make):
    model = nn.ModuleDict({"user": nn.Embedding(5, 3), "item": make()})
    with pytest.raises(
        UnsupportedTableError,
        match="a test changes stored rows that are trained, and those of 'item' are not; give",
    ):
        stored_rows(model, "a test")
    assert len(stored_rows(model["user"], "a test")) == 1


class Elsewhere(nn.Module):
    """Looks rows up in other memory than that of the weight that is trained."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, weight: Tensor) -> Tensor:
        del weight
        return self.rows


def test_a_table_whose_rows_are_computed_is_refused():
    memory = torch.zeros(2, 5, 3)
    table = nn.Embedding(5, 3, _weight=memory[0])
    register_parametrization(table, "weight", Elsewhere(memory[1]))
    with pytest.raises(UnsupportedTableError, match="and those of 'user' are not"):
        stored_rows(nn.ModuleDict({"user": table}), "a test")
