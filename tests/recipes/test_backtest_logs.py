"""The logs of recipes/backtest from files made by hand."""

import runpy
from pathlib import Path

import pytest

pl = pytest.importorskip("polars", reason="capability: package polars: it is not installed")

RECIPE = Path(__file__).parents[2] / "recipes" / "backtest" / "logs.py"


@pytest.fixture(scope="module")
def logs():
    return runpy.run_path(str(RECIPE))["LOGS"]


def test_ml_1m_is_in_order_of_time_without_ratings_of_3(logs, tmp_path):
    (tmp_path / "ratings.dat").write_text("1::7::5::30\n1::8::3::20\n2::8::2::10\n")
    (tmp_path / "users.dat").write_text("1::F::1::10::48067\n2::M::56::16::70072\n")
    movies = "7::Café (1995)::Comedy|Drama\n8::Heat (1996)::Action\n"
    (tmp_path / "movies.dat").write_text(movies, encoding="latin-1")
    found = logs["ml-1m"](tmp_path)
    assert found["liked"].to_list() == [0, 1]
    assert found.row(1, named=True) == {
        "user": "1", "movie": "7", "gender": "F", "age": "1", "occupation": "10", "zip": "48067",
        "year": "1995", "genres": "Comedy+Drama", "time": 30, "liked": 1,
    }  # fmt: skip


def test_the_complete_journey_joins_products(logs, tmp_path):
    known = ("manufacturer_id", "department", "brand", "product_category", "product_type")
    products = {"product_id": [5], "package_size": ["4 OZ"]} | {name: ["x"] for name in known}
    pl.DataFrame(products).write_parquet(tmp_path / "products.parquet")
    purchases = {
        "household_id": [1, 2],
        "store_id": [3, 3],
        "product_id": [5, 6],
        "retail_disc": [0.5, 0.0],
        "transaction_timestamp": [2, 1],
    }
    pl.DataFrame(purchases).write_parquet(tmp_path / "transactions.parquet")
    found = logs["complete-journey"](tmp_path)
    assert found["household_id"].to_list() == [2, 1]
    assert found["discount"].to_list() == [0, 1]
    assert found["brand"].to_list() == [None, "x"]
