"""Shrinkage, forgetting and averaging as one: in a loop of one's own, through fit, and where there is no tail."""

import copy
from dataclasses import replace

import pytest
import torch
from methods.shrunk_models import SCHEMA, deepfm
from methods.training_data import rows_of
from torch import Tensor, nn

import rarebit as rb
from rarebit.callbacks import Callback
from rarebit.errors import SettingsError
from rarebit.methods.tail import LEAST_SHARE, Tail, known_counts, tail_share
from rarebit.tables.apply import table_parameters
from rarebit.technique import parse_techniques
from rarebit.training.fit import Silence
from rarebit.training.run import train_model
from rarebit.training.settings import RunSettings, load_splits

EPOCHS, BATCH, STEPS = 3, 8, 8
FIT = {"epochs": EPOCHS, "batch_size": BATCH, "lr": 0.05, "patience": None, "progress": False}
SETTINGS = RunSettings(
    model="fm",
    model_settings={"dim": 4},
    data=rb.data.SyntheticLog(rows=1500),
    training=rb.Training(epochs=3, batch_size=64, lr=0.02, patience=None),
)


def frequent_rows(number: int = 640) -> rb.Dataset:
    """Return rows in which every id occurs at least thirty times."""
    counted = [torch.arange(number) % 4 for _ in range(5)]
    return rb.Dataset(SCHEMA, torch.stack(counted, dim=1), label=torch.randint(2, (number,)))


def padded_model() -> nn.Module:
    """Return a model whose padding is zero, as models start: merging makes it so."""
    model = deepfm()
    with torch.no_grad():
        for tables in (model.backbone.tables, model.wide.tables):
            tables.tables()[1].weight[0] = 0.0
    return model


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


class NaiveTail:
    """Rows forgotten with a loop, and the average as a sum over all steps since it began."""

    def __init__(self, model: nn.Module, method: Tail, counts: dict[str, Tensor]) -> None:
        self.model, self.method, self.counts = model, method, counts
        self.steps: dict[str, list[Tensor]] = {name: [] for name in weights(model)}

    def after_step(self) -> None:
        for name, value in weights(self.model).items():
            self.steps[name].append(value.double())

    def between_epochs(self, optimizer: torch.optim.Optimizer) -> None:
        rb.forget_(self.model, optimizer, self.counts, c=self.method.forget)
        rows = {name for name in table_parameters(self.model) if "prior" not in name}
        chosen = {"rows-anew": rows, "all-anew": set(self.steps)}.get(self.method.average, set())
        self.steps |= {name: [] for name in chosen}

    def averages(self) -> dict[str, Tensor]:
        decay, found = torch.exp(torch.tensor(-1 / (self.method.memory * STEPS)).double()), {}
        rows = {name for name in table_parameters(self.model) if "prior" not in name}
        for name, steps in self.steps.items():
            if self.method.average == "network" and name in rows:
                found[name] = steps[-1]
                continue
            powers = [decay ** (len(steps) - 1 - place) for place in range(len(steps))]
            found[name] = sum(p * w for p, w in zip(powers, steps, strict=True)) / sum(powers)
            if self.method.average == "known" and name in rows:
                for row, count in enumerate(n for table in self.counts.values() for n in table):
                    if count < self.method.forget:
                        found[name][row] = steps[-1][row]
        return found


@pytest.mark.parametrize("tables", ["dense", "rowwise"])
@pytest.mark.parametrize("average", ["network", "known", "all", "rows-anew", "all-anew"])
def test_a_loop_of_ones_own_has_the_averages_of_the_definition(average, tables):
    model, train = deepfm(), rows_of(64)
    optimizer = rb.optimizer(model, lr=0.05, weight_decay=0.01, tables=tables)
    method = Tail(memory=0.6, forget=3.0, average=average)
    tail = method.start(model, optimizer, train.counts(), steps_per_epoch=STEPS)
    twin = copy.deepcopy(model)
    its = rb.optimizer(twin, lr=0.05, weight_decay=0.01, tables=tables)
    naive = NaiveTail(twin, method, train.counts())
    for epoch in range(EPOCHS):
        if epoch:
            tail.between_epochs()
            naive.between_epochs(its)
        for batch in train.batches(BATCH, train.order(seed=3, epoch=epoch + 1)):
            for one, optimizer_of_it in ((model, optimizer), (twin, its)):
                one(batch).square().mean().backward()
                optimizer_of_it.step()
                optimizer_of_it.zero_grad()
            naive.after_step()
        with tail.averaged():
            found = weights(model)
        for name, value in naive.averages().items():
            torch.testing.assert_close(found[name].double(), value, rtol=1e-5, atol=1e-6)
        assert all(
            torch.equal(value, weights(twin)[name]) for name, value in weights(model).items()
        )
    tail.end()
    expected = naive.averages()
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(expected[name])
    torch.testing.assert_close(model(train[:]), twin(train[:]), rtol=1e-4, atol=1e-5)
    assert not rb.merge_(model, verbose=False)


