"""What holds for the schema as a whole: names, rules of equal fields, files, comments, and what was promised before."""

import keyword
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto

from proto.generate import PROTO, ROOT, parse_set, without_rules

SCHEMA: Final = ROOT / "server/bough_server/bough.binpb"
BASELINE: Final = PROTO / "baseline.binpb"
RELEASES: Final = PROTO / "releases"


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


RESERVED: Final[Mapping[str, frozenset[str]]] = {
    "Python": words(" ".join(keyword.kwlist).lower()),
    "Java": words(
        """
        abstract assert boolean break byte case catch char class const continue default do double else enum extends
        final finally float for goto if implements import instanceof int interface long native new package private
        protected public return short static strictfp super switch synchronized this throw throws transient try void
        volatile while true false null
        """
    ),
    "C#": words(
        """
        abstract as base bool break byte case catch char checked class const continue decimal default delegate do
        double else enum event explicit extern false finally fixed float for foreach goto if implicit in int
        interface internal is lock long namespace new null object operator out override params private protected
        public readonly ref return sbyte sealed short sizeof stackalloc static string struct switch this throw true
        try typeof uint ulong unchecked unsafe ushort using virtual void volatile while
        """
    ),
    "Go": words(
        """
        break case chan const continue default defer else fallthrough for func go goto if import interface map
        package range return select struct switch type var
        """
    ),
    "Rust": words(
        """
        as async await break const continue crate dyn else enum extern false fn for if impl in let loop match mod
        move mut pub ref return self static struct super trait true type unsafe use where while abstract become box
        do final macro override priv try typeof unsized virtual yield
        """
    ),
    "C++": words(
        """
        alignas alignof and and_eq asm auto bitand bitor bool break case catch char class compl concept const
        consteval constexpr constinit continue decltype default delete do double else enum explicit export extern
        false float for friend goto if inline int long mutable namespace new noexcept not not_eq nullptr operator or
        or_eq private protected public register requires return short signed sizeof static struct switch template
        this throw true try typedef typeid typename union unsigned using virtual void volatile while xor xor_eq
        """
    ),
    "TypeScript": words(
        """
        break case catch class const continue debugger default delete do else enum export extends false finally for
        function if import in instanceof new null return super switch this throw true try typeof var void while with
        implements interface let package private protected public static yield
        """
    ),
}

HARMLESS: Final[Mapping[str, str]] = {
    "function": "TypeScript takes any word as the name of a property",
    "loop": "Rust writes r#loop",
    "map": "Go writes Map",
    "operator": "C# writes Operator, and C++ operator_()",
    "template": "C++ writes template_()",
}
"""Field names that a language reserves, and what its generator makes of them."""

UNLIKE: Final[Mapping[str, str]] = {
    "after_sequence": "a fork shares at least the first event",
    "agents": "changes by name in a fork, and a list that is expected",
    "agent": "an agent of the catalog has at most 59 characters, one of a record 256",
    "definitions": "a run may bring fewer than a check",
    "id": "of a case and of a rubric",
    "model": "of a call, and those of a matrix",
    "name": "of a set, a metric, a tool and an agent",
    "tools": "calls that are expected, and mocks",
    "until": "an evaluation is never interrupted",
}
"""Fields that only share a name, and why their rules differ."""

WHETHER_SET: Final = frozenset({"required", "ignore", "string.min_len", "repeated.min_items"})
"""Rules on whether a field has to be set, which equal fields need not share."""

RESOURCES_OF_SERVICES: Final = frozenset({"DefinitionViolation"})
"""Messages that the baseline holds in the file of a service, although they are no requests and responses."""


def files(path: Path) -> Mapping[str, FileDescriptorProto]:
    """Return the files of the schema in a set, by name."""
    return {file.name: file for file in parse_set(path.read_bytes()).file if file.package == "bough.v1"}


def messages(path: Path = SCHEMA) -> Iterator[tuple[str, DescriptorProto]]:
    """Yield every message with the name of its file; the schema nests none but entries of maps."""
    for name, file in files(path).items():
        yield from ((name, message) for message in file.message_type)


def rules_of(field: FieldDescriptorProto) -> Mapping[str, Any]:
    """Return the rules of a field by path, such as string.max_len or map.keys.cel[labels.reserved]."""
    found = [value for known, value in field.options.ListFields() if known.full_name == "buf.validate.field"]
    return dict(_flat(found[0], "")) if found else {}


def oneof_rules(message: DescriptorProto) -> Mapping[str, str]:
    """Return the rules of a message and of its oneofs."""
    holders = {"": message, **{f"{oneof.name}.": oneof for oneof in message.oneof_decl}}
    found = {
        f"{name}{known.name}": value
        for name, holder in holders.items()
        for known, value in holder.options.ListFields()
        if known.full_name.startswith("buf.validate.")
    }
    return {path: text for name, value in found.items() for path, text in _flat(value, name)}


