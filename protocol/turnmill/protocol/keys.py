"""Every key, stream, group and channel name.

All keys of a partition share the hash tag `{<partition>}`, so that one script may touch them on a cluster. A session's
partition is CRC32 of its id (of its root, for `root/child`) modulo the namespace's partition count; a turn's id
carries its partition: `t<partition>-<ulid>`.
"""

from __future__ import annotations

import hashlib
import re
import zlib

from ulid import ULID

COORDINATOR_GROUP = "coordinator"
WORKER_GROUP = "workers"
_NAME = re.compile(r"[A-Za-z0-9_.:@-]{1,128}\Z")
_SESSION = re.compile(r"[^\s{}]{1,256}\Z")
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


def is_blob_name(name: str) -> bool:
    """Whether a key behind the partition is a blob's."""
    return name.startswith("blob:")


class PartitionKeys:
    """The keys of one partition; the frequent ones are made once."""

    __slots__ = ("base", "dead", "feed", "inbox", "lease", "partition", "queues", "results", "stats", "timers", "turns")

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

    def events(self, turn_id: str) -> str:
        """The turn's channel; also the name of its sharded pub/sub channel."""
        return f"{self.base}turn:{turn_id}:events"

    def turn(self, turn_id: str) -> str:
        """The turn's record: who asked for what, and how it ended."""
        return f"{self.base}turn:{turn_id}"

    def session(self, session_id: str) -> str:
        """The session's control record: version, state, and what the running model call may publish."""
        return f"{self.base}session:{session_id}"

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

    def plan(self, plan_id: str) -> str:
        return f"{self.base}plan:{plan_id}"

    def blob(self, name: str) -> str:
        return f"{self.base}blob:{name}"

    def backlog(self, pool: str) -> str:
        """Model tasks that wait for the dispatch window, ordered so that tenants take turns."""
        return f"{self.base}backlog:{pool}"

    def backlog_clock(self, pool: str) -> str:
        return f"{self.base}backlog-clock:{pool}"


class Keys:
    """The keys of one namespace."""

    def __init__(self, prefix: str = "tm", partitions: int = 4) -> None:
        self.prefix = prefix
        self.namespace = f"{prefix}:namespace"
        self.secret = f"{prefix}:secret"
        self.tools = f"{prefix}:tools"
        self.agents = f"{prefix}:agents"
        self.workers = f"{prefix}:workers"
        self.coordinators = f"{prefix}:coordinators"
        self.partitions = [PartitionKeys(prefix, number) for number in range(partitions)]

    def of_session(self, session_id: str) -> PartitionKeys:
        return self.partitions[partition_of_session(session_id, len(self.partitions))]

    def of_turn(self, turn_id: str) -> PartitionKeys:
        """Raises `ValueError` for an id that is no turn's, or of another namespace's size."""
        partition = partition_of_turn(turn_id)
        if partition is None or partition >= len(self.partitions):
            raise ValueError(f"{turn_id!r} is not the id of a turn in a namespace of {len(self.partitions)} partitions")
        return self.partitions[partition]
