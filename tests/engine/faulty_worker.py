"""An engine process whose faults are asked for by the names of its requests."""

from __future__ import annotations

import os
import time

from zipage.engine import engine_worker
from zipage.engine.core import EngineCore
from zipage.engine.core_io import TokenUpdate

PROGRAM = "from tests.engine.faulty_worker import main; main()"
STEP_LOG = "TEST_STEP_LOG"


class FaultyCore(EngineCore):
    """Looks at the live requests before every step, and writes down who they are."""

    def step(self) -> list[TokenUpdate]:
        names = [str(request.external_id) for request in self.scheduler.requests.values()]
        for name in names:
            if name.startswith("raise"):
                raise RuntimeError("broken books")
            if name.startswith("exit"):
                os._exit(3)
            if name.startswith("hang"):
                time.sleep(60)
        if any(name.startswith("slow") for name in names):
            time.sleep(0.01)
        if path := os.environ.get(STEP_LOG):
            with open(path, "a") as log:
                print(time.perf_counter(), *names, file=log)
        return super().step()


def main() -> None:
    engine_worker.EngineCore = FaultyCore  # type: ignore[misc]
    engine_worker.main()
