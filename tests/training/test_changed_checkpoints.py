"""A checkpoint that was changed and sealed again is refused in a sentence, or resumes to the same end.

Torch's fused optimizers read beyond the end of a state that is too short, so nothing may reach them unchecked.
"""

import functools
import importlib.util
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from training.rowwise_models import SCHEMA, batch_of

import rarebit as rb
from rarebit.errors import CheckpointError, OptimizerError
from rarebit.models.fm import FM
from rarebit.research.group_stopping import GroupStopping
from rarebit.training.checkpoints import CheckpointFolder
from rarebit.training.optimizers import fitting_state

FAULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "faults.py"
SPEC = importlib.util.spec_from_file_location("faults", FAULTS)
faults = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(faults)

FOLDER = tempfile.TemporaryDirectory()


@functools.cache
def stopped(kind):
    """A run of this kind that was stopped half-way, and every change that can be made to its state."""
    run = faults.Stopped(Path(FOLDER.name) / str(kind), faults.KINDS[kind])
    tensors = [
        (path, change)
        for path, change in faults.all_changes(run.state)
        if isinstance(faults.look_up(run.state, path), torch.Tensor)
    ]
    return run, tensors


def check(kind, draw):
    run, tensors = stopped(kind)
    path, change = draw(st.sampled_from(tensors))
    assert run.outcome(faults.changed(run.state, path, change)) in {"same", "refused"}


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_changed_tensor_is_refused_or_does_not_matter(data):
    check(
        faults.KINDS.index({"optimizer": "adam", "tables": "rowwise", "ema_decay": 0.9}), data.draw
    )


@pytest.mark.slow
@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_changed_tensor_is_refused_with_every_optimizer(data):
    check(data.draw(st.integers(0, len(faults.KINDS) - 1)), data.draw)


def test_an_unchanged_state_ends_the_same():
    run, _ = stopped(2)
    assert run.outcome(run.state) == "same"


def stepped(kind, **options):
    """A parameter and its optimizer after a step."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(6, 4))
    optimizer = kind([parameter], **options)
    if kind is torch.optim.SparseAdam:
        parameter.grad = torch.ones(6, 4).to_sparse(1)
    else:
        parameter.grad = torch.ones(6, 4)
    optimizer.step()
    return optimizer


KINDS = [
    (torch.optim.Adam, {"fused": True}),
    (torch.optim.Adam, {"amsgrad": True}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    (torch.optim.Adagrad, {"fused": True}),
    (torch.optim.Adafactor, {}),
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (torch.optim.NAdam, {}),
    (torch.optim.Rprop, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.SparseAdam, {}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS, ids=lambda one: getattr(one, "__name__", ""))
def test_the_state_of_any_optimizer_of_torch_is_checked_to_its_shapes(kind, options):
    saved = stepped(kind, **options).state_dict()
    fresh = kind([torch.nn.Parameter(torch.zeros(6, 4))], **options)
    fresh.load_state_dict(fitting_state(fresh, saved, []))
    fresh = kind([torch.nn.Parameter(torch.zeros(6, 4))], **options)
    for name, value in saved["state"][0].items():
        if not isinstance(value, torch.Tensor):
            continue
        rest = {key: other for key, other in saved["state"][0].items() if key != name}
        others = [value.reshape(-1)[:1].repeat(7), value.to(torch.int64), value.unsqueeze(0), None]
        for state in (
            rest,
            *({**rest, name: other} for other in others),
            saved["state"][0] | {"x": value},
        ):
            with pytest.raises(OptimizerError, match="the state of parameter 0"):
                fitting_state(fresh, saved | {"state": {0: state}})
    with pytest.raises(OptimizerError, match="not that of the parameters"):
        fitting_state(fresh, saved | {"state": {}}, [])
    with pytest.raises(OptimizerError, match="not that of the parameters"):
        fitting_state(fresh, saved | {"state": {3: saved["state"][0]}})


@pytest.mark.parametrize("count", [float("nan"), float("inf"), -1.0, 0.5])
def test_a_count_of_steps_that_is_none_is_refused(count):
    saved = stepped(torch.optim.Adam).state_dict()
    saved["state"][0]["step"] = torch.tensor(count)
    with pytest.raises(OptimizerError, match="the state of parameter 0"):
        fitting_state(torch.optim.Adam([torch.nn.Parameter(torch.zeros(6, 4))]), saved)


@pytest.mark.parametrize(
    ("option", "value"),
    [("lr", "x"), ("lr", float("nan")), ("betas", (0.9,)), ("maximize", True), ("params", [1])],
)
def test_options_of_another_kind_are_refused(option, value):
    saved = stepped(torch.optim.Adam).state_dict()
    saved["param_groups"][0][option] = value
    with pytest.raises(OptimizerError, match=f"the state has {option}="):
        fitting_state(torch.optim.Adam([torch.nn.Parameter(torch.zeros(6, 4))]), saved)


class Scaled(torch.optim.Optimizer):
    """An optimizer from elsewhere whose step needs what its constructor makes."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
        self.scale = 2.0

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["seen"] = torch.tensor([self.scale])


def test_the_state_of_a_foreign_optimizer_that_takes_no_steps_here_is_left_to_it():
    parameter = torch.nn.Parameter(torch.zeros(6, 4))
    optimizer = Scaled([parameter])
    optimizer.step()
    again = Scaled([parameter])
    again.load_state_dict(fitting_state(again, optimizer.state_dict(), []))
    assert torch.equal(again.state[parameter]["seen"], torch.tensor([2.0]))


def test_the_state_of_a_callback_is_checked_too(tmp_path):
    def train(**options):
        torch.manual_seed(0)
        batch = batch_of(64)
        rows = rb.Dataset(SCHEMA, batch.ids, batch.numeric, batch.label)
        model = FM(SCHEMA, dim=2)
        rb.fit(
            model,
            rows,
            rows,
            epochs=2,
            callbacks=[GroupStopping()],
            folder=tmp_path,
            progress=False,
            **options,
        )

    train()
    folder = CheckpointFolder(tmp_path)
    state = folder.newest("at-").state
    rows = next(iter(state["callbacks"].values()))["state"]["rows"]
    name = next(iter(rows))
    rows[name] = rows[name][:1]  # torch would repeat it for every row
    folder.write("at-999999-0000000000", state)
    with pytest.raises(CheckpointError, match=f"{name}' is float32 .* in the state"):
        train(resume=True)
