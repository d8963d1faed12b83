"""A run that was stopped anywhere and resumed ends as one that was not, to the last bit."""

import copy
import dataclasses
import os
import signal
import threading

import pytest
import torch
from torch import nn
from training.rowwise_models import SCHEMA, batch_of
from watching import Watch

import rarebit as rb
from rarebit import Dataset, fit
from rarebit.errors import (
    CheckpointError,
    NotFiniteError,
    RarebitError,
    SettingsError,
    TrainingInterrupted,
)
from rarebit.models.deepfm import DeepFM
from rarebit.storage.files import Disk
from rarebit.training.checkpoints import CheckpointFolder, Checkpoints, StopRequests
from rarebit.training.fit import Silence, TrainingLoop
from rarebit.training.step import Steps, TrainingStep

SETTINGS = {
    "epochs": 4,
    "batch_size": 16,
    "lr": 0.02,
    "tables": "rowwise",
    "ema_decay": 0.9,
    "plateau_factor": 0.5,
    "patience": None,
}
STEPS = 4 * 6


def bounded(ids, gradients):
    """A rule that is not linear."""
    total = gradients.sum(dim=0)
    return total / total.norm(dim=1, keepdim=True).clamp(min=1e-3)


def data(n=96, seed=0):
    torch.manual_seed(seed)
    batch = batch_of(n)
    return Dataset(SCHEMA, batch.ids, batch.numeric, batch.label)


class StopAt(Silence):
    """Sends a signal to this process while it makes a certain step."""

    def __init__(self, step=None, number=signal.SIGTERM):
        self.step, self.number, self.lines, self.calls = step, number, [], 0

    def say(self, line):
        self.lines.append(line)

    def backward(self, backward):
        def then_signal(loss):
            self.calls += 1
            if self.calls == self.step:
                os.kill(os.getpid(), self.number)
            backward(loss)

        return then_signal


def train(folder=None, stop=None, *, resume=False, dropout=0.3, **overrides):
    """Train from a fixed start, with everything that has a state; return weights and history."""
    torch.manual_seed(1)
    model = DeepFM(SCHEMA, dim=4, hidden=(8,), dropout=dropout)
    stop = stop or StopAt()
    with rb.RowGradients(model, bounded) as rows:
        torch.manual_seed(2)
        history = fit(
            model,
            data(),
            data(64, seed=5),
            folder=folder,
            resume=resume,
            backward=stop.backward(rows.backward),
            progress=stop,
            **(SETTINGS | overrides),
        )
    return model.state_dict(), history


def without_times(history):
    records = [
        dataclasses.replace(record, seconds=0.0, samples_per_second=0.0)
        for record in history.epochs
    ]
    return records, history.best_epoch, history.stopped_early


def assert_same_run(result, expected):
    weights, history = result
    assert all(torch.equal(weights[name], expected[0][name]) for name in expected[0])
    assert without_times(history) == without_times(expected[1])


@pytest.fixture(scope="module")
def uninterrupted():
    return train()


def test_writing_checkpoints_changes_nothing(tmp_path, uninterrupted):
    assert_same_run(train(tmp_path / "run", checkpoint_minutes=1e-9), uninterrupted)


@pytest.mark.parametrize("step", [1, 2, 5, 6, 7, 12, 13, STEPS - 1, STEPS])
def test_a_run_stopped_in_any_step_goes_on_to_the_same_bits(tmp_path, uninterrupted, step):
    with pytest.raises(TrainingInterrupted, match="train again with resume") as stopped:
        train(tmp_path / "run", StopAt(step))
    assert stopped.value.exit_code == 143
    assert_same_run(train(tmp_path / "run", resume=True), uninterrupted)


def test_a_run_stopped_again_and_again_ends_the_same(tmp_path, uninterrupted):
    for step in (3, 4, 1, 6):
        with pytest.raises(TrainingInterrupted):
            train(tmp_path / "run", StopAt(step, signal.SIGINT), resume=True)
    assert_same_run(train(tmp_path / "run", resume=True), uninterrupted)


def test_a_finished_run_is_returned_as_it_ended(tmp_path, uninterrupted):
    train(tmp_path / "run")
    stop = StopAt()
    assert_same_run(train(tmp_path / "run", stop, resume=True), uninterrupted)
    assert stop.calls == 0


def test_a_longer_run_goes_on_where_the_shorter_ended(tmp_path, uninterrupted):
    train(tmp_path / "run", epochs=2)
    assert_same_run(train(tmp_path / "run", resume=True), uninterrupted)


