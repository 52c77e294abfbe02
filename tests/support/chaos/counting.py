"""The count behind a run: what the engine and the file of effects say about every turn."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from support.stage import channel_problems
from turnmill.runtime.turn import Turn

from .effects import Effects

if TYPE_CHECKING:
    from .run import Run


async def count(run: Run) -> None:
    """Fill the report."""
    report = run.report
    try:
        await run.stage.assert_idle()
    except AssertionError as error:
        report.wrong.append(str(error)[:500])
    effects = Effects(run.directory / "effects")
    report.effects = effects.total
    for number, turn in run.turns.items():
        await _count_turn(run, turn, effects, number in run.finished)
    _count_effects(run, effects)
    if not run.scenario.may_lose:
        for session in sorted({run.session(number) for number in run.turns}):
            try:
                await run.stage.assert_history(session)
            except AssertionError as error:
                report.wrong.append(f"the history of {session}: {str(error)[:500]}")
    for letter in await run.stage.dead_letters():
        report.wrong.append(f"a dead letter: {letter}"[:500])
    report.log_kilobytes = sum(process.log_path.stat().st_size for process in run.stage.processes.all) / 1000


async def _count_turn(run: Run, turn: Turn, effects: Effects, finished: bool) -> None:
    """The channel of a turn as it stands in the engine, and whether each call that it tells of was made."""
    report, lossy = run.report, run.scenario.may_lose
    numbered = await run.stage.told_events(turn.id)
    ended = bool(numbered) and numbered[-1][1].type in ("turn.finished", "turn.failed")
    if not ended:
        if not lossy:
            report.lost += 1
            report.wrong.append(f"{turn.id}: its channel holds no end")
        return
    kinds = Counter(event.type for _, event in numbered)
    report.duplicated += max(0, kinds["turn.finished"] + kinds["turn.failed"] - 1)
    report.resets += kinds["step.reset"]
    report.wrong += [f"{turn.id}: {problem}" for problem in channel_problems(numbered)]
    started = Counter(
        f"{turn.id}/{event.step_number}.{event.index}"
        for _, event in numbered
        if event.type == "tool_execution.started"
    )
    names = {
        f"{turn.id}/{event.step_number}.{event.index}": event.name
        for _, event in numbered
        if event.type == "tool_execution.started"
    }
    for key, attempts in started.items():
        report.second_attempts += attempts > 1
        total = effects.of_call.get(key, Counter()).total()
        missing = finished and total < 1 and names[key] != "once"  # that may have died before it began
        if not lossy and ((total > attempts and not run.scenario.may_repeat) or missing):
            report.wrong.append(f"{key}: {total} effects of {attempts} attempts")


def _count_effects(run: Run, effects: Effects) -> None:
    """An attempt takes effect once; a call that may not be repeated does so too, over all its attempts."""
    report = run.report
    for key, attempts in effects.of_call.items():
        again = sum(times - 1 for times in attempts.values())
        if effects.tools[key] == "once":
            again = max(again, attempts.total() - 1)
        if not again:
            continue
        if run.scenario.may_repeat:
            report.repeated += again
        else:
            report.duplicated += again
            report.wrong.append(f"{key}: {effects.tools[key]} took effect more often than it may: {dict(attempts)}")
