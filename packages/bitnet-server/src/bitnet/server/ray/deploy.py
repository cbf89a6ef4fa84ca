"""``bitnet serve --ray``: deploys the application, waits for a signal, and drains it."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.schema import ApplicationStatus

from bitnet.core.cli.console import note
from bitnet.core.errors import BitNetError
from bitnet.server.http.listening import IDLE_SECONDS, Listen
from bitnet.server.ray import cluster, config_file
from bitnet.server.ray.application import application
from bitnet.server.ray.plan import APPLICATION, Plan

PROXY_BY_GRPC = "RAY_SERVE_PROXY_USE_GRPC"
"""Environment variable by which Serve's proxies get chunks from the ingress by gRPC, which costs less than Ray's calls.
The processes of a cluster that starts here inherit it."""
ROUTE_SECONDS = 20.0
"""Seconds within which each node's proxy must know the application, once it runs."""
LOOK_SECONDS = 2.0
"""Seconds between two looks at whether the application is still there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """Where to deploy, and how much of the cluster a replica gets.

    Attributes:
        address: As for :func:`~bitnet.server.ray.cluster.connected`.
        gpus: GPUs of a replica; None: one if the cluster has any.
        cpus: CPUs of a replica; None: those of the nodes, shared equally, or one beside a GPU.
        write_config: File to write the Serve config to, instead of deploying.
    """

    address: str | None
    gpus: float | None
    cpus: int | None
    write_config: Path | None


def serve_on_ray(plan: Plan, wanted: Wanted, listen: Listen) -> None:
    """Deploy and serve until a signal ends it, or write a config file.

    Raises:
        BitNetError: There is no such cluster, it lacks room, a node cannot read a model, or no replica starts.
    """
    http = {
        "host": listen.host,
        "port": listen.port,
        "keep_alive_timeout_s": IDLE_SECONDS,
        "ssl_certfile": None if listen.ssl_certfile is None else str(listen.ssl_certfile.absolute()),
        "ssl_keyfile": None if listen.ssl_keyfile is None else str(listen.ssl_keyfile.absolute()),
    }
    http = {name: value for name, value in http.items() if value is not None}
    route = listen.root_path or "/"
    if wanted.write_config is not None:
        plan = replace(plan, gpus=wanted.gpus or 0.0, cpus=float(wanted.cpus or 1))
        config_file.write(wanted.write_config, config_file.document(plan, http, route, listen.log_format))
        return
    logging.getLogger("ray.serve").setLevel(logging.ERROR)  # in this process; the replicas have logs of their own
    os.environ.setdefault(PROXY_BY_GRPC, "1")
    with cluster.connected(wanted.address), _stopped_by_signal() as stop:  # Ray has handlers, too, which end at once
        found = cluster.nodes()
        plan = _fitted(plan, wanted, found)
        cluster.check_room(found, (plan.replicas or 1) * plan.deployments, plan.cpus, plan.gpus)
        cluster.check_models(found, [file for _, file in plan.models], plan.folder)
        _listen(http)
        anew = APPLICATION not in serve.status().applications
        try:
            _deploy(plan, route, listen)
            url = f"{'https' if listen.ssl_certfile else 'http'}://{listen.host}:{listen.port}{listen.root_path}"
            _check_answers(url)
            names = [name for own, _ in plan.models for name in own]
            names += [] if plan.folder is None else [f"the models in {plan.folder}"]
            count = "as many replicas as needed" if plan.replicas is None else f"{plan.replicas} replicas"
            note(f"Serving {', '.join(names)} on {count} at {url}", f"Logs: {_logs()}")
            while not stop.wait(LOOK_SECONDS):
                _check_running()
        except BaseException:
            if anew:
                _delete(wanted)
            raise
        _delete(wanted)


def _fitted(plan: Plan, wanted: Wanted, found: list[cluster.Node]) -> Plan:
    """The plan with the CPUs and GPUs that a replica gets on this cluster, and as many threads."""
    cpus, gpus = cluster.share(found, plan.replicas, wanted.cpus, wanted.gpus, plan.deployments)
    return replace(plan, gpus=gpus, cpus=float(cpus), options=cluster.with_threads(plan.options, cpus, gpus))


def _listen(http: dict[str, Any]) -> None:
    """Have every node listen, unless Serve runs on the cluster already.

    Raises:
        BitNetError: A node cannot: the port is taken, or the address is another machine's.
    """
    try:
        serve.start(http_options=http, proxy_location="EveryNode")
    except RayError as error:
        serve.shutdown()
        raise BitNetError(
            f"Serve cannot listen at {http['host']}:{http['port']} on every node: {cluster.last_line(error)}",
            hint="Another program may have the port: name a free one with --port.",
        ) from None


def _deploy(plan: Plan, route: str, listen: Listen) -> None:
    """Deploy the application and wait until it runs."""
    try:
        logs = {"encoding": listen.log_format.upper()}
        serve.run(application(plan), name=APPLICATION, route_prefix=route, logging_config=logs)
    except RayError as error:
        raise cluster.failure(error, "the application cannot be deployed") from None
    except RuntimeError as error:
        raise BitNetError(f"the replicas did not start: {_failure() or error}", hint=f"Logs: {_logs()}") from None


def _check_running() -> None:
    """Raise an error if somebody else has deleted the application."""
    if APPLICATION not in serve.status().applications:
        raise BitNetError(f"the application {APPLICATION} was deleted from the cluster.")


def _check_answers(url: str) -> None:
    """Raise an error if the application is at another address: Serve listens where it was first told to.

    A proxy may hear of the application after it runs, so it has :data:`ROUTE_SECONDS` to answer.
    """
    ends = time.monotonic() + ROUTE_SECONDS
    while not _answers(url):
        if time.monotonic() > ends:
            raise BitNetError(
                f"nothing answers at {url}: Serve ran on this cluster already, and listens elsewhere.",
                hint="Name that address with --host and --port, or end it with 'serve shutdown'.",
            )
        time.sleep(0.5)


def _answers(url: str) -> bool:
    """Whether the application is at an address."""
    try:
        urllib.request.urlopen(f"{url}/health", timeout=30).close()
    except urllib.error.HTTPError as error:
        error.close()
        return error.code != 404
    except OSError as error:
        return "CERTIFICATE" in str(error).upper()
    return True


def _failure() -> str | None:
    """Why a replica did not start: the last line of its traceback."""
    found = serve.status().applications.get(APPLICATION)
    if found is None:
        return None
    for deployment in found.deployments.values():
        lines = [line for line in deployment.message.splitlines() if re.match(r"[\w.]+(Error|Exception): ", line)]
        if lines:
            return lines[-1].partition(": ")[2]
    return found.message if found.status is ApplicationStatus.DEPLOY_FAILED else None


def _delete(wanted: Wanted) -> None:
    """Delete the application; its replicas first finish what they compute. If nothing else runs on a cluster that goes
    on, Serve ends, too."""
    serve.delete(APPLICATION)
    if wanted.address is not None and not serve.status().applications:
        serve.shutdown()


def _logs() -> Path:
    """Where the logs are, on each node."""
    context = ray.get_runtime_context()
    return Path(context.get_temp_dir(), context.get_session_name(), "logs", "serve")


@contextmanager
def _stopped_by_signal() -> Iterator[threading.Event]:
    """An event that is set by the first signal to end; the second one ends the process at once."""
    stop = threading.Event()

    def end(number: int, frame: object) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
