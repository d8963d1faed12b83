"""Callbacks and training methods: when they are called, what a checkpoint keeps of them, what runs share."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from capabilities import slow_after
from torch import nn
from watching import Watch

import rarebit as rb
from rarebit.callbacks import Callback, TrainingMethod
from rarebit.errors import (
    CheckpointError,
    SettingsError,
    TrainingInterrupted,
    UnsupportedTableError,
)
from rarebit.methods.harmless_transfer import HarmlessTransfer
from rarebit.models.fm import FM
from rarebit.pruning.masked import load_ticket, save_ticket
from rarebit.pruning.pruned import PruneSettings, SharedPruning, prune_run
from rarebit.training.checkpoints import CheckpointFolder
from rarebit.training.fit import Silence, _Backward
from rarebit.training.run import TrainingJob, train_model
from rarebit.training.settings import RunSettings, load_splits

SETTINGS = RunSettings(
    model="fm",
    model_settings={"dim": 4},
    data=rb.data.SyntheticLog(rows=1500),
    training=rb.Training(epochs=2, batch_size=64, lr=0.02),
)
TRAIN, VALID, _ = load_splits(SETTINGS.data)
STEPS = 2 * 19
PRUNED = rb.pruning.Pruned(keep=3000)
SRC = Path(rb.__file__).parents[1]


def silence(line):
    del line


def train(*methods, data=(TRAIN, VALID), **options):
    settings = replace(SETTINGS, methods=methods)
    return train_model(settings, *data, **({"progress": False, "say": silence} | options))


def assert_same_weights(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


LOG: list[str] = []
"""What was asked of those who took part."""


@pytest.fixture(autouse=True)
def _empty_log():
    LOG.clear()


class Noted(Callback):
    """Notes what is asked of it."""

    def __init__(self, toy):
        self.toy, self.steps = toy, 0

    def start(self, model, data):
        del data
        if self.toy.fault == "start":
            raise ValueError("a fault of its own")
        self.model = model
        if self.toy.has_backward:
            self.backward = torch.Tensor.backward

    def after_step(self, num_steps):
        self.steps += 1
        if self.toy.fault == "step":
            raise ValueError("a fault of its own")
        if num_steps == STEPS:
            LOG.append(f"{self.toy.name} saw the last of {self.steps} steps")

    def report(self):
        return {"steps": self.steps}

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state: Mapping):
        self.steps = state["steps"]

    def close(self):
        LOG.append(f"{self.toy.name} is closed")


class Zeroing(Noted):
    """Has a last word: the weights of the model become zero."""

    @torch.no_grad()
    def end(self):
        LOG.append(f"{self.toy.name} ends")
        for parameter in self.model.parameters():
            parameter.zero_()


@dataclass(frozen=True, kw_only=True)
class Toy(TrainingMethod):
    """Takes part and notes it."""

    name: str = "one"
    has_backward: bool = False
    fault: str = ""

    def callback(self):
        return Zeroing(self) if self.name == "zero" else Noted(self)


@dataclass(frozen=True, kw_only=True)
class Other(Toy):
    """Another method."""

    name: str = "two"


def test_all_of_them_see_every_step_and_are_closed_in_the_end():
    plain, _ = train()
    model, history = train(Toy(), Other())
    assert [
        f"one saw the last of {STEPS} steps",
        f"two saw the last of {STEPS} steps",
        "two is closed",
        "one is closed",
    ] == LOG
    assert history.reports == {"Toy": {"steps": STEPS}, "Other": {"steps": STEPS}}
    assert_same_weights(model, plain)


def test_apply_refuses_what_acts_around_training():
    with pytest.raises(UnsupportedTableError, match="which acts around training; pass it to fit"):
        rb.apply_(nn.Sequential(nn.Embedding(200, 4)), Toy(), verbose=False)


def test_one_way_to_turn_the_loss_into_gradients_is_enough():
    with pytest.raises(SettingsError, match="Toy and Other both turn the loss into gradients"):
        train(Toy(has_backward=True), Other(has_backward=True))
    assert LOG == ["two is closed", "one is closed"]
    plain, _ = train()
    assert_same_weights(train(Toy(has_backward=True), Other())[0], plain)


@pytest.mark.parametrize(
    ("fault", "closed"),
    [("start", ["one is closed"]), ("step", ["two is closed", "one is closed"])],
)
def test_they_are_closed_after_an_error(fault, closed):
    with pytest.raises(ValueError, match="a fault of its own"):
        train(Toy(), Other(fault=fault))
    assert closed == LOG


def test_the_last_word_comes_after_the_best_weights_and_is_measured():
    model, history = train(Toy(name="zero"))
    assert LOG[-2:] == ["zero ends", "zero is closed"]
    assert not any(bool(parameter.any()) for parameter in model.parameters())
    kept = history.epochs[history.best_epoch - 1].valid
    assert kept == rb.evaluate(model, VALID).overall
    assert kept.auc == 0.5


def test_without_validation_rows_the_last_word_is_not_measured():
    _, history = train(Toy(name="zero"), data=(TRAIN, None))
    assert history.best_epoch is None
    assert [record.valid for record in history.epochs] == [None, None]


def test_another_method_does_not_go_on_with_the_state_of_this_one(tmp_path):
    train(Toy(), folder=tmp_path / "run")
    with pytest.raises(
        CheckpointError, match="has Toy, and this training has Toy:name=three; use the"
    ):
        train(Toy(name="three"), folder=tmp_path / "run", resume=True)


def test_a_run_with_and_one_without_are_not_taken_for_each_other(tmp_path):
    train(Toy(), folder=tmp_path / "with")
    with pytest.raises(
        CheckpointError, match="checkpoint has Toy, and this training has no callbacks"
    ):
        train(folder=tmp_path / "with", resume=True)
    train(folder=tmp_path / "without")
    with pytest.raises(
        CheckpointError, match="checkpoint has no callbacks, and this training has Toy"
    ):
        train(Toy(), folder=tmp_path / "without", resume=True)


def stopped(path, *methods):
    """Stop a training in its second epoch, and return the folder and state of its newest checkpoint."""

    class Stop(Silence):
        calls = 0

        def advance(self, rows):
            del rows
            self.calls += 1
            if self.calls == 4:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(TrainingInterrupted):
        train(*methods, folder=path, progress=Stop())
    folder = CheckpointFolder(path)
    return folder, folder.newest("at-").state


@pytest.mark.parametrize("methods", [(), (HarmlessTransfer(),)])
def test_a_checkpoint_of_an_older_version_resumes(tmp_path, methods):
    whole, history = train(*methods)
    folder, state = stopped(tmp_path / "run", *methods)
    states = state.pop("callbacks")
    folder.write("at-999999-0000000000", state | {"others": [states] if methods else []})
    again = train(*methods, folder=tmp_path / "run", resume=True)
    assert_same_weights(again.model, whole)
    assert again.history.reports == history.reports


def test_a_checkpoint_from_before_methods_had_a_state_resumes(tmp_path):
    whole, _ = train()
    folder, state = stopped(tmp_path / "run")
    assert state.pop("callbacks") == {}
    folder.write("at-999999-0000000000", state)
    assert_same_weights(train(folder=tmp_path / "run", resume=True)[0], whole)


def rewritten(path, states, number=1):
    """Write the newest checkpoint again, as an older version did."""
    folder = CheckpointFolder(path)
    state = folder.newest("at-").state
    state.pop("callbacks", None)
    folder.write(f"at-999999-000000000{number}", state | {"others": states})


class Halving:
    """Turns the loss into gradients, and counts."""

    def __init__(self):
        self.steps = 0

    def backward(self, loss):
        self.steps += 1
        (loss / (1 + self.steps)).backward()

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def test_an_older_state_of_the_owner_of_a_backward_is_read(tmp_path):
    options = {"batch_size": 64, "progress": False, "folder": tmp_path / "run", "patience": None}
    first, then = Halving(), Halving()
    model = FM(TRAIN.schema, dim=4)
    rb.fit(model, TRAIN, backward=first.backward, epochs=1, **options)
    rewritten(tmp_path / "run", [first.state_dict()])
    rb.fit(model, TRAIN, backward=then.backward, epochs=2, resume=True, **options)
    assert then.steps == 2 * first.steps == STEPS
    rewritten(tmp_path / "run", [then.state_dict()], number=2)
    with pytest.raises(CheckpointError, match="this training has no callbacks; use the same"):
        rb.fit(model, TRAIN, epochs=3, resume=True, **options)


def test_an_older_checkpoint_says_nothing_of_callbacks_without_a_state(tmp_path):
    options = {"batch_size": 64, "progress": False, "folder": tmp_path / "run", "patience": None}
    model, seen = FM(TRAIN.schema, dim=4), []
    rb.fit(model, TRAIN, epochs=1, callbacks=[Watch(seen.append)], **options)
    rewritten(tmp_path / "run", [])
    rb.fit(model, TRAIN, epochs=2, callbacks=[Watch(seen.append)], resume=True, **options)
    assert seen == list(range(1, STEPS + 1))


class Keeps:
    """Something with a state, not a module."""

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        del state

    def call(self, *_):
        return None


class Module(nn.Module, Keeps):
    """The same as a module: part of the model, or the user's affair."""


