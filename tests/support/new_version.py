"""A process of tomorrow beside those of today, for tests of rolling restarts: `python -m support.new_version JSON`.

JSON is what `support.processes` takes, with a `version`: `fields` has messages with a new optional field that is always
written; `protocol` speaks the next version of the protocol, and puts it into whatever it sends.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import msgspec

NOTE = "written by the version of tomorrow"
KINDS = (
    "StartTurn",
    "ModelTask",
    "ToolTask",
    "ModelReply",
    "ToolReply",
    "ToolProgress",
    "DeliveryLost",
    "CallWaiting",
    "TimerFired",
)


def add_fields() -> None:
    """Give the messages a field of tomorrow. Nothing else of Turnmill may be imported before, but for what they are made of."""
    from turnmill.protocol import messages

    replaced: dict[Any, Any] = {}
    for name in KINDS:
        kind = getattr(messages, name)
        note: Any = msgspec.field(default_factory=lambda: NOTE)
        # Defaults are left out of the wire unless a function makes them.
        new = msgspec.defstruct(
            name,
            [("note", str, note)],
            bases=(kind,),
            frozen=True,
            kw_only=True,
            omit_defaults=True,
            module=messages.__name__,
        )
        replaced[kind] = new
        setattr(messages, name, new)
    for group in ("COMMANDS", "TASKS", "RESULTS", "FINDINGS"):
        setattr(messages, group, tuple(replaced.get(kind, kind) for kind in getattr(messages, group)))


def speak_next_version() -> None:
    """Results say that they are of the next version of the protocol. Tasks of this one are still understood."""
    from turnmill.protocol.streams import Completer

    transact = Completer._transact

    def with_version(completer: Any, completions: Any) -> Any:
        class Engine:
            @staticmethod
            def transact(commands: Any) -> Any:
                said = [(*command, "v", "2") if command[0] == "XADD" else command for command in commands]
                return completer._engine.transact(said)

        substitute: Any = type("Substitute", (), {"_engine": Engine})
        return transact(substitute, completions)

    Completer._transact = with_version  # type: ignore[method-assign]


def main() -> None:
    what = json.loads(sys.argv[1])
    if what.pop("version") == "fields":
        add_fields()
    else:
        speak_next_version()
    sys.argv[1] = json.dumps(what)
    from support.processes import _main

    _main()


if __name__ == "__main__":
    main()
