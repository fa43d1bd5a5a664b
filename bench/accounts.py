"""The accounts case: CPU of a turn that is paid from an account, beside the same turn that is not."""

import json
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final

from grpc import aio

from bench.desk import ALL, Entrant, raced
from bench.desk_team import write_project
from bench.desk_turns import Turns
from bench.figures import Aim, CaseResult, Figure
from bench.servers import bough_server, model_server
from bough_server.store.opening import open_store
from bough_server.store.ports.accounts import AccountKey, StoredAdjustment

PAID: Final = "with accounts"
FREE: Final = "without accounts"


async def measure(folder: Path) -> CaseResult:
    """Runs the case in an empty folder."""
    failures: list[str] = []
    async with AsyncExitStack() as stack:
        base_url = await stack.enter_async_context(model_server(folder))
        entrants = {}
        for name, place in ((PAID, folder / "paid"), (FREE, folder / "free")):
            place.mkdir()
            config = await _write(place, base_url, has_accounts=name == PAID)
            server = await stack.enter_async_context(bough_server(place, config))
            channel = await stack.enter_async_context(aio.insecure_channel(server.address))
            entrants[name] = Entrant(server, partial(Turns(channel).run, agent="lead"))
        rounds = await raced(ALL, entrants, base_url, failures)
    figure = Figure(
        case="accounts",
        what=f"CPU of a turn, {ALL.name}",
        unit="ms",
        rounds=rounds[PAID],
        floor=FREE,
        floor_rounds=rounds[FREE],
        aim=Aim("at most", 1.03),
    )
    return CaseResult(figures=[figure], failures=failures)


async def _write(folder: Path, base_url: str, *, has_accounts: bool) -> Path:
    """Write the configuration of the desk, whose models have a price, and pay its account if it has one."""
    config = write_project(folder, base_url=base_url)
    settings = json.loads(config.read_text(encoding="utf-8"))
    for model in settings["models"].values():
        model["price"] = {"input_per_million": 1, "output_per_million": 2}
    if has_accounts:
        settings["accounts"] = {"per": "user"}
        payment = StoredAdjustment(
            request_id="p", amount_nanos=10**15, currency_code="USD", note="", time_ns=0, made_by="bench"
        )
        async with open_store(f"sqlite:///{folder / 'bench.db'}") as store:
            key = AccountKey(tenant_id="local", user_id="local", currency_code="USD")
            await store.accounts.adjust(key, payment)
    config.write_text(json.dumps(settings), encoding="utf-8")
    return config