def test_resuming_in_an_empty_folder_starts(tmp_path, uninterrupted):
    assert_same_run(train(tmp_path / "run", resume=True), uninterrupted)


def test_two_states_and_their_best_weights_are_kept(tmp_path):
    train(tmp_path / "run", checkpoint_minutes=1e-9)
    names = sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir())
    assert [name for name in names if name.startswith("at-")] == [
        "at-000004-0000000006",
        "at-000005-0000000000",
    ]
    assert 1 <= len([name for name in names if name.startswith("best-")]) <= 2


@pytest.mark.parametrize(("minutes", "written"), [(10.0, {1, 4}), (1e-9, {1, 2, 3, 4})])
def test_an_epoch_of_seconds_is_not_written_but_for_the_last(tmp_path, minutes, written):
    names = set()

    def look(_):
        names.update(path.name for path in tmp_path.glob("at-*"))

    train(tmp_path, epochs=3, checkpoint_minutes=minutes, callbacks=[Watch(look)])
    look(0)
    epochs = {int(name.split("-")[1]) for name in names if name.endswith("-0000000000")}
    assert epochs == written


def test_a_folder_with_checkpoints_is_not_overwritten(tmp_path):
    train(tmp_path / "run", epochs=1)
    with pytest.raises(CheckpointError, match="holds the checkpoints of a run; resume it with"):
        train(tmp_path / "run")


def test_another_run_is_refused_by_what_differs(tmp_path):
    train(tmp_path / "run", epochs=1)
    with pytest.raises(CheckpointError, match=r"another run: settings.lr was 0.02, now 0.5"):
        train(tmp_path / "run", resume=True, lr=0.5)


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, uninterrupted):
    with pytest.raises(TrainingInterrupted):
        train(tmp_path / "run", StopAt(9))
    newest = max((tmp_path / "run").glob("at-*")) / "tensors.safetensors"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    stop = StopAt()
    assert_same_run(train(tmp_path / "run", stop, resume=True), uninterrupted)
    assert any("is skipped" in line for line in stop.lines)


def test_best_weights_that_are_damaged_are_passed_over_with_their_state_and_written_again(
    tmp_path, uninterrupted
):
    with pytest.raises(TrainingInterrupted):
        train(tmp_path / "run", StopAt(9))
    [best] = (tmp_path / "run").glob("best-*")
    whole = {path.name: path.read_bytes() for path in best.iterdir()}
    (best / "tensors.safetensors").write_bytes(whole["tensors.safetensors"][:-1])
    stop = StopAt(9)
    with pytest.raises(TrainingInterrupted):
        train(tmp_path / "run", stop, resume=True)
    assert any(f"{best.name} is skipped" in line for line in stop.lines)
    assert "resumed from at-000001-0000000000" in " ".join(stop.lines)
    assert {path.name: path.read_bytes() for path in best.iterdir()} == whole
    assert_same_run(train(tmp_path / "run", resume=True), uninterrupted)


def test_other_threads_are_allowed_and_told(tmp_path):
    train(tmp_path / "run", epochs=1)
    torch.set_num_threads(2)
    stop = StopAt()
    train(tmp_path / "run", stop, resume=True)
    assert any("threads was 1, now 2: the weights may differ" in line for line in stop.lines)


def fit_with_rule(rule, folder, model=None, **settings):
    torch.manual_seed(1)
    model = model or DeepFM(SCHEMA, dim=4, hidden=(8,))
    with rb.RowGradients(model, rule) as rows:
        fit(
            model,
            data(),
            folder=folder,
            backward=rows.backward,
            progress=False,
            **(SETTINGS | settings),
        )


def assert_all_written_is_finite(folder):
    checkpoints = CheckpointFolder(folder)
    states = [checkpoints.read(name) for name in checkpoints.names()]
    assert states
    for state in states:
        weights = state["model"] if "model" in state else state["weights"]
        assert all(torch.isfinite(weight).all() for weight in weights.values())


@pytest.mark.parametrize("minutes", [10.0, 1e-9], ids=["by the loss", "by a checkpoint"])
def test_a_gradient_that_is_not_finite_is_traced_to_its_row_and_field(tmp_path, minutes):
    calls = []

    def poisoned(ids, gradients):
        """Give one row of the second field, the tags, a gradient that is not a number in step 8."""
        calls.append(ids)
        total = gradients.sum(dim=0)
        if len(calls) == 8:  # and again when the step is made again
            total[ids == 40 + 4] = torch.nan
            calls.clear()
            calls.extend([None] * 6)  # the checkpoint is that of the end of epoch 1
        return total

    with pytest.raises(NotFiniteError) as error:
        fit_with_rule(poisoned, tmp_path / "run", checkpoint_minutes=minutes)
    assert "the gradient of backbone.tables.stacks.0.embedding.weight was not finite" in str(
        error.value
    )
    assert "in the row of id 4 of field 'tags'" in str(error.value)
    assert_all_written_is_finite(tmp_path / "run")


