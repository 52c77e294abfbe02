"""Names of processes. An id carries a random suffix: one that came back would hide the dead entries of the former."""

from __future__ import annotations

import os
import secrets
from urllib.parse import urlsplit

from .keys import valid_name


def new_process_id(role: str, url: str = "") -> str:
    """An id that begins with the engine's user, as `<user>@`, where the URL names one: access lists hold a process to keys
    of that beginning."""
    user = urlsplit(url).username
    owner = f"{user}@" if user and user != "default" and valid_name(user) else f"{role}-"
    return f"{owner}{os.getpid()}-{secrets.token_hex(4)}"
