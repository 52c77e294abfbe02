"""What Anthropic's models can do, as far as a request has to know it, by their names.

A later version can do what the one before could: so a name that is not out yet is read as the newest. What is no name of
these models (a relay's, a local server's) gets what every server of the API understands.
"""

from __future__ import annotations

import re

import msgspec

_NAME = re.compile(r"claude-(?P<family>[a-z]+)-(?P<major>\d{1,2})(?:[-.](?P<minor>\d{1,2}))?(?!\d)")
_OLD_NAME = re.compile(r"claude-(?P<major>\d)(?:[-.](?P<minor>\d{1,2}))?-(?P<family>[a-z]+)")
_UNFORCED_FAMILIES = frozenset({"fable", "mythos"})


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """`version` is (0, 0) for a model of another name. `max_tokens` is what an answer may have where nobody says it:
    well within what the model can write."""

    family: str = ""
    version: tuple[int, int] = (0, 0)
    max_tokens: int = 8192
    output_limit: int = 64_000

    @property
    def thinks_adaptively(self) -> bool:
        """It decides by itself how long it thinks, and is told an effort."""
        return self.version >= (4, 6)

    @property
    def takes_budget(self) -> bool:
        """It is told how many tokens it may think."""
        return self.version < (4, 7)

    @property
    def takes_xhigh(self) -> bool:
        return self.version >= (4, 7)

    @property
    def hides_thinking(self) -> bool:
        """It shows its thoughts only where that is asked for."""
        return self.version >= (4, 7)

    @property
    def enforces_schemas(self) -> bool:
        return self.version >= (4, 5) or (self.family == "opus" and self.version >= (4, 1))

    @property
    def can_be_forced(self) -> bool:
        """It may be told that it has to use a tool, at least while it does not think with a budget."""
        return self.family not in _UNFORCED_FAMILIES


def model_named(name: str) -> Model:
    found = _NAME.search(name) or _OLD_NAME.search(name)
    if found is None:
        return Model()
    family, version = found["family"], (int(found["major"]), int(found["minor"] or 0))
    if version < (3, 5):
        return Model(family=family, version=version, max_tokens=4096, output_limit=4096)
    if version < (3, 7):
        return Model(family=family, version=version, max_tokens=8192, output_limit=8192)
    is_short = family == "opus" and version < (4, 5)
    return Model(family=family, version=version, max_tokens=32_000, output_limit=32_000 if is_short else 64_000)
