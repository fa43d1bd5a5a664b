"""What providers' failures mean, and what may be said of them."""

import pytest

from bough.v1 import error_pb2, event_pb2
from bough_server.models.failures import Failures, public_url, retry_after

LARGE = Failures(name="large", secret="my-own-secret")
DATE = "Sat, 21 Nov 2026 03:00:00 GMT"


@pytest.mark.parametrize(
    ("code", "reason", "retry"),
    [
        (400, error_pb2.ERROR_REASON_MODEL_UNAVAILABLE, None),
        (401, error_pb2.ERROR_REASON_MODEL_AUTHENTICATION, None),
        (402, error_pb2.ERROR_REASON_MODEL_QUOTA_EXCEEDED, None),
        (403, error_pb2.ERROR_REASON_MODEL_AUTHENTICATION, None),
        (404, error_pb2.ERROR_REASON_MODEL_NOT_FOUND, None),
        (408, error_pb2.ERROR_REASON_MODEL_TIMEOUT, event_pb2.RETRY_REASON_TIMEOUT),
        (413, error_pb2.ERROR_REASON_MODEL_CONTEXT_TOO_LONG, None),
        (409, error_pb2.ERROR_REASON_MODEL_UNAVAILABLE, event_pb2.RETRY_REASON_PROVIDER_ERROR),
        (429, error_pb2.ERROR_REASON_MODEL_RATE_LIMITED, event_pb2.RETRY_REASON_RATE_LIMITED),
        (500, error_pb2.ERROR_REASON_MODEL_UNAVAILABLE, event_pb2.RETRY_REASON_PROVIDER_ERROR),
        (529, error_pb2.ERROR_REASON_MODEL_UNAVAILABLE, event_pb2.RETRY_REASON_PROVIDER_ERROR),
    ],
)
def test_a_status_says_whether_to_try_again(
    code: int, reason: error_pb2.ErrorReason.ValueType, retry: event_pb2.RetryReason.ValueType | None
) -> None:
    error = LARGE.status(code, {"message": "No."}, {})
    assert (error.reason, error.retry, error.retryable) == (reason, retry, retry is not None)
    assert error.to_agent_error().provider_status == code


@pytest.mark.parametrize(
    ("code", "body", "reason"),
    [
        (429, {"error": {"code": "insufficient_quota"}}, "QUOTA_EXCEEDED"),
        (
            400,
            {"error": {"type": "invalid_request_error", "message": "Your credit balance is too low."}},
            "QUOTA_EXCEEDED",
        ),
        (402, {"error": {"message": "Insufficient Balance", "type": "unknown_error"}}, "QUOTA_EXCEEDED"),
        (400, {"error": {"code": "context_length_exceeded"}}, "CONTEXT_TOO_LONG"),
        (
            400,
            {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 9 > 8"}},
            "CONTEXT_TOO_LONG",
        ),
        (
            400,
            {"error": {"message": "This model's maximum context length is 8192 tokens."}},
            "CONTEXT_TOO_LONG",
        ),
        (
            400,
            [
                {
                    "error": {
                        "code": 400,
                        "message": "The input token count (9) exceeds the maximum",
                        "status": "INVALID_ARGUMENT",
                    }
                }
            ],
            "CONTEXT_TOO_LONG",
        ),
        (
            400,
            {"error": {"status": "INVALID_ARGUMENT", "message": "No.", "details": [{"reason": "API_KEY_INVALID"}]}},
            "AUTHENTICATION",
        ),
        (400, {"error": {"code": "model_not_found"}}, "NOT_FOUND"),
        (529, {"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}}, "UNAVAILABLE"),
        (500, {"error": {"message": "The context window crashed."}}, "UNAVAILABLE"),
    ],
)
def test_a_refusal_is_told_by_the_words_of_each_provider(code: int, body: object, reason: str) -> None:
    error = LARGE.status(code, body, {})
    assert error_pb2.ErrorReason.Name(error.reason) == f"ERROR_REASON_MODEL_{reason}"
    assert not error.is_of_the_request


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://user:pass@models.example.org:8443/v1?key=secret#top", "https://models.example.org:8443/v1"),
        ("http://[::1]:8000/v1", "http://[::1]:8000/v1"),
        ("not a url", ""),
        ("http://a:b", ""),
    ],
)
def test_an_address_is_shown_without_what_may_be_secret(url: str, shown: str) -> None:
    assert public_url(url) == shown


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"message": "No."}, "No."),
        ({"error": {"message": "No."}}, "No."),
        ({"detail": "No."}, "No."),
        ({"error": "No."}, "No."),
        ({"other": 1}, '{"other": 1}'),
        (
            {
                "message": {
                    "detail": [{"type": "x", "loc": ["body", "a", 0], "msg": "No."}, {"loc": ["b"], "msg": "Nor."}]
                }
            },
            "body.a.0: No.; b: Nor.",
        ),
        ("<html>\n  Bad\n gateway</html>", "<html> Bad gateway</html>"),
        (None, "None"),
        ("a" * 400, "a" * 299 + "…"),
    ],
)
def test_a_sentence_is_what_was_said_in_one_trimmed_line(said: object, sentence: str) -> None:
    assert LARGE.sentence(said) == sentence


