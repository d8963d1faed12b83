"""One of several processes that train spread models; the first compares them with one process and writes what it found.

torchrun --nproc-per-node 2 spread_worker.py FOUND CASE...        a case is MODEL/OPTIMIZER/TABLES/PLAN/METHODS
"""

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from rarebit.data.dataset import Splits, _rows
from rarebit.data.synthetic import SyntheticLog
from rarebit.ema import estimate_statistics_
from rarebit.errors import SettingsError
from rarebit.models import build_model, model_settings
from rarebit.models._base import RankingModel
from rarebit.sharding.processes import (
    gather_weights,
    join_processes,
    leave_processes,
    share_norms_,
    spread_,
)
from rarebit.sharding.sharded import GradientAverage, ShardedRows, shard, sharded_rows
from rarebit.technique import parse_techniques
from rarebit.training.run import train_model
from rarebit.training.settings import RunSettings, Training, load_splits
from rarebit.training.step import Steps, TrainingStep

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


def compare_norms(_, rows=101):
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


def compare_lookups(splits):
    """Return how often ids and rows travelled in each use of a model with tables of two widths, and its error."""
    torch.manual_seed(0)  # the same in all processes
    plain = build_model("deepfm", splits.train.schema, {"dim": 6, "hidden": [8]})
    spread = copy.deepcopy(plain)
    shard(spread)
    sent, asked, found = [], [], []
    send, request = ShardedRows.send, ShardedRows.request
    ShardedRows.send = lambda rows, ids: (sent.append(rows), send(rows, ids))[1]
    ShardedRows.request = lambda rows, ids: (asked.append(rows), request(rows, ids))[1]

    def compare(use, ids):
        sent.clear()
        asked.clear()
        batch = replace(splits.train[torch.arange(len(ids))], ids=ids)
        expected, got = use(plain, batch), use(spread, batch)
        assert expected.requires_grad == got.requires_grad
        found.append([len(sent), len(asked), float((expected - got).abs().max())])

    def embed(model, batch):
        return model.backbone.embed(batch)

    def first_order(model, batch):
        return model.wide(batch)

    def double_(model):
        with torch.no_grad():
            for weight in model.wide.tables.parameters():
                weight.mul_(2.0)

    ids = [splits.train.ids[rows].clone() for rows in torch.arange(80).split(10)]
    compare(RankingModel.forward, ids[0])  # embeddings send the ids, first-order weights use them
    compare(RankingModel.forward, ids[1])  # the weights set out with the embeddings
    compare(embed, ids[2])  # and nobody wants them
    double_(plain)
    double_(spread)
    compare(first_order, ids[2])  # they have changed since
    compare(torch.no_grad()(embed), ids[3])
    compare(first_order, ids[3])  # which had no gradient
    ids[3].copy_(ids[4])
    compare(first_order, ids[3])  # other ids in the same memory
    compare(RankingModel.forward, ids[5])
    compare(embed, ids[6])
    compare(embed, ids[7])  # so nobody is expected to want them
    [exchange] = {rows.exchange for rows in sharded_rows(spread)}
    early, others = ids[0], ids[1]
    exchange.send_early(early, last=ids[6])  # which were not the last
    assert exchange.early is None
    exchange.send_early(early, last=ids[7])
    exchange.send_on()
    compare(RankingModel.forward, early)  # they are there before they are asked for
    exchange.send_early(others, last=early)
    compare(RankingModel.forward, ids[2])  # others are asked for
    exchange.send_early(others, last=ids[2])
    others.copy_(early)
    compare(RankingModel.forward, others)  # they have changed since
    ShardedRows.send, ShardedRows.request = send, request
    return found


def compare_gradients(_):
    """Return for each step whether the means set out before the end of the backward, and how far they were from the mean."""
    torch.manual_seed(dist.get_rank())
    parameters = [torch.nn.Parameter(torch.randn(size)) for size in ((3, 4), (5,), ())]
    average, found = GradientAverage(parameters), []

    def compare(*losses):
        for loss in losses:
            (loss(*parameters) * (1 + dist.get_rank())).backward()
        expected = [
            parameter.grad.clone() for parameter in parameters if parameter.grad is not None
        ]
        is_ahead = average.coming is not None
        average.finish()
        for gradient in expected:
            dist.all_reduce(gradient)
        means = [parameter.grad for parameter in parameters if parameter.grad is not None]
        wrong = [m - e / dist.get_world_size() for m, e in zip(means, expected, strict=True)]
        found.append([is_ahead, max(float(part.abs().max()) for part in wrong)])
        for parameter in parameters:
            parameter.grad = None

    def every(a, b, c):
        return a.square().sum() + b.square().sum() * c

    def few(a, b, c):
        return a.square().sum() + b.square().sum()

    compare(every)
    compare(every)
    compare(every, few)  # two losses: some gradients grow after the means set out
    compare(few)  # one gradient is missing
    compare(few)
    compare(every)  # one more than expected
    compare(every)
    average.close()
    compare(every)
    return found


def compare_statistics(splits):
    """Return how far statistics of a spread model, estimated from shares, are from those of one process."""
    torch.manual_seed(0)
    plain = build_model(
        "deepfm", splits.train.schema, {"dim": 6, "hidden": [8], "batch_norm": True}
    )
    spread = copy.deepcopy(plain)
    spread_(spread)
    step = TrainingStep(spread, torch.optim.SGD(spread.parameters(), lr=1.0))
    places = list(torch.arange(101).split(51))  # shares of unequal size
    estimate_statistics_(plain, [splits.train[rows] for rows in places])
    estimate_statistics_(spread, Steps(step, splits.train).batches(places))
    expected = dict(plain.named_buffers())
    wrong = [
        float((buffer - expected[name]).abs().max())
        for name, buffer in spread.named_buffers()
        if "running" in name
    ]
    return [len(wrong), max(wrong)]


OTHERS = {
    "norms": compare_norms,
    "statistics": compare_statistics,
    "lookups": compare_lookups,
    "gradients": compare_gradients,
}


def main():
    torch.set_num_threads(1)
    train, valid = (load_splits(SyntheticLog(rows=rows)).train for rows in (6000, 20_000))
    # twenty steps, and so many rows to rank that two equal scores do not matter
    splits = Splits(_rows(train, slice(1010)), valid, valid)
    join_processes()
    found = {}
    for case in sys.argv[2:]:
        if case in OTHERS:
            found[case] = OTHERS[case](splits)
        else:
            found[case] = compare(case, splits)
    if dist.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    leave_processes()


if __name__ == "__main__":
    main()
