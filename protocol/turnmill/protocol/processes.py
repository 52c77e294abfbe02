"""Names of processes. An id carries a random suffix: one that came back would hide the dead entries of the former."""

from __future__ import annotations

import os
import secrets


def new_process_id(role: str) -> str:
    return f"{role}-{os.getpid()}-{secrets.token_hex(4)}"
