"""The pages hold together: links, the Chinese guide, the key reference, and TOML that validates."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from danlu.base.errors import UserError
from danlu.config import reference
from danlu.config.data_build import DataBuild, TokenizerTrain
from danlu.config.load import build
from danlu.config.pipeline import Pipeline
from danlu.config.schema import Config, Section
from danlu.model.families import FAMILIES
from danlu.model.presets import PRESETS
from danlu.train.pipeline_run import plan_pipeline
from docs.pages import BLOCKS, GUIDE, GUIDE_ZH, PAGES, ROOT, Block, Page, blocks_in

NAMES = sorted(path.name for path in GUIDE.glob("*.md"))


def schema_of(tree: dict[str, Any]) -> type[Section]:
    """Return the schema that a TOML block is meant for, from the keys that only one of them has."""
    if "stage" in tree:
        return Pipeline
    if "tokenizer" in tree:
        return DataBuild
    return TokenizerTrain if "inputs" in tree else Config


def fault_of(block: Block) -> str | None:
    """Return why a TOML block would be refused, or None."""
    try:
        tree = tomllib.loads(block.text)
        config = build(schema_of(tree), tree, source=block.where)
        if isinstance(config, Pipeline):
            plan_pipeline(config)
    except (tomllib.TOMLDecodeError, UserError) as error:
        return str(error)
    return None


@pytest.mark.parametrize("block", blocks_in("toml"), ids=lambda block: block.where)
def test_toml_blocks_are_legal_configs(block: Block) -> None:
    """Each TOML block validates against the schema it is meant for; a pipeline can be planned."""
    assert fault_of(block) is None


@pytest.mark.parametrize(
    "text", ["[train]\nstpes = 1\n", 'inputs = "a"\ntokenizer = "t"\n', 'name = "p"\noutput = "o"\nstage = []\n', "[x"]
)
def test_an_illegal_block_is_noticed(text: str) -> None:
    """The check above can fail."""
    assert fault_of(Block("toml", text, "page:1")) is not None


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Page) -> None:
    """Every link inside the project names a file that is there and a heading that it has."""
    for link in page.links:
        if link.startswith(("https://", "http://")):
            continue
        name, _, anchor = link.partition("#")
        target = (page.path.parent / name).resolve() if name else page.path
        assert target.is_relative_to(ROOT), f"{page}: {link} leaves the project"
        assert target.exists(), f"{page}: {link}"
        if anchor:
            assert anchor in Page(target).anchors, f"{page}: {link}"


def test_every_page_of_the_guide_can_be_reached() -> None:
    """The maps of both guides link to all pages beside them."""
    for folder in (GUIDE, GUIDE_ZH):
        linked = set(Page(folder / "index.md").links)
        assert {path.name for path in folder.glob("*.md")} - {"index.md"} <= linked


def test_the_chinese_guide_has_the_same_pages() -> None:
    """No page exists in one language only."""
    assert sorted(path.name for path in GUIDE_ZH.glob("*.md")) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_the_chinese_guide_has_the_same_code(name: str) -> None:
    """Every code block is the same in both languages, in the same order, and the prose is Chinese."""
    ours, theirs = Page(GUIDE / name), Page(GUIDE_ZH / name)
    assert [(block.language, block.text) for block in theirs.blocks] == [
        (block.language, block.text) for block in ours.blocks
    ]
    assert [line.count("#") for line in ours.prose.splitlines() if line.startswith("#")] == [
        line.count("#") for line in theirs.prose.splitlines() if line.startswith("#")
    ]
    assert sum("\u4e00" <= character <= "\u9fff" for character in theirs.prose) > 20


@pytest.mark.parametrize("name", reference.PAGES)
def test_the_key_reference_is_up_to_date(name: str) -> None:
    """The page is what `python -m danlu.config.reference docs` would write."""
    text = (GUIDE / name).read_text(encoding="utf-8")
    assert text == reference.updated(text, name), "run: python -m danlu.config.reference docs"


def test_the_key_reference_holds_every_key() -> None:
    """Each field of each schema has a row with its own description."""
    text = reference.write_reference()
    for part in reference.PARTS:
        definitions = part.schema.model_json_schema().get("$defs", {}).values()
        for schema in [part.schema.model_json_schema(), *definitions]:
            for key, field in schema["properties"].items():
                if "$ref" not in field:
                    assert field.get("description"), f"{part.title}: {key} has no description"
                    assert f"| `{key}` |" in text


def test_the_reference_command_rewrites_only_what_is_below_its_line(tmp_path: Path) -> None:
    """What an author wrote above the marker stays; a page without the marker is refused."""
    (tmp_path / "zh").mkdir()
    for name in reference.PAGES:
        (tmp_path / name).write_text(f"# Mine\n\n{reference.MARKER}\nstale\n", encoding="utf-8")
    reference.main(tmp_path)
    for name in reference.PAGES:
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert text.startswith("# Mine\n")
        assert "stale" not in text
        assert "| `learning_rate` | number > 0 | `0.0003` |" in text
    (tmp_path / "config.md").write_text("# Mine\n", encoding="utf-8")
    with pytest.raises(UserError, match="no marker line"):
        reference.main(tmp_path)


@pytest.mark.parametrize("folder", [GUIDE, GUIDE_ZH], ids=["en", "zh"])
def test_the_models_page_names_every_preset_and_family(folder: Path) -> None:
    """The list of presets is complete and holds nothing else; every family has a row."""
    page = Page(folder / "models.md")
    listed = next(block.text.split() for block in page.blocks if block.text.startswith("tiny"))
    assert sorted(listed) == sorted(PRESETS)
    for family in FAMILIES.values():
        assert f"| `{family.model_type}` |" in page.text


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_no_page_names_a_path_outside_the_project(page: Page) -> None:
    """Paths are relative to the clone, or the user's own: none of this machine's, none beside the clone."""
    for foreign in ("/root", "/home/", "/tmp", "/work/", "/mnt/", "shared/", "localhost"):
        assert foreign not in page.text, f"{page}: {foreign}"
    for block in page.blocks:
        assert "../" not in block.text, block.where


@pytest.mark.parametrize("folder", [GUIDE, GUIDE_ZH], ids=["en", "zh"])
def test_messages_that_are_explained_exist(folder: Path) -> None:
    """Each message in the table of errors is one that the code can print."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    source = source.replace("{MANIFEST}", "manifest.json")
    rows = re.findall(r"^\| `([^`]+)` \|", Page(folder / "errors.md").text, re.M)
    messages = [row for row in rows if " " in row]
    assert len(messages) > 10
    for message in messages:
        for part in message.split("..."):
            assert part.strip() in source, message


def test_blocks_say_their_language() -> None:
    """A block without a language is one that no test looks at."""
    legal = {"bash", "toml", "python", "text", "json"}
    assert [block.where for block in BLOCKS if block.language not in legal] == []
