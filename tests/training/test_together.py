"""Runs that train as one stacked model, against the same runs alone."""

import signal
from dataclasses import dataclass, replace

import pytest
import torch
from capabilities import needs_cuda, slow_after

import rarebit as rb
from rarebit.callbacks import Callback, TrainingMethod
from rarebit.errors import NotFiniteError, SettingsError, TrainingInterrupted
from rarebit.models import model_names, model_settings
from rarebit.models.deepfm import DeepFMHead
from rarebit.study.runs import runs_together, stack_key
from rarebit.technique import parse_techniques
from rarebit.training.fit import Silence
from rarebit.training.run import model_course, train_model
from rarebit.training.settings import RunSettings, Training, load_splits
from rarebit.training.together import together

SPLITS = load_splits(rb.data.SyntheticLog(rows=2500))
METHODS = (
    *("none", "hashing:buckets=50", "mlet:inner_dim=12", "low-rank:rank=3", "shrinkage", "pep"),
    *(
        "forgetting",
        "tail",
        "multi-embedding:num_sets=2",
        "fresh-tables:sets=2",
        "qr:buckets=40",
        "tt-rec:rank=2",
    ),
)
ALONE = {
    "harmless-transfer": "something else turns losses into gradients",
    "adam-ar": "has hooks",
    "group-stopping": "something acts between steps",
}


@pytest.fixture
def double():
    """Weights in float64: rounding stays far below any error."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def run_settings(seed=0, *, model="deepfm", methods="none", values=None, **training):
    usual = {"dim": 4, "dropout": 0.2, "hidden": [16, 8]} if values is None else values
    known = {}
    for name, value in usual.items():
        try:
            known |= dict(model_settings(model, {**known, name: value}))
        except SettingsError:  # this model has no such setting
            continue
    found = () if methods == "none" else parse_techniques(methods)[0].parts
    return RunSettings(
        model=model,
        model_settings=known,
        methods=tuple(part.build() for part in found),
        training=Training(
            **{"epochs": 2, "batch_size": 256, "seed": seed, "patience": None} | training
        ),
    )


def course(settings, **options):
    return model_course(
        settings, SPLITS.train, SPLITS.valid, **{"progress": False, "say": len} | options
    )


def alone(settings, **options):
    return train_model(
        settings, SPLITS.train, SPLITS.valid, **{"progress": False, "say": len} | options
    )


def train(cases, **options):
    said = []
    ended = {
        one.number: one for one in together([course(c, **options) for c in cases], said.append)
    }
    assert sorted(ended) == [*range(len(cases))]
    return [ended[number] for number in range(len(cases))], said


def difference(model, other):
    """Return the largest difference of two models' states, relative to the largest number of each tensor."""
    state, wanted = model.state_dict(), other.state_dict()
    assert state.keys() == wanted.keys()
    return max(
        float((state[name] - value).abs().max() / value.abs().max().clamp(min=1e-3))
        for name, value in wanted.items()
        if value.is_floating_point() and value.numel()
    )


def assert_same(ended, cases, bound):
    for one, settings in zip(ended, cases, strict=True):
        assert one.error is None, one.error
        model, history = alone(settings)
        assert difference(one.result.model, model) <= bound
        own = one.result.history
        assert own.best_epoch == history.best_epoch
        assert own.stopped_early == history.stopped_early
        for ours, theirs in zip(own.epochs, history.epochs, strict=True):
            assert ours.valid.auc == pytest.approx(theirs.valid.auc, abs=max(bound, 1e-6))
            assert ours.train_loss == pytest.approx(theirs.train_loss, rel=max(bound, 1e-9))
            assert (ours.steps, ours.lr) == (theirs.steps, theirs.lr)


@pytest.mark.parametrize("name", slow_after(model_names()))
def test_a_member_of_a_stack_is_the_run_alone(name, double):
    cases = [run_settings(seed, model=name, lr=1e-2 * (seed + 1)) for seed in range(3)]
    ended, said = train(cases)
    assert said == []
    # its batch normalisation sees nearly equal numbers, and magnifies rounding
    assert_same(ended, cases, 1e-6 if name == "nfwfm" else 1e-9)


@pytest.mark.parametrize("tables", ["dense", "rowwise"])
@pytest.mark.parametrize("methods", slow_after(METHODS))
def test_a_member_with_a_method_is_the_run_alone(methods, tables, double):
    cases = [
        run_settings(seed, model="dcn_v2", methods=methods, tables=tables, lr=1e-3 * (seed + 1))
        for seed in range(2)
    ]
    ended, said = train(cases)
    assert said == []
    assert_same(ended, cases, 1e-9)


def test_members_in_single_precision_stay_together_for_three_epochs():
    cases = [
        run_settings(seed, model="dcn_v2", epochs=3, lr=1e-3, optimizer="sgd") for seed in (5, 6)
    ]
    ended, _ = train(cases)
    assert_same(ended, cases, 1e-5)