@pytest.mark.parametrize("average", ["network", "known", "all", "rows-anew"])
def test_fit_does_what_the_loop_does(average):
    model, train = deepfm(), rows_of(64)
    own = copy.deepcopy(model)
    rb.fit(model, train, callbacks=[Tail(average=average)], tables="rowwise", **FIT)
    optimizer = rb.optimizer(own, lr=0.05, tables="rowwise")
    tail = Tail(average=average).start(own, optimizer, train.counts(), steps_per_epoch=STEPS)
    loss = nn.functional.binary_cross_entropy_with_logits
    for epoch in range(EPOCHS):
        if epoch:
            tail.between_epochs()
        own.train()
        for batch in train.batches(BATCH, train.order(seed=0, epoch=epoch + 1)):
            loss(own(batch), batch.label.float()).backward()
            optimizer.step()
            optimizer.zero_grad()
    tail.end()
    assert all(torch.equal(value, weights(own)[name]) for name, value in weights(model).items())


def test_a_loop_of_ones_own_resumes_to_the_same_bits():
    train = rows_of(64)

    def started(model: nn.Module) -> tuple[torch.optim.Optimizer, object]:
        optimizer = rb.optimizer(model, lr=0.05, tables="rowwise")
        tail = Tail(average="rows-anew")
        return optimizer, tail.start(model, optimizer, train.counts(), steps_per_epoch=STEPS)

    def epoch_of(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> None:
        for batch in train.batches(BATCH, train.order(seed=3, epoch=epoch)):
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, other = deepfm(), deepfm()
    optimizer, tail = started(model)
    epoch_of(model, optimizer, 1)
    tail.between_epochs()
    epoch_of(model, optimizer, 2)
    states = [copy.deepcopy(one.state_dict()) for one in (model, optimizer, tail)]
    its, resumed = started(other)
    for one, state in zip((other, its, resumed), states, strict=True):
        one.load_state_dict(state)
    for one, of_it, running in ((model, optimizer, tail), (other, its, resumed)):
        running.between_epochs()
        epoch_of(one, of_it, 3)
        running.end()
    assert all(torch.equal(value, weights(other)[name]) for name, value in weights(model).items())


def test_fit_leaves_plain_tables_also_after_an_error():
    class Fails(Callback):
        def after_step(self, num_steps: int) -> None:
            raise ZeroDivisionError

    train = rows_of(64)
    for callbacks in ([Tail()], [Tail(), Fails()]):
        model = deepfm()
        kinds = [type(module) for module in model.modules()]
        if len(callbacks) > 1:
            with pytest.raises(ZeroDivisionError):
                rb.fit(model, train, callbacks=callbacks, **FIT)
        else:
            rb.fit(model, train, callbacks=callbacks, **FIT)
        assert [type(module) for module in model.modules()] == kinds


def test_a_model_that_has_the_method_keeps_it():
    model, train = deepfm(), rows_of(64)
    rb.apply_(model, Tail(counts=train.counts()), verbose=False)
    rb.fit(model, train, callbacks=[Tail()], **FIT)
    assert all(info.methods for info in rb.find_tables(model))


class Lines(Silence):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.mark.parametrize("tables", ["dense", "rowwise"])
def test_without_a_tail_it_is_plain_training_to_the_bit_and_says_so(tables):
    train, lines = frequent_rows(), Lines()
    plain = padded_model()
    model = copy.deepcopy(plain)
    options = FIT | {"tables": tables, "weight_decay": 1e-3}
    rb.fit(plain, train, train, **options)
    history = rb.fit(model, train, train, callbacks=[Tail()], **options | {"progress": lines})
    assert all(torch.equal(value, weights(model)[name]) for name, value in weights(plain).items())
    [line] = [line for line in lines.lines if line.startswith("tail: ")]
    assert line.endswith("so there is no tail, and training is plain")
    assert history.reports == {"tail": {"share": 0.0, "has_tail": False}}


def test_without_a_tail_a_loop_of_ones_own_is_plain_as_well():
    model, train = padded_model(), frequent_rows()
    plain = copy.deepcopy(model)
    optimizer, its = rb.optimizer(model, lr=0.05), rb.optimizer(plain, lr=0.05)
    tail = Tail().start(model, optimizer, train.counts(), steps_per_epoch=1)
    assert tail.state_dict() == {}
    tail.load_state_dict({})
    for _ in range(2):
        for one, of_it in ((model, optimizer), (plain, its)):
            one(train[:]).square().mean().backward()
            of_it.step()
            of_it.zero_grad()
        with tail.averaged():
            torch.testing.assert_close(model(train[:]), plain(train[:]), rtol=0, atol=0)
        tail.between_epochs()
    tail.end()
    assert all(torch.equal(value, weights(model)[name]) for name, value in weights(plain).items())


def test_a_model_of_tables_alone_has_no_network_to_average():
    table = nn.Embedding(3, 2)
    optimizer = torch.optim.SGD(table.parameters(), lr=1.0)
    tail = Tail(prior="zero", c=1.0).start(
        nn.ModuleList([table]), optimizer, torch.tensor([9, 1, 0]), steps_per_epoch=1
    )
    with tail.averaged():
        pass
    tail.between_epochs()
    tail.end()


def test_a_tail_begins_at_one_lookup_in_a_hundred():
    assert tail_share(torch.tensor([99 * 30, 29, 1])) == LEAST_SHARE
    assert tail_share(torch.tensor([0, 0])) == 0.0


def test_the_row_of_unknown_values_counts_as_one_where_a_vocabulary_has_it():
    fields = (
        rb.data.Field(name="user", rows=5, vocabulary="ab12"),
        rb.data.Field(name="item", rows=5),
        rb.data.Field(name="city", rows=5, vocabulary="cd34"),
    )
    ids = torch.tensor([[1, 1, 3], [1, 1, 4], [4, 1, 3]])
    counts = known_counts(rb.Dataset(rb.data.Schema(fields), ids, label=[0, 1, 1]))
    assert counts["user"].tolist() == [0, 1, 0, 0, 1]
    assert counts["item"].tolist() == [0, 3, 0, 0, 0]
    assert counts["city"].tolist() == [0, 0, 0, 2, 1]


def test_it_suggests_itself_for_the_table_with_the_longest_tail():
    counts = {"user": torch.tensor([90, 10]), "item": torch.tensor([60, 20, 20])}
    assert Tail.suggestion(counts).startswith("40% of the lookups of 'item' are of ids seen less")
    assert Tail.suggestion({"user": torch.tensor([3000, 30])}) == Tail.suggestion({}) == ""


@pytest.mark.parametrize(
    ("counts", "c"), [([0, 1, 2, 9], 2.0), ([300, 200, 900], 100.0), ([0, 0], 1.0)]
)
def test_c_is_the_median_count_and_at_most_a_hundred(counts, c):
    table = Tail(counts=torch.tensor(counts)).wrap(nn.Embedding(len(counts), 2))
    assert table.evidence.strength.tolist() == [c]


def test_it_asks_for_patience():
    train = rows_of(64)
    options = {**FIT, "epochs": 20, "optimizer": "sgd", "lr": 1e-300} | {"patience": "auto"}
    assert len(rb.fit(deepfm(), train, train, **options).epochs) == 3
    stopped = rb.fit(deepfm(), train, train, callbacks=[Tail()], **options)
    # forgetting changes rows, whatever the learning rate; the best epoch is one of the first
    assert len(stopped.epochs) == stopped.best_epoch + 6


def test_settings_of_training_that_average_come_first():
    splits = load_splits(SETTINGS.data)

    def trained(**training: object) -> dict[str, Tensor]:
        settings = replace(SETTINGS, methods=(Tail(),))
        settings = replace(settings, training=replace(settings.training, **training))
        model, _ = train_model(settings, *splits[:2], progress=False, say=lambda _: None)
        return weights(model)

    given, own = trained(ema_decay=0.5), trained()
    assert not all(torch.equal(given[name], own[name]) for name in own)


@pytest.mark.parametrize(
    "text",
    [
        "tail+forgetting",
        "shrinkage+tail",
        "tail+fresh-tables",
        "id-dropout+tail",
        "tail+pep",
        "tail+pruned:keep=9",
    ],
)
def test_what_has_a_part_of_it_is_refused(text):
    with pytest.raises(SettingsError, match="is refused"):
        parse_techniques(text)


@pytest.mark.parametrize("text", ["mlet+tail", "tail+harmless-transfer", "multi-embedding+tail"])
def test_other_methods_go_with_it(text):
    assert parse_techniques(text)
