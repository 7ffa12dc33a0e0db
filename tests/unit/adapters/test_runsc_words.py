"""What runsc is told: never what ends a sandbox or a host, and within the limits."""

from __future__ import annotations

import itertools
import json

import pytest

from corral.adapters.runtimes import _runsc
from corral.domain.limits import MIB, Limits
from corral.ports.runtime import InstanceSpec

SPEC = InstanceSpec("ins_1", "sbx_1", 1, "x", "/d", "/base", "/python", ("/guest", "--instance", "ins_1"), Limits())
VIEW = "/run/view"


def configuration(spec: InstanceSpec = SPEC, exec_filter: bytes | None = b"\x01\x02") -> dict:
    return _runsc.configuration(spec, view=VIEW, open_files=1024, exec_filter=exec_filter)


def commands() -> list[list[str]]:
    start = [
        _runsc.start_command("runsc", SPEC, view=VIEW, to_guest="/d/in", from_guest="/d/out", restored=restored)
        for restored in (False, True)
    ]
    return [
        *start,
        _runsc.checkpoint_command("runsc", view=VIEW, user_namespace="/proc/1/fd/9", instance_id="ins_1"),
    ]


def test_the_platform_is_always_the_one_that_cannot_hang() -> None:
    for command in commands():
        assert "--platform=ptrace" in command
        assert not any("kvm" in word for word in command)


def test_a_snapshot_never_leaves_running_and_a_start_never_stays() -> None:
    run, restore, checkpoint = commands()
    assert "checkpoint" in checkpoint and not any("leave-running" in word for word in checkpoint)
    assert "run" in run and "-detach" in run and "restore" not in run
    assert "restore" in restore and "-detach" in restore
    assert restore[restore.index("-image-path") + 1] == f"{VIEW}/{_runsc.IMAGE}"


def test_every_start_is_in_namespaces_of_the_instance() -> None:
    for command in commands()[:2]:
        assert command[:2] == ["/bin/sh", "-c"]
        assert "--net=" in command[2] and "--user=/proc/self/fd/7" in command[2] and "exec 7<&-" in command[2]
    enter = ["nsenter", f"--net={VIEW}/{_runsc.NETWORK}", "--", "nsenter", "--user=/proc/1/fd/9", "--", "runsc"]
    assert commands()[2][: len(enter)] == enter


def test_the_guest_talks_over_its_standard_streams_and_gets_the_filter_in_words() -> None:
    arguments = configuration()["process"]["args"]
    assert arguments[:3] == list(SPEC.guest_argv)
    assert arguments[3:] == ["--cover-proc", _runsc.COVERED, "--seccomp-exec", "hex:0102", "--control-fifo"]
    assert "--seccomp-exec" not in configuration(exec_filter=None)["process"]["args"]


def test_the_tree_is_writable_for_gvisor_because_the_host_holds_it_read_only() -> None:
    shown = configuration()
    assert shown["root"] == {"path": f"{VIEW}/root", "readonly": False}
    assert "seccomp" not in shown["linux"] and "resources" not in shown["linux"]
    assert {mount["type"] for mount in shown["mounts"]} == {"proc", "tmpfs"}
    for mount in shown["mounts"][1:]:
        assert any(option.startswith("size=") for option in mount["options"]), mount


@pytest.mark.parametrize("pids", [1, 4, 128])
def test_processes_are_limited_inside_and_far_above_that_on_the_host(pids: int) -> None:
    limits = Limits(pids=pids)
    spec = InstanceSpec(**{**vars(SPEC), "limits": limits})
    inside = {one["type"]: one for one in configuration(spec)["process"]["rlimits"]}["RLIMIT_NPROC"]
    assert 1 <= inside["hard"] == inside["soft"] <= max(1, pids - 1)
    assert _runsc.host_limits(limits, launching=False).pids > 10 * pids


def test_only_the_launch_may_use_more_memory_than_the_sandbox() -> None:
    limits = Limits(memory_bytes=100 * MIB)
    assert _runsc.host_limits(limits, launching=False).memory_bytes == limits.memory_bytes
    assert _runsc.host_limits(limits, launching=True).memory_bytes > limits.memory_bytes


@pytest.mark.parametrize(
    "record", ["", "[]", "null", "{", '{"goferPid": -1}', '{"goferPid": 1}', '{"goferPid": true}', "{}"]
)
def test_a_record_without_a_gofer_names_no_process(record: str) -> None:
    assert _runsc.gofer_pid(record) is None


def test_the_gofer_is_named_by_the_record() -> None:
    assert _runsc.gofer_pid(json.dumps({"goferPid": 4711, "sandbox": {"pid": 12}})) == 4711


def test_the_program_of_the_probe_is_one_loadable_piece() -> None:
    program = _runsc.probe_program("x86_64")
    assert program is not None and program.startswith(b"\x7fELF") and program.endswith(b"/tmp/f\0--")
    fields = [int.from_bytes(program[at : at + 8], "little") for at in range(64 + 8, 120, 8)]
    offset, address, _, in_file, in_memory, _ = fields
    assert (offset, in_file) == (0, len(program)) and in_memory > 2 * MIB and address == 0x400000
    assert all(letter in _runsc.PROBED for letter in "tp")
    assert _runsc.probe_program("sparc") is None
    assert len(set(itertools.chain(_runsc.PROBED.values()))) == len(_runsc.PROBED)
