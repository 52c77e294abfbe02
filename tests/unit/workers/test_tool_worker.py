"""The tool worker on a real engine: calls that are stopped, idle calls, child processes, large results, the session's state."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from support.waiting import wait_until_async
from support.worker_bench import SESSION, WorkerBench
from turnmill.protocol.blobs import resolve_result
from turnmill.protocol.connection import Engine
from turnmill.protocol.content import ErrorInfo, ImagePart
from turnmill.protocol.errors import ErrorKind
from turnmill.protocol.session_values import SessionValues
from turnmill.workers.tools import ToolContext, ToolOutput, ToolRetry, tool

STOPPED = ErrorInfo(kind=ErrorKind.ABORTED, message="stop")


@pytest.fixture
async def engine(valkey_url: str) -> AsyncIterator[Engine]:
    engine = await Engine(valkey_url).connect()
    yield engine
    await engine.close()


@pytest.fixture
def bench(engine: Engine, namespace: str) -> WorkerBench:
    return WorkerBench(engine, namespace, blob_threshold=1000, payload_bytes_max=100_000)


# --- stopped calls


async def test_an_async_tool_is_cancelled_and_told_why(bench: WorkerBench) -> None:  # AC-02, AC-42
    running, seen = asyncio.Event(), []

    @tool
    async def wait(ctx: ToolContext) -> str:
        running.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append(ctx.cancelled.reason)
            raise
        return "never"

    async with bench.tools(wait):
        await bench.add("wait")
        await running.wait()
        await bench.stop_turn(bench.turn_id)
        reply = await bench.reply()
    assert (reply.error, reply.result) == (STOPPED, None)
    assert seen == ["stop"]


async def test_a_sync_tool_sees_the_signal_and_is_not_waited_for(bench: WorkerBench) -> None:  # AC-02
    running, ended = threading.Event(), threading.Event()

    @tool
    def wait(ctx: ToolContext) -> str:
        running.set()
        assert ctx.cancelled.wait_sync(30)
        ended.set()
        return "too late"

    async with bench.tools(wait):
        await bench.add("wait")
        await asyncio.to_thread(running.wait)
        await bench.stop_turn(bench.turn_id)
        reply = await bench.reply()
        assert (reply.error, reply.result) == (STOPPED, None)
        await asyncio.to_thread(ended.wait)
        await asyncio.sleep(0)
        assert len(await bench.replies()) == 1


async def test_a_tool_that_is_done_keeps_its_result(bench: WorkerBench) -> None:
    @tool
    async def quick(ctx: ToolContext) -> str:
        ctx.cancelled.set("stop")  # as if the word came in the tool's last moment
        return "done"

    async with bench.tools(quick):
        await bench.add("quick")
        reply = await bench.reply()
    assert reply.error is None and reply.result is not None
    assert reply.result.result == "done"


async def test_a_tool_that_swallows_its_cancellation_is_answered_for(
    bench: WorkerBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("turnmill.workers.execution.CANCELLATION_GRACE_SECONDS", 0.01)
    running, release = asyncio.Event(), asyncio.Event()

    @tool
    async def deaf() -> str:
        running.set()
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                continue
        return "at last"

    async with bench.tools(deaf):
        await bench.add("deaf")
        await running.wait()
        await bench.stop_turn(bench.turn_id)
        assert (await bench.reply()).error == STOPPED
        release.set()


async def test_a_call_that_waits_for_a_slot_is_answered_at_once(bench: WorkerBench) -> None:
    running, release, runs = asyncio.Event(), asyncio.Event(), []

    @tool(concurrency=1)
    async def single(number: int) -> int:
        runs.append(number)
        running.set()
        await release.wait()
        return number

    async with bench.tools(single):
        await bench.add("single", "1.0", arguments={"number": 1}, turn_id=bench.new_turn())
        await running.wait()
        await bench.add("single", "1.1", arguments={"number": 2})
        await bench.add("single", "1.2", arguments={"number": 3}, turn_id=bench.new_turn())
        await bench.stop_turn(bench.turn_id)
        assert (await bench.reply("1.1")).error == STOPPED
        release.set()
        reply = await bench.reply("1.2")
    assert reply.result is not None and reply.result.result == 3
    assert runs == [1, 3]


async def test_a_request_to_try_again_is_no_abort(bench: WorkerBench) -> None:
    @tool(retries=1)
    async def flaky() -> str:
        raise ToolRetry("later")

    async with bench.tools(flaky):
        await bench.add("flaky")
        reply = await bench.reply()
    assert reply.error is not None and reply.error.retryable


# --- idle calls


async def test_a_call_without_progress_ends_and_one_with_progress_does_not(bench: WorkerBench) -> None:  # AC-28
    @tool(idle_timeout=0.3)
    async def talk(times: int, ctx: ToolContext) -> str:
        for number in range(times):
            await asyncio.sleep(0.05)
            await ctx.progress(f"{number}")
        if not times:
            await asyncio.Event().wait()
        return "done"

    assert talk.spec.idle_timeout_seconds == 0.3
    async with bench.tools(talk):
        await bench.add("talk", "1.0", arguments={"times": 12}, idle_timeout_seconds=0.3)
        await bench.add("talk", "1.1", arguments={"times": 0}, idle_timeout_seconds=0.3)
        silent, lively = await bench.reply("1.1"), await bench.reply("1.0")
    assert lively.result is not None and silent.result is not None
    assert lively.result.result == "done"
    assert silent.result.is_error
    assert silent.result.result == "Error: execution failed (no progress for 0.3 s)"


async def test_progress_does_not_move_the_total_time(bench: WorkerBench) -> None:  # AC-28
    @tool(idle_timeout=0.2)
    async def talk(ctx: ToolContext) -> None:
        while True:
            await ctx.progress("still here")
            await asyncio.sleep(0.02)

    async with bench.tools(talk):
        await bench.add("talk", timeout_seconds=0.5, idle_timeout_seconds=0.2)
        reply = await bench.reply()
    assert reply.result is not None
    assert reply.result.result == "Error: execution failed (timeout after 0.5 s)"


# --- child processes

SPAWNS = """
import subprocess, sys, pathlib, os
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
path = pathlib.Path(sys.argv[1])
path.with_suffix(".part").write_text(f"{os.getpid()} {child.pid}")
path.with_suffix(".part").rename(path)
child.wait()
"""


def is_alive(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


async def pids_in(path: Path) -> list[int]:
    await wait_until_async(path.exists)
    return [int(word) for word in path.read_text().split()]


@pytest.mark.parametrize("is_async", [True, False], ids=["async", "sync"])
async def test_a_stopped_call_takes_its_processes_along(
    bench: WorkerBench, tmp_path: Path, is_async: bool
) -> None:  # AC-44
    path = tmp_path / "pids"
    command = (sys.executable, "-c", SPAWNS, str(path))

    @tool(name="build")
    async def build(ctx: ToolContext) -> int:
        return (await ctx.run_process(*command)).exit_code

    @tool(name="build")
    def build_sync(ctx: ToolContext) -> int:
        return ctx.run_process_sync(*command).exit_code

    async with bench.tools(build if is_async else build_sync):
        await bench.add("build")
        pids = await pids_in(path)
        assert len(pids) == 2
        await bench.stop_turn(bench.turn_id)
        assert (await bench.reply()).error == STOPPED
        await wait_until_async(lambda: not any(is_alive(pid) for pid in pids))


async def test_a_call_that_runs_out_of_time_takes_its_processes_along(bench: WorkerBench, tmp_path: Path) -> None:
    path = tmp_path / "pids"

    @tool
    async def build(ctx: ToolContext) -> int:
        return (await ctx.run_process(sys.executable, "-c", SPAWNS, str(path))).exit_code

    async with bench.tools(build):
        await bench.add("build", timeout_seconds=2)
        pids = await pids_in(path)
        reply = await bench.reply()
        assert reply.result is not None and "timeout after 2 s" in reply.result.result
        await wait_until_async(lambda: not any(is_alive(pid) for pid in pids))


async def test_a_program_gives_its_output_and_its_exit_code(bench: WorkerBench, tmp_path: Path) -> None:
    code = (
        "import os, sys; text = sys.stdin.read(); print(text.upper(), os.environ['WHO'], os.getcwd()); "
        "print('oops', file=sys.stderr); sys.exit(3)"
    )

    @tool
    async def program(ctx: ToolContext) -> dict[str, Any]:
        done = await ctx.run_process(
            sys.executable, "-c", code, stdin=b"hello", cwd=tmp_path, env={**os.environ, "WHO": "me"}
        )
        return {"text": done.text, "errors": done.stderr, "exit_code": done.exit_code}

    async with bench.tools(program):
        await bench.add("program")
        reply = await bench.reply()
    assert reply.result is not None
    assert reply.result.result == {
        "text": f"HELLO me {tmp_path}\n",
        "errors": {"$bytes": "b29wcwo="},
        "exit_code": 3,
    }


async def test_a_programs_output_and_time_are_bounded(bench: WorkerBench) -> None:
    @tool
    async def flood(ctx: ToolContext) -> list[Any]:
        code = "import sys; sys.stdout.write('x' * 1_000_000)"
        done = await ctx.run_process(sys.executable, "-c", code, output_bytes_max=10)
        return [done.text, done.truncated, done.exit_code]

    @tool
    async def slow(ctx: ToolContext) -> int:
        return (await ctx.run_process("sleep", "600", timeout_seconds=0.05)).exit_code

    @tool
    async def missing(ctx: ToolContext) -> int:
        return (await ctx.run_process("no-such-program")).exit_code

    async with bench.tools(flood, slow, missing):
        for number, name in enumerate(("flood", "slow", "missing")):
            await bench.add(name, f"1.{number}")
        results = [(await bench.reply(f"1.{number}")).result for number in range(3)]
    values = [result.result for result in results if result is not None]
    assert values[0] == ["x" * 10, True, 0]
    assert values[1] == "Error: execution failed (sleep has not ended within 0.05 s)"
    assert "no-such-program" in values[2]


# --- large results


async def test_a_large_result_is_stored_apart(bench: WorkerBench) -> None:  # AC-39
    @tool
    async def report(size: int) -> str:
        return "x" * size

    @tool
    async def photo() -> ToolOutput:
        return ToolOutput(content=[ImagePart(data=bytes(5000), media_type="image/png")])

    async with bench.tools(report, photo):
        await bench.add("report", "1.0", arguments={"size": 900})
        await bench.add("report", "1.1", arguments={"size": 5000})
        await bench.add("photo", "1.2")
        small, large, rich = [(await bench.reply(f"1.{number}")).result for number in range(3)]
    assert small is not None and large is not None and rich is not None
    assert small.result == "x" * 900 and small.blob is None
    assert large.result is None and large.blob is not None
    assert (await resolve_result(bench.engine, bench.names, large)).result == "x" * 5000
    assert rich.content is not None
    [part] = rich.content
    assert isinstance(part, ImagePart) and part.data is None and part.blob is not None
    restored = await resolve_result(bench.engine, bench.names, rich)
    assert restored.content == [ImagePart(data=bytes(5000), media_type="image/png")]
    assert await bench.engine.call("PTTL", bench.names.base + large.blob.key) > 0  # until a commit keeps it


async def test_a_result_above_the_limit_is_an_error_that_says_so(bench: WorkerBench) -> None:  # AC-39
    @tool
    async def report() -> str:
        return "x" * 100_001

    async with bench.tools(report):
        await bench.add("report")
        reply = await bench.reply()
    assert reply.result is None and reply.error is not None
    assert reply.error.kind == ErrorKind.MESSAGE_TOO_LARGE
    assert "100001 bytes" in reply.error.message and "TURNMILL_PAYLOAD_BYTES_MAX" in reply.error.message


# --- the session's state


async def test_tools_share_the_sessions_state(bench: WorkerBench) -> None:
    @tool
    async def count(ctx: ToolContext) -> int | float:
        await ctx.state.update("names", lambda names: [*names, ctx.tool_call_id], [])
        return await ctx.state.increment("calls")

    @tool
    def count_sync(ctx: ToolContext) -> dict[str, Any]:
        state = ctx.state_sync
        state.set("sync", True)
        assert state.get("missing", 5) == 5
        assert state.update("names", lambda names: [*names, "sync"], []) is not None
        state.increment("calls")
        state.set("gone", 1)
        assert state.delete("gone")
        return state.all()

    async with bench.tools(count, count_sync):
        for number in range(10):
            await bench.add("count", f"1.{number}")
        for number in range(10):
            await bench.reply(f"1.{number}")
        await bench.add("count_sync", "2.0")
        reply = await bench.reply("2.0")
    assert reply.result is not None
    assert reply.result.result["calls"] == 11 and reply.result.result["sync"] is True
    values = SessionValues(bench.engine, bench.names, SESSION)
    assert sorted(await values.get("names")) == sorted([*(f"id-1.{number}" for number in range(10)), "sync"])


async def test_the_blocking_state_is_refused_on_the_loop(bench: WorkerBench) -> None:
    @tool
    async def confused(ctx: ToolContext) -> Any:
        return ctx.state_sync.get("x")

    async with bench.tools(confused):
        await bench.add("confused")
        reply = await bench.reply()
    assert reply.result is not None and "await context.state.get" in reply.result.result
