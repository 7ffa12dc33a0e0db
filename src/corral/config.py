"""Where things are and how long things take: from the environment, then STATE/config.toml, then defaults.

`load` reads, it makes nothing. `prepare_state` makes the state directory and refuses a bad one with a clear error. `data_document`
reads a YAML data file through a JSON cache in the state directory, because importing a YAML parser costs more than a warm run.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from corral.errors import CorralError

Json = dict[str, Any]

MAX_STATE_DIR = 480
"""Bytes of the state directory's path: SQLite takes 511 for the longest name that it makes below it."""

DELAYS: dict[str, float] = {
    "bases_s": 3600.0,
    "beat_s": 1.0,
    "claim_s": 30.0,
    "client_gone_s": 5.0,
    "drain_s": 5.0,
    "stale_s": 15.0,
    "sweep_s": 1.0,
    "takeover_client_gone_s": 15.0,
    "worker_ttl_s": 6.0,
}
"""Delays that an operator may set under `[delays]` of config.toml, in seconds."""


BUILT_IN = frozenset({"bubblewrap", "crun", "fake", "runc", "runsc"})
"""Runtimes of this distribution."""

DEFENCES = frozenset({"unsafe_no_seccomp", "unsafe_one_uid", "unsafe_dumpable_guest", "unsafe_no_landlock"})
"""What tests may switch off, one by one, to show that it is what holds."""
UNSAFE = DEFENCES | {"unsafe_any_grade"}
"""What CORRAL_UNSAFE may name: the defences of a sandbox, and the guard's demand of a grade."""


OCI_GROUPS = ("as they are", "read-only", "without v2")
"""What a program sees of the control groups' file systems, see `corral.adapters.runtimes._oci.Program`."""


@dataclass(frozen=True)
class OciProgram:
    """A further runtime: a program with the command line of runc, named under `[oci.NAME]` of config.toml."""

    name: str
    program: str
    """Absolute path."""
    options: tuple[str, ...] = ()
    """Words before its `run`."""
    security_level: int = 1
    user_namespace: bool = True
    """False only for a program with something stronger: of level 2 or 3."""
    groups: str = "read-only"


@dataclass(frozen=True)
class OidcIssuer:
    """Somebody else's tokens that open the API, from `[oidc]` of config.toml. See docs/howto/tenants.md."""

    issuer: str
    """As its tokens and its discovery document name it."""
    audience: tuple[str, ...]
    scopes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Word of the scope claim -> scopes of Corral."""
    default_scopes: tuple[str, ...] = ()
    """Of every good token."""
    tenant: str | None = None
    """Of all its tokens; or else the claim that names it:"""
    tenant_claim: str | None = None
    user_claim: str = "sub"
    scope_claim: str = "scope"
    algorithms: tuple[str, ...] = ("RS256", "ES256")
    leeway_s: float = 30.0
    ca_file: str | None = None
    """Authorities that sign the issuer's certificate; None = those of this host."""
    unsafe_http: bool = False
    """Its documents may come without TLS, from this host only."""


OIDC_ALGORITHMS = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA",
)  # fmt: skip
"""Signatures with a private key. With any other, who can check a token could make one."""
OIDC_SCOPES = ("admin", "tenant", "run", "read")


@dataclass(frozen=True)
class Config:
    """All that bootstrap needs. Paths are absolute; nothing in here is secret but what the URLs may hold, which are not shown."""

    state_dir: str
    policy: str
    runners: str
    templates: str
    subuid_range: tuple[int, int] | None = None
    """(first id, how many) of the subordinate ids, when configured."""
    runtimes: tuple[str, ...] = ()
    """Names of the runtimes to register; empty = all that are installed but `fake`."""
    oci: tuple[OciProgram, ...] = ()
    """Further programs of the OCI family, each a runtime by its name."""
    unsafe: frozenset[str] = frozenset()
    """What CORRAL_UNSAFE names, `unsafe_…`: defences switched off (tests only), demands of the guard that are not made."""
    delays: Mapping[str, float] = field(default_factory=lambda: dict(DELAYS))
    oidc: OidcIssuer | None = None
    database_url: str | None = field(default=None, repr=False)
    """The PostgreSQL database of the store; None = SQLite in the state directory. May hold a password."""
    redis_url: str | None = field(default=None, repr=False)
    """Where workers tell each other to be quicker; None = there is one worker. May hold a password."""
    node_socket: str | None = None
    """Socket of the node's process; None = the node is in process."""
    worker: str | None = None
    """Id of this process among several workers; None = it is the only one."""


