"""Messages of the schema as YAML and JSON documents, in both directions.

Reading follows protobuf's JSON mapping and accepts more: enum values without their prefix, durations such as `10m`, a
text in place of some messages, and every `*_json` field as plain values under its name without the suffix.
"""

import base64
import binascii
import json
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from typing import Final, TypeAlias, cast

import yaml
from google.protobuf import duration_pb2, json_format, timestamp_pb2
from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from bough.v1 import input_pb2
from bough_server.documents.yaml import FLOAT_PATTERN, Document, FieldPath, Value, parse_duration, suggestion
from bough_server.errors import Problem

_INT_BITS: Final = {FieldDescriptor.CPPTYPE_INT32: 31, FieldDescriptor.CPPTYPE_INT64: 63}
_FLOATS: Final = (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT)
_NOT_FINITE: Final = ("NaN", "Infinity", "-Infinity")

SHORTHANDS: Final[Mapping[str, str]] = {
    "AgentLink": "agent",
    "ToolLink": "name",
    "ExpectedAgent": "name",
    "ExpectedTool": "name",
    "ExpectedAnswer": "exact",
    "AgentError": "message",
}
"""Messages that a document may write as a text, and the field that the text sets; all other fields stay unset."""

DECISIONS: Final[Mapping[str, bool]] = {"APPROVE": True, "REFUSE": False}
"""What a document may write in place of an ApprovalDecision, and whether it approves."""

OLD_NAMES: Final[Mapping[str, Mapping[str, str]]] = {
    "EvalDefaults": {"runs": "trials"},
    "EvalCase": {"runs": "trials", "from": "origin"},
    "EvalOrigin": {"through_sequence": "after_sequence", "throughSequence": "after_sequence"},
    "EvalAnswer": {
        "decision": "approval",
        **dict.fromkeys(("arguments", "arguments_json", "argumentsJson"), "approval.arguments"),
    },
}
"""The names that fields of messages had before version 0.2, and those that they have now."""

_Json: TypeAlias = "bool | int | float | str | list[_Json] | dict[str, _Json] | None"
_Scalar: TypeAlias = str | bytes | bool | int | float
_Places: TypeAlias = tuple[FieldPath, str]
"""The path of a value in its document, and the same place in the schema's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldLines:
    """The lines of a message's fields in the file that it was read from."""

    path: str
    lines: Mapping[str, int] = field(default_factory=dict)
    """Line by field path, in the schema's names; of a field written as plain JSON also without its suffix."""

    def problem(self, field_path: str, description: str) -> Problem:
        """Return a problem at a field, located at the nearest enclosing field that the document contains."""
        plain = field_path.removesuffix("_json")
        place = written = plain if plain in self.lines else field_path
        while place and place not in self.lines:
            place = place[: max(place.rfind("."), place.rfind("["), 0)]
        return Problem(path=self.path, line=self.lines.get(place, 0), field=written, description=description)


def read_message(
    document: Document, message: Message, *, required: str, null_is_json: bool = False
) -> tuple[dict[str, int], list[Problem]]:
    """Fill a message from a document, as far as it can be read; return the lines of its fields and every problem.

    `required` is the problem of a document that is not a mapping. A null leaves its field unset; with `null_is_json`,
    one in place of plain JSON values is JSON's null.
    """
    reader = _MessageReader(document, null_is_json=null_is_json)
    if isinstance(document.value, dict):
        reader.message(document.value, message, ((), ""))
    else:
        reader.report((), required)
    return reader.lines, reader.problems


def short_enum_name(enum: EnumDescriptor, name: str) -> str:
    """Return an enum value's name without the enum's prefix: HISTORY_SCOPE_NONE becomes NONE."""
    prefix = "".join(f"_{letter}" if letter.isupper() else letter.upper() for letter in enum.name).lstrip("_") + "_"
    return name.removeprefix(prefix)


def document_names(descriptor: Descriptor) -> dict[str, tuple[str, bool]]:
    """What a document may call each field, to the field's name and whether its value is plain JSON."""
    names: dict[str, tuple[str, bool]] = {}
    for each in descriptor.fields:
        names[each.name] = names[each.json_name] = (each.name, False)
    for each in descriptor.fields:
        if each.name.endswith("_json"):
            names.setdefault(each.name.removesuffix("_json"), (each.name, True))
            names.setdefault(each.json_name.removesuffix("Json"), (each.name, True))
    return names


