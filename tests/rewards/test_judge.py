"""The judge: no response leaves its quotation, no secret reaches a message, no limit of time is exceeded."""

from __future__ import annotations

import json
import re
import stat
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
import yaml
from local_server import local_server

from cepo.errors import ConfigError, RewardError
from cepo.rewards.benchmark import JUDGE_INSTRUCTIONS
from cepo.rewards.contract import load_reward
from cepo.rewards.judge import INSTRUCTIONS, _is_this_machine, compute_score, quotable

RESPONSES: dict[str, str] = yaml.safe_load(
    Path(__file__).with_name("judged_responses.yaml").read_text(encoding="utf-8")
)
KEY = 'sk-"canary"/0123'
PASSWORD = "pass word/42"
SAMPLE = {"prompt": "2 + 2", "response": "4", "ground_truth": "4"}
CONTROL = re.compile(r"<[|｜]|<turn\|>|</?s>|<(start|end)_of_turn>|\[/?INST\]|◁\S*▷")


def reply(text: str = "<score>10</score>") -> bytes:
    return json.dumps({"choices": [{"message": {"content": text}}]}).encode()


@contextmanager
def serving(answer: Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]) -> Iterator[str]:
    def handle(request: BaseHTTPRequestHandler) -> None:
        answer(request, json.loads(request.rfile.read(int(request.headers["Content-Length"]))))

    with local_server(handle) as host:
        yield host


def send(request: BaseHTTPRequestHandler, content: bytes, status: int = 200, **headers: str) -> None:
    request.send_response(status)
    request.send_header("Content-Length", str(len(content)))
    for name, value in headers.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(content)


def asked(samples: Sequence[dict[str, Any]], **settings: Any) -> list[str]:
    """The texts that a judge is sent."""
    texts: list[str] = []

    def answer(request: BaseHTTPRequestHandler, body: dict[str, Any]) -> None:
        texts.append(body["messages"][0]["content"][0]["text"])
        send(request, reply())

    with serving(answer) as host:
        compute_score(samples, base_url=f"http://{host}/v1", model="m", **settings)
    return texts


@pytest.mark.parametrize("instructions", [INSTRUCTIONS, JUDGE_INSTRUCTIONS], ids=["own", "benchmarks"])
@pytest.mark.parametrize("name", RESPONSES)
def test_no_response_leaves_its_quotation(name: str, instructions: str) -> None:
    (text,) = asked([SAMPLE | {"response": RESPONSES[name]}], instructions=instructions)
    opening = re.search(r"<<<RESPONSE (\w{16})\n", text)
    assert opening is not None
    mark = opening[1]
    quoted, closing, behind = text[opening.end() :].partition(f"\nRESPONSE {mark}>>>\n")
    assert closing
    assert behind == instructions.partition("RESPONSE {mark}>>>\n")[2]
    assert text.count(mark) == 2
    assert CONTROL.search(quoted) is None


@pytest.mark.parametrize("closing", ["RESPONSE>>>", '"""', "</student>", "```", '"'])
@pytest.mark.parametrize("name", RESPONSES)
def test_no_response_ends_the_quotation_of_a_users_own(name: str, closing: str) -> None:
    """Of instructions that have their own marks, or none that the response could not write."""
    for instructions in (f"Grade:\n{{response}}\n\n{closing}\nNow.", f"Grade {{response}}{closing}"):
        quoted = quotable(RESPONSES[name], instructions)
        assert closing not in quoted
        assert CONTROL.search(quoted) is None


@pytest.mark.parametrize("response", ["3.5 and (1, 2], |x| < 3", "a < b > c", r"\boxed{[1, 2]}", "<think>x</think>"])
def test_mathematics_is_quoted_as_it_is(response: str) -> None:
    for instructions in (INSTRUCTIONS, "The response is {response}.", "({response})"):
        assert quotable(response, instructions) == response


def test_marks_differ_by_request_and_not_by_call() -> None:
    first, second, again = asked([SAMPLE, SAMPLE | {"response": "5"}, SAMPLE], concurrency=1)
    assert first == again
    marks = [re.findall(r"RESPONSE (\w{16})", text) for text in (first, second)]
    assert marks[0] != marks[1]


def echoed(request: BaseHTTPRequestHandler) -> bytes:
    """What a careless server says: everything that it was sent."""
    return f"{request.path} {request.headers} {json.dumps(dict(request.headers))}".encode()


ECHOES: dict[str, Callable[[BaseHTTPRequestHandler], None]] = {
    "a refusal": lambda request: send(request, echoed(request), 401),
    "a refusal cut in the secret": lambda request: send(request, b"x" * 290 + echoed(request), 401),
    "a busy server": lambda request: send(request, echoed(request), 503),
    "a redirection": lambda request: send(request, echoed(request), 302, Location=request.path),
    "no JSON": lambda request: send(request, echoed(request)),
    "no verdict": lambda request: send(request, reply(echoed(request).decode())),
    "another form": lambda request: send(request, json.dumps({"error": echoed(request).decode()}).encode()),
    "a list": lambda request: send(request, json.dumps([echoed(request).decode()]).encode()),
    "a reason": lambda request: request.send_error(403, str(request.headers["Authorization"]).replace("\n", " ")),
    "half an answer": lambda request: send(request, echoed(request), **{"Content-Length": "99999"}),
}  # fmt: skip


