"""Shorter conversations: what is trimmed, where a cut may be, and that a strict provider takes whatever comes of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from turnmill.protocol.codec import decode_message, encode_body
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
from turnmill.protocol.messages import Segment
from turnmill.protocol.specs import Compaction
from turnmill.workers.compaction import (
    NEW,
    Entry,
    Urgency,
    cut_points,
    entries_of,
    newest_steps,
    plan_shortening,
    replaced_by_cut,
    size_of,
    trim,
    trim_text,
    view_of,
    with_summary,
)
from turnmill.workers.providers.scripted import history_fault

TURN = "turn"


def user(text: str = "question", turn_id: str = "", **fields: Any) -> Message:
    return Message(role="user", content=text, turn_id=turn_id or None, **fields)


def answer(text: str = "answer", turn_id: str = "", step: int | None = None) -> Message:
    return Message(role="assistant", content=text, turn_id=turn_id or None, step=step)


def step(*ids: str, turn_id: str = "", number: int = 1, size: int = 10) -> list[Message]:
    """A step with calls and their results, one entry for each result."""
    calls = [ToolCallPart(ToolCall(id=name, name="tool")) for name in ids]
    asked = Message(role="assistant", content=[*calls], turn_id=turn_id or None, step=number)
    return [asked, *(result(name, "x" * size, turn_id=turn_id, number=number) for name in ids)]


def result(call_id: str, value: Any, *, turn_id: str = "", number: int = 1, **fields: Any) -> Message:
    told = ToolResult(tool_call_id=call_id, tool_name="tool", result=value, **fields)
    return Message(role="tool", content=[ToolResultPart(told)], turn_id=turn_id or None, step=number)


def long_session() -> list[Message]:
    """30 messages: three turns with parallel calls, steering in mid-turn, an interrupted answer."""
    first = [user("one"), *step("a", "b", "c"), *step("d"), answer()]
    second = [user("two"), *step("e", "f"), user("steered"), *step("g", "h"), answer("interrupt"), user("two again")]
    third = [*step("i"), answer(), user("three"), *step("j", "k", "l"), *step("m", "n"), user("more")]
    return [*first, *second, *third]


def entries(messages: list[Message]) -> list[Entry]:
    return entries_of(messages, [], 0)


def seen(view: list[Segment], transcript: list[Message], old: list[Message], new: list[Message]) -> list[Message]:
    """The messages that a view shows."""
    lists = (transcript, old, new)
    return [message for kind, first, end in view for message in lists[kind][first:end]]


# --- views


def test_a_view_names_the_entries_it_is_made_of() -> None:
    transcript, old = long_session(), [user("old summary"), result("x", "short")]
    view: list[Segment] = [(1, 0, 2), (0, 6, 9)]
    messages = [*old, *transcript[6:9], *transcript[12:]]
    made = entries_of(messages, view, 12)
    assert [(entry.list, entry.index) for entry in made[:6]] == [(1, 0), (1, 1), (0, 6), (0, 7), (0, 8), (0, 12)]
    assert view_of(made).segments == [(1, 0, 2), (0, 6, 9), (0, 12, len(transcript))]
    assert seen(view_of(made).segments, transcript, old, []) == messages


def test_small_entries_between_new_ones_are_copied_so_that_views_stay_short() -> None:
    small, large = user("small"), user("x" * 20_000)
    made = [Entry(user()), Entry(small, 0, 1), Entry(user()), Entry(large, 0, 3), Entry(user()), Entry(small, 0, 5)]
    view = view_of(made)
    assert view.segments == [(NEW, 0, 3), (0, 3, 4), (NEW, 3, 4), (0, 5, 6)]
    assert view.replacements == [user(), small, user(), user()]


# --- trimming


@pytest.mark.parametrize("bytes_max", [1, 40, 100, 1000])
@pytest.mark.parametrize("letter", ["a", "ä", "€", "😀"])
def test_a_trimmed_text_keeps_head_and_tail_and_says_what_is_missing(letter: str, bytes_max: int) -> None:
    text = "HEAD" + letter * 1000 + "TAIL"
    trimmed = trim_text(text, bytes_max)
    size, left_out = len(trimmed.encode()), int(trimmed.partition("[... ")[2].split()[0])
    assert size <= max(bytes_max, 64)
    head, tail = trimmed.split(f"\n[... {left_out} bytes left out ...]\n")
    assert left_out == len(text.encode()) - len(head.encode()) - len(tail.encode())
    if bytes_max >= 100:
        assert (head[:4], tail[-4:]) == ("HEAD", "TAIL")
    assert trim_text(trimmed, bytes_max) == trimmed


def test_a_short_text_is_left_as_it_is() -> None:
    assert trim_text("äää", 6) == "äää"


def test_only_long_results_of_older_steps_are_trimmed() -> None:
    messages = [user("x" * 5000), *step("a", size=5000), *step("b"), *step("c", "d", size=5000)]
    made = trim(entries(messages), 100, 1)
    assert [entry.is_new for entry in made] == [False, False, True, False, False, False, False, False]
    (trimmed,) = made[2].message.tool_results
    assert (trimmed.tool_call_id, trimmed.tool_name) == ("a", "tool")
    assert len(trimmed.result) <= 100
    assert [entry.is_new for entry in trim(entries(messages), 100, 0)][5:] == [False, True, True]
    assert newest_steps(entries(messages), 1) == 5


def test_a_trimmed_result_keeps_what_it_is() -> None:
    message = result("a", {"rows": ["x" * 100] * 10}, is_error=True)
    trimmed = trim([*entries([message])], 100, 0)[0].message.tool_results[0]
    assert (trimmed.is_error, trimmed.result[:9]) == (True, '{"rows":[')


def test_images_and_files_with_their_data_give_way_to_a_word() -> None:
    content: list[Any] = [
        TextPart("t" * 1000),
        ImagePart(data=b"i" * 1000, media_type="image/png"),
        ImagePart(url="https://example.com/a.png"),
        FilePart(data=b"small", media_type="text/plain"),
    ]
    (trimmed,) = trim(entries([result("a", None, content=content)]), 100, 0)[0].message.tool_results
    assert trimmed.content is not None
    assert len(trimmed.content[0].text) <= 100  # type: ignore[union-attr]
    assert trimmed.content[1:] == [TextPart("[image/png of 1000 bytes, left out]"), *content[2:]]


# --- cutting


def test_every_cut_leaves_a_history_that_a_strict_provider_takes() -> None:  # AC-07
    messages = long_session()
    assert (len(messages), history_fault(messages)) == (30, None)
    points = cut_points(entries(messages))
    for cut in range(1, len(messages) + 1):
        made = with_summary(entries(messages), cut, TURN, "all that was")
        fault = history_fault([entry.message for entry in made])
        behind_question = messages[cut - 1].role == "user"
        assert (cut in points) == (fault is None and not behind_question), (cut, fault)


@pytest.mark.parametrize("cut", cut_points(entries(long_session())))
def test_the_view_after_each_cut_shows_a_summary_and_the_rest(cut: int) -> None:  # AC-07
    messages = long_session()
    view = view_of(with_summary(entries(messages), cut, TURN, "all that was"))
    shown = seen(view.segments, messages, [], view.replacements)
    assert history_fault(shown) is None
    assert shown[0].text.endswith("all that was")
    assert (shown[0].role, shown[0].metadata) == ("user", {"turnmill": "summary"})
    assert shown[1:] == messages[cut:]
    assert len(view.replacements) == 1


def test_a_turn_that_ended_without_an_answer_can_be_cut_off() -> None:  # AC-07, AC-08
    """It failed because its question was too long: without a cut there, every later turn would fail as well."""
    messages = [user("x" * 50_000, "failed"), user("and this", "failed"), user("short", TURN)]
    assert cut_points(entries(messages)) == [2]
    plan = plan_shortening(entries(messages), SUMMARIZED, TURN, Urgency.REFUSED)
    assert plan is not None
    assert plan.cut == 2
    assert plan_shortening(entries(messages[:2]), SUMMARIZED, "failed", Urgency.REFUSED) is None


@pytest.mark.parametrize("size", [10, 5000])
@pytest.mark.parametrize("urgency", Urgency)
@pytest.mark.parametrize("keep_steps", range(6))
def test_whatever_is_planned_fits_a_strict_provider(size: int, urgency: Urgency, keep_steps: int) -> None:  # AC-07
    transcript = [*long_session(), *step("o", "p", size=size), *step("q", size=size)]
    policy = Compaction(tool_output_bytes=200, keep_steps=keep_steps, summarizer="scripted:short")
    view: list[Segment] = []
    old: list[Message] = []
    messages, end = transcript, len(transcript)
    for _ in range(3):  # again and again, each time on what the last one left
        made = entries_of(messages, view, 0 if not view else end)
        plan = plan_shortening(made, policy, TURN, urgency)
        if plan is None:
            break
        shortened = plan.entries if plan.cut is None else with_summary(plan.entries, plan.cut, TURN, "sum")
        if size_of(shortened) >= size_of(made):
            break
        new = view_of(shortened)
        view = [
            (1, first + len(old), last + len(old)) if kind == NEW else (kind, first, last)
            for kind, first, last in new.segments
        ]
        old += new.replacements
        messages = seen(view, transcript, old, [])
        assert history_fault(messages) is None
        assert [entry.message for entry in shortened] == messages


def test_what_the_running_turn_was_asked_stays_word_for_word() -> None:
    history = [user("long ago", TURN), answer("well", TURN)]  # the turn was started with a history
    asked, steered = user("the task", TURN), user("but quickly", TURN)
    warned = user("you repeat yourself", TURN, metadata={"turnmill": "loop_guard"})
    first = [*step("a", turn_id=TURN), warned, steered, *step("b", turn_id=TURN, number=2)]
    messages = [user("another turn", "other"), answer("done", "other"), *history, asked, *first]
    made = with_summary(entries(messages), len(messages), TURN, "sum")
    assert [entry.message for entry in made[1:]] == [asked, steered]
    assert [e.message for e in replaced_by_cut(entries(messages), len(messages), TURN)] == [
        each for each in messages if each not in (asked, steered)
    ]


# --- what is planned

POLICY = Compaction(tool_output_bytes=200, keep_steps=1)
SUMMARIZED = Compaction(tool_output_bytes=200, keep_steps=1, summarizer="scripted:short")


def test_old_results_are_trimmed_first() -> None:
    messages = [user(), *step("a", size=50_000), *step("b", size=2000)]
    for urgency in (Urgency.EARLY, Urgency.REFUSED):
        plan = plan_shortening(entries(messages), SUMMARIZED, TURN, urgency)
        assert plan is not None
        assert plan.cut is None
        assert [entry.is_new for entry in plan.entries] == [False, False, True, False, False]


def test_results_of_the_newest_steps_are_trimmed_only_when_a_provider_has_refused() -> None:  # AC-08
    messages = [user(turn_id=TURN), *step("a", "b", "c", turn_id=TURN, size=200_000)]
    assert plan_shortening(entries(messages), POLICY, TURN, Urgency.EARLY) is None
    plan = plan_shortening(entries(messages), POLICY, TURN, Urgency.REFUSED)
    assert plan is not None
    assert size_of(plan.entries) < 2000


def test_a_summary_is_made_where_trimming_is_not_enough() -> None:
    messages = [user("x" * 5000), answer("y" * 5000), user("z"), *step("a"), answer(), user("now", TURN)]
    for urgency, cut in ((Urgency.EARLY, 5), (Urgency.REFUSED, 5), (Urgency.REFUSED_AGAIN, 6)):
        plan = plan_shortening(entries(messages), SUMMARIZED, TURN, urgency)
        assert plan is not None
        assert plan.cut == cut
    assert plan_shortening(entries(messages), POLICY, TURN, Urgency.REFUSED) is None


def test_fewer_steps_stay_where_they_are_what_is_long() -> None:
    messages = [user("short"), answer("y" * 5000), user("now", TURN)]
    assert plan_shortening(entries(messages), SUMMARIZED, TURN, Urgency.EARLY) is None
    plan = plan_shortening(entries(messages), SUMMARIZED, TURN, Urgency.REFUSED)
    assert plan is not None
    assert plan.cut == 2


def test_a_summary_is_not_summed_up_again_alone() -> None:
    summary = user("s" * 5000, metadata={"turnmill": "summary"})
    messages = [summary, answer(), user("x" * 3000, TURN)]
    plan = plan_shortening(entries(messages), SUMMARIZED, TURN, Urgency.EARLY)
    assert plan is None


def test_one_long_question_cannot_be_shortened() -> None:
    for urgency in Urgency:
        assert plan_shortening(entries([user("x" * 50_000, TURN)]), SUMMARIZED, TURN, urgency) is None


# --- what stays is untouched


@pytest.mark.parametrize("wire", ["json", "msgpack"])
def test_copies_and_round_trips_are_byte_equal(wire: Any) -> None:  # AC-09, LC-11
    """Thinking with its signature, redacted thinking, signature-only parts: as they came, whatever carries them."""
    parts: list[Any] = [
        ReasoningPart(text="hm\u2028ä", provider="openai", data={"signature": "c2ln/+==", "index": 0}),
        ReasoningPart(provider="openai", data={"type": "redacted_thinking", "data": "b3BhcXVl"}),
        ReasoningPart(
            provider="openai", data={"reasoning_details": [{"type": "reasoning.encrypted", "data": "é\u0000"}]}
        ),
        ToolCallPart(
            ToolCall(id="a", name="tool", metadata={"openai": {"extra_content": {"thought_signature": "Cs=="}}})
        ),
    ]
    message = Message(role="assistant", content=parts)
    encoded = encode_body(message, wire)
    again = decode_message(encoded)
    assert again == message
    assert encode_body(again, wire) == encoded
    other = decode_message(encode_body(again, "msgpack" if wire == "json" else "json"))
    assert encode_body(other, wire) == encoded
    made = entries([user(), *step("z", size=5000), message, result("a", "x" * 5000), user()])
    view = view_of(trim(made, 100, 0))
    (copied,) = [each for each in view.replacements if each.reasoning]
    assert msgspec.json.encode(copied) == msgspec.json.encode(message)
