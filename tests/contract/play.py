"""Play a scenario: give its steps to a driver, do what happens on the way, and compare what comes."""

import asyncio
import itertools
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
from google.protobuf import json_format
from google.protobuf.message import Message

from bough import v1
from tests.contract.driver_process import DriverProcess
from tests.contract.languages import LANGUAGES
from tests.contract.matching import differences, end_differences, event_differences, filled, found
from tests.contract.operator_calls import request_type, response_type
from tests.contract.scenario_files import STREAMS, Action, Expected, Group, Moment, Scenario, Step
from tests.contract.stage import Stage, Tokens

STEP_SECONDS: Final = 45.0

BROKEN: Final = ("drops", "restarts")
"""The groups whose scenarios wait for servers that are gone; each play of them takes longest."""

_numbers = itertools.count(1)


@dataclass(slots=True)
class Outcome:
    """What a driver printed for one step. The documents have the names of the schema."""

    events: list[Message] = field(default_factory=list)
    documents: list[Mapping[str, Any]] = field(default_factory=list)
    answer: Any = None
    answer_bytes: int = 0
    end: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def size(self) -> int:
        """Bytes of the answer and the events in their binary form."""
        return self.answer_bytes + sum(event.ByteSize() for event in self.events)

    @property
    def names(self) -> list[str]:
        """The names of the events."""
        return [name_of(event) for event in self.events]

    def found(self, path: str) -> Any:
        """Return the value at a path. Raises KeyError."""
        return found(path, {"events": self.documents, "answer": self.answer, "end": self.end})


def plays(groups: Iterable[Group]) -> list[Any]:
    """Return the parameters of a test of group, language and scenario, group by group and language by language."""
    return [
        pytest.param(group, language, scenario, id=f"{group.name}-{language}-{scenario.name}")
        for group in groups
        for language in LANGUAGES
        for scenario in group.scenarios
        if language in scenario.languages
    ]


def name_of(event: Message) -> str:
    """Return the name of an event's payload, `unknown` if it is not known."""
    return str(event.WhichOneof("payload") or "unknown")


def document(message: Message) -> dict[str, Any]:
    """Return a message in JSON, with the names of the schema."""
    return json_format.MessageToDict(message, preserving_proto_field_name=True)


async def play(scenario: Scenario, stage: Stage, language: str) -> None:
    """Play a scenario with the driver of a language. Raises AssertionError with everything that is not as expected."""
    stage.gate.shut()
    if stage.tokens is not None:
        stage.tokens.use("valid")
    async with AsyncExitStack() as stack:
        if scenario.unreachable:
            driver = await stack.enter_async_context(stage.astray(language))
        else:
            driver = await stage.driver(language)
        player = _Player(stage, driver, unique=f"{language}-{next(_numbers)}")
        try:
            for number, step in enumerate(scenario.steps, start=1):
                async with asyncio.timeout(STEP_SECONDS):
                    await player.perform(step, number)
        except BaseException:
            # What it was doing is not what the next scenario expects.
            driver.kill()
            raise


class _Player:
    def __init__(self, stage: Stage, driver: DriverProcess, *, unique: str) -> None:
        self._stage, self._driver = stage, driver
        self._variables: dict[str, Any] = {"unique": unique}

    async def perform(self, step: Step, number: int) -> None:
        for action in step.do:
            await self._act(action)
        if step.do:
            return
        self._stage.proxy.cut_after(*step.cut_after_bytes)
        line = filled(step.line(), self._variables)
        outcome = await self._outcome(step, line)
        self._stage.proxy.cut_after()
        expected = filled(step.expect.model_dump(by_alias=True, exclude_unset=True), self._variables)
        problems = list(_problems(step, line, Expected.model_validate(expected), outcome))
        problems += await self._log_problems(step, line, outcome)
        assert not problems, _told(step, number, problems, outcome)
        for name, path in step.save.items():
            self._variables[name] = outcome.found(path)

    async def _outcome(self, step: Step, line: Mapping[str, Any]) -> Outcome:
        outcome, moments, start = Outcome(), list(step.during), time.monotonic()
        async for printed in self._driver.perform(line):
            if "event" in printed:
                self._take(step, printed["event"], outcome)
                for moment in [one for one in moments if _is_due(one, outcome)]:
                    moments.remove(moment)
                    for action in moment.do:
                        await self._act(action)
            elif "answer" in printed:
                _take_answer(step, printed["answer"], outcome)
            else:
                outcome.end = printed["end"]
        outcome.seconds = time.monotonic() - start
        assert not moments, f"these moments did not come: {moments}; there were {outcome.names}, {outcome.end}"
        return outcome

    def _take(self, step: Step, printed: Any, outcome: Outcome) -> None:
        event: Message = v1.EvaluationEvent() if STREAMS[step.call] == "evaluation" else v1.AgentEvent()
        json_format.ParseDict(printed, event)
        outcome.events.append(event)
        outcome.documents.append(document(event))
        if isinstance(event, v1.EvaluationEvent):
            self._variables["evaluation_id"] = event.evaluation_id
            return
        assert isinstance(event, v1.AgentEvent)
        self._variables |= {"run_id": event.run_id, "session_id": event.session_id}
        if event.HasField("input_requested"):
            self._variables["input_id"] = event.input_requested.request.input_id

    async def _act(self, action: Action) -> None:
        if action.cut:
            self._stage.proxy.cut()
        elif action.kill:
            await self._stage.server.restart(signal.SIGKILL)
        elif action.stop:
            await self._stage.server.restart(signal.SIGTERM)
        elif action.open:
            self._stage.gate.open()
        elif action.shut:
            self._stage.gate.shut()
        elif action.token is not None:
            self._tokens.use(action.token)
        elif action.renew:
            await self._tokens.renew()
        elif action.operator is not None:
            async with self._stage.operator() as operator:
                await operator.call(action.operator.call, filled(action.operator.request, self._variables))

    @property
    def _tokens(self) -> Tokens:
        assert self._stage.tokens is not None, "the server has `auth: true`"
        return self._stage.tokens

    async def _log_problems(self, step: Step, line: Mapping[str, Any], outcome: Outcome) -> list[str]:
        """Compare every event with that of the server's log."""
        if not outcome.events:
            return []
        async with self._stage.operator() as operator:
            request: Any = json_format.ParseDict(line["request"], request_type(step.call)())
            if STREAMS[step.call] == "run":
                log: Sequence[Any] = await operator.run_log(self._variables["run_id"], request.follow)
            else:
                log = await operator.evaluation_log(self._variables["evaluation_id"], request.follow)
        for event in log:
            event.DiscardUnknownFields()  # which no JSON has
        held = {event.sequence: event for event in log}
        return [
            f"event {event.sequence} is not the event of the log:\n{event}\nbut\n{held.get(event.sequence)}"
            for event in outcome.events
            if event != held.get(event.sequence)
        ]


