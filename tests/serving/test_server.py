"""The command, its process, and real sockets."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.processes import command, drop_capabilities, forked
from tests.serving.small import write_run

from budgetformer.serving.settings import Settings


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run")


class Server:
    """`budgetformer serve` in a process of its own."""

    def __init__(self, run: Path, *flags: str, files: int | None = None) -> None:
        words = [sys.executable, "-m", "budgetformer", "serve", str(run), "--port", "0", *flags]
        limited = [] if files is None else ["sh", "-c", f'ulimit -n {files}; exec "$@"', "sh"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([*limited, *words], stderr=subprocess.PIPE, text=True, env=environment)
        self.port, self.next = 0, ""

    def wait(self) -> None:
        """Return once it is ready: it listens from the line on that names its port."""
        assert self.process.stderr
        line = self.process.stderr.readline()
        address = re.search(r"at http://127\.0\.0\.1:(\d+)", line)
        assert address, line
        self.port = int(address[1])
        self.next = self.process.stderr.readline()
        while self.ask("GET", "/ready")[0] != 200:
            pass

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        connection = self.connect()
        raw = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, raw, {"Content-Type": "application/json", **headers})
        reply = connection.getresponse()
        text = reply.read().decode()
        connection.close()
        return reply.status, json.loads(text) if reply.headers["content-type"] == "application/json" else text

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


@contextmanager
def serving(run: Path, *flags: str, files: int | None = None) -> Iterator[Server]:
    server = Server(run, *flags, files=files)
    try:
        server.wait()
        yield server
    finally:
        server.process.kill()
        server.process.wait()
        assert server.process.stderr
        server.process.stderr.close()


def test_a_server_answers_refuses_and_drains(run: Path) -> None:
    with serving(run, "--set", "wait_ms=1000", "--set", "max_bytes=20000") as server:
        assert server.ask("GET", "/info")[1]["limits"]["max_bytes"] == 20_000
        url = f"http://127.0.0.1:{server.port}/predict"
        assert server.next.startswith(f"next: curl {url} -H 'Content-Type: application/json' -d '")
        assert server.ask("POST", "/predict", json.loads(server.next.split("'")[-2]))[0] == 200
        assert server.ask("POST", "/explain", {"text": "the lake"})[0] == 200
        large_bodies(server)
        heads_and_hosts(server)
        assert b" 400 " in raw(server, b"nonsense\r\n\r\n")
        # A request that waits for company when the signal comes is answered, and the process ends well.
        waiting = server.connect()
        waiting.request("POST", "/predict", b'{"text": "the lake"}', {"Content-Type": "application/json"})
        while "budgetformer_queue_texts 1.0" not in server.ask("GET", "/metrics")[1]:
            pass
        server.process.send_signal(signal.SIGTERM)
        reply = waiting.getresponse()
        assert reply.status == 200
        assert json.loads(reply.read())["predictions"][0]["label"] in ("travel", "film", "money")
        assert server.process.wait(60) == 0
        with pytest.raises(ConnectionRefusedError):
            server.ask("GET", "/health")
        assert server.process.stderr
        assert server.process.stderr.read() == "WARNING:  Invalid HTTP request received.\n"


def test_a_second_signal_ends_a_server_that_still_waits(run: Path) -> None:
    with serving(run, "--set", "timeout=60") as server, socket.create_connection(("127.0.0.1", server.port)) as half:
        half.sendall(b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 20\r\n\r\n{")
        server.ask("GET", "/health")
        server.process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            server.process.wait(1)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(10) == 130


def large_bodies(server: Server) -> None:
    large = b'{"text": "' + b"x" * 200_000 + b'"}'
    status, answer = server.ask("POST", "/predict", large)
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    head = b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    chunks = b"".join(b"%x\r\n%b\r\n" % (4096, b"x" * 4096) for _ in range(20)) + b"0\r\n\r\n"
    assert b" 413 " in raw(server, head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
    answer = raw(server, head + b"Content-Length: 999999999\r\nExpect: 100-continue\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 413 ")  # the body was not asked for


def heads_and_hosts(server: Server) -> None:
    for path in ("/health", "/info"):
        answer = raw(server, b"HEAD %b HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n" % path.encode())
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nx-content-type-options: nosniff" in head.lower()
        assert int(head.lower().partition(b"content-length: ")[2].split()[0]) > 10
        assert body == b""
    status, answer = server.ask("GET", "/info", Host="rebound.example")
    assert (status, answer["error"]["code"]) == (403, "host_not_allowed")


def raw(server: Server, data: bytes) -> bytes:
    """All that comes back for these bytes, until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.sendall(data)
        received = b""
        while more := connection.recv(65536):
            received += more
        return received


def test_two_workers_share_a_port_and_their_metrics(run: Path) -> None:
    with serving(run, "--workers", "2", "--allowed-host", "models.example") as server:
        assert server.ask("GET", "/info", Host="models.example:80")[0] == 200
        assert server.ask("GET", "/info", Host="rebound.example")[0] == 403
        for _ in range(20):
            assert server.ask("POST", "/predict", {"text": "the lake"})[0] == 200
        assert "budgetformer_texts_total 20.0" in server.ask("GET", "/metrics")[1]
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["{missing}"], 4, "does not exist: give the directory of a run"),
        (["{run}", "--budget", "random"], 2, "give one of learned, full, fixed:X, max:X"),
        (["{run}", "--port", "70000"], 2, "65535"),
        (["{run}", "--host", "256.1.1.1"], 2, "the service cannot listen there"),
        (["{run}", "--set", "max_texts=300"], 2, "max_texts=300 is more than queue=256: raise queue"),
        (["{run}", "--set", "wait_ms=-1"], 2, "--set wait_ms=-1: Input should be greater than or equal to 0"),
        (["{run}", "--set", "wait_ms=2000"], 2, "--set wait_ms=2000: Input should be less than or equal to 1000"),
        (["{run}", "--set", "timeout=0"], 2, "--set timeout=0: Input should be greater than 0"),
        (["{run}", "--set", "batch_tokens=0"], 2, "--set batch_tokens=0: Input should be greater than or equal to 1"),
        (["{run}", "--set", "queue"], 2, "--set queue=: Input should be a valid integer"),
        (["{run}", "--set", "quue=3"], 2, "--set quue=3: Unexpected keyword argument (see --help)"),
    ],
)
def test_wrong_commands(
    words: list[str], code: int, message: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("serve", *(word.format(missing=tmp_path / "missing", run=run) for word in words)) == code
    assert message in capsys.readouterr().err


def test_a_port_that_is_taken(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert command("serve", str(run), "--port", str(taken.getsockname()[1])) == 2
    assert "the service cannot listen there" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["run.json", "config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_that_may_not_be_read_is_told_apart_from_a_damaged_one(name: str, run: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / name).chmod(0)
    done = forked("serve", folder, "--port", "0", before=drop_capabilities)
    assert done.returncode == 4
    assert "ermission denied" in done.stderr
    assert "chmod a+r" in done.stderr
    assert str(folder / name) in done.stderr
    assert "corrupt" not in done.stderr
    assert "Traceback" not in done.stderr


def test_without_the_extra(run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "budgetformer.serving.server", raising=False)
    assert command("serve", str(run)) == 5
    assert "pip install '.[serve]'" in capsys.readouterr().err


def test_the_flags_have_the_defaults_of_the_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    from budgetformer.serving import server

    taken: list[Any] = []
    monkeypatch.setattr(server, "serve", taken.append)
    assert command("serve", "run") == 0
    assert taken[0] == Settings(Path("run"), threads=taken[0].threads)
