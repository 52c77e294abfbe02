"""What is refused, and what may be done behind it, through a client and real processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from apps.offices import clerk, told
from support.stage import Stage
from turnmill.protocol.content import ImagePart, Message, TextPart
from turnmill.protocol.errors import (
    CommandRefusedError,
    DefinitionError,
    NotInConversationError,
    SessionBusyError,
    TurnAbortedError,
    TurnFailedError,
)
from turnmill.runtime import Agent

PATIENCE = 20


async def test_approving_and_denying_at_once_tells_the_one_who_was_late(office: Stage, session: str) -> None:
    turn = await office.client.turn(clerk, told([("pay", {"amount": 5000})]), session=session)
    (call,) = (await asyncio.wait_for(turn.result(), PATIENCE)).approvals
    other = office.client.attach(turn.id)
    outcomes = await asyncio.gather(turn.approve(call.id), other.deny(call.id), return_exceptions=True)
    (refused,) = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert isinstance(refused, CommandRefusedError)
    first = "denied" if isinstance(outcomes[0], BaseException) else "approved"
    # The step may be over already: then nothing waits any more.
    assert refused.kind == "no_pending_approval" or (refused.kind, first in str(refused)) == ("already_decided", True)
    (shown,) = (await asyncio.wait_for(turn.result(), PATIENCE)).function_calls
    assert shown.is_error is (first == "denied")


async def test_a_refused_start_does_not_hold_its_idempotency_key(office: Stage, session: str) -> None:
    gate = f"gate-{session}"

    async def start(on_busy: Any = "reject") -> Any:
        return await office.client.turn(
            clerk, told(answer="mine"), session=session, on_busy=on_busy, idempotency_key="order-7"
        )

    live = await office.client.turn(clerk, told(gate=gate), session=session)
    await office.reached(gate)
    for _ in range(2):  # each is a try of its own, refused on its own
        with pytest.raises(SessionBusyError):
            await start()
    await office.open(gate)
    await asyncio.wait_for(live.result(), PATIENCE)
    turn = await start()
    assert (await asyncio.wait_for(turn.result(), PATIENCE)).answer == "mine"
    assert (await start()).id == turn.id


async def test_a_start_that_result_refuses_does_not_hold_its_key_either(office: Stage, session: str) -> None:
    live = await office.client.turn(clerk, told([("pay", {"amount": 5000})]), session=session)
    await asyncio.wait_for(live.result(), PATIENCE)
    turns = []
    for _ in range(2):
        turn = await office.client.turn(clerk, told(), session=session, idempotency_key="order-8")
        with pytest.raises(TurnFailedError) as failed:
            await asyncio.wait_for(turn.result(), PATIENCE)
        assert failed.value.error_type == "approval_required"
        turns.append(turn.id)
    assert turns[0] != turns[1]


async def test_what_cannot_be_sent_does_not_hold_a_key(office: Stage, session: str) -> None:
    bad = Message(role="user", content="x", metadata={"value": 2**70})
    with pytest.raises(DefinitionError):
        await office.client.turn(clerk, [bad], session=session, idempotency_key="order-9")
    turn = await office.client.turn(clerk, told(), session=session, idempotency_key="order-9")
    await asyncio.wait_for(turn.result(), PATIENCE)


async def test_a_turn_starts_with_a_list_of_parts(office: Stage, session: str) -> None:
    image = ImagePart(url="https://example.org/logo.png")
    turn = await office.client.turn(clerk, [TextPart(told(answer="seen")), image], session=session)
    assert (await asyncio.wait_for(turn.result(), PATIENCE)).answer == "seen"
    first = (await office.client.session(session).messages())[0]
    assert (first.role, first.content) == ("user", [TextPart(told(answer="seen")), image])


async def test_a_long_reason_is_cut(office: Stage, session: str) -> None:
    gate = f"gate-{session}"
    turn = await office.client.turn(clerk, told(gate=gate), session=session)
    await office.reached(gate)
    await turn.abort("x" * 5000)
    with pytest.raises(TurnAbortedError) as stopped:
        await asyncio.wait_for(turn.result(), PATIENCE)
    assert stopped.value.termination.reason == "x" * 3999 + "…"
    await office.open(gate)


async def test_mistakes_are_told_where_they_are_made(office: Stage, session: str) -> None:
    client, plain = office.client, Agent("plain-refusals", model="host:played")
    turn = await client.turn(plain, told(), session=session)
    await asyncio.wait_for(turn.result(), PATIENCE)
    for mistake in (
        client.turn(plain, ""),
        client.turn(plain, "x", session=""),
        client.turn(plain, "x", idempotency_key=5),  # type: ignore[arg-type]
        turn.steer(None),  # type: ignore[arg-type]
        turn.steer(5),  # type: ignore[arg-type]
        turn.steer(""),
        turn.steer([]),
        turn.steer("x", role="assistant"),  # type: ignore[arg-type]
        turn.steer(Message(role="tool", content="x")),
        turn.resume(tool_results=[{"tool_call_id": "a"}]),
        turn.resume(message=""),
        turn.abort(5),  # type: ignore[arg-type]
        client.session(session).turns(0),
        client.session(session).turns(-1),
    ):
        with pytest.raises(DefinitionError):
            await mistake
    here = client.session(session)
    for wrong in (here.fork(turn="nobody"), here.fork(turn=turn.id, step=9), here.retry("nobody")):
        with pytest.raises(NotInConversationError):
            await wrong
