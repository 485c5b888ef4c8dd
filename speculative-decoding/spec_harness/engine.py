"""One request to a serving engine that speaks OpenAI's API, streamed: what came, when, and what the engine says of its drafts.

Standard library alone. Nothing is sent anywhere but to the address given; a key is read from the environment
(OPENAI_API_KEY) and goes into no file. There are no retries: what fails is a failed request, counted as one.
"""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple
from urllib.parse import urlsplit

from spec_common import UserError, Watch, first_line

import torch

CPU = torch.device("cpu")  # nothing to wait for: the clock of a client
LONGEST_BODY = 300  # characters of an engine's refusal that are kept
# Fields that ask for more than OpenAI's API knows: ids of the text, so that outputs can be compared token by token. An engine
# that refuses them is asked without.
EXTRAS = {"return_token_ids": True, "stream_options": {"include_usage": True}}


class Engine(NamedTuple):
    """Where requests go and how they are put."""

    host: str
    port: int
    secure: bool
    prefix: str  # of the path, before /v1
    model: str = ""
    chat: bool = False
    timeout: float = 60.0  # seconds without a word after which a request has failed
    extras: bool = True

    @property
    def name(self) -> str:
        return f"{self.host}:{self.port}{self.prefix}"


@dataclass
class Answer:
    """What came of one request. `arrivals`: seconds from its sending to each event that brought text; `whole_s`: to its end."""

    name: str
    arrivals: list[float] = field(default_factory=list)
    whole_s: float = 0.0
    text: str = ""
    ids: list[int] = field(default_factory=list)  # where the engine gives them, else empty
    usage: dict | None = None  # as the engine counts: prompt_tokens, completion_tokens
    drafted: dict | None = None  # proposed, accepted, rounds, of this request
    finish: str | None = None
    error: str | None = None

    @property
    def tokens(self) -> int:
        """Tokens of the answer: as the engine says, else its ids, else an event is taken for one."""
        said = (self.usage or {}).get("completion_tokens")
        return said if said is not None else len(self.ids) or len(self.arrivals)

    @property
    def ttft_s(self) -> float | None:
        return self.arrivals[0] if self.arrivals else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds a token after the first."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1) if self.arrivals and self.tokens > 1 else None

    @property
    def itl_s(self) -> list[float]:
        """The gaps between events; tokens that arrive together are one."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


def engine_at(url: str, flag: str, **more) -> Engine:
    """The engine at an address such as http://localhost:8000 (with or without /v1). Raises UserError."""
    parts = urlsplit(url if "//" in url else f"http://{url}")
    try:
        port = parts.port or (443 if parts.scheme == "https" else 80)
    except ValueError as error:
        raise UserError(f"{flag} {url}: {error}; write it as http://localhost:8000") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{flag} {url}: no address of an engine; write it as http://localhost:8000")
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Engine(parts.hostname, port, parts.scheme == "https", prefix, **more)


# ------------------------------------------------------------------------------------------------------------ the wire


def connect(engine: Engine) -> http.client.HTTPConnection:
    kind = http.client.HTTPSConnection if engine.secure else http.client.HTTPConnection
    return kind(engine.host, engine.port, timeout=engine.timeout)


def headers() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    return {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}


def fetch(engine: Engine, path: str) -> bytes:
    """What a GET gives. Raises OSError, http.client.HTTPException."""
    wire = connect(engine)
    try:
        wire.request("GET", engine.prefix + path, headers=headers())
        response = wire.getresponse()
        body = response.read()
        if response.status != 200:
            raise OSError(f"HTTP {response.status}")
        return body
    finally:
        wire.close()


def events(response) -> Iterator[dict]:
    """The events of a stream (server-sent events): the JSON behind `data:`, up to [DONE]. Raises ValueError for what is
    none, EOFError where the stream ends before that."""
    held: list[str] = []
    for line in iter(response.readline, b""):
        text = line.decode("utf-8").rstrip("\r\n")
        if text.startswith("data:"):
            held.append(text[5:].removeprefix(" "))
        elif not text and held:
            whole, held = "\n".join(held), []
            if whole == "[DONE]":
                return
            yield json.loads(whole)
    if held != ["[DONE]"]:
        raise EOFError("the stream ended before it was done")


def request_of(engine: Engine, prompt: str, n_tokens: int) -> tuple[str, dict]:
    """(path, body): greedy, streamed, up to `n_tokens`."""
    asked = {"messages": [{"role": "user", "content": prompt}]} if engine.chat else {"prompt": prompt}
    body = {"model": engine.model, **asked, "max_tokens": n_tokens, "temperature": 0, "stream": True}
    return ("/v1/chat/completions" if engine.chat else "/v1/completions"), body | (EXTRAS if engine.extras else {})


# --------------------------------------------------------------------------------------------------- what an event says


