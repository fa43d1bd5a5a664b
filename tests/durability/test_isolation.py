"""Users of one tenant, and tenants: what one has does not exist for another, in any field of any call."""

import hashlib
import itertools
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import grpc
import pytest
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from bough import v1
from bough_server.settings import Settings
from tests.durability.isolated_calls import CURRENT, SAID, SAMPLES, Named, Things, build_request, find_named
from tests.rpc.agents import GATES
from tests.rpc.run_server import Served, Turn, served, settings
from tests.store.sql import seen_statements
from tests.support.callers import CallerStubs, KeyRing, bearer, stubs
from tests.support.databases import in_each_database

pytestmark = in_each_database

ABSENT: Final = "01a00000-0000-7000-8000-000000000000"
SAME_FILE, OWN_FILE = b"the file of all", b"the file of Anne alone"

OPEN_TO_READERS: Final = frozenset(
    {
        *("WatchRun.run_id", "GetRun.run_id", "GetInvocation.run_id", "ForkRun.run_id", "ListRuns.filter.session_id"),
        "ListRuns.filter.evaluation_id",
        *(f"{call}.filter.{name}" for call in ("GetUsage", "ListUsageEntries") for name in ("run_id", "session_id")),
        *("GetSession.session_id", "ListMessages.session_id", "GetSessionState.session_id", "ReadBlob.session_id"),
        *("WatchEvaluation.evaluation_id", "GetEvaluation.evaluation_id", "ListCaseResults.evaluation_id"),
        *("CompareEvaluations.baseline.evaluation_id", "CompareEvaluations.candidate.evaluation_id"),
        *("Evaluate.baseline.evaluation_id", "ScoreInvocations.invocations.run.run_id"),
        *("DiffInvocations.before.run.run_id", "DiffInvocations.after.run.run_id"),
        *("Evaluate.eval_set.cases.turns.recorded.run.run_id", "Evaluate.eval_set.cases.origin.run_id"),
        "Evaluate.eval_set.cases.mocks.run_id",
    }
)
"""What READ opens of other users; of these, nothing changes."""

OPEN_TO_ADMINS: Final = frozenset(
    {
        *(
            "ResumeRun.run_id",
            "AnswerInput.run_id",
            "CancelRun.run_id",
            "UpdateSessionState.session_id",
            "UpdateSession.session_id",
        ),
        *("DeleteSession.session_id", "CancelEvaluation.evaluation_id", "DeleteEvaluation.evaluation_id"),
    }
)
"""What ADMIN opens beside, in the order in which it is tried: what is deleted comes last."""

ROLES: Final = {"anne": ["RUN"], "bert": ["RUN"], "rita": ["RUN", "READ"], "ada": ["ADMIN"]}


