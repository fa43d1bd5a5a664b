"""Tools of tool servers as tools that agents call."""

import json
from collections.abc import Mapping
from typing import Any, Final, NoReturn

from bough.v1 import message_pb2, tool_pb2
from bough_server.errors import RunError
from bough_server.matching.schemas import schema_mistakes
from bough_server.tool_servers.connection import Emit, ServerCall
from bough_server.tool_servers.servers import ToolServers
from bough_server.tools.output import result_parts
from bough_server.tools.tool import OnRecovery, Tool, ToolContext

_RULES: Final[Mapping[tool_pb2.ToolRecovery.ValueType, OnRecovery]] = {
    tool_pb2.TOOL_RECOVERY_RETRY: "retry",
    tool_pb2.TOOL_RECOVERY_FAIL: "fail",
    tool_pb2.TOOL_RECOVERY_ASK: "ask",
}
RECOVERIES: Final = {rule: value for value, rule in _RULES.items()}
"""The rules of tools as the schema has them."""


class _ServerCalls:
    """The calls of one tool; see RemoteCall."""

    def __init__(self, info: tool_pb2.ToolInfo, servers: ToolServers) -> None:
        self._info, self._servers = info, servers

    async def __call__(
        self, arguments: dict[str, Any], context: ToolContext, emit: Emit, *, timeout: float
    ) -> list[message_pb2.Part]:
        call = ServerCall(
            tool=self._info.server_tool_name,
            arguments=arguments,
            idempotency_key=context.idempotency_key,
            call_id=context.call_id,
            attempt=context.attempt,
            run_id=context.run_id,
            session_id=context.session_id,
            user_id=context.user_id,
            agent=context.agent,
            invocation_id=context.invocation_id,
        )
        parts = result_parts(list(await self._servers.call(self._info.server, call, emit, timeout=timeout)) or "")
        self._check_result(parts)
        return parts

    def _check_result(self, parts: list[message_pb2.Part]) -> None:
        schema = self._info.output_schema_json
        structured = next((part.data_json for part in parts if part.HasField("data_json")), None)
        if not schema or structured is None:
            return
        if mistakes := schema_mistakes(json.loads(structured), schema, is_bounded=True):
            raise RunError(f"The tool's result does not fit its own output schema: {'; '.join(mistakes[:5])}.")


def tool_of(info: tool_pb2.ToolInfo, servers: ToolServers) -> Tool:
    """Return a tool as it is described, which calls its tool server."""
    return Tool(
        name=info.name,
        description=info.description,
        input_schema_json=info.input_schema_json,
        function=_refuse,
        timeout=info.timeout.ToNanoseconds() / 1e9 if info.HasField("timeout") else None,
        digest=info.digest,
        approval=info.requires_approval,
        on_recovery=_RULES.get(info.on_recovery, "fail"),
        approvers=info.approver_group or None,
        info=info,
        remote=_ServerCalls(info, servers),
    )


def _refuse(**_: object) -> NoReturn:
    raise RuntimeError("A tool of a tool server has no function here.")
