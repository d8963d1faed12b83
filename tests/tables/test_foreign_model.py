"""A stranger's own model, from their first line to a model that never heard of this library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import rarebit as rb

# The stranger's file: it imports torch and nothing else.
STRANGER = '''
import torch
from torch import nn


class Ranker(nn.Module):
    """Scores a user and the tags of an item."""

    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(50, 8)
        self.tags = nn.EmbeddingBag(30, 8, mode="mean", padding_idx=0)
        self.out = nn.Linear(17, 1)

    def forward(self, user, tags, *, price):
        x = torch.cat([self.user(user), self.tags(tags), price[:, None]], dim=1)
        return {"logit": self.out(x)}
'''

WITHOUT_RAREBIT = """
import sys


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "rarebit":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Blocker())
try:
    import rarebit
except ModuleNotFoundError:
    pass
else:
    raise SystemExit("rarebit can be imported")

import torch
from stranger import Ranker

model = Ranker()
model.load_state_dict(torch.load("weights.pt", weights_only=True))
user, tags, price, expected = torch.load("sample.pt", weights_only=True)
found = model(user, tags, price=price)["logit"]
assert torch.allclose(found, expected, atol=1e-6), (found - expected).abs().max()
print("equal")
"""


@pytest.fixture
def ranker(tmp_path, monkeypatch):
    """Return the stranger's class, from the stranger's file."""
    (tmp_path / "stranger.py").write_text(STRANGER)
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("stranger").Ranker
    del sys.modules["stranger"]


def click_log(rows: int = 400) -> rb.Dataset:
    """Return a log in which two groups of users like different tags."""
    user, tags = torch.randint(50, (rows,)), torch.randint(1, 30, (rows, 3))
    tags[::4, 2] = 0
    label = ((user % 2) == (tags[:, 0] % 2)).float()
    columns = {"user": user, "tags": tags, "price": torch.randn(rows)}
    return rb.Dataset.from_columns(columns, label=label)


def score(model: nn.Module, batch: rb.data.Batch) -> torch.Tensor:
    return model(batch["user"], batch["tags"], price=batch["price"])["logit"]


def apply_all(model: nn.Module) -> None:
    rb.apply_(model, rb.Hashing(buckets=20), verbose=False)
    rb.apply_(model, rb.LowRank(rank=4), where=lambda t: t.kind == "bag", verbose=False)


def test_ones_own_loop_trains_the_new_tables(ranker):
    model, data = ranker(), click_log()
    apply_all(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    rb.check_optimizer(model, optimizer)
    losses = []
    for _ in range(5):
        for batch in data.batches(100):
            loss = F.binary_cross_entropy_with_logits(score(model, batch)[:, 0], batch.label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


def test_fit_and_evaluate_take_a_model_with_a_signature_of_its_own(ranker):
    model, data = ranker(), click_log()
    apply_all(model)
    before = rb.evaluate(model, data, forward=score).logloss
    history = rb.fit(model, data, forward=score, epochs=3, lr=0.03, batch_size=64, progress=False)
    assert len(history.epochs) == 3
    assert rb.evaluate(model, data, forward=score).logloss < before


def test_a_saved_model_is_read_into_a_fresh_one(ranker, tmp_path):
    model, data = ranker(), click_log()
    apply_all(model)
    rb.fit(model, data, forward=score, epochs=1, progress=False)
    folder = rb.save_model(model, tmp_path / "saved")
    loaded = rb.load_model(folder, into=ranker())
    assert rb.find_tables(loaded) == rb.find_tables(model)
    expected = rb.predict(model, data, forward=score)
    assert_close(rb.predict(loaded, data, forward=score), expected, rtol=0, atol=0)


def test_after_merging_only_torch_is_left_and_scores_are_the_same(ranker):
    model, data = ranker(), click_log()
    apply_all(model)
    rb.fit(model, data, forward=score, epochs=2, lr=0.03, progress=False)
    expected = rb.predict(model, data, forward=score)
    rb.merge_(model, verbose=False)
    assert_close(rb.predict(model, data, forward=score), expected, atol=1e-6, rtol=1e-5)
    assert {type(part).__module__.split(".")[0] for part in model.children()} == {"torch"}
    assert [type(part) for part in model.children()] == [nn.Embedding, nn.EmbeddingBag, nn.Linear]
    assert model.tags.mode == "mean"
    assert {n: t.shape for n, t in model.state_dict().items()} == {
        n: t.shape for n, t in ranker().state_dict().items()
    }


def test_a_merged_model_runs_where_this_library_is_not_installed(ranker, tmp_path):
    model, batch = ranker(), click_log(16)[slice(None)]
    apply_all(model)
    rb.merge_(model, verbose=False)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    sample = (batch["user"], batch["tags"], batch["price"], score(model, batch).detach())
    torch.save(sample, tmp_path / "sample.pt")
    assert run(WITHOUT_RAREBIT, tmp_path) == "equal"


def run(code: str, folder: Path) -> str:
    environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
