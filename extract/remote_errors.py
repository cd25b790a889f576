"""Errors that cross from the worker to the parent: as plain values there, as the same error again here."""

from __future__ import annotations

from typing import Any

from ..common import errors
from ..common.errors import DflashError, RunFailed

DETAILS = ("problem", "place", "found", "expected", "fix")


def describe(error: Exception) -> dict[str, str | None]:
    """An error as values that any message format carries."""
    if isinstance(error, DflashError):
        values = {name: getattr(error, name) for name in DETAILS}
        kind = {"kind": type(error).__name__}
        return kind | {name: None if value is None else str(value) for name, value in values.items()}
    return {
        "kind": RunFailed.__name__,
        "problem": f"{type(error).__name__}: {error}",
        "place": "vLLM worker",
        "found": None,
        "expected": "",
        "fix": "",
    }


def rebuild(described: dict[str, Any]) -> DflashError:
    """The error that `describe` was given; RunFailed for a kind that is not one of ours."""
    kind = getattr(errors, str(described["kind"]), RunFailed)
    problem, *_ = (described[name] for name in DETAILS)
    rebuilt: DflashError = kind(problem, **{name: described[name] for name in DETAILS[1:]})
    return rebuilt
