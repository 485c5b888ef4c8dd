"""The client against a server whose doings are known: every event is counted, every failure is one, nothing waits for a clock."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from spec_common import UserError

import pytest

import spec_traffic
from spec_harness import engine as wire
from spec_harness.engine import Answer, ask, drafted_of, engine_at, ids_of, since, totals_of
from spec_harness.traffic import Load, arrivals, compared, percentile, run_load, summary_of

WORDS = ["one ", "two ", "three ", "four ", "five ", "six ", "seven ", "eight "]


class Server(ThreadingHTTPServer):
    """An engine of OpenAI's API. `behave`: what it does with each request, by the number of its arrival (the last for all that
    follow); `per_event`: tokens in one; `sent`: [(prompt, events)] of what it did."""

    daemon_threads = True
    request_queue_size = 128  # connections that wait: more than a test opens at once

    def __init__(self, behave=("well",), per_event=1, strict=False, drafts=True, shift=0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.behave, self.per_event, self.strict, self.drafts, self.shift = list(behave), per_event, strict, drafts, shift
        self.sent, self.bodies, self.lock, self.rounds = [], [], threading.Lock(), 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/v1/models":
            return self.answer(200, b'{"data": [{"id": "tiny"}]}')
        if self.path == "/metrics" and self.server.drafts:
            n = self.server.rounds
            return self.answer(200, (
                "# HELP vllm:spec_decode_num_drafts_total x\n"
                f'vllm:spec_decode_num_drafts_total{{engine="0"}} {n}.0\nvllm:spec_decode_num_draft_tokens_total{{engine="0"}} {3 * n}.0\n'
                f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {2 * n}.0\n'
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {n}.0\n').encode())  # fmt: skip
        return self.answer(404, b"")

    def chunk(self, text: str) -> None:
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def event(self, what) -> None:
        self.chunk(f"data: {what if isinstance(what, str) else json.dumps(what)}\r\n\r\n")

    def do_POST(self):
        server, body = self.server, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            number = len(server.bodies)
            server.bodies.append((self.path, body, self.headers.get("Authorization")))
        does = server.behave[min(number, len(server.behave) - 1)]
        if server.strict and "return_token_ids" in body:
            return self.answer(400, b'{"error": {"message": "unknown field return_token_ids"}}')
        if does in ("429", "500"):
            return self.answer(int(does), b'{"error": "too\nmany"}')
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        words = WORDS[: body["max_tokens"]]
        groups = [words[at : at + server.per_event] for at in range(0, len(words), server.per_event)]
        self.chunk(": a comment that keeps the line open\n\n")
        for at, group in enumerate(groups):
            if does == "drops" and at == 2:
                self.close_connection = True
                return None
            piece, ids = "".join(group), [WORDS.index(word) + server.shift for word in group]
            said = {"delta": {"content": piece}} if "messages" in body else {"text": piece}
            more = {"token_ids": ids} if "return_token_ids" in body else {}
            self.event({"choices": [{"index": 0, **said, **more, "finish_reason": None}]})
            if does == "errs" and at == 1:
                self.event({"error": {"message": "out of blocks"}})
        usage = {"prompt_tokens": 5, "completion_tokens": {"wrong usage": 99}.get(does, len(words))}
        metrics = {"metrics": {"speculative_decoding": {"num_draft_tokens": 9, "num_accepted_draft_tokens": 6, "num_spec_steps": 3}}}
        if does != "no usage":
            self.event({"choices": [], "usage": usage, **(metrics if server.drafts else {})})
        with server.lock:  # before the client hears that it is done, so that a test may look at once
            server.rounds += 3
            server.sent.append((body.get("prompt") or body["messages"][0]["content"], len(groups)))
        self.event("[DONE]")
        self.chunk("")  # the last chunk is an empty one
        return None


@pytest.fixture
def serve():
    started = []

    def start(**options) -> Server:
        server = Server(**options)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.shutdown()
        server.server_close()


def at(server: Server, **more):
    return engine_at(server.url, "--url", model="tiny", timeout=5.0, **more)


# --------------------------------------------------------------------------------------------------------- one request


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("per_event", [1, 3])
def test_an_answer_holds_what_the_server_sent(serve, per_event, chat):
    server = serve(per_event=per_event)
    answer = ask(at(server, chat=chat), "a", "hello", 8, 60)
    assert answer.error is None and answer.text == "".join(WORDS) and answer.ids == list(range(8))
    assert len(answer.arrivals) == server.sent[0][1] == -(-8 // per_event)
    assert answer.tokens == 8 and answer.usage["prompt_tokens"] == 5
    assert answer.drafted == {"proposed": 9, "accepted": 6, "rounds": 3}
    assert answer.arrivals == sorted(answer.arrivals) and answer.whole_s >= answer.arrivals[-1] >= answer.ttft_s > 0
    assert answer.tpot_s == pytest.approx((answer.arrivals[-1] - answer.arrivals[0]) / 7)
    assert sum(answer.itl_s) == pytest.approx(answer.arrivals[-1] - answer.arrivals[0])
    path, body, _ = server.bodies[0]
    assert path == ("/v1/chat/completions" if chat else "/v1/completions") and body["temperature"] == 0 and body["max_tokens"] == 8


@pytest.mark.parametrize(
    ("does", "error", "text"),
    [
        ("429", "HTTP 429", ""),
        ("500", "HTTP 500", ""),
        ("drops", "", "one two "),
        ("errs", "out of blocks", "one two "),
    ],
)
def test_what_fails_is_said_and_what_came_before_stays(serve, does, error, text):
    answer = ask(at(serve(behave=[does])), "a", "hello", 8, 60)
    assert answer.error is not None and error in answer.error and "\n" not in answer.error
    assert answer.text == text and len(answer.arrivals) == len(text.split())


def test_an_engine_that_is_not_there_is_a_failed_request():
    answer = ask(engine_at("127.0.0.1:9", "--url", model="x", timeout=2.0), "a", "hello", 8, 60)
    assert "refused" in answer.error.lower() and answer.arrivals == []


def test_a_request_is_bounded_in_time(serve):
    answer = ask(at(serve()), "a", "hello", 8, 0.0)
    assert answer.error == "not done after 0 s" and len(answer.arrivals) == 1


def test_tokens_are_the_engines_count_then_ids_then_events(serve):
    assert ask(at(serve(behave=["wrong usage"])), "a", "x", 8, 60).tokens == 99  # as it says: the server's word
    assert ask(at(serve(behave=["no usage"], per_event=3)), "a", "x", 8, 60).tokens == 8
    assert ask(at(serve(behave=["no usage"], per_event=3), extras=False), "a", "x", 8, 60).tokens == 3


def test_the_key_comes_from_the_environment(serve, monkeypatch):
    server = serve()
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    ask(at(server), "a", "x", 1, 60)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    ask(at(server), "a", "x", 1, 60)
    assert [key for _, _, key in server.bodies] == [None, "Bearer secret"]


@pytest.mark.parametrize(
    ("event", "found"),
    [
        ({"choices": [], "metrics": {"speculative_decoding": {"num_draft_tokens": 8, "num_accepted_draft_tokens": 5, "num_spec_steps": 2}}}, (8, 5, 2)),
        ({"meta_info": {"spec_num_proposed_drafts": 8, "spec_num_correct_drafts": 5, "spec_verify_ct": 2, "spec_accept_length": 3.5}}, (8, 5, 2)),
        ({"choices": [{"meta_info": {"spec_draft_token_num": 8, "spec_accept_token_num": 5, "spec_verify_ct": 2}}]}, (8, 5, 2)),
        ({"choices": [], "timings": {"draft_n": 8, "draft_n_accepted": 5, "predicted_n": 7}}, (8, 5, None)),
        ({"choices": [], "timings": {"predicted_n": 7}}, None),
        ({"choices": [], "metrics": {"speculative_decoding": None}}, None),
    ],
)
def test_what_engines_say_of_drafts_is_read_by_their_names(event, found):
    assert drafted_of(event) == (found and dict(zip(("proposed", "accepted", "rounds"), found, strict=True)))


def test_ids_are_read_from_either_place():
    assert ids_of({"token_ids": [3, 4]}) == [3, 4]
    assert ids_of({"logprobs": {"tokens": ["token_id:3", "token_id:4"]}}) == [3, 4]
    assert ids_of({"logprobs": {"content": [{"token": "token_id:3"}, {"token": "x"}]}}) == [3]
    assert ids_of({"text": "x"}) == []


@pytest.mark.parametrize("url", ["ftp://x", "http://", "http://x:port", "http://x:99999"])
def test_an_address_that_is_none_is_one_line(url):
    with pytest.raises(UserError, match="--url .*write it as http://localhost:8000"):
        engine_at(url, "--url")


def test_an_address_may_come_with_v1_or_without():
    for url in ("localhost:8000", "http://localhost:8000/", "http://localhost:8000/v1", "http://localhost:8000/v1/"):
        assert engine_at(url, "--url")[:4] == ("localhost", 8000, False, "")
    assert engine_at("https://host/api/v1", "--url")[:4] == ("host", 443, True, "/api")


def test_totals_are_added_up_and_taken_from_what_was_before():
    page = 'vllm:spec_decode_num_drafts_total{engine="0"} 4.0\nvllm:spec_decode_num_drafts_total{engine="1"} 3.0\nother 9\n'
    assert totals_of(page) == {"rounds": 7.0}
    assert since({"rounds": 7.0, "accepted": 2.0}, {"rounds": 4.0}) == {"rounds": 3.0, "accepted": 2.0}
    assert since({"rounds": 1.0}, {"rounds": 4.0}) is None and since({}, {}) is None


# -------------------------------------------------------------------------------------------------------- many requests


REQUESTS = [(f"r{at}", f"prompt {at}") for at in range(24)]


@pytest.mark.parametrize("load", [Load(concurrency=1), Load(concurrency=8), Load(rate=400.0)])
def test_every_request_is_sent_once_and_answers_stand_in_order(serve, load):
    server = serve(per_event=2)
    answers, seconds = run_load(lambda name, prompt: ask(at(server), name, prompt, 8, 60), REQUESTS, load)
    assert [answer.name for answer in answers] == [name for name, _ in REQUESTS]
    assert sorted(prompt for prompt, _ in server.sent) == sorted(prompt for _, prompt in REQUESTS)
    row = summary_of(answers, seconds, None, None)
    assert (row["completed"], row["failed"], row["total_output_tokens"]) == (24, 0, 24 * 8)
    assert sum(len(answer.arrivals) for answer in answers) == sum(events for _, events in server.sent)
    assert row["output_throughput"] == 24 * 8 / seconds and row["goodput"] is None


def test_no_more_than_asked_for_are_in_flight():
    inside, most, lock = [0], [0], threading.Lock()
    gate = threading.Barrier(4, timeout=10)

    def send(name, prompt):
        with lock:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
        gate.wait()  # four at once, or this breaks
        with lock:
            inside[0] -= 1
        return Answer(name, [0.1], 0.1)

    run_load(send, REQUESTS, Load(concurrency=4))
    assert most[0] == 4


def test_failures_are_counted_and_a_dead_engine_ends_the_arm():
    calls = []

    def send(name, prompt):
        calls.append(name)
        return Answer(name, [0.1], 0.1) if len(calls) <= 5 else Answer(name, error="[Errno 111] Connection refused")

    answers, _ = run_load(send, REQUESTS, Load(concurrency=1))
    assert len(calls) == 5 + 3
    row = summary_of(answers, 1.0, None, None)
    assert (row["completed"], row["failed"]) == (5, 19) and answers[-1].error.startswith("not sent: ")


def test_an_engine_that_only_turns_requests_down_is_not_dead():
    answers, _ = run_load(lambda name, prompt: Answer(name, error="HTTP 429: busy"), REQUESTS, Load(concurrency=2))
    assert all(answer.error == "HTTP 429: busy" for answer in answers)


def test_arrivals_are_the_same_for_every_arm_and_of_their_rate():
    gaps = arrivals(4001, 8.0, 3)
    assert gaps == arrivals(4001, 8.0, 3) != arrivals(4001, 8.0, 4) and gaps[0] == 0
    assert sum(gaps) / 4000 == pytest.approx(1 / 8, rel=0.05)


def test_figures_by_hand():
    answers = [Answer("a", [0.1, 0.2, 0.4], 0.5, ids=[1, 2, 3]), Answer("b", [0.3], 0.3, ids=[1]), Answer("c", error="x")]
    row = summary_of(answers, 2.0, 0.2, 0.2)
    assert (row["completed"], row["failed"], row["output_throughput"], row["request_throughput"]) == (2, 1, 2.0, 1.0)
    assert row["median_ttft_ms"] == pytest.approx(200) and row["mean_tpot_ms"] == pytest.approx(150)
    assert row["median_itl_ms"] == pytest.approx(150) and row["p99_e2el_ms"] == pytest.approx(500)
    assert row["goodput"] == 0.5  # of the two that came, one had its first token in time
    assert [percentile([1, 2, 3, 4], share) for share in (0.0, 0.25, 0.5, 0.51, 1.0)] == [1, 1, 2, 3, 4]


def test_outputs_are_compared_by_ids_where_both_have_them():
    a, b = Answer("r", text="x", ids=[1]), Answer("r", text="x", ids=[2])
    assert compared([a], [b]) == {"compared": 1, "same": 0, "by": "token ids", "different": ["r"]}
    b.ids = []
    assert compared([a], [b]) == {"compared": 1, "same": 1, "by": "text", "different": []}
    b.error = "x"
    assert compared([a], [b])["compared"] == 0


# ------------------------------------------------------------------------------------------------------------ the script


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"tell me {at}"}) + "\n" for at in range(6)))
    return path


def run(results, mine, *more) -> tuple[int, dict]:
    code = spec_traffic.main(["--prompt-file", str(mine), "--n-tokens", "8", "--results", str(results), *map(str, more)])
    return code, json.loads(results.read_text())


def test_the_script_measures_every_load_with_and_without(serve, results, mine, capsys):
    fast, plain = serve(per_event=3), serve(drafts=False)
    code, document = run(results, mine, "--url", fast.url, "--url-without", plain.url, "--concurrency", "1,3", "--rate", "200", "--repeats", "2")
    assert code == 0 and document["status"] == "complete" and len(document["rows"]) == 3
    for row in document["rows"]:
        assert row["outputs"] == {"compared": 12, "same": 12, "by": "token ids", "different": []} and row["failed"] == 0
        assert row["speculative"]["proposed"] == 3 * row["speculative"]["rounds"] and row["speculative"]["acceptance_rate"] == pytest.approx(2 / 3)
        assert row["speculative"]["block_efficiency"] == pytest.approx(3) and row["baseline"]["acceptance_rate"] is None
        assert len(row["speculative_s"]) == len(row["baseline_s"]) == len(row["baseline_again_s"]) == 2
    assert len(fast.sent) == 3 * 2 * 6 + 1 and len(plain.sent) == 3 * 2 * 2 * 6 + 1  # and the warm-up of each
    said = capsys.readouterr().out
    assert "all 36 outputs are the same with and without (token ids)" in said and "200 a second" in said
    assert [line for line in said.splitlines() if len(line) > 100] == []


def test_outputs_that_differ_are_counted_and_named(serve, results, mine, capsys):
    code, document = run(results, mine, "--url", serve(shift=1).url, "--url-without", serve().url, "--concurrency", "2", "--repeats", "1")
    outputs = document["rows"][0]["outputs"]
    assert code == 0 and outputs["same"] == 0 and len(outputs["different"]) == 6
    assert "0 of 6 outputs are the same with and without (token ids); the engine without speculation gave 6 of 6" in " ".join(capsys.readouterr().out.split())


def test_an_engine_that_knows_no_ids_is_compared_by_text(serve, results, mine):
    _, document = run(results, mine, "--url", serve(strict=True).url, "--url-without", serve(strict=True).url, "--concurrency", "2", "--repeats", "1")
    assert document["rows"][0]["outputs"] == {"compared": 6, "same": 6, "by": "text", "different": []}


def test_failed_requests_fail_the_run_and_are_told(serve, results, mine, capsys):
    code, document = run(results, mine, "--url", serve(behave=["well", "well", "500", "429", "well"]).url, "--concurrency", "1", "--repeats", "1")
    assert code == 1 and document["rows"][0]["failed"] == 2
    assert "2 requests failed: HTTP 429" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--url", "127.0.0.1:9"], "--url 127.0.0.1:9: no engine answers there"),
        (["--url", "ftp://x"], "--url ftp://x: no address of an engine"),
        (["--url", "x", "--concurrency", "0"], "--concurrency"),
        (["--url", "x", "--rate", "-1"], "--rate"),
        (["--url", "x", "--sample", "7"], "--sample 7: mine.jsonl has 6 prompts"),
    ],
)
def test_a_mistake_is_one_line(words, named, results, mine, capsys):
    try:
        code = spec_traffic.main(["--prompt-file", str(mine), "--results", str(results), *words])
    except SystemExit as stop:
        code = stop.code
    err = capsys.readouterr().err.strip().splitlines()
    assert code == 2 and err[-1].startswith("error: ") and named in err[-1]


def test_a_dead_engine_found_on_warming_up_is_one_line(serve, results, mine, capsys):
    assert spec_traffic.main(["--url", serve(behave=["500"]).url, "--prompt-file", str(mine), "--results", str(results)]) == 2
    assert "HTTP 500" in capsys.readouterr().err.strip().splitlines()[-1]


def test_nothing_is_asked_of_any_other_address(serve, results, mine, monkeypatch):
    asked = []
    real = wire.connect
    monkeypatch.setattr(wire, "connect", lambda engine: asked.append(engine.name) or real(engine))
    server = serve()
    run(results, mine, "--url", server.url, "--concurrency", "2", "--repeats", "1")
    assert set(asked) == {server.url.removeprefix("http://")}
