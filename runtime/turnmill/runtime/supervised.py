"""Runs the command line as a process that ends when its supervisor does: `python -m turnmill.runtime.supervised PID ...`.

A supervisor that is killed cannot stop its children; the kernel tells them (Linux only).
"""

from __future__ import annotations

import sys

from .embedded_launcher import die_with

if __name__ == "__main__":
    die_with(int(sys.argv[1]))
    del sys.argv[1]
    from .__main__ import main

    main()
