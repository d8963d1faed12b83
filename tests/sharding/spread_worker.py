"""One of several processes that train spread models; the first compares them with one process and writes what it found.

    torchrun --nproc-per-node 2 spread_worker.py FOLDER CASE...        a case is model/optimizer/tables/plan/method
"""

import json
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")  # torchrec's own, about names that torch has deprecated

import torch
import torch.distributed as dist

import rarebit as rb
from rarebit.callbacks import started
from rarebit.data.synthetic import SyntheticLog
from rarebit.models import build_model
from rarebit.sharding.processes import gather_weights, join_processes, leave_processes, spread_
from rarebit.training.fit import training_data
from rarebit.training.metrics import evaluate
from rarebit.training.settings import Training, load_splits
from rarebit.training.step import Steps, TrainingStep

STEPS, BATCH = 20, 101  # a batch that neither two nor three processes share evenly
METHODS = {
    "none": [],
    "hashing": [rb.Hashing(buckets=50)],
    "mlet": [rb.MLET(inner_dim=12)],
    "low_rank": [rb.LowRank(rank=3)],
    "shrinkage": [rb.Shrinkage()],
    "forgetting": [rb.Forgetting()],
    "multi_embedding": [rb.MultiEmbedding(num_sets=2)],
    "pep": [rb.PEP()],
    "hashing+mlet": [rb.Hashing(buckets=50), rb.MLET(inner_dim=12)],
}


def start(name, splits, methods):
    torch.manual_seed(0)
    model = build_model(name, splits.train.schema, {"dim": 6})
    for method in methods:
        if hasattr(method, "after_training"):
            rb.apply_(model, method, verbose=False)
        method.prepare_(model, splits.train)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def train(model, splits, methods, kind, tables):
    settings = Training(batch_size=BATCH)
    with started(list(methods), model, training_data(settings, splits.train, None)) as callbacks:
        lr = 1e-3 if kind == "adam" else 0.1
        optimizer = rb.optimizer(model, lr=lr, kind=kind, tables=tables, threshold_weight_decay=0.0)
        steps = Steps(TrainingStep(model, optimizer), splits.train)
        for epoch in (1, 2):
            if epoch > 1:
                callbacks.between_epochs(epoch, optimizer)
            steps.start_epoch(splits.train.order(seed=0, epoch=epoch))
            for step in range(STEPS // 2):
                steps(step * BATCH, (step + 1) * BATCH)
        return evaluate(model, splits.valid).overall.auc, steps.step.take_mean_loss(STEPS * BATCH)


def compare(case, splits, folder):
    name, kind, tables, plan, method = case.split("/")
    methods = METHODS[method]
    model = start(name, splits, methods)
    spread_(model, plan, whole_rows=kind == "adagrad" and tables == "rowwise")
    auc, loss = train(model, splits, methods, kind, tables)
    state = gather_weights(model)
    if dist.get_rank():
        return None
    plain = start(name, splits, methods)
    plain_auc, plain_loss = train(plain, splits, methods, kind, tables)
    wanted = plain.state_dict()
    assert wanted.keys() == state.keys(), wanted.keys() ^ state.keys()
    errors = {
        key: float((state[key] - value).abs().max() / value.abs().max().clamp(min=1e-12))
        for key, value in wanted.items()
        if value.is_floating_point() and value.numel()
    }
    worst = max(errors, key=errors.get)
    return {
        "error": errors[worst],
        "worst": worst,
        "table_error": max(error for key, error in errors.items() if "embedding.weight" in key),
        "auc": abs(auc - plain_auc),
        "loss": abs(loss - plain_loss),
    }


def main():
    torch.set_num_threads(1)
    folder, cases = Path(sys.argv[1]), sys.argv[2:]
    splits = load_splits(SyntheticLog(rows=3000))
    join_processes()
    found = {}
    for case in cases:
        found[case] = compare(case, splits, folder)
        if dist.get_rank() == 0:
            print(case, found[case], flush=True)
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    leave_processes()


if __name__ == "__main__":
    main()
