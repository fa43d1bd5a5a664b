"""How a model is asked for JSON of a schema: in its provider's own way, or in words; what it answers is not judged."""

import json
from functools import lru_cache
from typing import Final

from bough_server.models.wording import Body

_NAME: Final = "answer"
_STRICT: Final = frozenset(
    {
        "type",
        "properties",
        "required",
        "additionalProperties",
        "items",
        "enum",
        "const",
        "anyOf",
        "$ref",
        "$defs",
        "title",
        "description",
    }
)
"""What a schema may consist of for every provider to hold it strictly."""


def chat_format(schema_json: str) -> Body:
    """The `response_format` of Chat Completions."""
    return {"type": "json_schema", "json_schema": _named(schema_json)}


def responses_format(schema_json: str) -> Body:
    """The `text.format` of Responses."""
    return {"type": "json_schema", **_named(schema_json)}


def told_in_words(instruction: str, schema_json: str) -> str:
    """An instruction that asks for the schema, for models that have no way of their own."""
    asked = (
        "Your final answer, when you call no tool, must be one JSON object and nothing around it. "
        f"It must fit this JSON Schema:\n{schema_json}"
    )
    return f"{instruction}\n\n{asked}" if instruction else asked


@lru_cache(maxsize=256)
def _named(schema_json: str) -> Body:
    schema: object = json.loads(schema_json)
    return {"name": _NAME, "schema": schema, "strict": _is_strict(schema)}


def _is_strict(schema: object) -> bool:
    """Whether a schema is of the kind that providers can enforce: closed objects that require all they have."""
    if not isinstance(schema, dict) or not schema.keys() <= _STRICT:
        return False
    properties = schema.get("properties", {})
    is_object = schema.get("type") == "object" or "properties" in schema
    if is_object and (
        schema.get("additionalProperties") is not False or set(schema.get("required", [])) != {*properties}
    ):
        return False
    inner = [*properties.values(), *schema.get("$defs", {}).values(), *schema.get("anyOf", [])]
    inner += [schema["items"]] if "items" in schema else []
    return all(_is_strict(each) for each in inner)
