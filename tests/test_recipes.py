"""The plans in recipes/ are plans, and say how to run themselves."""

import re
from pathlib import Path

import pytest

from rarebit.settings import read_toml
from rarebit.study.plan import StudyPlan

SLICES = {"mlet-adagrad", "multi-embedding", "pep", "tail"}
RECIPES = sorted((Path(__file__).resolve().parent.parent / "recipes").glob("*.toml"))


def test_there_are_recipes():
    assert len(RECIPES) >= 6


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_a_plan(path):
    plan = StudyPlan.from_mapping(read_toml(path))
    assert plan.runs
    assert len(plan.methods) >= 2
    text = path.read_text("utf-8")
    folder = re.search(rf"--plan recipes/{path.name} --out studies/([\w-]+)", text)[1]
    # a grid goes on in the folder of its first slice, whose runs it has as well
    assert folder == path.stem or (folder in SLICES and f"{folder}.toml" in text)
