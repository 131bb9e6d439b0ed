"""Requests are decoded together, each as if alone, and none waits for a client that has gone."""

import json
import socket
import threading
from urllib.parse import urlsplit

import openai
import pytest

from hf_refspec.apps.serve import served_row
from tests.helpers.passes import passes_of
from tests.helpers.running_server import NAME, Reply, Slow, serving, wait_until

LONG = {"max_tokens": 900}


def begun(server, **options):
    """A stream whose first words have come."""
    chunks = server.chat("one", stream=True, **{**LONG, **options})
    for chunk in chunks:
        if chunk.choices[0].delta.content:
            return chunks
    raise AssertionError("it ended")


def test_a_client_that_leaves_a_stream_ends_its_generation(slow):
    begun(slow).close()
    wait_until(lambda: slow.outcomes("cancelled") == 1)
    assert slow.metrics()["generated_tokens_total"] < 800
    assert slow.engine.running == 0


def test_a_client_that_leaves_while_it_waits_for_the_whole_answer_ends_it(slow):
    messages = [{"role": "user", "content": "one"}]
    body = json.dumps({"model": NAME, "messages": messages, "temperature": 0, **LONG}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    head += b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body)
    parts = urlsplit(slow.url)
    with socket.create_connection((parts.hostname, parts.port)) as connection:
        connection.sendall(head + body)
        wait_until(lambda: slow.engine.running == 1)
    wait_until(lambda: slow.outcomes("cancelled") == 1)
    assert slow.metrics()["generated_tokens_total"] < 800


def test_a_waiting_request_whose_client_leaves_is_taken_out_of_the_queue(slow):
    running = begun(slow)
    waiting = slow.chat("two", stream=True)
    wait_until(lambda: slow.engine.waiting == 1)
    waiting.close()
    wait_until(lambda: slow.engine.waiting == 0)
    assert slow.outcomes("cancelled") == 1 and slow.engine.running == 1
    running.close()


def test_a_full_queue_says_how_many_wait_and_when_to_come_back(slow, pool):
    running = begun(slow)
    waiting = pool.submit(slow.chat, "two", max_tokens=4)
    wait_until(lambda: slow.engine.waiting == 1)
    assert slow.metrics()["waiting_requests"] == 1
    with pytest.raises(openai.RateLimitError, match="the queue is full, 1 waiting") as refusal:
        slow.chat("three")
    assert int(refusal.value.response.headers["Retry-After"]) >= 1
    running.close()
    assert waiting.result().usage.completion_tokens == 4


def test_an_answer_that_takes_too_long_ends_as_if_it_were_too_long(speller, tokenizer):
    with serving(speller, tokenizer, [Slow()], max_seconds=0.3) as server:
        answer = server.chat("one", **LONG)
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage.completion_tokens < 900
        assert server.outcomes("time") == 1


def test_a_prompt_that_takes_too_long_to_read_ends_as_if_the_answer_were_too_long(
    speller, tokenizer, plain, monkeypatch
):
    """By this clock a pass takes 0.1 s, and all else no time."""
    with passes_of(speller) as ran, serving(speller, tokenizer, max_seconds=0.35) as server:
        monkeypatch.setattr(served_row, "monotonic", lambda: 0.1 * len(ran))
        ran.clear()
        answer = server.chat("one " * 400, max_tokens=2)
        [choice] = answer.choices
        assert (choice.finish_reason, choice.message.content) == ("length", "")
        assert answer.usage.completion_tokens == 0
        assert len(ran) == 4 and server.outcomes("time") == 1  # it would be read in 13 pieces
        assert server.chat("two", max_tokens=1).choices[0].message.content == plain(
            "two", max_new_tokens=1
        )


