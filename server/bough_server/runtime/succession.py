"""Who answers a model call: the model in force, how often it was tried, and who comes after it; it asks nobody."""

from collections.abc import Sequence
from itertools import takewhile

from bough.v1 import error_pb2, event_pb2
from bough_server.errors import ModelError, RunError
from bough_server.models.model import Model
from bough_server.runtime.agent import Resolver


class Succession:
    """The models of one call, those that were given up left out; never empty. Each has retries of its own."""

    def __init__(self, models: Sequence[Model], *, tries: int = 1) -> None:
        self._models = list(models)
        self._tries = tries

    @property
    def model(self) -> Model:
        """The model in force."""
        return self._models[0]

    def go_on(self, error: ModelError, *, is_sent: bool) -> float | None:
        """Makes the next attempt's model the one in force, after a failure of this one's.

        An attempt that was not sent, because its model is left alone or has too many calls, goes on with the next model
        at once. Gives the seconds that the attempt waits, jitter and the provider's own wish left out; None where there
        is none.
        """
        policy, is_last = self.model.retry, len(self._models) == 1
        if error.retry is not None and self._tries <= policy.retries and (is_sent or is_last):
            delay: float = min(policy.longest, policy.base * 2 ** (self._tries - 1))
            self._tries += 1
            return delay
        if error.is_of_the_request or is_last:
            return None
        del self._models[0]
        self._tries = 1
        return 0.0


def succession(resolver: Resolver, name: str, recorded: Sequence[event_pb2.AgentEvent] = ()) -> Succession:
    """Who answers a call of the model of a name; one that the log holds begun goes on with its last attempt's model.

    Raises RunError MODEL_UNAVAILABLE where that model is not configured; fallbacks that are not are passed over.
    """
    asked = list(_asked(recorded))
    model = _found(resolver, asked[-1] if asked else name)
    if model is None:
        raise RunError(
            f"There is no model {name!r} in the server's configuration.",
            reason=error_pb2.ERROR_REASON_MODEL_UNAVAILABLE,
        )
    after = _after(resolver, asked[0], asked[-1]) if asked else None
    names = model.fallbacks if after is None else after
    others = [found for other in names if (found := _found(resolver, other)) is not None]
    lost = sum(1 for _ in takewhile(lambda one: one == asked[-1], reversed(asked)))
    return Succession([model, *others], tries=lost + 1)


def _asked(recorded: Sequence[event_pb2.AgentEvent]) -> Sequence[str]:
    """The model of each attempt that the log holds."""
    named = [event.llm_retrying.next_model or event.llm_started.model for event in recorded]
    return [name for name in named if name]


def _after(resolver: Resolver, first: str, last: str) -> Sequence[str] | None:
    """Whom the first model's fallbacks name after the last one; None where they do not name that."""
    model = _found(resolver, first)
    order = [first, *model.fallbacks] if model is not None else []
    return order[order.index(last) + 1 :] if last in order else None


def _found(resolver: Resolver, name: str) -> Model | None:
    try:
        return resolver.model(name)
    except KeyError:
        return None
