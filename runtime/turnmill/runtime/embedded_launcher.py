"""Becomes the embedded server: takes the lock of its directory, ties its life to the owner's, then executes it.

This file is run by its path in a fresh interpreter (`python -I -S embedded_launcher.py ...`), so it needs the standard
library alone and starts in milliseconds. A process of its own is the one safe place for these steps: between fork and
exec of a program with threads hardly anything may be called.

The lock is a file descriptor that the server inherits, so it is held exactly as long as the server lives, however it
ends. The owner's death reaches the server as a signal of the kernel (Linux only).
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys

LOCK_NAME = "server.lock"
# The exit code that means "another server has this directory": EX_TEMPFAIL.
EXIT_LOCKED = 75
# The exit code when the owner was gone before the server began.
EXIT_ORPHANED = 76
NO_OWNER = 0
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Arguments: the data directory, the owner's process id (0 for none), then the server's command line."""
    directory, owner, *command = arguments
    if not take_lock(directory):
        raise SystemExit(EXIT_LOCKED)
    if int(owner) != NO_OWNER:
        die_with(int(owner))
    os.execv(command[0], command)


def take_lock(directory: str) -> bool:
    """Lock the directory for this process and whatever it executes. False where a server has it already."""
    descriptor = os.open(os.path.join(directory, LOCK_NAME), os.O_RDWR | os.O_CREAT, 0o600)  # noqa: PTH118 - starts faster without pathlib
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    os.set_inheritable(descriptor, True)
    return True


def die_with(owner: int) -> None:
    """Ask the kernel for a SIGTERM when the owner's thread that started us ends; survives the exec.

    An owner that died before the kernel knew would never be noticed, hence the look at the parent afterwards.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != owner:
        raise SystemExit(EXIT_ORPHANED)


if __name__ == "__main__":
    main(sys.argv[1:])