@dataclass(frozen=True, slots=True, kw_only=True)
class User:
    """A user, and what it has."""

    stubs: Sequence[CallerStubs]
    """Its calls to the server of the runs, and to the other one if there is one."""
    things: Things


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a call ended, without ids and times; `statements` is how many of SQL a refusal took."""

    code: grpc.StatusCode
    text: str
    details: Sequence[str] = ()
    statements: int = 0


def ring_of(folder: Path) -> KeyRing:
    """Return the keys of all users."""
    ring = KeyRing(folder / "keys.yaml")
    for user, roles in ROLES.items():
        ring.add(user, roles=roles, groups=["finance"])
    ring.add("carl", tenant="beta", roles=["RUN", "READ", "ADMIN"])
    return ring


def settings_of(folder: Path, ring: KeyRing, *modules: str) -> Settings:
    """Return the settings of a server with these modules beside the agents of every one."""
    python = ["tests.rpc.agents", "tests.rpc.question_agents", *modules]
    return settings(folder, python=python, auth=ring.auth)


async def to_the_end(caller: CallerStubs, agent: str, **fields: Any) -> Turn:
    """Run an agent as a caller, to the end or an interruption."""
    request = v1.RunRequest(agent=agent, input=fields.pop("input", SAID), **fields)
    return await Turn(call=caller.agents.Run(request)).to_the_end()


def with_file(data: bytes) -> v1.Message:
    """Return an input with a file."""
    return v1.Message(parts=[v1.Part(text="hi"), v1.Part(blob=v1.Blob(data=data, media_type="text/plain"))])


async def make_things(caller: CallerStubs, *, request_id: str, file: bytes = SAME_FILE) -> Things:
    """Make something of each kind that the samples name."""
    ended = await to_the_end(caller, "echo", input=with_file(file), request_id=request_id)
    session_id = ended.events[0].session_id
    await to_the_end(caller, "echo", input=with_file(SAME_FILE), session_id=session_id)
    waiting = await to_the_end(caller, "asker")
    evaluating = caller.trees.Evaluate(SAMPLES["Evaluate"](Things()))
    evaluation_id = str(dict(await evaluating.initial_metadata())["bough-evaluation-id"])
    async for _ in evaluating:
        pass
    return Things(
        runs={"ended": await ended.run_id(), "waiting": await waiting.run_id()},
        session=session_id,
        evaluation=evaluation_id,
        request=request_id,
        file=hashlib.sha256(SAME_FILE).hexdigest(),
        input=waiting.events[-1].run_interrupted.requests[0].input_id,
    )


async def add_states(caller: CallerStubs, things: Things) -> None:
    """Add runs that are live and queued, and page tokens, to what a user has."""
    live = await Turn(call=caller.agents.Run(v1.RunRequest(agent="waiter", input=SAID))).until("run_started")
    policy = v1.RunPolicy(on_busy_session=v1.BUSY_SESSION_POLICY_QUEUE)
    request = v1.RunRequest(agent="echo", input=SAID, session_id=live.events[0].session_id, policy=policy)
    queued = await Turn(call=caller.agents.Run(request)).until("run_queued")
    things.runs |= {"live": await live.run_id(), "queued": await queued.run_id()}
    things.tokens = {
        "ListRuns": (await caller.agents.ListRuns(v1.ListRunsRequest(page_size=1))).next_page_token,
        "ListSessions": (await caller.sessions.ListSessions(v1.ListSessionsRequest(page_size=1))).next_page_token,
    }
    assert all(things.tokens.values())


@pytest.fixture
async def users(tmp_path: Path) -> AsyncIterator[dict[str, User]]:
    """All users, of one server on SQLite and of two on PostgreSQL; Anne has runs in every state."""
    GATES.clear()
    ring = ring_of(tmp_path)
    policy = v1.RunPolicy(background=True)
    async with served(settings_of(tmp_path, ring, "tests.rpc.gated_agents")) as before:
        anne = stubs(before.channel, bearer(ring.key("anne")))
        request = v1.RunRequest(agent="worker", input=SAID, policy=policy)
        # It works when the server stops, and its agent is missing when it is to be continued.
        parked = await Turn(call=anne.agents.Run(request)).until("run_started")
        parked_id = await parked.run_id()
    made = settings_of(tmp_path, ring)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(served(made))]
        if made.storage.url.startswith("postgresql"):
            servers.append(await stack.enter_async_context(served(made)))
        found = {name: await make_user(servers, ring, name) for name in ("anne", "bert", "carl", "rita", "ada")}
        found["anne"].things.runs["parked"] = parked_id
        await add_states(found["anne"].stubs[0], found["anne"].things)
        yield found
        GATES["hi"].set()


async def make_user(servers: Sequence[Served], ring: KeyRing, name: str) -> User:
    """Return a user with what the samples name; of an administrator without RUN it is all absent."""
    calls = [stubs(server.channel, bearer(ring.key(name))) for server in servers]
    if name == "ada":
        return User(stubs=calls, things=Things(runs={"ended": ABSENT, "waiting": ABSENT}, session=ABSENT))
    file = OWN_FILE if name == "anne" else SAME_FILE
    return User(stubs=calls, things=await make_things(calls[0], request_id=f"ask {name}".replace(" ", "-"), file=file))


def cells_of(anne: Things) -> list[tuple[Named, str]]:
    """Return every field of every request that names something, with each thing of Anne's that it can name.

    The id of a session to create is left out: callers choose it, and it is unique in the tenant.
    """
    cells: list[tuple[Named, str]] = []
    for named in find_named():
        if str(named) == "CreateSession.session_id":
            continue
        match named.kind:
            case "run":
                values = list(anne.runs.values())
            case "token":
                values = [anne.tokens.get(named.method.name, anne.tokens["ListRuns"])]
            case "file":
                values = [hashlib.sha256(OWN_FILE).hexdigest()]
            case kind:
                values = [str(getattr(anne, kind))]
        cells += [(named, value) for value in values]
    return cells


def absent_of(kind: str, value: str) -> str:
    """Return what nothing has, in the form of something of Anne's."""
    if kind == "token":
        return "bm9uZQ=="
    return hashlib.sha256(b"none").hexdigest() if kind == "file" else ABSENT if kind != "request" else "ask-unknown"


