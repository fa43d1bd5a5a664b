"""Models behind OpenAI's APIs without a configuration, for tests of the wire."""

from collections.abc import Sequence

from bough_server.models.endpoint import Timeouts
from bough_server.models.limiter import ModelLimiter
from bough_server.models.model import Price, RetryPolicy
from bough_server.models.openai.client import ChatApi
from bough_server.models.remote import Api, RemoteModel


class OpenAIModel(RemoteModel):
    """A model of an OpenAI-compatible provider."""

    def __init__(
        self,
        *,
        name: str,
        model: str,
        api: Api | None = None,
        keep_raw: bool = False,
        base_url: str = "",
        key: str = "",
        missing_key: str = "",
        timeouts: Timeouts | None = None,
        retry: RetryPolicy | None = None,
        fallbacks: Sequence[str] = (),
        price: Price | None = None,
        limiter: ModelLimiter | None = None,
        config_digest: str = "",
    ) -> None:
        """Default `api`: Chat Completions. An empty `key` sends none."""
        super().__init__(
            name=name,
            provider="openai",
            model=model,
            api=api or ChatApi(),
            base_url=base_url,
            key=key,
            timeouts=timeouts,
            keep_raw=keep_raw,
            missing_key=missing_key,
            retry=retry,
            fallbacks=fallbacks,
            price=price,
            limiter=limiter,
            config_digest=config_digest,
        )
