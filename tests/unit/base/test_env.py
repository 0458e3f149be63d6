"""What the environment says about this process, and what it may not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from danlu.base import env
from danlu.base.errors import UserError


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "DANLU_CACHE"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_is_rank_0_of_1() -> None:
    """Without a launcher nothing is needed."""
    assert env.ranks() == env.Ranks(rank=0, world_size=1, local_rank=0, launched=False)


def test_a_launcher_sets_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torchrun's variables are read."""
    told = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "LOCAL_WORLD_SIZE": "2"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert env.ranks() == env.Ranks(rank=3, world_size=4, local_rank=1, launched=True, local_world_size=2)


@pytest.mark.parametrize(("rank", "size"), [("4", "4"), ("-1", "2"), ("x", "2"), ("0", "many")])
def test_impossible_places_are_refused(monkeypatch: pytest.MonkeyPatch, rank: str, size: str) -> None:
    """A rank outside its world, or text where a number belongs, is the user's error and names the variable."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(UserError, match=r"^(RANK|WORLD_SIZE): "):
        env.ranks()


def test_only_base_reads_the_environment() -> None:
    """No file outside `base/` touches os.environ or getenv (no hidden channels)."""
    package = Path(env.__file__).parents[1]
    guilty = [
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if path.parent.name != "base" and any(word in path.read_text("utf-8") for word in ("os.environ", "getenv("))
    ]
    assert guilty == []


def test_the_cache_folder_follows_its_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """DANLU_CACHE wins over the home folder."""
    assert env.cache_folder() == Path.home() / ".cache" / "danlu"
    monkeypatch.setenv("DANLU_CACHE", str(tmp_path))
    assert env.cache_folder() == tmp_path


def test_a_default_fills_what_is_unset_or_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """``OMP_NUM_THREADS=`` in a shell sets nothing, so it counts as unset; what the user chose stays."""
    monkeypatch.setenv("OMP_NUM_THREADS", "")
    env.set_default("OMP_NUM_THREADS", "1")
    assert env.get("OMP_NUM_THREADS") == "1"
    env.set_default("OMP_NUM_THREADS", "2")
    assert env.get("OMP_NUM_THREADS") == "1"
