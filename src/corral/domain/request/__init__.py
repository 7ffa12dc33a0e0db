"""What a caller asks for: parsed from JSON with an exact error for each bad value. The words are those of the contract (1 and 5).

`parse_run`, `parse_sandbox`, `parse_exec` take the decoded JSON object and return frozen values, or raise `CorralError` with
`field` = JSON pointer: `invalid_value` (does not parse, <= 0, over the host), `not_supported_yet` (a field of the schema that this
version cannot honour, named), `unknown_language`, `too_large`. Unknown members are refused by name with the nearest known one.

The modules here have one `read_…` per member: it answers the checked value, or the default where nothing is said.
"""

from __future__ import annotations

from corral.domain.request.asked import (
    ExecRequest,
    FileIn,
    HostCaps,
    Placement,
    ResourceWishes,
    RunRequest,
    SandboxRequest,
)
from corral.domain.request.documents import parse_exec, parse_run, parse_sandbox
from corral.domain.request.fields import EXEC_FIELDS, LATER_FIELDS, RESOURCE_FIELDS, RUN_FIELDS, SANDBOX_FIELDS
from corral.domain.request.files import MAX_FILES
from corral.domain.request.program import MAX_CODE, language_of
from corral.domain.request.wishes import ISOLATIONS

__all__ = [
    "EXEC_FIELDS",
    "ISOLATIONS",
    "LATER_FIELDS",
    "MAX_CODE",
    "MAX_FILES",
    "RESOURCE_FIELDS",
    "RUN_FIELDS",
    "SANDBOX_FIELDS",
    "ExecRequest",
    "FileIn",
    "HostCaps",
    "Placement",
    "ResourceWishes",
    "RunRequest",
    "SandboxRequest",
    "language_of",
    "parse_exec",
    "parse_run",
    "parse_sandbox",
]
