"""The calls of the isolation tests: each method's request, and the fields by which it names something of a caller."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

from bough import v1
from bough_server.auth.access import SERVICES

RECORDS: Final = frozenset({"AgentEvent", "AgentDefinition", "Invocation", "EvalResult", "ModelSettings"})
"""Messages that a caller gives whole: their ids are not looked up."""

LOOKED_UP: Final[Mapping[str, str]] = {
    "run_id": "run",
    "session_id": "session",
    "evaluation_id": "evaluation",
    "request_id": "request",
    "page_token": "token",
    "sha256": "file",
    "input_id": "input",
}
"""The kind of thing that a field of a request names, by its name."""

NOT_LOOKED_UP: Final = frozenset(
    {
        # Content, and the ids of what callers make up or find inside of what the call names.
        *("author", "invocation_id", "message_id", "call_id", "provider_call_id", "child_invocation_id"),
        *("text", "data", "data_json", "metadata_json", "arguments_json", "value_json", "result_json", "details_json"),
        # The key of a visit is the server's; one in a request is ignored.
        *("output_json", "effect_key"),
        *("filename", "media_type", "uri", "provider_json", "provider_id", "provider_field", "encrypted", "signature"),
        *("description", "label", "provider_ref", "snippet", "url", "extra_json", "category", "note", "message", "key"),
        *("labels", "event_names", "paths", "answered_by", "config_json", "session_state_json", "equals_json"),
        *("subset_json", "schema_json", "regex", "ignore", "name_regex", "exact", "contains", "excludes", "template"),
        *("question", "user", "id", "gates", "case_id", "case_ids", "eval_set_name", "agents"),
        *("answer_json", "instruction", "path", "reference", "goal", "persona", "plan", "stop_when", "fault_seed"),
        # Names of agents, tools, functions and models: of the operator, or of the tenant.
        *("name", "agent", "agents", "tool", "model", "caller", "revision", "function", "forbidden"),
        *("models", "from_agent", "to_agent", "currency_code", "server"),
        # A filter of what the caller sees.
        "user_id",
    }
)
"""The names of the other fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A field of a method's request that names something."""

    method: MethodDescriptor
    path: tuple[str, ...]
    kind: str

    def __str__(self) -> str:
        return f"{self.method.name}.{'.'.join(self.path)}"


def find_named() -> Iterator[Named]:
    """Find every field of every request that names something. Raises LookupError for one that no list here has."""
    for service in SERVICES:
        for method in service.methods:
            for path, kind in _fields_of(method.input_type, frozenset()):
                yield Named(method=method, path=path, kind=kind)


def _fields_of(message: Descriptor, around: frozenset[str]) -> Iterator[tuple[tuple[str, ...], str]]:
    if message.name in RECORDS or message.name in around:
        return
    for each in message.fields:
        inner = each.message_type
        if inner is not None and not inner.GetOptions().map_entry:
            for path, kind in _fields_of(inner, around | {message.name}):
                yield (each.name, *path), kind
        elif inner is not None or each.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
            if each.name in LOOKED_UP:
                yield (each.name,), LOOKED_UP[each.name]
            elif each.name not in NOT_LOOKED_UP:
                raise LookupError(
                    f"{each.full_name}: does it name what a call looks up? Add it to a list of this test."
                )


def name(message: Message, path: tuple[str, ...], value: str) -> None:
    """Set a field at a path, in the first item of every list on the way."""
    target: Any = message
    for step in path[:-1]:
        target = getattr(target, step)
        if not isinstance(target, Message):
            target = target[0] if target else target.add()
    if isinstance(getattr(target, path[-1]), str):
        setattr(target, path[-1], value)
    else:
        getattr(target, path[-1])[:] = [value]


@dataclass(slots=True, kw_only=True)
class Things:
    """What a user has, by its kind; `runs` are its runs by their state."""

    runs: dict[str, str] = field(default_factory=dict)
    session: str = ""
    evaluation: str = ""
    request: str = ""
    file: str = ""
    input: str = ""
    tokens: dict[str, str] = field(default_factory=dict)
    """Page tokens by the method that returned them."""


Sample = Callable[[Things], Message]

SAID: Final = v1.Message(parts=[v1.Part(text="hi")])
ECHO: Final = v1.AgentDefinition(name="stored", llm=v1.LlmAgent(instruction="Be."))
CURRENT: Final = v1.WATCH_UNTIL_CURRENT


def _answer(own: Things) -> v1.InputAnswer:
    return v1.InputAnswer(input_id=own.input, value_json='"so"')


def _eval_set() -> v1.EvalSet:
    return v1.EvalSet(name="set", agent="echo", cases=[v1.EvalCase(id="one", turns=[v1.EvalTurn(user="hi")])])


def _source(own: Things) -> v1.InvocationSource:
    return v1.InvocationSource(run=v1.RunRef(run_id=own.runs["ended"]))


