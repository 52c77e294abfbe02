"""A tool worker without Turnmill: plain commands of redis-py and JSON, written from protocol/README.md alone."""

import base64
import json
import os
import secrets
import threading
import time

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

PREFIX, QUEUE = os.environ.get("TURNMILL_NAMESPACE", "tm"), "foreign"
ME = f"{os.environ.get('WORKER_NAME', 'foreign')}@{secrets.token_hex(6)}"
LIVENESS_SECONDS = float(os.environ.get("TURNMILL_LIVENESS_SECONDS", "5"))
# No retries: a read whose reply was lost has left entries with me that I do not know of. Better to end, and be replaced.
r = redis.Redis.from_url(os.environ["TURNMILL_REDIS_URL"], protocol=2, retry=Retry(NoBackoff(), 0))
BASES = [f"{PREFIX}:{{{number}}}:" for number in range(int(r.hget(f"{PREFIX}:namespace", "partitions") or 4))]


def count_letters(progress, stopped, text, gate=None, **_):
    for word in text.split():
        progress(f"counted {word}")
    while gate and not r.exists(gate):  # where the tests hold a call open
        if stopped():
            raise InterruptedError("stopped")
        time.sleep(0.01)
    return len(text.replace(" ", ""))


def refuse(progress, stopped, reason, **_):
    raise ValueError(reason)


TOOLS = {"count_letters": (count_letters, {"text": {"type": "string"}, "gate": {"type": "string"}}, True)}
TOOLS |= {"refuse": (refuse, {"reason": {"type": "string"}}, False)}


def beat():
    for base in BASES:
        r.set(f"{base}alive:{ME}", 1, px=int(LIVENESS_SECONDS * 1000))
    r.hset(f"{PREFIX}:workers", ME, json.dumps({"id": ME, "role": "tools", "language": "any", "queues": [QUEUE]}))


def beat_on():
    while True:
        time.sleep(LIVENESS_SECONDS / 4)
        beat()


def run(stream, entry_id, fields):
    beat()  # first a sign of life, then the look at what is still mine: nobody can take it away between look and start
    if not r.xpending_range(stream, "workers", entry_id, entry_id, 1, ME):
        return
    results = stream.partition("tool:")[0] + "results"
    try:
        assert fields.get(b"t") == b"tool_task" and fields.get(b"v", b"1") == b"1", "no tool_task of version 1"
        kind, task = "tool_reply", json.loads(fields[b"d"])
        body = answer(results, task)
    except Exception as error:  # not mine to read: the coordinator keeps it with the dead letters
        body = {"stream": stream, "entry_id": entry_id.decode(), "reason": str(error)}
        body |= {"entry_type": fields.get(b"t", b"").decode(errors="replace")}
        kind, body["entry_body"] = "unreadable_task", base64.b64encode(fields.get(b"d", b"")).decode()
    pipe = r.pipeline(transaction=True).xadd(results, {"t": kind, "d": json.dumps(body)})
    added = pipe.xack(stream, "workers", entry_id).xdel(stream, entry_id).execute(raise_on_error=False)[0]
    while isinstance(added, Exception):  # MULTI does not roll back: the task is gone, its result must not be
        time.sleep(0.2)
        added = r.xadd(results, {"t": kind, "d": json.dumps(body)})


def answer(results, task):
    echo = {name: task[name] for name in ("session_id", "turn_id", "call", "attempt", "token")}
    result, said = {"tool_call_id": task["tool_call_id"], "tool_name": task["tool"]}, []

    def progress(message):
        said.append(message)
        body = echo | {"sequence": len(said), "message": message}
        r.xadd(results, {"t": "tool_progress", "d": json.dumps(body)})

    def stopped():  # the turn's marker; a tool that takes long looks at it now and then
        return r.exists(results.removesuffix("results") + f"cancel:{task['turn_id']}")

    try:
        if stopped():
            raise InterruptedError("stopped before it began")
        if r.time()[0] * 1000 > task["start_by_ms"]:
            raise TimeoutError("the call came too late to start")
        result["result"] = TOOLS[task["tool"]][0](progress, stopped, **task["arguments"])
    except InterruptedError as error:
        return echo | {"error": {"kind": "aborted", "message": str(error)}}
    except Exception as error:  # a tool's failure is an answer to the model
        result |= {"result": f"Error: execution failed ({error})", "is_error": True}
    return echo | {"result": result}


for name, (_, properties, idempotent) in TOOLS.items():
    spec = {"name": name, "queue": QUEUE, "idempotent": idempotent, "timeout_seconds": 30}
    spec["schema"] = {"type": "object", "properties": properties}
    r.hset(f"{PREFIX}:tools", name, json.dumps(spec))
STREAMS = {f"{base}tool:{QUEUE}": ">" for base in BASES}
for stream in STREAMS:
    try:
        r.xgroup_create(stream, "workers", "0", mkstream=True)
    except redis.ResponseError as error:
        if "BUSYGROUP" not in str(error):
            raise
beat()
threading.Thread(target=beat_on, daemon=True).start()
while True:
    for stream, entries in r.xreadgroup("workers", ME, STREAMS, 1, block=int(LIVENESS_SECONDS * 333)) or []:
        for entry_id, fields in entries:
            threading.Thread(target=run, args=(stream.decode(), entry_id, fields)).start()
