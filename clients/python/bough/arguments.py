"""Build messages from arguments, and refuse an argument of a wrong type by its name."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final, ParamSpec, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

Fields = ParamSpec("Fields")
Built = TypeVar("Built", bound=Message)

_SCALARS: Final = {
    FieldDescriptor.CPPTYPE_BOOL: "a bool",
    FieldDescriptor.CPPTYPE_DOUBLE: "a float",
    FieldDescriptor.CPPTYPE_STRING: "a str",
}
"""Python's types of scalars; all others are ints."""


def build(kind: Callable[Fields, Built], *args: Fields.args, **fields: Fields.kwargs) -> Built:
    """Return a message of these fields. Raises TypeError or ValueError that names the field whose value is wrong.

    protobuf's own errors name none, and it takes a text as a list of characters and None as an empty text.
    """
    described: Mapping[str, FieldDescriptor] = kind.DESCRIPTOR.fields_by_name  # type: ignore[attr-defined] # a class
    values: dict[str, Any] = {name: _check_value(described[name], value) for name, value in fields.items()}
    try:
        return kind(*args, **values)
    except (TypeError, ValueError):
        for name, value in values.items():
            _check_field(kind, described[name], value)
        raise


def wrong_type(name: str, expected: str, value: object) -> TypeError:
    """Return the error for an argument of a wrong type; `expected` is a noun with its article."""
    return TypeError(f"{name} must be {expected}, not {'None' if value is None else type(value).__name__}")


def _check_value(field: FieldDescriptor, value: object) -> object:
    """Return the value of a field, what is repeated as a list. Raises TypeError for what protobuf would accept."""
    if value is None:
        if field.is_repeated or field.has_presence:
            return value
    elif not field.is_repeated or (_is_map(field) and isinstance(value, Mapping)):
        return value
    elif isinstance(value, Iterable) and not (_is_map(field) or isinstance(value, str | bytes | Mapping)):
        return list(value)
    raise wrong_type(field.name, _describe_type(field), value)


def _check_field(kind: Callable[..., Message], field: FieldDescriptor, value: object) -> None:
    """Build a message of one field. Raises TypeError or ValueError that names the field, or the item that is wrong."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            with _name_errors(f"{field.name}[{index}]", _describe_item(field), item):
                kind(**{field.name: [item]})
    if _is_map(field) and isinstance(value, Mapping):
        for key, item in value.items():
            with _name_errors(f"{field.name}[{key!r}]", "a str", item):
                kind(**{field.name: {"key": item}})
    with _name_errors(field.name, _describe_type(field), value):
        kind(**{field.name: value})


@contextmanager
def _name_errors(name: str, expected: str, value: object) -> Iterator[None]:
    """Raise the errors of protobuf with the name of the argument."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    except TypeError:
        raise wrong_type(name, expected, value) from None


def _describe_type(field: FieldDescriptor) -> str:
    """Return the type of a field's values, as a noun with its article."""
    if _is_map(field):
        return "a mapping of str to str"
    return f"a list of {_describe_item(field).partition(' ')[2]}" if field.is_repeated else _describe_item(field)


def _describe_item(field: FieldDescriptor) -> str:
    """Return the type of an item of a repeated field, or of the only value of another, as a noun with its article."""
    kind = field.message_type or field.enum_type
    if kind is None:
        return _SCALARS.get(field.cpp_type, "an int")
    return f"{'an' if kind.name[0] in 'AEIO' else 'a'} {kind.name}"


def _is_map(field: FieldDescriptor) -> bool:
    """Return whether a field is a map; those of requests are labels, of text to text."""
    return field.message_type is not None and field.message_type.GetOptions().map_entry
