"""`corral serve --replicas`: processes come and go, clients notice nothing, sandboxes live on."""

from __future__ import annotations

import asyncio
import http.client
import os
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from corral.adapters.nodes.remote import RemoteNode
from corral.client import Corral, CorralError
from corral.services.settling import SETTLE_S
from postgres_server import PostgresServer
from redis_server import RedisServer
from replica_server import Replicas, until

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="needs bubblewrap")
NUMBERS = 'i=1; while [ $i -le 400 ]; do echo "$i ☕"; echo "$i ☕" >&2; i=$((i+1)); sleep 0.02; done; exit 7'
EXPECTED = "".join(f"{n} ☕\n" for n in range(1, 401)).encode()


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    server = RedisServer()
    server.start()
    yield server
    server.close()


Make = Callable[..., Replicas]


@pytest.fixture
def make(postgres: PostgresServer, redis: RedisServer) -> Iterator[Make]:
    made: list[tuple[Replicas, Path]] = []

    def start(count: int = 2, **environment: str) -> Replicas:
        place = Path(tempfile.mkdtemp(prefix="corral-replicas-", dir="/tmp"))
        place.chmod(0o711)
        made.append((Replicas(place, postgres.fresh_database(), redis.url, count, **environment), place))
        return made[-1][0]

    yield start
    for server, place in made:
        if server.process is not None:
            server.clear()
            assert server.stop() == 0, server.errors.read_text()
        told = server.errors.read_text() if server.errors.exists() else ""
        assert "Traceback" not in told, told
        shutil.rmtree(place, ignore_errors=True)


@pytest.fixture
def server(make: Make) -> Replicas:
    return make().start().ready()


class Load:
    """Clients that run, exec and move files without a pause; every answer is checked, every failure kept."""

    def __init__(self, server: Replicas, clients: int = 3) -> None:
        self._server = server
        self._over = threading.Event()
        self.failures: list[str] = []
        self.done = 0
        self._threads = [threading.Thread(target=self._work, args=(number,)) for number in range(clients)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        with self._server.client() as client:
            sandbox = client.sandboxes.create(runtime="bubblewrap")
            turn = 0
            while not self._over.is_set():
                turn += 1
                try:
                    self._turn(client, sandbox, f"{number}.{turn}")
                    self.done += 1
                except Exception as error:
                    self.failures.append(f"{number}.{turn}: {error!r} {getattr(error, 'hint', '')}")
            sandbox.delete()

    def _turn(self, client: Corral, sandbox: Any, word: str) -> None:
        run = client.run(runtime="bubblewrap", shell=f"echo {word}")
        assert run.result.stdout.text == f"{word}\n", run.result
        # Each exec appends once: a program that ran twice would show.
        result = sandbox.exec(["sh", "-c", f"echo {word} >> log; cat log | wc -l"])
        assert result.stdout.text.strip() == word.partition(".")[2], result
        sandbox.files.write("note", word.encode() * 1000)
        assert sandbox.files.read("note") == word.encode() * 1000

    def more(self, count: int) -> None:
        """Wait for so many more turns."""
        goal = self.done + count
        until(lambda: self.done >= goal or self.failures, "no progress")


def test_both_replicas_serve_and_share_what_they_have(server: Replicas) -> None:
    assert server.get("/readyz")[2] == {"status": "ready", "missing": []}
    assert len(server.children("node")) == 1
    assert len(server.children("replica")) == 2
    with server.client() as client:
        sandbox = client.sandboxes.create(runtime="bubblewrap")
        assert sandbox.exec(["sh", "-c", "echo 你好 > a; cat a"]).stdout.text == "你好\n"
    words = b"".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.children("replica"))
    assert b"postgresql" not in words
    (node,) = server.children("node")
    assert b"CORRAL_DATABASE_URL" not in Path(f"/proc/{node}/environ").read_bytes(), "the node needs no database"


def test_a_command_on_the_state_directory_is_a_client_of_the_replicas(server: Replicas) -> None:
    words = [sys.executable, "-c", "from corral.cli.main import main; main()", "run", "--shell", "echo from beside"]
    done = subprocess.run(words, env=server.environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.returncode) == ("from beside\n", 0), done.stderr
    with server.client() as client:
        assert len(client.runs.list()) == 1


