"""What inspect_ai's checks do not ask of the plug: a configuration by file, cancellation, a sandbox that is gone."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import pytest
from inspect_ai.util import OutputLimitExceededError, SandboxUnavailableError

from corral.integrations.inspect_ai import CorralSandboxEnvironment as Plug


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[Plug]:
    """A sandbox of a configuration in a file, cleaned up as after an interruption."""
    config = str(tmp_path / "corral.yaml")
    Path(config).write_text("memory: 256M\ntimeout_s: 30\n")
    await Plug.task_init("plug", config)
    environments = await Plug.sample_init("plug", config, {})
    [environment] = environments.values()
    yield environment.as_type(Plug)
    await Plug.sample_cleanup("plug", config, environments, True)
    await Plug.task_cleanup("plug", config, True)


async def test_the_configuration_of_the_file_holds(box: Plug) -> None:
    assert box.sandbox.document["limits"]["memory"]["value"] == 256 * 2**20


async def test_a_cancelled_program_with_long_input_is_ended(box: Plug) -> None:
    with anyio.move_on_after(60) as scope:
        async with anyio.create_task_group() as group:
            group.start_soon(box.exec, ["sh", "-c", "touch begun; exec sleep 7777"], b"x" * 5_000_000)
            while not (await box.exec(["ls", "begun"])).success:
                await anyio.sleep(0.1)
            group.cancel_scope.cancel()
        while (await box.exec(["pgrep", "-f", "[s]leep 7777"])).success:
            await anyio.sleep(0.1)
    assert not scope.cancelled_caught


async def test_output_over_the_limit_and_a_missing_directory_are_errors(box: Plug) -> None:
    with pytest.raises(OutputLimitExceededError):
        await box.exec(["sh", "-c", "yes | head -c 11000000"])
    with pytest.raises(FileNotFoundError, match="nowhere"):
        await box.exec(["true"], cwd="nowhere")


async def test_long_input_that_is_not_read_harms_nothing(box: Plug) -> None:
    assert (await box.exec(["head", "-c", "1"], input="y" * 3_000_000)).stdout == "y"
    with pytest.raises(TimeoutError):
        await box.exec(["sleep", "60"], input="y" * 3_000_000, timeout=1)


async def test_a_sandbox_that_is_gone_is_unavailable(box: Plug) -> None:
    assert (await box.connection()).command == f"corral shell {box.sandbox.id}"
    await box.sandbox.delete()
    with pytest.raises(SandboxUnavailableError):
        await box.exec(["true"])
    with pytest.raises(SandboxUnavailableError):
        await box.read_file("x")
    with pytest.raises(ConnectionError):
        await box.connection()