async def call(caller: CallerStubs, named: Named, request: Message) -> Sequence[Message]:
    """Make a call and return its responses."""
    service = {"AccessService": caller.access, "AgentService": caller.agents, "CatalogService": caller.catalog}
    service |= {"EvalService": caller.trees, "SessionService": caller.sessions, "UsageService": caller.usage}
    method = getattr(service[named.method.containing_service.name], named.method.name)
    if named.method.client_streaming:
        return [await method(iter([request]))]
    if named.method.name == "ForkRun":  # of a run that is live it does not end either
        stream = method(request)
        await stream.read()
        stream.cancel()
        return []
    if named.method.server_streaming:
        return [response async for response in method(request)]
    return [await method(request)]


async def outcome(caller: CallerStubs, named: Named, request: Message, *, but: str) -> Outcome:
    """Return how a call ends, without the id that it names."""
    with seen_statements() as seen:
        try:
            responses = await call(caller, named, request)
        except aio.AioRpcError as error:
            status = status_pb2.Status.FromString(dict(error.trailing_metadata())["grpc-status-details-bin"])
            details = [_plain(_unpack(each), but) for each in status.details]
            return Outcome(error.code(), _plain(str(error.details()), but), details, _count(seen))
    return Outcome(grpc.StatusCode.OK, "".join(_show(each, but) for each in responses))


def _show(response: Any, but: str) -> str:
    if "batch" in response.DESCRIPTOR.fields_by_name:  # how a log is divided into batches depends on the moment
        return "".join(f"{event.WhichOneof('payload')} " for event in response.batch.events)
    return _plain(json_format.MessageToJson(response), but)


def _count(seen: Sequence[tuple[str, object]]) -> int:
    """Count the statements of a call: neither those of leases and commands, nor those that find what is live."""
    return sum(not re.search(r"\b(workers|run_commands|pg_\w+|NOTIFY)\b", statement) for statement, _ in seen)


def _unpack(packed: Any) -> str:
    kind = getattr(error_details_pb2, packed.type_url.rpartition(".")[2])
    return json_format.MessageToJson(kind.FromString(packed.value))


_IDS: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|\b[0-9a-f]{16,64}\b")
_TIMES: Final = re.compile(r'"\d{4}-\d\d-\d\dT[^"]+Z"|"[\d.]+s"')
_NUMBERS: Final = re.compile(r": \"?\d+\"?")


def _plain(text: str, but: str) -> str:
    return _NUMBERS.sub(": N", _TIMES.sub("TIME", _IDS.sub("ID", text.replace(but, "ID"))))


async def snapshot(anne: User) -> Sequence[object]:
    """Return all that Anne sees of her own."""
    agents, sessions = anne.stubs[0].agents, anne.stubs[0].sessions
    runs = (await agents.ListRuns(v1.ListRunsRequest(page_size=1000))).runs
    seen: list[object] = [*runs, *(await sessions.ListSessions(v1.ListSessionsRequest(page_size=1000))).sessions]
    for run in runs:
        log = await Turn(call=agents.WatchRun(v1.WatchRunRequest(run_id=run.run_id, until=CURRENT))).to_the_end()
        messages = await sessions.ListMessages(v1.ListMessagesRequest(session_id=run.session_id))
        seen += [log.events, messages]
    evaluation = v1.GetEvaluationRequest(evaluation_id=anne.things.evaluation)
    return [*seen, await anne.stubs[0].trees.GetEvaluation(evaluation)]


async def compare(caller: CallerStubs, things: Things, named: Named, value: str) -> tuple[Outcome, Outcome]:
    """Return how calls end that name something of Anne's, and something that nothing has."""
    hidden, absent = await _end_both(caller, things, named, value)
    for _ in range(6):
        if hidden.statements == absent.statements:
            break
        # What earlier calls have started may still be reading and writing: the fewest count.
        again = await _end_both(caller, things, named, value)
        hidden, absent = (
            replace(end, statements=min(end.statements, other.statements))
            for end, other in zip((hidden, absent), again, strict=True)
        )
    return hidden, absent


