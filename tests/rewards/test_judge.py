"""The judge: no response leaves its quotation, no secret reaches a message, no limit of time is exceeded."""

from __future__ import annotations

import json
import re
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
from cepo.rewards.judge import INSTRUCTIONS, compute_score, quotable
from cepo.rewards.judge_server import JudgeServer, is_this_machine

HERE = Path(__file__)
RESPONSES: dict[str, str] = yaml.safe_load(
    HERE.with_name("judged_responses.yaml").read_text(encoding="utf-8"),
)
KEY = 'sk-"canary"/0123'
KEY_IN_QUERY = "sk-%22canary%22%2F0123"
PASSWORD = "pass word/42"
SECRETS = ("canary", PASSWORD, "word/42", "word%2F42", "us:er", "dXM6ZXI6cGFzcyB3b3JkLzQy")
SAMPLE = {"prompt": "2 + 2", "response": "4", "ground_truth": "4"}
CONTROL = re.compile(r"<[|｜]|<turn\|>|</?s>|<(start|end)_of_turn>|\[/?INST\]|◁\S*▷")

Request = BaseHTTPRequestHandler
Answer = Callable[[Request, dict[str, Any]], None]


def reply(text: str = "<score>10</score>") -> bytes:
    content = {"choices": [{"message": {"content": text}}]}
    return json.dumps(content).encode()


def send(request: Request, content: bytes, status: int = 200, **headers: str) -> None:
    request.send_response(status)
    request.send_header("Content-Length", str(len(content)))
    for name, value in headers.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(content)


def approve(request: Request, _: object) -> None:
    send(request, reply())


@contextmanager
def serving(answer: Answer) -> Iterator[str]:
    """Yields the host of a server that answers so; its handler also gets the body of a request."""

    def handle(request: Request) -> None:
        length = int(request.headers["Content-Length"])
        body = json.loads(request.rfile.read(length))
        answer(request, body)

    with local_server(handle) as host:
        yield host


def judged(host: str, sample: dict[str, str] = SAMPLE, **settings: Any) -> dict[str, float]:
    settings.setdefault("base_url", f"http://{host}/v1")
    (score,) = compute_score([sample], model="m", **settings)
    return score


def all_text(error: BaseException) -> str:
    """The error with all that a traceback shows of its causes."""
    return "".join(traceback.format_exception(error))


def asked(samples: Sequence[dict[str, str]], **settings: Any) -> list[str]:
    """The texts that a judge is sent."""
    texts: list[str] = []

    def answer(request: Request, body: dict[str, Any]) -> None:
        (message,) = body["messages"]
        texts.append(message["content"][0]["text"])
        approve(request, body)

    with serving(answer) as host:
        for sample in samples:
            judged(host, sample, **settings)
    return texts


@pytest.mark.parametrize("instructions", [INSTRUCTIONS, JUDGE_INSTRUCTIONS], ids=["own", "benchmarks"])
@pytest.mark.parametrize("name", RESPONSES)
def test_no_response_leaves_its_quotation(name: str, instructions: str) -> None:
    sample = SAMPLE | {"response": RESPONSES[name]}
    (text,) = asked([sample], instructions=instructions)
    opening = re.search(r"<<<RESPONSE (\w{16})\n", text)
    assert opening is not None
    mark = opening[1]
    assert text.count(mark) == 2
    after_opening = text[opening.end() :]
    quoted, _, behind = after_opening.partition(f"\nRESPONSE {mark}>>>\n")
    _, _, expected = instructions.partition("RESPONSE {mark}>>>\n")
    assert behind == expected
    assert CONTROL.search(quoted) is None


