"""The one error type of Corral and the register of its codes.

An exception means that the platform refused or failed; a program's non-zero exit, time-out or death is a *result*, never raised.
Every error has a stable `code`, says whether trying again unchanged can help (`retryable`), and carries a `hint` that a model can
act on. `field` is a JSON pointer (RFC 6901) when one input value is to blame. `to_problem` is the RFC 9457 document.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Code:
    """What a code means everywhere: HTTP status, exit status of the command line, whether a retry can help."""

    status: int
    exit: int
    retryable: bool
    title: str


CODES: dict[str, Code] = {
    "bad_request": Code(400, 2, False, "The request cannot be read"),
    "usage": Code(400, 2, False, "Wrong usage of the command line"),
    "unauthorized": Code(401, 125, False, "A valid key is required"),
    "forbidden": Code(403, 125, False, "The key does not allow this"),
    "method_not_allowed": Code(405, 125, False, "The path does not take this method"),
    "request_timeout": Code(408, 125, True, "The request did not arrive in time"),
    "url_too_long": Code(414, 125, False, "The URL is too long"),
    "headers_too_large": Code(431, 125, False, "The headers are too large"),
    "overloaded": Code(503, 125, True, "The service has too much to do at this moment"),
    "not_found": Code(404, 125, False, "No such thing"),
    "invalid_value": Code(422, 125, False, "A value is not acceptable"),
    "unknown_language": Code(422, 125, False, "The language cannot be told"),
    "not_supported_yet": Code(422, 125, False, "This version cannot honour the field"),
    "missing_tool": Code(422, 125, False, "The template lacks a tool"),
    "cwd_not_found": Code(422, 125, False, "The working directory does not exist inside"),
    "user_refused": Code(403, 125, False, "The user is not allowed for execs"),
    "permission_denied": Code(403, 125, False, "The user inside may not do this"),
    "policy_denied": Code(403, 125, False, "Policy refuses this"),
    "already_exists": Code(409, 125, False, "Something of that name exists"),
    "not_empty": Code(409, 125, False, "The directory is not empty"),
    "idempotency_conflict": Code(409, 125, False, "The idempotency key was used with another body"),
    "conflict": Code(409, 125, True, "The state changed meanwhile"),
    "illegal_transition": Code(409, 125, False, "The state does not allow this"),
    "cancelled": Code(409, 130, False, "The call was stopped"),
    "lease_lost": Code(409, 125, False, "The lease is no longer held"),
    "superseded": Code(409, 125, True, "Another worker has taken this over"),
    "lease_held": Code(409, 125, True, "Another owner holds the lease"),
    "cursor_gone": Code(410, 125, False, "The output before the spool's start is gone"),
    "sandbox_deleted": Code(410, 125, False, "The sandbox was deleted"),
    "sandbox_paused": Code(409, 125, False, "The sandbox is paused"),
    "sandbox_lost": Code(410, 125, False, "The sandbox is gone"),
    "disk_full": Code(507, 125, False, "The sandbox's disk is full"),
    "is_a_directory": Code(422, 125, False, "A directory is where a file is asked for"),
    "not_a_directory": Code(422, 125, False, "A file is where a directory is asked for"),
    "not_a_file": Code(422, 125, False, "What lies there has no content that can be moved"),
    "range_not_satisfiable": Code(416, 125, False, "The file has no such part"),
    "too_large": Code(413, 125, False, "The request is too large"),
    "quota_exceeded": Code(429, 125, True, "The quota is used up"),
    "runtime_unavailable": Code(503, 125, False, "No runtime can do this here"),
    "isolation_unavailable": Code(503, 125, False, "No runtime here isolates as much as is asked for"),
    "template_unavailable": Code(503, 125, False, "The template cannot be built here"),
    "tenant_in_use": Code(409, 125, False, "The tenant has something that goes on"),
    "template_in_use": Code(409, 125, False, "A sandbox uses the template"),
    "node_unavailable": Code(503, 125, True, "The node does not answer"),
    "guest_lost": Code(503, 125, False, "The program inside the sandbox does not answer"),
    "shutting_down": Code(503, 125, True, "The service is stopping"),
    "state_locked": Code(503, 125, True, "The state directory is in use"),
    "queue_timeout": Code(503, 125, True, "No room came free in time"),
    "queue_full": Code(429, 125, True, "Too much waits already"),
    "rate_limited": Code(429, 125, True, "Too many calls"),
    "store_regressed": Code(503, 125, False, "The store is older than what the nodes have seen"),
    "issuer_unavailable": Code(503, 125, True, "The issuer of the token does not answer"),
    "store_error": Code(503, 125, True, "The store does not answer"),
    "infra_error": Code(500, 125, True, "The platform failed"),
}


class CorralError(Exception):
    """A refusal or failure with a stable code; `retryable` defaults to what the code says."""

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        hint: str | None = None,
        field: str | None = None,
        retryable: bool | None = None,
        **facts: Any,
    ) -> None:
        super().__init__(f"{code}: {detail}")
        known = CODES.get(code, CODES["infra_error"])
        self.code = code
        self.detail = detail
        self.hint = hint
        self.field = field
        self.status = known.status
        self.exit_status = known.exit
        self.title = known.title
        self.retryable = known.retryable if retryable is None else retryable
        self.facts = facts

    def to_problem(self) -> dict[str, Any]:
        """RFC 9457 document: type title status detail code retryable hint, `field` where one is to blame, then the facts."""
        problem: dict[str, Any] = {
            "type": f"urn:corral:error:{self.code}",
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            "retryable": self.retryable,
            "hint": self.hint,
        }
        if self.field is not None:
            problem["field"] = self.field
        problem.update(self.facts)
        return problem

    @classmethod
    def from_problem(cls, problem: dict[str, Any]) -> CorralError:
        """The inverse of `to_problem`, for clients; unknown members become facts."""
        known = {"type", "title", "status", "detail", "code", "retryable", "hint", "field"}
        facts = {k: v for k, v in problem.items() if k not in known}
        return cls(
            str(problem.get("code", "infra_error")),
            str(problem.get("detail", "")),
            hint=problem.get("hint"),
            field=problem.get("field"),
            retryable=problem.get("retryable"),
            **facts,
        )
