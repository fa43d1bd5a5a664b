"""The reference of eval sets and the JSON Schema of their files, both made from the schema."""

from typing import Final

from bough.v1 import eval_set_pb2
from docs.generate.definitions import Definitions, read_definitions
from docs.generate.messages import message_schemas, sections
from docs.generate.text import Json, link_to_editors

_OPAQUE: Final = ("Invocation", "ToolCall", "ToolResult", "Reasoning")
"""Messages that programs write. The reference would be twice as long with all that they hold."""

_CASES_FROM: Final[Json] = {
    "description": "A file beside the set, .jsonl or .csv, with a case for each of its rows.",
    "type": "object",
    "properties": {
        "file": {
            "description": "The path of the file, relative to the folder of the set and below it.",
            "type": "string",
        },
        "template": {
            "description": "A case; {{column}} stands for a row's value, and {{column?}} for one that may be missing.",
            "type": "object",
        },
    },
    "required": ["file", "template"],
    "additionalProperties": False,
}

_INTRODUCTION: Final = """# Eval sets

Every field of an eval set: cases for an agent, with what is expected of them and how they are scored. This page is
generated from [the schema](../../proto/bough/v1/eval_set.proto) by `make docs`.

A file holds one set of at most 8 MiB, as YAML or JSON:

```yaml
# eval.yaml
# yaml-language-server: $schema=eval.schema.json
name: trips
agent: guide
defaults:
  trials: 5
  timeout: 2m
  metrics:
    - budget: {limits: {model_calls: 10}}
    - tool_trajectory: {mode: IN_ORDER}
cases:
  - id: weather
    turns:
      - user: What shall I do in Oslo today?
        expect:
          answer: {contains: [harbor], excludes: [sorry], ignore_case: true}
          tools:
            - name: weather
              arguments_match: {subset: {place: Oslo}}
          agents:
            - name: guide
              children: [forecaster]
    mocks:
      tools:
        - {name: weather, result: {degrees: 21, rain: false}}
```

- A field that is left out is not set. A duration is a text such as `10m`, `50ms` or `1h30m`.
- An expected agent and an expected tool can be its name alone: `children: [forecaster]` is
  `children: [{name: forecaster}]`. An expected answer can be its text alone: `answer: Yes.` is `answer: {exact: Yes.}`.
- The values of an enum can be written with or without their prefix: `IN_ORDER` or `TRAJECTORY_MODE_IN_ORDER`.
- Fields such as `arguments`, `result`, `equals` and `session_state` hold JSON values as plain YAML; `null` is one of
  them. Under the names that the schema has, such as `arguments_json`, they hold the same as text.
- An approval can be `APPROVE` or `REFUSE` alone: `approval: REFUSE` is `approval: {approved: false}`. With other
  arguments it is `approval: {approved: true, arguments: {amount: 90}}`.
- `recorded` names a stored run, `recorded: {run: {run_id: ...}}`, or holds a record: `recorded: {invocation: ...}`,
  with what `bough tree RUN --json` prints.
- `cases_from: {file: cases.jsonl, template: {id: "{{id}}", turns: [{user: "{{question}}"}]}}` adds a case for each
  row of a JSONL or CSV file below the folder of the set: see
  [how to evaluate data and matrices](../how-to/data-and-matrices.md).
- Names in camelCase, as in JSON that protobuf writes, are accepted as well.

`bough eval validate eval.yaml` checks a file without a server, and reports every problem with its line and field.
Agents and models are checked against `bough.yaml`, if there is one. [examples/eval](../../examples/eval/desk.yaml) has
a set for the desk.
"""


def definitions() -> Definitions:
    """The messages of an eval set."""
    return read_definitions(eval_set_pb2.EvalSet.DESCRIPTOR, opaque=_OPAQUE, null_is_json=True)


def reference() -> str:
    """The page docs/reference/eval-sets.md."""
    made = definitions()
    return "\n".join([_INTRODUCTION, *link_to_editors("eval", "eval"), "", *sections(made, _places(made))])


def json_schema() -> Json:
    """The JSON Schema of an eval set, of draft 7, which editors read."""
    schema = message_schemas(definitions(), title="A Bough eval set")
    return {**schema, "properties": {**_members(schema["properties"]), "cases_from": _CASES_FROM}}


def _members(value: Json) -> dict[str, Json]:
    assert isinstance(value, dict)
    return value


def _places(definitions: Definitions) -> dict[str, list[str]]:
    """The fields that hold each message, as `Message.field`: whole paths would be many, and some are endless."""
    return {
        name: [
            f"{message.name}.{field.name}"
            for message in definitions.messages.values()
            for field in message.fields
            if field.kind == "message" and field.type == name
        ]
        for name in definitions.messages
    }
