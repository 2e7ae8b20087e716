"""An engine process whose faults are asked for by the names of its requests."""

from __future__ import annotations

import os
import time

from zipage.engine import engine_worker
from zipage.engine.core import EngineCore
from zipage.engine.core_io import TokenUpdate
from zipage.engine.messages import Abort, ToEngine, decode_to_engine

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
        write_down("step", *names)
        return super().step()


def write_down(*words: str) -> None:
    """A line of the log: a step and its requests, or an abort and the answers it ends."""
    if path := os.environ.get(STEP_LOG):
        with open(path, "a") as log:
            print(*words, file=log)


def decode(frame: bytes) -> ToEngine:
    """A message, on the thread that receives it."""
    message = decode_to_engine(frame)
    if isinstance(message, Abort):
        write_down("abort", *message.sequence_ids)
    return message


def main() -> None:
    engine_worker.EngineCore = FaultyCore  # type: ignore[misc]
    engine_worker.decode_to_engine = decode
    engine_worker.main()
