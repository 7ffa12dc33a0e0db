"""Who gets a sandbox that somebody asks for: pure, over its row, its lease and the store's clock.

An *asker* is a key, with the owner that it names (None: the implicit lease of a caller that knows no leases). The answer is one of

* `have`: a caller that knows no leases has it already; `take`: nobody uses it, it becomes theirs; `take_over`: it is theirs already (their own implicit lease, themselves once more, or
  what the store's past took from them), so what runs goes on; `enter`: it is idle, to be checked before it is theirs; `go_on`: that
  check was begun for them and is to be finished;
* `expire`: the lease has run out, which is to be committed first, then ask again;
* `join`: a transition is under way, ask again at its end; `held`: somebody has it, until `until_ms` unless they extend it;
* `unfit`: it is not for them (another user's or session's, tainted); `paused`, `gone`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from corral.domain.lease import REGRESSED, expired, is_system, owner_name
from corral.domain.records import LeaseRecord, SandboxRecord

Contention = Literal["wait", "fork", "new", "fail"]
CONTENTIONS: tuple[Contention, ...] = ("wait", "fork", "new", "fail")
Kind = Literal["have", "take", "take_over", "enter", "go_on", "expire", "join", "held", "unfit", "paused", "gone"]
JOINED = (
    "requested",
    "planning",
    "allocating",
    "provisioning",
    "locking",
    "hibernating",
    "recycling",
    "pausing",
    "resuming",
)
"""States that end by themselves: whoever asks waits for that."""
OVER = ("sanitizing", "terminated", "failed", "lost")


@dataclass(frozen=True)
class Asker:
    """Who asks. `session`: in which they work, if they say so."""

    key: str
    owner: str | None = None
    session: str | None = None
    user_id: str | None = None

    @property
    def name(self) -> str:
        """As it stands in the lease's row."""
        return owner_name(self.key, self.owner)


@dataclass(frozen=True)
class Choice:
    """See the module docstring. `why`: for `unfit`; `flags`: conditions for the table of the lifecycle."""

    kind: Kind
    until_ms: int | None = None
    why: str | None = None
    flags: tuple[str, ...] = ()


def decide(sandbox: SandboxRecord, lease: LeaseRecord, asker: Asker, now_ms: int) -> Choice:
    """What becomes of the asking."""
    state, holder = sandbox.state, lease.lease_owner
    if state in OVER:
        return Choice("gone")
    if state in JOINED:
        return Choice("join")
    run_out = holder is not None and not is_system(holder) and expired(lease, now_ms)
    if state in ("leased", "running", "paused", "reuse_checking") and run_out:
        return Choice("expire")
    if state == "reuse_checking":
        return Choice("go_on") if holder == asker.name else _held(lease)
    unfit = misfit(sandbox, asker)
    if state in ("leased", "running"):
        return _in_use(sandbox, lease, asker, unfit)
    if state in ("paused", "hibernated"):
        return Choice("paused") if is_system(holder) or unfit is None else Choice("unfit", why=unfit)
    if unfit is None and sandbox.tainted:
        unfit = "it is tainted"  # which ends only with it; whoever has it goes on, nobody gets it any more
    if unfit is not None:
        return Choice("unfit", why=unfit)
    return Choice("take" if state == "ready" else "enter")


def _in_use(sandbox: SandboxRecord, lease: LeaseRecord, asker: Asker, unfit: str | None) -> Choice:
    holder = lease.lease_owner
    if asker.owner is None and holder == asker.name:
        return Choice("have")
    if sandbox.one_shot:
        return Choice("unfit", why=unfit)
    own = holder in (asker.name, asker.key, REGRESSED, None)
    if own and unfit is None:
        return Choice("take_over", flags=("own",))
    if is_system(holder) and holder != REGRESSED and sandbox.state == "running" and unfit is None:
        same = asker.session is not None and asker.session == sandbox.session_id
        if same or (asker.session is None and sandbox.session_id is None):
            return Choice("take_over", flags=("owner_system", "same_session"))
    if unfit is not None and (own or is_system(holder)):
        return Choice("unfit", why=unfit)
    return _held(lease)


def _held(lease: LeaseRecord) -> Choice:
    return Choice("held", until_ms=lease.expires_at)


def misfit(sandbox: SandboxRecord, asker: Asker) -> str | None:
    """Why the sandbox is not for them, or None. Its tenant is theirs, or they would not see it."""
    creator = sandbox.labels.get("owner")
    same_user = sandbox.user_id is not None and sandbox.user_id == asker.user_id
    if creator is not None and creator != asker.key and not same_user:
        return "it is another user's"
    if asker.session is not None and sandbox.session_id is not None and asker.session != sandbox.session_id:
        return "it belongs to another session"
    if sandbox.one_shot:
        return "it is a run's, and ends with it"
    return None


def contention_of(wanted: str | None, sandbox: SandboxRecord, asker: Asker) -> str:
    """What the asker wants if somebody has it; by default they wait inside the session and are refused outside."""
    if wanted is not None:
        return wanted
    inside = asker.session is not None and asker.session == sandbox.session_id
    return "wait" if inside else "fail"