@pytest.mark.parametrize("closing", ["RESPONSE>>>", '"""', "</student>", "```", '"'])
@pytest.mark.parametrize("name", RESPONSES)
def test_no_response_ends_the_quotation_of_a_users_own(name: str, closing: str) -> None:
    """Of instructions that have their own marks, in the line of the response or in the next."""
    below = f"Grade:\n{{response}}\n\n{closing}\nNow."
    behind = f"Grade {{response}}{closing}"
    for instructions in (below, behind):
        quoted = quotable(RESPONSES[name], instructions)
        assert closing not in quoted
        assert CONTROL.search(quoted) is None


@pytest.mark.parametrize(
    "response",
    [
        "3.5 and (1, 2], |x| < 3",
        "a < b > c",
        r"\boxed{[1, 2]}",
        "<think>x</think>",
        "f(x) = [x]",
    ],
)
def test_mathematics_is_quoted_as_it_is(response: str) -> None:
    assert quotable(response, INSTRUCTIONS) == response
    assert quotable(response, "The response is {response}.") == response
    assert quotable(response, "({response})") == response


def test_marks_differ_by_request_and_not_by_call() -> None:
    second_sample = SAMPLE | {"response": "5"}
    first, second, again = asked([SAMPLE, second_sample, SAMPLE])
    assert first == again
    mark = re.compile(r"RESPONSE (\w{16})")
    assert mark.findall(first) != mark.findall(second)


ECHOES: dict[str, dict[str, Any]] = {
    "a refusal": {"status": 401},
    "a refusal that is cut within the key": {"status": 401, "before": "x" * 283},
    "a busy server": {"status": 503},
    "a redirection": {"status": 302, "Location": "/elsewhere"},
    "no JSON": {},
    "no verdict": {"as": "content"},
    "another form": {"as": "error"},
    "a list": {"as": "list"},
    "half an answer": {"Content-Length": "99999"},
}
"""What a careless server answers, which repeats all that it was sent."""


def repeat(request: Request, form: dict[str, Any]) -> None:
    headers = {**form}
    status = headers.pop("status", 200)
    kind = headers.pop("as", "text")
    beginning = headers.pop("before", "")
    sent = dict(request.headers)
    text = f"{request.path} {request.headers} {json.dumps(sent)}"
    if beginning:  # up to 300 characters of a message are shown, of the key those that spell its name
        text = f"{beginning}{request.headers['Authorization']} {text}"
    contents = {
        "text": text.encode(),
        "content": reply(text),
        "error": json.dumps({"error": text}).encode(),
        "list": json.dumps([text]).encode(),
    }
    send(request, contents[kind], status, **headers)


ADDRESSES = [
    "http://HOST/v1",
    "http://us%3Aer:pass%20word%2F42@HOST/v1",
    f"http://HOST/v1?key={KEY_IN_QUERY}",
]


