"""JSON Schema of a tool's arguments, derived from the signature and docstring of its function."""

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, create_model
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema

_CONFIG: Final = ConfigDict(extra="forbid", arbitrary_types_allowed=False, hide_input_in_errors=True)

_SECTION: Final = re.compile(
    r"(Args|Arguments|Parameters|Returns|Return|Raises|Yields|Yield|Example|Examples|Note|Notes):\s*$"
)
_PARAMETERS: Final = {"Args", "Arguments", "Parameters"}
_PARAMETER: Final = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """Converts JSON values to the types of a function's parameters."""

    model: type[BaseModel]
    fields: Mapping[str, str]
    """Field of the model by parameter. Fields have generated names, so that no parameter clashes with pydantic's."""

    def convert(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments that were given, without the function's defaults. Raises ValidationError."""
        checked = self.model.model_validate(dict(values))
        return {
            name: getattr(checked, field_name)
            for name, field_name in self.fields.items()
            if field_name in checked.model_fields_set
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """Arguments of a tool's function: their schema, their conversion, and the parameter for the ToolContext."""

    schema_json: str
    context_parameter: str
    arguments: Arguments


class SchemaWithoutTitles(GenerateJsonSchema):
    """Generates pydantic's JSON Schema without titles that only repeat names."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def emit_warning(self, kind: Any, detail: str) -> None:
        """Suppress warnings: a default that is not JSON is simply left out of the schema."""


def read_signature(
    function: Callable[..., Any], name: str, descriptions: Mapping[str, str], *, context_type: type
) -> Signature:
    """Read a function's type hints. Raises TypeError, with what to change, if named JSON values cannot call it."""
    hints = _hints(function, name)
    context_parameter = ""
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    for parameter in inspect.signature(function).parameters.values():
        _check_parameter(parameter, name, hints)
        hint = hints[parameter.name]
        if hint is context_type:
            if context_parameter:
                raise TypeError(f"Tool {name!r} has two parameters of type {context_type.__name__}: remove one.")
            context_parameter = parameter.name
            continue
        field_name = f"parameter_{len(names)}"
        names[parameter.name] = field_name
        fields[field_name] = _field(parameter, hint, descriptions.get(parameter.name, ""))
    try:
        model = create_model(name, __config__=_CONFIG, **fields)
        schema = model.model_json_schema(by_alias=True, schema_generator=SchemaWithoutTitles)
    except (PydanticUserError, PydanticInvalidForJsonSchema) as error:
        reason = str(error).splitlines()[0].partition(" Set `")[0]
        raise TypeError(f"Tool {name!r} has a parameter that JSON cannot hold: {reason}") from error
    schema.pop("title", None)
    schema = {"type": "object", "properties": {}, **schema}
    return Signature(
        schema_json=json.dumps(schema, ensure_ascii=False, separators=(",", ":")),
        context_parameter=context_parameter,
        arguments=Arguments(model=model, fields=names),
    )


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, AttributeError, TypeError) as error:
        raise TypeError(
            f"The type hints of tool {name!r} cannot be read: {error}. Hints must name what its module imports."
        ) from error


def _check_parameter(parameter: inspect.Parameter, name: str, hints: Mapping[str, Any]) -> None:
    if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
        stars = "*" if parameter.kind is inspect.Parameter.VAR_POSITIONAL else "**"
        raise TypeError(
            f"Tool {name!r} takes {stars}{parameter.name}: name every parameter, a model must know them all."
        )
    if parameter.kind is inspect.Parameter.POSITIONAL_ONLY:
        raise TypeError(f"Parameter {parameter.name!r} of tool {name!r} must be usable by name: remove the /.")
    if parameter.name not in hints:
        raise TypeError(
            f"Parameter {parameter.name!r} of tool {name!r} needs a type hint, such as `{parameter.name}: str`."
        )


def _field(parameter: inspect.Parameter, hint: Any, description: str) -> tuple[Any, FieldInfo]:
    default = ... if parameter.default is inspect.Parameter.empty else parameter.default
    own = getattr(hint, "__metadata__", ())
    if description and not any(isinstance(each, FieldInfo) and each.description for each in own):
        hint = Annotated[hint, Field(description=description)]
    info: FieldInfo = Field(default, alias=parameter.name)
    return hint, info


@dataclass(frozen=True, slots=True, kw_only=True)
class Documentation:
    """The text before the first section, and the description of each parameter."""

    summary: str
    parameters: Mapping[str, str]


def parse_docstring(docstring: str) -> Documentation:
    """Parse a docstring in Google style; text in other sections or formats is left out."""
    summary: list[str] = []
    parameters: dict[str, list[str]] = {}
    section = ""
    current: list[str] | None = None
    parameter_indent = 0
    for line in inspect.cleandoc(docstring).splitlines():
        header = _SECTION.match(line)
        if header:
            section, current = header[1], None
        elif not section:
            summary.append(line)
        elif section in _PARAMETERS and line.strip():
            indent = len(line) - len(line.lstrip())
            named = _PARAMETER.match(line.strip())
            if named and (current is None or indent <= parameter_indent):
                parameter_indent = indent
                current = parameters.setdefault(named[1], [named[2]])
            elif current is not None:
                current.append(line.strip())
    return Documentation(
        summary="\n".join(summary).strip(),
        parameters={name: " ".join(lines).strip() for name, lines in parameters.items()},
    )
