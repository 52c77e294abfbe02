"""The command `turnmill`, also as `python -m turnmill.runtime`."""

from __future__ import annotations


def main() -> None:
    from .cli.application import run_command_line

    raise SystemExit(run_command_line())


if __name__ == "__main__":
    main()