def default_state_dir(environ: Mapping[str, str]) -> str:
    """`CORRAL_STATE_DIR`, else /var/lib/corral for root, else below `XDG_STATE_HOME`."""
    given = environ.get("CORRAL_STATE_DIR")
    if given:
        return os.path.abspath(given)
    if os.geteuid() == 0:
        return "/var/lib/corral"
    home = environ.get("XDG_STATE_HOME") or os.path.join(environ.get("HOME") or os.path.expanduser("~"), ".local/state")
    return os.path.join(os.path.abspath(home), "corral")


def data_file(name: str) -> str:
    """Absolute path of a shipped data file or directory (`policy/default.yaml`, `templates`): repository first, then installed."""
    here = os.path.dirname(os.path.abspath(__file__))
    for root in (os.path.dirname(os.path.dirname(here)), os.path.join(here, "data")):
        path = os.path.join(root, name)
        if os.path.exists(path):
            return path
    raise CorralError("infra_error", f"the data file {name} is missing from this installation", retryable=False)


def load(state_dir: str | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """The configuration for one state directory. A value that cannot be used is `invalid_value` naming the setting."""
    env = os.environ if environ is None else environ
    state = os.path.abspath(state_dir) if state_dir else default_state_dir(env)
    if "\0" in state:
        raise CorralError("invalid_value", "the state directory's path holds a NUL byte", field="CORRAL_STATE_DIR")
    if (length := len(os.fsencode(state))) > MAX_STATE_DIR:
        raise CorralError(
            "invalid_value",
            f"the state directory's path has {length} bytes; at most {MAX_STATE_DIR} are allowed",
            field="CORRAL_STATE_DIR",
            hint="set CORRAL_STATE_DIR to a shorter path",
        )
    settings = _toml(os.path.join(state, "config.toml"))
    delays = dict(DELAYS)
    for name, value in settings.get("delays", {}).items():
        if name not in DELAYS or isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e6:
            raise CorralError("invalid_value", f"config.toml: delays.{name} = {value!r}", field=f"/delays/{name}")
        delays[name] = float(value)
    names = env.get("CORRAL_RUNTIMES") or ",".join(settings.get("runtimes", ()))
    return Config(
        state_dir=state,
        policy=env.get("CORRAL_POLICY") or settings.get("policy") or data_file("policy/default.yaml"),
        runners=env.get("CORRAL_RUNNERS") or settings.get("runners") or data_file("runners"),
        templates=env.get("CORRAL_TEMPLATES") or settings.get("templates") or data_file("templates"),
        subuid_range=_range(env.get("CORRAL_SUBUID_RANGE") or settings.get("subuid_range")),
        runtimes=tuple(n.strip() for n in names.split(",") if n.strip()),
        oci=_oci(settings.get("oci", {})),
        unsafe=_unsafe(env.get("CORRAL_UNSAFE", "")),
        delays=delays,
        oidc=_oidc(settings.get("oidc")),
        database_url=env.get("CORRAL_DATABASE_URL") or settings.get("database_url") or None,
        redis_url=env.get("CORRAL_REDIS_URL") or settings.get("redis_url") or None,
    )


def _oci(given: Any) -> tuple[OciProgram, ...]:
    """The tables of `[oci.NAME]`. Whether a program works is found by trying it, whether it is told rightly is checked here."""

    def wrong(where: str, detail: str) -> CorralError:
        hint = "docs/reference/runtimes.md shows every member"
        return CorralError("invalid_value", f"config.toml: oci.{where} {detail}", field="/oci", hint=hint)

    if not isinstance(given, dict):
        raise wrong("", "must be a table of tables")
    found: list[OciProgram] = []
    if not given:
        return ()
    import re

    for name, table in given.items():
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", name) or name in BUILT_IN:
            raise wrong(name, "is no name for another runtime: small letters, digits and hyphens, none that is taken")
        if not isinstance(table, dict):
            raise wrong(name, "must be a table")
        checks: dict[str, Callable[[Any], bool]] = {
            "program": lambda value: isinstance(value, str) and value.startswith("/") and "\0" not in value,
            "options": lambda value: isinstance(value, list) and all(isinstance(word, str) for word in value),
            "security_level": lambda value: type(value) is int and 1 <= value <= 3,
            "user_namespace": lambda value: isinstance(value, bool),
            "groups": lambda value: value in OCI_GROUPS,
        }
        for member, value in table.items():
            if member not in checks:
                raise wrong(f"{name}.{member}", f"is unknown; known: {', '.join(checks)}")
            if not checks[member](value):
                raise wrong(f"{name}.{member}", f"cannot be {value!r}")
        if "program" not in table:
            raise wrong(f"{name}.program", "is missing: the absolute path of the program")
        values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}
        made = OciProgram(name, **values)
        if not made.user_namespace and made.security_level < 2:
            raise wrong(f"{name}.user_namespace", "can be false from security_level 2 on only")
        found.append(made)
    return tuple(found)


