"""What a service and a GPU need of every model: a graph without Rarebit, and steps that are replayed."""

import copy
import inspect
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from capabilities import needs_cuda, slow_after
from contract import model_checks as checks
from torch import Tensor, nn
from torch.testing import assert_close

import rarebit as rb
from rarebit.models import build_model, model_class, model_names
from rarebit.training.fit import Silence

ROWS = 1000
SMALL = {"dim": 6, "hidden": (8, 8)}
COMPILED = ("deepfm", "autoint")
"""Models compiled all the way: the contract has all of them compiled without code being written."""

every_model = pytest.mark.parametrize("name", model_names())


def settings_of(name):
    known = inspect.signature(model_class(name)).parameters
    return {key: value for key, value in SMALL.items() if key in known}


def build(name, num_sets=None):
    model = build_model(name, checks.SCHEMA, settings_of(name))
    return checks.lively(lambda _: model if num_sets is None else model.with_sets(num_sets))


class Scorer(nn.Module):
    """A model that takes tensors: what a service sends."""

    def __init__(self, model: nn.Module, schema: rb.data.Schema) -> None:
        super().__init__()
        self.model, self.schema = model, schema

    def forward(self, ids: Tensor, numeric: Tensor) -> Tensor:
        label = numeric.new_zeros(ids.shape[0])
        return self.model(rb.data.Batch(ids, numeric, label, self.schema))


def export(model, batch):
    rows = torch.export.Dim("rows")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch's own
        return torch.export.export(
            Scorer(model, batch.schema),
            (batch.ids, batch.numeric),
            dynamic_shapes={"ids": {0: rows}, "numeric": {0: rows}},
        )


SERVICE = """
    import sys

    sys.modules["rarebit"] = None  # what tries to import it fails
    import torch

    for line in sys.stdin:
        folder = line.strip()
        score = torch.export.load(f"{folder}/model.pt2").module()
        sent = torch.load(f"{folder}/sent.pt", weights_only=True)
        torch.save([score(*batch).detach() for batch in sent], f"{folder}/scores.pt")
        print("scored", flush=True)
"""


@pytest.fixture(scope="module")
def service():
    """A process that cannot import Rarebit: a folder with an exported model and batches to scores."""
    # -I: neither the working folder nor PYTHONPATH is looked into
    command = [sys.executable, "-W", "ignore", "-I", "-c", textwrap.dedent(SERVICE)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with subprocess.Popen(command, text=True, **pipes) as process:

        def scores(folder, batches):
            torch.save([(batch.ids, batch.numeric) for batch in batches], folder / "sent.pt")
            process.stdin.write(f"{folder}\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            assert answer == "scored\n", answer + process.communicate()[0]
            return torch.load(folder / "scores.pt", weights_only=True)

        yield scores
        process.stdin.close()


@pytest.mark.parametrize(
    ("name", "num_sets"),
    slow_after([("deepfm", 2), ("autoint", 3), *((name, None) for name in model_names())]),
)
def test_an_exported_model_scores_the_same_without_rarebit(name, num_sets, service, tmp_path):
    model, batch = build(name, num_sets).eval(), checks.make_batch(ROWS)
    torch.export.save(export(model, checks.make_batch(7)), tmp_path / "model.pt2")
    with torch.no_grad():
        want = model(batch)
    scores, few = service(tmp_path, [batch, checks.some_rows(batch, slice(2))])
    assert_close(scores, want, atol=1e-5, rtol=1e-5)
    assert_close(few, want[:2], atol=1e-5, rtol=1e-5)


def test_an_exported_model_scores_a_single_row(service, tmp_path):
    model, batch = build("deepfm").eval(), checks.make_batch(1)
    torch.export.save(export(model, checks.make_batch(7)), tmp_path / "model.pt2")
    assert_close(service(tmp_path, [batch])[0], model(batch).detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what inductor imports
@pytest.mark.parametrize("name", COMPILED)
def test_inductor_compiles_scores_and_gradients(name):
    model, batch = build(name), checks.make_batch()
    want = model(batch)
    gradients = torch.autograd.grad(want.sum(), list(model.parameters()))
    torch.compiler.reset()
    scores = torch.compile(model, fullgraph=True)(batch)
    assert_close(scores, want, atol=1e-5, rtol=1e-5)
    found = torch.autograd.grad(scores.sum(), list(model.parameters()))
    assert_close(found, gradients, atol=1e-4, rtol=1e-4)


class Lines(Silence):
    def __init__(self):
        self.lines = []

    def say(self, line):
        if not line.startswith("memory"):
            self.lines.append(line)


@needs_cuda
@every_model
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_is_recorded_as_a_cuda_graph(name, precision):
    batch = checks.make_batch(ROWS)
    data = rb.Dataset(checks.SCHEMA, batch.ids, batch.numeric, batch.label).to("cuda")
    first, said = build(name), Lines()
    settings = {"epochs": 2, "batch_size": 64, "lr": 1e-4, "precision": precision}
    trained = []
    for cuda_graph in (True, False):
        model = copy.deepcopy(first).to("cuda")
        history = rb.fit(model, data, cuda_graph=cuda_graph, progress=said, **settings)
        trained.append((model.state_dict(), history.epochs[-1].train_loss))
    assert said.lines == []
    (recorded, loss), (ordinary, expected) = trained
    assert loss == pytest.approx(expected, rel=1e-2)
    for key, weight in recorded.items():
        # Adam turns the smallest difference, as of sums in another order, into one of its steps
        assert_close(weight, ordinary[key], rtol=0, atol=2e-3)


@needs_cuda
@every_model
def test_half_precision_on_a_gpu_is_near_full_precision(name):
    model, batch = build(name).cuda().eval(), checks.make_batch().to("cuda")
    want = model(batch)
    with torch.autocast("cuda", torch.bfloat16):
        scores = model(batch)
    scores.float().sum().backward()
    assert all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)
    scale = float(want.detach().abs().max())
    assert_close(scores.float(), want, atol=0.03 * scale, rtol=0.03)


@needs_cuda
@every_model
def test_scores_of_a_gpu_are_those_of_the_processor(name):
    model, batch = build(name).eval(), checks.make_batch()
    want = model(batch).detach()
    scores = model.cuda()(batch.to("cuda")).detach().cpu()
    assert_close(scores, want, atol=1e-4, rtol=1e-4)
