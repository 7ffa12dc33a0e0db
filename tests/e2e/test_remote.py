"""Every command against a server by URL: what the command line shows is the same as on a state directory."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from acceptance.conftest import Box, eventually, marked

from .conftest import KEY, Served
from .test_command_line import (
    test_a_file_runs_by_its_extension_and_lies_in_the_workspace,
    test_a_missing_directory_is_refused_by_name,
    test_a_program_that_is_not_there_is_127_and_named,
    test_a_reader_that_leaves_ends_the_run,
    test_a_sandbox_lives_from_create_to_rm,
    test_a_signal_to_us_ends_everything_inside,
    test_agent_view_folds_and_fits,
    test_bad_values_are_refused_with_code_field_and_hint,
    test_code_prints_and_nothing_is_added,
    test_cp_takes_trees_in_and_out,
    test_death_by_signal_is_128_plus_n,
    test_doctor_names_runtimes_and_a_default,
    test_document_has_all_members_of_the_contract,
    test_files_go_in_and_artifacts_come_out,
    test_kept_sandbox_stays_usable,
    test_logs_give_the_raw_bytes_of_each_stream,
    test_output_arrives_while_the_program_runs,
    test_runs_are_listed_and_shown,
    test_shell_stdin_env_and_cwd,
    test_streams_stay_apart_and_bytes_stay_bytes,
    test_tables_are_for_people,
    test_the_programs_exit_status_is_ours,
    test_timeout_is_124_with_partial_output,
    test_what_never_existed_is_not_found,
    test_words_that_are_not_utf8_reach_the_program,
    test_wrong_usage_is_2,
)

__all__ = [
    "test_a_file_runs_by_its_extension_and_lies_in_the_workspace",
    "test_a_missing_directory_is_refused_by_name",
    "test_a_program_that_is_not_there_is_127_and_named",
    "test_a_reader_that_leaves_ends_the_run",
    "test_a_sandbox_lives_from_create_to_rm",
    "test_a_signal_to_us_ends_everything_inside",
    "test_agent_view_folds_and_fits",
    "test_bad_values_are_refused_with_code_field_and_hint",
    "test_code_prints_and_nothing_is_added",
    "test_cp_takes_trees_in_and_out",
    "test_death_by_signal_is_128_plus_n",
    "test_doctor_names_runtimes_and_a_default",
    "test_document_has_all_members_of_the_contract",
    "test_files_go_in_and_artifacts_come_out",
    "test_kept_sandbox_stays_usable",
    "test_logs_give_the_raw_bytes_of_each_stream",
    "test_output_arrives_while_the_program_runs",
    "test_runs_are_listed_and_shown",
    "test_shell_stdin_env_and_cwd",
    "test_streams_stay_apart_and_bytes_stay_bytes",
    "test_tables_are_for_people",
    "test_the_programs_exit_status_is_ours",
    "test_timeout_is_124_with_partial_output",
    "test_what_never_existed_is_not_found",
    "test_words_that_are_not_utf8_reach_the_program",
    "test_wrong_usage_is_2",
]


@pytest.fixture(scope="session")
def box(served: Served) -> Box:
    """Commands that go to the server; they know no state directory."""
    return served.remote


@pytest.fixture(scope="session")
def one(served: Served) -> Box:
    """The same."""
    return served.remote


@pytest.fixture(scope="session")
def sandbox(box: Box) -> str:
    """One sandbox for tests that leave it as it was."""
    return box.sandbox()


def elsewhere(box: Box, **more: str) -> Box:
    """The same commands with another environment."""
    return Box(box.name, box.runtime, box.state, box.prefix, box.program, box.env | more)


def refusal(box: Box, *words: str) -> dict[str, Any]:
    """The error of a command, which is the same as a document and as a line."""
    status, document = box.document(*words, "--json")
    assert status == 125 and list(document) == ["error"]
    error: dict[str, Any] = document["error"]
    said = box(*words)
    assert (said.returncode, said.stdout) == (125, b"")
    assert said.stderr.decode().startswith(f"corral: {error['code']}: ") and error["hint"] in said.stderr.decode()
    return error


# -- what was kept on the server is there for whoever comes by its directory, and the other way round --------------------------
def test_both_ways_to_a_service_show_the_same(served: Served) -> None:
    sandbox = served.local.sandbox()
    assert served.remote("exec", sandbox, "--", "sh", "-c", "echo there > f").returncode == 0
    assert served.local("exec", sandbox, "--", "cat", "f").stdout == b"there\n"
    assert served.remote("sandbox", "rm", sandbox).returncode == 0
    told = served.local.document("sandbox", "inspect", sandbox, "--json")[1]
    assert told["state"] == "terminated"


def test_artifacts_of_exec_are_written_where_the_command_runs(box: Box, tmp_path: Path) -> None:
    sandbox = box.sandbox()
    done = box("exec", sandbox, "--outputs", "*.txt", "--out", str(tmp_path / "o"), "--", "sh", "-c", "echo x > a.txt")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "o" / "a.txt").read_bytes() == b"x\n"
    assert box("sandbox", "rm", sandbox).returncode == 0


def test_logs_follow_to_the_end(box: Box) -> None:
    process = box.popen("run", "--", "sh", "-c", "echo one; sleep 4; echo two >&2; echo three")
    assert process.stdout is not None and process.stdout.readline() == b"one\n"
    [run] = [r for r in box.document("runs", "--json")[1]["items"] if r["state"] == "running"]
    both = box.popen("logs", "--follow", run["id"])
    only = box.popen("logs", "--follow", "--stream", "stdout", run["id"])
    for reader in (both, only):
        assert reader.stdout is not None and reader.stdout.readline() == b"one\n"
    assert process.wait(60) == 0
    assert both.communicate(timeout=60) == (b"three\n", b"two\n") and both.returncode == 0
    assert only.communicate(timeout=60) == (b"three\n", b"") and only.returncode == 0


def test_cancel_ends_a_run_for_whoever_follows_it(box: Box, marker: str) -> None:
    process = box.popen("run", "--", "bash", "-c", f"echo up; exec -a {marker} sleep 300")
    assert process.stdout is not None and process.stdout.readline() == b"up\n"
    [run] = [r for r in box.document("runs", "--json")[1]["items"] if r["state"] == "running"]
    assert box.document("cancel", run["id"], "--json")[1]["result"]["reason"] == "cancelled"
    assert process.wait(60) == 137
    eventually(lambda: not marked(marker), what="nothing of the run lives")


def test_ctrl_c_during_json_gives_the_document_and_130(box: Box) -> None:
    process = box.popen("run", "--json", "--", "sh", "-c", "echo begun; sleep 300")
    eventually(lambda: any(r["state"] == "running" for r in box.document("runs", "--json")[1]["items"]), what="it runs")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert json.loads(out)["result"]["reason"] == "cancelled"


def test_gc_and_templates_answer(box: Box) -> None:
    status, told = box.document("gc", "--json")
    assert status == 0 and told["removed"].get("failed", 0) == 0
    assert "host" in box("template", "ls").stdout.decode()


# -- no way to the server ------------------------------------------------------------------------------------------------------
def test_a_missing_or_wrong_key_is_told(box: Box) -> None:
    for key in ("", "wrong" * 8):
        error = refusal(elsewhere(box, CORRAL_KEY=key), "sandbox", "ls")
        assert error["code"] == "unauthorized" and "CORRAL_KEY" in error["hint"]


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8484", "ftp://127.0.0.1/", "http://", "http://127.0.0.1:x", "http://h/?k=v"]
)
def test_what_is_no_address_is_told(box: Box, url: str) -> None:
    error = refusal(elsewhere(box, CORRAL_URL=url), "runs")
    assert (error["code"], error["field"]) == ("invalid_value", "CORRAL_URL")


def test_a_server_that_is_not_there_is_told_with_its_address(box: Box) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    error = refusal(elsewhere(box, CORRAL_URL=f"http://127.0.0.1:{port}"), "doctor")
    assert error["code"] == "node_unavailable" and f"127.0.0.1:{port}" in error["hint"]


def test_a_host_that_is_not_there_is_told(box: Box) -> None:
    error = refusal(elsewhere(box, CORRAL_URL="http://no-such-host.invalid"), "runs")
    assert error["code"] == "node_unavailable" and "no-such-host.invalid" in error["detail"]


def test_tls_with_a_server_that_speaks_none_is_told(box: Box, served: Served) -> None:
    error = refusal(elsewhere(box, CORRAL_URL=f"https://127.0.0.1:{served.port}"), "runs")
    assert error["code"] == "node_unavailable" and "TLS" in error["detail"] and "http://" in error["hint"]


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for 127.0.0.1 that signs itself, with its key in the same file."""
    made = tmp_path_factory.mktemp("tls") / "both.pem"
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=here", "-addext",
             "subjectAltName=IP:127.0.0.1", "-keyout", str(made), "-out", f"{made}.crt"]  # fmt: skip
    subprocess.run(words, check=True, capture_output=True)
    made.write_bytes(made.read_bytes() + Path(f"{made}.crt").read_bytes())
    for path in (made, Path(f"{made}.crt")):
        path.chmod(0o644)
    return made