def _oidc(given: Any) -> OidcIssuer | None:
    """`[oidc]`, judged as far as it can be without asking the issuer."""

    def wrong(where: str, detail: str) -> CorralError:
        hint = "docs/howto/tenants.md shows every member"
        return CorralError("invalid_value", f"config.toml: oidc{where} {detail}", field="/oidc", hint=hint)

    def words(value: Any, known: tuple[str, ...] = ()) -> bool:
        good = isinstance(value, list) and bool(value) and all(isinstance(word, str) and word for word in value)
        return good and (not known or set(value) <= set(known))

    def word(value: Any) -> bool:
        return isinstance(value, str) and bool(value) and value.isprintable()

    if given is None:
        return None
    if not isinstance(given, dict):
        raise wrong("", "must be a table")
    checks: dict[str, Callable[[Any], bool]] = {
        "issuer": lambda value: word(value) and value.startswith(("https://", "http://")),
        "audience": lambda value: word(value) or words(value),
        "scopes": lambda value: isinstance(value, dict) and all(words(each, OIDC_SCOPES) for each in value.values()),
        "default_scopes": lambda value: words(value, OIDC_SCOPES),
        "tenant": word,
        "tenant_claim": word,
        "user_claim": word,
        "scope_claim": word,
        "algorithms": lambda value: words(value, OIDC_ALGORITHMS),
        "leeway_s": lambda value: type(value) in (int, float) and 0 <= value <= 300,
        "ca_file": lambda value: word(value) and value.startswith("/"),
        "unsafe_http": lambda value: isinstance(value, bool),
    }
    for member, value in given.items():
        if member not in checks:
            raise wrong(f".{member}", f"is unknown; known: {', '.join(checks)}")
        if not checks[member](value):
            raise wrong(f".{member}", f"cannot be {value!r}")
    for member in ("issuer", "audience"):
        if member not in given:
            raise wrong(f".{member}", "is missing")
    if ("tenant" in given) == ("tenant_claim" in given):
        raise wrong(".tenant", "or tenant_claim: exactly one of them says whose a token is")
    if not given.get("scopes") and not given.get("default_scopes"):
        raise wrong(".scopes", "or default_scopes must give something, or no token would allow anything")
    if given["issuer"].startswith("http://") and not given.get("unsafe_http"):
        raise wrong(".issuer", "is without TLS, which only unsafe_http allows, and on this host only")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given.items()}
    if isinstance(values["audience"], str):
        values["audience"] = (values["audience"],)
    values["scopes"] = {name: tuple(scopes) for name, scopes in given.get("scopes", {}).items()}
    return OidcIssuer(**values)


