"""A model's answer as JSON. Models like to wrap it into a Markdown fence, whatever they are told."""

from __future__ import annotations

import re
from typing import Any

import msgspec

_FENCED = re.compile(r"\A\s*```[A-Za-z0-9_-]*\s*\n(.*?)\n?\s*```\s*\Z", re.DOTALL)


def json_answer(text: str) -> Any:
    """The value that a text is, with or without a fence around it. Raises `ValueError` where it is none."""
    fenced = _FENCED.match(text)
    try:
        return msgspec.json.decode(fenced[1] if fenced else text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
