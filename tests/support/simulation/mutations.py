"""Switches that take out one fence or rule each, in memory: a simulator that is too kind proves nothing.

A mutation edits a script's or a function's text, or puts another function in its place. What it edits must be there: a
rule that moved is an error here and not a mutation that finds nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import secrets
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import turnmill.protocol.streams as streams
import turnmill.runtime.calls
import turnmill.runtime.commands
import turnmill.runtime.door
import turnmill.runtime.endings
import turnmill.runtime.flow
import turnmill.runtime.idempotency
import turnmill.runtime.machine
import turnmill.runtime.pairing
import turnmill.runtime.replies
import turnmill.runtime.steps
import turnmill.runtime.store
import turnmill.workers.consumer
from turnmill.protocol.connection import pairs
from turnmill.protocol.keys import COORDINATOR_GROUP, WORKER_GROUP
from turnmill.protocol.streams import Completer, Script, acknowledge, append_message
from turnmill.runtime.dispatch import DispatchWindow
from turnmill.runtime.effects import DispatchTool
from turnmill.runtime.leases import PartitionLeases
from turnmill.runtime.partition import Partition
from turnmill.runtime.reclaimer import Reclaimer
from turnmill.runtime.store import Store
from turnmill.workers.consumer import Consumer

from . import liveness
from .faults import Profile


class Mutation(NamedTuple):
    """A rule, and how to do without it."""

    rule: str
    apply: Callable[[], Any]


class Notice(NamedTuple):
    """Where a mutation shows soon, and as what: a pattern of the violation's text."""

    profile: Profile
    pattern: str


MUTATIONS: dict[str, Mutation] = {}


@contextmanager
def mutated(name: str | None) -> Iterator[None]:
    """Run without a rule; with all of them where no name is given."""
    if name is None:
        yield
        return
    with MUTATIONS[name].apply():
        yield


# ---- how


