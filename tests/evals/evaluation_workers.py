"""Other workers on the store of a server that evaluates."""

import asyncio
from dataclasses import replace

from bough_server.evals.job.evaluations import Evaluations
from bough_server.identity import Principal
from bough_server.ownership import worker as ownership
from tests.rpc.run_server import Served

ME = Principal(tenant_id="local", user_id="local")


class Worker:
    """Another worker on the store of a server."""

    def __init__(self, server: Served, name: str) -> None:
        found = server.app.evaluations.dependencies
        worker = ownership.Worker(name, found.store.leases, found.clock)
        self.dependencies = replace(found, worker=worker)
        self.evaluations = Evaluations(self.dependencies)
        self.store = self.dependencies.store
        self.name = name

    async def __aenter__(self) -> "Worker":
        await self.store.leases.begin(self.name)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.evaluations.close()
        await self.store.leases.release(self.name)


async def until_owned(worker: Worker, evaluation_id: str) -> None:
    """Wait until a worker has taken an evaluation over."""
    while True:
        record = await worker.store.evaluations.find(evaluation_id)
        if record is not None and record.owner == worker.name:
            return
        await asyncio.sleep(0.01)
