# SPDX-License-Identifier: Apache-2.0
"""Who may ask, and how often: basic authentication against bcrypt hashes, and the rate limit."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from writeback_exporter.web.policy import RateLimit

_SIGNIFICANT = 72
"""Bytes of a password that bcrypt looks at; from version 5 on the library refuses longer ones."""
_KEPT = 128
"""Verdicts of each kind."""


class Busy(Exception):
    """Too many passwords are being checked: one line."""


class Passwords:
    """Checks Authorization headers. bcrypt is slow on purpose: it runs in one thread, for a bounded
    number of clients, and its verdicts are kept.

    They are kept by a digest under a key that is made anew at each start: no password stays in
    memory, and what a look-up compares, and how long it takes, tells a client nothing.
    """

    def __init__(self, checks: int, seconds: float) -> None:
        """At most so many `checks` wait or run, for each of which a client waits `seconds`."""
        self._checks = checks
        self._seconds = seconds
        self._secret = secrets.token_bytes(32)
        self._thread = ThreadPoolExecutor(1, "bcrypt")
        self._checking: dict[bytes, asyncio.Task[bool]] = {}
        # Apart, so that a client that guesses does not push out what is right.
        self._right: dict[bytes, None] = {}
        self._wrong: dict[bytes, None] = {}
        self._users: Mapping[str, str] = {}
        self._hashes: dict[bytes, str] = {}
        """By digest of the user."""

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def check(self, users: Mapping[str, str], header: str) -> bool:
        """Whether a header has one of `users`, of whom there are some, and the password of that
        one. Raises Busy."""
        credentials = _credentials(header)
        if credentials is None:
            return False
        name, password = credentials
        if users is not self._users:
            self._users = users
            self._hashes = {self._digest(u.encode()): hashed for u, hashed in users.items()}
        hashed = self._hashes.get(self._digest(name))
        digest = self._digest(name, (hashed or "").encode(), password)
        if digest in self._right:
            return True
        if digest in self._wrong:
            return False
        check = self._checking.get(digest)
        if check is None:
            if len(self._checking) >= self._checks:
                raise Busy(f"{len(self._checking)} passwords are being checked already")
            check = asyncio.create_task(self._check(digest, hashed, password))
            self._checking[digest] = check
        # It goes on when the client leaves or is told to come again, and its verdict is kept.
        await asyncio.wait([check], timeout=self._seconds)
        if not check.done():
            raise Busy(f"the password was not checked within {self._seconds:g} s")
        return check.result()

    async def _check(self, digest: bytes, hashed: str | None, password: bytes) -> bool:
        # For a user who is not there it is the same work, with the hash of another.
        against = hashed or next(iter(self._users.values()))
        try:
            loop = asyncio.get_running_loop()
            same = await loop.run_in_executor(self._thread, _matches, password, against)
            right = same and hashed is not None
            verdicts = self._right if right else self._wrong
            if len(verdicts) >= _KEPT:
                del verdicts[next(iter(verdicts))]
            verdicts[digest] = None
            return right
        finally:
            del self._checking[digest]

    def _digest(self, *parts: bytes) -> bytes:
        each = b"".join(hashlib.sha256(part).digest() for part in parts)
        return hmac.digest(self._secret, each, "sha256")


def _matches(password: bytes, hashed: str) -> bool:
    import bcrypt  # here, for a start without users need not wait for it

    try:
        return bcrypt.checkpw(password, hashed.encode())
    except ValueError:  # a NUL in the password, for some versions
        return False


def _credentials(header: str) -> tuple[bytes, bytes] | None:
    """User, and of the password what counts (RFC 7617); None where there are none."""
    scheme, _, encoded = header.strip().partition(" ")
    try:
        if scheme.lower() != "basic":
            raise ValueError
        name, colon, password = base64.b64decode(encoded.strip(), validate=True).partition(b":")
    except ValueError:
        return None
    return (name, password[:_SIGNIFICANT]) if colon else None


class RateLimiter:
    """A token bucket for the requests of all clients together."""

    def __init__(self) -> None:
        self._limit: RateLimit | None = None
        self._tokens = 0.0
        self._filled = 0.0

    def admits(self, limit: RateLimit | None) -> bool:
        """Whether one more request is within the limit, which may be another than before."""
        if limit is None:
            return True
        now = time.monotonic()
        if limit != self._limit:
            self._limit, self._tokens, self._filled = limit, limit.burst, now
        gained = (now - self._filled) / limit.interval
        self._tokens = min(self._tokens + gained, limit.burst)
        self._filled = now
        if self._tokens < 1:
            return False
        self._tokens -= 1
        return True
