"""What each role may do in the engine, as the rules of an `ACL SETUSER` command: what it uses, and nothing else.

A rule set has a root with commands that name no key, and selectors: some keys with the commands that may be used on them.
Names of partitions are matched digit by digit, so that no name that a user chose can look like another key.

What access lists cannot say stands in docs/security.md: they know commands and keys, not the arguments behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from turnmill.protocol.errors import ConfigurationError
from turnmill.protocol.keys import (
    Keys,
    PartitionKeys,
    ProviderKeys,
    model_queue,
    partition_patterns,
    tool_queue,
    valid_name,
)

Of = Callable[[PartitionKeys], str]


class Selector(NamedTuple):
    """Keys (`~` all access, `%R~` read, `%W~` write) or channels (`&`), and the commands that may be used on them."""

    keys: list[str]
    commands: str

    def __str__(self) -> str:
        return f"({' '.join(self.keys)} {self.commands})"


class Rules(NamedTuple):
    """What one user may do."""

    commands: str
    channels: list[str]
    selectors: list[Selector]

    def words(self) -> list[str]:
        """The rules behind the user's name and password, each one argument of the command."""
        channels = [f"&{channel}" for channel in self.channels]
        return ["resetkeys", "resetchannels", "-@all", *channels, *self.commands.split(), *map(str, self.selectors)]


