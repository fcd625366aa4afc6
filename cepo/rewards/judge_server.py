"""The server of a judge: how it is reached, within a time, and without a secret in any message."""

from __future__ import annotations

import base64
import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import SplitResult, parse_qsl, quote, unquote, urlsplit, urlunsplit

from cepo.files.secrets import MASK, without_secrets

_LARGEST_REPLY = 1_000_000
_LARGEST_ERROR = 10_000


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows no redirection, which would take the key elsewhere."""

    def redirect_request(self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: Any) -> None:
        return None


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    content: bytes


class JudgeServer:
    """A server that is asked directly on this machine, and elsewhere through the proxy of the environment, if there is one.

    `base_url` may have a user with a password, or a query with a key. No message has them, nor `key`.
    """

    def __init__(self, base_url: str, key: str) -> None:
        parts = urlsplit(base_url)
        user, _, host = parts.netloc.rpartition("@")
        path = parts.path.rstrip("/")
        self._url = urlunsplit((parts.scheme, host, f"{path}/chat/completions", parts.query, ""))
        self.address = urlunsplit((parts.scheme, host, path, "", ""))
        self._headers = {"Content-Type": "application/json"}
        secrets = [key, *_secrets_of(user), *(value for _, value in parse_qsl(parts.query))]
        if user:
            self._headers["Authorization"] = f"Basic {_token_of(user)}"
        elif key:
            self._headers["Authorization"] = f"Bearer {key}"
        self.proxy = _proxy_of(parts)
        if self.proxy is not None:
            user_of_proxy, _, _ = urlsplit(self.proxy).netloc.rpartition("@")
            secrets += _secrets_of(user_of_proxy)
        self._secrets = _spellings(secrets)
        proxies = {} if self.proxy is None else {parts.scheme: self.proxy}
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies), _NoRedirect)

    @property
    def name(self) -> str:
        """What messages call it."""
        if self.proxy is None:
            return f"the judge at {self.address}"
        host = urlsplit(self.address).hostname
        return (
            f"the judge at {self.address}, asked through the proxy {without_secrets(self.proxy)} (no_proxy={host} asks it "
            "directly),"
        )

    def masked(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, MASK)
        return text

    def post(self, body: bytes, end: float) -> Answer:
        """Returns the answer to a request; raises `TimeoutError` at the time `end`, another `OSError` or `HTTPException`.

        A thread waits for the server, which may send a byte now and then for ever.
        """
        outcome: list[Answer | Exception] = []

        def wait() -> None:
            try:
                outcome.append(self._posted(body, end))
            except Exception as error:  # raised below, in the thread that asked
                outcome.append(error)

        thread = threading.Thread(target=wait, daemon=True)
        thread.start()
        thread.join(max(end - time.monotonic(), 0))
        if not outcome:
            raise TimeoutError("no answer in time")
        answer = outcome[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _posted(self, body: bytes, end: float) -> Answer:
        request = urllib.request.Request(self._url, body, self._headers)
        try:
            response = self._opener.open(request, timeout=max(end - time.monotonic(), 0.001))
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, dict(error.headers), error.read(_LARGEST_ERROR))
        with response:
            content = b""
            while time.monotonic() < end and len(content) < _LARGEST_REPLY:
                piece = response.read1(_LARGEST_REPLY)
                if not piece:
                    break
                content += piece
            if response.length:  # what its header has announced and it has not sent
                raise http.client.IncompleteRead(b"", response.length)
        return Answer(response.status, dict(response.headers), content)


def _proxy_of(parts: SplitResult) -> str | None:
    """Returns the proxy that the environment names for an address; None for one of this machine."""
    host = parts.hostname or ""
    if is_this_machine(host) or urllib.request.proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    proxy = urllib.request.getproxies().get(parts.scheme)
    return f"http://{proxy}" if proxy and "://" not in proxy else proxy


def is_this_machine(host: str) -> bool:
    """Returns whether a name or an address is one of the loopback interface, or this machine's own name."""
    name = host.rstrip(".")
    if name == "localhost" or name.endswith(".localhost") or name == socket.gethostname().lower():
        return True
    try:
        address = ip_address(name if ":" in name else socket.inet_aton(name))
    except (ValueError, OSError):  # a name
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def _token_of(user: str) -> str:
    """Returns how an address's user with a password is sent, to a server as to a proxy."""
    return base64.b64encode(unquote(user).encode()).decode()


def _secrets_of(user: str) -> list[str]:
    """Returns what no message may have of an address's user with a password; nothing without one."""
    if not user:
        return []
    return [user, *user.split(":", 1), *unquote(user).split(":", 1), _token_of(user)]


def _spellings(secrets: Sequence[str]) -> list[str]:
    """Returns the texts to be masked, the longest first: secrets as they are, in an address, and in JSON."""
    spellings: set[str] = set()
    for secret in secrets:
        spellings |= {secret, quote(secret, safe=""), json.dumps(secret)[1:-1]}
    spellings.discard("")
    return sorted(spellings, key=len, reverse=True)
