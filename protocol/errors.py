"""The one tree of errors that callers may see.

    KvrelayError
    ├── ConfigError          a setting is wrong: names the field and the limit
    ├── ModelError           a model cannot be found, read or understood
    ├── InvalidRequest       the client asked for something impossible (HTTP 400)
    │   └── PromptTooLong
    ├── ModelNotFound        the client named a model that is not served (HTTP 404)
    ├── Overloaded           admission said no before any work was done (HTTP 429)
    │   ├── NodeDraining     the node takes no jobs for now, or gives back those that it has
    │   └── WrongRole        the node has another role by now
    ├── NoHealthyNode        nothing can serve this request now (HTTP 503)
    └── RequestFailed        an admitted request ended unhappily (HTTP 500 or an SSE error)
        ├── RequestAborted
        ├── NodeLost
        └── TransferFailed

Each class has a `label`: stable, lower case, the value of metric labels and of the `code`
of HTTP errors. Messages are for people and may change.
"""

from __future__ import annotations

from typing import ClassVar


class KvrelayError(Exception):
    """Something in the world is wrong; our own bugs are assertions instead."""

    label: ClassVar[str] = "error"


class ConfigError(KvrelayError):
    """A setting is wrong. `field` is the name that the user typed."""

    label = "config"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.problem = message


class ModelError(KvrelayError):
    """A model is unknown, missing, broken or of a kind that we cannot run."""

    label = "model"

    def __init__(self, message: str, *, path: str | None = None) -> None:
        super().__init__(message)
        self.path = path


class InvalidRequest(KvrelayError):
    """The client's request cannot be served as it is. `field` names the parameter."""

    label = "invalid_request"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLong(InvalidRequest):
    """The prompt (and what must follow it) exceeds what a node can ever hold."""

    label = "prompt_too_long"

    def __init__(self, field: str, num_tokens: int, limit: int, what: str) -> None:
        super().__init__(
            field, f"the prompt has {num_tokens} tokens, but {what} allows at most {limit}"
        )
        self.num_tokens = num_tokens
        self.limit = limit


class ModelNotFound(KvrelayError):
    """The client named a model that this gateway does not serve."""

    label = "model_not_found"

    def __init__(self, model: str, served: tuple[str, ...]) -> None:
        super().__init__(f"model {model!r} is not served here; served: {', '.join(served)}")
        self.model = model


class Overloaded(KvrelayError):
    """Refused before any work was done; worth another try after `retry_after_s`."""

    label = "overloaded"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class NodeDraining(Overloaded):
    """The node takes no jobs for now; also what becomes of those that it has not done in time.

    Another node may do it, from where this one has left off.
    """

    label = "draining"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)


class WrongRole(Overloaded):
    """The job is not one for a node of this role: it had another when it was chosen."""

    label = "wrong_role"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)


class NoHealthyNode(KvrelayError):
    """No node that could serve this request is registered and healthy."""

    label = "no_healthy_node"


class RequestFailed(KvrelayError):
    """An admitted request ended without its answer."""

    label = "request_failed"


class RequestAborted(RequestFailed):
    """The request was cancelled by its client or by a shutdown."""

    label = "aborted"


class NodeLost(RequestFailed):
    """A node stopped while it held the request."""

    label = "node_lost"


class TransferFailed(RequestFailed):
    """The KV of the request did not arrive."""

    label = "transfer_failed"

    @classmethod
    def because(cls, reason: str, detail: str = "") -> TransferFailed:
        """`reason` is one of the hand-off's reasons."""
        return cls(f"the KV transfer failed: {reason}" + (f" ({detail})" if detail else ""))
