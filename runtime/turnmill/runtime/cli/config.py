"""`turnmill config`: what this process would run with, and where each value comes from."""

from __future__ import annotations

import sys

import msgspec

from . import options


def config(
    redis_url: options.RedisUrl = None, namespace: options.Namespace = None, as_json: options.Json = False
) -> None:
    from turnmill.protocol.settings import Settings, load_settings, origins

    from .wording import table_lines

    given = {"redis_url": redis_url, "namespace": namespace}
    shown, sources = load_settings(**given).masked(), origins(**given)
    if as_json:
        for name, value in shown.items():
            entry = {"setting": name, "name": _name(name), "value": value, "source": sources[name]}
            sys.stdout.write(msgspec.json.encode(entry).decode() + "\n")
        return
    head = ["SETTING", "VALUE", "SOURCE", "MEANING"]
    rows = [
        [_name(name), _text(name, value), sources[name], Settings.model_fields[name].description or ""]
        for name, value in shown.items()
    ]
    for line in table_lines([head, *rows]):
        sys.stdout.write(line + "\n")


def _name(name: str) -> str:
    """The variable, or the table of the file for what only that can say."""
    from turnmill.protocol.settings import TABLES, variable_of

    return f"[{name}]" if name in TABLES else variable_of(name)


def _text(name: str, value: object) -> str:
    if value is None:
        return "embedded" if name == "redis_url" else "none"
    if isinstance(value, (list, dict)):
        return msgspec.json.encode(value).decode()
    return str(value)