def test_the_state_of_the_owner_of_a_backward_is_checkpointed():
    one = Keeps()
    one.steps = 7
    backward = _Backward(one.call)
    assert backward.state_dict() == one.state_dict()
    assert _Backward(Module().call).state_dict() == {}
    assert _Backward(print).state_dict() == {}


KILLED = """
import os, signal, sys
from dataclasses import replace
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_callbacks import SETTINGS, TRAIN, VALID, Silence, HarmlessTransfer, train_model

class Kill(Silence):
    calls = 0
    def advance(self, rows):
        self.calls += 1
        if self.calls == 5:  # at the start and the end of an epoch, and in between: in the second
            os.kill(os.getpid(), signal.SIGKILL)

training = replace(SETTINGS.training, checkpoint_minutes=1e-9)
settings = replace(SETTINGS, training=training, methods=(HarmlessTransfer(),))
train_model(settings, TRAIN, VALID, folder=Path(sys.argv[1]), progress=Kill(), say=len)
"""


@pytest.mark.slow
def test_a_killed_process_with_a_discriminator_goes_on_to_the_same_bits(tmp_path):
    folder = tmp_path / "run"
    tests = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(folder), str(tests)],
        env=os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == -9
    assert max(path.name for path in folder.glob("at-*")) > "at-000002-0000000005"
    again, history = train(HarmlessTransfer(), folder=folder, resume=True)
    whole, its_history = train(HarmlessTransfer())
    assert_same_weights(again, whole)
    assert history.reports == its_history.reports