_names = cache(document_names)
"""The same, for the thousands of messages of a large set."""


class _Wrong(ValueError):
    """A value that does not fit its field; the message becomes the problem's description."""


class _MessageReader:
    """Fills messages from values, and collects problems and the line of each field."""

    def __init__(self, document: Document, *, null_is_json: bool) -> None:
        self.document = document
        self.problems: list[Problem] = []
        self.lines: dict[str, int] = {"": document.line(())}
        self._null_is_json = null_is_json

    def report(self, path: FieldPath, description: str) -> None:
        self.problems.append(self.document.problem(path, description))

    def message(self, values: Mapping[str, Value], message: Message, places: _Places) -> None:
        path, schema_path = places
        schema = cast(Descriptor, message.DESCRIPTOR)
        names = _names(schema)
        given: dict[str, str] = {}
        chosen: dict[str, str] = {}
        for key, value in values.items():
            inner = (*path, key)
            if key not in names:
                self.report(inner, _unknown_field(schema, key))
                continue
            name, is_plain_json = names[key]
            if value is None and not (is_plain_json and self._null_is_json):
                continue
            descriptor = schema.fields_by_name[name]
            if refused := _refusal(descriptor, given, chosen):
                self.report(inner, refused)
                continue
            given[name] = key
            if descriptor.containing_oneof is not None:
                chosen[descriptor.containing_oneof.name] = key
            place = f"{schema_path}.{name}" if schema_path else name
            self.lines[place] = self.document.line(inner)
            if is_plain_json:
                self.lines[place.removesuffix("_json")] = self.lines[place]
            self._field(_json_text(value) if is_plain_json else value, message, descriptor, (inner, place))

    def _field(self, value: Value, message: Message, descriptor: FieldDescriptor, places: _Places) -> None:
        try:
            if (values := map_value(descriptor)) is not None:
                self._map(value, getattr(message, descriptor.name), values, places)
            elif descriptor.is_repeated:
                self._list(value, message, descriptor, places)
            elif descriptor.message_type is None:
                setattr(message, descriptor.name, _scalar(value, descriptor))
            else:
                inner = getattr(message, descriptor.name)
                # Without this an empty mapping would leave the field unset, and its oneof with it.
                inner.SetInParent()
                self._into(value, inner, places)
        except _Wrong as error:
            self.report(places[0], str(error))

    def _list(self, value: Value, message: Message, descriptor: FieldDescriptor, places: _Places) -> None:
        path, schema_path = places
        items = getattr(message, descriptor.name)
        for index, (inner, item) in enumerate(_expand_list(value, descriptor, path)):
            place = f"{schema_path}[{index}]"
            self.lines[place] = self.document.line(inner)
            try:
                if descriptor.message_type is None:
                    items.append(_scalar(item, descriptor))
                else:
                    self._into(item, items.add(), (inner, place))
            except _Wrong as error:
                self.report(inner, str(error))

    def _map(
        self, value: Value, entries: MutableMapping[str, Message | _Scalar], values: FieldDescriptor, places: _Places
    ) -> None:
        if not isinstance(value, dict):
            raise _Wrong("must be a mapping")
        path, schema_path = places
        for key, item in value.items():
            inner, place = (*path, key), f'{schema_path}["{key}"]'
            self.lines[place] = self.document.line(inner)
            try:
                if values.message_type is None:
                    entries[key] = _scalar(item, values)
                else:
                    # The map makes the message of a key when it is first read.
                    self._into(item, cast(Message, entries[key]), (inner, place))
            except _Wrong as error:
                self.report(inner, str(error))

    def _into(self, value: Value, message: Message, places: _Places) -> None:
        if isinstance(message, duration_pb2.Duration | timestamp_pb2.Timestamp):
            _read_time(value, message)
        elif isinstance(value, dict):
            self.message(value, message, places)
        else:
            self._from_text(value, message, places)

    def _from_text(self, value: Value, message: Message, places: _Places) -> None:
        """Fill a message from the text that its shorthand allows."""
        schema = cast(Descriptor, message.DESCRIPTOR)
        if isinstance(message, input_pb2.ApprovalDecision):
            if not isinstance(value, str) or value not in DECISIONS:
                raise _Wrong(
                    f"must be {' or '.join(DECISIONS)}, or a mapping of {', '.join(_list_field_names(schema))}"
                )
            message.approved = DECISIONS[value]
            return
        named = SHORTHANDS.get(schema.name, "")
        if not named or not isinstance(value, str):
            name = ("a text, or " if named in ("exact", "message") else "a name, or ") if named else ""
            raise _Wrong(f"must be {name}a mapping of {', '.join(_list_field_names(schema)) or 'nothing: {}'}")
        path, schema_path = places
        setattr(message, named, value)
        self.lines[f"{schema_path}.{named}"] = self.document.line(path)


