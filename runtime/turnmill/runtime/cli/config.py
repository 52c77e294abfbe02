"""`turnmill config`: what this process would run with."""

from __future__ import annotations

import sys

import msgspec

from . import options


def config(
    redis_url: options.RedisUrl = None, namespace: options.Namespace = None, as_json: options.Json = False
) -> None:
    from turnmill.protocol.settings import load_settings, variable_of

    shown = load_settings(redis_url=redis_url, namespace=namespace).masked()
    if as_json:
        sys.stdout.write(msgspec.json.encode(shown).decode() + "\n")
        return
    width = max(len(variable_of(name)) for name in shown)
    for name, value in shown.items():
        sys.stdout.write(f"{variable_of(name):{width}} = {_text(name, value)}\n")


def _text(name: str, value: object) -> str:
    if value is None:
        return "embedded" if name == "redis_url" else "none"
    if isinstance(value, (list, dict)):
        return msgspec.json.encode(value).decode()
    return str(value)