def _flat(message: Any, path: str) -> Iterator[tuple[str, Any]]:
    for known, value in message.ListFields():
        place = f"{path}.{known.name}".removeprefix(".")
        if known.name == "cel":
            yield from ((f"{place}[{rule.id}]", rule.expression) for rule in value)
        elif known.message_type is not None and known.message_type.full_name.startswith("buf.validate."):
            yield from _flat(value, place)
        else:
            is_duration = known.message_type is not None and known.message_type.name == "Duration"
            yield place, str(value.ToNanoseconds() if is_duration else value)


def role_of(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    """Return what a field does in a message, on which its rules may depend."""
    if message.name.endswith("Filter"):
        return "filter"
    return "chosen by the caller" if any("reserved" in rule for rule in rules_of(field)) else ""


def test_no_field_has_a_name_that_a_language_reserves() -> None:
    found = {
        f"{message.name}.{field.name}": [language for language, words in RESERVED.items() if field.name in words]
        for _, message in messages()
        for field in message.field
        if field.name not in HARMLESS
    }
    assert {name: languages for name, languages in found.items() if languages} == {}


def test_fields_of_one_name_have_one_rule() -> None:
    kinds: dict[tuple[str, str], dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for _, message in messages():
        for field in message.field:
            rules = {name: value for name, value in rules_of(field).items() if name not in WHETHER_SET}
            if rules and field.name not in UNLIKE:
                kinds[field.name, role_of(message, field)][str(sorted(rules.items()))].append(message.name)
    assert {name: dict(rules) for name, rules in kinds.items() if len(rules) > 1} == {}


def tighter(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    """Yield the rules that accept less than those of before did."""
    for name, value in after.items():
        old, bound = before.get(name), name.rpartition(".")[2]
        if not value.lstrip("-").replace(".", "").isdigit():
            is_tighter = value != old and name != "ignore"
        elif bound in ("max_len", "max_items", "max_pairs", "lte", "lt"):
            is_tighter = old is None or float(value) < float(old)
        elif bound in ("min_len", "min_items", "gte", "gt"):
            is_tighter = old is None or float(value) > float(old)
        else:
            is_tighter = value != old and name != "ignore"
        if is_tighter:
            yield name
    if "ignore" in before and "ignore" not in after:
        yield "ignore"


def promised() -> list[Path]:
    """Return the schemas that the one of today has to keep: the baseline, and that of each release."""
    return [BASELINE, *sorted(RELEASES.glob("*.binpb"))]


@pytest.mark.parametrize("path", promised(), ids=lambda path: path.name)
def test_no_rule_accepts_less_than_it_did(path: Path) -> None:
    now = {message.name: {field.name: rules_of(field) for field in message.field} for _, message in messages()}
    oneofs = {message.name: oneof_rules(message) for _, message in messages()}
    found = {
        f"{message.name}.{field.name}: {name}"
        for _, message in messages(path)
        for field in message.field
        for name in tighter(rules_of(field), now[message.name][field.name])
    }
    found |= {
        f"{message.name}: {name}"
        for _, message in messages(path)
        for name in tighter(oneof_rules(message), oneofs[message.name])
    }
    assert found == set()


def test_a_rule_that_accepts_less_is_found() -> None:
    before = {"string.max_len": "64", "string.pattern": "a", "ignore": "1", "int32.gte": "0"}
    assert oneof_rules(next(message for _, message in messages() if message.name == "EvalAnswer")) != {}
    assert list(tighter(before, {**before, "string.max_len": "65"})) == []
    assert list(tighter(before, {"string.max_len": "64"})) == ["ignore"]
    after = {"string.max_len": "63", "string.pattern": "b", "ignore": "1", "int32.gte": "1", "cel[x]": "true"}
    assert list(tighter(before, after)) == ["string.max_len", "string.pattern", "int32.gte", "cel[x]"]


def test_files_of_services_have_requests_and_responses_only() -> None:
    found = {
        message.name
        for file, message in messages()
        if file.endswith("_service.proto") and not message.name.endswith(("Request", "Response"))
    }
    assert found == RESOURCES_OF_SERVICES


def test_every_field_says_more_than_its_name() -> None:
    short = [
        f"{message.name}.{field.name}"
        for file in files(SCHEMA).values()
        for number, message in enumerate(file.message_type)
        for index, field in enumerate(message.field)
        if len(comment_at(file, [4, number, 2, index]).split()) <= 4
    ]
    assert short == []


def comment_at(file: FileDescriptorProto, path: list[int]) -> str:
    """Return the comment at a place of a file, as SourceCodeInfo.Location.path has it."""
    found = [place.leading_comments for place in file.source_code_info.location if list(place.path) == path]
    return found[0] if found else ""


def test_stubs_are_made_without_the_rules() -> None:
    stripped = without_rules(parse_set(SCHEMA.read_bytes()))
    assert b"buf/validate" in SCHEMA.read_bytes()
    assert b"buf/validate" not in stripped.SerializeToString()
    assert not [
        rule for message in stripped.file[0].message_type for field in message.field for rule in rules_of(field)
    ]