@pytest.mark.parametrize("optimizer", ["adam", "adagrad", "sgd"])
def test_members_have_their_own_rates_decays_averages_and_ends(optimizer, double):
    cases = [
        run_settings(0, optimizer=optimizer, epochs=5, patience=1, lr=0.1),
        run_settings(1, optimizer=optimizer, epochs=5, weight_decay=1e-3, ema_decay=0.9),
        run_settings(2, optimizer=optimizer, epochs=3, clip_norm=0.1, plateau_factor=0.5),
        run_settings(3, optimizer=optimizer, epochs=1, table_lr=1e-4),
    ]
    ended, said = train(cases)
    assert said == []
    assert_same(ended, cases, 1e-9)


@pytest.mark.parametrize("ema_epochs", [None, 0.5])
def test_normalisation_keeps_statistics_of_each_member(double, ema_epochs):
    # few steps: batch normalisation of nearly equal numbers magnifies rounding without end
    values = {"dim": 4, "hidden": [8], "batch_norm": True, "dropout": 0.3}
    training = {"epochs": 1, "lr": 1e-3, "ema_epochs": ema_epochs}
    cases = [run_settings(seed, values=values, **training) for seed in range(3)]
    ended, said = train(cases)
    assert said == []
    assert_same(ended, cases, 1e-6)


def test_strengths_of_what_acts_around_training_may_differ(double):
    cases = [run_settings(0, methods=f"forgetting:c={c}") for c in (3.0, 300.0)]
    assert stack_key(cases[0]) == stack_key(cases[1])
    ended, said = train(cases)
    assert said == []
    assert_same(ended, cases, 1e-9)


def test_buffers_may_differ(double):
    cases = [run_settings(0, methods=f"shrinkage:c={c}") for c in (3.0, 30.0)]
    ended, said = train(cases)
    assert said == []
    assert_same(ended, cases, 1e-9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own, as it loads parts
def test_a_compiled_stack_is_the_runs_alone():
    values = {"dim": 4, "hidden": [16, 8], "dropout": 0.0}
    cases = [run_settings(seed, values=values, epochs=1, compile=True) for seed in range(2)]
    ended, said = train(cases)
    assert said == []
    plain = [replace(c, training=replace(c.training, compile=False)) for c in cases]
    assert_same(ended, plain, 1e-4)


def test_a_member_that_diverges_leaves_the_others_as_they_are(double):
    cases = [run_settings(seed, optimizer="sgd", lr=lr) for seed, lr in enumerate((0.1, 1e30, 0.1))]
    ended, _ = train(cases)
    assert isinstance(ended[1].error, NotFiniteError)
    assert_same([ended[0], ended[2]], [cases[0], cases[2]], 1e-9)


@pytest.mark.parametrize(("methods", "why"), ALONE.items())
def test_what_cannot_be_stacked_trains_alone_to_the_same_bits_and_says_why(methods, why):
    cases = [run_settings(seed, methods=methods) for seed in range(2)]
    ended, said = train(cases)
    assert len(said) == 1
    assert said[0].startswith("2 runs train one after the other: ")
    assert why in said[0]
    assert_same(ended, cases, 0.0)


def test_other_shapes_are_not_stacked():
    cases = [run_settings(0, values={"dim": dim}) for dim in (3, 4)]
    ended, said = train(cases)
    assert "other shapes" in said[0]
    assert_same(ended, cases, 0.0)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        (lambda score: score + 1.0, "their scores differ by"),
        (lambda score: 2 * score - score.detach(), "the gradient of"),
        (lambda score: score + torch.rand_like(score), "randomness"),
    ],
)
def test_a_stack_that_computes_otherwise_than_its_members_is_refused(monkeypatch, changed, why):
    forward = DeepFMHead.forward

    def traced(head, features):
        score = forward(head, features)
        return changed(score) if torch._C._functorch.is_batchedtensor(score) else score

    monkeypatch.setattr(DeepFMHead, "forward", traced)
    cases = [run_settings(seed) for seed in range(2)]
    ended, said = train(cases)
    assert why in said[0]
    assert_same(ended, cases, 0.0)


def test_a_stack_whose_first_step_fails_leaves_its_members_as_they_were(monkeypatch):
    forward = DeepFMHead.forward

    def fails(head, features):
        score = forward(head, features)
        if head.training and torch._C._functorch.is_batchedtensor(score):
            raise RuntimeError("no such kernel")
        return score

    monkeypatch.setattr(DeepFMHead, "forward", fails)
    values = {"dim": 4, "hidden": [8], "batch_norm": True, "dropout": 0.3}
    cases = [run_settings(seed, values=values) for seed in range(2)]
    ended, said = train(cases)
    assert said == ["2 runs train one after the other: no such kernel"]
    assert_same(ended, cases, 0.0)