async def _end_both(caller: CallerStubs, things: Things, named: Named, value: str) -> tuple[Outcome, Outcome]:
    hidden, absent = [
        await outcome(caller, named, build_request(named, things, used), but=used)
        for used in (value, absent_of(named.kind, value))
    ]
    return hidden, absent


async def test_what_a_user_has_does_not_exist_for_others_of_its_tenant_and_for_other_tenants(
    users: dict[str, User], capsys: pytest.CaptureFixture[str]
) -> None:
    anne, ends = users["anne"], Counter[str]()
    before = await snapshot(anne)
    for first, stranger in enumerate(("bert", "carl")):
        things, servers = users[stranger].things, itertools.cycle(users[stranger].stubs)
        # The servers in turn, so that a call that one of the strangers makes of one is made of the other by the other.
        for (named, value), caller in zip(cells_of(anne.things), itertools.islice(servers, first, None), strict=False):
            hidden, absent = await compare(caller, things, named, value)
            assert hidden == absent, f"{stranger}: {named}"
            ends[hidden.code.name] += 1
    assert await snapshot(anne) == before
    with capsys.disabled():
        print(f"\nisolation: {ends.total()} cells on {len(anne.stubs)} server(s), {dict(ends)}")


async def test_a_session_of_another_user_is_not_created_again(users: dict[str, User]) -> None:
    request = v1.RunRequest(
        agent="echo",
        input=SAID,
        session_id=users["anne"].things.session,
        on_missing_session=v1.MISSING_SESSION_POLICY_CREATE,
    )
    bert = users["bert"].stubs[-1]
    creating = v1.CreateSessionRequest(session_id=request.session_id)
    for refused in (bert.agents.Run(request).read(), bert.sessions.CreateSession(creating)):
        with pytest.raises(aio.AioRpcError) as caught:
            await refused
        assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
        expected = f"The session {request.session_id!r} already exists. Use it, or choose another id."
        assert caught.value.details() == expected
    of_beta = await Turn(call=users["carl"].stubs[0].agents.Run(request)).to_the_end()
    assert of_beta.kinds[-1] == "run_completed"


async def test_read_opens_what_is_seen_and_denies_changes(users: dict[str, User]) -> None:
    anne, rita = users["anne"], users["rita"]
    before = await snapshot(anne)
    for (named, value), caller in zip(cells_of(anne.things), itertools.cycle(rita.stubs), strict=False):
        seen, absent = await compare(caller, rita.things, named, value)
        if str(named) in OPEN_TO_READERS:
            # Its own user cannot fork a run either that is parked or queued.
            refused = str(named) == "ForkRun.run_id" and value in (
                anne.things.runs["parked"],
                anne.things.runs["queued"],
            )
            expected = grpc.StatusCode.FAILED_PRECONDITION if refused else grpc.StatusCode.OK
            assert seen.code == expected, f"{named}: {seen}"
        elif str(named) in OPEN_TO_ADMINS:
            if named.kind == "run" and named.method.name in ("ResumeRun", "AnswerInput"):
                # It sees the run, which has no request of that id; see the tests of approvals for one that it has.
                assert seen.code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION), seen
                continue
            assert seen.code == grpc.StatusCode.PERMISSION_DENIED, f"{named}: {seen}"
            assert seen.text == "It belongs to another user: to change it, the caller needs the role ADMIN."
        else:
            assert seen == absent, str(named)
    assert await snapshot(anne) == before
    forked = await Turn(
        call=rita.stubs[0].agents.ForkRun(v1.ForkRunRequest(run_id=anne.things.runs["ended"], after_sequence=1))
    ).to_the_end()
    run = (await rita.stubs[0].agents.GetRun(v1.GetRunRequest(run_id=await forked.run_id()))).run
    assert (run.user_id, run.forked_from.run_id) == ("rita", anne.things.runs["ended"])
    session = v1.GetSessionRequest(session_id=run.session_id)
    assert (await rita.stubs[0].sessions.GetSession(session)).session.user_id == "rita"
    with pytest.raises(aio.AioRpcError) as caught:
        await anne.stubs[0].agents.GetRun(v1.GetRunRequest(run_id=run.run_id))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND


