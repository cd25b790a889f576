"""The mask token: the one that stands in the slots a drafter has to fill. Chosen the same way each time, and said aloud.

In: the target's token table (`target/tokens.json`) and how often each token occurs in the data. Out: an id and why.
It must be a row of the target's embedding, and must mean nothing else: not eos, pad or bos, and not in the data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import ConfigDict, Field, ValidationError

from ..common import layout, target_folder
from ..common.config import Config
from ..common.errors import CacheDamaged, InputError

FIX = "--set model.mask_token_id=N with a token that the data never uses"


class TokenTable(Config):
    """What training needs to know of the tokenizer."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    vocab_size: int = Field(gt=0)
    """Rows of the embedding."""
    tokenizer_size: int = Field(gt=0)
    """Tokens that the tokenizer knows; rows from here on are padding."""
    mask_token_id: int | None = None
    """The tokenizer's own mask token."""
    pad_token_id: int | None = None
    """Padding."""
    bos_token_id: int | None = None
    """Beginning of text."""
    eos_token_ids: tuple[int, ...] = ()
    """Every token that ends an answer."""
    special_token_ids: tuple[int, ...] = ()
    """All special tokens."""

    def role(self, token: int) -> str | None:
        """eos, pad or bos when the token has such a meaning, else None."""
        if token in self.eos_token_ids:
            return "eos"
        return "pad" if token == self.pad_token_id else "bos" if token == self.bos_token_id else None


@dataclass(frozen=True)
class MaskToken:
    """The choice and its reason."""

    id: int
    reason: str


def read_tokens(cache: Path) -> TokenTable:
    """The token table of a cache. Raises CacheDamaged when it is missing, changed or does not hold what it must."""
    path = target_folder.check(cache, layout.TOKENS_JSON) / layout.TOKENS_JSON
    try:
        return TokenTable.model_validate(json.loads(path.read_bytes()))
    except ValidationError as error:
        raise CacheDamaged(f"cannot be trusted: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}", place=str(path)) from None
    except (OSError, ValueError) as error:
        raise CacheDamaged(f"cannot be read: {error}", place=str(path)) from None


def choose(tokens: TokenTable, counts_V: Sequence[np.ndarray], override: int | None) -> MaskToken:
    """The mask token for training on data with these token counts, int64 [V] each.

    Order: `override`; the tokenizer's mask token; the first padding row of the embedding; the lowest special token. All but
    the override are passed over when they occur in the data; the override is then refused. Raises InputError.
    """
    used_V = sum(counts_V[1:], counts_V[0]) > 0

    def objection(token: int) -> str | None:
        if not 0 <= token < min(tokens.vocab_size, len(used_V)):
            return f"is no row of the target's embedding, which has {tokens.vocab_size}"
        if role := tokens.role(token):
            return f"is the target's {role} token"
        return "occurs in the data, where it would mean two things" if used_V[token] else None

    if override is not None:
        if problem := objection(override):
            raise InputError(problem, place=f"model.mask_token_id={override}", expected="an unused row of the embedding", fix=FIX)
        return MaskToken(override, "as configured")
    if tokens.mask_token_id is not None and objection(tokens.mask_token_id) is None:
        return MaskToken(tokens.mask_token_id, "the tokenizer's mask token")
    padding = (token for token in range(tokens.tokenizer_size, tokens.vocab_size) if objection(token) is None)
    if (first := next(padding, None)) is not None:
        return MaskToken(first, "the first padding row of the embedding")
    special = (token for token in sorted(tokens.special_token_ids) if objection(token) is None)
    if (first := next(special, None)) is not None:
        return MaskToken(first, "the lowest special token that the data never uses")
    raise InputError("the target has no unused special or padding token to serve as mask", place="model.mask_token_id", fix=FIX)