LIST_FORMS: Final = frozenset({"FieldMapping", "GraphEdge", "BranchCase"})
"""Messages of which a document may write a list in a shorter form: mappings of a node's input, edges, cases."""


def _expand_list(value: Value, descriptor: FieldDescriptor, path: FieldPath) -> list[tuple[FieldPath, Value]]:
    """Return the items of a list, each with the place where it is written; short forms as the list that they mean."""
    kind = descriptor.message_type.name if descriptor.message_type is not None else ""
    if kind == "FieldMapping" and isinstance(value, str):
        return [(path, {"path": value})]
    if kind == "FieldMapping" and isinstance(value, dict):
        return [((*path, name), _expand_mapping(name, source)) for name, source in value.items()]
    if kind == "BranchCase" and isinstance(value, dict):
        return [((*path, text), {"value": text, "target": target}) for text, target in value.items()]
    if not isinstance(value, list):
        others = {"FieldMapping": ", a path, or a mapping of fields to paths", "BranchCase": ", or a mapping of texts"}
        raise _Wrong(f"must be a list{others.get(kind, '')}")
    items: list[tuple[FieldPath, Value]] = []
    for index, item in enumerate(value):
        inner = (*path, index)
        if kind != "GraphEdge" or not isinstance(item, list):
            items.append((inner, item))
        elif len(item) < 2:
            raise _Wrong(f"has a chain of one node at [{index}]; write two or more, such as [START, node]")
        else:
            items += [(inner, {"source": source, "target": target}) for source, target in pairwise(item)]
    return items


def _expand_mapping(name: str, source: Value) -> Value:
    if isinstance(source, dict):
        return {"field": name, **source}
    return {"field": name, "path": source}


def map_value(descriptor: FieldDescriptor) -> FieldDescriptor | None:
    """Return what the values of a map field are; None for other fields. All maps of the schema have texts as keys."""
    entry = descriptor.message_type
    return entry.fields_by_name["value"] if entry is not None and entry.GetOptions().map_entry else None


def _refusal(descriptor: FieldDescriptor, given: Mapping[str, str], chosen: Mapping[str, str]) -> str:
    """Return why a field cannot be set beside those that are: `given` by their names, `chosen` by their oneofs."""
    if descriptor.name in given:
        return f"is the same field as {given[descriptor.name]!r}; remove one of the two"
    # protobuf puts each optional field into a synthetic oneof, which no other field is in.
    oneof = descriptor.containing_oneof
    if oneof is not None and oneof.name in chosen:
        return f"excludes {chosen[oneof.name]!r}: there can be only one {oneof.name}"
    return ""


def _list_field_names(descriptor: Descriptor) -> list[str]:
    """Return the names to suggest: those of the schema, without the `_json` suffix."""
    return [each.name.removesuffix("_json") for each in descriptor.fields]


def _unknown_field(descriptor: Descriptor, key: str) -> str:
    if new := OLD_NAMES.get(descriptor.name, {}).get(key):
        return f"`{key}` is `{new}` now."
    if descriptor.name == "InvocationSource":
        return "A recorded run is written as `run: {run_id: ...}` or `invocation: {...}` now."
    return f"There is no such field.{suggestion(key, _list_field_names(descriptor))}"


def _json_text(value: Value) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _read_time(value: Value, message: duration_pb2.Duration | timestamp_pb2.Timestamp) -> None:
    is_duration = isinstance(message, duration_pb2.Duration)
    if not isinstance(value, str):
        example = "a duration such as 10m, 50ms or 1h30m" if is_duration else "a time such as 2026-01-31T12:00:00Z"
        raise _Wrong(f"must be {example}")
    try:
        if isinstance(message, duration_pb2.Duration):
            message.FromNanoseconds(parse_duration(value))
        else:
            message.FromJsonString(value)
    except ValueError as error:
        raise _Wrong(str(error) if is_duration else "must be a time such as 2026-01-31T12:00:00Z") from None


