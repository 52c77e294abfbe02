"""Every key, stream, group and channel name.

All keys of a partition share the hash tag `{<partition>}`, so that one script may touch them on a cluster. A session's
partition is CRC32 of its id (of its root, for `root/child`) modulo the namespace's partition count; a turn's id
carries its partition: `t<partition>-<ulid>`.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from typing import cast

from ulid import ULID

COORDINATOR_GROUP = "coordinator"
WORKER_GROUP = "workers"
BLOB_PATTERN = "^blob:"
"""What the name of a blob's key behind the partition matches."""
_NAME = re.compile(r"[A-Za-z0-9_.:@-]{1,128}\Z")
_SESSION = re.compile(r"[^\s{}\ud800-\udfff]{1,256}\Z")
_CROCKFORD = "0123456789abcdefghjkmnpqrstvwxyz"
_TURN = re.compile(r"t(\d{1,4})-[0-9a-z]{20,40}\Z")


def valid_name(name: str) -> bool:
    """Whether a tool, agent, queue or pool may be named so: letters, digits and `_ . : @ -`, up to 128."""
    return bool(_NAME.match(name))


def valid_session_id(session_id: str) -> bool:
    """Whether a session may be named so: up to 256 characters without white space or braces."""
    return bool(_SESSION.match(session_id))


def partition_of_session(session_id: str, partitions: int) -> int:
    root = session_id.split("/", 1)[0]
    return zlib.crc32(root.encode()) % partitions


def new_turn_id(partition: int) -> str:
    return f"t{partition}-{str(ULID()).lower()}"


def child_turn_id(turn_id: str, call: str) -> str:
    """The id of the turn that a call of another turn starts: the same whenever it is made, with the parent's time."""
    digest = hashlib.blake2b(f"{turn_id}/{call}".encode(), digest_size=10).digest()
    number, letters = int.from_bytes(digest, "big"), ""
    for _ in range(16):
        number, digit = divmod(number, 32)
        letters += _CROCKFORD[digit]
    head, _, name = turn_id.partition("-")
    return f"{head}-{name[:10]}{letters}"


def submission_ms(turn_id: str) -> int | None:
    """When a turn's id was made, by the clock of the client that made it; None where it is none of ours."""
    try:
        return int(ULID.from_str(turn_id.partition("-")[2].upper()).timestamp * 1000)
    except ValueError:
        return None


def partition_of_turn(turn_id: str) -> int | None:
    """The partition in a turn's id; None where it is no turn id."""
    match = _TURN.match(turn_id)
    return int(match[1]) if match else None


def model_queue(pool: str) -> str:
    """The name of a pool's task stream behind the partition; the same in every partition."""
    return f"model:{pool}"


def tool_queue(queue: str) -> str:
    """The name of a tool queue's task stream behind the partition; the same in every partition."""
    return f"tool:{queue}"


def is_task_queue(name: str) -> bool:
    """Whether a stream of this name holds tasks."""
    return name.startswith(("model:", "tool:"))


def pool_of_queue(name: str) -> str | None:
    """The pool whose task stream has this name; None where it is a tool queue's."""
    return name.removeprefix("model:") if name.startswith("model:") else None


def pause_field(queue: str) -> str:
    """The field of `Keys.directives` that is there while the queue `tool:<name>` or `model:<pool>` is paused."""
    return f"pause:{queue}"


def paused_queue(field: str) -> str | None:
    """The queue of such a field; None for another one."""
    return field.removeprefix("pause:") if field.startswith("pause:") else None


def drain_field(process_id: str) -> str:
    """The field of `Keys.directives` that asks a worker or coordinator to drain."""
    return f"drain:{process_id}"


def drained_process(field: str) -> str | None:
    """The process of such a field; None for another one."""
    return field.removeprefix("drain:") if field.startswith("drain:") else None


def is_blob_name(name: str) -> bool:
    """Whether a key behind the partition is a blob's."""
    return name.startswith("blob:")


def is_idempotency_name(name: str) -> bool:
    """Whether a key behind the partition is an idempotency key's."""
    return name.startswith("idempotency:")


def session_name(session_id: str) -> str:
    """The name of a session's control record behind the partition."""
    return f"session:{session_id}"