def test_the_state_in_a_checkpoint_is_what_makes_the_bits_the_same(tmp_path):
    class Stop(Silence):
        def advance(self, rows):
            if rows == 640:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(HarmlessTransfer(lr=1.0), folder=tmp_path / "run", progress=Stop(), say=silence)
    # the same with discriminators that start anew ends elsewhere: the state is needed
    whole, _ = train(HarmlessTransfer(lr=1.0))
    folder = CheckpointFolder(tmp_path / "run")
    state = folder.newest("at-").state
    [losses] = state["callbacks"]["harmless-transfer"]["state"]["losses"].values()
    losses["weight"] = torch.ones_like(losses["weight"])
    folder.write("at-999999-0000000000", state)
    other, _ = train(HarmlessTransfer(lr=1.0), folder=tmp_path / "run", resume=True)
    same = [torch.equal(other.state_dict()[n], w) for n, w in whole.state_dict().items()]
    assert not all(same)


def report(trained):
    return trained.history.reports["harmless-transfer"]


@pytest.mark.parametrize("by", ["threshold", "magnitude"])
def test_pruning_is_without_transfer_and_the_second_stage_with_it(tmp_path, by):
    pruned = rb.pruning.Pruned(keep=3000, by=by)
    plain = train(pruned, folder=tmp_path / "plain" / "checkpoints")
    found = train(pruned, HarmlessTransfer(), folder=tmp_path / "with" / "checkpoints")
    assert report(found)["steps"] == STEPS
    kept = [
        {name: rows != 0 for name, rows in _rows(trained.model).items()}
        for trained in (plain, found)
    ]
    assert all(torch.equal(kept[0][name], kept[1][name]) for name in kept[0])
    differ = [not torch.equal(a, _rows(found.model)[n]) for n, a in _rows(plain.model).items()]
    assert any(differ)


def _rows(model):
    return {
        field.name: table.weight.detach()
        for field, table in zip(
            model.backbone.tables.fields, model.backbone.tables.tables(), strict=True
        )
    }


def test_tables_that_are_not_trained_again_have_no_place_for_a_transfer():
    with pytest.raises(SettingsError, match="does not retrain them; use start='ticket'"):
        train(rb.pruning.Pruned(keep=3000, start="trained"), HarmlessTransfer())


@pytest.mark.slow
@pytest.mark.parametrize("by", slow_after(["threshold", "magnitude"]))
def test_a_first_stage_that_is_shared_gives_the_same_bits(tmp_path, by):
    pruned = rb.pruning.Pruned(keep=3000, by=by)
    alone, _ = train(pruned, HarmlessTransfer())
    shared = SharedPruning(tmp_path / "stage", (3000,), as_ticket=True)
    train(pruned, shared=shared, folder=tmp_path / "a" / "checkpoints")
    left = sorted(path.name for path in (tmp_path / "stage").iterdir())
    assert left == ["lock", "ticket"]
    found, _ = train(
        pruned, HarmlessTransfer(), shared=shared, folder=tmp_path / "b" / "checkpoints"
    )
    assert_same_weights(found, alone)