@pytest.mark.parametrize(
    "secret",
    [
        "my-own-secret",
        "sk-proj-abc123def456",
        "Bearer abc.def.ghi",
        "gsk_abcdefgh",
        "AIzaSyA1234567890",
        "sk-ab***********yz",
    ],
)
def test_a_sentence_holds_no_secret(secret: str) -> None:
    assert LARGE.sentence(f"The key {secret} is wrong.") == "The key *** is wrong."
    assert secret not in repr(LARGE)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "250", "retry-after": "7"}, 0.25),
        ({"retry-after": "Sat, 21 Nov 2026 03:00:30 GMT", "date": DATE}, 30.0),
        ({"retry-after": "Sat, 21 Nov 2026 02:00:00 GMT", "date": DATE}, 0.0),
        ({"retry-after": "Sat, 21 Nov 2026 03:00:30 GMT"}, None),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-1"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "inf"}, None),
    ],
)
def test_retry_after_is_read_in_every_form(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after(headers) == seconds


@pytest.mark.parametrize(
    ("delay", "headers", "seconds"),
    [("34s", {}, 34.0), ("0.5s", {}, 0.5), ("34s", {"retry-after": "7"}, 7.0), ("soon", {}, None), (5, {}, None)],
)
def test_a_delay_in_the_details_of_an_error_counts_if_no_header_says_one(
    delay: object, headers: dict[str, str], seconds: float | None
) -> None:
    details = [{"@type": "type.googleapis.com/google.rpc.Help"}, {"@type": "x", "retryDelay": delay}]
    body = [{"error": {"code": 429, "message": "Slow.", "status": "RESOURCE_EXHAUSTED", "details": details}}]
    assert LARGE.status(429, body, headers).retry_after == seconds


def test_a_rate_limit_inside_a_stream_is_told_from_other_errors() -> None:
    assert LARGE.stream_error({"code": 429, "message": "Slow."}).retry == event_pb2.RETRY_REASON_RATE_LIMITED
    assert LARGE.stream_error({"code": "rate_limit_exceeded"}).retry == event_pb2.RETRY_REASON_RATE_LIMITED
    assert LARGE.stream_error("broke").retry == event_pb2.RETRY_REASON_PROVIDER_ERROR


def test_a_broken_connection_is_told_by_its_deepest_cause() -> None:
    try:
        try:
            raise OSError("refused")
        except OSError as cause:
            raise RuntimeError("Connection error.") from cause
    except RuntimeError as error:
        failure = LARGE.transport(error)
    assert failure.message == "The model 'large' could not be reached: refused"
