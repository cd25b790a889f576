"""The mechanics of configuration: frozen models, YAML files, `section.field=value` overrides, all problems at once.

Owns no setting. `extract/config.py` and `train/config.py` do, and each field there is the only home of its default.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from .errors import InputError


class Config(BaseModel):
    """Base of every configuration section: frozen, keyword-only, unknown keys refused, a docstring under each field."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


C = TypeVar("C", bound=BaseModel)


def build(cls: type[C], values: Mapping[str, Any], place: str) -> C:
    """Validate `values` into `cls`.

    Raises InputError that lists every problem (field, value, expectation) at once; `place` says where they came from.
    """
    try:
        return cls.model_validate(dict(values))
    except ValidationError as error:
        raise InputError(_all_problems(error, cls), place=place, fix="correct these and run again") from None


def load(cls: type[C], *, file: Path | None, overrides: Iterable[str] = (), fixed: Mapping[str, Any] | None = None) -> C:
    """Resolve a configuration: defaults, then a YAML file, then `section.field=value` overrides, then `fixed` values.

    Raises InputError for a file that is missing or is no mapping, an override without `=`, and any invalid field.
    """
    values: dict[str, Any] = {}
    if file is not None:
        try:
            loaded = yaml.safe_load(file.read_text())
        except OSError as error:
            raise InputError(f"cannot be read: {error.strerror}", place=f"--config {file}") from None
        except yaml.YAMLError as error:
            raise InputError(f"is not valid YAML: {error}", place=f"--config {file}") from None
        if loaded is not None and not isinstance(loaded, dict):
            raise InputError("must hold sections of fields", place=f"--config {file}", found=type(loaded).__name__)
        values = loaded or {}
    for text in overrides:
        _apply(values, text)
    for name, value in (fixed or {}).items():
        _put(values, name.split("."), value, name)
    return build(cls, values, "configuration")


def _apply(values: dict[str, Any], text: str) -> None:
    name, equals, raw = text.partition("=")
    if not equals or not name.strip():
        raise InputError("is no assignment", place=f"--set {text}", expected="section.field=value", fix="for example --set model.block_size=8")
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError:
        value = raw
    _put(values, name.strip().split("."), value, f"--set {text}")


def _put(values: dict[str, Any], path: list[str], value: Any, place: str) -> None:
    *sections, field = path
    for section in sections:
        inner = values.setdefault(section, {})
        if not isinstance(inner, dict):
            raise InputError(f"{section!r} is a value, not a section", place=place)
        values = inner
    values[field] = value


def _all_problems(error: ValidationError, cls: type[BaseModel]) -> str:
    lines = []
    for item in error.errors():
        name = ".".join(str(part) for part in item["loc"]) or "(whole)"
        if item["type"] == "extra_forbidden":
            lines.append(f"{name}: no such field; known here: {', '.join(_siblings(cls, item['loc']))}")
        elif item["type"] == "missing":
            lines.append(f"{name}: is missing")
        else:
            lines.append(f"{name}={item['input']!r}: {item['msg']}" if item["loc"] else item["msg"])
    count = f"{len(lines)} problem{'s' if len(lines) > 1 else ''}"
    return count + "".join(f"\n  - {line}" for line in lines)


def _siblings(cls: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    for part in location[:-1]:
        annotation = cls.model_fields[str(part)].annotation if str(part) in cls.model_fields else None
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        cls = annotation
    return sorted(cls.model_fields)
