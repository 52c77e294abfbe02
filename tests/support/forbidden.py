"""What no process of a role has a use for: one command per line. `P:` stands for the keys of partition 0, `N:` for the
namespace's, and `U` for the user's own name."""

from __future__ import annotations

import shlex

ADMINISTRATION = """
CONFIG GET *
CONFIG SET maxmemory 1
CONFIG REWRITE
KEYS *
SCAN 0
FLUSHALL
FLUSHDB
SHUTDOWN
ACL LIST
ACL SETUSER x
MONITOR
SAVE
BGREWRITEAOF
SCRIPT FLUSH
SCRIPT KILL
FUNCTION LOAD x
CLIENT LIST
CLIENT KILL ID 1
CLIENT PAUSE 1000
REPLICAOF a 1
SWAPDB 0 1
SELECT 1
MOVE P:inbox 1
DUMP P:inbox
MIGRATE 127.0.0.1 1 P:inbox 0 1
OBJECT FREQ P:inbox
PSUBSCRIBE *
SUBSCRIBE P:cancel
GET another-applications-key
SET another-applications-key 1
SET Nx 1
"""

SCRIPTS_AND_SECRETS = """
CLIENT UNBLOCK 1
EVAL "return 1" 0
EVAL "return redis.call('SET', KEYS[1], 1)" 1 P:blob:x
EVAL "while true do end" 0
SCRIPT LOAD "return 1"
HGET N:secret tokens
HGETALL N:secret
HSETNX N:secret x 1
HSET N:namespace partitions 1
DEL N:namespace
"""

OF_COORDINATORS = """
XRANGE P:results - +
XREVRANGE P:results + -
XREAD STREAMS P:results 0
XREADGROUP GROUP coordinator me STREAMS P:results >
XREADGROUP GROUP coordinator me STREAMS P:inbox >
XTRIM P:results MAXLEN 0
XTRIM P:inbox MAXLEN 0
XDEL P:results 1-1
XDEL P:inbox 1-1
DEL P:results
DEL P:inbox
RENAME P:results P:blob:x
COPY P:inbox P:blob:x
XSETID P:results 9-9
XGROUP DESTROY P:results coordinator
XGROUP CREATE P:results g 0
XGROUP SETID P:results coordinator $
XINFO STREAM P:results
XACK P:results coordinator 1-1
XCLAIM P:results coordinator me 0 1-1
XADD P:tool:results * t x d x
XADD P:tool:other * t tool_task d {}
XREADGROUP GROUP workers me STREAMS P:tool:other >
XRANGE P:tool:other - +
XDEL P:tool:other 1-1
XACK P:tool:other workers 1-1
XCLAIM P:tool:other workers me 0 1-1
GET P:lease
SET P:lease me
DEL P:lease
ZADD P:turns 0 s
HINCRBY P:stats x 1
ZREM P:timers s
HSET P:load tenant 0
SADD P:queues x
SET P:plan:x 1
SET P:cancel:t0-x 1
DEL P:cancel:t0-x
SPUBLISH P:cancel "t0-x now"
PUBLISH P:cancel x
ZADD N:coordinators 1 me
HSET N:workers:other a b
"""

OF_OTHER_WORKERS = """
XADD P:inbox * t start_turn d {}
XRANGE P:inbox - +
XPENDING P:tool:other workers
XLEN P:results
XRANGE P:dead - +
XADD P:dead * a b
XDEL P:dead 1-1
XRANGE P:feed - +
DEL P:blob:x
HSET N:directives pause:model:default 1
HDEL N:directives pause:model:default
SET P:alive:Ux@1 1
SET P:alive:x 1
DEL P:alive:tools-1-aa
GET P:alive:U@1
DEL N:workers
HSET N:agents a b
HGETALL N:agents
"""

CONVERSATIONS = """
LRANGE P:transcript:s 0 -1
LRANGE P:replacements:s 0 -1
GET P:plan:x
GET P:blob:x
MGET P:blob:x
"""

STATES = """
HGETALL P:session:s
HGET P:session:s s
HMGET P:session:s v s
HGETALL P:turn:t0-x
HSET P:turn:t0-x status finished
HSET P:session:s:x v 9
RPUSH P:transcript:s {}
LSET P:transcript:s 0 {}
DEL P:transcript:s
"""

