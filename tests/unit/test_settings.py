"""Settings: precedence, strictness, paths and secrets."""

import os
from pathlib import Path

import pytest
from google.protobuf.duration_pb2 import Duration

from bough.v1 import policy_pb2
from bough_server.errors import ConfigurationError
from bough_server.quotas import QuotaLimits, TenantQuotas
from bough_server.settings import Settings
from bough_server.settings_sections import ClientSection, ServerSection

FILE = """
server: {port: 1111, host: 0.0.0.0, allow_insecure: true}
storage: {url: data/runs.db, durability: process}
agents: [agents/*.yaml]
python: [desk_tools]
models:
  default: {alias: scripted}
  scripted: {provider: scripted, script: scripts/desk.yaml}
  openai: {provider: openai, model: m, api_key_env: DESK_KEY, timeouts: {start: 10s},
    price: {input_per_million: 1, output_per_million: 2.5}}
limits: {default: {wall_duration: 10m}, maximum: {model_calls: 900}}
runs: {deltas: {max_interval: 100ms}, on_disconnect: continue}
log_level: debug
"""


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONFIG", "ADDRESS", "DATABASE", "DEFAULT_MODEL", "REFLECTION", "LOG_LEVEL", "LOG_FORMAT"):
        monkeypatch.delenv(f"BOUGH_{name}", raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    folder = tmp_path / "desk"
    folder.mkdir()
    path = folder / "bough.yaml"
    path.write_text(FILE)
    return path


def refusal(config: Path | None = None, **flags: object) -> list[str]:
    with pytest.raises(ConfigurationError) as refused:
        Settings.load(config, **flags)  # type: ignore[misc]
    return refused.value.message.splitlines()


def test_without_a_file_the_defaults_apply(tmp_path: Path) -> None:
    settings = Settings.load()
    assert (settings.server.host, settings.server.port, settings.server.reflection) == ("127.0.0.1", 50051, True)
    assert (settings.storage.url, settings.storage.durability) == (f"sqlite:///{tmp_path}/var/bough.db", "disk")
    assert (settings.agents, settings.python, settings.models, settings.address) == ((), (), {}, None)
    assert settings.folder == tmp_path
    assert settings.limits.default.message() == policy_pb2.Limits(model_calls=500, depth=16)
    assert settings.limits.maximum.message() == policy_pb2.Limits()


def test_the_files_names_are_relative_to_it(config: Path) -> None:
    settings = Settings.load(config)
    assert settings.folder == config.parent
    assert settings.storage.url == f"sqlite:///{config.parent}/data/runs.db"
    assert settings.models["scripted"].script == config.parent / "scripts/desk.yaml"


def test_the_file_in_the_working_directory_is_read_unless_another_is_named(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bough.yaml").write_text("server: {port: 2222}\n")
    assert Settings.load().server.port == 2222
    monkeypatch.setenv("BOUGH_CONFIG", str(config))
    assert Settings.load().server.port == 1111
    assert Settings.load(tmp_path / "bough.yaml").server.port == 2222


def test_the_file_of_the_nearest_folder_above_is_found_and_the_database_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "desk" / "agents" / "old"
    inner.mkdir(parents=True)
    (tmp_path / "bough.yaml").write_text("server: {port: 2222}\n")
    monkeypatch.chdir(inner)
    settings = Settings.load()
    assert (settings.server.port, settings.folder) == (2222, tmp_path)
    assert settings.storage.url == f"sqlite:///{tmp_path}/var/bough.db"
    (tmp_path / "desk" / "bough.yaml").write_text("storage: {durability: process}\n")
    settings = Settings.load()
    assert (settings.server.port, settings.folder) == (50051, tmp_path / "desk")
    assert settings.storage.url == f"sqlite:///{tmp_path}/desk/var/bough.db"
    monkeypatch.setenv("BOUGH_DATABASE", "mine.db")
    assert Settings.load().storage.url == f"sqlite:///{inner}/mine.db"


def test_a_file_above_that_another_user_owns_has_to_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, inner = tmp_path / "bough.yaml", tmp_path / "inner"
    file.write_text("server: {port: 2222}\n")
    inner.mkdir()
    if os.geteuid() == 0:
        os.chown(file, 12345, -1)  # what root owns is trusted
    monkeypatch.setattr("bough_server.settings.os.geteuid", lambda: 54321)
    assert Settings.load().server.port == 2222
    monkeypatch.chdir(inner)
    assert refusal() == [
        f"{file} belongs to another user and is not in the working directory: name it with --config to use it, or name "
        "another file."
    ]
    assert Settings.load(file).server.port == 2222


def test_a_flag_wins_over_the_environment_and_that_over_the_file(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Settings.load(config).models["default"].alias == "scripted"
    assert Settings.load(config).log_level == "debug"
    monkeypatch.setenv("BOUGH_DATABASE", "other.db")
    monkeypatch.setenv("BOUGH_DEFAULT_MODEL", "openai")
    monkeypatch.setenv("BOUGH_REFLECTION", "0")
    monkeypatch.setenv("BOUGH_LOG_LEVEL", "error")
    monkeypatch.setenv("BOUGH_LOG_FORMAT", "json")
    monkeypatch.setenv("BOUGH_ADDRESS", "127.0.0.1:9")
    settings = Settings.load(config)
    assert settings.models["default"].alias == "openai"
    assert (settings.server.reflection, settings.log_level, settings.address) == (False, "error", "127.0.0.1:9")
    assert settings.log_format == "json"
    assert settings.storage.url == f"sqlite:///{tmp_path}/other.db"
    settings = Settings.load(config, default_model="scripted", database="third.db", port=0, allow_insecure=False)
    assert settings.models["default"].alias == "scripted"
    assert settings.storage.url == f"sqlite:///{tmp_path}/third.db"
    assert (settings.server.port, settings.server.allow_insecure) == (0, True)


def test_an_empty_variable_and_a_flag_that_is_none_say_nothing(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOUGH_LOG_LEVEL", "")
    assert Settings.load(config, log_level=None).log_level == "debug"


def test_a_default_model_of_the_name_default_keeps_the_files(config: Path) -> None:
    assert Settings.load(config, default_model="default").models["default"].alias == "scripted"


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("a.db", "sqlite:///{folder}/a.db"),
        ("/data/a.db", "sqlite:////data/a.db"),
        ("sqlite:///a.db", "sqlite:///{folder}/a.db"),
        ("sqlite:////data/a.db", "sqlite:////data/a.db"),
        ("postgresql://host/name", "postgresql://host/name"),
    ],
)
def test_a_database_is_a_path_or_a_url(text: str, url: str, tmp_path: Path) -> None:
    assert Settings.load(database=text).storage.url == url.format(folder=tmp_path)


def test_limits_and_policies_are_given_in_the_schemas_words(config: Path) -> None:
    settings = Settings.load(config)
    assert settings.limits.maximum.message() == policy_pb2.Limits(model_calls=900)
    assert settings.runs.message(settings.limits.default) == policy_pb2.RunPolicy(
        limits=policy_pb2.Limits(model_calls=500, depth=16, wall_duration=Duration(seconds=600)),
        deltas=policy_pb2.DeltaPolicy(
            aggregated=policy_pb2.AggregatedDeltas(max_interval=Duration(nanos=100_000_000), max_chars=256)
        ),
        on_disconnect=policy_pb2.DISCONNECT_POLICY_CONTINUE,
        disconnect_grace=Duration(seconds=30),
    )


def test_passthrough_is_a_delta_policy(tmp_path: Path) -> None:
    (tmp_path / "bough.yaml").write_text("runs: {deltas: {mode: passthrough}}\n")
    expected = policy_pb2.DeltaPolicy(passthrough=policy_pb2.PassthroughDeltas())
    assert Settings.load().runs.deltas.message() == expected


def test_only_the_variables_that_models_name_are_handed_on_and_none_is_shown(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DESK_KEY", "sk-very-secret")
    monkeypatch.setenv("OTHER_KEY", "sk-other")
    settings = Settings.load(config)
    assert dict(settings.secrets) == {"DESK_KEY": "sk-very-secret"}
    shown = f"{settings!r} {settings} {settings.secrets!r} {settings.model_dump()} {settings.model_dump_json()}"
    assert "sk-" not in shown


def test_settings_are_frozen(config: Path) -> None:
    settings = Settings.load(config)
    with pytest.raises(ValueError, match="frozen"):
        settings.server.port = 1  # type: ignore[misc]


def test_every_mistake_of_the_file_is_told_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("""server:
  prot: 1
  reflection: 3
models:
  a: {provider: opnai, mdel: x, api_key_env: sk-key, timeouts: {start: 10 s}}
  b: {alias: c, model: y}
  d: {}
  e: {provider: openai}
  f: {provider: scripted}
lmits: {}
limits: {maximum: {model_calls: -1}}
storage: 3
""")
    assert sorted(refusal(path)) == [
        f"{path}:10: lmits: There is no such setting. Did you mean 'limits'?",
        f"{path}:11: limits.maximum.model_calls: must be at least 0",
        f"{path}:12: storage: must be a mapping",
        f"{path}:2: server.prot: There is no such setting. Did you mean 'port'?",
        f"{path}:3: server.reflection: must be true or false",
        f"{path}:5: models.a.api_key_env: must be the name of an environment variable that holds the key, not the key",
        f"{path}:5: models.a.mdel: There is no such setting. Did you mean 'model'?",
        f"{path}:5: models.a.provider: must be 'openai', 'anthropic', 'gemini', 'scripted' or 'local'",
        f"{path}:5: models.a.timeouts.start: must be a duration such as 10m, 50ms or 1h30m, not '10 s'",
        f"{path}:6: models.b: is an alias, which has no other fields; remove model",
        f"{path}:7: models.d: needs a provider (openai, anthropic, gemini, scripted or local) or an alias",
        f"{path}:8: models.e: needs `model`, the provider's name for the model",
        f"{path}:9: models.f: needs `script`, the path of a script file",
    ]


def test_aliases_lead_somewhere(tmp_path: Path) -> None:
    path = tmp_path / "bough.yaml"
    path.write_text("models:\n  a: {alias: b}\n  b: {alias: a}\n  c: {alias: locl}\n  local: {provider: local}\n")
    assert refusal() == [
        "bough.yaml:2: models.a.alias: forms a cycle: a > b > a",
        "bough.yaml:3: models.b.alias: forms a cycle: b > a > b",
        "bough.yaml:4: models.c.alias: There is no model 'locl'. Did you mean 'local'?",
    ]


def test_fallbacks_lead_somewhere_and_nowhere_back(tmp_path: Path) -> None:
    path = tmp_path / "bough.yaml"
    path.write_text("""models:
  a: {provider: local, fallbacks: [b, locl]}
  b: {provider: local, fallbacks: [c]}
  c: {provider: local, fallbacks: [again]}
  again: {alias: b}
  alone: {provider: local, fallbacks: [alone]}
  local: {provider: local, fallbacks: [a, b, a]}
""")
    assert refusal() == [
        "bough.yaml:2: models.a.fallbacks[1]: There is no model 'locl'. Did you mean 'local'?",
        "bough.yaml:3: models.b.fallbacks: forms a cycle: b > c > b",
        "bough.yaml:4: models.c.fallbacks: forms a cycle: c > b > c",
        "bough.yaml:6: models.alone.fallbacks: forms a cycle: alone > alone",
    ]


def test_a_mistake_of_a_flag_or_a_variable_names_it(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal(config, port=70_000) == ["--port: must be at most 65535"]
    monkeypatch.setenv("BOUGH_DEFAULT_MODEL", "opanai")
    assert refusal(config) == ["BOUGH_DEFAULT_MODEL: There is no model 'opanai'. Did you mean 'openai'?"]
    monkeypatch.setenv("BOUGH_REFLECTION", "perhaps")
    assert refusal(config) == ["BOUGH_REFLECTION: must be true or false"]


def test_mistakes_are_told_in_the_words_of_definitions(tmp_path: Path) -> None:
    path = tmp_path / "bough.yaml"
    path.write_text("""server: {port: x, host: 3, drain_grace: [1]}
agents: a.yaml
models: []
limits: {default: {wall_duration: 0}}
log_level: loud
""")
    assert sorted(refusal(path)) == [
        f"{path}:1: server.drain_grace: must be a number",
        f"{path}:1: server.host: must be text; put it in quotes",
        f"{path}:1: server.port: must be a whole number",
        f"{path}:2: agents: must be a list",
        f"{path}:3: models: must be a mapping",
        f"{path}:4: limits.default.wall_duration: must be more than 0",
        f"{path}:5: log_level: must be 'debug', 'info', 'warning' or 'error'",
    ]


def test_a_file_that_was_named_must_be_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [f"{tmp_path / 'none.yaml'}: The file cannot be read: No such file or directory."]
    assert refusal(tmp_path / "none.yaml") == words
    monkeypatch.setenv("BOUGH_CONFIG", str(tmp_path / "none.yaml"))
    assert refusal() == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("- a\n", "bough.yaml:1: must be a mapping, such as `server: {port: 50051}`"),
        ("a: 1\n---\nb: 1\n", "bough.yaml:3: The file must contain one document, not several."),
        ("a: [\n", "bough.yaml:2: This is not YAML: expected the node content, but found '<stream end>'."),
    ],
)
def test_a_file_is_one_mapping(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "bough.yaml").write_text(text)
    assert refusal() == [words]


def test_an_empty_file_and_empty_sections_are_the_defaults(tmp_path: Path) -> None:
    for text in ("", "server:\nmodels:\nstorage:\n"):
        (tmp_path / "bough.yaml").write_text(text)
        assert Settings.load().model_dump() == Settings().model_dump()


def test_tokens_cost_and_parallelism_are_bounded_and_metrics_are_found_on_loopback(tmp_path: Path) -> None:
    (tmp_path / "bough.yaml").write_text(
        "limits: {default: {tokens: 9000000000, concurrency: 4}, maximum: {cost_nanos: 5}}\n"
        "telemetry: {prometheus_port: 9464}\n"
    )
    settings = Settings.load()
    assert settings.limits.default.message() == policy_pb2.Limits(
        model_calls=500, depth=16, tokens=9_000_000_000, concurrency=4
    )
    assert settings.limits.maximum.message() == policy_pb2.Limits(cost_nanos=5)
    assert (settings.telemetry.prometheus_host, settings.telemetry.prometheus_port) == ("127.0.0.1", 9464)


def test_bounds_and_ports_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "bough.yaml"
    path.write_text(
        "limits: {default: {concurrency: 0},\n  maximum: {tokens: -1}}\ntelemetry:\n  prometheus_port: 65536\n"
    )
    assert sorted(refusal(path)) == [
        f"{path}:1: limits.default.concurrency: must be at least 1",
        f"{path}:2: limits.maximum.tokens: must be at least 0",
        f"{path}:4: telemetry.prometheus_port: must be at most 65535",
    ]


def test_prices_are_in_dollars_unless_the_file_names_another_currency(tmp_path: Path) -> None:
    assert Settings.load().currency == "USD"
    (tmp_path / "bough.yaml").write_text("currency: EUR\n")
    assert Settings.load().currency == "EUR"


@pytest.mark.parametrize("currency", ["eur", "EURO", "E1R", "$", '""'])
def test_a_currency_is_three_capital_letters(tmp_path: Path, currency: str) -> None:
    path = tmp_path / "bough.yaml"
    path.write_text(f"currency: {currency}\n")
    words = "currency: must be a currency by ISO 4217: three capital letters, such as USD"
    assert refusal(path) == [f"{path}:1: {words}"]


@pytest.mark.parametrize(
    ("variables", "exported"),
    [
        ({}, (False, False, False)),
        ({"ENDPOINT": "http://x"}, (True, True, True)),
        ({"TRACES_ENDPOINT": "http://x"}, (True, False, False)),
        ({"METRICS_ENDPOINT": "http://x"}, (False, True, False)),
        ({"LOGS_ENDPOINT": "http://x"}, (False, False, True)),
    ],
)
def test_the_variables_of_otlp_say_what_goes_out(
    variables: dict[str, str], exported: tuple[bool, bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"OTEL_EXPORTER_OTLP_{name}", value)
    settings = Settings.load()
    assert (settings.exports_traces, settings.exports_metrics, settings.exports_logs) == exported
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
    assert not Settings.load().exports_metrics
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "otlp")
    assert Settings.load().exports_metrics
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    assert not Settings.load().exports_metrics


def test_what_reports_leave_out_is_configured(config: Path) -> None:
    assert Settings.load(config).evaluation.redact.fields == ()
    config.write_text("evaluation: {redact: {fields: [user.*.password], patterns: ['sk-[a-z]+']}}")
    redact = Settings.load(config).evaluation.redact
    assert (redact.fields, redact.patterns) == (("user.*.password",), ("sk-[a-z]+",))
    config.write_text("evaluation: {redact: {pattern: [a]}}")
    assert "evaluation.redact.pattern" in "\n".join(refusal(config))


def test_files_of_tls_are_below_the_file_and_problems_of_the_section_name_its_line(tmp_path: Path) -> None:
    config = tmp_path / "bough.yaml"
    config.write_text(
        "server:\n  tls: {cert_file: tls/a.crt, key_file: /b.key}\n  mtls: {port: 1, client_ca_file: c}\n"
    )
    server = Settings.load(config, mtls_port=2, allow_no_auth=True).server
    assert server.tls is not None
    assert server.mtls is not None
    assert (server.tls.cert_file, server.tls.key_file) == (tmp_path / "tls" / "a.crt", Path("/b.key"))
    assert (server.mtls.port, server.allow_no_tls, server.allow_no_auth) == (2, False, True)
    assert str(Settings.load(config).locate(("server", "tls"), "Wrong.")) == f"{config}:2: server.tls: Wrong."
    config.write_text("server: {mtls: {port: 1, client_ca_file: c}, max_connection_age: 0s}\n")
    assert refusal(config) == [f"{config}:1: server.max_connection_age: must be more than 0"]
    config.write_text("server: {mtls: {port: 1, client_ca_file: c}}\n")
    assert refusal(config) == [f"{config}:1: server: mtls needs tls: set tls.cert_file and tls.key_file too"]


def test_a_server_inside_a_program_has_no_tls_and_no_port_for_probes(tmp_path: Path) -> None:
    config = tmp_path / "bough.yaml"
    tls = "tls: {cert_file: a, key_file: b}, mtls: {port: 1, client_ca_file: c}, health_port: 3"
    config.write_text(f"server: {{host: 0.0.0.0, {tls}, drain_grace: 7s}}\n")
    embedded = Settings.load(config).for_embedded_server().server
    assert embedded == ServerSection(port=0, drain_grace=7)
    assert Settings.load(config).for_worker().server.health_port is None


def test_of_a_named_server_only_the_section_client_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "bough.yaml"
    config.write_text("client: {ca_file: a.crt, token_env: MINE}\nserver: {prt: 1}\n")
    monkeypatch.setenv("MINE", "secret")
    settings = Settings.load_client()
    assert (settings.client.ca_file, dict(settings.secrets)) == (tmp_path / "a.crt", {"MINE": "secret"})
    config.write_text("client: {ca: a.crt}\n")
    with pytest.raises(ConfigurationError, match=rf"^{config.name}:1: client\.ca: There is no such setting\."):
        Settings.load_client()
    config.write_text("client: {")
    assert Settings.load_client().client == ClientSection()
    with pytest.raises(ConfigurationError, match=rf"^{config}:"):
        Settings.load_client(config)


def test_with_accounts_every_model_has_a_price(tmp_path: Path) -> None:
    path = tmp_path / "bough.yaml"
    path.write_text(
        "accounts: {per: user}\n"
        "models:\n"
        "  paid: {provider: openai, model: m, price: {input_per_million: 1, output_per_million: 2}}\n"
        "  free: {provider: openai, model: m, price: {input_per_million: 0, output_per_million: 0}}\n"
        "  other: {alias: paid}\n"
        "  unpriced: {provider: openai, model: m}\n"
    )
    with pytest.raises(ConfigurationError) as wrong:
        Settings.load(path)
    assert str(wrong.value) == (
        f"{path}:6: models.unpriced: needs a `price`, as `accounts` are on: 0 for input and output if the model is free"
    )


def test_mistakes_in_quotas_and_models_of_tenants_are_told_with_their_lines(config: Path) -> None:
    config.write_text(
        FILE
        + """
tenants:
  acme: {models: [scripted, opnai], quotas: {concurrent_runs: 0, runs_per_hour: 1}}
  beta: {models: [], user_quotas: {tokens_per_day: -1, cost_nanos_per_month: 9223372036854775808}}
  gamma: {quotas: {runs_per_minute: 1.5}}
"""
    )
    name = config
    assert refusal(config) == [
        f"{name}:16: tenants.acme.quotas.concurrent_runs: must be at least 1",
        f"{name}:16: tenants.acme.quotas.runs_per_hour: There is no such setting. Did you mean 'runs_per_minute'?",
        f"{name}:17: tenants.beta.models: must be a list of at least 1",
        f"{name}:17: tenants.beta.user_quotas.tokens_per_day: must be at least 0",
        f"{name}:17: tenants.beta.user_quotas.cost_nanos_per_month: must be at most 9223372036854775807",
        f"{name}:18: tenants.gamma.quotas.runs_per_minute: must be a whole number",
    ]
    config.write_text(FILE + "tenants: {acme: {models: [scripted, opnai]}}\n")
    assert refusal(config) == [f"{name}:14: tenants.acme.models[1]: There is no model 'opnai'. Did you mean 'openai'?"]


def test_quotas_of_tenants_are_read(config: Path) -> None:
    config.write_text(
        FILE
        + """
tenants:
  acme:
    models: [scripted]
    quotas: {concurrent_runs: 100, tokens_per_day: 20000000}
    user_quotas: {runs_per_minute: 30}
  "*": {}
"""
    )
    tenants = Settings.load(config).tenants
    assert tenants["acme"].models == ("scripted",)
    assert tenants["acme"].limits() == TenantQuotas(
        of_tenant=QuotaLimits(concurrent_runs=100, tokens_per_day=20_000_000),
        of_user=QuotaLimits(runs_per_minute=30),
    )
    assert (tenants["*"].models, tenants["*"].limits()) == (None, TenantQuotas())
