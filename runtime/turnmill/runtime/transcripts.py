"""Where a transcript may be cut, and which of its entries still count: pure functions over a session's messages.

A *group* is an assistant message with the results of its calls; a cut never splits one, or a provider would refuse what
is left. An entry counts until a later turn goes back to before it: the first message of such a turn says from which
entry on it replaces the conversation (`REWIND`), and the replaced entries stay where they are, for whoever reads them.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from turnmill.protocol.content import Message
from turnmill.protocol.errors import NotInConversationError
from turnmill.protocol.messages import Segment

REWIND = "turnmill.rewind_to"
"""In a message's metadata: the entry from which on the transcript was replaced by it and what follows."""


def closed_length(messages: Sequence[Message]) -> int:
    """How many messages there are up to the last place between two groups."""
    open_calls: list[str] = []
    closed = 0
    for index, message in enumerate(messages):
        if message.role == "assistant":
            open_calls = [call.id for call in message.tool_calls]
        elif open_calls:
            answered = {result.tool_call_id for result in message.tool_results}
            open_calls = [call_id for call_id in open_calls if call_id not in answered]
        if not open_calls:
            closed = index + 1
    return closed


def cut_length(messages: Sequence[Message], turn_id: str | None = None, step: int | None = None) -> int:
    """How many messages there are up to the end of a turn, or of one of its steps; without a turn, of all of them.

    A group that is still open is left out. Raises `NotInConversationError` for a turn or step that is not there, or a step that is
    still open.
    """
    if turn_id is None:
        if step is not None:
            raise NotInConversationError(f"step {step} of which turn?")
        return closed_length(messages)
    mine = [index for index, message in enumerate(messages) if message.turn_id == turn_id]
    if not mine:
        raise NotInConversationError(f"turn {turn_id} has no messages in the session's conversation")
    if step is None:
        return closed_length(messages[: mine[-1] + 1])
    steps = {index: number for index in mine if (number := messages[index].step) is not None}
    if step not in steps.values():
        raise NotInConversationError(f"turn {turn_id} has no step {step}; its steps: {sorted(set(steps.values()))}")
    end = 1 + max(index for index, number in steps.items() if number <= step)
    if closed_length(messages[:end]) < end:
        raise NotInConversationError(f"step {step} of turn {turn_id} still has calls without results")
    return end


def rewinding(message: Message, index: int) -> Message:
    """The message as the first of a turn that replaces the transcript from entry `index` on."""
    return msgspec.structs.replace(message, metadata={**message.metadata, REWIND: index})


def without_rewind(message: Message) -> Message:
    """The message without its mark, for another transcript."""
    if REWIND not in message.metadata:
        return message
    metadata = {key: value for key, value in message.metadata.items() if key != REWIND}
    return msgspec.structs.replace(message, metadata=metadata)


def current_entries(messages: Sequence[Message]) -> list[int]:
    """The indices of the entries that no later turn has replaced."""
    kept: list[int] = []
    for index, message in enumerate(messages):
        target = message.metadata.get(REWIND)
        if isinstance(target, int):
            while kept and kept[-1] >= target:
                kept.pop()
        kept.append(index)
    return kept


def rewound_view(view: Sequence[Segment], view_end: int, index: int) -> list[Segment]:
    """What is left of a view when the conversation goes back to before entry `index`.

    Replacements stand for what lies up to the next segment of the transcript. Where the cut falls into that, the
    transcript's own entries come back in their place.
    """
    if index > view_end:
        return [*view, (0, view_end, index)]
    kept: list[Segment] = []
    told = 0
    for position, (number, first, end) in enumerate(view):
        if number == 0:
            if first >= index:
                break
            kept.append((0, first, min(end, index)))
            told = end
            continue
        following = next((start for other, start, _ in view[position + 1 :] if other == 0), view_end)
        if following > index:
            return [*kept, (0, told, index)] if told < index else kept
        kept.append((number, first, end))
    return kept


def ranges_of(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending indices as ranges `[first, end)`."""
    ranges: list[tuple[int, int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index:
            ranges[-1] = (ranges[-1][0], index + 1)
        else:
            ranges.append((index, index + 1))
    return ranges
