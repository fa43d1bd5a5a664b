"""Every rule of the schema that a request can break, read from the descriptors, is broken once and must be reported."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from bough.v1 import (
    ROLE_TOOL,
    agent_service_pb2,
    catalog_service_pb2,
    eval_service_pb2,
    eval_set_pb2,
    session_service_pb2,
)
from bough_server.evals.sets.expectation_validation import KnownNames
from bough_server.evals.sets.validation import request_problems
from bough_server.interceptors.validation import violations
from bough_server.schema_rules import schema

SERVICES = (agent_service_pb2, catalog_service_pb2, eval_service_pb2, session_service_pb2)
REQUESTS = [
    method.input_type
    for module in SERVICES
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
JUDGED_ELSEWHERE = {"CreateAgentRequest"}
"""It has nothing but a definition, which the catalog validates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule and the fields that lead to it; `breach` breaks it in the message of the last field."""

    fields: tuple[str, ...]
    name: str
    breach: Callable[[Message], str]
    """Returns the path of the violation in that message."""


def options_of(descriptor: Any, option: str) -> Any:
    """The rules in the options of a descriptor of the whole schema, which only classes of the same pool can read."""
    options = descriptor.GetOptions()
    known = GetMessageClass(schema().FindMessageTypeByName(options.DESCRIPTOR.full_name))
    extension = schema().FindExtensionByName(f"buf.validate.{option}")
    return known.FromString(options.SerializeToString()).Extensions[extension]  # type: ignore[index]


def moved(duration: Any, nanoseconds: int) -> Duration:
    """Return a duration that is longer by that much, as an instance of the usual class."""
    made = Duration()
    made.FromNanoseconds(duration.ToNanoseconds() + nanoseconds)
    return made


VALUES: Mapping[str, Callable[[Any], Any]] = {
    "string.min_len": lambda least: "x" * (least - 1),
    "string.max_len": lambda most: "x" * (most + 1),
    "string.pattern": lambda _: " ",
    "int32.gte": lambda least: least - 1,
    "int32.lte": lambda most: most + 1,
    "int64.gte": lambda least: least - 1,
    "double.gt": lambda bound: bound,
    "double.gte": lambda least: least - 1,
    "double.lte": lambda most: most + 1,
    "double.finite": lambda _: math.inf,
    "enum.defined_only": lambda _: 99,
    "enum.not_in": lambda refused: refused[0],
    "duration.gt": lambda bound: moved(bound, 0),
    "duration.gte": lambda least: moved(least, -1),
    "duration.lte": lambda most: moved(most, 1),
}
"""A value that breaks a rule, derived from the rule's bound."""

LISTS: Mapping[str, Callable[[int], int]] = {
    "repeated.min_items": lambda least: least - 1,
    "repeated.max_items": lambda most: most + 1,
    "map.max_pairs": lambda most: most + 1,
}
"""The number of items that breaks a rule."""

MESSAGES: Mapping[str, Callable[[Any], None]] = {
    "input.not_empty": lambda said: said.SetInParent(),
    "input.role": lambda said: setattr(said, "role", ROLE_TOOL),
}
"""How to break a CEL rule, which has no bound to derive a value from."""


TEXTS: Mapping[str, str] = {
    "labels.reserved": "bough/key",
    "request_id.reserved": "bough/turn",
    "session_id.reserved": "bough/x",
    "evaluation_id.no_control": "\x7f",
    "case_id.no_control": "\x7f",
    "uri.no_control": "file:\n",
    "media_type.no_control": "a/b\r",
    "filename.no_control": "a\x1b[2J",
    "eval_set_name.no_control": "\x7f",
    "labels.no_control": "a\0b",
    "note.no_control": "\x1b[2J",
    "session_id.no_control": "\x7f",
    "agent.no_control": "a\n",
    "id.no_control": "a\n",
}
"""A text that breaks a CEL rule."""


def typed(rules: Any) -> Iterator[tuple[str, Any]]:
    """Yield the rules of a value by name, such as `string.max_len`, each with its bound; those of items stay nested."""
    if kind := rules.WhichOneof("type"):
        for rule, said in getattr(rules, kind).ListFields():
            yield f"{kind}.{rule.name}", said


def rules_of(field: FieldDescriptor, rules: Any) -> Iterator[tuple[str, Callable[[Message], str]]]:
    """Yield the rules of one field, each with a function that breaks it."""
    if rules.required:
        yield "required", named(field.name)
    for rule in rules.cel:
        is_of_text = rule.id in TEXTS
        yield rule.id, breach_of_value(field, TEXTS[rule.id]) if is_of_text else breach_of_message(field, rule.id)
    for name, said in typed(rules):
        if name in ("repeated.items", "map.keys", "map.values"):
            for inner, bound in typed(said):
                yield f"{name}.{inner}", breach_of_item(field, name, VALUES[inner](bound))
            for rule in said.cel:
                yield f"{name}.{rule.id}", breach_of_item(field, name, TEXTS[rule.id])
        elif name == "repeated.unique":
            yield name, breach_of_uniqueness(field)
        elif name in LISTS:
            yield name, breach_of_list(field, LISTS[name](said))
        else:
            yield name, breach_of_value(field, VALUES[name](said))


