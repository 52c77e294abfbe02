"""Ids and names of calls in the form that an API takes.

A session may change its provider, and each has rules of its own for what stands in a transcript. What does not fit is
replaced, by the same each time, so that a result still finds its call, and differs from what replaces anything else.
"""

from __future__ import annotations

import hashlib
import re

_OTHER_CHARACTERS = re.compile(r"[^a-zA-Z0-9_-]")
_MARK_LENGTH = 8


def fit_name(name: str, length_max: int) -> str:
    """`name` in letters, digits, `_` and `-`."""
    changed = _OTHER_CHARACTERS.sub("_", name)
    if changed == name and 0 < len(name) <= length_max:
        return name
    mark = hashlib.sha256(name.encode()).hexdigest()[:_MARK_LENGTH]
    return f"{changed[: length_max - _MARK_LENGTH - 1]}_{mark}"
