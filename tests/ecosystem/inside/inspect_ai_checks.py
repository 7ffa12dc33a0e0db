"""inspect_ai's own checks of a sandbox, over the plug. Runs in the environment of `inspect-ai.lock`, started by `test_inspect_ai.py`."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator

import pytest
from inspect_ai.util import SandboxEnvironment, SandboxUserUnsupportedError
from inspect_ai.util._sandbox.registry import registry_find_sandboxenv
from inspect_ai.util._sandbox.self_check import *  # noqa: F403

CANNOT = {
    "test_exec_as_user": "makes an account as root: the users of a sandbox are fixed, its root file system is not writable, "
    "and the policy refuses root",
}


@pytest.fixture
async def sandbox_env(request: pytest.FixtureRequest) -> AsyncIterator[SandboxEnvironment]:
    """A sandbox of a sample, from the registry, as inspect_ai finds and makes it."""
    if (why := CANNOT.get(request.node.originalname)) is not None:
        request.node.add_marker(pytest.mark.xfail(reason=why, raises=SandboxUserUnsupportedError, strict=True))
    plug = registry_find_sandboxenv("corral")
    config = plug.config_deserialize({"runtime": os.environ["ECOSYSTEM_RUNTIME"], "disk": "2G"})
    await plug.task_init("checks", config)
    try:
        environments = await plug.sample_init("checks", config, {})
        try:
            [environment] = environments.values()
            shown = await environment.exec(["ps", "-o", "args="])
            assert "ps -o args=" in shown.stdout, "the checks look for processes with ps"
            yield environment
        finally:
            await plug.sample_cleanup("checks", config, environments, False)
    finally:
        await plug.task_cleanup("checks", config, True)
