"""The application of the crash tests as its next version has it: the tool `nap` is gone."""

from __future__ import annotations

from support.crash_app import again, once, plan
from turnmill.runtime import Agent

__all__ = ["again", "once", "plan", "worker"]
APP = "apps.tomorrow"
worker = Agent("worker", "scripted:plan", tools=[once, again])
