"""The recorded answers in `tests/data`; its README tells what a case holds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).resolve().parent.parent / "data"


@dataclass(frozen=True)
class Case:
    directory: Path
    meta: dict[str, Any]

    @property
    def name(self) -> str:
        return self.directory.name

    @property
    def expected(self) -> dict[str, Any]:
        expected: dict[str, Any] = self.meta["expected"]
        return expected

    @property
    def headers(self) -> dict[str, str]:
        more = self.meta.get("headers") or {}
        return {"content-type": self.meta["content_type"], **more}

    @cached_property
    def body(self) -> bytes:
        name: str = self.meta["response_file"]
        return (self.directory / name).read_bytes()

    @cached_property
    def chunks(self) -> list[bytes]:
        """The body in the pieces it was read in, or whole where they are not known."""
        path = self.directory / "chunks.json"
        if not path.exists():
            return [self.body]
        chunks, start = [], 0
        for length in json.loads(path.read_text(encoding="utf-8")):
            chunks.append(self.body[start : start + length])
            start += length
        return [*chunks, self.body[start:]] if start < len(self.body) else chunks


def load_cases(api: str) -> list[Case]:
    """All cases of an API, recordings and quirks."""
    found = [Case(path.parent, _load(path)) for path in sorted(DATA.glob("*/*/meta.yaml"))]
    return [case for case in found if case.meta["api"] == api]


def _load(path: Path) -> dict[str, Any]:
    meta: dict[str, Any] = yaml.load(
        path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    return meta