@pytest.mark.parametrize("address", ADDRESSES)
@pytest.mark.parametrize("name", ECHOES)
def test_no_secret_reaches_a_message(
    name: str, address: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with serving(lambda request, _: repeat(request, ECHOES[name])) as host:
        base_url = address.replace("HOST", host)
        with pytest.raises(RewardError) as caught:
            judged(host, base_url=base_url, api_key_variable="JUDGE_KEY", retries=0)
    told = all_text(caught.value) + caplog.text
    for secret in SECRETS:
        assert secret not in told


def test_a_password_is_masked_in_each_of_its_spellings() -> None:
    """As the address has it, as it is, and as an address would have all of its signs."""
    server = JudgeServer("http://user:p%41ss%2F42@localhost/v1", "")
    for spelling in ("p%41ss%2F42", "pAss/42", "pAss%2F42"):
        assert "ss" not in server.masked(spelling)


def test_a_secret_within_another_leaves_nothing_of_it() -> None:
    server = JudgeServer("http://ann:annual42@localhost/v1", "")
    assert server.masked("ann has annual42") == "*** has ***"


PROXY = "http://us%3Aer:pass%20word%2F42@"


@pytest.mark.parametrize("name", ECHOES)
def test_no_secret_of_a_proxy_reaches_a_message(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A careless proxy answers with what it was sent, which has its user and password as a token."""
    monkeypatch.delenv("no_proxy", raising=False)
    with serving(lambda request, _: repeat(request, ECHOES[name])) as host:
        monkeypatch.setenv("http_proxy", f"{PROXY}{host}")
        with pytest.raises(RewardError, match=r"\*\*\*") as caught:
            judged(ELSEWHERE, retries=0)
    for secret in SECRETS:
        assert secret not in all_text(caught.value)


def test_a_proxys_password_is_masked_in_each_of_its_spellings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("http_proxy", "http://user:p%41ss%2F42@proxy.invalid")
    server = JudgeServer(f"http://{ELSEWHERE}/v1", "")
    for spelling in ("p%41ss%2F42", "pAss/42", "pAss%2F42"):
        assert "ss" not in server.masked(spelling)


@pytest.mark.parametrize("key", ["sk-can\nary", "sk-can…ary"])
def test_a_key_that_no_header_may_have_is_not_repeated(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", key)
    words = "the key in JUDGE_KEY has characters that no header may have"
    with pytest.raises(RewardError, match=words) as caught:
        judged("127.0.0.1:9", api_key_variable="JUDGE_KEY")
    assert "sk-" not in all_text(caught.value)


def test_what_authorizes_a_request_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key with a line end behind it, as of a file; or the address's user, whose password comes first."""
    monkeypatch.setenv("JUDGE_KEY", "sk-1\n")
    sent: list[tuple[str, str]] = []

    def answer(request: Request, _: object) -> None:
        sent.append((request.path, request.headers["Authorization"]))
        approve(request, _)

    with serving(answer) as host:
        judged(host, base_url=f"http://{host}/v1/", api_key_variable="JUDGE_KEY")
        judged(host, base_url=f"http://u:p@{host}/v1?version=2", api_key_variable="JUDGE_KEY")
    assert sent == [
        ("/v1/chat/completions", "Bearer sk-1"),
        ("/v1/chat/completions?version=2", "Basic dTpw"),
    ]


@pytest.mark.parametrize(
    "base_url",
    [
        "ftp://user:c4nary@host/v1",
        "HTTPX://user:c4nary@host",
        "http://user:c4nary@[::1/v1",
    ],
)
def test_a_wrong_address_is_named_without_its_user(base_url: str) -> None:
    with pytest.raises(ConfigError, match=r"http:// or https://|is not a valid address") as caught:
        compute_score([], base_url=base_url, model="m")
    assert "c4nary" not in all_text(caught.value)


def test_a_wrong_keyword_is_named_without_the_password_beside_it() -> None:
    keywords = {
        "base_url": "http://user:c4nary@host/v1",
        "model": "m",
        "samples": 1,
    }
    with pytest.raises(RewardError, match=r"http://\*\*\*@host/v1") as caught:
        load_reward("cepo/rewards/judge.py:compute_score", keywords)
    assert "c4nary" not in str(caught.value)


OWN_HOSTS = [
    "localhost",
    "localhost.",
    "a.localhost",
    "127.0.0.1",
    "127.8.9.10",
    "127.1",
    "::1",
    "::ffff:127.0.0.1",
    "0.0.0.0",
    "::",
]
OTHER_HOSTS = ["10.0.0.1", "judge", "localhost.example.org", "192.168.0.1", "2001:db8::1", "128.0.0.1", "my-localhost"]


@pytest.mark.parametrize("host", OWN_HOSTS)
def test_the_addresses_of_this_machine_are_known(host: str) -> None:
    assert is_this_machine(host)


@pytest.mark.parametrize("host", ["", *OTHER_HOSTS])
def test_other_addresses_are_not_this_machines(host: str) -> None:
    assert not is_this_machine(host)


CLOSED = "http://proxyuser:proxypass@127.0.0.1:9"
ELSEWHERE = "judge.invalid:8000"


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost"])
def test_a_judge_on_this_machine_needs_no_proxy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(variable, CLOSED)
    monkeypatch.delenv("no_proxy", raising=False)
    with serving(approve) as host:
        score = judged(host.replace("127.0.0.1", name), retries=0)
    assert score["overall"] == 1.0


@pytest.mark.parametrize("proxy", [CLOSED, CLOSED.removeprefix("http://")])
def test_a_proxy_that_was_asked_is_named(proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its password, and with how to leave it out."""
    monkeypatch.setenv("http_proxy", proxy)
    monkeypatch.delenv("no_proxy", raising=False)
    words = (
        r"http://judge\.invalid:8000/v1, asked through the proxy http://\*\*\*@127\.0\.0\.1:9 "
        r"\(no_proxy=judge\.invalid asks it directly\), gave no verdict"
    )
    with pytest.raises(RewardError, match=words) as caught:
        judged(ELSEWHERE, retries=0)
    assert "proxypass" not in all_text(caught.value)
    monkeypatch.setenv("no_proxy", "judge.invalid")
    with pytest.raises(RewardError, match="gave no verdict") as caught:
        judged(ELSEWHERE, retries=0)
    assert "proxy" not in str(caught.value)


def test_a_proxy_that_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("no_proxy", raising=False)
    with serving(lambda request, _: send(request, b"blocked", 403)) as proxy:
        monkeypatch.setenv("http_proxy", f"http://{proxy}")
        words = rf"through the proxy http://{proxy} .* refuses: status 403: blocked"
        with pytest.raises(RewardError, match=words):
            judged(ELSEWHERE)


DRIPS = {
    "in the content": b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n",
    "in a header": b"HTTP/1.1 200 OK\r\nX-Header: ",
    "in the first line": b"HTTP/1.1 200 ",
    "in a refusal": b"HTTP/1.1 503 Busy\r\nContent-Length: 9999\r\n\r\n",
}


def drip(request: Request, start: bytes, ended: threading.Event) -> None:
    """Sends a byte now and then, each within the time limit of a socket."""
    request.wfile.write(start)
    while not ended.wait(0.05):
        request.wfile.write(b"x")
        request.wfile.flush()


@pytest.mark.parametrize("place", DRIPS)
def test_the_time_limit_is_for_all_attempts(place: str) -> None:
    ended = threading.Event()
    with serving(lambda request, _: drip(request, DRIPS[place], ended)) as host:
        start = time.monotonic()
        with pytest.raises(RewardError, match="gave no verdict in"):
            judged(host, time_limit=0.4, retries=9)
        seconds = time.monotonic() - start
        ended.set()
    assert 0.1 < seconds < 3


def test_the_time_limit_is_not_begun_anew_by_pauses() -> None:
    """The server is busy for ever: attempts after 0, 0.25 and 0.75 s; the next pause would end after the limit."""
    start = time.monotonic()
    with serving(lambda request, _: send(request, b"", 503)) as host, pytest.raises(RewardError, match="3 attempts"):
        judged(host, time_limit=1.5, retries=99)
    assert time.monotonic() - start < 3


@pytest.mark.heavy
@pytest.mark.parametrize(("seconds", "words"), [("1", None), ("60", "1 attempts; the last: status 429")])
def test_a_server_is_asked_again_when_it_wants_to_be(seconds: str, words: str | None) -> None:
    """`Retry-After` is in seconds. Without it the second attempt is after 0.25 s; a wish beyond the limit ends them."""
    times: list[float] = []

    def answer(request: Request, _: object) -> None:
        times.append(time.monotonic())
        if len(times) > 1:
            approve(request, _)
        else:
            send(request, b"", 429, **{"Retry-After": seconds})

    with serving(answer) as host:
        if words is None:
            assert judged(host)["judge_attempts"] == 2.0
            assert times[1] - times[0] >= 1.0
            return
        with pytest.raises(RewardError, match=words):
            judged(host, time_limit=5.0)
    assert time.monotonic() - times[0] < 5.0