def test_a_rolling_restart_fails_no_request_of_a_client_that_retries(server: Replicas) -> None:
    with Load(server) as load:
        load.more(3)
        server.restart_all()
        load.more(6)
        server.restart_all()
        load.more(3)
    assert load.failures == []


def test_a_replica_that_is_killed_fails_no_request_of_a_client_that_retries(server: Replicas) -> None:
    with Load(server) as load:
        for _ in range(3):
            load.more(2)
            killed = server.end("replica")
            until(lambda gone=killed: len(now := server.children("replica")) == 2 and gone not in now, "a new replica")
        load.more(3)
    assert load.failures == []


def test_a_node_that_is_killed_has_its_sandboxes_again_and_programs_run_on(server: Replicas) -> None:
    with server.client() as client:
        sandbox = client.sandboxes.create(runtime="bubblewrap")
        sandbox.files.write("kept", b"kept")
        running = sandbox.start(["sh", "-c", "echo begun; sleep 4; echo ended; exit 3"])
        until(lambda: any(event.data == b"begun\n" for event in [next_output(running)]))
        server.end("node")
        result = running.wait()
        assert (result.exit_code, result.stdout.text) == (3, "begun\nended\n")
        assert sandbox.files.read("kept") == b"kept"
        assert client.run(runtime="bubblewrap", shell="echo after").result.stdout.text == "after\n"
        assert sandbox.refresh().state != "lost"


def next_output(running: Any) -> Any:
    source = running.events()
    try:
        return next(event for event in source if event.kind == "stdout")
    finally:
        source.close()


def test_a_stream_goes_on_by_its_cursor_over_killed_and_restarted_replicas(server: Replicas) -> None:
    """K20 with the servers going away, not the network."""
    with server.client() as client:
        sandbox = client.sandboxes.create(runtime="bubblewrap")
        running = sandbox.start(["sh", "-c", NUMBERS], timeout=100)
        got = {"stdout": bytearray(), "stderr": bytearray()}
        begun = threading.Event()
        ended: list[Any] = []

        def follow() -> None:
            for event in running.events():
                begun.set()
                if event.kind in got:
                    assert event.offset == len(got[event.kind]), "a hole, or something twice"
                    got[event.kind] += event.data
                ended.append(event)

        follower = threading.Thread(target=follow)
        follower.start()
        assert begun.wait(60)
        for _ in range(2):
            for which in (0, 1):
                server.end("replica", which if len(server.children("replica")) > which else 0)
            until(lambda: len(server.children("replica")) == 2)
        server.restart_all()
        follower.join(120)
        assert ended and ended[-1].kind == "ended"
        assert ended[-1].doc["result"]["exit_code"] == 7
        assert bytes(got["stdout"]) == EXPECTED
        assert bytes(got["stderr"]) == EXPECTED
        assert running.refresh().result.stdout.bytes == len(EXPECTED)


def test_whoever_waits_or_follows_goes_on_over_a_rolling_restart(server: Replicas) -> None:
    program = "echo begun; while [ ! -e go ]; do sleep 0.1; done; echo 你好; exit 5"
    with server.client() as client:
        sandbox = client.sandboxes.create(runtime="bubblewrap")
        running = sandbox.start(["sh", "-c", program], timeout=200)
        events: list[Any] = []
        results: list[Any] = []

        def follow() -> None:
            events.extend((event.kind, event.offset, event.data) for event in running.events())

        def wait() -> None:
            with server.client() as other:
                results.append(other.sandboxes.get(sandbox.id).exec(["sh", "-c", program], timeout_s=200))

        threads = [threading.Thread(target=follow), threading.Thread(target=wait)]
        for thread in threads:
            thread.start()
        until(lambda: len(client.request("GET", f"/v1/sandboxes/{sandbox.id}/execs")["items"]) == 2)
        until(lambda: b"begun\n" in [event.data for event in [next_output(running)]])
        server.restart_all()
        assert results == []
        sandbox.files.write("go", b"")
        for thread in threads:
            thread.join(120)
        output = [event for event in events if event[0] == "stdout"]
        assert b"".join(data for _, _, data in output) == "begun\n你好\n".encode()
        assert [offset for _, offset, _ in output] == [0, 6]
        assert [event[0] for event in events if event[0] != "stdout"] == ["started", "ended"]
        assert [(each.exit_code, each.stdout.text) for each in results] == [(5, "begun\n你好\n")]


