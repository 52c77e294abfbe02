"""Messages to bytes and back: what was sent is what arrives, and what cannot be read is a value."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.strategies import FREE_VALUES, structs
from turnmill.protocol import codec
from turnmill.protocol.codec import (
    EVENT_CODEC,
    MESSAGE_CODEC,
    TASK_CODEC,
    Unreadable,
    WireFormat,
    decode_message,
    encode_body,
    event_from_dict,
    event_from_wire,
    event_to_dict,
    event_to_wire,
    message_from_dict,
    message_to_dict,
)
from turnmill.protocol.content import (
    FilePart,
    ImagePart,
    Message,
    ReasoningPart,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)
from turnmill.protocol.errors import MessageTooLarge
from turnmill.protocol.events import (
    EVENTS,
    LIVE_EVENT_TYPES,
    TERMINAL_EVENT_TYPES,
    StepStarted,
    ToolResultReady,
    TurnStarted,
)
from turnmill.protocol.messages import COMMANDS, FINDINGS, RESULTS, TASKS, StartTurn, TimerFired

MESSAGES = (*COMMANDS, *TASKS, *RESULTS, *FINDINGS)
WIRES: list[WireFormat] = ["json", "msgpack"]
PNG = b"\x89PNG\r\n\x1a\n\x00\xff"

by_type = pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.type)
by_message_type = pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.type)
few = settings(max_examples=25)  # for each of all types; more are drawn by every run anyway
on_both_wires = pytest.mark.parametrize("wire", WIRES)


# --- events


@by_type
@on_both_wires
@few
@given(data=st.data())
def test_every_event_comes_back_from_the_wire_as_it_was(
    kind: Any, wire: WireFormat, data: st.DataObject
) -> None:  # TH-06
    event = data.draw(structs(kind))
    assert event_from_wire(*event_to_wire(event, wire)) == event


@by_type
@few
@given(data=st.data())
def test_every_event_comes_back_from_its_dict_as_it_was(kind: Any, data: st.DataObject) -> None:  # TH-06
    event = data.draw(structs(kind))
    as_dict = event_to_dict(event)
    assert as_dict["type"] == kind.type
    # JSON-compatible in earnest: through JSON's text, not only by the looks of its types.
    assert event_from_dict(msgspec.json.decode(msgspec.json.encode(as_dict))) == event


@on_both_wires
def test_images_and_files_in_messages_and_results_are_bytes_again(wire: WireFormat) -> None:  # TH-06
    message = Message(
        role="user",
        content=[TextPart("look"), ImagePart(data=PNG, media_type="image/png"), FilePart(data=PNG, filename="a.bin")],
    )
    started = TurnStarted(turn_id="t", agent_id="a", session_id="s", messages=[message], created_at=1.5)
    result = ToolResult(tool_call_id="c", tool_name="camera", content=[ImagePart(data=PNG)])
    ready = ToolResultReady(step_number=1, index=0, tool_call_id="c", tool_result=result)
    for event in (started, ready):
        assert event_from_wire(*event_to_wire(event, wire)) == event
        assert event_from_dict(event_to_dict(event)) == event


@pytest.mark.parametrize(
    "value",
    [PNG, b"", [PNG, {"inner": PNG}], {"$bytes": "AAAA"}, {"$bytes": PNG}, {"$escaped": {"$bytes": "AA=="}}],
    ids=repr,
)
@on_both_wires
def test_bytes_in_a_tools_result_are_bytes_again(value: Any, wire: WireFormat) -> None:  # TH-06
    result = ToolResult(tool_call_id="c", tool_name="read", result=value)
    event = ToolResultReady(step_number=1, index=0, tool_call_id="c", tool_result=result)
    assert event_from_wire(*event_to_wire(event, wire)) == event
    assert event_from_dict(event_to_dict(event)) == event


@on_both_wires
def test_an_object_that_only_looks_like_bytes_does_not_stop_a_reader(wire: WireFormat) -> None:
    """A model may write anything into its arguments; the reader of its event must not break on it."""
    body = encode_body(
        ToolCallReadyLike(tool_call={"id": "c", "name": "n", "arguments": {"x": {"$bytes": "abc"}}}), wire
    )
    event: Any = event_from_wire(b"tool_call.ready", body)
    assert event.tool_call.arguments == {"x": {"$bytes": "abc"}}


class ToolCallReadyLike(msgspec.Struct):
    tool_call: dict[str, Any]
    step_number: int = 1
    index: int = 0


def test_an_unknown_event_is_a_value_on_the_wire_and_an_error_as_a_dict() -> None:
    event = event_from_wire(b"turn.evaporated", b"{}")
    assert isinstance(event, Unreadable)
    assert event.entry_type == "turn.evaporated"
    with pytest.raises(ValueError, match=r"unknown event type 'turn.evaporated'"):
        event_from_dict({"type": "turn.evaporated"})
    with pytest.raises(ValueError, match="step_number"):
        event_from_dict({"type": "step.started", "step_number": "one"})


def test_the_sets_of_event_types_name_events() -> None:
    known = {kind.type for kind in EVENTS}
    assert known >= LIVE_EVENT_TYPES
    assert known >= TERMINAL_EVENT_TYPES
    assert len(known) == len(EVENTS)


# --- commands, tasks, results, findings


@by_message_type
@few
@given(data=st.data())
def test_every_message_comes_back_from_its_dict_as_it_was(kind: Any, data: st.DataObject) -> None:
    message = data.draw(structs(kind))
    assert message_from_dict(msgspec.json.decode(msgspec.json.encode(message_to_dict(message)))) == message


@by_message_type
@on_both_wires
@few
@given(data=st.data())
def test_every_message_is_read_from_either_wire_by_the_codec_of_its_readers(
    kind: Any, wire: WireFormat, data: st.DataObject
) -> None:
    message = plain(data.draw(structs(kind)))
    reader = TASK_CODEC if kind in TASKS else MESSAGE_CODEC
    assert reader.decode_fields({b"t": kind.type.encode(), b"d": encode_body(message, wire)}) == message


def plain(message: Any) -> Any:
    """The message as senders write it: bytes in free values packed already."""
    return msgspec.convert({k: v for k, v in message_to_dict(message).items() if k != "type"}, type(message))


def test_an_unknown_message_is_an_error_as_a_dict() -> None:
    with pytest.raises(ValueError, match="unknown message type 'stop_turn'"):
        message_from_dict({"type": "stop_turn"})
    with pytest.raises(ValueError, match="unknown message type None"):
        message_from_dict({})


# --- transcript entries

PARTS = [
    TextPart("é 漢字 👩‍🚀"),
    ImagePart(data=PNG),
    ReasoningPart(text="hm", provider="p", data={"signature": "xx=="}),
    ToolCallPart(ToolCall(id="c", name="n", arguments={"a": [1, None, 2.5]}, metadata={"thought": "s"})),
    ToolResultPart(ToolResult(tool_call_id="c", tool_name="n", result={"b": 1})),
]


@on_both_wires
@pytest.mark.parametrize("content", ["plain", PARTS], ids=["text", "parts"])
def test_a_transcript_entry_is_read_whatever_wire_wrote_it(wire: WireFormat, content: Any) -> None:
    message = Message(role="assistant", content=content, step=3, metadata={"k": 1})
    assert decode_message(encode_body(message, wire)) == message


def test_a_transcript_entry_that_is_none_raises() -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_message(b'{"role": "nobody"}')


# --- the first byte


@given(FREE_VALUES.filter(lambda value: isinstance(value, dict)))
def test_the_first_byte_tells_the_wire_format(value: dict[str, Any]) -> None:
    body = StartTurn(turn_id="t", session_id="s", agent="a", messages=[], metadata=value)
    assert encode_body(body, "json")[:1] == b"{"
    first = encode_body(body, "msgpack")[0]
    assert 0x80 <= first <= 0x8F or first in (0xDE, 0xDF)


def test_white_space_before_a_json_body_is_read() -> None:
    body = b' \r\n{"session_id": "s"}'
    assert MESSAGE_CODEC.decode(b"timer_fired", body) == TimerFired(session_id="s")


# --- what cannot be read is a value


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({}, "lacks the field t"),
        ({b"t": b"", b"d": b"{}"}, "lacks the field t"),
        ({b"t": b"timer_fired"}, "lacks the field d"),
        ({b"t": b"timer_fired", b"d": b""}, "lacks the field d"),
        ({b"t": b"pause_turn", b"d": b"{}"}, "unknown type 'pause_turn'"),
        ({b"t": b"model_task", b"d": b"{}"}, "unknown type 'model_task'"),  # a task is no message to the coordinator
        ({b"t": b"\xff\xfe", b"d": b"{}"}, r"unknown type '\\xff\\xfe'"),
        ({b"t": b"timer_fired", b"d": b"{}", b"v": b"2"}, "protocol version 2, this process speaks 1"),
        ({b"t": b"abort_turn", b"d": b"?", b"v": b"9"}, "protocol version 9"),  # the envelope is read first
        ({b"t": b"timer_fired", b"d": b"{"}, "not a timer_fired"),
        ({b"t": b"timer_fired", b"d": b"[1]"}, "not a timer_fired"),
        ({b"t": b"timer_fired", b"d": b"\x00"}, "not a timer_fired"),
        ({b"t": b"timer_fired", b"d": b"\x81\xa1"}, "not a timer_fired"),
        ({b"t": b"timer_fired", b"d": b"\xc1"}, "not a timer_fired"),
        ({b"t": b"timer_fired", b"d": b'{"session_id": 7}'}, "not a timer_fired"),
        ({b"t": b"timer_fired", b"d": b'{"session_id": "\xff"}'}, "not a timer_fired"),
        ({b"t": b"timer_fired", b"d": b'{"session_id": "\\ud800"}'}, "not a timer_fired"),
    ],
)
def test_what_cannot_be_read_is_a_value_with_its_reason(fields: dict[bytes, bytes], reason: str) -> None:  # AC-26
    message = MESSAGE_CODEC.decode_fields(fields)
    assert isinstance(message, Unreadable)
    assert reason in message.reason
    assert message.body == fields.get(b"d", b"")


@on_both_wires
def test_nesting_beyond_all_measure_is_a_value(wire: WireFormat) -> None:  # AC-56
    depth = 100_000
    inside = b"[" * depth if wire == "json" else b"\x91" * depth
    head = b'{"x":' if wire == "json" else b"\x81\xa1x"
    assert isinstance(MESSAGE_CODEC.decode(b"timer_fired", head + inside), Unreadable)


def test_version_1_may_be_written_out() -> None:
    fields = {b"t": b"timer_fired", b"d": b'{"session_id": "s"}', b"v": b"1"}
    assert MESSAGE_CODEC.decode_fields(fields) == TimerFired(session_id="s")


def test_a_field_of_tomorrow_is_ignored() -> None:  # AC-57
    body = b'{"step_number": 4, "mood": {"deep": [1]}}'
    assert event_from_wire(b"step.started", body) == StepStarted(step_number=4)


def test_a_body_above_the_limit_is_refused_by_the_sender_and_a_value_to_the_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = TimerFired(session_id="s" * 100)
    with pytest.raises(MessageTooLarge, match="a timer_fired of 117 bytes is above the limit of 100"):
        encode_body(large, bytes_max=100)
    assert len(encode_body(large, bytes_max=117)) == 117
    monkeypatch.setattr(codec, "BODY_BYTES_MAX", 100)
    message = MESSAGE_CODEC.decode_fields({b"t": b"timer_fired", b"d": encode_body(large)})
    assert isinstance(message, Unreadable)
    assert "above the limit of 100" in message.reason


@given(st.binary(max_size=60), st.sampled_from([kind.type.encode() for kind in (*MESSAGES, *EVENTS)]))
def test_no_bytes_make_a_reader_raise(body: bytes, kind: bytes) -> None:
    for reader in (MESSAGE_CODEC, TASK_CODEC, EVENT_CODEC):
        reader.decode_fields({b"t": kind, b"d": body})
