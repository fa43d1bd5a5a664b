"""What a provider's failure means: its reason, whether it may be tried again, and a sentence without secrets."""

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
"""Codes of refused requests that another model, or another provider, may take all the same."""
_SECRETS: Final = re.compile(r"\b(?:sk|pk|key|gsk|xai)[-_][\w*.\-]{6,}|(?i:bearer)\s+[\w.\-~+/=*]{6,}|AIza[\w\-]{10,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Makes the errors of one configured model."""

    name: str
    secret: str = ""
    """The key, which no sentence may hold."""

    def __repr__(self) -> str:
        return f"Failures(name={self.name!r})"

    def status(self, code: int, body: object, headers: Mapping[str, str]) -> ModelError:
        """A refusal by the provider. `headers` finds names in any case."""
        said = self.sentence(body)
        after = retry_after(headers)
        if code == 429 and "insufficient_quota" not in _codes(body):
            return self._error(
                f"is limited in its rate: {said}", retry=event_pb2.RETRY_REASON_RATE_LIMITED, after=after
            )
        if code == 408:
            return self._error(
                f"was too slow: {said}",
                reason=error_pb2.ERROR_REASON_MODEL_TIMEOUT,
                retry=event_pb2.RETRY_REASON_TIMEOUT,
                after=after,
            )
        if code >= 500 or code == 409:
            return self._error(
                f"failed with status {code}: {said}", retry=event_pb2.RETRY_REASON_PROVIDER_ERROR, after=after
            )
        is_of_the_request = code in (400, 422) and not _ELSEWHERE & _codes(body)
        return self._error(f"refused with status {code}: {said}", is_of_the_request=is_of_the_request)

    def reported(self, value: object) -> ModelError:
        """An error that the provider put into its stream."""
        if {"429", "rate_limit_exceeded"} & _codes(value):
            return self._error(
                f"is limited in its rate: {self.sentence(value)}", retry=event_pb2.RETRY_REASON_RATE_LIMITED
            )
        what = f"failed while it answered: {self.sentence(value)}"
        if _ELSEWHERE & _codes(value):
            return self._error(what)
        if any(code.startswith("invalid_") for code in _codes(value)):
            return self._error(what, is_of_the_request=True)
        return self._error(what, retry=event_pb2.RETRY_REASON_PROVIDER_ERROR)

    def transport(self, error: BaseException) -> ModelError:
        """A connection that could not be made, or broke."""
        causes = [error]
        while causes[-1].__cause__ is not None:
            causes.append(causes[-1].__cause__)
        said = next((text for cause in reversed(causes) if (text := self.sentence(str(cause)))), type(error).__name__)
        return self._error(f"could not be reached: {said}", retry=event_pb2.RETRY_REASON_TRANSPORT)

    def timeout(self, what: str, seconds: float) -> ModelError:
        """A wait that took longer than the timeout allows; `what` says what did not happen."""
        return self._error(
            f"{what} for {seconds:g} seconds. Its timeouts are in the server's configuration.",
            reason=error_pb2.ERROR_REASON_MODEL_TIMEOUT,
            retry=event_pb2.RETRY_REASON_TIMEOUT,
        )

    def bad_response(self, what: str) -> ModelError:
        """An answer that is none, or was cut."""
        return self._error(
            what,
            reason=error_pb2.ERROR_REASON_MODEL_BAD_RESPONSE,
            retry=event_pb2.RETRY_REASON_BAD_RESPONSE,
        )

    def unavailable(self, what: str) -> ModelError:
        """Something that the same again does not help, though another model may."""
        return self._error(what)

    def unusable(self, what: str) -> ModelError:
        """A request that no model can be sent."""
        return self._error(what, is_of_the_request=True)

    def sentence(self, said: object) -> str:
        """What a provider said, in one trimmed line without secrets."""
        text = " ".join(_message(said).split())
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
    """Seconds that a provider wants to be left alone; a date counts from the answer's own `Date`."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        try:
            seconds = float(headers.get(name, "")) * unit
        except ValueError:
            continue
        if 0 <= seconds < float("inf"):
            return seconds
    try:
        until = parsedate_to_datetime(headers.get("retry-after", ""))
        return max(0.0, (until - parsedate_to_datetime(headers.get("date", ""))).total_seconds())
    except (ValueError, TypeError):
        return None


def _message(said: object) -> str:
    if isinstance(said, dict):
        for name in ("message", "detail", "error"):
            if inner := said.get(name):
                return _message(inner)
        return json.dumps(said, ensure_ascii=False)
    return str(said)


def _codes(said: object) -> set[str]:
    if not isinstance(said, dict):
        return set()
    return {str(said.get("code")), str(said.get("type"))} | _codes(said.get("error"))