class AccessLists:
    """The rules of the roles of one namespace."""

    def __init__(self, namespace: str, partitions: int, user: str, queues: Sequence[str] = ()) -> None:
        """`queues` are the tool queues, or the pools of an LLM worker, that the user serves. Raises `ConfigurationError`
        for names that would match others."""
        for name in (user, *queues):
            if not valid_name(name):
                raise ConfigurationError(f"{name!r} is no name for access lists: letters, digits and _ . : @ -")
        if "@" in user:
            raise ConfigurationError(
                f"the user {user!r} has an @ in its name, which ends the user's part of a worker's id"
            )
        self._keys = Keys(namespace, partitions)
        self._partitions = partition_patterns(namespace, partitions)
        self._any_provider: ProviderKeys = self._keys.provider("*")
        self._user = user
        self._queues = list(queues)

    def of_role(self, role: str, *, hooks: bool = False, publish: bool = False, state: bool = True) -> Rules:
        """The rules of a role. For a tool worker, `hooks` adds the conversations that hooks look at, `publish` the
        registries of tools and agents, and `state` is what `ToolContext.state` needs."""
        match role:
            case "tools":
                extra = [*self._state(state), *self._hooks(hooks), *self._registries(publish)]
                return self._worker([tool_queue(queue) for queue in self._queues or ["default"]], _PYTHON, extra)
            case "foreign-tools":
                extra = [*self._foreign_state(state), *self._registries(publish)]
                return self._worker([tool_queue(queue) for queue in self._queues or ["default"]], _PLAIN, extra)
            case "llm":
                return self._llm()
            case "client":
                return self._client([*self._registries(True), *self._forks()])
            case "gateway":
                return self._client([Selector([f"%R~{self._keys.tools}", f"%R~{self._keys.agents}"], "+hgetall")])
            case "monitor":
                return Rules(_PYTHON, [], list(self._monitor()))
            case "operator":
                return Rules(_PYTHON, [], [*self._monitor(), *self._operator()])
            case "coordinator":
                return self._coordinator()
            case _:
                raise ConfigurationError(f"no role {role!r}: {', '.join(ROLES)}")

    # ---- workers

    def _worker(self, streams: list[str], commands: str, extra: Iterable[Selector]) -> Rules:
        selectors = [
            self._on("~", [_of_stream(name) for name in streams], _TASKS),
            self._on("%W~", [lambda keys: keys.results], "+xadd"),
            self._on("~", [lambda keys: keys.alive(f"{self._user}@*")], "+set +del +pexpire"),
            self._on("%R~", [lambda keys: keys.cancel("*")], "+mget +get +exists"),
            self._on("%W~", [lambda keys: keys.blob("*")], "+set"),
            Selector([f"%W~{self._keys.workers}"], "+hset +hdel"),
            Selector([f"%R~{self._keys.namespace}"], "+hgetall +hget"),
            Selector([f"%R~{self._keys.directives}"], "+hmget"),
            self._readers(streams),
            *extra,
        ]
        return Rules(f"{commands} +ssubscribe +sunsubscribe", self._names([lambda k: k.cancellations]), selectors)

    def _state(self, wanted: bool) -> Iterator[Selector]:
        if wanted:
            yield self._on("~", [lambda keys: keys.values("*")], f"{_VALUES} +evalsha")

    def _foreign_state(self, wanted: bool) -> Iterator[Selector]:
        if wanted:
            yield self._on("~", [lambda keys: keys.values("*")], _VALUES)

    def _hooks(self, wanted: bool) -> Iterator[Selector]:
        if wanted:
            yield from self._conversations()
            yield Selector([f"%R~{self._keys.workers}"], "+hvals")

    def _conversations(self) -> Iterator[Selector]:
        yield self._on("%R~", [lambda keys: keys.transcript("*"), lambda keys: keys.replacements("*")], "+lrange")
        yield self._on("%R~", [lambda keys: keys.blob("*")], "+mget +get")

    def _readers(self, streams: Iterable[str]) -> Selector:
        """On a cluster, workers share the partitions of a queue out among themselves."""
        return Selector(
            [f"~{self._keys.readers(name)}" for name in streams], "+zadd +zrem +zrange +pexpire +zremrangebyscore"
        )

    def _llm(self) -> Rules:
        streams = [model_queue(pool) for pool in self._queues or ["default"]]
        provider = self._any_provider
        extra = [
            self._on("%R~", [lambda keys: keys.plan("*")], "+get"),
            *self._conversations(),
            # What the script of live events uses: it writes the channel and how far it is.
            self._on("~", [lambda keys: keys.session("*"), lambda keys: keys.events("*")], "+evalsha"),
            self._on("~", [lambda keys: keys.session("*")], "+hmget +hset"),
            self._on("%W~", [lambda keys: keys.events("*")], "+xadd"),
            self._on("&", [lambda keys: keys.events("*")], "+spublish"),
            Selector(
                [f"~{key}" for key in (provider.state, provider.calls, provider.waiting, provider.seen)], _PROVIDER
            ),
            Selector([f"~{self._keys.limits}"], "+hset +hget +hgetall +hmget"),
        ]
        return self._worker(streams, _PYTHON, extra)

    # ---- clients and people

    def _client(self, extra: Iterable[Selector]) -> Rules:
        channels: list[Of] = [lambda keys: keys.events("*"), lambda keys: keys.answer("*")]
        selectors = [
            self._on("~", [lambda keys: keys.inbox], "+xadd +xrange +xlen"),
            self._on("%R~", [*channels, lambda keys: keys.feed], "+xrange +xrevrange +xread +xlen +exists"),
            self._on("%R~", [lambda keys: keys.turn("*"), lambda keys: keys.session("*")], "+hgetall +hget +exists"),
            self._on(
                "%R~", [lambda keys: keys.transcript("*"), lambda keys: keys.replacements("*")], "+lrange +exists +llen"
            ),
            self._on("%R~", [lambda keys: keys.turns], "+zrevrange"),
            self._on("%R~", [lambda keys: keys.removals], "+smembers"),
            self._on("~", [lambda keys: keys.blob("*")], "+set +mget +copy +pexpire"),
            self._on("~", [lambda keys: keys.values("*")], f"{_VALUES} +evalsha"),
            self._on("~", [lambda keys: keys.idempotencies], "+set"),
            *self._fleet(),
            *extra,
        ]
        return Rules(f"{_PYTHON} +ssubscribe +sunsubscribe", self._names(channels), selectors)

    def _forks(self) -> Iterator[Selector]:
        """A fork is written by the client: its conversation, its record, its values, its blobs."""
        transcripts: list[Of] = [lambda keys: keys.transcript("*")]
        values: list[Of] = [lambda keys: keys.values("*")]
        records: list[Of] = [lambda keys: keys.session("*")]
        blobs: list[Of] = [lambda keys: keys.blobs("*"), lambda keys: keys.blob("*")]
        timers: list[Of] = [lambda keys: keys.timers]
        yield self._on("~", [*transcripts, *values, *records, *blobs, *timers], "+evalsha +exists")
        yield self._on("~", transcripts, "+llen +lrange +rpush +lset")
        yield self._on("~", values, "+del +copy")
        yield self._on("~", records, "+hset")
        yield self._on("~", blobs, "+persist +sadd")
        yield self._on("%W~", timers, "+zadd")

    def _registries(self, wanted: bool) -> Iterator[Selector]:
        if wanted:
            keys = [f"~{self._keys.tools}", f"~{self._keys.agents}", f"~{self._keys.agent_uses}"]
            yield Selector(keys, "+hset +hsetnx +hget +hmget +hgetall +zadd")

    def _fleet(self) -> Iterator[Selector]:
        """Who is alive, which queues are paused."""
        registries = (self._keys.workers, self._keys.coordinators, self._keys.directives, self._keys.namespace)
        yield Selector([f"%R~{name}" for name in registries], "+hgetall +hget +zrangebyscore")
        yield self._on("%R~", [lambda keys: keys.alive("*")], "+exists")

    def _monitor(self) -> Iterator[Selector]:
        """Numbers, names and times; no arguments, no texts."""
        yield from self._fleet()
        yield Selector([f"%R~{name}" for name in (self._keys.tools, self._keys.agents, self._keys.limits)], "+hgetall")
        streams: list[Of] = [lambda keys: keys.model("*"), lambda keys: keys.tool("*"), lambda keys: keys.inbox]
        streams += [lambda keys: keys.results, lambda keys: keys.dead, lambda keys: keys.feed]
        yield self._on("%R~", streams, "+xlen +xpending +xinfo|groups +xinfo|consumers +exists")
        yield self._on("%R~", [lambda keys: keys.queues], "+smembers")
        yield self._on(
            "%R~", [lambda keys: keys.backlog("*"), lambda keys: keys.turns, lambda keys: keys.timers], "+zcard"
        )
        yield self._on("%R~", [lambda keys: keys.stats, lambda keys: keys.load], "+hgetall +hget +hmget")
        provider = self._any_provider
        yield Selector(
            [f"%R~{key}" for key in (provider.state, provider.calls, provider.waiting)], "+hgetall +zcard +zcount"
        )

    def _operator(self) -> Iterator[Selector]:
        """Pauses, drains, dead letters: these have content, and go back into any stream."""
        yield Selector([f"~{self._keys.directives}"], "+hset +hdel +hmget")
        streams: list[Of] = [lambda keys: keys.model("*"), lambda keys: keys.tool("*"), lambda keys: keys.inbox]
        streams += [lambda keys: keys.results]
        letters = "+xrange +xrevrange +xdel +xadd +evalsha"
        yield self._on("~", [lambda keys: keys.dead, *streams], letters)
        yield self._on("~", [lambda keys: keys.displaced("*")], "+unlink +exists +type")

    def _coordinator(self) -> Rules:
        """Everything in the namespace, and nothing beside it; no administration of the engine."""
        names = [key.base + "*" for key in self._partitions]
        keys = self._keys
        registries = [keys.namespace, keys.secret, keys.tools, keys.agents, keys.agent_uses, keys.workers]
        registries += [keys.coordinators, keys.limits, keys.directives, keys.readers("*")]
        provider = self._any_provider
        registries += [provider.state, provider.calls, provider.waiting, provider.seen]
        root = f"{_PYTHON} +script|load +script|exists +client|unblock +spublish"
        return Rules(root, names, [Selector([f"~{name}" for name in (*names, *registries)], _COORDINATOR)])

    # ---- names

    def _names(self, of: Iterable[Of]) -> list[str]:
        return [name(keys) for name in of for keys in self._partitions]

    def _on(self, access: str, of: Iterable[Of], commands: str) -> Selector:
        return Selector([access + name for name in self._names(of)], commands)


def _of_stream(name: str) -> Of:
    return lambda keys: keys.base + name


ROLES = ("client", "coordinator", "llm", "tools", "foreign-tools", "monitor", "operator", "gateway")
SERVING_ROLES = ("llm", "tools", "foreign-tools")
"""Roles that serve queues or pools."""

_PLAIN = "+ping +time +multi +exec +client|setinfo +client|setname +client|id"
_PYTHON = f"{_PLAIN} +asking +cluster|slots +info +wait"
_TASKS = "+xreadgroup +xack +xdel +xpending +xrange +xclaim +xgroup|create"
_VALUES = "+hget +hgetall +hset +hdel +hincrby +hincrbyfloat"
_PROVIDER = (
    "+evalsha +time +hget +hmget +hset +hdel +hexists +hincrby +hincrbyfloat +zadd +zrem +zcard +zrange +zrangebyscore "
    "+zremrangebyscore +zscore +pexpire +exists"
)
_COORDINATOR = "+@read +@write +eval +evalsha -@dangerous -function -scan -randomkey -dbsize -dump -move -object"
"""By categories: what it does is not listed command by command, because a rare one that is missing would stop it."""