@pytest.fixture
def behind_tls(served: Served, certificate: Path) -> Iterator[int]:
    """A port of loopback that speaks TLS and passes on to the server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    listener = socket.create_server(("127.0.0.1", 0))

    def carry(source: socket.socket, target: socket.socket) -> None:
        try:
            while block := source.recv(65536):
                target.sendall(block)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def accept() -> None:
        while True:
            try:
                near = context.wrap_socket(listener.accept()[0], server_side=True)
            except ssl.SSLError:
                continue
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", served.port))
            for pair in ((near, far), (far, near)):
                threading.Thread(target=carry, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def test_a_certificate_that_nobody_vouches_for_is_told_and_one_that_is_named_works(
    box: Box, behind_tls: int, certificate: Path
) -> None:
    there = elsewhere(box, CORRAL_URL=f"https://127.0.0.1:{behind_tls}")
    error = refusal(there, "runs")
    assert (
        error["code"] == "node_unavailable" and "not trusted" in error["detail"] and "CORRAL_CA_FILE" in error["hint"]
    )
    for parent in certificate.parents:
        if parent.stat().st_uid == certificate.stat().st_uid and "pytest" in str(parent):
            parent.chmod(0o755)
    trusting = elsewhere(there, CORRAL_CA_FILE=f"{certificate}.crt")
    done = trusting("run", "-c", "print('你好')")
    assert (done.returncode, done.stdout) == (0, "你好\n".encode()), done.stderr
    assert b"PEM" in elsewhere(there, CORRAL_CA_FILE=os.devnull)("runs").stderr


def test_something_else_at_the_address_is_told(box: Box) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            while True:
                try:
                    near, _ = listener.accept()
                except OSError:
                    return
                with near:
                    near.recv(65536)
                    near.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\nConnection: close\r\n\r\nwhat?")

        threading.Thread(target=answer, daemon=True).start()
        there = elsewhere(box, CORRAL_URL=f"http://127.0.0.1:{listener.getsockname()[1]}")
        error = refusal(there, "runs")
        listener.shutdown(socket.SHUT_RDWR)
    assert error["code"] == "infra_error" and "CORRAL_URL" in error["hint"]


def test_the_key_is_never_shown(box: Box) -> None:
    for words in (["runs"], ["doctor"], ["run", "-c", "import os; print(os.environ)"]):
        done = box(*words)
        assert KEY.encode() not in done.stdout + done.stderr