@dataclass(frozen=True, kw_only=True)
class Holding(TrainingMethod):
    """Changes the first weights between epochs, through memory that it looked up at the start."""

    registered_name = "holding"

    def callback(self):
        return _Holding()


class _Holding(Callback):
    def start(self, model, data):
        self.weight = next(iter(model.parameters())).detach()

    def between_epochs(self, epoch, optimizer):
        self.weight.mul_(0.5)


def test_memory_that_something_else_holds_is_not_moved():
    cases = [replace(run_settings(seed), methods=(Holding(),)) for seed in range(2)]
    ended, said = train(cases)
    assert "something else holds the memory" in said[0]
    assert_same(ended, cases, 0.0)


@dataclass(frozen=True, kw_only=True)
class Moving(TrainingMethod):
    """Gives all weights other memory between epochs."""

    registered_name = "moving"

    def callback(self):
        return _Moving()


class _Moving(Callback):
    def start(self, model, data):
        self.model = model

    def between_epochs(self, epoch, optimizer):
        for parameter in self.model.parameters():
            parameter.data = 0.9 * parameter.data


def test_weights_may_move_between_epochs(double):
    cases = [
        replace(run_settings(seed, epochs=3), methods=(Moving(),) if seed else ())
        for seed in range(3)
    ]
    ended, said = train(cases)
    assert said == []
    assert_same(ended, cases, 1e-9)


class StopAt(Silence):
    """Asks training to stop after an epoch."""

    def __init__(self, epoch):
        self.epoch = epoch

    def finish_epoch(self, record):
        if record.epoch == self.epoch:
            signal.raise_signal(signal.SIGTERM)


def test_a_stopped_stack_resumes_to_the_same_numbers(tmp_path, double):
    cases = [run_settings(seed, methods="tail", epochs=4, tables="rowwise") for seed in range(3)]
    folders = [tmp_path / str(seed) for seed in range(3)]
    first = [
        course(c, folder=folder, progress=StopAt(2) if folder.name == "1" else False)
        for c, folder in zip(cases, folders, strict=True)
    ]
    ended = [*together(first, len)]
    assert all(isinstance(one.error, TrainingInterrupted) for one in ended)
    again = [course(c, folder=f, resume=True) for c, f in zip(cases, folders, strict=True)]
    said = []
    ended = sorted(together(again, said.append), key=lambda one: one.number)
    assert said == []
    assert_same(ended, cases, 1e-9)


def test_members_that_resume_at_other_places_catch_up(tmp_path, double):
    cases = [run_settings(seed, epochs=3) for seed in range(2)]
    stop = course(cases[0], folder=tmp_path, progress=StopAt(2))
    [ended] = together([stop], len)
    assert isinstance(ended.error, TrainingInterrupted)
    again = [course(cases[0], folder=tmp_path, resume=True), course(cases[1])]
    ended = sorted(together(again, len), key=lambda one: one.number)
    assert_same(ended, cases, 1e-9)


def test_only_runs_of_one_shape_are_put_together():
    base = run_settings(0)
    same = [run_settings(7), run_settings(lr=0.1), run_settings(weight_decay=1.0, ema_epochs=1.0)]
    assert {stack_key(one) for one in same} == {stack_key(base)}
    others = [
        run_settings(batch_size=128),
        run_settings(tables="rowwise"),
        run_settings(optimizer="sgd"),
        run_settings(values={"dim": 5}),
        run_settings(model="dcn_v2"),
        run_settings(methods="shrinkage"),
        run_settings(methods="shrinkage:c=3.0"),
        replace(base, data=rb.data.SyntheticLog(rows=2600)),
    ]
    keys = [stack_key(base), *map(stack_key, others)]
    assert len(set(keys)) == len(keys)
    assert stack_key(run_settings(one_pass=True)) is None
    assert stack_key(run_settings(methods="pruned:keep=500")) is None


def test_a_stack_is_the_default_on_a_gpu_only():
    assert runs_together("auto", torch.device("cpu")) == 1
    assert runs_together("auto", torch.device("cuda")) > 1
    assert runs_together(7, torch.device("cpu")) == 7
    with pytest.raises(
        SettingsError, match="together must be 'auto' or at least 1, got together=0"
    ):
        runs_together(0, torch.device("cpu"))


@needs_cuda
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_members_on_a_gpu_are_the_runs_alone(cuda_graph):
    values = {"dim": 4, "hidden": [16, 8], "dropout": 0.0}  # which draws other numbers there
    cases = [
        run_settings(seed, values=values, epochs=3, lr=1e-3, cuda_graph=cuda_graph)
        for seed in range(3)
    ]
    device = {"device": "cuda"}
    data = [part.to("cuda") for part in SPLITS[:2]]
    options = {"progress": False, "say": len, **device}
    said = []
    courses = [model_course(c, *data, **options) for c in cases]
    for one in together(courses, said.append):
        model, _ = train_model(cases[one.number], *data, **options)
        assert difference(one.result.model, model) <= 1e-5
    assert said == []
