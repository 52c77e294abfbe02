"""A private Valkey and the processes of a deployment, with their CPU time and the engine's counters."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import redis

from turnmill.runtime.embedded import ensure_server

ROOT = Path(__file__).resolve().parents[2]
APP = ROOT / "scripts" / "benchmarks" / "app.py"


class Fleet:
    """One coordinator, one LLM worker and one tool worker."""

    def __init__(self, directory: Path, partitions: int, environment: dict[str, str], profile: Path | None) -> None:
        self.server = ensure_server(directory / "valkey")
        self.url = self.server.url
        self.redis = redis.Redis.from_url(self.url)
        self._profile = profile
        self._environment = {
            **os.environ,
            "TURNMILL_REDIS_URL": self.url,
            "TURNMILL_PARTITIONS": str(partitions),
            "TURNMILL_LOG_LEVEL": "warning",
            "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("protocol", "runtime", "workers")),
            **environment,
        }
        self.partitions = partitions
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        self._spawn("coordinator", "coordinator")
        self._spawn("llm", "worker", "llm", str(APP), "--concurrency", "512")
        self._spawn("tools", "worker", "tools", str(APP), "--concurrency", "512")
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            leases = sum(self.redis.exists(f"tm:{{{number}}}:lease") for number in range(self.partitions))
            if leases == self.partitions and self.redis.hlen("tm:workers") == 2:
                return
            time.sleep(0.05)
        raise SystemExit("the fleet did not get ready")

    def _spawn(self, name: str, *arguments: str) -> None:
        command = [sys.executable]
        if self._profile is not None:
            command += ["-m", "cProfile", "-o", str(self._profile / f"{name}.pstats")]
        command += ["-m", "turnmill.runtime", *arguments]
        self.processes[name] = subprocess.Popen(command, env=self._environment)

    def cpu_seconds(self) -> dict[str, float]:
        pids = {name: process.pid for name, process in self.processes.items()}
        pids["client"] = os.getpid()
        pids["server"] = self.redis.info("server")["process_id"]
        times = {name: psutil.Process(pid).cpu_times() for name, pid in pids.items()}
        return {name: spent.user + spent.system for name, spent in times.items()}

    def engine_counters(self) -> dict[str, int]:
        """Calls of each command since the server started, and bytes in and out."""
        statistics = self.redis.info("commandstats")
        counters = {name.removeprefix("cmdstat_"): values["calls"] for name, values in statistics.items()}
        counters.update({f"us:{name.removeprefix('cmdstat_')}": values["usec"] for name, values in statistics.items()})
        network = self.redis.info("stats")
        counters["bytes"] = network["total_net_input_bytes"] + network["total_net_output_bytes"]
        counters["bytes_in"] = network["total_net_input_bytes"]
        return counters

    def stop(self) -> None:
        for process in self.processes.values():
            process.terminate()
        for process in self.processes.values():
            process.wait(30)
        self.redis.close()
        self.server.stop()


@contextmanager
def fleet(partitions: int, environment: dict[str, str] | None = None, profile: Path | None = None) -> Iterator[Fleet]:
    directory = Path(tempfile.mkdtemp(prefix="tm-bench-", dir="/tmp"))
    running = Fleet(directory, partitions, environment or {}, profile)
    try:
        running.start()
        yield running
    finally:
        running.stop()
        shutil.rmtree(directory, ignore_errors=True)