def test_large_output_goes_through_a_replica_and_the_node_without_lying_in_either(server: Replicas) -> None:
    lines = 7_000_000
    processes = [*server.children("node"), *server.children("replica")]
    before = {pid: most_memory(pid) for pid in processes}
    with server.client() as client:
        run = client.run(
            runtime="bubblewrap", shell=f"seq 1 {lines}", output_limit="64M", output_kill="100M", timeout_s=200
        )
        text = run.result.stdout.text
        assert text.count("\n") == lines and text.endswith(f"\n{lines}\n")
        assert not run.result.stdout.truncated
        grown = {pid: most_memory(pid) - before[pid] for pid in processes}
        assert max(grown.values()) < len(text) * 2 // 3, "its bytes alone would be more"


def most_memory(pid: int) -> int:
    """The most bytes that a process has had in memory."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def test_a_kept_connection_is_closed_politely_by_a_replica_that_leaves(make: Make) -> None:
    server = make(1).start().ready()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/healthz")
    answer = connection.getresponse()
    assert (answer.status, answer.getheader("connection")) == (200, None)
    answer.read()
    old = server.children("replica")
    assert server.process is not None
    server.process.send_signal(signal.SIGHUP)
    while answer.getheader("connection") != "close":
        connection.request("GET", "/healthz")  # on the same connection: it would raise if that had been cut
        answer = connection.getresponse()
        assert answer.status == 200
        answer.read()
        time.sleep(0.02)
    connection.close()
    until(lambda: not set(server.children("replica")) & set(old))


def test_a_restart_that_cannot_succeed_leaves_the_old_replicas_and_says_why(make: Make, tmp_path: Path) -> None:
    policy = tmp_path / "policy.yaml"
    shutil.copy(Path(__file__).resolve().parents[2] / "policy/default.yaml", policy)
    server = make(CORRAL_POLICY=str(policy)).start().ready()
    good, old = policy.read_text(), server.children("replica")
    policy.write_text("classes: 7\n")
    assert server.process is not None
    server.process.send_signal(signal.SIGHUP)
    until(lambda: "the old ones stay" in server.errors.read_text(), "the log")
    until(lambda: server.children("replica") == old)
    with server.client() as client:
        assert client.run(runtime="bubblewrap", shell="echo still").result.stdout.text == "still\n"
    policy.write_text(good)
    server.restart_all()
    with server.client() as client:
        assert client.run(runtime="bubblewrap", shell="echo new").result.stdout.text == "new\n"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificate with openssl")
def test_replicas_speak_tls_and_take_a_new_certificate_at_a_restart(make: Make, tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "cert.pem"

    def new_certificate() -> str:
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
            + ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", certificate],
            check=True,
            capture_output=True,
        )
        return certificate.read_text()

    def shown() -> str:
        return ssl.get_server_certificate(("127.0.0.1", server.port))

    first = new_certificate()
    server = make(1).start("--tls-cert", str(certificate), "--tls-key", str(key), scheme="https")
    assert shown().split() == first.split()
    second = new_certificate()
    server.restart_all()
    assert shown().split() == second.split() != first.split()
    with Corral([server.url], server.key, ca_file=certificate) as client:
        assert client.run(runtime="bubblewrap", shell="echo hidden").result.stdout.text == "hidden\n"
    assert server.stop() == 0


def test_a_stop_leaves_sandboxes_alive_for_the_next_server(server: Replicas) -> None:
    with server.client() as client:
        sandbox = client.sandboxes.create(runtime="bubblewrap")
        sandbox.files.write("kept", b"kept")
        running = sandbox.start(["sh", "-c", "sleep 6; echo through"])
        begun = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - begun < 40
        server.start().ready()
        assert client.sandboxes.get(sandbox.id).files.read("kept") == b"kept"
        assert running.wait().stdout.text == "through\n"


def test_no_child_outlives_a_parent_that_was_killed_and_the_next_one_goes_on(server: Replicas) -> None:
    with server.client() as client:
        sandbox = client.sandboxes.create(runtime="bubblewrap")
        running = sandbox.start(["sh", "-c", "sleep 5; echo through"])
        children = [os.pidfd_open(pid) for kind in ("node", "replica") for pid in server.children(kind)]
        server.kill()
        for descriptor in children:
            until(lambda one=descriptor: ended(one), "a child")
            os.close(descriptor)
        server.start().ready()
        assert running.wait().stdout.text == "through\n"


def ended(descriptor: int) -> bool:
    import select

    return bool(select.select([descriptor], [], [], 0)[0])


def test_a_node_that_hangs_is_named_by_readyz_in_time(server: Replicas) -> None:
    server.end("node", number=signal.SIGSTOP)
    try:
        began = time.monotonic()
        status, fields, document = server.get("/readyz")
        assert (status, document["missing"]) == (503, ["node"])
        assert "retry-after" in fields
        assert time.monotonic() - began < 10
    finally:
        server.end("node", number=signal.SIGCONT)
    server.ready()


def test_a_node_that_hangs_for_longer_than_a_settling_may_take_and_a_replica_that_dies_meanwhile_end_no_sandbox(
    server: Replicas,
) -> None:
    with server.client() as client:
        sandbox = client.sandboxes.create(runtime="bubblewrap")
        with sandbox.lease("s/1"):
            sandbox.exec(["sh", "-c", "echo kept > kept; echo left > /tmp/left"])
            server.end("node", number=signal.SIGSTOP)
        try:
            began = time.monotonic()
            until(lambda: sandbox.refresh().state == "recycling", "the lease has ended")
            server.end("replica")
            until(lambda: len(server.children("replica")) == 2, "a new replica")
            while time.monotonic() - began < SETTLE_S + 10:  # by then a single attempt has been given up
                assert sandbox.refresh().state == "recycling"
                time.sleep(1)
        finally:
            server.end("node", number=signal.SIGCONT)
        with sandbox.lease("s/2", contention="wait", wait_s=60):
            shown = sandbox.exec(["sh", "-c", "cat kept; [ ! -e /tmp/left ] || echo left"])
        assert (shown.exit_code, shown.stdout.text) == (0, "kept\n")
        events = [event["event"] for event in server.get(f"/v1/sandboxes/{sandbox.id}")[2]["history"]]
        assert events.count("settled") >= 1 and "failed" not in events and "claim_lost" not in events


@pytest.fixture
def own_postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as server:
        yield server


def test_while_the_store_is_lost_new_work_is_told_to_come_again_and_what_runs_goes_on(
    own_postgres: PostgresServer, make: Make
) -> None:
    server = make(CORRAL_DATABASE_URL=own_postgres.fresh_database()).start().ready()
    with server.client() as client:
        sandbox = client.sandboxes.create(runtime="bubblewrap")
        running = sandbox.start(["sh", "-c", "sleep 3; echo through"])
        own_postgres.stop()
        status, _, document = server.get("/readyz")
        assert (status, document["missing"]) == (503, ["store"])
        for document in ({"shell": "echo 1"}, {"shell": "echo 2", "runtime": "bubblewrap"}):
            answer, code = posted(server, "/v1/runs", document)
            assert (answer.status, code) == (503, "store_error")
            assert answer.getheader("retry-after") is not None
        assert server.get(f"/v1/sandboxes/{sandbox.id}")[0] == 503
        time.sleep(4)
        own_postgres.start()
        server.ready()
        assert running.wait().stdout.text == "through\n"
        assert client.run(runtime="bubblewrap", shell="echo after").result.stdout.text == "after\n"


def posted(server: Replicas, path: str, document: Any) -> tuple[http.client.HTTPResponse, str]:
    import json

    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Authorization": f"Bearer {server.key}", "Content-Type": "application/json"}
    connection.request("POST", path, json.dumps(document), headers)
    answer = connection.getresponse()
    code = json.loads(answer.read()).get("code")
    connection.close()
    return answer, code


def test_a_server_that_starts_before_its_store_answers_and_waits_for_it(
    own_postgres: PostgresServer, make: Make
) -> None:
    url = own_postgres.fresh_database()
    own_postgres.stop()
    server = make(CORRAL_DATABASE_URL=url).start()
    assert server.get("/healthz")[0] == 200
    status, _, document = server.get("/readyz")
    assert (status, document) == (503, {"status": "starting", "missing": ["store"]})
    answer, code = posted(server, "/v1/runs", {"shell": "echo 1"})
    assert (answer.status, code, answer.getheader("retry-after")) == (503, "store_error", "1")
    own_postgres.start()
    server.ready()
    with server.client() as client:
        assert client.run(runtime="bubblewrap", shell="echo after").result.stdout.text == "after\n"


def test_without_redis_all_is_slower_and_nothing_fails(make: Make) -> None:
    mine = RedisServer()
    mine.start()
    try:
        server = make(CORRAL_REDIS_URL=mine.url).start().ready()
        mine.kill()
        until(lambda: server.get("/readyz")[2].get("warnings") == ["coordination"], "the warning")
        assert server.get("/readyz")[0] == 200
        with Load(server, 2) as load:
            load.more(4)
        assert load.failures == []
        mine.start()
        until(lambda: "warnings" not in server.get("/readyz")[2])
    finally:
        mine.close()


@pytest.mark.parametrize(
    ("words", "environment", "code", "field"),
    [
        (["--replicas", "2"], {}, "not_supported_yet", "--replicas"),
        (["--redis-url", "redis://127.0.0.1:1/0"], {}, "invalid_value", "--redis-url"),
        (["--replicas", "2"], {"CORRAL_DATABASE_URL": "postgresql:///none"}, "invalid_value", "--redis-url"),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_hint(
    tmp_path: Path, words: list[str], environment: dict[str, str], code: str, field: str
) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CORRAL_")}
    done = subprocess.run(
        [sys.executable, "-c", "from corral.cli.main import main; main()", "serve", "--port", "0", *words],
        env={**clean, "CORRAL_STATE_DIR": str(tmp_path / "state"), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 125
    assert done.stderr.startswith(f"corral: {code}: "), done.stderr
    assert "--redis-url" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_database_that_cannot_be_used_is_refused_at_the_start(make: Make, postgres: PostgresServer) -> None:
    server = make(CORRAL_DATABASE_URL=postgres.url("there_is_no_such_database"))
    done = subprocess.run(
        [sys.executable, "-c", "from corral.cli.main import main; main()", "serve", "--port", "0", "--replicas", "2"],
        env=server.environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (125, "")
    assert "corral: store_error: " in done.stderr
    assert "there_is_no_such_database" in done.stderr


async def test_a_node_by_itself_owns_the_state_directory_and_adopts_after_it_was_killed(tmp_path: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("CORRAL_")}
    environment = {**clean, "CORRAL_STATE_DIR": str(tmp_path), "CORRAL_RUNTIMES": "fake"}
    words = [sys.executable, "-c", "from corral.cli.main import main; main()"]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen([*words, "node", "serve"], env=environment, stderr=subprocess.DEVNULL)

    process = start()
    try:
        node: Any = RemoteNode(str(tmp_path / "node.sock"), patience_s=120.0)
        await node.open()
        (info,) = await node.runtimes()
        assert info.name == "fake"
        beside = [*words, "serve", "--port", "0"]
        done = await asyncio.to_thread(
            subprocess.run, beside, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 125
        assert "state_locked" in done.stderr and "node serve" in done.stderr
        process.kill()
        process.wait()
        process = start()
        assert (await node.host()).cpus >= 1
        assert [one.name for one in await node.runtimes(fresh=True)] == ["fake"]
        await node.close()
        process.terminate()
        assert await asyncio.to_thread(process.wait, 60) == 0
    finally:
        process.kill()
        process.wait()


def test_uploads_and_downloads_stream_through_the_node(server: Replicas) -> None:
    with server.client() as client:
        sandbox = client.sandboxes.create(runtime="bubblewrap")
        data = os.urandom(8 * 1024 * 1024)
        sandbox.files.write("big", data)
        assert sandbox.files.read("big") == data
        archive = b"".join(sandbox.archive.get("/workspace"))
        sandbox.archive.put("/workspace/copy", archive)
        (copied,) = [item.path for item in sandbox.files.list("/workspace/copy", recursive=True) if item.type == "file"]
        assert sandbox.files.read(copied) == data
        with pytest.raises(CorralError) as missing:
            sandbox.files.read("none")
        assert missing.value.code == "not_found"
