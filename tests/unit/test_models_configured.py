"""The configured models: names, aliases, keys that are missing, what a digest counts."""

from pathlib import Path

import pytest
from pydantic import ValidationError

from bough.v1 import error_pb2, model_pb2
from bough_server.errors import ConfigurationError
from bough_server.models.config import ModelSection, PriceSection, TimeoutSection
from bough_server.models.model import Price, RetryPolicy
from bough_server.models.registry import ConfiguredModels, build_models
from tests.support.model_calls import answer, asking, failure


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "desk.yaml").write_text("agents: {lead: [Hello.]}", encoding="utf-8")
    return tmp_path


def scripted(folder: Path, file: str = "desk.yaml") -> ModelSection:
    return ModelSection(provider="scripted", script=folder / file)


def openai(**facts: object) -> ModelSection:
    return ModelSection.model_validate({"provider": "openai", "model": "large-1", **facts})


def built(folder: Path, *, secrets: dict[str, str] | None = None, **configs: ModelSection) -> ConfiguredModels:
    return build_models(configs, secrets=secrets or {}, folder=folder)


async def test_names_aliases_and_the_default_lead_to_models(folder: Path) -> None:
    models = built(folder, a=scripted(folder), b=ModelSection(alias="a"), default=ModelSection(alias="b"))
    assert models.get("") is models.get("default") is models.get("b") is models.get("a")
    _, response = await answer(models.get(""), asking(agent="lead"))
    assert (response.message.parts[0].text, response.model) == ("Hello.", "desk")
    await models.close()


def test_a_name_that_is_not_there_is_a_key_error(folder: Path) -> None:
    models = built(folder, a=scripted(folder))
    for name in ("b", ""):
        with pytest.raises(KeyError):
            models.get(name)


def test_the_list_has_every_name_in_order(folder: Path) -> None:
    models = built(
        folder,
        small=ModelSection(provider="local"),
        default=ModelSection(alias="large"),
        large=openai(),
        told=scripted(folder),
    )
    assert models.list() == [
        model_pb2.ModelInfo(name="default", provider="openai", model="large-1"),
        model_pb2.ModelInfo(name="large", provider="openai", model="large-1"),
        model_pb2.ModelInfo(name="small", provider="local", model="SmolLM2-135M-Instruct"),
        model_pb2.ModelInfo(name="told", provider="scripted", model="desk"),
    ]


def test_prices_are_in_the_currency_of_the_configuration(folder: Path) -> None:
    price = PriceSection(input_per_million=1, output_per_million=2)
    told = ModelSection(provider="scripted", script=folder / "desk.yaml", price=price)
    local = ModelSection(provider="local", price=price)
    configs = {"openai": openai(price=price.model_dump()), "local": local, "told": told}
    for currency in ("USD", "EUR"):
        models = build_models(configs, secrets={}, folder=folder, currency=currency)
        assert {models.get(name).price for name in configs} == {
            Price(input_per_million=1, output_per_million=2, currency_code=currency)
        }


