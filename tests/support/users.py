"""Users of the engine with the access lists that `turnmill acl` prints, and what they were refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import redis.asyncio

from turnmill.runtime.acl import AccessLists

PASSWORD = "a-password-of-tests"


class Users:
    """The users of one namespace on a server: `<role>.<namespace>`, or another name in front."""

    def __init__(self, admin: redis.asyncio.Redis, url: str, namespace: str, partitions: int = 4) -> None:
        self._admin = admin
        self._url = url
        self._namespace = namespace
        self._partitions = partitions
        self.names: list[str] = []

    async def add(
        self, role: str, *queues: str, name: str | None = None, password: str = PASSWORD, **options: Any
    ) -> str:
        """Make a user; the URL with its name and password."""
        user = f"{name or role}.{self._namespace}"
        rules = AccessLists(self._namespace, self._partitions, user, queues).of_role(role, **options)
        await self._admin.execute_command("ACL", "SETUSER", user, "reset", "on", f">{password}", *rules.words())
        self.names.append(user)
        return with_user(self._url, user, password)

    async def refusals(self) -> list[str]:
        """What these users tried and were not allowed: `<user>: <reason> <what>`."""
        found = []
        for entry in await self._admin.acl_log():
            fields = {_text(key): _text(value) for key, value in entry.items()}
            if fields["username"] in self.names:
                found.append(f"{fields['username']}: {fields['reason']} {fields['object']}")
        return found

    async def remove(self) -> None:
        for name in self.names:
            await self._admin.execute_command("ACL", "DELUSER", name)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def with_user(url: str, user: str, password: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=f"{user}:{password}@{parts.netloc.rpartition('@')[2]}"))


@asynccontextmanager
async def open_users(url: str, namespace: str, partitions: int = 4) -> AsyncIterator[Users]:
    admin = redis.asyncio.Redis.from_url(url)
    await admin.execute_command("ACL", "LOG", "RESET")
    users = Users(admin, url, namespace, partitions)
    try:
        yield users
    finally:
        await users.remove()
        await admin.aclose()
