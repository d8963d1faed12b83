"""The plans in recipes/ are plans, and say how to run themselves."""

from pathlib import Path

import pytest

from rarebit.study.plan import read_plan

RECIPES = sorted((Path(__file__).resolve().parent.parent / "recipes").glob("*.toml"))


def test_there_are_recipes():
    assert len(RECIPES) >= 6


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_a_plan(path):
    plan = read_plan(path)
    assert plan.runs
    assert len(plan.methods) >= 2
    assert f"--plan recipes/{path.name} --out studies/{path.stem}" in path.read_text("utf-8")
