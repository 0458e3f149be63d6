"""Recipes are configs that people copy: each loads, plans, and is told of in the guide."""

from __future__ import annotations

from pathlib import Path

import pytest

from danlu.config.load import load
from danlu.config.pipeline import Pipeline
from danlu.train.pipeline_run import plan_pipeline
from docs.pages import GUIDE, GUIDE_ZH, ROOT, Page

RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_can_be_planned(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every option of every stage is legal; the data need not be there."""
    monkeypatch.chdir(ROOT)
    planned = plan_pipeline(load(Pipeline, path).config)
    assert len(planned) >= 2
    assert all(folder.is_relative_to("runs") for _, folder, _ in planned)


@pytest.mark.parametrize("folder", [GUIDE, GUIDE_ZH], ids=["en", "zh"])
def test_the_guide_tells_of_every_recipe(folder: Path) -> None:
    """The page and the folder hold the same recipes."""
    text = Page(folder / "recipes.md").text
    assert {path.name for path in RECIPES} <= {name for name in text.split("`") if name.endswith(".toml")}


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_say_how_to_run_them(path: Path) -> None:
    """The header holds the command that runs the recipe."""
    header = path.read_text(encoding="utf-8").partition("\nname = ")[0]
    assert f"danlu run recipes/{path.name}" in header
