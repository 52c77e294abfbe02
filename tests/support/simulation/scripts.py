"""The project's Lua scripts, run as they are by a Lua 5.1 of our own: the simulator executes what the engine executes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from lupa.lua51 import LuaError, LuaRuntime, lua_type

from .replies import ReplyError, Status

if TYPE_CHECKING:
    from .server import Server

_lua = LuaRuntime(encoding=None, unpack_returned_tuples=False)
_globals = _lua.globals()
_table = _lua.table_from
_compiled: dict[bytes, Any] = {}
_running: list[Server] = []


def run_script(server: Server, sha: bytes, source: bytes, keys: list[bytes], arguments: list[bytes]) -> Any:
    """The reply of a script, as a command's. Raises `ReplyError` where a command in it fails; what was done stays done."""
    function = _compiled.get(source)
    if function is None:
        function = _compiled[source] = _lua.compile(source)
    _globals[b"KEYS"], _globals[b"ARGV"] = _table(keys), _table(arguments)
    _running.append(server)
    try:
        return _reply(function())
    except LuaError as error:
        raise ReplyError(_text_of(error)) from None
    finally:
        _running.pop()


def _call(*arguments: Any) -> Any:
    """`redis.call` of the running script."""
    words = [word if type(word) is bytes else b"%.17g" % word for word in arguments]
    return _lua_value(_running[-1].run_in_script(words[0].upper(), words[1:]))


def _pcall(*arguments: Any) -> Any:
    """`redis.pcall`: an error is a table."""
    try:
        return _call(*arguments)
    except ReplyError as error:
        return _table({b"err": str(error).encode()})


def _text_of(error: LuaError) -> str:
    return f"ERR {str(error.args[0] if error.args else error).partition(chr(10))[0]}"


def _raise(text: bytes) -> None:
    raise ReplyError(text.decode(errors="replace"))


def _lua_value(reply: Any) -> Any:
    kind = type(reply)
    if kind is bytes or kind is int:
        return reply
    if kind is list:
        return _table([_lua_value(item) for item in reply])
    if kind is Status:
        return _table({b"ok": bytes(reply)})
    return False  # nil, and the null array


def _reply(value: Any) -> Any:
    if value is None or value is False:
        return None
    if value is True:
        return 1
    if isinstance(value, float):
        return int(value)
    if lua_type(value) != "table":
        return value
    if value[b"ok"] is not None:
        return Status(value[b"ok"])
    if value[b"err"] is not None:
        raise ReplyError(value[b"err"].decode())
    items = []
    index = 1
    while (item := value[index]) is not None:
        items.append(_reply(item))
        index += 1
    return items


def _json(value: Any) -> bytes:
    """cjson.encode, for tables of strings and numbers."""
    return json.dumps(_plain(value), separators=(",", ":"), ensure_ascii=False).replace("/", "\\/").encode()


def _plain(value: Any) -> Any:
    if lua_type(value) == "table":
        return {key.decode(): _plain(item) for key, item in value.items()}
    return value.decode() if isinstance(value, bytes) else value


_globals[b"redis"] = _table({b"call": _call, b"pcall": _pcall})
_globals[b"cjson"] = _table({b"encode": _json})
# A command's error that a script raises again keeps its text: the binding would lose the table that holds it.
_lua.execute(
    b"local plain, raise = error, ... ; error = function(e, l) if type(e) == 'table' and e.err then raise(e.err) end; plain(e, l) end",
    _raise,
)
