"""Which policy for new items would have been best? Replay a log in order of time.

    pip install 'rarebit[data,study]'
    python examples/backtest.py

Each period is scored before the model learns it, so a policy sees nothing of the future.
"""

import tempfile
from pathlib import Path

import polars as pl
import torch
from _shared import frequent_first

from rarebit.study.backtest import backtest

ROWS = 6_000


def main() -> None:
    """Make a log whose items arrive over time, and compare policies on it."""
    random = torch.Generator().manual_seed(0)
    time = torch.arange(ROWS)
    user = frequent_first(300, (ROWS,), random)
    item = frequent_first(200, (ROWS,), random) + time // 20  # yesterday's items fade
    click = torch.bernoulli(torch.where(user % 2 == item % 2, 0.8, 0.2), generator=random)
    columns = {"time": time, "user": user, "item": item, "click": click.int()}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.parquet"
        pl.DataFrame({name: values.numpy() for name, values in columns.items()}).write_parquet(log)
        found = backtest(
            log,
            Path(folder) / "backtest",
            label="click",
            time="time",
            by=6,
            policies="grow,fixed,hashing",
            model={"name": "fm", "dim": 8},
            training={"lr": 0.02, "batch_size": 100},
            seeds=2,
            workers=1,
            device="cpu",
            progress=False,
        )
    print(found)


if __name__ == "__main__":
    main()
