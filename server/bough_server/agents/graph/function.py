"""`@node`: a Python function as the work of graphs' nodes, typed by its hints."""

import inspect
import json
from collections.abc import Callable, Sequence
from typing import Any, get_type_hints, overload

from google.protobuf import json_format
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUserError

from bough.v1 import message_pb2
from bough_server.agents.graph.values import from_message
from bough_server.functions import NAME, NodeFunction
from bough_server.matching.json_types import MESSAGE, list_of
from bough_server.tools.signature import SchemaWithoutTitles


@overload
def node(function: Callable[..., Any], /) -> NodeFunction: ...


@overload
def node(
    *, name: str = "", version: str = "1", tools: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], NodeFunction]: ...


def node(
    function: Callable[..., Any] | None = None, /, *, name: str = "", version: str = "1", tools: Sequence[str] = ()
) -> NodeFunction | Callable[[Callable[..., Any]], NodeFunction]:
    """Make a function the work of graphs' nodes; its hints are the node's types.

    `def name(value)` or `async def name(value)` is one effect: its result is recorded, and until then it may run again
    after a crash. `async def name(ctx, value)` works through the effects of its Context, and calls the `tools` named
    here and the graph's linked agents. `version` changes when what it does, does.

    Raises TypeError.
    """

    def make(function: Callable[..., Any]) -> NodeFunction:
        return _make(function, name or getattr(function, "__name__", ""), version, tools)

    return make if function is None else make(function)


def _make(function: Callable[..., Any], name: str, version: str, tools: Sequence[str]) -> NodeFunction:
    if not NAME.fullmatch(name):
        raise TypeError(
            f"{name!r} is not a valid name of a node function: use a letter, then up to 63 letters, digits, _ or -, or "
            "pass name=."
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise TypeError(f"{name!r} must return its result, not yield it.")
    parameters = list(inspect.signature(function).parameters.values())
    takes_context = len(parameters) == 2
    if len(parameters) not in (1, 2) or (takes_context and not inspect.iscoroutinefunction(function)):
        raise TypeError(f"{name!r} must be `def {name}(value)` or `async def {name}(ctx, value)`.")
    if tools and not takes_context:
        raise TypeError(f"{name!r} calls tools through a context: make it `async def {name}(ctx, value)`.")
    hints = _read_hints(function, name)
    given, made = _Type(hints.get(parameters[-1].name, Any), name), _Type(hints.get("return", Any), name)
    return NodeFunction(
        name=name,
        function=function,
        version=version,
        tools=tuple(tools),
        takes_context=takes_context,
        input_schema_json=given.schema_json,
        output_schema_json=made.schema_json,
        convert=given.convert,
        to_json=made.to_json,
    )


def schema_of(hint: Any, name: str) -> str:
    """Return the JSON Schema of a hint; empty for any value. Raises TypeError, which names `name`."""
    return _Type(hint, name).schema_json


def _read_hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, AttributeError, TypeError) as error:
        raise TypeError(
            f"The type hints of {name!r} cannot be read: {error}. Hints must name what its module imports."
        ) from error


class _Type:
    """A hint as a type of JSON values, and the conversion between both."""

    def __init__(self, hint: Any, name: str) -> None:
        self._adapter: TypeAdapter[Any] | None = None
        self._is_list = hint == list[message_pb2.Message]
        self._is_message = hint is message_pb2.Message
        self.schema_json = MESSAGE if self._is_message else list_of(MESSAGE) if self._is_list else ""
        if self.schema_json or hint in (Any, object, inspect.Parameter.empty):
            return
        try:
            self._adapter = TypeAdapter(hint)
            schema = self._adapter.json_schema(schema_generator=SchemaWithoutTitles)
        except (PydanticUserError, PydanticInvalidForJsonSchema) as error:
            reason = str(error).splitlines()[0].partition(" Set `")[0]
            raise TypeError(f"{name!r} has a hint that JSON cannot hold: {reason}") from error
        schema.pop("title", None)
        self.schema_json = json.dumps(schema, ensure_ascii=False, separators=(",", ":"))

    def convert(self, value: Any) -> Any:
        """Return a JSON value as the hint says. Raises ValueError."""
        if self._is_message:
            return _parse_message(value)
        if self._is_list:
            return [_parse_message(each) for each in value]
        if self._adapter is None:
            return value
        try:
            return self._adapter.validate_python(value)
        except ValidationError as error:
            raise ValueError(_first_mistake(error)) from None

    def to_json(self, value: Any) -> Any:
        """Return a value of the hint as JSON. Raises ValueError or TypeError."""
        if self._is_list and isinstance(value, list):
            return [self._message_to_json(each) for each in value]
        if self._is_message or isinstance(value, message_pb2.Message):
            return self._message_to_json(value)
        if self._adapter is None:
            return value
        try:
            return self._adapter.dump_python(self._adapter.validate_python(value), mode="json", by_alias=True)
        except ValidationError as error:
            raise ValueError(_first_mistake(error)) from None

    @staticmethod
    def _message_to_json(value: Any) -> Any:
        if not isinstance(value, message_pb2.Message):
            raise TypeError(f"{type(value).__name__} is no Message")
        return from_message(value)


def _parse_message(value: Any) -> message_pb2.Message:
    try:
        return json_format.ParseDict(value, message_pb2.Message())
    except json_format.ParseError as error:
        raise ValueError(str(error)) from None


def _first_mistake(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_input=False)[0]
    place = ".".join(map(str, first["loc"]))
    return f"{place}: {first['msg']}" if place else first["msg"]
