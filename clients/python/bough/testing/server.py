"""The fake server: scripted runs with their records, scripted evaluations, and given responses to all other calls."""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

import grpc
from google.protobuf.message import Message

from bough.testing.dispatch import Dispatch
from bough.testing.evaluations import ScriptedEvaluations
from bough.testing.runs import ScriptedRuns
from bough.v1 import eval_result_pb2, evaluation_pb2, event_pb2, invocation_pb2


class FakeServer:
    """A server on loopback with scripted runs and evaluations, while the context is open.

    `add` and `refuse` script runs, `add_evaluation` evaluations, and `respond` any other call. What is not scripted is
    UNIMPLEMENTED, with a message that says how to script it. The health check says that it serves.
    """

    def __init__(self) -> None:
        self._runs, self._evaluations = ScriptedRuns(), ScriptedEvaluations()
        self._dispatch = Dispatch({**self._runs.behaviors, **self._evaluations.behaviors})
        self._server = grpc.server(ThreadPoolExecutor(max_workers=16), options=(("grpc.so_reuseport", 0),))
        self._server.add_generic_rpc_handlers((self._dispatch,))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        """Address of the server, for the client under test."""

    @property
    def requests(self) -> list[Message]:
        """Every request that arrived, in order, but health checks."""
        return self._dispatch.requests

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop(grace=None).wait()

    def add(
        self,
        agent: str,
        events: Iterable[event_pb2.AgentEvent],
        *,
        drops: Sequence[int] = (),
        invocation: invocation_pb2.Invocation | None = None,
    ) -> str:
        """Script the next run of an agent; return its id. Unset ids and all sequences of the events are set.

        `drops` has a number for each stream of the run, in order: its connection drops after so many events. The
        streams after those are whole. `invocation` is the run's record, with the agent tree; its `run_id` is set.
        Raises ValueError for events that neither end the run nor interrupt it: on a server it would run for ever.
        """
        return self._runs.add(agent, events, drops=drops, invocation=invocation)

    def refuse(self, agent: str, code: grpc.StatusCode, *, reason: str = "", message: str = "refused") -> None:
        """Refuse the next run of an agent with this error; `reason` is the name of an ErrorReason without prefix."""
        self._runs.refuse(agent, code, reason=reason, message=message)

    def add_evaluation(
        self,
        result: eval_result_pb2.EvalResult,
        *,
        events: Iterable[evaluation_pb2.EvaluationEvent] | None = None,
        drops: Sequence[int] = (),
    ) -> str:
        """Script the next evaluation of the set that the result names; return the evaluation's id, which is set.

        Default of `events`: those of `verdict(result)`. `drops` is that of `add`. Raises ValueError for events that do
        not end the evaluation.
        """
        return self._evaluations.add(result, events=events, drops=drops)

    def respond(self, response: Message) -> None:
        """Answer the RPC that returns such a message with this one from now on, as in `respond(ListToolsResponse())`.

        That holds also of an RPC that the fake answers by its scripts. Raises ValueError for any other message.
        """
        self._dispatch.respond(response)
