"""What a request asks for, checked: an exec's spec becomes a plan, or a refusal that names the field."""

from __future__ import annotations

from corral.guest import kernel, launch

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


class Refusal(Exception):
    """A request that cannot be honoured: `code` is one of Corral's."""

    def __init__(self, code: str, detail: str, field: str | None = None) -> None:
        self.code = code
        self.detail = detail
        self.field = field


class Defaults:
    """What the command line of the guest fixes for every exec."""

    def __init__(
        self,
        uid: int,
        gid: int,
        filter_: kernel.Filter | None,
        confine_signals: bool,
        dumpable: bool,
        standing: bool,
        namespaces: bool,
    ) -> None:
        self.uid = uid
        self.gid = gid
        self.filter = filter_
        self.confine_signals = confine_signals
        self.dumpable = dumpable
        self.oom_score_adj = 500
        self.standing = standing
        """Whether supervisors may stand by: execs have another uid and cannot reach them."""
        self.namespaces = namespaces
        """Whether each exec has a pid namespace of its own, because its supervisor cannot be a subreaper."""


def plan_of(spec: dict[str, Any], defaults: Defaults) -> launch.Plan:
    """Check a request's spec; `bad_request` names the first field that will not do."""
    plan = launch.Plan()
    argv = spec.get("argv")
    if type(argv) is not list or not argv:
        raise Refusal("bad_request", "argv must be a list of at least one string", "argv")
    plan.argv = [_bytes(part, "argv") for part in argv]
    env = spec.get("env", {})
    if type(env) is not dict:
        raise Refusal("bad_request", "env must be an object", "env")
    plan.environment = {}
    for name, value in env.items():
        key = _bytes(name, "env")
        if not key or b"=" in key:
            raise Refusal("bad_request", "a variable's name is empty or has a =", "env")
        plan.environment[key] = _bytes(value, "env")
    plan.cwd = _bytes(spec.get("cwd", "/"), "cwd")
    plan.uid = integer_of(spec, "uid", defaults.uid, 0, 2**31)
    plan.gid = integer_of(spec, "gid", defaults.gid, 0, 2**31)
    plan.umask = integer_of(spec, "umask", 0o022, 0, 0o777)
    plan.nice = integer_of(spec, "nice", 5, 0, 19)
    plan.oom_score_adj = integer_of(spec, "oom_score_adj", defaults.oom_score_adj, -1000, 1000)
    plan.background_kill = choice_of(spec, "background", ("keep", "kill")) == "kill"
    limits = spec.get("rlimits") or {}
    if type(limits) is not dict or not launch.LIMIT_NAMES.issuperset(limits):
        raise Refusal("bad_request", "rlimits knows " + " ".join(sorted(launch.LIMIT_NAMES)), "rlimits")
    plan.limits = {"core": 0} | {name: integer_of(limits, name, 0, 0, 2**62) for name in limits}
    seccomp = spec.get("seccomp", True)
    if type(seccomp) is not bool:
        raise Refusal("bad_request", "seccomp is true or false", "seccomp")
    plan.seccomp = defaults.filter if seccomp else None
    plan.confine_signals = defaults.confine_signals
    plan.dumpable = defaults.dumpable
    return plan


def window_of(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if type(value) is not list or len(value) != 2 or not all(type(n) is int and 0 < n < 65536 for n in value):
        raise Refusal("bad_request", "pty is [rows, columns]", "pty")
    return value[0], value[1]


def seconds_of(spec: dict[str, Any], name: str, default: float | None) -> float | None:
    value = spec.get(name, default)
    if value is None:
        return None
    if type(value) not in (int, float) or not 0 <= value < 1e9:
        raise Refusal("bad_request", f"{name} is a number of seconds", name)
    return float(value)


def _bytes(value: Any, field: str) -> bytes:
    if type(value) is not str or "\0" in value:
        raise Refusal("bad_request", f"{field} must be text without NUL", field)
    try:
        return value.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise Refusal("bad_request", f"{field} holds a surrogate that stands for no byte", field) from None


def integer_of(spec: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    value = spec.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise Refusal("bad_request", f"{name} must be a whole number from {low} to {high}", name)
    return value


def choice_of(spec: dict[str, Any], name: str, values: tuple[str, ...]) -> str:
    value = spec.get(name) or values[0]
    if value not in values:
        raise Refusal("bad_request", f"{name} is one of {' '.join(values)}", name)
    return str(value)


def fence_of(request: dict[str, Any]) -> tuple[int, int]:
    fence = request.get("fence")
    if type(fence) is not list or len(fence) != 2 or not all(type(n) is int and 0 <= n < 2**63 for n in fence):
        raise Refusal("bad_request", "a fence is [incarnation, token]", "fence")
    return fence[0], fence[1]