def test_a_loss_that_is_not_finite_is_told_from_bad_weights(tmp_path):
    def poisoned(logits, label):
        loss = nn.functional.binary_cross_entropy_with_logits(logits, label)
        return loss * torch.where(logits.detach().abs().max() > 0.4, torch.nan, 1.0)

    torch.manual_seed(1)
    model = DeepFM(SCHEMA, dim=4, hidden=(8,))
    with pytest.raises(NotFiniteError, match="the loss was not finite, though all weights were"):
        fit(model, data(), folder=tmp_path / "run", loss=poisoned, progress=False, **SETTINGS)
    assert_all_written_is_finite(tmp_path / "run")


def test_a_second_process_is_kept_out(tmp_path):
    with (
        CheckpointFolder(tmp_path / "run").locked(),
        pytest.raises(CheckpointError, match=f"{os.getpid()}"),
    ):
        train(tmp_path / "run")


def test_a_folder_that_cannot_be_made_is_an_error_before_training(tmp_path):
    (tmp_path / "file").write_text("in the way")
    stop = StopAt()
    with pytest.raises(CheckpointError, match="file"):
        train(tmp_path / "file" / "run", stop)
    assert stop.calls == 0


def test_resuming_needs_a_folder():
    with pytest.raises(SettingsError, match="resume=True needs the folder of the checkpoints"):
        train(resume=True)


@pytest.mark.parametrize("part", ["run", "position", "optimizer", "ema", "best", "random"])
@pytest.mark.parametrize("other", [None, {}, 7], ids=str)
def test_a_whole_checkpoint_of_something_else_is_our_own_error(tmp_path, part, other):
    train(tmp_path / "run", epochs=1)
    folder = CheckpointFolder(tmp_path / "run")
    state = folder.newest("at-").state
    state[part] = other
    folder.write("at-999999-0000000000", state)
    with pytest.raises(RarebitError):
        train(tmp_path / "run", resume=True)


def test_nothing_of_another_run_is_removed(tmp_path):
    train(tmp_path / "run", epochs=1)
    names = sorted(path.name for path in (tmp_path / "run").iterdir())
    newest = max((tmp_path / "run").glob("at-*")) / "state.json"
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="another run"):
        train(tmp_path / "run", resume=True, lr=0.5)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == names


class SlowDisk(Disk):
    """Writes only when it is allowed to."""

    def __init__(self):
        self.allowed = threading.Event()

    def save_tensors(self, path, tensors):
        self.allowed.wait()
        super().save_tensors(path, tensors)


def test_what_is_written_is_what_was_there_when_it_began(tmp_path):
    disk, rows = SlowDisk(), data()
    folder, model = CheckpointFolder(tmp_path / "run", disk), DeepFM(SCHEMA, dim=4, hidden=(8,))
    step = TrainingStep(model, rb.optimizer(model, tables="rowwise", lr=0.1))
    step(rows[:16])  # so that the optimizer has a state
    loop = TrainingLoop(Steps(step, rows), None, rb.Training(), Silence())
    expected = copy.deepcopy(loop.state())
    checkpoints = Checkpoints(folder, {}, StopRequests(), minutes=1.0, say=print)
    checkpoints.save(loop)
    step(rows[:16])  # training goes on before the first byte is written
    disk.allowed.set()
    checkpoints.wait()
    checkpoints.close()
    found = folder.newest("at-").state
    for part in ("model", "step"):
        assert all(torch.equal(found[part][name], value) for name, value in expected[part].items())
    for number, values in expected["optimizer"]["state"].items():
        written = found["optimizer"]["state"][number]
        assert all(torch.equal(written[name], value) for name, value in values.items())


def test_steps_are_told_with_their_number_also_after_a_break(tmp_path):
    told = []
    with pytest.raises(TrainingInterrupted):
        train(tmp_path / "run", StopAt(5), callbacks=[Watch(told.append)])
    assert told == [1, 2, 3, 4, 5]
    train(tmp_path / "run", resume=True, callbacks=[Watch(told.append)])
    assert told == list(range(1, STEPS + 1))
