"""Pure functions of the operator's: what may be one, and what becomes of what they raise or give."""

from collections.abc import Callable

import pytest

import bough_server
from bough.v1 import error_pb2, message_pb2
from bough_server.errors import RunError
from bough_server.functions import Rewriter, Snapshot, Values, condition, input_builder, rewriter

HELLO = message_pb2.Message(parts=[message_pb2.Part(text="hello")])
SNAPSHOT = Snapshot(agent="lead", state=Values({"x": "[1]"}), input=HELLO, user=HELLO, read_history=lambda: [HELLO])


def message(
    *parts: message_pb2.Part, role: message_pb2.Role.ValueType = message_pb2.ROLE_ASSISTANT
) -> message_pb2.Message:
    return message_pb2.Message(role=role, author="a", invocation_id="i", parts=parts)


def text(said: str) -> message_pb2.Part:
    return message_pb2.Part(text=said)


CALL = message_pb2.Part(tool_call=message_pb2.ToolCall(call_id="1", name="look"))
RESULT = message_pb2.Part(tool_result=message_pb2.ToolResult(call=message_pb2.ToolCall(call_id="1", name="look")))
THOUGHT = message_pb2.Part(reasoning=message_pb2.Reasoning(text="hm"))


def refusal(ask: Callable[[], object]) -> tuple[str, str]:
    with pytest.raises(RunError) as refused:
        ask()
    return refused.value.message, error_pb2.ErrorReason.Name(refused.value.reason).removeprefix("ERROR_REASON_")


def test_a_function_keeps_its_name_and_is_still_callable() -> None:
    @condition
    def done(snapshot: Snapshot) -> bool:
        return snapshot.state["x"] == [1]

    @input_builder(name="other")
    def build(snapshot: Snapshot) -> str:
        return snapshot.agent

    assert (done.name, build.name) == ("done", "other")
    assert (done(SNAPSHOT), build(SNAPSHOT)) == (True, "lead")
    assert done.holds(SNAPSHOT)
    assert build.build(SNAPSHOT) == message_pb2.Message(parts=[text("lead")])


def test_authors_import_them_from_the_package() -> None:
    assert (bough_server.condition, bough_server.input_builder) == (condition, input_builder)
    assert (bough_server.rewriter, bough_server.Snapshot) == (rewriter, Snapshot)


def _waits() -> object:
    async def waits(snapshot: Snapshot) -> bool:
        return True

    return waits


def _yields() -> object:
    def yields(snapshot: Snapshot) -> object:
        yield True

    return yields


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (_waits(), "'waits' must be a plain `def`: replay calls it again"),
        (_yields(), "'yields' must return its result, not yield it"),
        (lambda snapshot: True, "'<lambda>' is not a valid name of a function in a definition"),
        (7, "@condition takes a function, not a int"),
    ],
)
def test_what_cannot_be_pure_is_refused_when_it_is_made(function: Callable[[Snapshot], bool], words: str) -> None:
    with pytest.raises(TypeError) as refused:
        condition(function)
    assert words in str(refused.value)


def test_a_function_takes_one_thing() -> None:
    def two(one: object, other: object) -> list[message_pb2.Message]:
        return []

    with pytest.raises(TypeError, match=r"'two' must be `def two\(message\)`"):
        rewriter(two)  # type: ignore[call-overload]


def test_a_condition_that_raises_is_an_error_with_its_name() -> None:
    @condition
    def breaks(snapshot: Snapshot) -> bool:
        return bool(snapshot.state["nothing"])

    assert refusal(lambda: breaks.holds(SNAPSHOT)) == (
        "The condition 'breaks' raised KeyError: 'nothing'.",
        "INTERNAL",
    )


def test_an_error_that_a_function_raises_on_purpose_keeps_its_reason() -> None:
    @input_builder
    def picky(snapshot: Snapshot) -> str:
        raise RunError("There is no plan.", reason=error_pb2.ERROR_REASON_BAD_ARGUMENTS)

    assert refusal(lambda: picky.build(SNAPSHOT)) == (
        "The input builder 'picky' failed: There is no plan.",
        "BAD_ARGUMENTS",
    )


