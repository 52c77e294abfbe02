"""The looks at a world in which every turn has ended."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from turnmill.protocol.codec import EVENT_CODEC, decode_message
from turnmill.protocol.events import TERMINAL_EVENT_TYPES
from turnmill.workers.providers.scripted import history_fault

if TYPE_CHECKING:
    from .invariants import Invariants
    from .world import World

_ATTEMPT_OF_TEXT = re.compile(r"\[\d+/(\d+)/(\d+)\]")
_ATTEMPT_OF_RESULT = re.compile(r"#(\d+)\Z")


class Ending:
    """Problems of a world at its end."""

    def __init__(self, world: World, invariants: Invariants) -> None:
        self.world = world
        self.invariants = invariants

    def problems(self) -> Iterator[str]:
        for turn_id, events in self.invariants.channels.items():
            decoded = [(number, EVENT_CODEC.decode(kind, body)) for number, kind, body in events]
            for problem in self._of_turn(turn_id, decoded):
                yield f"{turn_id}: {problem}"
        for session in self.invariants.transcripts:
            for problem in self._of_session(session):
                yield f"{session}: {problem}"
        for start in self.invariants.starts:
            yield from self._of_start(start)
        for story in self.world.stories:
            for problem in self._of_story(story):
                yield f"turn {story.number}: {problem}"
        for keys in self.world.keys.partitions:
            dead = self.world.server.lookup(keys.dead.encode())
            if dead is not None and len(dead) and not self.world.faults.forges:
                yield f"dead letters: {list(dead.entries.values())[:2]}"

    # ---- turns

    def _of_turn(self, turn_id: str, numbered: list[tuple[int, Any]]) -> Iterator[str]:
        events = [event for _, event in numbered]
        kinds = Counter(event.type for event in events)
        ends = sum(kinds[kind] for kind in TERMINAL_EVENT_TYPES)
        gone = turn_id in self.world.faults.deleted_channels
        if ends != 1 and not (gone and ends == 0):
            yield f"{ends} ends"
        if kinds["turn.started"] > 1:
            yield "it starts twice"
        yield from self._record_and_channel(turn_id, events, gone)
        if gone:
            return
        yield from self._calls(events)
        yield from self._progress(events)
        yield from self._approvals(events)
        yield from self._texts(turn_id, events)

    def _record_and_channel(self, turn_id: str, events: list[Any], gone: bool) -> Iterator[str]:
        keys, server = self.world.keys.of_turn(turn_id), self.world.server
        record = server.lookup(keys.turn(turn_id).encode())
        status = record.get(b"status", b"").decode() if record is not None else None
        if status not in ("finished", "failed", "aborted"):
            yield f"its record says {status}"
        if gone:
            return
        last = events[-1]
        if last.type not in TERMINAL_EVENT_TYPES:
            return
        told = "finished" if last.type == "turn.finished" else "aborted" if last.aborted else "failed"
        if told != status:
            yield f"its channel says {told}, its record {status}"
        if keys.events(turn_id).encode() not in server.expires:
            yield "its channel never expires"
        if last.type == "turn.failed" and not last.aborted:
            yield from self._failure(last)

    def _failure(self, event: Any) -> Iterator[str]:
        """Nothing that happens here may fail a turn, but the host's own doing."""
        allowed = {"session_busy", "tool_results_required", "approval_required", "repeated_tool_error"}
        if event.error_type not in allowed:
            yield f"it failed: {event.error_type}: {event.error}"

    def _calls(self, events: list[Any]) -> Iterator[str]:
        """One result for each call, in call order, of the newest attempt."""
        results = [(event.step_number, event.index) for event in events if event.type == "tool_result"]
        if results != sorted(set(results)):
            yield f"results are not once each in call order: {results}"
        finished = [(event.step_number, event.index) for event in events if event.type == "tool_execution.finished"]
        if len(finished) != len(set(finished)):
            yield f"a call has finished twice: {finished}"
        newest: dict[tuple[int, int], int] = {}
        for event in events:
            if event.type == "tool_execution.started":
                newest[event.step_number, event.index] = event.attempt
            elif event.type == "tool_result" and isinstance(event.tool_result.result, str):
                found = _ATTEMPT_OF_RESULT.search(event.tool_result.result)
                attempt = newest.get((event.step_number, event.index))
                if found is not None and int(found[1]) != attempt:
                    yield f"call {event.step_number}.{event.index} has the result of attempt {found[1]}, not of {attempt}"
                if "forged" in event.tool_result.result:
                    yield f"call {event.step_number}.{event.index} has a forged result"
                if "timeout" in event.tool_result.result or "no worker took" in event.tool_result.result:
                    yield f"call {event.step_number}.{event.index} was lost: {event.tool_result.result}"

    def _progress(self, events: list[Any]) -> Iterator[str]:
        """A tool says one thing in each attempt."""
        said: dict[tuple[int, int], int] = {}
        for event in events:
            if event.type == "tool_execution.started":
                said[event.step_number, event.index] = 0
            elif event.type == "tool_execution.progress":
                said[event.step_number, event.index] += 1
                if said[event.step_number, event.index] > 1:
                    yield f"call {event.step_number}.{event.index} has told its progress twice"

    def _approvals(self, events: list[Any]) -> Iterator[str]:
        approved = {
            (event.step_number, event.index) for event in events if event.type == "approval.decided" and event.approved
        }
        for event in events:
            is_careful = event.type == "tool_execution.started" and event.name == "careful"
            if is_careful and (event.step_number, event.index) not in approved:
                yield f"call {event.step_number}.{event.index} ran without approval"

    def _texts(self, turn_id: str, events: list[Any]) -> Iterator[str]:
        """What was told live of the accepted attempt is what stands in the transcript."""
        session = next((event.session_id for event in events if event.type == "turn.started"), None)
        said: dict[int, str] = {}
        attempts: dict[int, int] = {}
        for event in events:
            if event.type == "step.started":
                said[event.step_number], attempts[event.step_number] = "", 1
            elif event.type == "step.reset":
                said[event.step_number], attempts[event.step_number] = "", event.attempt
            elif event.type == "text.delta":
                said[event.step_number] = said.get(event.step_number, "") + event.text
        for message in self.invariants.transcripts.get(session or "", ()):
            if message.turn_id != turn_id or message.role != "assistant" or message.metadata:
                continue
            if said.get(message.step) != message.text:
                yield f"step {message.step} was told as {said.get(message.step)!r} and says {message.text!r}"
            if "forged" in message.text:
                yield f"step {message.step} has a forged answer"
            found = _ATTEMPT_OF_TEXT.search(message.text)
            if found is not None and int(found[2]) != message.attempt:
                yield f"step {message.step} has the answer of attempt {found[2]} as that of {message.attempt}"
            if message.attempt != attempts.get(message.step):
                yield f"step {message.step} answers attempt {message.attempt}, {attempts.get(message.step)} was told"

    # ---- sessions

    def _of_session(self, session: str) -> Iterator[str]:
        keys, server = self.world.keys.of_session(session), self.world.server
        stored = [decode_message(entry) for entry in server.lookup(keys.transcript(session).encode()) or ()]
        fault = history_fault(stored)
        if fault is not None:
            yield f"the history is broken: {fault}"
        if stored != self.invariants.transcripts[session]:
            yield "the transcript is not what was committed"

    # ---- tools

    def _of_start(self, start: Any) -> Iterator[str]:
        from .invariants import STOP_SECONDS

        turn_id, call, attempt = start.attempt
        if not self._was_told(turn_id, call, attempt):
            yield f"{start.attempt} of {start.tool} ran, and was never told as started"
        stopped_at = self.invariants.stopped_at.get(turn_id)
        if stopped_at is None or self.world.faults.is_troubled(start.actor, stopped_at - 1.0):
            return
        ended_at = start.ended_at if start.ended_at is not None else self.world.loop.time()
        if not start.actor.is_dead and ended_at - max(stopped_at, start.at) > STOP_SECONDS:
            yield f"{start.attempt} ran on {start.actor} for {ended_at - stopped_at:.2f} s behind the turn's stop"

    def _was_told(self, turn_id: str, call: str, attempt: int) -> bool:
        if turn_id in self.world.faults.deleted_channels:
            return True
        for _, kind, body in self.invariants.channels.get(turn_id, ()):
            if kind == b"tool_execution.started":
                event: Any = EVENT_CODEC.decode(kind, body)
                if f"{event.step_number}.{event.index}" == call and event.attempt == attempt:
                    return True
        return False

    # ---- hosts

    def _of_story(self, story: Any) -> Iterator[str]:
        if story.turn is None:
            if not story.refused:
                yield "it was never accepted"
            return
        turn_id = story.turn.id
        if turn_id in self.world.faults.deleted_channels:
            return
        numbers = [number for number, _ in story.seen]
        told = [kind.decode() for _, kind, _ in self.invariants.channels.get(turn_id, ())]
        if numbers != list(range(1, len(numbers) + 1)) or [event.type for _, event in story.seen] != told:
            yield f"its watcher saw {numbers}: {[event.type for _, event in story.seen]}, told was {told}"
        yield from self._of_steering(story, turn_id)
        yield from self._once(story)

    def _once(self, story: Any) -> Iterator[str]:
        """What was asked for stands in one transcript, once."""
        said = sum(
            message.text == story.message
            for transcript in self.invariants.transcripts.values()
            for message in transcript
        )
        if said > 1:
            yield f"its message stands {said} times in the transcripts"

    def _of_steering(self, story: Any, turn_id: str) -> Iterator[str]:
        events = [EVENT_CODEC.decode(kind, body) for _, kind, body in self.invariants.channels.get(turn_id, ())]
        said = Counter(message.text for transcript in self.invariants.transcripts.values() for message in transcript)
        never_started = not any(event.type == "turn.started" for event in events)
        for steering_id, text in story.steered.items():
            fates = [event.type for event in events if getattr(event, "steering_id", None) == steering_id]
            applied, dropped = fates.count("steering.applied"), fates.count("steering.dropped")
            # A turn that waits has no channel yet: what is taken back from it is told nowhere but in the answer.
            is_quiet = not fates and (never_started or story.cancelled.get(steering_id) is not None)
            if said[text] != applied or not (is_quiet or applied + dropped == 1):
                yield f"steering {steering_id} was told as {fates} and stands {said[text]} times in the transcript"
            if story.cancelled.get(steering_id) and applied:
                yield f"steering {steering_id} was taken back, and applied"
