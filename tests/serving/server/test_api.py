"""What OpenAI's own client, and clients of bad manners, see of the server.

The right text comes from transformers' generate on the demo model.
"""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
import torch

from ptqpipe.errors import UsageError
from ptqpipe.serving.engine.engine import ContextTooLong
from ptqpipe.serving.server.error_responses import api_error
from tests.serving.engine.models import PROMPTS, encoded, greedy, reference, tokenizer
from tests.serving.server.conftest import TEMPLATE, Server, serving

PROMPT = PROMPTS[0]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


def text(tokens: list[int]) -> str:
    found: str = tokenizer().decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return found


def wanted(prompt: str = PROMPT, count: int = 20) -> str:
    return text(greedy(tokenizer()(prompt).input_ids, count))


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    found: dict[str, Any] = body["error"]
    return found


def idle(server: Server, seconds: float = 60) -> bool:
    """Whether nothing is under way soon."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        load = server.service.load()
        if server.service.sequences() == 0 and load.running == 0 and load.free == load.blocks:
            return True
        time.sleep(0.02)
    return False


def test_a_completion_is_what_generate_says(client: openai.OpenAI) -> None:
    found = client.completions.create(model="demo", prompt=PROMPT, max_tokens=20, temperature=0)
    assert found.choices[0].text == wanted()
    assert found.choices[0].finish_reason == "length"
    assert found.usage is not None
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(encoded()[0]), 20)


def test_several_prompts_as_text_or_tokens(client: openai.OpenAI) -> None:
    by_text = client.completions.create(model="demo", prompt=list(PROMPTS), max_tokens=12, temperature=0)
    by_tokens = client.completions.create(
        model="demo", prompt=[list(tokens) for tokens in encoded()], max_tokens=12, temperature=0
    )
    for found in (by_text, by_tokens):
        assert [choice.index for choice in found.choices] == list(range(len(PROMPTS)))
        assert [choice.text for choice in found.choices] == [wanted(prompt, 12) for prompt in PROMPTS]


def test_a_stream_is_the_same_text_then_usage_then_done(client: openai.OpenAI, server: Server) -> None:
    stream = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=20, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    events = list(stream)
    assert "".join(event.choices[0].text for event in events if event.choices) == wanted()
    assert len(events) > 10
    assert events[-1].choices == []
    assert events[-1].usage is not None
    assert events[-1].usage.completion_tokens == 20
    with server.client() as http:
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 2, "stream": True}
        lines = [line for line in http.post("/v1/completions", json=body).text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    assert "usage" not in json.loads(lines[0][6:])


def test_a_chat_is_the_template_continued(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "What is a list?"}]
    prompt = tokenizer().apply_chat_template(
        messages, chat_template=TEMPLATE, add_generation_prompt=True, tokenize=False
    )
    right = text(greedy(tokenizer()(prompt, add_special_tokens=False).input_ids, 16))
    found = client.chat.completions.create(model="demo", messages=messages, max_tokens=16, temperature=0)
    assert (found.choices[0].message.role, found.choices[0].message.content) == ("assistant", right)
    stream = client.chat.completions.create(
        model="demo", messages=messages, max_completion_tokens=16, temperature=0, stream=True
    )
    events = list(stream)
    assert events[0].choices[0].delta.role == "assistant"
    assert "".join(event.choices[0].delta.content or "" for event in events) == right
    assert events[-1].choices[0].finish_reason == "length"
    parts: Any = [
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "a list?"}]}
    ]
    again = client.chat.completions.create(model="demo", messages=parts, max_tokens=16, temperature=0)
    assert again.choices[0].message.content == right


def test_choices_seeds_and_stops(client: openai.OpenAI) -> None:
    def ask(**more: Any) -> list[str]:
        found = client.completions.create(model="demo", prompt=PROMPT, max_tokens=16, **more)
        return [choice.text for choice in found.choices]

    several = ask(n=3, seed=5, temperature=1.0)
    assert len(set(several)) == 3
    assert ask(n=3, seed=5, temperature=1.0) == several
    assert ask(n=1, seed=5, temperature=1.0) == several[:1]
    stop = wanted(count=16)[8:12]
    assert ask(temperature=0, stop=stop) == [wanted(count=16)[: wanted(count=16).index(stop)]]
    assert ask(temperature=1.0, extra_body={"top_k": 1}) == [wanted(count=16)]


def test_logprobs_are_those_of_the_model(client: openai.OpenAI) -> None:
    tokens = list(encoded()[0])
    made = greedy(tokens, 6)
    with torch.no_grad():
        logprobs = reference()(torch.tensor([tokens + made])).logits[0].double().log_softmax(-1)
    whole = tokens + made
    right = [float(logprobs[at, token]) for at, token in enumerate(whole[1:])]
    best = logprobs.topk(2).values[:-1].tolist()
    found = client.completions.create(
        model="demo", prompt=tokens, max_tokens=6, temperature=0, logprobs=2, echo=True
    ).choices[0]
    assert found.logprobs is not None
    assert found.text == tokenizer().decode(whole, clean_up_tokenization_spaces=False)
    assert "".join(found.logprobs.tokens or []) == found.text
    assert found.logprobs.token_logprobs is not None
    assert found.logprobs.token_logprobs[0] is None
    # float32 logits of size ten: seven digits, and a sum over the vocabulary.
    assert found.logprobs.token_logprobs[1:] == pytest.approx(right, abs=1e-4)
    for place, entry in enumerate((found.logprobs.top_logprobs or [])[1:]):
        assert sorted(entry.values(), reverse=True)[:2] == pytest.approx(best[place], abs=1e-4)
    only = client.completions.create(model="demo", prompt=tokens, max_tokens=0, logprobs=0, echo=True).choices[0]
    assert only.logprobs is not None
    assert (only.logprobs.token_logprobs or [])[1:] == pytest.approx(right[: len(tokens) - 1], abs=1e-4)
    messages: Any = [{"role": "user", "content": "hello"}]
    chat = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=3, temperature=0, logprobs=True, top_logprobs=2
    ).choices[0]
    assert chat.logprobs is not None
    assert [len(entry.top_logprobs) for entry in chat.logprobs.content or []] == [2, 2, 2]
    assert [entry.token == entry.top_logprobs[0].token for entry in chat.logprobs.content or []] == [True] * 3


def test_streamed_logprobs_are_those_of_the_whole_answer(server: Server) -> None:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "logprobs": 1, "echo": True}
    with server.client() as http:
        whole = http.post("/v1/completions", json=body).json()["choices"][0]
        lines = http.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
    parts = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert "".join(part["text"] for part in parts) == whole["text"]
    for key in ("tokens", "token_logprobs", "text_offset"):
        assert [x for part in parts for x in part["logprobs"][key]] == whole["logprobs"][key]


def test_models_tokens_health_metrics_page(server: Server, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    assert client.models.retrieve("demo").id == "demo"
    with server.client() as http:
        tokens = http.post("/tokenize", json={"prompt": PROMPT}).json()
        assert tokens == {"tokens": list(encoded()[0]), "count": len(encoded()[0]), "max_model_len": 256}
        plain = http.post("/tokenize", json={"prompt": PROMPT, "add_special_tokens": False}).json()["tokens"]
        assert http.post("/detokenize", json={"tokens": plain}).json() == {"prompt": PROMPT}
        assert http.get("/health").json() == {"status": "ok"}
        assert "<textarea" in http.get("/").text
        metrics = http.get("/metrics").text
    for name in (
        "ptqpipe_http_requests_total", "vllm:time_to_first_token_seconds_bucket", "ptqpipe_up 1.0",
        "vllm:kv_cache_usage_perc", "vllm:generation_tokens_total", "vllm:num_requests_waiting",
    ):  # fmt: skip
        assert name in metrics


@pytest.mark.parametrize(
    ("path", "content", "status", "says"),
    [
        ("/v1/completions", b"{not json", 400, "not JSON"),
        ("/v1/completions", b"", 422, ""),
        ("/v1/completions", b"[]", 422, ""),
        ("/v1/completions", b'{"model": "demo"}', 422, "prompt"),
        ("/v1/completions", b'{"model": "demo", "prompt": {"a": 1}}', 422, "prompt"),
        ("/v1/completions", b'{"model": "demo", "prompt": "a", "max_tokens": "many"}', 422, "max_tokens"),
        ("/v1/completions", b'{"model": "demo", "prompt": ""}', 200, ""),
        ("/v1/completions", b'{"model": "demo", "prompt": []}', 400, "empty"),
        ("/v1/completions", b'{"model": "demo", "prompt": [[]]}', 400, "no tokens"),
        ("/v1/completions", b'{"model": "demo", "prompt": [5, 99999]}', 400, "99999"),
        ("/v1/completions", b'{"model": "demo", "prompt": [5, 99999999999999999999999]}', 400, ""),
        ("/v1/completions", b'{"model": "demo", "prompt": [-5]}', 400, ""),
        ("/v1/completions", b'{"model": "demo", "prompt": "a", "temperature": -1}', 400, "temperature"),
        ("/v1/completions", b'{"model": "demo", "prompt": "a", "temperature": NaN}', 400, "temperature"),
        ("/v1/completions", b'{"model": "demo", "prompt": "a", "n": 0}', 400, "n is 0"),
        ("/v1/completions", b'{"model": "demo", "prompt": "a", "n": 100000}', 400, "n is"),
        ("/v1/completions", b'{"model": "demo", "prompt": "a", "logprobs": 1000}', 400, "logprobs"),
        ("/v1/completions", b'{"model": "demo", "prompt": "a", "max_tokens": -3}', 400, "max_tokens"),
        ("/v1/completions", b'{"model": "demo", "prompt": "a", "max_tokens": 0}', 400, "echo"),
        ("/v1/completions", b'{"model": "demo", "prompt": "a", "max_tokens": 5000}', 400, "context is 256"),
        ("/v1/completions", b'{"model": "demo", "prompt": "a", "suffix": "b"}', 400, "suffix"),
        ("/v1/completions", b'{"prompt": "a", "min_tokens": 2, "stop_token_ids": [1000000]}', 400, "stop_token_ids"),
        ("/v1/completions", b'{"prompt": "a", "logit_bias": {"3": Infinity}}', 400, "logit_bias"),
        ("/v1/completions", b'{"prompt": "\\ud800"}', 400, "surrogate"),
        ("/v1/completions", b'{"prompt": "a", "stop": "' + b"b" * 5000 + b'"}', 400, "stop string"),
        ("/v1/completions", b'{"max_tokens": 1, "n": 128, "prompt": [' + b"[1]," * 4999 + b"[1]]}", 400, "at once"),
        ("/v1/completions", b'{"prompt": "a", "n": null, "stream": null, "echo": null, "max_tokens": 1}', 200, ""),
        ("/v1/completions", b'{"prompt": "a", "temperature": 1e-308, "top_p": 0.5, "max_tokens": 1}', 200, ""),
        ("/tokenize", b'{"prompt": "\\udfff"}', 400, "surrogate"),
        ("/v1/completions", b'{"model": "other", "prompt": "a"}', 404, "other"),
        ("/v1/chat/completions", b'{"model": "demo", "messages": []}', 400, "messages"),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
         400, "messages[0] has an image without a place"),
        ("/v1/chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}', 400,
         "tools"),
        ("/v1/nothing", b"{}", 404, ""),
        ("/health", b"{}", 405, ""),
        ("/detokenize", b'{"tokens": [-1]}', 400, "vocabulary"),
    ],
)  # fmt: skip
def test_errors_have_openais_shape(server: Server, path: str, content: bytes, status: int, says: str) -> None:
    with server.client() as http:
        response = http.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    if status != 200:
        assert says in error_of(response)["message"]
    assert response.headers["x-request-id"]
    assert idle(server)


def test_openais_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError, match="context is 256") as error:
        client.completions.create(model="demo", prompt="word " * 400, max_tokens=1)
    assert error.value.code == "context_length_exceeded"


def test_only_what_is_too_long_is_said_to_be_too_long() -> None:
    told = api_error(UsageError("stop has 'context', expected no such word"))
    assert (told.status, told.code) == (400, None)
    told = api_error(ContextTooLong("9 tokens, expected at most 8"))
    assert (told.status, told.code) == (400, "context_length_exceeded")


def test_a_body_that_is_too_large_is_refused_with_or_without_its_length(server: Server) -> None:
    large = json.dumps({"model": "demo", "prompt": "a" * 70_000}).encode()

    def pieces() -> Iterator[bytes]:
        for at in range(0, len(large), 8192):
            yield large[at : at + 8192]

    with server.client() as http:
        for content in (large, pieces()):
            response = http.post("/v1/completions", content=content, headers={"content-type": "application/json"})
            assert response.status_code == 413
            assert error_of(response)["code"] == "body_too_large"


def test_a_client_that_leaves_takes_its_request_along(server: Server) -> None:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 240, "ignore_eos": True}
    with serving(slow=0.05) as slow:
        for stream in (True, False):
            content = json.dumps({**body, "stream": stream}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            with socket.create_connection(("127.0.0.1", int(slow.url.rsplit(":", 1)[1])), timeout=60) as client:
                client.sendall(head + b"Content-Length: %d\r\n\r\n" % len(content) + content)
                while slow.service.load().running == 0:
                    time.sleep(0.005)
                if stream:
                    assert client.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
            assert idle(slow)
        assert slow.service.engine is not None
        assert slow.service.engine.counters.finished["cancelled"] == 2


def test_a_flood_is_refused_with_when_to_come_again_and_the_rest_is_right() -> None:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 20, "temperature": 0}
    with (
        serving(slow=0.01, max_seqs=2, max_queue=4) as small,
        ThreadPoolExecutor(24) as pool,
        small.client() as http,
    ):
        answers = list(pool.map(lambda _: http.post("/v1/completions", json=body), range(24)))
        codes = [answer.status_code for answer in answers]
        assert set(codes) == {200, 429}
        assert codes.count(200) >= 6
        for answer in answers:
            if answer.status_code == 200:
                assert answer.json()["choices"][0]["text"] == wanted()
            else:
                assert int(answer.headers["retry-after"]) >= 1
                assert error_of(answer)["type"] == "rate_limit_error"
        assert idle(small)
        assert http.post("/v1/completions", json=body).status_code == 200


def test_an_api_key_guards_the_api_alone() -> None:
    with serving(api_key="secret") as guarded:
        with guarded.client() as http:
            assert http.get("/health").status_code == 200
            assert http.get("/").status_code == 200
            for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
                response = http.get("/v1/models", headers=headers)
                assert response.status_code == 401
                assert error_of(response)["code"] == "invalid_api_key"
        with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="secret") as client:
            assert client.completions.create(model="demo", prompt=PROMPT, max_tokens=1).choices
        with (
            openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="no", max_retries=0) as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()


@pytest.mark.slow
def test_draining_finishes_what_is_under_way_and_takes_nothing_new() -> None:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 40, "temperature": 0}
    answers: list[httpx.Response] = []
    with serving(slow=0.05) as slow, slow.client() as http:
        thread = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=body)))
        thread.start()
        while slow.service.load().running == 0:
            time.sleep(0.005)
        slow.service.drain()
        refused = slow.client().post("/v1/completions", json=body)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        health = slow.client().get("/health")
        assert (health.status_code, health.json()["status"]) == (503, "draining")
        thread.join(60)
    assert answers[0].json()["choices"][0]["text"] == wanted(count=40)


def test_what_is_cut_off_by_the_end_is_an_error_not_an_answer() -> None:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}
    answers: list[httpx.Response] = []
    with serving(slow=0.02) as slow, slow.client() as http:
        thread = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=body)))
        thread.start()
        while slow.service.load().running == 0:
            time.sleep(0.005)
        slow.service.stop()
        thread.join(60)
    assert answers[0].status_code == 503
    assert "ended before the answer did" in error_of(answers[0])["message"]


def test_a_prompt_shorter_than_the_context_by_less_than_the_default_is_answered(server: Server) -> None:
    prompt = (encoded()[2] * 8)[:250]
    with server.client() as http:
        answer = http.post("/v1/completions", json={"prompt": prompt, "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 6


def test_the_prompt_of_several_choices_is_counted_as_cached_only_where_it_was(server: Server) -> None:
    prompt = [7, 9, 11, *encoded()[2][:40]]
    with server.client() as http:
        first, again = (
            http.post("/v1/completions", json={"prompt": prompt, "n": 3, "max_tokens": 2}).json()["usage"] for _ in "ab"
        )
    assert first["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["prompt_tokens_details"]["cached_tokens"] == 32


def test_a_broken_engine_tells_everyone_and_says_that_it_is_dead() -> None:
    with serving(slow=0.02) as slow, slow.client() as http:
        answers: list[httpx.Response] = []
        body = {"model": "demo", "prompt": PROMPT, "max_tokens": 200, "ignore_eos": True}
        thread = threading.Thread(target=lambda: answers.append(http.post("/v1/completions", json=body)))
        thread.start()
        while slow.service.load().running == 0:
            time.sleep(0.005)
        slow.service.fail("rank 1 was killed by signal 9")
        thread.join(60)
        assert answers[0].status_code == 503
        assert "rank 1 was killed" in error_of(answers[0])["message"]
