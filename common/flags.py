"""Texts of a command line as values: numbers with commas, assignments. Each raises InputError that names the flag."""

from __future__ import annotations

from typing import Any

from .errors import InputError


def assignments(texts: tuple[str, ...], flag: str, *, keep: bool = False) -> dict[str, Any]:
    """KEY=VALUE texts as a dict, values read as YAML. keep: dashes of a key stay."""
    import yaml

    values = {}
    for text in texts:
        key, equals, raw = text.partition("=")
        if not equals or not key:
            raise InputError("is no assignment", place=f"{flag} {text}", expected="KEY=VALUE", fix=f"for example {flag} tensor_parallel_size=4")
        try:
            values[key if keep else key.replace("-", "_")] = yaml.safe_load(raw)
        except yaml.YAMLError:
            raise InputError("the value is no YAML", place=f"{flag} {text}", fix="quote it, for example 'KEY=\"text\"'") from None
    return values


def pairs(texts: tuple[str, ...], flag: str, example: str) -> dict[str, str]:
    """NAME=TEXT texts as a dict."""
    found = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (equals and name and value):
            raise InputError("is no assignment", place=f"{flag} {text}", expected="NAME=TEXT", fix=f"for example {flag} {example}")
        found[name] = value
    return found


def layer_list(text: str) -> tuple[int, ...]:
    """`1,16,31` as numbers."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        expected = "block numbers with commas, for example 1,16,31,46,61"
        raise InputError("is no list of layers", place="--layers", found=text, expected=expected) from None


def temperature_list(text: str) -> tuple[float, ...]:
    """`0,0.6,1.0` as numbers."""
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise InputError("is no list of numbers", place="--temperature", found=text, expected="a number, or several with commas: 0,0.6,1.0") from None
