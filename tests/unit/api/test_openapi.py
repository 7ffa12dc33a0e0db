"""The OpenAPI document says what the tables say. To renew the committed copy: `python -m corral.api.openapi > docs/reference/openapi.json`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from corral.api import calls, files, identity, openapi, routes, schemas
from corral.domain import request
from corral.domain.request import HostCaps, parse_exec, parse_run, parse_sandbox
from corral.errors import CorralError

COMMITTED = Path(__file__).resolve().parents[3] / "docs" / "reference" / "openapi.json"
HOST = HostCaps(2**40, 64)


def test_the_committed_document_is_the_one_that_is_served() -> None:
    assert COMMITTED.read_text(encoding="utf-8") == openapi.text()


def test_a_route_that_nobody_described_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    extra = calls.Route("GET", "/v1/unknown", routes.healthz)
    monkeypatch.setattr(openapi, "ROUTES", (*routes.ROUTES, extra))
    with pytest.raises(KeyError, match="unknown"):
        openapi.document.__wrapped__()
    monkeypatch.setattr(openapi, "ROUTES", routes.ROUTES[1:])
    with pytest.raises(ValueError, match="without a route"):
        openapi.document.__wrapped__()


@pytest.mark.parametrize(
    "name, parse, least",
    [
        ("RunRequest", parse_run, {"shell": "true"}),
        ("SandboxRequest", parse_sandbox, {}),
        ("ExecRequest", parse_exec, {"shell": "true"}),
    ],
)
def test_each_field_of_a_request_is_known_to_its_parser_and_the_others_are_not(
    name: str, parse: Any, least: dict[str, Any]
) -> None:
    schema = openapi.document()["components"]["schemas"][name]
    assert schema["additionalProperties"] is False
    for field in schema["properties"]:
        parse({**least, field: None} if field not in least else least, HOST)  # null is the same as not said
    assert "memory" not in schema["properties"] or name != "ExecRequest"
    with pytest.raises(CorralError, match="no field"):
        parse({**least, "unheard_of": None}, HOST)


def test_fields_of_later_versions_are_listed_as_such() -> None:
    properties = openapi.document()["components"]["schemas"]["RunRequest"]["properties"]
    for name in request.LATER_FIELDS:
        assert properties[name] == schemas.LATER


def test_every_reference_leads_somewhere() -> None:
    text = openapi.text()
    document = json.loads(text)
    for kind, name in set(re.findall(r"#/components/(\w+)/(\w+)", text)):
        assert name in document["components"][kind]


def test_query_parameters_are_those_that_the_handlers_read() -> None:
    read = set()
    for module in (calls, routes, files, identity):
        source = Path(str(module.__file__)).read_text(encoding="utf-8")
        readers = "seconds_of|flag_of|integer_of|choice_of|ident_of"
        read |= set(re.findall(rf'(?:(?:{readers})\(request, |request\.query\.get\()"(\w+)"', source))
    documented = {name for operation in openapi.OPERATIONS.values() for name in operation.query}
    assert documented == set(openapi.QUERY), "a parameter that no operation takes"
    assert read <= documented
    assert documented - read <= {"path", "path_base64", "encoding"}, "read by path_of and by the WebSocket"