def _unsafe(text: str) -> frozenset[str]:
    """Names, separated by commas. Never quietly: who names one is told so each time."""
    names = frozenset(name.strip() for name in text.split(",") if name.strip())
    if unknown := sorted(names - UNSAFE):
        hint = f"known are {', '.join(sorted(UNSAFE))}"
        raise CorralError("invalid_value", f"no such defence: {', '.join(unknown)}", hint=hint, field="CORRAL_UNSAFE")
    if off := ", ".join(sorted(names & DEFENCES)):
        print(f"corral: warning: CORRAL_UNSAFE switches defences off, for tests only: {off}", file=sys.stderr)
    if rest := ", ".join(sorted(names - DEFENCES)):
        print(
            f"corral: warning: CORRAL_UNSAFE lets programs run where host or runtime is too weak: {rest}",
            file=sys.stderr,
        )
    return names


def _range(value: Any) -> tuple[int, int] | None:
    """`FIRST:COUNT` (or `[FIRST, COUNT]` in config.toml)."""
    if value is None:
        return None
    parts = value.split(":") if isinstance(value, str) else value
    try:
        first, count = (int(part) for part in parts)
        if first < 65536 or count < 65536 or first + count > 2**32 - 2:
            raise ValueError
    except (TypeError, ValueError) as error:
        hint = "write FIRST:COUNT, for example 2000000000:65536000"
        raise CorralError("invalid_value", f"subuid_range {value!r}", hint=hint, field="CORRAL_SUBUID_RANGE") from error
    return first, count


def _toml(path: str) -> Json:
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise CorralError("infra_error", f"cannot read {path}: {error.strerror}", retryable=False) from error
    import tomllib

    try:
        return tomllib.loads(raw.decode("utf-8"))
    except ValueError as error:
        raise CorralError("invalid_value", f"{path}: {error}", field="config.toml") from error


def prepare_state(state_dir: str) -> None:
    """Make STATE with its parents (0711 as root, 0700 otherwise); `infra_error` with a hint when it cannot be used."""
    hint = "set CORRAL_STATE_DIR to a directory that you can write to"
    try:
        made = not os.path.isdir(state_dir)
        os.makedirs(state_dir, mode=0o755 if os.geteuid() == 0 else 0o700, exist_ok=True)
        if made:
            os.chmod(state_dir, 0o711 if os.geteuid() == 0 else 0o700)
        seen = os.stat(state_dir)
    except (FileExistsError, NotADirectoryError) as error:
        raise CorralError(
            "infra_error", f"the state directory {state_dir} is not a directory", hint=hint, retryable=False
        ) from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise CorralError(
            "infra_error", f"cannot make the state directory {state_dir}: {reason}", hint=hint, retryable=False
        ) from error
    if seen.st_uid != os.geteuid():
        raise CorralError(
            "infra_error", f"the state directory {state_dir} belongs to another user", hint=hint, retryable=False
        )
    if seen.st_mode & (stat.S_IWOTH | stat.S_IWGRP):
        raise CorralError(
            "infra_error",
            f"the state directory {state_dir} is writable for others",
            hint=f"chmod go-w {state_dir}",
            retryable=False,
        )


def data_document(path: str, cache_dir: str) -> Any:
    """The parsed YAML of `path`, through a cache keyed by the content's digest. A bad file is `invalid_value` naming it."""
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except OSError as error:
        raise CorralError("invalid_value", f"cannot read {path}: {error.strerror}", field=path) from error
    try:
        return parsed_yaml(raw, cache_dir)
    except ValueError as error:
        raise CorralError("invalid_value", f"{path}: {error}", field=path) from error


def parsed_yaml(raw: bytes, cache_dir: str) -> Any:
    """The document in `raw`, through the same cache; ValueError says what is wrong with it."""
    import hashlib

    cached = os.path.join(cache_dir, hashlib.sha256(b"1\0" + raw).hexdigest() + ".json")
    try:
        with open(cached, encoding="utf-8") as text:
            return json.load(text)
    except (OSError, ValueError):
        pass
    import yaml

    try:
        document = yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
    try:
        kept = json.dumps(document)
        if json.loads(kept) != document:  # what JSON has no words for, such as keys that are numbers
            return document
        os.makedirs(cache_dir, mode=0o700, exist_ok=True)
        temporary = f"{cached}.{os.getpid()}"
        with open(temporary, "w", encoding="utf-8") as text:
            text.write(kept)
        os.replace(temporary, cached)
    except (OSError, TypeError, ValueError, RecursionError):
        pass  # a cache that cannot be written costs time, nothing else
    return document
