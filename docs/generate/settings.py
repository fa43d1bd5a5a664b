"""The reference of bough.yaml and its JSON Schema, both made from the settings."""

import ast
import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from textwrap import dedent
from typing import Final, cast

from pydantic import BaseModel

from bough_server.settings import DEFAULT_DATABASE, Environment, Settings
from bough_server.settings_sections import Section
from docs.generate.text import Json, cell, link_to_editors

_INTRODUCTION: Final = """# bough.yaml

Every setting of the server and the commands. This page is generated from the settings by `make docs`.

The file is `--config`, else `BOUGH_CONFIG`, else `bough.yaml` in the working directory or in the nearest folder above
it. Paths in it are relative to it. Flags take precedence over environment variables, these over the file, that over
defaults. An unknown key is an error.

```yaml
# bough.yaml
# yaml-language-server: $schema=bough.schema.json
agents: [agents/*.yaml]
server: {port: 50051, drain_grace: 30s}
models:
  default: {alias: small}
  small: {provider: openai, model: gpt-5-mini, api_key_env: OPENAI_API_KEY, fallbacks: [embedded]}
  embedded: {provider: local}
limits:
  default: {model_calls: 100, wall_duration: 10m}
```

A duration is a number of seconds or a text such as `10m`, `50ms` or `1h30m`.
"""

_VARIABLES: Final = """## Environment variables

| variable | meaning |
|---|---|
"""

_FURTHER_VARIABLES: Final = """\
| the `api_key_env` of each model | The keys of the models; no other variable is read for them. |
| `OTEL_*` | OpenTelemetry's own variables: whether and where traces and metrics are exported. |
| `NO_COLOR` | No colors on the terminal. |
"""

_COMPUTED_DEFAULTS: Final = {"storage.url": DEFAULT_DATABASE}
"""Defaults of fields that are required in their section, and that loading the settings sets."""

_UNBOUNDED: Final = (2**31 - 1, 2**63 - 1)


def json_schema() -> dict[str, Json]:
    """The JSON Schema of bough.yaml, of draft 7, which editors read."""
    describe_fields()
    made: dict[str, Json] = Settings.model_json_schema(ref_template="#/definitions/{model}")
    sections = _mapping(made.pop("$defs"))
    definitions: dict[str, Json] = {name: _tidy_section(section, sections) for name, section in sections.items()}
    for place in _COMPUTED_DEFAULTS:
        section, name = place.split(".")
        schema = _mapping(definitions[_reference(_mapping(_mapping(made["properties"])[section]))])
        schema["required"] = [each for each in cast("list[Json]", schema.pop("required")) if each != name] or []
    tidied = _tidy_section(made, sections)
    # A section without a value counts as one that is left out; inside a section it does not.
    tidied["properties"] = {key: _allow_null(_mapping(each)) for key, each in _mapping(tidied["properties"]).items()}
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        **tidied,
        "title": "bough.yaml",
        "description": "The configuration of a Bough server and of its commands.",
        "definitions": definitions,
    }


def reference() -> str:
    """The page docs/reference/bough-yaml.md."""
    schema = json_schema()
    properties = {key: _mapping(each) for key, each in _mapping(schema["properties"]).items()}
    plain = {key: each for key, each in properties.items() if not _is_section(each)}
    lines = [
        _INTRODUCTION,
        *link_to_editors("bough.yaml", "bough"),
        "",
        "## Top level",
        "",
        *_table(_rows(plain, "", schema)),
    ]
    for key, each in properties.items():
        if _is_section(each):
            lines += [f"## {key}", "", str(each["description"]), ""]
            lines += _table(_rows({key: each}, "", schema))
    return "\n".join([*lines, _VARIABLES + _variables() + _FURTHER_VARIABLES])


@cache
def describe_fields() -> None:
    """Give the fields of all sections the docstrings below them as descriptions."""
    models: list[type[BaseModel]] = [*_iter_subclasses(Section), Environment]
    for model in models:
        docstrings = _docstrings(model)
        for name, field in model.model_fields.items():
            field.description = docstrings[name]
        model.model_rebuild(force=True)
    Settings.model_rebuild(force=True)  # last: it contains the others


def _iter_subclasses(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for each in model.__subclasses__():
        yield each
        yield from _iter_subclasses(each)


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """The docstrings of a model's fields, from its source."""
    (definition,) = ast.parse(dedent(inspect.getsource(model))).body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text)
        for field, below in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr)
        and isinstance(below.value, ast.Constant)
        and isinstance(text := below.value.value, str)
    }


def _tidy_section(section: Json, sections: Mapping[str, Json]) -> dict[str, Json]:
    """A section without what is of no use to an editor: titles made from names, and defaults of whole sections."""
    tidied = {key: each for key, each in _mapping(section).items() if key != "title"}
    properties = _mapping(tidied["properties"]).items()
    tidied["properties"] = {name: _tidy_property(_mapping(each), sections) for name, each in properties}
    return tidied