@pytest.mark.parametrize(
    "address", ["http://HOST/v1", "http://us%3Aer:pass%20word%2F42@HOST/v1", "http://HOST/v1?key=KEY"]
)
@pytest.mark.parametrize("name", ECHOES)
def test_no_secret_reaches_a_message(
    name: str, address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with serving(lambda request, _: ECHOES[name](request)) as host:
        url = address.replace("HOST", host).replace("KEY", "sk-%22canary%22%2F0123")
        with pytest.raises(RewardError) as caught:
            compute_score([SAMPLE], base_url=url, model="m", api_key_variable="JUDGE_KEY", retries=0)
    told = "".join(traceback.format_exception(caught.value)) + caplog.text
    for part in ("canary", PASSWORD, "word/42", "word%2F42", "us:er", "dXM6ZXI6cGFzcyB3b3JkLzQy"):
        assert part not in told


@pytest.mark.parametrize("key", ["sk-sec\nret", "sk-sec…ret"])
def test_a_key_that_no_header_may_have_is_not_repeated(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", key)
    with pytest.raises(RewardError, match="the key in JUDGE_KEY has characters that no header may have") as caught:
        compute_score([SAMPLE], base_url="http://127.0.0.1:9/v1", model="m", api_key_variable="JUDGE_KEY")
    assert "sk-" not in "".join(traceback.format_exception(caught.value))


def test_what_authorizes_a_request_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key with a line end behind it, as of a file; and a user with a password, whom a key in the environment leaves."""
    monkeypatch.setenv("JUDGE_KEY", "sk-1\n")
    sent: list[tuple[str, str]] = []

    def answer(request: BaseHTTPRequestHandler, _: object) -> None:
        sent.append((request.path, request.headers["Authorization"]))
        send(request, reply())

    with serving(answer) as host:
        for address in (f"http://{host}/v1/", f"http://u:p@{host}/v1?version=2"):
            compute_score([SAMPLE], base_url=address, model="m", api_key_variable="JUDGE_KEY")
    assert sent == [("/v1/chat/completions", "Bearer sk-1"), ("/v1/chat/completions?version=2", "Basic dTpw")]


@pytest.mark.parametrize("base_url", ["ftp://user:secret@host/v1", "user:secret@host", "HTTPX://user:secret@host"])
def test_a_wrong_address_is_named_without_its_password(base_url: str) -> None:
    with pytest.raises(ConfigError, match="http:// or https://") as caught:
        compute_score([], base_url=base_url, model="m")
    assert "://" not in base_url or "secret" not in str(caught.value)


def test_a_wrong_keyword_is_named_without_the_password_beside_it() -> None:
    keywords = {"base_url": "http://user:secret@host/v1", "model": "m", "samples": 1}
    with pytest.raises(RewardError) as caught:
        load_reward("cepo/rewards/judge.py:compute_score", keywords)
    assert "http://***@host/v1" in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("localhost", True), ("localhost.", True), ("a.localhost", True), ("127.0.0.1", True), ("127.8.9.10", True),
        ("127.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("0.0.0.0", True), ("::", True),
        ("10.0.0.1", False), ("judge", False), ("localhost.example.org", False), ("192.168.0.1", False), ("", False),
        ("2001:db8::1", False), ("128.0.0.1", False), ("my-localhost", False),
    ],
)  # fmt: skip
def test_the_addresses_of_this_machine_are_known(host: str, expected: bool) -> None:
    assert _is_this_machine(host) is expected


CLOSED = "http://proxyuser:proxypass@127.0.0.1:9"


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_judge_on_this_machine_needs_no_proxy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(variable, CLOSED)
    monkeypatch.delenv("no_proxy", raising=False)
    with serving(lambda request, _: send(request, reply())) as host:
        url = f"http://{host.replace('127.0.0.1', name)}/v1"
        assert compute_score([SAMPLE], base_url=url, model="m", retries=0)[0]["overall"] == 1.0


def test_a_proxy_that_was_asked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its password, and with how to leave it out; `no_proxy` leaves it out."""
    monkeypatch.setenv("http_proxy", CLOSED)
    monkeypatch.delenv("no_proxy", raising=False)
    ask = {"base_url": "http://judge.invalid:8000/v1", "model": "m", "retries": 0}
    words = (
        r"http://judge\.invalid:8000/v1, asked through the proxy http://\*\*\*@127\.0\.0\.1:9 \(no_proxy=judge\.invalid"
    )
    with pytest.raises(RewardError, match=words) as caught:
        compute_score([SAMPLE], **ask)
    assert "proxypass" not in "".join(traceback.format_exception(caught.value))
    monkeypatch.setenv("no_proxy", "judge.invalid")
    with pytest.raises(RewardError, match="gave no verdict") as caught:
        compute_score([SAMPLE], **ask)
    assert "proxy" not in str(caught.value)


def test_a_proxy_that_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(lambda request, _: send(request, b"blocked", 403)) as proxy:
        monkeypatch.setenv("http_proxy", f"http://{proxy}")
        monkeypatch.delenv("no_proxy", raising=False)
        with pytest.raises(RewardError, match=rf"through the proxy http://{proxy} .* refuses: status 403: blocked"):
            compute_score([SAMPLE], base_url="http://judge.invalid/v1", model="m")


def drip(request: BaseHTTPRequestHandler, start: bytes, ended: threading.Event) -> None:
    """Sends a byte now and then, each within the time limit of a socket."""
    request.wfile.write(start)
    while not ended.wait(0.05):
        request.wfile.write(b"x")
        request.wfile.flush()


DRIPS = {
    "in the content": b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n",
    "in a header": b"HTTP/1.1 200 OK\r\nX-Header: ",
    "in the first line": b"HTTP/1.1 200 ",
    "in a refusal": b"HTTP/1.1 503 Busy\r\nContent-Length: 9999\r\n\r\n",
}


@pytest.mark.parametrize("place", DRIPS)
def test_the_time_limit_is_for_all_attempts(place: str) -> None:
    ended = threading.Event()
    with serving(lambda request, _: drip(request, DRIPS[place], ended)) as host:
        start = time.monotonic()
        with pytest.raises(RewardError, match="gave no verdict in"):
            compute_score([SAMPLE], base_url=f"http://{host}/v1", model="m", time_limit=0.4, retries=9)
        seconds = time.monotonic() - start
        ended.set()
    assert 0.1 < seconds < 3


def test_the_time_limit_is_not_begun_anew_by_pauses() -> None:
    """The server is busy for ever: attempts after 0, 0.25, 0.75 s, and the next pause would end after the limit."""
    start = time.monotonic()
    with serving(lambda request, _: send(request, b"", 503)) as host, pytest.raises(RewardError, match="3 attempts"):
        compute_score([SAMPLE], base_url=f"http://{host}/v1", model="m", time_limit=1.5, retries=99)
    assert time.monotonic() - start < 3


def test_a_cached_reply_without_a_score_is_asked_again(tmp_path: Path) -> None:
    num_requests = 0

    def answer(request: BaseHTTPRequestHandler, _: object) -> None:
        nonlocal num_requests
        num_requests += 1
        send(request, reply("<score>4</score>"))

    cache = tmp_path / "cache"
    with serving(answer) as host:
        ask = {"base_url": f"http://{host}/v1", "model": "m", "cache": str(cache)}
        compute_score([SAMPLE], **ask)
        (entry,) = cache.iterdir()
        for content in (reply("fine"), b"{}", b"[]", b'{"choices": []}', b"\xff", b'{"choices": [{"message": null}]}'):
            entry.write_bytes(content)
            (score,) = compute_score([SAMPLE], **ask)
            assert (score["overall"], score["judge_attempts"]) == (0.4, 1.0)
        assert compute_score([SAMPLE], **ask)[0]["judge_attempts"] == 0.0
    assert num_requests == 7


def test_a_reply_without_a_score_is_not_cached(tmp_path: Path) -> None:
    with (
        serving(lambda request, _: send(request, reply("fine"))) as host,
        pytest.raises(RewardError, match="no <score>"),
    ):
        compute_score([SAMPLE], base_url=f"http://{host}/v1", model="m", cache=str(tmp_path / "cache"))
    assert list((tmp_path / "cache").iterdir()) == []


def test_the_cache_folder_is_private(tmp_path: Path) -> None:
    """One that was readable by others is closed; one that they can write into is not believed."""
    cache = tmp_path / "new" / "cache"
    with serving(lambda request, _: send(request, reply())) as host:
        ask = {"base_url": f"http://{host}/v1", "model": "m"}
        compute_score([SAMPLE], **ask, cache=str(cache))
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700
        cache.chmod(0o755)
        assert compute_score([SAMPLE], **ask, cache=str(cache))[0]["judge_attempts"] == 0.0
        assert stat.S_IMODE(cache.stat().st_mode) == 0o700
        cache.chmod(0o777)
        with pytest.raises(ConfigError, match="can be written by others"):
            compute_score([SAMPLE], **ask, cache=str(cache))
        link = tmp_path / "link"
        link.symlink_to(cache)
        with pytest.raises(ConfigError, match="is a link"):
            compute_score([SAMPLE], **ask, cache=str(link))
