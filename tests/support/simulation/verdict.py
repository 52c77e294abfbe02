"""What a run may come to."""

from __future__ import annotations


class Violation(AssertionError):
    """A guarantee was broken, or something was left behind, or somebody ended who must not."""
