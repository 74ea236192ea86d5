"""Raw connections: what is too long, too slow or no HTTP ends alone, and the others are served."""

import json
import logging
import socket
import time

import psutil
import pytest
import torch

from samebits.server import serve
from samebits.server.auth import Guard

from helpers.serving import Serving, in_background, served_checkpoint, wait_for

BODY = {"prompt": [17, 900, 3, 44], "max_tokens": 200, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    path = served_checkpoint(checkpoint("llama"), tmp_path_factory.mktemp("served") / "model")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with Serving(path) as server:
        yield server
    torch.set_num_threads(before)


def connected(server, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    connection.sendall(data)
    return connection


def received(connection: socket.socket) -> bytes:
    """All bytes until the server closes."""
    data = b""
    while True:
        try:
            new = connection.recv(65536)
        except ConnectionResetError:
            new = b""
        if not new:
            return data
        data += new


def post(body: dict, more: bytes = b"") -> bytes:
    content = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head.encode() + f"content-length: {len(content)}\r\n".encode() + more + b"\r\n" + content


CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n"
HEADS = {
    "a header": (b"GET /health HTTP/1.1\r\nhost: x\r\nx-long: ", b"a" * 2**20),
    "headers": (b"GET /health HTTP/1.1\r\nhost: x\r\n", b"x-more: 1\r\n" * 2**20),
    "a path": (b"GET /", b"a" * 2**20),
    "nothing": (b"\r\n", b"\r\n" * 2**20),
    "trailers": (CHUNKED + b"2\r\n{}\r\n0\r\n", b"x-more: 1\r\n" * 2**20),
    "a trailer": (CHUNKED + b"2\r\n{}\r\n0\r\nx-long: ", b"a" * 2**20),
    "words beside a chunk": (CHUNKED + b"2;x=", b"a" * 2**20),
}


@pytest.mark.parametrize("case", HEADS)
def test_a_head_without_end_is_cut_off(server, case):
    start, rest = HEADS[case]
    with connected(server, start) as connection:
        sent = 0
        try:
            for _ in range(64):
                connection.sendall(rest)
                sent += len(rest)
        except (ConnectionResetError, BrokenPipeError):
            pass
    assert sent < 16 * 2**20, "the server read all of it"
    assert server.get("/health")


def test_a_head_of_many_kilobytes_is_read(server):
    with connected(server, post(BODY | {"max_tokens": 1}, b"x-long: " + b"a" * 60_000 + b"\r\n")) as connection:
        assert connection.recv(15) == b"HTTP/1.1 200 OK"


def test_a_body_in_many_small_chunks_is_read(server):
    content = json.dumps({"prompt": [5] * 40_000}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in content)
    assert len(chunks) > 4 * serve.MAX_HEAD
    head = CHUNKED.replace(b"host: x", b"host: x\r\nconnection: close\r\ncontent-type: application/json")
    with connected(server, head + chunks + b"0\r\n\r\n") as connection:
        assert b"leaves no room in max_model_len" in received(connection)


PARTS = {
    "nothing": b"",
    "half a head": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-",
    "half a body": post(BODY)[:-20],
    "no end of chunks": b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n5\r\nabcde\r\n",
}


@pytest.mark.parametrize("case", PARTS)
def test_a_request_that_never_ends_is_closed_and_one_that_waits_for_tokens_is_not(server, monkeypatch, case):
    monkeypatch.setattr(serve, "SLOWEST", 0.4)
    with in_background(server.ok, "/v1/completions", BODY | {"max_tokens": 500}) as results:
        begin = time.monotonic()
        with connected(server, PARTS[case]) as connection:
            assert b"200 OK" not in received(connection)
        assert 0.3 < time.monotonic() - begin < 10
    assert results[0]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("more", [b"", b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"], ids=["", "pipelined"])
def test_a_client_that_takes_nothing_of_its_reply_is_cut_off(server, monkeypatch, more):
    monkeypatch.setattr(serve, "SLOWEST", 0.4)
    asked = BODY | {"n": 16, "max_tokens": 450, "stream": True, "logprobs": 20, "return_token_ids": True}
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(post(asked))
        wait_for(lambda: server.engine.generations)
        wait_for(lambda: any("write" in c.deadlines for c in server.server.server_state.connections))
        connection.sendall(more)
        wait_for(lambda: not server.engine.generations and not server.server.server_state.tasks, 60)
    with connected(server, post(asked, b"connection: close\r\n")) as connection:
        assert received(connection).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"), "who reads gets all"


def test_a_reply_waits_for_no_acknowledgement(server):
    """Head and body are two writes: by Nagle's algorithm the second would wait for a client's delayed ACK, 40 ms."""
    with connected(server):
        wait_for(lambda: server.server.server_state.connections)
        for connection in server.server.server_state.connections:
            accepted = connection.transport.get_extra_info("socket")
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_an_address_is_one_servers_alone_and_free_again_once_it_ended(checkpoint):
    first = serve.take_address("127.0.0.1", 0)
    port = first.getsockname()[1]
    with pytest.raises(ValueError, match=f"can't listen on 127.0.0.1, port {port}"):
        serve.take_address("127.0.0.1", port)  # although nobody listens yet: the first one's model still loads
    first.close()
    with Serving(checkpoint("llama")) as server:
        reply = connected(server, b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert received(reply)  # the server has closed it: the kernel remembers it for a minute
    serve.take_address("127.0.0.1", server.port).close()


def test_an_empty_line_after_a_reply_begins_a_request_that_must_come(server, monkeypatch):
    monkeypatch.setattr(serve, "SLOWEST", 0.4)
    with connected(server, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n") as connection:
        assert connection.recv(15) == b"HTTP/1.1 200 OK"
        connection.sendall(b"\r\n")
        assert received(connection)


def test_an_idle_connection_outlives_the_time_for_a_request(server, monkeypatch):
    monkeypatch.setattr(serve, "SLOWEST", 0.3)
    with connected(server) as connection:
        for _ in range(2):
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            reply = b""
            while not reply.endswith(b'{"status":"ok"}'):
                reply += connection.recv(4096)
            time.sleep(0.6)


WRONG = {
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "no HTTP": b"hello\r\n\r\n",
    "two lengths": b"POST /resume HTTP/1.1\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a negative length": b"POST /resume HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n",
    "a huge length": b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-length: 999999999999\r\n\r\n",
    "a bad chunk": b"POST /generate HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nxyz\r\n",
    "a header with a null": b"GET /health HTTP/1.1\r\nhost: x\r\na: \x00\r\n\r\n",
    "a space before the colon": b"GET /health HTTP/1.1\r\nhost : x\r\n\r\n",
    "a path outside": b"GET /../../etc/passwd HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    "a method that isn't there": b"BREW /health HTTP/1.1\r\nhost: x\r\n\r\n",
    "an expectation": post(BODY | {"max_tokens": 1}, b"expect: 100-continue\r\nconnection: close\r\n"),
}


@pytest.mark.parametrize("case", WRONG)
def test_malformed_http_harms_nobody(server, monkeypatch, case):
    monkeypatch.setattr(serve, "SLOWEST", 2.0)
    with connected(server, WRONG[case]) as connection:
        reply = received(connection)
    assert b"HTTP/1.1 5" not in reply and b"root:" not in reply
    assert (b"200 OK" in reply) == (case == "an expectation"), reply[:200]
    assert server.get("/health")


def test_requests_in_a_row_on_one_connection_are_answered_in_order(server):
    data = b"".join(post({"prompt": [5], "max_tokens": n, "ignore_eos": True}) for n in (3, 1, 2))
    with connected(server, data + b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n") as connection:
        reply = received(connection)
    assert [int(part.split(b",")[0]) for part in reply.split(b'"completion_tokens":')[1:]] == [
        3,
        1,
        2,
    ] and reply.endswith(b'{"status":"ok"}')


def test_many_connections_that_end_half_way_leave_nothing(server, monkeypatch):
    monkeypatch.setattr(serve, "SLOWEST", 1.0)
    process = psutil.Process()
    server.get("/health")
    before = process.num_fds()
    connections = [connected(server, PARTS[case]) for case in PARTS for _ in range(40)]
    assert process.num_fds() >= before + len(connections)
    for connection in connections[::2]:
        connection.close()
    wait_for(lambda: len(server.server.server_state.connections) <= 1, 20)
    for connection in connections[1::2]:
        connection.close()
    wait_for(lambda: process.num_fds() <= before + 2)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_half_of_a_connection_is_gone_and_leaves_nothing(server, stream):
    """As `nc -N` does after its request: nobody can tell it from a client that closed both halves."""
    process = psutil.Process()
    server.get("/health")
    before, aborted = process.num_fds(), server.engine.finished["abort"]
    for _ in range(20):
        with connected(server, post(BODY | {"max_tokens": 500, "stream": stream})) as connection:
            wait_for(lambda: server.llm.stats().num_running)
            connection.shutdown(socket.SHUT_WR)
            assert b'"finish_reason":"length"' not in received(connection)
        server.idle()
    assert server.engine.finished["abort"] == aborted + 20
    wait_for(lambda: process.num_fds() <= before)
    assert not [c for c in server.server.server_state.connections if c.cycle and not c.cycle.response_complete]


# --- small things that clients ask ------------------------------------------------------------------------------------


def test_heads_of_the_health_routes(server):
    for route in ("/health", "/ready"):
        response = server.http.head(route)
        assert (response.status_code, response.content) == (200, b"")


def test_the_page_of_the_api_needs_nothing_from_elsewhere(server):
    response = server.http.get("/docs")
    assert response.status_code == 200 and "openapi.json" in response.text
    assert "://" not in response.text.replace("data:,", "")


def test_a_body_without_its_type_says_what_is_missing(server):
    response = server.http.post("/v1/completions", content=b'{"prompt": "x"}')
    assert response.status_code == 400 and "Content-Type: application/json" in response.text


# --- the start --------------------------------------------------------------------------------------------------------


def test_an_address_that_cannot_be_had_says_what_to_do():
    with serve.take_address("127.0.0.1", 0) as taken:
        taken.listen()
        for host, port in [("127.0.0.1", taken.getsockname()[1]), ("no.such.host.invalid", 80), ("203.0.113.1", 80)]:
            with pytest.raises(ValueError, match="choose another --host or --port"):
                serve.take_address(host, port)


def test_a_started_server_says_what_it_serves_and_warns_where_anybody_may_use_it(server, caplog, monkeypatch):
    monkeypatch.setattr(serve.Server, "run", lambda self, listeners: None)
    caplog.set_level(logging.INFO)
    for host, key, warned in [("127.0.0.1", None, False), ("0.0.0.0", None, True), ("0.0.0.0", "k", False)]:
        caplog.clear()
        with serve.take_address(host, 0) as listener:
            serve.serve(server.llm, "tiny", [listener], Guard(key), 30.0)
        assert ("set an API key" in caplog.text) == warned
        assert f"API key {'set' if key else 'none'}, admin key none" in caplog.text
        for part in ("tiny in float32", "KV cache 0.0 GiB", "replicas 1, stages 1", server.llm.contract.hash):
            assert part in caplog.text
