"""Seeds: a number for each place and time that needs randomness, so that nothing depends on what was drawn before."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A 63-bit seed from what it is for, for example ("anchors", seed, step, rank). Any part changes it wholly."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