def _scalar(value: Value, descriptor: FieldDescriptor) -> _Scalar:
    kind = descriptor.cpp_type
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if not isinstance(value, str):
            raise _Wrong("must be text" + ("" if isinstance(value, list | dict) else "; put it in quotes"))
        return _bytes(value) if descriptor.type == FieldDescriptor.TYPE_BYTES else value
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        if not isinstance(value, bool):
            raise _Wrong("must be true or false")
        return value
    if descriptor.enum_type is not None:
        return _enum(value, descriptor.enum_type)
    if kind in _FLOATS:
        return _number(value)
    return _integer(value, _INT_BITS[kind])


def _bytes(value: str) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except binascii.Error:
        raise _Wrong("must be bytes as base64") from None


def _enum(value: Value, enum: EnumDescriptor) -> int:
    for each in enum.values:
        if value in (each.name, short_enum_name(enum, each.name)):
            return each.number
    shown = [short_enum_name(enum, each.name) for each in enum.values if each.number]
    raise _Wrong(f"must be {' or '.join(shown)}.{suggestion(str(value), shown) if isinstance(value, str) else ''}")


def _number(value: Value) -> float:
    if isinstance(value, str) and value in _NOT_FINITE:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Wrong("must be a number")
    try:
        return float(value)
    except OverflowError:
        raise _Wrong("must be a number in the range of a double") from None


def _integer(value: Value, bits: int) -> int:
    # protobuf's JSON mapping writes 64-bit integers as texts, because readers of JSON may take numbers for doubles.
    if bits == _INT_BITS[FieldDescriptor.CPPTYPE_INT64] and isinstance(value, str) and _is_whole(value):
        value = int(value)
    # As in protobuf's JSON mapping, 1.0 and 1e3 are integers too.
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise _Wrong("must be a whole number")
    if not -(1 << bits) <= value < 1 << bits:
        raise _Wrong(f"must be a whole number that fits {bits + 1} bits")
    return value


def _is_whole(text: str) -> bool:
    return len(text) <= 20 and text.isascii() and text.removeprefix("-").isdigit()


class _Dumper(yaml.SafeDumper):
    """YAML dumper that writes block style throughout and keeps the lines of long texts."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # YAML folds these as line breaks unless they are escaped, which only the double-quoted style can do.
    folds = any(character in text for character in "\r\x85\u2028\u2029")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if folds else "|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


# documents.py reads 1e5 as a number, but PyYAML would write the text 1e5 without quotes.
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT_PATTERN, list("-+.0123456789"))


def message_yaml(message: Message) -> str:
    """Return a message as YAML, as an author would write it."""
    return yaml.dump(_plain(message), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def _plain(message: Message) -> dict[str, _Json]:
    names = _names(cast(Descriptor, message.DESCRIPTOR))
    plain: dict[str, _Json] = {}
    for descriptor, value in message.ListFields():
        name = descriptor.name
        short = name.removesuffix("_json")
        if (values := map_value(descriptor)) is not None:
            # Maps have no order: sorted, the same message is written the same.
            plain[name] = {key: _value(values, value[key]) for key in sorted(value)}
        elif descriptor.is_repeated:
            plain[name] = [_value(descriptor, item) for item in value]
        elif names.get(short) == (name, True) and (parsed := _compact_json(value)) is not None:
            plain[short] = parsed
        else:
            plain[name] = _value(descriptor, value)
    return plain


def _value(descriptor: FieldDescriptor, value: Message | _Scalar) -> _Json:
    if isinstance(value, Message):
        # Well-known types such as Duration have their own JSON form, a string.
        if value.DESCRIPTOR.full_name.startswith("google.protobuf."):
            return json_format.MessageToJson(value).strip('"')
        if isinstance(value, input_pb2.ApprovalDecision) and not (value.arguments_json or value.note):
            return next(word for word, approves in DECISIONS.items() if approves == value.approved)
        return _plain(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if descriptor.enum_type is not None:
        known = descriptor.enum_type.values_by_number.get(int(value))
        return short_enum_name(descriptor.enum_type, known.name) if known else int(value)
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return json.dumps(value)
    return value


def _compact_json(text: str) -> _Json:
    """Return the value of a JSON text that json.dumps would write back byte for byte; None for any other text."""
    try:
        value: _Json = json.loads(text, parse_constant=_refuse)
        same = json.dumps(value, ensure_ascii=False, separators=(",", ":")) == text
    except (ValueError, RecursionError):
        return None
    return value if same else None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