class PartitionKeys:
    """The keys of one partition; the frequent ones are made once."""

    __slots__ = (
        "base",
        "dead",
        "feed",
        "inbox",
        "lease",
        "load",
        "partition",
        "queues",
        "removals",
        "results",
        "stats",
        "timers",
        "turns",
    )

    def __init__(self, prefix: str, partition: int) -> None:
        self.partition = partition
        self.base = f"{prefix}:{{{partition}}}:"
        self.inbox = self.base + "inbox"
        self.results = self.base + "results"
        self.timers = self.base + "timers"
        self.lease = self.base + "lease"
        self.dead = self.base + "dead"
        self.feed = self.base + "feed"
        self.turns = self.base + "turns"
        self.queues = self.base + "queues"
        self.stats = self.base + "stats"
        self.load = self.base + "load"
        self.removals = self.base + "removals"
        """The names of what is left of deleted sessions: see `removal`."""

    def model(self, pool: str) -> str:
        return self.base + model_queue(pool)

    def tool(self, queue: str) -> str:
        return self.base + tool_queue(queue)

    def alive(self, worker_id: str) -> str:
        return f"{self.base}alive:{worker_id}"

    def cancel(self, turn_id: str) -> str:
        return f"{self.base}cancel:{turn_id}"

    @property
    def cancellations(self) -> str:
        """The sharded pub/sub channel on which stopped turns are told: `<turn id> <reason>`."""
        return self.base + "cancel"

    def answer(self, request_id: str) -> str:
        """A stream of one entry: what became of a command."""
        return f"{self.base}answer:{request_id}"

    def idempotency(self, session_id: str, key: str) -> str:
        """The turn that a caller's key stands for."""
        digest = hashlib.blake2b(f"{session_id}\0{key}".encode(), digest_size=16).hexdigest()
        return f"{self.base}idempotency:{digest}"

    @property
    def idempotencies(self) -> str:
        """A pattern of all of them."""
        return f"{self.base}idempotency:*"

    def events(self, turn_id: str) -> str:
        """The turn's channel; also the name of its sharded pub/sub channel."""
        return f"{self.base}turn:{turn_id}:events"

    def turn(self, turn_id: str) -> str:
        """The turn's record: who asked for what, and how it ended."""
        return f"{self.base}turn:{turn_id}"

    def session(self, session_id: str) -> str:
        """The session's control record: version, state, and what the running model call may publish."""
        return self.base + session_name(session_id)

    def transcript(self, session_id: str) -> str:
        return f"{self.base}transcript:{session_id}"

    def replacements(self, session_id: str) -> str:
        """What stands in for parts of the transcript where the session was compacted."""
        return f"{self.base}replacements:{session_id}"

    def values(self, session_id: str) -> str:
        """The session's state, as tools read and change it."""
        return f"{self.base}values:{session_id}"

    def blobs(self, session_id: str) -> str:
        """The names of the blobs that belong to a session."""
        return f"{self.base}blobs:{session_id}"

    def owned(self, session_id: str) -> str:
        """What expires by itself and goes with the session before, by its time in ms: names behind `base` of records of
        ended turns and of answers."""
        return f"{self.base}owned:{session_id}"

    def removal(self, name: str) -> str:
        """Names behind `base` of what a deleted session has left, until all of it is removed."""
        return f"{self.base}removed:{name}"

    def plan(self, plan_id: str) -> str:
        return f"{self.base}plan:{plan_id}"

    def blob(self, name: str) -> str:
        return f"{self.base}blob:{name}"

    def displaced(self, name: str) -> str:
        """Where a key goes that stood in place of one of ours and was of another type."""
        return f"{self.base}displaced:{name}"

    def backlog(self, pool: str) -> str:
        """Model tasks that wait for the dispatch window, ordered so that tenants take turns."""
        return f"{self.base}backlog:{pool}"

    def backlog_clock(self, pool: str) -> str:
        return f"{self.base}backlog-clock:{pool}"


def partition_patterns(prefix: str, partitions: int) -> list[PartitionKeys]:
    """The keys of all partitions as patterns for access lists: one for numbers of one digit, one for those of two, and so
    on. A `*` in the partition's place would match keys that only look alike."""
    escaped = re.sub(r"([*?\[\]\\])", r"\\\1", prefix)
    lengths = range(1, len(str(partitions - 1)) + 1)
    return [PartitionKeys(escaped, cast("int", "[0-9]" * digits)) for digits in lengths]


class ProviderKeys:
    """What all workers share about one provider of models: behind a hash tag of its own."""

    __slots__ = ("calls", "seen", "state", "waiting")

    def __init__(self, prefix: str, provider: str) -> None:
        base = f"{prefix}:provider:{{{provider}}}:"
        self.state = base + "state"
        """Hash: what is left of its limits, and until when nobody may call it."""
        self.calls = base + "calls"
        """Sorted set: the calls that are under way, by the time in ms at which their leave ends."""
        self.waiting = base + "waiting"
        """Sorted set: the calls that wait for leave, by the time in ms since when."""
        self.seen = base + "seen"
        """Sorted set: the same calls, by the time in ms at which they asked last."""


class Keys:
    """The keys of one namespace."""

    def __init__(self, prefix: str = "tm", partitions: int = 4) -> None:
        self.prefix = prefix
        self.namespace = f"{prefix}:namespace"
        self.secret = f"{prefix}:secret"
        self.tools = f"{prefix}:tools"
        self.agents = f"{prefix}:agents"
        self.agent_uses = f"{prefix}:agent-uses"
        """When each version of an agent was used last, in ms."""
        self.workers = f"{prefix}:workers"
        self.coordinators = f"{prefix}:coordinators"
        self.limits = f"{prefix}:limits"
        self.directives = f"{prefix}:directives"
        self.partitions = [PartitionKeys(prefix, number) for number in range(partitions)]

    def provider(self, name: str) -> ProviderKeys:
        """The keys of a provider, by the prefix of its models."""
        return ProviderKeys(self.prefix, name)

    def readers(self, queue: str) -> str:
        """The workers that read a queue on a cluster, and when they were last heard of."""
        return f"{self.prefix}:readers:{queue}"

    def of_session(self, session_id: str) -> PartitionKeys:
        return self.partitions[partition_of_session(session_id, len(self.partitions))]

    def of_turn(self, turn_id: str) -> PartitionKeys:
        """Raises `ValueError` for an id that is no turn's, or of another namespace's size."""
        partition = partition_of_turn(turn_id)
        if partition is None or partition >= len(self.partitions):
            raise ValueError(f"{turn_id!r} is not the id of a turn in a namespace of {len(self.partitions)} partitions")
        return self.partitions[partition]
