"""What a worker process of an ablation runs in tests of its supervision. Imports no torch."""

import os
import time
from typing import Any


def serve(pipe: Any) -> None:
    """Does what the engine option `behave` says."""
    while True:
        options, _work, seconds = pipe.recv()
        behave = options["behave"]
        if behave == "die":
            os._exit(7)
        if behave == "hang":
            time.sleep(60)
        status = "failed" if behave == "fail" else "ok"
        pipe.send({"status": status, "error": "no", "pid": os.getpid(), "seconds": seconds})