def named(path: str) -> Callable[[Message], str]:
    """Break a rule by leaving the field out."""
    return lambda _: path


def breach_of_message(field: FieldDescriptor, rule: str) -> Callable[[Message], str]:
    def breach(message: Message) -> str:
        MESSAGES[rule](getattr(message, field.name))
        return field.name

    return breach


def breach_of_value(field: FieldDescriptor, value: Any) -> Callable[[Message], str]:
    def breach(message: Message) -> str:
        if isinstance(value, Message):
            getattr(message, field.name).CopyFrom(value)
        else:
            setattr(message, field.name, value)
        return field.name

    return breach


def breach_of_list(field: FieldDescriptor, count: int) -> Callable[[Message], str]:
    def breach(message: Message) -> str:
        items = getattr(message, field.name)
        for number in range(count):
            if field.message_type is None:
                items.append("" if field.type == field.TYPE_STRING else 0)
            elif field.message_type.GetOptions().map_entry:
                if field.message_type.fields_by_name["value"].message_type is not None:
                    items.get_or_create(f"key{number}")
                else:
                    items[f"key{number}"] = ""
            else:
                items.add()
        return field.name

    return breach


def breach_of_uniqueness(field: FieldDescriptor) -> Callable[[Message], str]:
    def breach(message: Message) -> str:
        getattr(message, field.name).extend(["same" if field.type == field.TYPE_STRING else 1] * 2)
        return field.name

    return breach


def breach_of_item(field: FieldDescriptor, place: str, value: Any) -> Callable[[Message], str]:
    def breach(message: Message) -> str:
        items = getattr(message, field.name)
        if place == "repeated.items":
            items.append(value)
            return f"{field.name}[0]"
        key = value if place == "map.keys" else "key"
        items[key] = "" if place == "map.keys" else value
        return f'{field.name}["{key}"]'

    return breach


def all_rules(message: Descriptor, fields: tuple[str, ...] = (), above: frozenset[str] = frozenset()) -> Iterator[Rule]:
    """Yield the rules of a message and of its nested messages, without fields that the schema ignores."""
    if message.full_name in above:
        return
    for oneof in message.oneofs:
        if options_of(oneof, "oneof").required:
            yield Rule(fields=fields, name=f"{oneof.name}.required", breach=named(oneof.name))
    for field in message.fields:
        rules = options_of(field, "field")
        if rules.ignore:
            continue
        for name, breach in rules_of(field, rules):
            yield Rule(fields=fields, name=f"{field.name}.{name}", breach=breach)
        kind = field.message_type
        if kind is None or kind.file.package != "bough.v1" or kind.GetOptions().map_entry:
            continue
        if not rules.repeated.items.ignore:
            yield from all_rules(kind, (*fields, field.name), above | {message.full_name})


def broken(request: type[Message], rule: Rule) -> tuple[Message, str]:
    """Return a request that breaks a rule, and the path of the violation."""
    made = message = request()
    path = []
    for name in rule.fields:
        inner = getattr(message, name)
        if message.DESCRIPTOR.fields_by_name[name].is_repeated:
            message = inner.add()
            path.append(f"{name}[0]")
        else:
            inner.SetInParent()
            message = inner
            path.append(name)
    return made, ".".join([*path, rule.breach(message)])


def every_rule() -> list[tuple[Descriptor, Rule]]:
    """Every rule of every request."""
    found = []
    for request in REQUESTS:
        ruled = schema().FindMessageTypeByName(request.full_name)
        found += [(request, rule) for rule in all_rules(ruled)]
    return found


@pytest.mark.parametrize(
    ("request_", "rule"),
    every_rule(),
    ids=lambda one: one.name if isinstance(one, Descriptor) else ".".join([*one.fields, one.name]),
)
def test_a_request_that_breaks_a_rule_is_told_where(request_: Descriptor, rule: Rule) -> None:
    request, path = broken(GetMessageClass(request_), rule)
    assert path in [violation.field for violation in violations(request)]


def test_every_request_has_a_rule_to_break() -> None:
    ruled = {request.name for request, _ in every_rule()}
    assert {request.name for request in REQUESTS} - ruled == JUDGED_ELSEWHERE


def rules_of_sets() -> list[Rule]:
    """Every rule of eval sets, which requests bring unchecked and the planning of an evaluation checks."""
    return list(all_rules(schema().FindMessageTypeByName("bough.v1.EvalSet")))


@pytest.mark.parametrize("rule", rules_of_sets(), ids=lambda one: ".".join([*one.fields, one.name]))
def test_a_set_that_breaks_a_rule_is_told_where(rule: Rule) -> None:
    eval_set, path = broken(eval_set_pb2.EvalSet, rule)
    assert isinstance(eval_set, eval_set_pb2.EvalSet)
    assert path in [field for field, _ in request_problems(eval_set, known=KnownNames())]


def test_sets_have_rules_to_break() -> None:
    assert len(rules_of_sets()) > 100