async def test_admin_opens_changes_too(users: dict[str, User]) -> None:
    anne, ada = users["anne"].things, users["ada"]
    named = {str(each): each for each in find_named()}
    for each in sorted(OPEN_TO_READERS - {"ForkRun.run_id", *_STARTS}):
        value = anne.runs["ended"] if named[each].kind == "run" else str(getattr(anne, named[each].kind))
        request = build_request(named[each], anne, value)
        for caller in ada.stubs:
            assert (await outcome(caller, named[each], request, but=value)).code == grpc.StatusCode.OK, each
    changes = [
        ("ResumeRun.run_id", SAMPLES["ResumeRun"](anne)),
        ("AnswerInput.run_id", SAMPLES["AnswerInput"](anne)),
        ("CancelRun.run_id", v1.CancelRunRequest(run_id=anne.runs["live"])),
        ("UpdateSessionState.session_id", SAMPLES["UpdateSessionState"](anne)),
        ("UpdateSession.session_id", SAMPLES["UpdateSession"](anne)),
        ("CancelEvaluation.evaluation_id", SAMPLES["CancelEvaluation"](anne)),
        ("DeleteSession.session_id", SAMPLES["DeleteSession"](anne)),
        ("DeleteEvaluation.evaluation_id", SAMPLES["DeleteEvaluation"](anne)),
    ]
    assert {each for each, _ in changes} == OPEN_TO_ADMINS
    for each, request in changes:
        assert (await outcome(ada.stubs[-1], named[each], request, but="-")).code == grpc.StatusCode.OK, each
    log = v1.WatchRunRequest(run_id=anne.runs["waiting"], until=CURRENT)
    events = (await Turn(call=users["anne"].stubs[0].agents.WatchRun(log)).to_the_end()).events
    (answer,) = [event.input_received.answer for event in events if event.HasField("input_received")]
    assert answer.answered_by == "ada"


_STARTS: Final = {"ScoreInvocations.invocations.run.run_id", *(each for each in OPEN_TO_READERS if "Evaluate." in each)}
"""What needs RUN beside."""


def set_that_names(run_id: str) -> v1.EvalSet:
    """Return a set whose cases name a run in each way that there is, each of them right if the run can be read."""
    run = v1.InvocationSource(run=v1.RunRef(run_id=run_id))
    completed = v1.EvalExpectation(answer=v1.ExpectedAnswer(contains=["hi"]))
    return v1.EvalSet(
        name="named",
        agent="echo",
        cases=[
            v1.EvalCase(id="recorded", turns=[v1.EvalTurn(recorded=run, expect=completed)]),
            v1.EvalCase(
                id="forked",
                origin=v1.EvalOrigin(run_id=run_id, after_sequence=1),
                turns=[v1.EvalTurn(expect=completed)],
            ),
            v1.EvalCase(
                id="mocked", mocks=v1.ToolMocks(run_id=run_id), turns=[v1.EvalTurn(user="hi", expect=completed)]
            ),
        ],
    )


async def test_the_runs_that_a_set_names_are_those_that_its_caller_sees(users: dict[str, User]) -> None:
    async def evaluate(user: str, run_id: str) -> dict[str, str]:
        trees = users[user].stubs[-1].trees
        responses = [each async for each in trees.Evaluate(v1.EvaluateRequest(eval_set=set_that_names(run_id)))]
        scored = [
            event.case_trial_scored
            for each in responses
            for event in each.batch.events
            if event.HasField("case_trial_scored")
        ]
        return {each.result.case_id: v1.Verdict.Name(each.result.verdict) for each in scored}

    anne = users["anne"].things.runs["ended"]
    everywhere = ("recorded", "forked", "mocked")
    passed, unknown = dict.fromkeys(everywhere, "VERDICT_PASSED"), dict.fromkeys(everywhere, "VERDICT_NOT_EVALUATED")
    assert await evaluate("anne", anne) == passed
    assert await evaluate("rita", anne) == passed
    for stranger in ("bert", "carl"):
        assert await evaluate(stranger, anne) == await evaluate(stranger, ABSENT) == unknown
