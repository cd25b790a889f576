"""Documents that could go stale are compared with the code.   python tests/test_docs.py rewrites the tables."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel

from dflash_cache.train.config import TrainConfig

TRAINING = Path(__file__).parents[1] / "docs/training.md"


def field_table() -> str:
    """Every field of the trainer with its default and docstring."""
    lines = ["| field | default | |", "| --- | --- | --- |"]
    for section, info in TrainConfig.model_fields.items():
        inner = info.annotation
        assert isinstance(inner, type)
        assert issubclass(inner, BaseModel)
        for name, field in inner.model_fields.items():
            default = "null" if field.default is None else str(field.default).lower() if isinstance(field.default, bool) else field.default
            text = (field.description or "").replace("\n", " ").replace("|", "\\|")
            lines.append(f"| `{section}.{field.alias or name}` | {default} | {text} |")
    return "\n".join(lines)


def current_table() -> str:
    match = re.search(r"<!-- fields -->\n(.*)\n<!-- end -->", TRAINING.read_text(), re.S)
    assert match
    return match[1]


def test_the_table_of_fields_is_the_configuration():
    assert current_table() == field_table()


def test_every_field_is_described():
    assert not [line for line in field_table().splitlines() if line.endswith("|  |")]


def test_the_default_decay_is_the_one_the_project_promises():
    assert TrainConfig().loss.gamma == 4.0


if __name__ == "__main__":
    text = TRAINING.read_text()
    start, end = text.index("<!-- fields -->"), text.index("<!-- end -->")
    TRAINING.write_text(f"{text[:start]}<!-- fields -->\n{field_table()}\n{text[end:]}")