def ids_of(choice: dict) -> list[int]:
    """The ids of an event's tokens: vLLM's `token_ids`, or tokens spelled "token_id:17" among the log-probabilities."""
    if isinstance(choice.get("token_ids"), list):
        return [int(one) for one in choice["token_ids"]]
    logs = choice.get("logprobs") or {}
    spelled = logs.get("tokens") or [one.get("token") for one in logs.get("content") or []]
    return [int(one.removeprefix("token_id:")) for one in spelled if str(one).startswith("token_id:")]


# (proposed, accepted, rounds) by the names of vLLM, SGLang (today's, then older), llama.cpp. None of them counts the target's
# own token among the accepted; SGLang's spec_accept_length does, so it is not read.
DRAFT_NAMES = (
    ("num_draft_tokens", "num_accepted_draft_tokens", "num_spec_steps"),
    ("spec_num_proposed_drafts", "spec_num_correct_drafts", "spec_verify_ct"),
    ("spec_draft_token_num", "spec_accept_token_num", "spec_verify_ct"),
    ("draft_n", "draft_n_accepted", None),
)


def drafted_of(event: dict) -> dict | None:
    """What an event says of the request's drafts, in this suite's words; None where it says nothing."""
    metrics = (event.get("metrics") or {}).get("speculative_decoding")
    choices = event.get("choices") or [{}]
    for block in (metrics, event.get("meta_info"), choices[0].get("meta_info"), event.get("timings")):
        for proposed, accepted, rounds in DRAFT_NAMES:
            if isinstance(block, dict) and block.get(proposed) is not None and block.get(accepted) is not None:
                return {"proposed": block[proposed], "accepted": block[accepted], "rounds": block.get(rounds)}
    return None


def take(answer: Answer, event: dict) -> bool:
    """Put an event into the answer; whether it brought text."""
    if event.get("error"):
        said = event["error"]
        raise ValueError(str(said.get("message", said) if isinstance(said, dict) else said))
    answer.usage = event.get("usage") or answer.usage
    answer.drafted = drafted_of(event) or answer.drafted
    brought = False
    for choice in (event.get("choices") or [])[:1]:
        piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        ids = ids_of(choice)
        answer.text, answer.finish = answer.text + piece, choice.get("finish_reason") or answer.finish
        answer.ids += ids
        brought = bool(piece or ids)
    return brought


def ask(engine: Engine, name: str, prompt: str, n_tokens: int, longest_s: float) -> Answer:
    """Send one request and read its stream to the end. What goes wrong is in the answer's `error`; what came before stays."""
    answer, watch, marks = Answer(name), Watch(CPU), []
    wire = connect(engine)
    try:
        path, body = request_of(engine, prompt, n_tokens)
        wire.request("POST", engine.prefix + path, json.dumps(body), headers())
        response = wire.getresponse()
        if response.status != 200:
            raise OSError(f"HTTP {response.status}: {' '.join(response.read(4096).decode('utf-8', 'replace').split())[:LONGEST_BODY]}")
        spent = 0.0
        for event in events(response):
            watch("event")
            spent += watch.laps[-1][1]
            marks.append(take(answer, event))
            if spent > longest_s:
                raise TimeoutError(f"not done after {longest_s:g} s")
    except (OSError, ValueError, EOFError, http.client.HTTPException, KeyError, TypeError, AttributeError) as error:
        answer.error = first_line(error)
    finally:
        wire.close()
    watch("end")
    times = list(accumulate(watch.seconds()))
    answer.arrivals = [time for time, brought in zip(times, marks, strict=False) if brought]
    answer.whole_s = times[-1]
    if answer.error is None and not answer.arrivals:
        answer.error = "no text in the answer"
    return answer


def refused_extras(answer: Answer) -> bool:
    """Whether a request was turned down for its form: an engine that does not know our further fields."""
    return answer.error is not None and answer.error.startswith(("HTTP 400", "HTTP 422"))


# -------------------------------------------------------------------------------------------------------------- totals


SPEC_TOTALS = {
    "vllm:spec_decode_num_drafts": "rounds",
    "vllm:spec_decode_num_draft_tokens": "proposed",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
}


def totals_of(page: str) -> dict[str, float]:
    """The counters of vLLM's /metrics that speak of drafts, added up over their labels."""
    found: dict[str, float] = {}
    for line in page.splitlines():
        name, _, value = line.rpartition(" ")
        plain = name.partition("{")[0].removesuffix("_total")
        if plain in SPEC_TOTALS and not line.startswith("#"):
            found[SPEC_TOTALS[plain]] = found.get(SPEC_TOTALS[plain], 0.0) + float(value)
    return found


def read_totals(engine: Engine) -> dict[str, float]:
    """Those counters now; empty where the engine has none."""
    try:
        return totals_of(fetch(engine, "/metrics").decode("utf-8", "replace"))
    except (OSError, ValueError, http.client.HTTPException):
        return {}


def since(after: dict, before: dict) -> dict | None:
    """What a run added to the totals; None where the engine has none, or was started anew in between."""
    if not after or any(after.get(name, 0) < value for name, value in before.items()):
        return None
    return {name: value - before.get(name, 0) for name, value in after.items()}
