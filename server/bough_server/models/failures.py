"""Provider failures as ModelErrors: reason, whether a retry may help, and a message without secrets."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Final
from urllib.parse import urlsplit

from bough.v1 import error_pb2, event_pb2
from bough_server.errors import ModelError, Reason

_LONGEST: Final = 300
_MASK: Final = "***"
_CODES: Final[Mapping[Reason, frozenset[str]]] = {
    error_pb2.ERROR_REASON_MODEL_QUOTA_EXCEEDED: frozenset(
        {"402", "insufficient_quota", "billing_error", "billing_hard_limit_reached", "billing_not_active"}
    ),
    error_pb2.ERROR_REASON_MODEL_CONTEXT_TOO_LONG: frozenset({"413", "context_length_exceeded", "request_too_large"}),
    error_pb2.ERROR_REASON_MODEL_AUTHENTICATION: frozenset(
        {
            "401",
            "403",
            "invalid_api_key",
            "authentication_error",
            "permission_error",
            "API_KEY_INVALID",
            "UNAUTHENTICATED",
            "PERMISSION_DENIED",
        }
    ),
    error_pb2.ERROR_REASON_MODEL_RATE_LIMITED: frozenset(
        {"429", "rate_limit_exceeded", "rate_limit_error", "RESOURCE_EXHAUSTED"}
    ),
    error_pb2.ERROR_REASON_MODEL_NOT_FOUND: frozenset({"404", "model_not_found", "not_found_error", "NOT_FOUND"}),
}
"""Reasons by the statuses and codes that providers use for them; the first that fits is taken."""
_TOO_LONG: Final = re.compile(
    r"context.{0,20}(length|window|size)|prompt is too long|input token count.{0,40}exceeds|too many (input )?tokens",
    re.IGNORECASE,
)
"""Messages of providers whose code for a request that is too long is that of any bad request."""
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_SECONDS: Final = re.compile(r"(\d{1,6}(?:\.\d{1,9})?)s")
_NO_CREDIT: Final = re.compile(r"credit balance is too low|insufficient balance", re.IGNORECASE)
_SECRETS: Final = re.compile(r"\b(?:sk|pk|key|gsk|xai)[-_][\w*.\-]{6,}|(?i:bearer)\s+[\w.\-~+/=*]{6,}|AIza[\w\-]{10,}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Failures:
    """Builds the errors of one configured model."""

    name: str
    secret: str = ""
    """The API key, which is masked in every message."""
    url: str = ""
    """The provider's address, named in its failures without user, password and query; empty for none."""

    def __repr__(self) -> str:
        # The dataclass's default would show the key in tracebacks and logs.
        return f"Failures(name={self.name!r})"

    def status(self, code: int, body: object, headers: Mapping[str, str]) -> ModelError:
        """Return the error for an HTTP status. `headers` must ignore the case of names."""
        body = body[0] if isinstance(body, list) and body else body  # Gemini's errors come in a list
        reason = _reason(_codes(body) | {str(code)}, _message(body))
        detail = self.sentence(body)
        after = retry_after(headers)
        after = _retry_delay(body) if after is None else after
        if code in _REDIRECTS:
            place = self.sentence(public_url(headers.get("location") or ""))
            to = f" to {place}" if place else ""
            what = f"redirects{to}, and redirects are not followed: correct its base_url in the server's configuration."
            return self._error(what, status=code)
        if reason == error_pb2.ERROR_REASON_MODEL_RATE_LIMITED:
            what, retry = f"is rate limited: {detail}", event_pb2.RETRY_REASON_RATE_LIMITED
        elif code == 408:
            reason = error_pb2.ERROR_REASON_MODEL_TIMEOUT
            what, retry = f"timed out: {detail}", event_pb2.RETRY_REASON_TIMEOUT
        elif code >= 500 or code == 409:
            reason = error_pb2.ERROR_REASON_MODEL_UNAVAILABLE
            what, retry = f"failed with status {code}: {detail}", event_pb2.RETRY_REASON_PROVIDER_ERROR
        else:
            # Another model, or another provider, may still accept what is refused for a known reason.
            is_of_the_request = code in (400, 422) and reason is None and "content_filter" not in _codes(body)
            what = f"refused with status {code}: {detail}"
            return self._error(what, reason=reason, is_of_the_request=is_of_the_request, status=code)
        return self._error(what, reason=reason, retry=retry, after=after, status=code)

    def stream_error(self, value: object) -> ModelError:
        """Return the error for one that the provider sent in its stream."""
        codes = _codes(value)
        reason = _reason(codes, _message(value))
        if reason == error_pb2.ERROR_REASON_MODEL_RATE_LIMITED:
            what = f"is rate limited: {self.sentence(value)}"
            return self._error(what, reason=reason, retry=event_pb2.RETRY_REASON_RATE_LIMITED)
        what = f"failed during its answer: {self.sentence(value)}"
        if reason is not None or "content_filter" in codes:
            return self._error(what, reason=reason)
        if any(code.startswith("invalid_") for code in codes):
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
        return self._error(what, is_providers=False)

    def unusable(self, what: str) -> ModelError:
        """Return the error for a request that can be sent to no model."""
        return self._error(what, is_of_the_request=True, is_providers=False)

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
        reason: Reason | None = None,
        retry: event_pb2.RetryReason.ValueType | None = None,
        after: float | None = None,
        is_of_the_request: bool = False,
        is_providers: bool = True,
        status: int = 0,
    ) -> ModelError:
        url = public_url(self.url) if is_providers else ""
        return ModelError(
            f"The model {self.name!r}{f' at {url}' if url else ''} {what}",
            reason=error_pb2.ERROR_REASON_MODEL_UNAVAILABLE if reason is None else reason,
            retry=retry,
            retry_after=after,
            is_of_the_request=is_of_the_request,
            provider_status=status,
        )


