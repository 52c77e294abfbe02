"""What a chaos run is to do, and what it found."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Plan:
    """What a run does. Times are in seconds; `every` is the mean time between two blows, None for the scenario's own."""

    scenario: str = "mixed"
    turns: int = 400
    in_flight: int = 48
    seconds: float = 600.0
    every: float | None = None
    seed: int = 1
    sessions: int = 200
    roles: tuple[str, ...] = ("coordinator", "coordinator", "llm", "llm", "tools", "tools")
    settle_seconds: float = 60.0
    """A turn that has not ended in this time after the last blow is stuck."""


@dataclass
class Report:
    """What a run found. `wrong` has one line for each thing that must not be."""

    scenario: str = ""
    turns: int = 0
    finished: int = 0
    seconds: float = 0.0
    blows: Counter[str] = field(default_factory=Counter)
    lost: int = 0
    stuck: int = 0
    duplicated: int = 0
    told: Counter[str] = field(default_factory=Counter)
    """Turns that did not give their answer and say why, where the scenario's guarantee allows it."""
    repeated: int = 0
    """Attempts that took effect again behind a loss of the engine's data, where the guarantee allows it."""
    submitted_again: int = 0
    effects: int = 0
    second_attempts: int = 0
    resets: int = 0
    readers: int = 0
    events_read: int = 0
    log_kilobytes: float = 0.0
    crashed: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def is_sound(self) -> bool:
        return not self.wrong and not self.crashed and (self.lost, self.stuck, self.duplicated) == (0, 0, 0)

    def __str__(self) -> str:
        blows = ", ".join(f"{count} {name}" for name, count in sorted(self.blows.items()))
        told = "; ".join(f"{count} {kind}" for kind, count in self.told.most_common())
        head = (
            f"{self.scenario}: {self.turns} turns in {self.seconds:.1f} s, {self.finished} with their answer; "
            f"{sum(self.blows.values())} faults ({blows}); lost {self.lost}, duplicated {self.duplicated}, stuck "
            f"{self.stuck}; told as lost {self.told.total()}{f' ({told})' if told else ''}, repeated {self.repeated}; "
            f"{self.effects} effects, {self.second_attempts} calls attempted again, {self.resets} steps reset, "
            f"{self.submitted_again} submissions tried again; {self.readers} readers saw {self.events_read} events in "
            f"order; {self.log_kilobytes:.0f} kB of logs"
        )
        return "\n".join([head, *self.crashed[:10], *self.wrong[:40]])