def test_an_order_to_end_lets_what_runs_and_waits_finish_and_takes_nothing_new(slow, pool):
    running = begun(slow, max_tokens=60)
    waiting = pool.submit(slow.chat, "two", max_tokens=4)
    wait_until(lambda: slow.engine.waiting == 1)
    slow.server.handle_exit(2, None)
    with pytest.raises(openai.APIConnectionError):
        while True:  # until the order has arrived
            slow.client.models.list()
    assert [chunk.choices[0].finish_reason for chunk in running][-1] == "length"
    assert waiting.result().usage.completion_tokens == 4


def test_a_second_order_ends_at_once(slow):
    running = begun(slow)
    slow.server.handle_exit(2, None)
    slow.server.handle_exit(2, None)
    with pytest.raises(openai.APIError, match="shutting down"):
        list(running)
    slow.engine.close(600)
    assert slow.engine.running == 0


def test_a_request_that_fails_is_told_and_the_next_one_goes_well(speller, tokenizer, plain):
    class Failing(Slow):
        fails = threading.Event()

        def observe(self, observation):
            if self.fails.is_set():
                raise RuntimeError("out of memory: secret")

    with serving(speller, tokenizer, [Failing()]) as server:
        Failing.fails.set()
        with pytest.raises(openai.InternalServerError, match="its log says why") as failure:
            server.chat("one")
        assert "secret" not in str(failure.value)
        with pytest.raises(openai.APIError, match="its log says why"):
            list(server.chat("one", stream=True))
        Failing.fails.clear()
        assert server.chat("one").choices[0].message.content == plain("one")
        assert (server.outcomes("error"), server.outcomes("refused")) == (2, 0)


MESSAGES = ["one", "what is it?", "größer 🙂", "a longer question than the others are, by far"]


@pytest.mark.parametrize("clients", [12, pytest.param(48, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("max_rows", [1, 4])
def test_clients_that_come_and_go_are_answered_as_if_alone(
    speller, tokenizer, plain, pool, max_rows, clients
):
    def ask(number: int) -> str | None:
        message = MESSAGES[number % 4]
        options = {"seed": number, "temperature": 1.0} if number % 3 == 0 else {}
        if number % 2:
            return server.chat(message, **options).choices[0].message.content
        chunks = server.chat(message, stream=True, **options)
        if number % 5:
            return Reply(chunks).text
        next(iter(chunks))
        chunks.close()
        return None

    with serving(speller, tokenizer, max_waiting=50, max_rows=max_rows) as server:
        together = list(pool.map(ask, range(clients)))
        wait_until(lambda: server.engine.running + server.engine.waiting == 0)
        assert server.outcomes("length") + server.outcomes("cancelled") == clients
        alone = [ask(number) for number in range(clients)]
    assert together == alone and together.count(None) == len(range(0, clients, 10))
    greedy = [n for n in range(clients) if n % 3 and together[n] is not None]
    assert [together[n] for n in greedy] == [plain(MESSAGES[n % 4]) for n in greedy]


def test_requests_wait_where_all_rows_are_taken(speller, tokenizer, pool):
    with serving(speller, tokenizer, [Slow()], max_rows=2) as server:
        streams = [server.chat("one", stream=True, max_tokens=900) for _ in range(2)]
        wait_until(lambda: server.engine.running == 2)
        third = pool.submit(server.chat, "two", max_tokens=4)
        wait_until(lambda: server.engine.waiting == 1)
        assert server.metrics()["running_requests"] == server.engine.running == 2
        streams[0].close()
        assert third.result().usage.completion_tokens == 4
        streams[1].close()


@pytest.mark.parametrize("isolates", [False, True])
def test_a_prompt_that_begins_like_another_is_not_read_again_unless_isolated(
    speller, tokenizer, isolates
):
    with passes_of(speller) as counts, serving(speller, tokenizer, isolates=isolates) as server:
        longest = []
        for _ in range(2):
            counts.clear()
            server.chat("a question of more than a few tokens", max_tokens=4)
            longest.append(max(counts))
    assert (longest[1] < longest[0]) == (not isolates)