@contextmanager
def put(place: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(place, name)
    setattr(place, name, value)
    try:
        yield
    finally:
        setattr(place, name, before)


@contextmanager
def script(which: Script, *edits: tuple[str, str]) -> Iterator[None]:
    """A script with pieces of its text replaced, all of them wherever they stand."""
    source = which.source
    for old, new in edits:
        assert old in source, f"{which.name} has no {old!r} any more"
        source = source.replace(old, new)
    sha = hashlib.sha1(source.encode()).hexdigest()
    with put(which, "source", source), put(which, "_sha", sha):
        yield


@contextmanager
def function(which: Any, *edits: tuple[str, str]) -> Iterator[None]:
    """A function of a module with pieces of its text replaced, also where others have imported it."""
    module = sys.modules[which.__module__]
    source = textwrap.dedent(inspect.getsource(which))
    for old, new in edits:
        assert old in source, f"{which.__module__}.{which.__qualname__} has no {old!r} any more"
        source = source.replace(old, new)
    made: dict[str, Any] = {}
    exec(compile(source, f"<mutated {which.__qualname__}>", "exec"), module.__dict__, made)
    new = made[which.__name__]
    with ExitStack() as stack:
        owner = which.__qualname__.rpartition(".")[0]
        if owner:
            stack.enter_context(put(getattr(module, owner), which.__name__, new))
        for other in [one for name, one in sys.modules.items() if name.startswith("turnmill.")]:
            for name, value in list(vars(other).items()):
                if value is which:
                    stack.enter_context(put(other, name, new))
                elif isinstance(value, dict) and which in value.values():
                    key = next(key for key, each in value.items() if each is which)
                    stack.enter_context(_item(value, key, new))
        yield


@contextmanager
def _item(place: dict[Any, Any], key: Any, value: Any) -> Iterator[None]:
    before = place[key]
    place[key] = value
    try:
        yield
    finally:
        place[key] = before


def edits_script(name: str, rule: str, which: Script, *edits: tuple[str, str]) -> None:
    MUTATIONS[name] = Mutation(rule, lambda: script(which, *edits))


def edits(name: str, rule: str, which: Any, *pieces: tuple[str, str]) -> None:
    MUTATIONS[name] = Mutation(rule, lambda: function(which, *pieces))


def replaces(name: str, rule: str, place: Any, attribute: str, value: Any) -> None:
    MUTATIONS[name] = Mutation(rule, lambda: put(place, attribute, value))


# ---- the commit

_VERSION = "(current[1] or '0') ~= version"
_WRITER = "(current[2] or '') ~= A[a + 3]"
edits_script(
    "version", "a commit carries the version that it read, and its writer", streams.COMMIT_TURNS,
    (_VERSION, "false"), (_WRITER, "false"),
)  # fmt: skip
edits_script("writer", "an equal version of another writer is another one", streams.COMMIT_TURNS, (_WRITER, "false"))
edits_script(
    "known_turn", "a turn that is known is not started again", streams.COMMIT_TURNS,
    ("elseif guard > 0 and call('EXISTS', K[guard]) == 1 then", "elseif false then"),
)  # fmt: skip
edits_script(
    "ack_in_commit", "the commit acknowledges what caused it", streams.COMMIT_TURNS,
    ("if #acknowledged[source] > 0 then", "if false then"),
)  # fmt: skip
edits_script(
    "channel_stays_gone", "a channel that is gone stays gone", streams.COMMIT_TURNS, ("'NOMKSTREAM', '0-*'", "'0-*'")
)
edits_script("numbering", "events are numbered 1, 2, 3, ...", streams.COMMIT_TURNS, ("'0-*'", "'*'"))
edits_script(
    "marker", "a stop leaves a marker", streams.COMMIT_TURNS, ("call('SET', key, A[a + 5], 'PX', A[a + 3])", "")
)
edits(
    "channel_expiry", "a channel gets its expiry with the terminal commit alone", turnmill.runtime.store._Writer._publish,
    (" if closes else 0", ""),
)  # fmt: skip

edits(
    "writer_renewed", "behind a commit of unknown outcome an owner writes under another name", Partition.forget,
    ("self._store.writer = new_writer()", ""),
)  # fmt: skip

_handle, _commit = Partition.handle, Store.commit


async def _acknowledged_first(partition: Partition, deliveries: Any) -> None:
    for delivery in deliveries:
        await acknowledge(partition._engine, delivery, COORDINATOR_GROUP)
    await _handle(partition, deliveries)


def _dispatched(store: Store, commits: Any) -> tuple[list[Any], list[tuple[str, Any]]]:
    """The commits without their tool tasks, and these."""
    writer = turnmill.runtime.store._Writer.__new__(turnmill.runtime.store._Writer)
    writer._secret, writer._wire = store.secret, store._wire
    left, tasks = [], []
    for commit in commits:
        mine = [effect for effect in commit.effects if isinstance(effect, DispatchTool)]
        tasks += [(store._keys.tool(effect.queue), writer._task(effect.task)) for effect in mine]
        left.append(commit._replace(effects=[effect for effect in commit.effects if effect not in mine]))
    return left, tasks


def _dispatch_first(store: Store, commits: Any, now_ms: int, admit: Any) -> Any:
    left, tasks = _dispatched(store, commits)
    for queue, body in tasks:
        append_message(store._engine, queue, "tool_task", body)
    return _commit(store, left, now_ms, admit)


def _dispatch_last(store: Store, commits: Any, now_ms: int, admit: Any) -> Any:
    left, tasks = _dispatched(store, commits)
    sent = _commit(store, left, now_ms, admit)

    async def dispatch() -> list[int]:
        results: list[int] = await sent
        for queue, body in tasks:
            await append_message(store._engine, queue, "tool_task", body)
        return results

    return dispatch()


replaces("ack_first", "the acknowledgement is part of the commit", Partition, "handle", _acknowledged_first)
replaces("dispatch_first", "tasks land with the state: not before", Store, "commit", _dispatch_first)
replaces("dispatch_last", "tasks land with the state: not behind it", Store, "commit", _dispatch_last)

# ---- the door and the machine


class _Anything(str):
    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


replaces(
    "token", "a result echoes its task's token", turnmill.runtime.door, "make_token", lambda *_: _Anything("token")
)
edits(
    "tool_attempt", "a result counts for the attempt that it belongs to", turnmill.runtime.replies.tool_reply,
    (" or call.attempt != reply.attempt", ""),
)  # fmt: skip
edits(
    "model_attempt", "an answer counts for the attempt that it belongs to", turnmill.runtime.replies.model_reply,
    (" or reply.attempt != turn.attempt", ""),
)  # fmt: skip
edits(
    "one_result", "a result counts once", turnmill.runtime.replies.tool_reply,
    ("call.status is not CallStatus.RUNNING or ", ""),
)  # fmt: skip
edits(
    "one_step", "an answer counts for its step", turnmill.runtime.replies.model_reply,
    (" or reply.call != str(turn.step)", ""),
)  # fmt: skip
edits(
    "steer_twice", "steering that comes twice is one message", turnmill.runtime.commands.steer,
    ("if command.steering_id not in known:", "if True:"),
)  # fmt: skip
edits(
    "joined",
    "a start that became steering is known, also behind its turn's end",
    turnmill.runtime.machine._start,
    (" or command.turn_id in dict(state.joined)", ""),
)
edits(
    "lease_with_reader",
    "a partition that was not taken over is not renewed",
    PartitionLeases._renew,
    ("if number not in self._valid_until:", "if False:"),
)
edits(
    "first_result", "the host's first result counts", turnmill.runtime.commands.resume,
    ("call.status is CallStatus.HOST", "True"),
)  # fmt: skip
edits(
    "on_lost", "what may not be repeated is not", turnmill.runtime.replies._call_lost, ("spec.retry_when_lost and ", "")
)
edits(
    "stopped_is_stopped", "nothing new of a stopped turn starts", turnmill.runtime.replies.delivery_lost,
    ("if turn.phase is TurnPhase.ABORTING:", "if False:"),
)  # fmt: skip
edits(
    "stopped_calls", "nothing new of a stopped turn starts", turnmill.runtime.replies.tool_reply,
    ("if turn.phase is TurnPhase.ABORTING:", "if False:"),
)  # fmt: skip
edits(
    "stopped_stays", "a stop is the turn's end", turnmill.runtime.replies.model_reply,
    ("if turn.phase is TurnPhase.ABORTING:", "if False:"),
)  # fmt: skip
edits(
    "result_order", "results stand in call order", turnmill.runtime.pairing.closing_messages,
    ("for call in calls:", "for call in reversed(calls):"),
)  # fmt: skip
edits(
    "every_result", "every call has a result", turnmill.runtime.pairing.closing_messages,
    ("for call in calls:", "for call in calls[:2]:"),
)  # fmt: skip
edits(
    "reset_told", "a superseded attempt is announced", turnmill.runtime.steps.retry_model,
    ("draft.publish(StepReset(step_number=turn.step, attempt=turn.attempt))", "pass"),
)  # fmt: skip
edits(
    "approval", "what needs a person's word does not run without it", turnmill.runtime.flow._policies,
    ("if not call.is_approved:", "if False:"),
)  # fmt: skip
edits(
    "progress_twice", "progress that comes twice is told once", turnmill.runtime.replies.tool_progress,
    ("and progress.sequence > call.progress_sequence", ""),
)  # fmt: skip
edits(
    "timer_set",
    "what waits has a timer",
    turnmill.runtime.machine._set_timer,
    ("draft.effects.append(SetTimer(due))", "pass"),
)


@contextmanager
def _without_late_steering() -> Iterator[None]:
    with (
        function(turnmill.runtime.flow._finish, ("if _goes_on_with_steering(turn, plan):", "if False:")),
        function(turnmill.runtime.endings.finish_turn, ('drop_steering(draft, turn, "the turn has ended")', "pass")),
    ):
        yield


MUTATIONS["late_steering"] = Mutation(
    "late steering starts a step or is dropped, never neither", _without_late_steering
)


def _random_child(turn_id: str, call: str) -> str:
    return f"{turn_id.partition('-')[0]}-{secrets.token_hex(13)}"


replaces("child_id", "a sub-turn's id follows from its call", turnmill.runtime.calls, "child_turn_id", _random_child)

# ---- lost deliveries

edits_script(
    "owner_gone", "a delivery is lost only if its owner's key is missing", streams.TAKE_LOST_DELIVERY,
    ("if call('EXISTS', KEYS[3]) == 1 then return -1 end", ""),
)  # fmt: skip
edits_script(
    "owner_idle", "a delivery is lost only if it is idle for longer than the liveness", streams.TAKE_LOST_DELIVERY,
    ("'IDLE', ARGV[3], ", ""),
)  # fmt: skip


async def _take_in_two_steps(
    reclaimer: Reclaimer, partition: Partition, stream: str, consumer: str, *, forget: bool
) -> int:
    """Look, and then take, whatever XACK says."""
    call = reclaimer._engine.call
    if await call("EXISTS", partition.keys.alive(consumer)):
        return 0
    pending = await call("XPENDING", stream, WORKER_GROUP, "IDLE", reclaimer._liveness_ms, "-", "+", 100, consumer)
    for entry in pending:
        found = await call("XRANGE", stream, entry[0], entry[0])
        await call("XACK", stream, WORKER_GROUP, entry[0])
        await call("XDEL", stream, entry[0])
        if found:
            await append_message(reclaimer._engine, partition.keys.results, "delivery_lost", pairs(found[0][1])[b"d"])
    return 0


async def _nothing(*_: Any, **__: Any) -> None:
    return


replaces(
    "taken_once", "who takes a delivery away is decided by XACK, in one script", Reclaimer, "_take", _take_in_two_steps
)
replaces("lost_is_found", "deliveries of dead workers are taken back", Reclaimer, "_find_lost", _nothing)
replaces("adopt", "what a former owner left is handled", Reclaimer, "adopt", _nothing)
edits(
    "adopt_others", "an owner adopts what others left, never its own", Reclaimer.adopt,
    ('if consumer["name"] == self._consumer:', "if False:"),
)  # fmt: skip
edits(
    "own_second_look", "what is unknown to its owner is acted on at the second look", Reclaimer._find_own,
    ("unknown & self._suspects.get(stream, set())", "unknown"),
)  # fmt: skip
replaces("own_is_found", "what was read in a reply that never came is found", Reclaimer, "_find_own", _nothing)

# ---- workers

edits(
    "found_once", "what was found pending is not started again by its late reply", Consumer._accept,
    (" and name not in self._found", ""),
)  # fmt: skip


@contextmanager
def _without_second_look() -> Iterator[None]:
    with (
        function(Consumer._compare, ("again = unknown & self._suspects", "again = unknown")),
        function(Consumer._accept, (" and name not in self._found", "")),
    ):
        yield


MUTATIONS["second_look"] = Mutation(
    "what is unknown to its worker is acted on once, at the second look", _without_second_look
)
replaces("compare", "a worker compares what it holds with what is pending", Consumer, "_compare", _nothing)


async def _all_of_them(consumer: Consumer, deliveries: Any) -> Any:
    return deliveries


replaces("still_owned", "behind a lapse a worker looks at what it still owns", Consumer, "_still_owned", _all_of_them)


def _completes_in_steps(completer: Completer, completions: Any) -> Any:
    async def steps() -> list[Any]:
        for completion in completions:
            await acknowledge(completer._engine, completion.delivery, WORKER_GROUP)
            await append_message(completer._engine, completion.results, completion.kind, completion.body)
        return []

    return asyncio.ensure_future(steps())


replaces("completion", "result and acknowledgement are one transaction", Completer, "_transact", _completes_in_steps)
edits(
    "sent_again", "a result whose way is unknown is sent again", Consumer._send,
    ('self._count("results_sent_again")', "break"),
)  # fmt: skip


@contextmanager
def _beating_in_the_loop() -> Iterator[None]:
    """The heartbeat shares the event loop with the tools."""
    with put(liveness, "HEART_OF_ITS_OWN", False):
        yield


MUTATIONS["heart"] = Mutation("a worker's sign of life comes from a thread", _beating_in_the_loop)
edits(
    "stop_looked_up", "held tasks' markers are looked at with every heartbeat", Consumer._beat,
    ("await self._look_for_stopped()", ""),
)  # fmt: skip

# ---- channels

_LIVE = "if record[1] ~= A[1] then return -1 end"
edits_script("delta_attempt", "a superseded attempt cannot write", streams.APPEND_DELTAS, (_LIVE, ""))
edits_script(
    "delta_offset", "a batch of deltas that is sent twice is written once", streams.APPEND_DELTAS,
    ("if offset == tonumber(A[2]) + count then return offset end", ""),
    ("if offset ~= tonumber(A[2]) then return -2 end", ""),
)  # fmt: skip
edits_script(
    "delta_channel", "deltas do not bring a channel back", streams.APPEND_DELTAS, ("'NOMKSTREAM', '0-*'", "'0-*'")
)

# ---- time, windows, idempotency

edits_script("timer_once", "a timer fires once", streams.FIRE_TIMERS, ("call('ZREM', KEYS[1], session)", ""))
edits_script(
    "backlog_kept", "what waits for the window is not lost", streams.DISPATCH_BACKLOG,
    ("call('XADD', KEYS[3], '*', 't', 'model_task', 'd', tasks[i])", "if i == 1 then call('XADD', KEYS[3], '*', 't', 'model_task', 'd', tasks[i]) end"),
)  # fmt: skip


async def _look_at_nothing(window: DispatchWindow, *_: Any) -> None:
    return None


replaces("backlog_found", "a new owner finds what waits for the window", DispatchWindow, "look", _look_at_nothing)
edits(
    "idempotency",
    "the same idempotency key is one turn",
    turnmill.runtime.idempotency.claim_turn,
    ("if before is None:", "if True:"),
)


# ---- where it shows

_CALM = Profile(())
_STALLED = Profile(("stall",), "coordinator", "shared")
_HELD = Profile(("hold",), "coordinator", "shared")
_OWNERS_DIE = Profile(("kill",), "coordinator")
_TOOLS_DIE = Profile(("kill",), "tools")
_TOOLS_PAUSE = Profile(("pause",), "tools")
_MODELS_PAUSE = Profile(("pause",), "llm")
_REPEATED = Profile(("repeat", "slow"))
_FORGED = Profile(("forge",))
_MUTE = Profile(("mute",), "tools", "subscription")
_LATE_READS = Profile(("stall",), "tools", "reading")
_CUT_TOOLS = Profile(("cut",), "tools", "shared")
_CUT_MODELS = Profile(("cut",), "llm", "shared")
_CUT_READS = Profile(("cut",), None, "reading")
_UNREAD = Profile(("stall",), "coordinator", "reading")
_NO_CHANNEL = Profile(("drop_channel",))
_BLOCKED = Profile(("block",))

NOTICES: dict[str, Notice] = {
    "version": Notice(_HELD, "a stale commit landed"),
    "writer": Notice(_HELD, "a stale commit landed"),
    "writer_renewed": Notice(_HELD, "a stale commit landed"),
    "known_turn": Notice(_REPEATED, "behind its end|starts twice|decided on another state"),
    "ack_in_commit": Notice(_CALM, "left behind|is handled twice"),
    "channel_stays_gone": Notice(_NO_CHANNEL, "event 0-1 where"),
    "numbering": Notice(_CALM, "where 0-1 is due"),
    "marker": Notice(_MUTE, "behind the turn's stop"),
    "channel_expiry": Notice(_CALM, "is to expire while the turn is live"),
    "ack_first": Notice(_OWNERS_DIE, "is lost|stuck"),
    "dispatch_first": Notice(_HELD, "never told as started|is started twice"),
    "dispatch_last": Notice(_OWNERS_DIE, "stuck|was lost"),
    "token": Notice(_FORGED, "forged"),
    "tool_attempt": Notice(_TOOLS_PAUSE, "has the result of attempt"),
    "model_attempt": Notice(_MODELS_PAUSE, "was told as|answers attempt|the answer of attempt"),
    "one_result": Notice(_REPEATED, "a call has one result|has finished twice"),
    "one_step": Notice(_REPEATED, "was told as"),
    "steer_twice": Notice(_REPEATED, "stands 2 times"),
    "joined": Notice(Profile(("repeat",)), "stands 2 times"),
    "lease_with_reader": Notice(Profile(("slow", "kill", "set_back")), "stuck"),
    "first_result": Notice(_REPEATED, "a call has one result"),
    "on_lost": Notice(_TOOLS_PAUSE, "may not be repeated"),
    "stopped_is_stopped": Notice(_TOOLS_DIE, "behind the turn's stop"),
    "stopped_calls": Notice(_CALM, "behind the turn's stop"),
    "stopped_stays": Notice(_CALM, "behind the turn's stop|it failed: aborted"),
    "result_order": Notice(_CALM, "invalid history|history is broken"),
    "every_result": Notice(_CALM, "invalid history|history is broken"),
    "reset_told": Notice(_CALM, "was told"),
    "approval": Notice(_CALM, "ran without approval"),
    "progress_twice": Notice(_REPEATED, "told its progress twice"),
    "timer_set": Notice(_CALM, "stuck"),
    "late_steering": Notice(_CALM, "steering .* was told as"),
    "child_id": Notice(_CALM, "decides differently"),
    "owner_gone": Notice(_CALM, "which is alive|whose heart beats"),
    "owner_idle": Notice(_TOOLS_DIE, "ms after it was delivered"),
    "taken_once": Notice(_TOOLS_DIE, "nobody holds it"),
    "lost_is_found": Notice(_TOOLS_DIE, "stuck"),
    "adopt": Notice(_OWNERS_DIE, "left behind|stuck"),
    "adopt_others": Notice(_CALM, "adopts what it is about itself"),
    "own_second_look": Notice(_CALM, "is handled twice"),
    "own_is_found": Notice(_CUT_READS, "left behind|stuck"),
    "second_look": Notice(_LATE_READS, "is started twice"),
    "found_once": Notice(_LATE_READS, "is started twice"),
    "compare": Notice(_CUT_READS, "left behind|stuck"),
    "still_owned": Notice(_TOOLS_PAUSE, "which was taken from it while it stood still"),
    "completion": Notice(_TOOLS_DIE, "stuck|was lost"),
    "sent_again": Notice(_CUT_TOOLS, "is started twice|stuck|never told|left behind"),
    "heart": Notice(_BLOCKED, "whose heart beats"),
    "stop_looked_up": Notice(_MUTE, "behind the turn's stop"),
    "delta_attempt": Notice(_MODELS_PAUSE, "was told as|behind its end"),
    "delta_offset": Notice(_CUT_MODELS, "was told as"),
    "delta_channel": Notice(_NO_CHANNEL, "event 0-1 where"),
    "timer_once": Notice(_UNREAD, "fires again"),
    "backlog_kept": Notice(Profile(("kill", "pause"), "llm"), "stuck"),
    "backlog_found": Notice(_OWNERS_DIE, "stuck|left behind"),
    "idempotency": Notice(Profile(("cut",), "host", "shared"), "stands .* times"),
}
assert set(NOTICES) == set(MUTATIONS)
