"""Corral. For programs: `from corral import Corral, AsyncCorral, CorralError`; nothing is imported before it is asked for."""

TYPE_CHECKING = False  # the guest starts in this package too, and has no time for `typing`
if TYPE_CHECKING:
    from corral.client.async_sdk import AsyncCorral
    from corral.client.sdk import Corral
    from corral.errors import CorralError

__all__ = ["AsyncCorral", "Corral", "CorralError"]


def __getattr__(name: str) -> object:
    if name in __all__:
        from corral import client

        found: object = getattr(client, name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