def _take_answer(step: Step, printed: Any, outcome: Outcome) -> None:
    if step.tree or step.collect:
        outcome.answer = printed
        return
    answer = json_format.ParseDict(printed, response_type(step.call)())
    outcome.answer, outcome.answer_bytes = document(answer), answer.ByteSize()


def _is_due(moment: Moment, outcome: Outcome) -> bool:
    if isinstance(moment.after, int):
        return len(outcome.events) >= moment.after
    return moment.after in outcome.names


def _problems(step: Step, line: Mapping[str, Any], expected: Expected, outcome: Outcome) -> Iterator[str]:
    if expected.events is not None:
        yield from event_differences(expected.events, outcome.documents, outcome.names)
    if expected.count is not None and len(outcome.events) != expected.count:
        yield f"there are {len(outcome.events)} events instead of {expected.count}"
    if step.is_stream:
        yield from _sequence_problems(step, line, expected, outcome)
    if expected.answer is not None:
        yield from differences(expected.answer, outcome.answer, "answer")
    if expected.smaller_than is not None and outcome.size >= expected.smaller_than:
        yield f"{outcome.size} bytes came, which is not less than {expected.smaller_than}"
    if expected.larger_than is not None and outcome.size <= expected.larger_than:
        yield f"{outcome.size} bytes came, which is not more than {expected.larger_than}"
    yield from end_differences(expected.end, outcome.end)
    if expected.within_seconds is not None and outcome.seconds > expected.within_seconds:
        yield f"it took {outcome.seconds:.1f} s instead of {expected.within_seconds} at most"


def _sequence_problems(step: Step, line: Mapping[str, Any], expected: Expected, outcome: Outcome) -> Iterator[str]:
    """Sequences rise; without a view and a mask they have no gaps, and begin where the request says."""
    sequences = [getattr(event, "sequence") for event in outcome.events]  # noqa: B009 - events of two types
    if any(later <= earlier for earlier, later in itertools.pairwise(sequences)):
        yield f"the sequences do not rise: {sequences}"
    request = line["request"]
    follow = request.get("follow", {})
    is_whole = follow.get("view") != "EVENT_VIEW_SUMMARY" and not follow.get("event_names")
    if not sequences:
        return
    if is_whole and sequences != list(range(sequences[0], sequences[0] + len(sequences))):
        yield f"the sequences have gaps: {sequences}"
    starts_at = expected.starts_at
    if starts_at is None and is_whole and step.call not in ("AgentService.ResumeRun", "AgentService.ForkRun"):
        starts_at = int(request.get("after_sequence", 0)) + 1
    if starts_at is not None and sequences[0] != int(starts_at):
        yield f"the first sequence is {sequences[0]} instead of {starts_at}"


def _told(step: Step, number: int, problems: Sequence[str], outcome: Outcome) -> str:
    lines = [f"step {number}, {step.call or 'tree'}:", *(f"  {problem}" for problem in problems)]
    if outcome.names:
        lines.append(f"  events: {', '.join(outcome.names)}")
    lines.append(f"  end: {dict(outcome.end)}")
    return "\n".join(lines)
