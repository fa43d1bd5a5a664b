"""What a function's hints and docstring become."""

import hashlib
import json
from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from bough_server.models.model import ToolSpec
from bough_server.tools.tool import Tool, ToolContext, spec, tool


class Kind(Enum):
    SHORT = "short"
    LONG = "long"


class Place(BaseModel):
    city: str
    floor: int = 0


def schema_of(made: Tool) -> Any:
    return json.loads(made.input_schema_json)


def test_hints_docstring_and_defaults_become_a_schema() -> None:
    @tool
    def search(topic: str, limit: int = 3, kind: Literal["short", "long"] = "short") -> str:
        """Searches notes.

        Only the desk's own.

        Args:
            topic: What about,
                in one or two words.
            limit (int): How many.

        Returns:
            The notes.
        """
        return topic

    assert (search.name, search.description) == ("search", "Searches notes.\n\nOnly the desk's own.")
    assert schema_of(search) == {
        "type": "object",
        "properties": {
            "topic": {"type": "string", "description": "What about, in one or two words."},
            "limit": {"type": "integer", "default": 3, "description": "How many."},
            "kind": {"type": "string", "enum": ["short", "long"], "default": "short"},
        },
        "required": ["topic"],
        "additionalProperties": False,
    }


def test_a_tool_without_parameters_takes_an_empty_object() -> None:
    @tool
    def now() -> str:
        """Tells the time."""
        return "noon"

    assert schema_of(now) == {"type": "object", "properties": {}, "additionalProperties": False}


def test_the_context_is_filled_in_and_not_in_the_schema() -> None:
    @tool
    def who(name: str, ctx: ToolContext) -> str:
        """Tells who."""
        return name + ctx.agent

    assert list(schema_of(who)["properties"]) == ["name"]
    assert who.context_parameter == "ctx"


def test_names_of_pydantics_own_methods_are_good_names_of_parameters() -> None:
    @tool
    def copy(schema: str, json: int, model_dump: bool, copy: float) -> str:
        """Copies."""
        return schema

    assert list(schema_of(copy)["properties"]) == ["schema", "json", "model_dump", "copy"]


def test_a_field_says_more_than_the_docstring() -> None:
    @tool
    def pick(count: Annotated[int, Field(ge=1, description="From 1.")]) -> str:
        """Picks.

        Args:
            count: Not this.
        """
        return str(count)

    assert schema_of(pick)["properties"]["count"] == {"type": "integer", "minimum": 1, "description": "From 1."}


def test_a_default_that_is_no_json_is_left_out_of_the_schema() -> None:
    @tool
    def weigh(amount: float | None = None, unit: Any = object()) -> str:  # noqa: B008
        """Weighs."""
        return str(amount)

    assert "default" not in schema_of(weigh)["properties"]["unit"]


def test_a_tool_is_still_the_function_it_is_made_of() -> None:
    @tool(name="adder", description="Adds.", timeout=2.5)
    def add(a: int, b: int = 1) -> int:
        return a + b

    assert add(1, b=4) == 5
    assert (add.name, add.description, add.timeout) == ("adder", "Adds.", 2.5)


def test_the_digest_is_of_what_a_model_is_told() -> None:
    def add(a: int) -> int:
        """Adds."""
        return a

    made = tool(add)
    told = "\0".join((made.name, made.description, made.input_schema_json))
    assert made.digest == hashlib.sha256(told.encode()).hexdigest()
    assert spec(made) == ToolSpec(name="add", description="Adds.", input_schema_json=made.input_schema_json)


def no_hint(topic) -> str:  # type: ignore[no-untyped-def]
    """Searches."""
    return str(topic)


def stars(*topics: str) -> str:
    """Searches."""
    return "".join(topics)


def options(**topics: str) -> str:
    """Searches."""
    return "".join(topics)


def positional(topic: str, /) -> str:
    """Searches."""
    return topic


def undocumented(topic: str) -> str:
    return topic


def unknown_hint(topic: "Missing") -> str:  # type: ignore[name-defined] # noqa: F821
    """Searches."""
    return str(topic)


class Opaque:
    """No type that JSON can hold."""


def opaque(topic: Opaque) -> str:
    """Searches."""
    return str(topic)


def twice(first: ToolContext, second: ToolContext) -> str:
    """Searches."""
    return first.agent + second.agent


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (no_hint, "needs a type hint, such as `topic: str`"),
        (stars, "takes *topics: name every parameter"),
        (options, "takes **topics: name every parameter"),
        (positional, "must be usable by name: remove the /"),
        (undocumented, "add a docstring or pass description="),
        (unknown_hint, "cannot be read: name 'Missing' is not defined"),
        (opaque, "has a parameter that JSON cannot hold"),
        (twice, "two parameters of type ToolContext: remove one"),
        (lambda: "", "'<lambda>' is no valid name for a tool"),
    ],
)
def test_a_function_that_cannot_be_a_tool_is_refused_with_what_to_change(function: Any, words: str) -> None:
    with pytest.raises(TypeError) as refused:
        tool(function)
    assert words in str(refused.value)


@pytest.mark.parametrize("timeout", [0, -1])
def test_a_timeout_that_is_not_positive_is_refused(timeout: float) -> None:
    with pytest.raises(TypeError, match="must be a positive number of seconds"):
        tool(name="wait", timeout=timeout, description="Waits.")(lambda: None)


def test_a_tool_of_a_tool_is_refused() -> None:
    @tool
    def now() -> str:
        """Tells the time."""
        return "noon"

    with pytest.raises(TypeError, match="takes a function, not a Tool"):
        tool(now)