SAMPLES: Final[Mapping[str, Sample]] = {
    "GetCaller": lambda _: v1.GetCallerRequest(),
    "Run": lambda own: v1.RunRequest(agent="echo", input=SAID, session_id=own.session),
    "WatchRun": lambda own: v1.WatchRunRequest(run_id=own.runs["ended"], until=CURRENT),
    "ResumeRun": lambda own: v1.ResumeRunRequest(run_id=own.runs["waiting"], answers=[_answer(own)]),
    "ForkRun": lambda own: v1.ForkRunRequest(run_id=own.runs["ended"], after_sequence=1),
    "CancelRun": lambda own: v1.CancelRunRequest(run_id=own.runs["ended"]),
    "GetRun": lambda own: v1.GetRunRequest(run_id=own.runs["ended"]),
    "ListRuns": lambda _: v1.ListRunsRequest(page_size=1),
    "ListInputRequests": lambda _: v1.ListInputRequestsRequest(page_size=1),
    "AnswerInput": lambda own: v1.AnswerInputRequest(run_id=own.runs["waiting"], answers=[_answer(own)]),
    "CreateAgent": lambda _: v1.CreateAgentRequest(definition=ECHO),
    "UpdateAgent": lambda _: v1.UpdateAgentRequest(definition=ECHO, revision="r"),
    "DeleteAgent": lambda _: v1.DeleteAgentRequest(name="stored", revision="r"),
    "GetAgent": lambda _: v1.GetAgentRequest(name="echo"),
    "ListAgents": lambda _: v1.ListAgentsRequest(page_size=1),
    "ValidateAgents": lambda _: v1.ValidateAgentsRequest(definitions=[ECHO]),
    "ListTools": lambda _: v1.ListToolsRequest(page_size=1),
    "ListModels": lambda _: v1.ListModelsRequest(page_size=1),
    "ListToolServers": lambda _: v1.ListToolServersRequest(page_size=1),
    "GetInvocation": lambda own: v1.GetInvocationRequest(run_id=own.runs["ended"]),
    "AggregateEvents": lambda _: v1.AggregateEventsRequest(),
    "Evaluate": lambda own: v1.EvaluateRequest(eval_set=_eval_set()),
    "WatchEvaluation": lambda own: v1.WatchEvaluationRequest(
        evaluation_id=own.evaluation, follow=v1.EvaluationFollowOptions(until=CURRENT)
    ),
    "CancelEvaluation": lambda own: v1.CancelEvaluationRequest(evaluation_id=own.evaluation),
    "DeleteEvaluation": lambda own: v1.DeleteEvaluationRequest(evaluation_id=own.evaluation),
    "GetEvaluation": lambda own: v1.GetEvaluationRequest(evaluation_id=own.evaluation),
    "ListCaseResults": lambda own: v1.ListCaseResultsRequest(evaluation_id=own.evaluation),
    "ListEvaluations": lambda _: v1.ListEvaluationsRequest(page_size=1),
    "CompareEvaluations": lambda own: v1.CompareEvaluationsRequest(
        baseline=v1.EvalSource(evaluation_id=own.evaluation), candidate=v1.EvalSource(evaluation_id=own.evaluation)
    ),
    "ScoreInvocations": lambda own: v1.ScoreInvocationsRequest(invocations=[_source(own)]),
    "DiffInvocations": lambda own: v1.DiffInvocationsRequest(before=_source(own), after=_source(own)),
    "CreateSession": lambda _: v1.CreateSessionRequest(),
    "GetSession": lambda own: v1.GetSessionRequest(session_id=own.session),
    "ListSessions": lambda _: v1.ListSessionsRequest(page_size=1),
    "UpdateSession": lambda own: v1.UpdateSessionRequest(session_id=own.session, labels={"a": "b"}),
    "DeleteSession": lambda own: v1.DeleteSessionRequest(session_id=own.session),
    "ListMessages": lambda own: v1.ListMessagesRequest(session_id=own.session),
    "GetSessionState": lambda own: v1.GetSessionStateRequest(session_id=own.session),
    "UpdateSessionState": lambda own: v1.UpdateSessionStateRequest(
        session_id=own.session, state_changes=[v1.SessionStateChange(key="a", value_json="1")]
    ),
    "GetUsage": lambda _: v1.GetUsageRequest(page_size=1),
    "ListUsageEntries": lambda _: v1.ListUsageEntriesRequest(page_size=1),
    "GetQuotas": lambda _: v1.GetQuotasRequest(),
    "GetAccount": lambda _: v1.GetAccountRequest(),
    "AdjustBalance": lambda _: v1.AdjustBalanceRequest(request_id="one", amount_nanos=1, currency_code="USD"),
    "ListAdjustments": lambda _: v1.ListAdjustmentsRequest(page_size=1),
    "ReadBlob": lambda own: v1.ReadBlobRequest(session_id=own.session, sha256=own.file),
}
"""A request of each method that names only what its caller has."""


def build_request(named: Named, own: Things, value: str) -> Message:
    """Return a request of a method that names something by one field, and for the rest what its caller has."""
    request = SAMPLES[named.method.name](own)
    if named.path[:2] == ("eval_set", "cases") and named.path[-2:] == ("run", "run_id"):
        request.eval_set.cases[0].turns[0].ClearField("user")  # type: ignore[attr-defined]
    if "origin" in named.path:
        request.eval_set.cases[0].turns[0].ClearField("user")  # type: ignore[attr-defined]
        request.eval_set.cases[0].origin.after_sequence = 1  # type: ignore[attr-defined]
        # The fork of a run that is live does not end before.
        request.eval_set.cases[0].timeout.FromMilliseconds(100)  # type: ignore[attr-defined]
    name(request, named.path, value)
    return request
