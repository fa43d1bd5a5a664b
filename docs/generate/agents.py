"""The reference of agent fields and the JSON Schema of agent files, both made from the schema."""

from typing import Final

from bough.v1 import agent_pb2
from docs.generate.definitions import Definitions, read_definitions
from docs.generate.messages import message_schemas, sections
from docs.generate.text import Json, link_to_editors

_INTRODUCTION: Final = """# Agent fields

Every field of an agent file. This page is generated from [the schema](../../proto/bough/v1/agent.proto) by `make docs`.

A file holds one definition, or several with `---` between them, as YAML or JSON:

```yaml
# agents/lead.yaml
# yaml-language-server: $schema=../agent.schema.json
name: lead
description: Answers questions with the help of a researcher.
llm:
  instruction: Ask the researcher for facts, then answer in two sentences.
  max_steps: 5
sub_agents:
  - {agent: researcher, on_failure: ABORT}
limits: {tokens: 20000, wall_duration: 2m}
---
name: researcher
description: Knows facts about a topic.
llm: {instruction: Answer with facts only.}
history: {scope: NONE}
```

`bough.yaml` beside the folder `agents` names the files, and the models that definitions may name:

```yaml
# bough.yaml
agents: [agents/*.yaml]
models:
  default: {provider: openai, model: gpt-5-mini, api_key_env: OPENAI_API_KEY}
```

- A field that is left out, or has no value, is not set.
- A duration is a text such as `10m`, `50ms` or `1h30m`.
- A tool in `tools` and an agent in `sub_agents` can be its name alone: `search` is `{name: search}`, or
  `{agent: search}`.
- The values of an enum can be written with or without their prefix: `NONE` or `HISTORY_SCOPE_NONE`.
- `output_schema`, `input_schema` and `extra` hold JSON values as plain YAML. Under the names that the schema
  has, such as `output_schema_json`, they hold the same as text.
- Names in camelCase, as in JSON that protobuf writes, are accepted as well.
"""


def definitions() -> Definitions:
    """The messages of an agent file."""
    return read_definitions(agent_pb2.AgentDefinition.DESCRIPTOR)


def reference() -> str:
    """The page docs/reference/agent-fields.md."""
    made = definitions()
    return "\n".join([_INTRODUCTION, *link_to_editors("agent", "agent"), "", *sections(made, _places(made))])


def json_schema() -> Json:
    """The JSON Schema of a document of an agent file, of draft 7, which editors read."""
    return message_schemas(definitions(), title="A definition of a Bough agent")


def _places(definitions: Definitions) -> dict[str, list[str]]:
    """The fields that hold each message, as paths from the definition down; none for the definition itself."""
    first = next(iter(definitions.messages))
    places: dict[str, list[str]] = {name: [] for name in definitions.messages}
    waiting = [(first, "")]
    while waiting:
        name, prefix = waiting.pop(0)
        for field in definitions.messages[name].fields:
            if field.kind == "message":
                place = f"{prefix}{field.name}{'[]' if field.is_list else ''}"
                places[field.type].append(place)
                waiting.append((field.type, f"{place}."))
    return places
