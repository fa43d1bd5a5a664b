"""Provider failures as ModelErrors: reason, whether a retry may help, and a message without secrets."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final

from bough.v1 import error_pb2, event_pb2
from bough_server.errors import ModelError

_LONGEST: Final = 300
_MASK: Final = "***"
_ELSEWHERE: Final = frozenset(
    {"context_length_exceeded", "content_filter", "insufficient_quota", "invalid_api_key", "model_not_found"}
)
"""Codes of refused requests that another model, or another provider, may still accept."""
_SECRETS: Final = re.compile(r"\b(?:sk|pk|key|gsk|xai)[-_][\w*.\-]{6,}|(?i:bearer)\s+[\w.\-~+/=*]{6,}|AIza[\w\-]{10,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Builds the errors of one configured model."""

    name: str
    secret: str = ""
    """The API key, which is masked in every message."""

    def __repr__(self) -> str:
        # The dataclass's default would show the key in tracebacks and logs.
        return f"Failures(name={self.name!r})"

    def status(self, code: int, body: object, headers: Mapping[str, str]) -> ModelError:
        """Return the error for an HTTP status. `headers` must ignore the case of names."""
        detail = self.sentence(body)
        after = retry_after(headers)
        # 429 is also the status of a used-up quota, which no retry refills.
        if code == 429 and "insufficient_quota" not in _codes(body):
            return self._error(f"is rate limited: {detail}", retry=event_pb2.RETRY_REASON_RATE_LIMITED, after=after)
        if code == 408:
            return self._error(
                f"timed out: {detail}",
                reason=error_pb2.ERROR_REASON_MODEL_TIMEOUT,
                retry=event_pb2.RETRY_REASON_TIMEOUT,
                after=after,
            )
        if code >= 500 or code == 409:
            return self._error(
                f"failed with status {code}: {detail}", retry=event_pb2.RETRY_REASON_PROVIDER_ERROR, after=after
            )
        is_of_the_request = code in (400, 422) and not _ELSEWHERE & _codes(body)
        return self._error(f"refused with status {code}: {detail}", is_of_the_request=is_of_the_request)

    def reported(self, value: object) -> ModelError:
        """Return the error for one that the provider sent in its stream."""
        if {"429", "rate_limit_exceeded"} & _codes(value):
            return self._error(f"is rate limited: {self.sentence(value)}", retry=event_pb2.RETRY_REASON_RATE_LIMITED)
        what = f"failed during its answer: {self.sentence(value)}"
        if _ELSEWHERE & _codes(value):
            return self._error(what)
        if any(code.startswith("invalid_") for code in _codes(value)):
            return self._error(what, is_of_the_request=True)
        return self._error(what, retry=event_pb2.RETRY_REASON_PROVIDER_ERROR)

    def transport(self, error: BaseException) -> ModelError:
        """Return the error for a connection that could not be opened, or broke."""
        # The innermost cause is the specific one: clients wrap it in errors like "Connection error.".
        causes = [error]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        detail = next((text for cause in reversed(causes) if (text := self.sentence(str(cause)))), type(error).__name__)
        return self._error(f"could not be reached: {detail}", retry=event_pb2.RETRY_REASON_TRANSPORT)

    def timeout(self, what: str, seconds: float) -> ModelError:
        """Return the error for an exceeded timeout; `what` is the message up to the seconds."""
        return self._error(
            f"{what} for {seconds:g} seconds. Retry, or raise its timeouts in the server's configuration.",
            reason=error_pb2.ERROR_REASON_MODEL_TIMEOUT,
            retry=event_pb2.RETRY_REASON_TIMEOUT,
        )

    def bad_response(self, what: str) -> ModelError:
        """Return the error for an answer that is invalid or was cut off."""
        return self._error(
            what,
            reason=error_pb2.ERROR_REASON_MODEL_BAD_RESPONSE,
            retry=event_pb2.RETRY_REASON_BAD_RESPONSE,
        )

    def unavailable(self, what: str) -> ModelError:
        """Return the error for a failure that a retry does not help, though another model may."""
        return self._error(what)

    def unusable(self, what: str) -> ModelError:
        """Return the error for a request that can be sent to no model."""
        return self._error(what, is_of_the_request=True)

    def sentence(self, value: object) -> str:
        """Return a provider's message as one line of at most 300 characters, without secrets."""
        text = " ".join(_message(value).split())
        if self.secret:
            text = text.replace(self.secret, _MASK)
        text = _SECRETS.sub(_MASK, text)
        return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"

    def _error(
        self,
        what: str,
        *,
        reason: error_pb2.ErrorReason.ValueType = error_pb2.ERROR_REASON_MODEL_UNAVAILABLE,
        retry: event_pb2.RetryReason.ValueType | None = None,
        after: float | None = None,
        is_of_the_request: bool = False,
    ) -> ModelError:
        return ModelError(
            f"The model {self.name!r} {what}",
            reason=reason,
            retry=retry,
            retry_after=after,
            is_of_the_request=is_of_the_request,
        )


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a provider asks to wait before a retry; None if it does not ask."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit
        except ValueError:
            continue
        if 0 <= seconds < float("inf"):
            return seconds
    try:
        # A date counts from the response's own `Date`: the provider's clock may differ from ours.
        until = parsedate_to_datetime(headers.get("retry-after", ""))
        return max(0.0, (until - parsedate_to_datetime(headers.get("date", ""))).total_seconds())
    except (ValueError, TypeError):
        return None


def _message(value: object) -> str:
    if isinstance(value, dict):
        for name in ("message", "detail", "error"):
            if inner := value.get(name):
                return _message(inner)
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _codes(value: object) -> set[str]:
    if not isinstance(value, dict):
        return set()
    return {str(value.get("code")), str(value.get("type"))} | _codes(value.get("error"))
