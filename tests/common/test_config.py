"""Configuration: all problems at once, unknown keys refused, no positional arguments."""

from __future__ import annotations

import pytest
from pydantic import Field

from dflash_cache.common.config import Config, build, load
from dflash_cache.common.errors import InputError


class Inner(Config):
    size: int = Field(4, gt=0)
    rate: float = 1.0


class Outer(Config):
    inner: Inner = Inner()
    name: str = "x"


def test_overrides_win_over_the_file_and_the_file_over_defaults(tmp_path):
    (tmp_path / "c.yaml").write_text("inner: {size: 8, rate: 2.0}\n")
    config = load(Outer, file=tmp_path / "c.yaml", overrides=["inner.rate=1e-3"])
    assert (config.inner.size, config.inner.rate, config.name) == (8, 0.001, "x")


def test_every_problem_is_reported_at_once_with_its_place():
    with pytest.raises(InputError) as caught:
        load(Outer, file=None, overrides=["inner.size=0", "inner.sise=3", "name=[1]"])
    text = str(caught.value)
    assert "3 problems" in text
    assert "inner.size=0" in text
    assert "inner.sise: no such field; known here: rate, size" in text
    assert "name=[1]" in text


@pytest.mark.parametrize("text", ["inner.size", "=3", "name.size=3"])
def test_an_override_that_is_no_assignment_is_refused(text):
    with pytest.raises(InputError):
        load(Outer, file=None, overrides=["name=y", text])


def test_a_broken_or_missing_file_is_refused(tmp_path):
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "broken.yaml").write_text("a: [")
    for name in ("list.yaml", "broken.yaml", "missing.yaml"):
        with pytest.raises(InputError, match=name):
            load(Outer, file=tmp_path / name)


def test_configurations_are_frozen_and_keyword_only():
    with pytest.raises(TypeError):
        Inner(3)
    with pytest.raises(Exception, match="frozen"):
        build(Inner, {}, "here").size = 5
