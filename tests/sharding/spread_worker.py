"""One of several processes that train spread models; the first compares them with one process and writes what it found.

torchrun --nproc-per-node 2 spread_worker.py FOUND CASE...        a case is MODEL/OPTIMIZER/TABLES/PLAN/METHODS
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from rarebit.data.dataset import Splits, _rows
from rarebit.data.synthetic import SyntheticLog
from rarebit.errors import SettingsError
from rarebit.models import model_settings
from rarebit.sharding.processes import (
    gather_weights,
    join_processes,
    leave_processes,
    share_norms_,
)
from rarebit.technique import parse_techniques
from rarebit.training.run import train_model
from rarebit.training.settings import RunSettings, Training, load_splits

SEED = 1  # with which no unit's input comes so near to zero that rounding decides whether it is cut


def settings_of(case):
    model, kind, tables, _, methods = case.split("/")
    found = parse_techniques(methods)[0].parts if methods != "none" else ()
    training = Training(
        epochs=2,
        batch_size=101,  # which neither two nor three processes share evenly
        optimizer=kind,
        tables=tables,
        lr=0.1 if kind == "sgd" else 1e-3,
        threshold_weight_decay=0.0,
        seed=SEED,
        patience=None,
    )
    # batch normalisation of nearly equal numbers magnifies rounding beyond any bound, in one process as well
    known = {"dim": 6, "dropout": 0.0, "batch_norm": False}
    values = {}
    for name, value in known.items():
        try:
            values |= dict(model_settings(model, {**values, name: value}))
        except SettingsError:  # this model has no such setting
            continue
    return RunSettings(
        model=model,
        model_settings=values,
        training=training,
        methods=tuple(part.build() for part in found),
    )


def compare(case, splits):
    settings, plan = settings_of(case), case.split("/")[3]
    quiet = {"progress": False, "say": lambda line: None}
    model, history = train_model(settings, splits.train, splits.valid, plan=plan, **quiet)
    state = gather_weights(model)
    if dist.get_rank():
        return None
    plain, wanted = train_model(settings, splits.train, splits.valid, **quiet)
    values = plain.state_dict()
    assert values.keys() == state.keys(), values.keys() ^ state.keys()
    errors = {
        # a bias before a normalisation has no gradient, but rounding: it is as good as zero
        key: float((state[key] - value).abs().max() / value.abs().max().clamp(min=1e-4))
        for key, value in values.items()
        if value.is_floating_point() and value.numel()
    }
    worst = max(errors, key=errors.get)
    pairs = list(zip(history.epochs, wanted.epochs, strict=True))
    return {
        "error": errors[worst],
        "worst": worst,
        "steps": sum(one.steps for one, _ in pairs),
        "auc": max(abs(one.valid.auc - two.valid.auc) for one, two in pairs),
        "loss": max(abs(one.train_loss - two.train_loss) for one, two in pairs),
    }


def compare_norms(rows=101):
    """Return how far batch normalisation over the processes is from that over one, forward and backward."""
    torch.manual_seed(0)
    features = torch.randn(rows, 5, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(rows, 5, dtype=torch.float64)
    norms = [torch.nn.Sequential(torch.nn.BatchNorm1d(5).double()) for _ in range(2)]
    (norms[0](features) * weights).sum().backward()
    share_norms_(norms[1])
    rank, size = dist.get_rank(), -(-rows // dist.get_world_size())
    own = features.detach()[rank * size : (rank + 1) * size]
    real = len(own)
    norms[1][0].real = real
    own = torch.cat([own, features.detach()[:1].expand(size - real, 5)]).requires_grad_()
    (norms[1](own)[:real] * weights[rank * size : (rank + 1) * size]).sum().backward()
    expected = features.grad[rank * size : (rank + 1) * size]
    gradients = norms[1][0].weight.grad.clone()
    dist.all_reduce(gradients)
    differences = [
        own.grad[:real] - expected,
        own.grad[real:],
        gradients - norms[0][0].weight.grad,
        norms[1][0].running_mean - norms[0][0].running_mean,
        norms[1][0].running_var - norms[0][0].running_var,
    ]
    worst = torch.stack([d.abs().max() if d.numel() else d.sum() for d in differences])
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return worst.tolist()


def main():
    torch.set_num_threads(1)
    train, valid = (load_splits(SyntheticLog(rows=rows)).train for rows in (6000, 20_000))
    # twenty steps, and so many rows to rank that two equal scores do not matter
    splits = Splits(_rows(train, slice(1010)), valid, valid)
    join_processes()
    found = {}
    for case in sys.argv[2:]:
        found[case] = compare_norms() if case == "norms" else compare(case, splits)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    leave_processes()


if __name__ == "__main__":
    main()