def test_a_function_that_exits_ends_no_server() -> None:
    def exits(_: Snapshot) -> bool:
        raise SystemExit(2)

    assert "raised SystemExit: 2" in refusal(lambda: condition(exits).holds(SNAPSHOT))[0]


@pytest.mark.parametrize("answer", [None, 1, "yes"])
def test_a_condition_says_true_or_false(answer: object) -> None:
    says = condition(name="says")(lambda _: answer)  # type: ignore[arg-type, return-value]
    assert f"returned {type(answer).__name__}; it must return True or False" in refusal(lambda: says.holds(SNAPSHOT))[0]


def test_a_coroutine_in_disguise_is_a_wrong_answer() -> None:
    async def later() -> bool:
        return True

    disguised = condition(name="disguised")(lambda _: later())  # type: ignore[arg-type, return-value]
    assert "returned coroutine" in refusal(lambda: disguised.holds(SNAPSHOT))[0]


def test_a_builder_gives_a_text_or_parts_that_can_be_said() -> None:
    blob = message_pb2.Part(blob=message_pb2.Blob(media_type="image/png", data=b"x"))
    made = input_builder(name="made")(lambda _: message(text("a"), blob))
    assert made.build(SNAPSHOT) == message_pb2.Message(parts=[text("a"), blob])
    for wrong, words in [(message(CALL), "parts other than text, JSON and files"), ([HELLO], "a text or a Message")]:
        builder = input_builder(name="wrong")(lambda _, wrong=wrong: wrong)  # type: ignore[misc, arg-type]
        assert words in refusal(lambda builder=builder: builder.build(SNAPSHOT))[0]  # type: ignore[misc]


def test_a_rewriter_is_given_a_copy_without_what_its_author_thought() -> None:
    given: list[message_pb2.Message] = []

    @rewriter
    def spoil(message: message_pb2.Message) -> list[message_pb2.Message]:
        given.append(message)
        message.parts[0].text = "changed"
        return [message]

    original = message(text("a"), THOUGHT)
    assert spoil.rewrite(original) == [message(text("changed"))]
    assert original == message(text("a"), THOUGHT)
    assert spoil.rewrite(message(THOUGHT)) == []
    assert len(given) == 1


def test_a_rewritten_message_is_the_users_and_its_authors_where_nothing_else_is_said() -> None:
    bare = rewriter(name="bare")(lambda one: [message_pb2.Message(parts=one.parts), message_pb2.Message()])
    assert bare.rewrite(message(text("a"))) == [message(text("a"), role=message_pb2.ROLE_USER)]


def test_a_rewriter_says_in_words_what_was_called() -> None:
    same: Rewriter = rewriter(name="same")(lambda one: [one])
    assert same.rewrite(message(text("a"))) == [message(text("a"))]
    for wrong in (
        message(text("a"), CALL),
        message(RESULT, role=message_pb2.ROLE_TOOL),
        message(text("a"), role=message_pb2.ROLE_TOOL),
    ):
        assert refusal(lambda wrong=wrong: same.rewrite(wrong))[1] == "INTERNAL"  # type: ignore[misc]


@pytest.mark.parametrize("answer", [None, "text", [1], HELLO])
def test_a_rewriter_gives_a_list_of_messages(answer: object) -> None:
    odd = rewriter(name="odd")(lambda _: answer)  # type: ignore[arg-type, return-value]
    assert "it must return a list of Messages" in refusal(lambda: odd.rewrite(message(text("a"))))[0]


def test_what_a_situation_gives_are_copies() -> None:
    SNAPSHOT.state["x"].append(2)
    assert dict(SNAPSHOT.state) == {"x": [1]}
    SNAPSHOT.history[0].parts[0].text = "changed"
    assert HELLO.parts[0].text == "hello"
    with pytest.raises(TypeError):
        SNAPSHOT.state["x"] = 3  # type: ignore[index]