@pytest.mark.filterwarnings("ignore:.* makes all rows")
def test_a_first_stage_that_is_there_is_not_made_again(tmp_path):
    shared = SharedPruning(tmp_path / "stage", (3000,), as_ticket=True)
    train(PRUNED, shared=shared, folder=tmp_path / "a" / "checkpoints")
    ticket = load_ticket(tmp_path / "stage" / "ticket")
    kept = {name: torch.zeros_like(mask) for name, mask in ticket.kept.items()}
    for mask in kept.values():
        mask[:7] = True
    save_ticket(rb.pruning.Ticket(kept, start=ticket.start), tmp_path / "stage" / "ticket")
    model, _ = train(PRUNED, shared=shared, folder=tmp_path / "b" / "checkpoints")
    assert all(not rows[7:].any() and rows[:7].any() for rows in _rows(model).values())


def test_a_rising_threshold_leaves_no_room_for_tables_with_a_callback():
    class Shrinking(rb.Shrinkage):
        """The same with a callback."""

        def callback(self):
            return Noted(Toy())

    message = (
        "Shrinking acts around training, .* does not support that; use pruned with by='magnitude'"
    )
    with pytest.raises(SettingsError, match=message):
        train(Shrinking(), PRUNED)


@pytest.mark.slow
def test_several_budgets_are_pruned_once_and_each_is_trained_again_with_transfer(tmp_path):
    settings = replace(SETTINGS, methods=(HarmlessTransfer(),))
    found = prune_run(
        settings,
        PruneSettings(budgets=(3000, 500)),
        folder=tmp_path,
        progress=False,
        say=silence,
    )
    runs = [found.unpruned, *found.pruned.values()]
    assert [run.history.reports["harmless-transfer"]["steps"] for run in runs] == [STEPS] * 3
    left = [
        sum(int((rows != 0).sum()) for rows in _rows(run.model).values())
        for run in found.pruned.values()
    ]
    assert left == [3000, 500]


def job_of(log):
    return TrainingJob(settings=replace(SETTINGS, data=log), train=TRAIN, valid=VALID)


def test_methods_know_the_training_and_the_folder_of_a_prepared_log():
    known = rb.training.PreparedLog(folder="logs/clicks", checksum="abc")
    data = job_of(known).data(SETTINGS.training)
    assert (data.train, data.valid, data.batch_size) == (TRAIN, VALID, 64)
    assert (data.steps_per_epoch, data.seed) == (STEPS // 2, 0)
    assert (data.folder, data.checksum) == (Path("logs/clicks"), "abc")
    for log in (SETTINGS.data, rb.training.PreparedLog(folder="logs/clicks")):
        data = job_of(log).data(SETTINGS.training)
        assert (data.folder, data.checksum) == (None, "")


def test_a_selection_is_kept_with_a_prepared_log_for_the_next_run(tmp_path):
    log = rb.training.PreparedLog(folder=str(tmp_path), checksum="abc")
    settings = replace(SETTINGS, data=log, methods=(HarmlessTransfer(),))

    def run():
        return train_model(settings, TRAIN, VALID, progress=False, say=silence)

    first = run()
    [kept] = (tmp_path / "selections").iterdir()
    found = rb.data.load_selection(kept, data_checksum="abc")
    assert_same_weights(run().model, first.model)
    # nobody is to learn any more: the next run reads that
    fields = {
        name: replace(part, target=torch.zeros_like(part.target))
        for name, part in found.fields.items()
    }
    rb.data.save_selection(replace(found, fields=fields), kept)
    tables = report(run())["tables"].values()
    assert [table["rows"] for table in tables] == [0] * 5


class Writer:
    """Keeps what it is told, by the method that a tool of this kind has."""

    def __init__(self, method):
        self.seen = []
        setattr(self, method, getattr(self, f"_{method}"))

    def _add_scalar(self, name, value, epoch):
        self.seen.append((name, value, epoch))

    def _log_metric(self, key, value, step):
        self.seen.append((key, value, step))

    def _log(self, values, step):
        [(name, value)] = values.items()
        self.seen.append((name, value, step))


@pytest.mark.parametrize("method", ["add_scalar", "log_metric", "log"])
def test_figures_of_epochs_reach_ones_own_tools(method):
    writer = Writer(method)
    history = rb.fit(
        FM(TRAIN.schema, dim=2), TRAIN, VALID, epochs=2, callbacks=[rb.LogTo(writer, prefix="fm/")], progress=False
    )  # fmt: skip
    seen = {(name, epoch): value for name, value, epoch in writer.seen}
    for record in history.epochs:
        assert seen["fm/train_loss", record.epoch] == record.train_loss
        assert seen["fm/valid_auc", record.epoch] == record.valid.auc
        assert seen["fm/samples_per_second", record.epoch] == record.samples_per_second
    assert len(seen) == len(writer.seen) == 10


def test_what_cannot_be_logged_to_is_refused():
    with pytest.raises(SettingsError, match=r"LogTo takes a TensorBoard SummaryWriter, .* got int"):
        rb.LogTo(3)
