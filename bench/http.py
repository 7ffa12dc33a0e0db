"""What an exec over HTTP costs, layer by layer: the program, the node's driver, the service in process, the service over HTTP.

    .venv/bin/python -m bench.http [--rounds 60] [--peers fork,http-bubblewrap,…] [--json FILE]

Per runtime the same `/bin/true`, every layer once per round: `driver` asks the node, which asks the guest (no rows, no policy);
`service` is the embedded API (policy, lease and rows, each committed); `http` is the same from another process over TCP, with a key.
What a layer adds is the difference to the one below within a round, as a multiple of fork+exec in that round.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.run import Bench, Peer, arguments, conduct, interval, show
from bench.server import Server

RUNTIMES = ("bubblewrap", "crun")
IDLE_S = 3.0
LAYERS = ("fork", "driver", "service", "http")
ADDED = {"driver": "node and guest", "service": "policy, lease and rows", "http": "HTTP, key and another process"}


class Layers(Bench):
    """One embedded service and one server, each with a warm sandbox per runtime."""

    def __init__(self, scratch: Path) -> None:
        super().__init__(scratch)
        self._server: Server | None = None
        self._sandboxes: dict[str, str] = {}

    def server(self) -> Server:
        if self._server is None:
            self._server = Server(self.scratch / "state-serve")
            self.undo.callback(self._server.close)
        return self._server

    def sandbox(self, runtime: str) -> str:
        """The embedded one of a runtime."""
        if runtime not in self._sandboxes:
            self._usable(runtime)
            made = self.transport().request("POST", "/v1/sandboxes", json={"runtime": runtime})["id"]
            self.undo.callback(lambda: self.transport().request("DELETE", f"/v1/sandboxes/{made}"))
            self._sandboxes[runtime] = made
        return self._sandboxes[runtime]

    def driver(self, runtime: str) -> Peer:
        from corral.domain.fence import Fence
        from corral.domain.ids import new_id
        from corral.ports.node import ExecSpec
        from corral.services.execs import environment

        sandbox = self.transport().request("GET", f"/v1/sandboxes/{self.sandbox(runtime)}")
        instance = self._instance(self.sandbox(runtime))
        fence = Fence(sandbox["incarnation"], sandbox["lease_version"])
        owner: Any = self.transport().owner
        node = owner._node
        done: list[str] = []

        async def work() -> None:
            exec_id = new_id("exe", time.time_ns() // 1_000_000, secrets.token_bytes(10))
            await node.start_exec(instance, fence, ExecSpec(exec_id, ("/bin/true",), environment("sandbox")))
            facts = await node.wait_exec(exec_id)
            done.append(exec_id)
            if facts.exit_code != 0:
                raise RuntimeError(facts)

        def forget() -> None:
            while done:
                owner.submit(node.forget_exec(done.pop())).result(60)

        return Peer(
            f"driver-{runtime}",
            f"node and guest alone, in process, {runtime}",
            "fork",
            lambda: owner.submit(work()).result(60),
            close=forget,
        )

    def _instance(self, sandbox: str) -> str:
        found = self.transport().request("GET", f"/v1/sandboxes/{sandbox}")
        return str(found["instance"]["id"])

    def service(self, runtime: str) -> Peer:
        sandbox = self.sandbox(runtime)
        what = f"the API in process: policy, lease, rows, {runtime}"
        return Peer(f"service-{runtime}", what, "fork", lambda: void(self._exec(sandbox, ["/bin/true"])))

    def http(self, runtime: str) -> Peer:
        self._usable(runtime)
        server = self.server()
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        self.undo.callback(connection.close)
        used = time.monotonic()

        def call(method: str, path: str, document: Any = None) -> Any:
            nonlocal used
            if time.monotonic() - used > IDLE_S:  # the server may have ended it
                connection.close()
            body = None if document is None else json.dumps(document)
            connection.request(method, path, body, {"Authorization": f"Bearer {server.key}"})
            answer = connection.getresponse()
            told = json.loads(answer.read())
            used = time.monotonic()
            if answer.status >= 300:
                raise RuntimeError(told)
            return told

        sandbox = call("POST", "/v1/sandboxes", {"runtime": runtime})["id"]
        self.undo.callback(lambda: call("DELETE", f"/v1/sandboxes/{sandbox}"))

        def once() -> None:
            told = call("POST", f"/v1/sandboxes/{sandbox}/execs", {"argv": ["/bin/true"]})
            if told["result"]["reason"] != "ok":
                raise RuntimeError(told["result"])

        return Peer(f"http-{runtime}", f"the API over HTTP, {runtime}", "fork", once)


def void(_: object) -> None:
    """For a lambda whose value nobody wants."""


def makers(layers: Layers) -> dict[str, Callable[[], Peer]]:
    made: dict[str, Callable[[], Peer]] = {"fork": layers.fork}
    for runtime in RUNTIMES:
        made[f"driver-{runtime}"] = lambda runtime=runtime: layers.driver(runtime)
        made[f"service-{runtime}"] = lambda runtime=runtime: layers.service(runtime)
        made[f"http-{runtime}"] = lambda runtime=runtime: layers.http(runtime)
    return made


def split(peers: list[Peer], kept: list[int], seed: int) -> list[dict[str, Any]]:
    """What each layer adds to the one below it, in forks of the same round and in milliseconds."""
    rng = random.Random(seed)
    times = {peer.name: peer.times for peer in peers}
    rows = []
    for runtime in RUNTIMES:
        below = "fork"
        for layer in LAYERS[1:]:
            name = f"{layer}-{runtime}"
            if name not in times or below not in times:
                continue
            more = [times[name][i] - times[below][i] for i in kept]
            forks = [added / times["fork"][i] for added, i in zip(more, kept, strict=True)]
            rows.append(
                {"runtime": runtime, "layer": layer, "what": ADDED[layer], "forks": interval(forks, rng)}
                | {"median_ms": statistics.median(more)}
            )
            below = name
    return rows


def main() -> int:
    options = arguments(__doc__).parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="cb-"))
    scratch.chmod(0o755)
    layers = Layers(scratch)
    report, peers, kept = conduct(options, scratch, layers.undo, makers(layers))
    report["split"] = split(peers, kept, options.seed)
    status = show(report, options.json)
    print("\nwhat each layer adds, in forks of the same round [95 %]")
    for row in report["split"]:
        middle, low, high = row["forks"]
        print(
            f"{row['runtime']:<11} {row['layer']:<8} {middle:6.2f} [{low:.2f} {high:.2f}]  {row['median_ms']:7.2f} ms  {row['what']}"
        )
    return status


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
