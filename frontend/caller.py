"""Who asks: the request's id and the tenant, as the outer layers found them.

Travels in the ASGI scope from `access_log.py` and `authentication.py` to the routes.
"""

import msgspec
from starlette.types import Scope

_KEY = "cearx.caller"


class Caller(msgspec.Struct, kw_only=True):
    request_id: str
    """Of the X-Request-Id header, or made here; in the answer, in the log and for aborts."""
    tenant: str | None = None
    """Stands for the API key when there are several: their prefix caches are separate."""


def set_caller(scope: Scope, caller: Caller) -> None:
    scope[_KEY] = caller


def caller_of(scope: Scope) -> Caller:
    caller = scope[_KEY]
    assert isinstance(caller, Caller), "no outer layer has named the caller"
    return caller