def public_url(url: str) -> str:
    """Return a URL without user, password, query and fragment, all of which may be secrets; empty if it is none."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return ""
    if not host:
        return ""
    host = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{host}{f':{port}' if port else ''}{parts.path}"


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


def _reason(codes: set[str], message: str) -> Reason | None:
    """Return the reason of a refusal; None if it has none that is known."""
    if _NO_CREDIT.search(message):
        return error_pb2.ERROR_REASON_MODEL_QUOTA_EXCEEDED
    for reason, known in _CODES.items():
        if known & codes:
            return reason
    is_bad_request = not codes.isdisjoint({"400", "422", "invalid_request_error", "INVALID_ARGUMENT"})
    return error_pb2.ERROR_REASON_MODEL_CONTEXT_TOO_LONG if is_bad_request and _TOO_LONG.search(message) else None


def _retry_delay(value: object) -> float | None:
    """Return the seconds of a google.rpc.RetryInfo, such as `{"retryDelay": "34s"}`, in an error's details."""
    if isinstance(value, list):
        return next((delay for each in value if (delay := _retry_delay(each)) is not None), None)
    if not isinstance(value, dict):
        return None
    if match := _SECONDS.fullmatch(str(value.get("retryDelay", ""))):
        return float(match[1])
    return _retry_delay(value.get("error") or value.get("details"))


def _message(value: object) -> str:
    if isinstance(value, list):
        return "; ".join(map(_message, value))
    if isinstance(value, dict):
        if isinstance(place := value.get("loc"), list) and "msg" in value:  # as FastAPI says which field is wrong
            return f"{'.'.join(map(str, place))}: {value['msg']}"
        for name in ("message", "detail", "error"):
            if inner := value.get(name):
                return _message(inner)
        return json.dumps(value, ensure_ascii=False)
    return str(value)


def _codes(value: object) -> set[str]:
    """Return the codes of a provider's error, by any of their names, those of its details included."""
    if isinstance(value, list):
        return set().union(*map(_codes, value))
    if not isinstance(value, dict):
        return set()
    own = {str(value[name]) for name in ("code", "type", "status", "reason") if value.get(name) is not None}
    return own | _codes(value.get("error")) | _codes(value.get("details"))