def _tidy_property(schema: Mapping[str, Json], sections: Mapping[str, Json]) -> dict[str, Json]:
    tidied = {key: each for key, each in schema.items() if key not in ("title", "format")}
    if isinstance(tidied.get("default"), dict | None):
        tidied.pop("default", None)
    # Pydantic leaves the description of a field out if its section has the same.
    said = tidied.get("description") or _mapping(sections[_reference(schema)])["description"]
    return {"description": " ".join(str(said).split()), **{k: v for k, v in tidied.items() if k != "description"}}


def _allow_null(schema: Mapping[str, Json]) -> dict[str, Json]:
    value = {key: each for key, each in schema.items() if key not in ("description", "default")}
    if value.get("anyOf"):
        return dict(schema)
    said = {key: each for key, each in schema.items() if key in ("description", "default")}
    return {**said, "anyOf": [value, {"type": "null"}]}


def _table(rows: Iterator[tuple[str, str, str, str]]) -> Iterator[str]:
    yield "| key | value | default | meaning |"
    yield "|---|---|---|---|"
    for key, value, default, meaning in rows:
        yield f"| `{key}` | {value} | {default} | {cell(meaning)} |"
    yield ""


def _rows(
    properties: Mapping[str, Json], prefix: str, schema: Mapping[str, Json]
) -> Iterator[tuple[str, str, str, str]]:
    """A row for each key of some properties, with those of sections inside them."""
    shown: dict[str, str] = {}
    for name, each in properties.items():
        key, field = f"{prefix}{name}", _mapping(each)
        reference = _reference(field)
        if not reference:
            yield key, _value(field), _default(key, field), str(field["description"])
        elif reference in shown:
            yield key, "mapping", "", f"{field['description']} The same keys as `{shown[reference]}`."
        else:
            shown[reference] = key
            section = _mapping(_mapping(schema["definitions"])[reference])
            form = _first_alternative(field)
            inner = f"{key}.NAME" if "additionalProperties" in form else f"{key}[]" if "items" in form else key
            properties_inside = _mapping(section["properties"])
            if not properties_inside:
                yield inner, "mapping", "", str(field["description"])
            yield from _rows(properties_inside, f"{inner}.", schema)


def _is_section(field: Mapping[str, Json]) -> bool:
    return bool(_reference(field))


def _reference(field: Mapping[str, Json]) -> str:
    """The name of the section that a field holds, alone, optional, by name or in a list; empty for none."""
    only = _first_alternative(field)
    inner = only.get("additionalProperties", only.get("items"))
    held = _mapping(inner) if isinstance(inner, dict) else only
    return str(held.get("$ref", "")).removeprefix("#/definitions/")


def _alternatives(field: Mapping[str, Json]) -> list[Mapping[str, Json]]:
    """The forms of a field's value, but for none."""
    forms = [_mapping(each) for each in cast("list[Json]", field.get("anyOf", [dict(field)]))]
    return [form for form in forms if form.get("type") != "null"]


def _first_alternative(field: Mapping[str, Json]) -> Mapping[str, Json]:
    return _alternatives(field)[0]


def _value(field: Mapping[str, Json]) -> str:
    forms = _alternatives(field)
    if len(forms) > 1:
        return "duration"
    form = forms[0]
    match form:
        case {"enum": list(values)}:
            *others, last = (f"`{each}`" for each in values)
            return f"{', '.join(others)} or {last}"
        case {"type": "array"}:
            return "list of texts"
        case {"type": "boolean"}:
            return "`true` or `false`"
        case {"type": "string"}:
            return "text"
        case {"type": "object"}:
            return "mapping of names to texts"
    whole = "whole number" if form["type"] == "integer" else "number"
    return whole + _bounds(form)


def _bounds(form: Mapping[str, Json]) -> str:
    least, most = form.get("minimum"), form.get("maximum")
    if most is not None and most not in _UNBOUNDED:
        return f", {least} to {most}"
    return f", at least {least}" if least else ""


def _default(key: str, field: Mapping[str, Json]) -> str:
    value = _COMPUTED_DEFAULTS.get(key, field.get("default"))
    if key.startswith("limits.default."):
        value = getattr(Settings.model_fields["limits"].default.default, key.removeprefix("limits.default."))
    if value in (None, "", [], ()):
        return ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, float):
        return f"`{value:g}s`" if value >= 1 else f"`{value * 1000:g}ms`"
    return f"`{value}`"


def _variables() -> str:
    describe_fields()
    fields = Environment.model_fields.items()
    return "".join(f"| `BOUGH_{name.upper()}` | {cell(field.description or '')} |\n" for name, field in fields)


def _mapping(value: Json) -> dict[str, Json]:
    assert isinstance(value, dict)
    return value