def test_retries_and_prices_are_the_configured_ones(folder: Path) -> None:
    price = PriceSection(
        input_per_million=1, output_per_million=2, cached_input_per_million=0.5, cache_write_per_million=1.25
    )
    model = built(folder, a=openai(retries=5, price=price)).get("a")
    assert model.retry == RetryPolicy(retries=5)
    assert model.price == Price(
        input_per_million=1, output_per_million=2, cached_input_per_million=0.5, cache_write_per_million=1.25
    )
    assert (model.name, model.provider, model.model) == ("a", "openai", "large-1")


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ({"a": ModelSection(alias="b")}, "models.a.alias: There is no model 'b'."),
        ({"a": ModelSection(alias="a")}, "models.a.alias: forms a cycle: a > a"),
        (
            {"a": ModelSection(alias="b"), "b": ModelSection(alias="a")},
            "models.a.alias: forms a cycle: a > b > a",
        ),
    ],
)
def test_an_alias_must_lead_to_a_model(folder: Path, configs: dict[str, ModelSection], message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        build_models(configs, secrets={}, folder=folder)
    assert raised.value.message == message


def test_fallbacks_are_the_models_of_their_names_each_followed_by_its_own(folder: Path) -> None:
    models = built(
        folder,
        a=openai(fallbacks=["b", "other"]),
        b=openai(fallbacks=["c", "d"]),
        c=openai(),
        d=openai(fallbacks=["c"]),
        e=openai(),
        other=ModelSection(alias="e"),
    )
    assert {name: models.get(name).fallbacks for name in "abce"} == {
        "a": ("b", "c", "d", "e"),
        "b": ("c", "d"),
        "c": (),
        "e": (),
    }
    assert {info.name: list(info.fallbacks) for info in models.list()} == {
        "a": ["b", "c", "d", "e"],
        "b": ["c", "d"],
        "c": [],
        "d": ["c"],
        "e": [],
        "other": [],
    }


@pytest.mark.parametrize(
    ("configs", "message"),
    [
        ({"a": openai(fallbacks=["b"])}, "models.a.fallbacks: There is no model 'b'."),
        ({"a": openai(fallbacks=["a"])}, "models.a.fallbacks: forms a cycle: a > a"),
        (
            {"a": openai(fallbacks=["b"]), "b": openai(fallbacks=["c"]), "c": ModelSection(alias="b")},
            "models.b.fallbacks: forms a cycle: b > b",
        ),
    ],
)
def test_a_fallback_must_lead_to_another_model(folder: Path, configs: dict[str, ModelSection], message: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        build_models(configs, secrets={}, folder=folder)
    assert raised.value.message == message


def test_a_script_that_is_wrong_is_told_when_the_models_are_made(folder: Path) -> None:
    (folder / "desk.yaml").write_text("agents: {lead: [{txt: a}]}", encoding="utf-8")
    with pytest.raises(ConfigurationError, match=r"desk\.yaml:1: agents\.lead\[0\]\.txt: "):
        built(folder, a=scripted(folder))
    with pytest.raises(ConfigurationError, match=r"none\.yaml: The file cannot be read"):
        built(folder, a=scripted(folder, "none.yaml"))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            openai(api_key_env="DESK_KEY"),
            "The model 'a' has no key: the environment variable DESK_KEY is not set. "
            "Set it and start the server again.",
        ),
        (
            openai(),
            "The model 'a' has no key: models.a.api_key_env does not say which environment variable holds it.",
        ),
    ],
)
async def test_a_missing_key_fails_the_first_call_and_not_the_start(
    folder: Path, config: ModelSection, said: str
) -> None:
    models = built(folder, a=config)
    _, error = await failure(models.get("a"), asking())
    assert (error.message, error.reason, error.retry) == (said, error_pb2.ERROR_REASON_MODEL_UNAVAILABLE, None)
    await models.close()


def test_a_digest_counts_what_answers_depend_on_and_no_secret(folder: Path) -> None:
    def digest(config: ModelSection, **secrets: str) -> str:
        return built(folder, secrets=secrets, a=config).get("a").config_digest

    first = digest(openai(api_key_env="K"), K="one")
    patient = openai(
        api_key_env="L",
        retries=0,
        timeouts=TimeoutSection(start=1, idle=1),
        max_concurrency=3,
        requests_per_minute=1,
        breaker={"failures": 0},
    )
    assert digest(patient, L="two") == first
    assert digest(openai(base_url="http://127.0.0.1:1/v1")) != first
    assert digest(ModelSection(provider="openai", model="large-2")) != first
    assert digest(openai(stream_usage=False, prompt_cache=False)) == first, "they change no answer"
    sent: tuple[dict[str, object], ...] = (
        {"structured_output": False},
        {"max_tokens_field": "max_tokens"},
        {"tool_choice": "auto"},
        {"reasoning": "none"},
        {"encrypted_reasoning": True},
    )
    assert len({first, *(digest(openai(**fields)) for fields in sent)}) == 6
    told = digest(scripted(folder))
    (folder / "desk.yaml").write_text("agents: {lead: [Goodbye.]}", encoding="utf-8")
    assert digest(scripted(folder)) != told


@pytest.mark.parametrize("provider", ["anthropic", "gemini"])
async def test_the_key_of_a_native_provider_has_its_usual_variable(folder: Path, provider: str) -> None:
    section = ModelSection.model_validate({"provider": provider, "model": "m"})
    _, error = await failure(built(folder, a=section).get("a"), asking())
    variable = f"{provider.upper()}_API_KEY"
    assert error.message == (
        f"The model 'a' has no key: the environment variable {variable} is not set. Set it and start the server again."
    )


@pytest.mark.parametrize("provider", ["anthropic", "gemini", "scripted", "local"])
def test_a_preset_is_refused_beside_a_provider_that_does_not_speak_chat_completions(provider: str) -> None:
    section = {"preset": "gemini", "provider": provider, "model": "m", "script": "script.yaml"}
    with pytest.raises(ValidationError, match=f"`preset` is for Chat Completions, and `provider` is {provider}: "):
        ModelSection.model_validate(section)
    assert ModelSection.model_validate({**section, "provider": "openai"}).provider == "openai"
