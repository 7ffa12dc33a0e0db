"""The runtime in the hands of another process: one with another uid, or one that dies at a fault point."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from corral.domain.limits import Limits
from corral.linux import sockets
from corral.ports.runtime import InstanceRef, InstanceSpec
from corral.testing.runtime.bench import CHECKS, Bench, Config, NotApplicable, run_check


async def do_elsewhere(bench: Bench, verb: str, spec: InstanceSpec, *, fault: str = "", **more: Any) -> tuple[int, Any]:
    """Do one thing with the runtime in another process; -> (exit status, its answer)."""
    if bench.config.scripted:
        raise NotApplicable("an instance lives only as long as its creator")
    job = json.dumps({"verb": verb, "spec": _spec_json(spec), **more})
    environment = {
        **os.environ,
        "CORRAL_FAULT_POINTS": f"{fault}=kill" if fault else "",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "corral.testing.runtime", bench.config.to_json(), job),
        stdout=subprocess.PIPE,
        env=environment,
    )
    assert child.stdout is not None
    # One line, not end of file: what outlives the child could hold its output open.
    line = await asyncio.wait_for(child.stdout.readline(), 120)
    status = await asyncio.wait_for(child.wait(), 120)
    return status, json.loads(line) if line else None


def _spec_json(spec: InstanceSpec) -> dict[str, Any]:
    return {**asdict(spec), "unsafe": sorted(spec.unsafe)}


def _spec_of(values: dict[str, Any]) -> InstanceSpec:
    changed = {
        "limits": Limits(**values["limits"]),
        "unsafe": frozenset(values["unsafe"]),
        "guest_argv": tuple(values["guest_argv"]),
    }
    return InstanceSpec(**{**values, **changed})


async def _do(config: Config, job: dict[str, Any]) -> Any:
    runtime, spec = config.make(), _spec_of(job["spec"])
    ref = InstanceRef(**job["ref"]) if "ref" in job else runtime.partial_ref(spec.directory, spec.instance_id)
    if job["verb"] == "attach":
        return await runtime.attach(ref) is not None
    if job["verb"] == "destroy":
        return asdict(await runtime.destroy(ref))
    with sockets.listen(spec.directory, "s") as control:
        instance = await runtime.create(spec, control)
    print(json.dumps(asdict(instance.ref)), flush=True)
    if job["verb"] == "create_and_die":
        signal.raise_signal(signal.SIGKILL)
    return None


def main(arguments: list[str]) -> int:
    """CONFIG and the id of a check, or CONFIG and what `do_elsewhere` asks for; the answer is one JSON line."""
    config, what = Config.from_json(arguments[0]), arguments[1]
    if what.startswith("{"):
        answer = asyncio.run(_do(config, json.loads(what)))
        print(json.dumps(answer), flush=True)
        return 0
    try:
        asyncio.run(run_check(dict(CHECKS)[what], config))
    except NotApplicable as reason:
        print(json.dumps({"not_applicable": str(reason)}))
    else:
        print(json.dumps({"passed": what}))
    return 0
