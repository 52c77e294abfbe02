"""`turnmill show TURN`: a turn's summary, its events, its messages, or its timeline."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .exits import CommandError, Exit

if TYPE_CHECKING:
    from turnmill.protocol.content import Message, Termination, ToolCall
    from turnmill.protocol.events import Event, TurnSummary
    from turnmill.protocol.settings import Settings
    from turnmill.protocol.streams import ChannelEvent

    from ..client import Client
    from ..inspection import TurnRecord

TurnId = Annotated[str, typer.Argument(metavar="TURN", help="A turn's id.", show_default=False)]
Events = Annotated[bool, typer.Option("--events", envvar="TURNMILL_EVENTS", help="All events so far.")]
Messages = Annotated[bool, typer.Option("--messages", envvar="TURNMILL_MESSAGES", help="Its part of the transcript.")]
Timeline = Annotated[bool, typer.Option("--timeline", envvar="TURNMILL_TIMELINE", help="Where the time went.")]


def show(
    turn: TurnId,
    events: Events = False,
    messages: Messages = False,
    timeline: Timeline = False,
    as_json: options.Json = False,
    redis_url: options.RedisUrl = None,
    namespace: options.Namespace = None,
) -> int:
    from .attachment import command_settings, run_command

    if [events, messages, timeline].count(True) > 1:
        raise CommandError("show takes one of --events, --messages and --timeline")
    part = "events" if events else "messages" if messages else "timeline" if timeline else "summary"
    return run_command(_show(command_settings(redis_url, namespace), turn, part, as_json))


async def _show(settings: Settings, turn_id: str, part: str, as_json: bool) -> int:
    from .attachment import attached_client
    from .lookup import known_record

    async with attached_client(settings) as client:
        record = await known_record(client.engine, client.keys, turn_id)
        lines: Iterable[str]
        match part:
            case "events":
                lines = _event_lines(await _kept_events(client, record), as_json)
            case "messages":
                lines = message_lines(await _messages_of(client, record), as_json)
            case "timeline":
                lines = await _timeline(client, record, as_json)
            case _:
                messages = await _messages_of(client, record)
                more = "" if as_json else await _runtime_of_the_next_command(client)
                lines = _json_summary(record, messages) if as_json else _summary(record, messages, more)
        for line in lines:
            sys.stdout.write(line + "\n")
    return Exit.OK


async def _runtime_of_the_next_command(client: Client) -> str:
    """In a data directory where no runtime is alive, the command that goes on must bring it along."""
    from ..fleet import read_fleet

    if client.settings.redis_url is not None:
        return ""
    fleet = await read_fleet(client.engine, client.keys, client.settings)
    return "" if fleet.coordinators else " --app APP"


async def _kept_events(client: Client, record: TurnRecord) -> list[ChannelEvent]:
    from ..inspection import read_events

    kept = await read_events(client.engine, client.keys, record.turn_id)
    if not kept and record.state != "queued":
        raise CommandError(f"the events of turn {record.turn_id} have expired (TURNMILL_EVENT_TTL)", Exit.FAILED)
    return kept


async def _messages_of(client: Client, record: TurnRecord) -> list[Message]:
    if record.summary is not None:
        summary = record.summary
        return await client.transcript(record.session_id, summary.first_message, summary.end_message)
    return [m for m in await client.transcript(record.session_id) if m.turn_id == record.turn_id]


# ---- lines


def _json_summary(record: TurnRecord, messages: list[Message]) -> Iterator[str]:
    import msgspec

    summary, calls = record.summary, _calls_by_id(messages)
    more: dict[str, Any] = {}
    if summary is not None:
        more = {
            "cost": msgspec.to_builtins(summary.cost) if summary.cost else None,
            "attempts": msgspec.to_builtins(summary.attempts),
            "pending": [_call_fields(calls, call_id) for call_id in summary.pending],
            "approvals": [_call_fields(calls, call_id) for call_id in summary.approvals],
            "parent_turn_id": summary.parent_turn_id,
        }
    yield msgspec.json.encode({**record.to_dict(), **more}).decode()


def _call_fields(calls: dict[str, ToolCall], call_id: str) -> dict[str, Any]:
    import msgspec

    known = calls.get(call_id)
    return msgspec.to_builtins(known) if known is not None else {"id": call_id}


def _calls_by_id(messages: list[Message]) -> dict[str, ToolCall]:
    """A provider may give the same id again in a later step: the newest call counts."""
    return {call.id: call for message in messages for call in message.tool_calls}


def _summary(record: TurnRecord, messages: list[Message], more: str) -> Iterator[str]:
    from .wording import clean

    for name, value in _facts(record, messages).items():
        yield clean(f"{name:9} {value}")
    if record.summary is not None:
        yield from _attempt_lines(record.summary)
    answers = [message.text for message in messages if message.role == "assistant" and message.text]
    if answers:
        yield ""
        yield clean(answers[-1])
    if record.state == "suspended" and record.summary is not None:
        yield ""
        yield from _waiting_lines(record.summary, _calls_by_id(messages), more)


def _facts(record: TurnRecord, messages: list[Message]) -> dict[str, str]:
    from .lookup import date_text
    from .wording import cost_text, summary_facts

    facts = {
        "turn": record.turn_id,
        "session": record.session_id,
        "agent": record.agent_id,
        "state": record.state,
        "created": date_text(record.created_at),
    }
    models = {message.model for message in messages if message.model}
    if models:
        facts["model"] = ", ".join(sorted(models))
    summary = record.summary
    if summary is not None:
        if summary.parent_turn_id is not None:
            facts["parent"] = summary.parent_turn_id
        facts["work"] = summary_facts(summary)
        facts["cost"] = cost_text(summary.cost) if summary.cost is not None else "unknown"
        if record.state != "suspended":
            facts["ended by"] = _termination_text(summary.termination)
    if record.error is not None:
        facts["error"] = f"{record.error.message} ({record.error.kind})"
    return facts


def _termination_text(termination: Termination) -> str:
    why = [termination.stop_condition, termination.tool_name, termination.reason]
    told = ", ".join(part for part in why if part)
    return f"{termination.kind} ({told})" if told else termination.kind


def _attempt_lines(summary: TurnSummary) -> Iterator[str]:
    """Provider calls that were paid for and gave no answer."""
    from .wording import attempt_text

    for attempt in summary.attempts:
        yield f"{'lost':9} {attempt_text(attempt)}"


def _waiting_lines(summary: TurnSummary, calls: dict[str, ToolCall], more: str) -> Iterator[str]:
    """What a suspended turn waits for, and the commands that go on."""
    from .next_commands import after_suspension
    from .wording import call_text, clean

    # With an error it waits for nothing: these are the results that the failed provider call was given.
    pending = summary.pending if summary.error is None else []
    for word, ids in (("result", pending), ("approval", summary.approvals)):
        for call_id in ids:
            text = f": {call_text(calls[call_id])}" if call_id in calls else ""
            yield clean(f"waits for the {word} of {call_id}{text}")
    yield from after_suspension(summary.turn_id, pending, summary.approvals, summary.error, more)


def _event_lines(kept: list[ChannelEvent], as_json: bool) -> Iterator[str]:
    import msgspec

    from turnmill.protocol.codec import event_to_dict

    begin = kept[0].at_ms if kept else 0
    for raw, event in _decoded(kept):
        if as_json:
            yield msgspec.json.encode({"seq": raw.number, "at": raw.at_ms / 1000, **event_to_dict(event)}).decode()
        else:
            fields = event_to_dict(event)
            del fields["type"]
            yield f"{raw.number:5} {(raw.at_ms - begin) / 1000:9.3f} s  {event.type:24} {_brief(fields)}"


def _decoded(kept: list[ChannelEvent]) -> Iterator[tuple[ChannelEvent, Event]]:
    from turnmill.protocol.codec import Unreadable, event_from_wire

    for raw in kept:
        event = event_from_wire(raw.kind, raw.body)
        if not isinstance(event, Unreadable):
            yield raw, event


def _brief(fields: dict[str, object]) -> str:
    from .wording import arguments_text, clean, shortened

    return shortened(clean(arguments_text(fields)), 160)


def message_lines(messages: list[Message], as_json: bool) -> Iterator[str]:
    import msgspec

    from .wording import call_text, clean, result_text, shortened

    for message in messages:
        if as_json:
            yield msgspec.json.encode(message, enc_hook=repr).decode()
            continue
        if message.text:
            yield clean(f"{message.role}: {message.text}")
        for call in message.tool_calls:
            yield clean(f"{message.role}: → {call_text(call)}")
        for result in message.tool_results:
            mark = "✗" if result.is_error else "←"
            yield clean(f"{message.role}: {mark} {result.tool_name}: {shortened(result_text(result), 400)}")


async def _timeline(client: Client, record: TurnRecord, as_json: bool) -> list[str]:
    import msgspec
    from rich.console import Console

    from .timeline import draw, spans_of

    events = list(_decoded(await _kept_events(client, record)))
    spans = spans_of(events, await _events_of_sub_turns(client, events))
    if as_json:
        return [msgspec.json.encode(span).decode() for span in spans]
    head = f"turn {record.turn_id}  {record.agent_id}  {record.state}"
    return [head, *draw(spans, Console().width)]


async def _events_of_sub_turns(
    client: Client, events: list[tuple[ChannelEvent, Event]]
) -> dict[str, list[tuple[ChannelEvent, Event]]]:
    """The events of all turns below, by turn id; nothing for those that have expired."""
    from turnmill.protocol.events import SubTurnStarted

    from ..inspection import read_events

    found: dict[str, list[tuple[ChannelEvent, Event]]] = {}
    open_ids = [event.turn_id for _, event in events if isinstance(event, SubTurnStarted)]
    while open_ids:
        turn_id = open_ids.pop()
        below = list(_decoded(await read_events(client.engine, client.keys, turn_id)))
        found[turn_id] = below
        open_ids += [event.turn_id for _, event in below if isinstance(event, SubTurnStarted)]
    return found