CHANNELS = """
XRANGE P:turn:t0-x:events - +
SSUBSCRIBE P:turn:t0-x:events
XADD P:turn:t0-x:events 0-* t turn.finished d {}
SPUBLISH P:turn:t0-x:events "1 1 x 0"
DEL P:turn:t0-x:events
SSUBSCRIBE P:answer:x
XRANGE P:answer:x - +
XADD P:answer:x * t answer d {}
"""

TOOL_REGISTRY = """
HSET N:tools send {}
HDEL N:tools send
DEL N:tools
HGETALL N:tools
"""

DIRECTIVES = """
HSET N:directives a b
HSET N:workers a b
HDEL N:workers a
"""

LETTERS = """
XRANGE P:dead - +
XDEL P:dead 1-1
XADD P:inbox * t x
XRANGE P:tool:mail - +
EVALSHA 0000000000000000000000000000000000000000 0
"""

_WORKER = ADMINISTRATION + SCRIPTS_AND_SECRETS + OF_COORDINATORS + OF_OTHER_WORKERS + TOOL_REGISTRY
_TOOLS = _WORKER + "ZADD P:timers 0 s\n" + CONVERSATIONS + STATES + CHANNELS
_CLIENT = (
    ADMINISTRATION
    + SCRIPTS_AND_SECRETS
    + OF_COORDINATORS
    + """
XADD P:results * t tool_reply d {}
XRANGE P:dead - +
DEL P:blob:x
DEL P:turn:t0-x:events
HSET P:turn:t0-x status finished
XADD P:turn:t0-x:events 0-* t turn.finished d {}
SPUBLISH P:turn:t0-x:events "1 1 x 0"
XADD P:answer:x * t answer d {}
HMGET P:session:s v s
SET P:alive:x 1
HDEL N:tools send
"""
    + DIRECTIVES
)
_MONITOR = (
    ADMINISTRATION
    + SCRIPTS_AND_SECRETS
    + OF_COORDINATORS
    + CONVERSATIONS
    + STATES
    + CHANNELS
    + """
HGETALL P:values:s
HSET P:values:s a 1
XINFO STREAM P:tool:mail
XRANGE P:feed - +
SSUBSCRIBE P:cancel
SET P:alive:x 1
HSET N:tools send {}
"""
)

BY_ROLE = {
    "tools": _TOOLS,
    "foreign-tools": _TOOLS + "EVALSHA 0000000000000000000000000000000000000000 1 P:values:s\nINFO\n",
    "llm": _WORKER
    + """
HSET P:values:s a 1
HGETALL P:session:s
DEL P:session:s
RPUSH P:transcript:s {}
HSET P:turn:t0-x status finished
XRANGE P:turn:t0-x:events - +
SPUBLISH P:answer:x x
XRANGE P:answer:x - +
DEL P:turn:t0-x:events
""",
    "client": _CLIENT,
    "gateway": _CLIENT + "HSET N:agents a b\nHSET N:tools a b\nHSET P:session:s v 9\nRPUSH P:transcript:s {}\n",
    "monitor": _MONITOR + DIRECTIVES + LETTERS,
    "operator": _MONITOR,
    "coordinator": ADMINISTRATION + "CLIENT NO-EVICT on\nGET Nx:{0}:lease\nHGET Nx:secret tokens\n",
}
_OPERATORS_OWN = ("P:tool:other - +", "XDEL P:tool:other", "XADD P:tool:", "XRANGE P:results", "XREVRANGE P:results",
                  "XDEL P:results", "XDEL P:inbox")  # fmt: skip
"""A dead letter goes back into the stream that it came from, whichever it was."""


def forbidden(role: str, namespace: str, user: str) -> list[list[str]]:
    lines = [line for line in BY_ROLE[role].splitlines() if line]
    if role == "operator":
        lines = [line for line in lines if not any(own in line for own in _OPERATORS_OWN)]
    return [[_filled(word, namespace, user) for word in shlex.split(line)] for line in lines]


def _filled(word: str, namespace: str, user: str) -> str:
    if word.startswith("P:"):
        word = f"{namespace}:{{0}}:{word[2:]}"
    elif word.startswith(("N:", "Nx")):
        word = namespace + word[1:]
    return word.replace(":alive:U", f":alive:{user}")
