"""A conversation that was shortened, and then goes back: nothing of what came later may be left, summed up or not."""

from __future__ import annotations

import pytest

from turnmill.protocol.content import Message, ToolCall, ToolCallPart, ToolResult, ToolResultPart
from turnmill.protocol.messages import Segment
from turnmill.runtime.transcripts import rewound_view
from turnmill.workers.compaction import NEW, choose_cut, entries_of, replaced_by_cut, trim, view_of, with_summary
from turnmill.workers.providers.scripted import history_fault


def turn(name: str, steps: int) -> list[Message]:
    """A question, steps of two calls with long results, one message of steering, and the answer."""
    messages = [Message(role="user", content=f"{name}?", turn_id=name)]
    for step in range(1, steps + 1):
        ids = [f"{name}{step}a", f"{name}{step}b"]
        calls = [ToolCallPart(ToolCall(id=each, name="tool")) for each in ids]
        messages.append(Message(role="assistant", content=[*calls], turn_id=name, step=step))
        for each in ids:
            result = ToolResult(tool_call_id=each, tool_name="tool", result=each + "." * 9000)
            messages.append(Message(role="tool", content=[ToolResultPart(result)], turn_id=name, step=step))
        if step == 2:
            messages.append(Message(role="user", content=f"{name} steered", turn_id=name))
    return [*messages, Message(role="assistant", content=f"{name}!", turn_id=name, step=steps + 1)]


TRANSCRIPT = [*turn("p", 2), *turn("q", 3), *turn("r", 1)]
STARTS = [index for index, each in enumerate(TRANSCRIPT) if each.role == "user" and each.text.endswith("?")]


def shown(view: list[Segment], replacements: list[Message]) -> list[Message]:
    lists = (TRANSCRIPT, replacements)
    return [message for kind, first, end in view for message in lists[kind][first:end]]


def shortened(end: int, turn_id: str, keep: int) -> tuple[list[Segment], list[Message]]:
    """The view of the first `end` entries, trimmed and summed up while a turn runs; its summary names what it stands for."""
    entries = trim(entries_of(TRANSCRIPT[:end], [], 0), 100, keep)
    cut = choose_cut(entries, turn_id, (keep,), 1.0, 0.0)
    if cut is not None:
        covered = replaced_by_cut(entries, cut, turn_id)
        indices = [index for index, each in enumerate(TRANSCRIPT[:cut]) if any(_same(each, c.message) for c in covered)]
        entries = with_summary(entries, cut, turn_id, ",".join(map(str, indices)))
    view = view_of(entries)
    return [(1, first, last) if kind == NEW else (kind, first, last) for kind, first, last in view.segments], list(
        view.replacements
    )


def _same(one: Message, other: Message) -> bool:
    """Whether they are the same entry, trimmed or not."""
    ids = [result.tool_call_id for result in one.tool_results]
    return (one.role, one.turn_id, one.text, one.tool_calls, ids) == (
        other.role,
        other.turn_id,
        other.text,
        other.tool_calls,
        [result.tool_call_id for result in other.tool_results],
    )


@pytest.mark.parametrize("keep", [0, 1, 2])
@pytest.mark.parametrize("end", range(2, len(TRANSCRIPT) + 1))
@pytest.mark.parametrize("start", STARTS)
def test_going_back_to_a_turns_start_leaves_all_before_it_and_nothing_else(
    end: int, keep: int, start: int
) -> None:  # AC-07
    running = TRANSCRIPT[end - 1].turn_id or ""
    if history_fault(TRANSCRIPT[:end]) is not None or start >= end:
        return
    view, replacements = shortened(end, running, keep)
    told: list[int] = []
    left = shown(rewound_view(view, end, start), replacements)
    assert history_fault(left) is None
    for message in left:
        if message.metadata.get("turnmill") == "summary":
            told += [int(index) for index in message.text.rpartition("\n")[2].split(",")]
        else:
            told += [index for index, each in enumerate(TRANSCRIPT) if _same(message, each)]
    assert sorted(told) == list(range(start))
