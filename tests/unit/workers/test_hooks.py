"""Hooks: functions with names, the events they are given, and what becomes of what they return."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from support.worker_bench import SESSION, WorkerBench
from turnmill.protocol.codec import encode_body
from turnmill.protocol.connection import Engine
from turnmill.protocol.content import (
    ErrorInfo,
    ImagePart,
    Message,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
    Usage,
)
from turnmill.protocol.errors import DefinitionError, ErrorKind
from turnmill.protocol.specs import HookSpec
from turnmill.protocol.values import pack_value
from turnmill.workers.hook_calls import HookFailed, decision_of
from turnmill.workers.hooks import (
    AfterToolCallEvent,
    AfterToolCallResult,
    ApprovalEvent,
    BeforeToolCallEvent,
    BeforeToolCallResult,
    Hook,
    ReasoningHookEvent,
    StepControl,
    StepFinishEvent,
    StepResult,
    StepStartEvent,
    StopDecision,
    hook,
    hook_for,
)
from turnmill.workers.tools import ToolOutput, tool

CALL = ToolCall(id="c1", name="search", arguments=pack_value({"raw": b"\x00"}))
RESULT = ToolResult(tool_call_id="c1", tool_name="search", result=pack_value({"found": b"\x01"}))
TRANSCRIPT = [
    Message(role="user", content="before", turn_id="t0"),
    Message(role="user", content="find it"),
    Message(role="assistant", content=[TextPart("looking"), ToolCallPart(CALL)], step=1, usage=Usage(input_tokens=5)),
    Message(role="tool", content=[ToolResultPart(RESULT)], step=1),
    Message(role="assistant", content="found", step=2, finish_reason="stop"),
]


# --- definition


def test_a_hook_has_a_name_a_queue_and_a_time() -> None:
    @hook
    def plain(event: StepStartEvent) -> None: ...

    @hook(name="guard", queue="policies", timeout=5, start_timeout=2)
    async def other(event: BeforeToolCallEvent) -> None: ...

    assert plain.spec == HookSpec(name="plain")
    assert not plain.is_async and other.is_async
    assert other.spec == HookSpec(name="guard", queue="policies", timeout_seconds=5.0, start_timeout_seconds=2.0)
    assert hook_for(plain, plain.spec) is plain
    assert hook_for(plain, HookSpec(name="again")).name == "again"


def no_arguments() -> None: ...


def two_arguments(one: Any, two: Any) -> None: ...


def yields(event: Any) -> Any:
    yield event


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (no_arguments, {}, "must take one argument"),
        (two_arguments, {}, "must take one argument"),
        (yields, {}, "yields"),
        (lambda event: None, {}, "no name"),
        (5, {"name": "five"}, "needs a function"),
        (lambda event: None, {"name": "a", "timeout": 0}, "timeout must be"),
        (lambda event: None, {"name": "a", "queue": "two words"}, "no name for a queue"),
    ],
)
def test_what_cannot_be_a_hook_is_refused(function: Any, options: Any, message: str) -> None:
    with pytest.raises(DefinitionError, match=message):
        hook(**options)(function) if options else hook(function)


def test_a_tool_takes_a_policy_for_its_approvals() -> None:  # AC-04
    def expensive(event: ApprovalEvent) -> bool:
        return event.tool_call.arguments["amount"] > 100

    @tool(approval=expensive, approval_timeout=60)
    async def pay(amount: int) -> None: ...

    @tool(approval=hook(name="shared")(expensive))
    async def refund(amount: int) -> None: ...

    @tool(approval=True, idle_timeout=5)
    async def always() -> None: ...

    assert (pay.spec.approval.mode, pay.spec.approval.timeout_seconds) == ("policy", 60)
    assert pay.spec.approval.policy == HookSpec(name="pay.approval")
    assert pay.approval_policy is not None and pay.approval_policy.function is expensive
    assert refund.spec.approval.policy == HookSpec(name="shared")
    assert (always.spec.approval.mode, always.spec.idle_timeout_seconds) == ("always", 5)
    assert always.approval_policy is None
    with pytest.raises(DefinitionError, match="approval_timeout must be"):
        tool(approval="always", approval_timeout=-1)(no_arguments)


# --- decisions


@pytest.mark.parametrize(
    ("point", "returned", "decision"),
    [
        ("before_step", None, {"inject_messages": [], "stop": False, "stop_reason": None}),
        (
            "before_step",
            StepControl(
                inject_messages=[{"role": "user", "content": "hi"}, Message(role="system", content="be brief")]
            ),
            {
                "inject_messages": [{"role": "user", "content": "hi"}, {"role": "system", "content": "be brief"}],
                "stop": False,
                "stop_reason": None,
            },
        ),
        (
            "before_step",
            StepControl(stop=True, stop_reason="enough"),
            {"inject_messages": [], "stop": True, "stop_reason": "enough"},
        ),
        (
            "before_tool_call",
            BeforeToolCallResult(block=True, reason="no"),
            {"block": True, "reason": "no", "arguments": None, "is_error": False, "has_result": False},
        ),
        (
            "before_tool_call",
            {"arguments": {"a": 1}, "result": None},
            {
                "block": False,
                "reason": None,
                "arguments": {"a": 1},
                "is_error": False,
                "has_result": True,
                "result": None,
            },
        ),
        (
            "after_tool_call",
            AfterToolCallResult(result=[1], is_error=False, terminate=True, terminate_reason="got it"),
            {"has_result": True, "result": [1], "is_error": False, "terminate": True, "terminate_reason": "got it"},
        ),
        (
            "after_tool_call",
            None,
            {"has_result": False, "is_error": None, "terminate": False, "terminate_reason": None},
        ),
        ("stop_when", True, {"stop": True}),
        ("stop_when", None, {"stop": False}),
        ("stop_when", StopDecision(name="done", reason="r"), {"stop": True, "name": "done", "reason": "r"}),
        ("approval", False, {"required": False}),
        ("signals", None, {"signals": []}),
        ("signals", ({"a": 1}, "b"), {"signals": [{"a": 1}, "b"]}),
        ("after_step", "whatever", {}),
        ("on_reasoning_event", 5, {}),
    ],
)
def test_what_is_returned_becomes_a_decision(point: str, returned: Any, decision: Any) -> None:  # TH-11, TH-12, AE-08
    assert decision_of(point, returned) == decision


@pytest.mark.parametrize(
    ("point", "returned", "message"),
    [
        ("before_step", "stop", "a str, not a StepControl"),
        ("before_step", {"halt": True}, "no StepControl"),
        ("before_step", StepControl(inject_messages=[{"role": "robot", "content": "x"}]), "no message"),
        ("before_tool_call", True, "a bool, not a BeforeToolCallResult"),
        ("before_tool_call", BeforeToolCallResult(arguments=[1]), "arguments are a dict"),  # type: ignore[arg-type]
        ("after_tool_call", AfterToolCallResult(result=ToolOutput(content=[TextPart("x")])), "a JSON value"),
        ("stop_when", 1, "a int, not a StopDecision"),
        ("approval", None, "returns True or False"),
        ("signals", "one", "returns a list"),
    ],
)
def test_what_does_not_fit_is_said(point: str, returned: Any, message: str) -> None:  # TH-12
    with pytest.raises(HookFailed, match=message):
        decision_of(point, returned)


# --- calls


@pytest.fixture
async def engine(valkey_url: str) -> AsyncIterator[Engine]:
    engine = await Engine(valkey_url).connect()
    yield engine
    await engine.close()


@pytest.fixture
async def bench(engine: Engine, namespace: str) -> WorkerBench:
    bench = WorkerBench(engine, namespace)
    await engine.call("RPUSH", bench.names.transcript(SESSION), *[encode_body(message) for message in TRANSCRIPT])
    summary = Message(role="user", content="summary of the beginning")
    await engine.call("RPUSH", bench.names.replacements(SESSION), encode_body(summary))
    return bench


async def ask(bench: WorkerBench, point: str, function: Any, event: dict[str, Any], **fields: Any) -> Any:
    """The reply to one call of a hook, and what its function was given."""
    given: list[Any] = []

    async def watched(argument: Any) -> Any:
        given.append(argument)
        value = function(argument)
        return await value if asyncio.iscoroutine(value) else value

    made = Hook(watched, HookSpec(name="watched"))
    async with bench.tools(made):
        arguments = {"step_number": 2, **msgspec.to_builtins(event)}
        await bench.add("watched", queue="hooks", hook=point, arguments=arguments, metadata={"user": 7}, **fields)
        reply = await bench.reply()
    return reply, given


async def test_each_point_has_its_event(bench: WorkerBench) -> None:  # TH-12
    conversation = {"messages": 4, "view": [[1, 0, 1], [0, 1, 2]], "view_end": 2}
    plain = [unpacked(message) for message in TRANSCRIPT]
    reply, [started] = await ask(bench, "before_step", lambda event: None, {**conversation, "tools": ["search"]})
    assert isinstance(started, StepStartEvent)
    assert [message.text for message in started.messages] == ["summary of the beginning", "find it", "looking", ""]
    assert started.messages[1:] == plain[1:4]
    assert (started.step_number, started.tools, started.metadata) == (2, ["search"], {"user": 7})
    assert (started.session_id, started.turn_id, started.agent_id) == (SESSION, bench.turn_id, "agent")
    assert reply.result.result == {"inject_messages": [], "stop": False, "stop_reason": None}


def unpacked(message: Message) -> Message:
    if message.role != "tool":
        return message
    result = msgspec.structs.replace(RESULT, result={"found": b"\x01"})
    return msgspec.structs.replace(message, content=[ToolResultPart(result)])


async def test_a_finished_step_is_read_from_the_transcript(bench: WorkerBench) -> None:  # TH-12
    event = {"first_message": 2, "end_message": 4, "usage": Usage(input_tokens=5), "finish_reason": "tool_calls"}
    reply, [finished] = await ask(bench, "after_step", lambda event: "ignored", event)
    assert isinstance(finished, StepFinishEvent)
    assert finished.text == "looking"
    assert finished.step.tool_results[0].result == {"found": b"\x01"}
    assert (finished.usage, finished.finish_reason) == (Usage(input_tokens=5), "tool_calls")
    assert reply.result.result == {}


async def test_a_call_may_be_changed_and_its_bytes_are_bytes(bench: WorkerBench) -> None:  # TH-12
    reply, [before] = await ask(
        bench,
        "before_tool_call",
        lambda event: BeforeToolCallResult(arguments={**event.tool_call.arguments, "more": b"\x02"}),
        {"tool_call": CALL, "messages": 2},
    )
    assert isinstance(before, BeforeToolCallEvent)
    assert before.tool_call.arguments == {"raw": b"\x00"}
    assert [message.text for message in before.messages] == ["before", "find it"]
    assert reply.result.result["arguments"] == pack_value({"raw": b"\x00", "more": b"\x02"})


async def test_a_result_may_be_changed(bench: WorkerBench) -> None:  # TH-12
    reply, [after] = await ask(
        bench,
        "after_tool_call",
        lambda event: {"result": event.tool_result.result["found"].hex(), "terminate": True},
        {"tool_call": CALL, "tool_result": RESULT, "messages": 3},
    )
    assert isinstance(after, AfterToolCallEvent)
    assert reply.result.result["result"] == "01"
    assert reply.result.result["terminate"] is True


async def test_reasoning_comes_piece_by_piece(bench: WorkerBench) -> None:  # TH-12
    events = [{"kind": "delta", "text": "hm"}, {"kind": "signature", "provider": "p", "data": {"signature": "x"}}]
    _, given = await ask(bench, "on_reasoning_event", lambda event: None, {"events": events})
    assert [(event.kind, event.text, event.data) for event in given] == [
        ("delta", "hm", {}),
        ("signature", None, {"signature": "x"}),
    ]
    assert all(isinstance(event, ReasoningHookEvent) and event.step_number == 2 for event in given)


async def test_a_stop_condition_sees_the_turns_steps(bench: WorkerBench) -> None:  # TH-11
    reply, [steps] = await ask(
        bench,
        "stop_when",
        lambda steps: StopDecision(reason=steps[-1].text) if len(steps) == 2 else False,
        {"first_message": 1, "end_message": 5},
    )
    assert [type(step) for step in steps] == [StepResult, StepResult]
    assert reply.result.result == {"stop": True, "name": None, "reason": "found"}


async def test_a_policy_and_an_extractor_are_asked(bench: WorkerBench) -> None:  # AC-04, AE-08
    reply, [event] = await ask(bench, "approval", lambda event: event.tool_call.name == "search", {"tool_call": CALL})
    assert isinstance(event, ApprovalEvent)
    assert reply.result.result == {"required": True}
    await bench.engine.call("DEL", bench.names.results)
    reply, given = await ask(bench, "signals", lambda text: [text.upper()], {"text": "final"})
    assert given == ["final"]
    assert reply.result.result == {"signals": ["FINAL"]}


async def test_an_injected_image_comes_through(bench: WorkerBench) -> None:  # TH-12
    image = Message(role="user", content=[ImagePart(data=b"\x89PNG", media_type="image/png")])
    reply, _ = await ask(bench, "before_step", lambda event: StepControl([image]), {"messages": 1})
    assert msgspec.convert(reply.result.result["inject_messages"], list[Message]) == [image]


# --- failures


def raises(error: BaseException) -> Any:
    def fail(event: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises(ValueError("boom")), "ValueError: boom"),
        (raises(KeyError()), "KeyError"),
        (raises(SystemExit(3)), "SystemExit: 3"),
        (lambda event: "nonsense", "it returned a str, not a StepControl or None"),
        (lambda event: asyncio.sleep(60), "timeout after 0.05 s"),
    ],
)
async def test_a_hook_that_fails_says_how(bench: WorkerBench, function: Any, message: str) -> None:  # TH-12
    reply, _ = await ask(bench, "before_step", function, {"messages": 1}, timeout_seconds=0.05)
    assert (reply.error, reply.result) == (ErrorInfo(kind=ErrorKind.HOOK_FAILED, message=message), None)


async def test_a_conversation_that_is_gone_is_said(bench: WorkerBench) -> None:
    reply, given = await ask(bench, "before_step", lambda event: None, {"messages": 9})
    assert given == []
    assert "holds 5 of 9 messages" in reply.error.message


async def test_a_hook_of_a_stopped_turn_is_stopped(bench: WorkerBench) -> None:
    running = asyncio.Event()

    @hook
    async def slow(event: StepStartEvent) -> None:
        running.set()
        await asyncio.Event().wait()

    async with bench.tools(slow):
        await bench.add("slow", queue="hooks", hook="before_step", arguments={"step_number": 1})
        await running.wait()
        await bench.stop_turn(bench.turn_id)
        assert (await bench.reply()).error == ErrorInfo(kind=ErrorKind.ABORTED, message="stop")


async def test_an_unknown_hook_is_answered_with_who_has_it(bench: WorkerBench) -> None:
    @hook
    def here(event: StepStartEvent) -> None: ...

    @hook(queue="other")
    def there(event: StepStartEvent) -> None: ...

    async with bench.tools(there) as carrier, bench.tools(here):
        await bench.add("there", "1.0", queue="hooks", hook="before_step", arguments={"step_number": 1})
        await bench.add("nowhere", "1.1", queue="hooks", hook="before_step", arguments={"step_number": 1})
        wrong, unknown = (await bench.reply("1.0")).error, (await bench.reply("1.1")).error
    assert wrong is not None and unknown is not None
    assert wrong.kind == ErrorKind.HOOK_FAILED
    assert f"{carrier.consumer.worker_id} has it" in wrong.message and "it has: here" in wrong.message
    assert "no live worker has it" in unknown.message


async def test_a_worker_serves_the_queues_of_its_hooks(bench: WorkerBench) -> None:
    @tool(approval=lambda event: True)
    async def pay() -> str:
        return "paid"

    assert pay.approval_policy is not None
    async with bench.tools(pay, pay.approval_policy) as worker:
        await bench.add(
            "pay.approval", "1.0", queue="hooks", hook="approval", arguments={"tool_call": {"id": "c", "name": "pay"}}
        )
        await bench.add("pay", "1.1")
        decided, done = (await bench.reply("1.0")).result, (await bench.reply("1.1")).result
    assert decided is not None and done is not None
    assert (decided.result, done.result) == ({"required": True}, "paid")
    assert sorted(worker.hooks) == ["pay.approval"]
