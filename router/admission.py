"""Is a request admitted at all? No is said before any work is done.

Two things are bounded for all nodes together: the requests in flight, and the prompt tokens of
those that have no first token yet. With an SLO, a request that would miss it is refused as well.

    admit ──► Lease: request + tokens ── first_token() ──► request ── release() ──► nothing
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType

from protocol import Overloaded
from router.config import RouterConfig

_WINDOW = 64  # last departures that a rate is measured over
_DEFAULT_RETRY_S = 1.0  # nothing has been measured yet
_MIN_RETRY_S, _MAX_RETRY_S = 0.1, 60.0


class _Drain:
    """How fast something leaves while there is any, measured over its last departures."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._departures: deque[tuple[float, int]] = deque(maxlen=_WINDOW)

    def begin(self) -> None:
        """There is something again that can leave: idle time says nothing about the rate."""
        self._departures.clear()
        self._departures.append((self._clock(), 0))

    def left(self, amount: int) -> None:
        self._departures.append((self._clock(), amount))

    def seconds_for(self, amount: int) -> float:
        """Until `amount` more has left, if it goes on like this."""
        began_at = self._departures[0][0]
        total = sum(left for _, left in self._departures) - self._departures[0][1]
        return amount * (self._clock() - began_at) / total if total else _DEFAULT_RETRY_S


class Lease:
    """One request's place. Release it, or leave its `with` block; more than once does nothing."""

    def __init__(self, admission: Admission, num_tokens: int) -> None:
        self._admission: Admission | None = admission
        self._queued_tokens = num_tokens

    def first_token(self) -> None:
        """The prompt is computed: its tokens are not queued any more."""
        if self._admission is not None and self._queued_tokens:
            self._admission._tokens_left(self._queued_tokens)
            self._queued_tokens = 0

    def release(self) -> None:
        self.first_token()
        if self._admission is not None:
            self._admission._request_left()
            self._admission = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class Admission:
    """Counts what is in flight and refuses what is too much. Belongs to the event loop."""

    def __init__(self, config: RouterConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._requests = _Drain(clock)
        self._tokens = _Drain(clock)
        self.num_inflight = 0
        self.queued_tokens = 0

    def admit(self, num_tokens: int, *, predicted_ttft_s: float | None = None) -> Lease:
        """A place for a request of `num_tokens` prompt tokens.

        A prompt longer than `max_queued_tokens` is admitted when it waits behind nothing.

        Raises:
            Overloaded: a limit is reached; tells after how long it should not be any more.
        """
        self._check_requests()
        self._check_tokens(num_tokens)
        self._check_slo(predicted_ttft_s)
        if self.num_inflight == 0:
            self._requests.begin()
        if self.queued_tokens == 0:
            self._tokens.begin()
        self.num_inflight += 1
        self.queued_tokens += num_tokens
        return Lease(self, num_tokens)

    def check_waiting(self, num_waiting: int) -> None:
        """Whether one more may wait for a node, before it is admitted.

        Raises:
            Overloaded: with those in flight there are as many as may be.
        """
        self._check_requests(num_waiting)

    def _check_requests(self, num_waiting: int = 0) -> None:
        limit = self._config.max_inflight_requests
        num_requests = self.num_inflight + num_waiting
        if num_requests >= limit:
            raise _overloaded(
                f"{num_requests} requests are in flight, the limit is {limit}",
                self._requests.seconds_for(1) if self.num_inflight else _DEFAULT_RETRY_S,
            )

    def _check_tokens(self, num_tokens: int) -> None:
        limit = self._config.max_queued_tokens
        excess = self.queued_tokens + num_tokens - limit
        if excess > 0 and self.queued_tokens > 0:
            raise _overloaded(
                f"{self.queued_tokens} prompt tokens are queued; "
                f"with {num_tokens} more it would be over the limit of {limit}",
                self._tokens.seconds_for(min(excess, self.queued_tokens)),
            )

    def _check_slo(self, predicted_ttft_s: float | None) -> None:
        limit = self._config.max_predicted_ttft_s
        if limit is not None and predicted_ttft_s is not None and predicted_ttft_s > limit:
            raise _overloaded(
                f"the first token would take {predicted_ttft_s:.2f} s, the limit is {limit:g} s",
                predicted_ttft_s - limit,  # queues shorten by one second a second
            )

    def _tokens_left(self, num_tokens: int) -> None:
        self.queued_tokens -= num_tokens
        self._tokens.left(num_tokens)
        assert self.queued_tokens >= 0

    def _request_left(self) -> None:
        self.num_inflight -= 1
        self._requests.left(1)
        assert self.num_inflight >= 0


def _overloaded(message: str, retry_after_s: float) -> Overloaded:
    return Overloaded(message, min(max(retry_after_s, _MIN_RETRY_S), _MAX_RETRY_S))
