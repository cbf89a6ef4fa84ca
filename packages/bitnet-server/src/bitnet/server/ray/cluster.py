"""The cluster that a command deploys to: connecting to it, and checking it before anything is deployed."""

from __future__ import annotations

import logging
import math
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bitnet.core import __version__
from bitnet.core.errors import BitNetError, InvalidInputError
from bitnet.core.gguf import GGUFFile
from bitnet.core.hub import local_path
from bitnet.core.model.default import default_model_path
from bitnet.server.models.folder import models_in, stored_bytes

CONNECT_SECONDS = 5.0
STORE_BYTES = 128 << 20
"""Size of the object store of a cluster that this process starts; no message is large."""
CHECK_SECONDS = 3600.0
"""Seconds within which every node must have checked its models; one from the hub is downloaded meanwhile."""
STORED_BYTES = 1 << 20
"""Size of the object that every node's object store must have room for. Ray stores messages from 100 kB on there."""
FULL = (ObjectStoreFullError, OutOfDiskError)
"""Errors of a full object store; the latter if Ray cannot move objects to the node's disk, either."""
START = "Start one with 'ray start --head', or leave --address out for one on this machine."


@contextmanager
def connected(address: str | None) -> Iterator[None]:
    """In this context, this process is connected to a cluster.

    Args:
        address: ``auto`` for the one that this machine belongs to, or ``HOST:PORT``; None: one that ends with this
            context.

    Raises:
        BitNetError: There is none, or it is one of another version.
    """
    if address is not None and address != "auto":
        _check_answers(address)
    try:
        options = {} if address is not None else {"include_dashboard": False, "object_store_memory": STORE_BYTES}
        ray.init(address=address or "local", log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # Ray raises Exception itself if a node takes too long to start
        raise _connection_error(address, error) from None
    try:
        yield
    finally:
        ray.shutdown()


def _check_answers(address: str) -> None:
    """Raise an error unless something listens at ``HOST:PORT``: Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    if "://" in address or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidInputError(
            f"--address is {address}; it must be auto, or HOST:PORT of a cluster that this machine belongs to."
        )
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        raise BitNetError(f"no Ray cluster answers at {address}: {error.strerror or error}.", hint=START) from None


def _connection_error(address: str | None, error: Exception) -> BitNetError:
    found = dict(re.findall(r"^ +(Ray|Python): (\S+)$", str(error), re.MULTILINE)[:2])
    if "Version mismatch" in str(error) and found:
        import platform

        return BitNetError(
            f"the cluster runs Ray {found.get('Ray')} on Python {found.get('Python')}, and this is Ray "
            f"{ray.__version__} on Python {platform.python_version()}.",
            hint="Install the same versions of both on every machine.",
        )
    if address is None:
        return BitNetError(f"Ray cannot start on this machine: {_line(error)}")
    where = "on this machine" if address == "auto" else f"at {address} that this machine belongs to"
    hint = f"{START} If it wants a token, set RAY_AUTH_MODE=token."
    return BitNetError(f"there is no Ray cluster {where}: {_line(error)}", hint=hint)


def _line(error: BaseException) -> str:
    """The first sentence of an error of Ray's, which may have many lines."""
    return str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".") + "."


def failure(error: RayError, what: str) -> BitNetError:
    """The error of a command whose work on the cluster failed.

    Args:
        what: What failed, as the subject of a sentence and its verb, such as ``"the replicas failed"``.
    """
    if isinstance(error, FULL):
        return BitNetError(
            f"{what}: an object store of the cluster is full, and so is the disk beside it.",
            hint="'ray memory' shows what fills it. 'ray start --object-store-memory' makes it larger.",
        )
    return BitNetError(f"{what}: {last_line(error)}")


def last_line(error: BaseException) -> str:
    """The last line of an error of Ray's that holds a traceback: what was raised first."""
    lines = [line for line in str(error).splitlines() if re.match(r"[\w.]+(Error|Exception): ", line)]
    return lines[-1].partition(": ")[2] if lines else _line(error)


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the cluster and what replicas could have of it.

    Attributes:
        id: Ray's id of the node.
        address: Its IP address.
    """

    id: str
    address: str
    cpus: float
    gpus: float

    def holds(self, cpus: float, gpus: float) -> int:
        """Number of replicas that fit. A replica's share of a GPU is of one GPU."""
        by_cpu = math.inf if cpus == 0 else self.cpus // cpus
        if gpus == 0:
            return int(min(by_cpu, 1 << 20))
        by_gpu = self.gpus // gpus if gpus >= 1 else self.gpus // 1 * (1 // gpus)
        return int(min(by_cpu, by_gpu))


def nodes() -> list[Node]:
    """The machines of the cluster."""
    return [
        Node(n["NodeID"], n["NodeManagerAddress"], n["Resources"].get("CPU", 0.0), n["Resources"].get("GPU", 0.0))
        for n in ray.nodes()
        if n["Alive"]
    ]


def share(
    found: Sequence[Node], replicas: int | None, cpus: int | None, gpus: float | None, deployments: int = 1
) -> tuple[int, float]:
    """The CPUs and GPUs of a replica.

    Args:
        replicas: Number of replicas of a deployment; None: one a node.
        cpus: What was asked for; None: those of the nodes, shared equally, or one beside a GPU.
        gpus: What was asked for; None: one if the cluster has any.
        deployments: Number of deployments, each of which has so many replicas.
    """
    if gpus is None:
        gpus = 1.0 if any(node.gpus >= 1 for node in found) else 0.0
    if cpus is None:
        able = [int(node.cpus) for node in found if node.cpus >= 1] or [1]
        each = math.ceil((replicas or len(able)) * deployments / len(able))
        cpus = 1 if gpus else max(1, min(able) // each)
    return cpus, gpus


def with_threads(options: Mapping[str, Any], cpus: int, gpus: float) -> dict[str, Any]:
    """Arguments of :func:`~bitnet.core.load_model` for a replica: on CPUs, as many threads as it has of them."""
    threads = cpus if options.get("threads") is None and not gpus else options.get("threads")
    return {**options, "threads": threads}


def check_room(found: Sequence[Node], replicas: int, cpus: float, gpus: float) -> None:
    """Check that the cluster has room for replicas.

    Raises:
        BitNetError: It has not; the message says what it has.
    """
    fit = sum(node.holds(cpus, gpus) for node in found)
    if fit >= replicas:
        return
    has = _processors(sum(node.cpus for node in found), sum(node.gpus for node in found))
    each = _processors(cpus, gpus) if gpus else _counted(cpus, "CPU")
    raise BitNetError(
        f"the cluster has no room for {_counted(replicas, 'replica')} of {each}: {_counted(len(found), 'node')} with "
        f"{has} {'has' if len(found) == 1 else 'have'} room for {fit}.",
        hint="Lower --replicas, --gpus-per-replica or --threads, or add nodes.",
    )


def _processors(cpus: float, gpus: float) -> str:
    return f"{_counted(cpus, 'CPU')} and {_counted(gpus, 'GPU')}"


def _counted(number: float, what: str) -> str:
    return f"{number:g} {what}" if number == 1 else f"{number:g} {what}s"


def check_models(found: Sequence[Node], models: Sequence[str | None], folder: str | None = None) -> None:
    """Check that every node has this bitnet, can read every model, which it downloads if it is from the hub, and has
    room in its object store.

    Args:
        folder: A folder whose models every node must have, too.

    Raises:
        BitNetError: A node cannot.
    """
    task = ray.remote(num_cpus=0, max_retries=0)(_checked)
    asked = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False)).remote(
            list(models), folder
        )
        for node in found
    ]
    sizes: dict[str | None, tuple[int, Node]] = {}
    in_folder: tuple[dict[str, int], Node] | None = None
    for node, answer in zip(found, asked, strict=True):
        version, said, within = _answer(node, answer)
        if version != __version__:
            raise BitNetError(
                f"node {node.address} has bitnet {version}, and this is {__version__}.",
                hint="Install the same version on every node.",
            )
        for model, size in zip(models, said, strict=True):
            if isinstance(size, str):
                raise BitNetError(
                    f"node {node.address} cannot read the model: {size}",
                    hint="Put the file at the same path on every node, or name one on the hub (hf:ORG/NAME).",
                )
            known, first = sizes.setdefault(model, (size, node))
            if size != known:
                raise BitNetError(
                    f"the nodes have different files at {model}: {known:,} bytes on {first.address}, {size:,} on "
                    f"{node.address}."
                )
        if isinstance(within, str):
            raise BitNetError(
                f"node {node.address} cannot read --models {folder}: {within}",
                hint="Put the folder at the same path on every node, or share it.",
            )
        if in_folder is None:
            in_folder = within, node
        elif differing := sorted(name for name, _ in in_folder[0].items() ^ within.items()):
            raise BitNetError(
                f"the nodes have different models in {folder}: {differing[0]} is not the same on "
                f"{in_folder[1].address} and {node.address}.",
                hint="Share the folder, or copy it to every node.",
            )


def _answer(node: Node, answer: Any) -> tuple[str, list[int | str], dict[str, int] | str]:
    try:
        return ray.get(answer, timeout=CHECK_SECONDS)
    except FULL as error:
        raise failure(error, f"node {node.address} cannot take part") from None
    except RayError as error:
        missing = re.search(r"No module named '(\S+)'", str(error))
        if missing is not None:
            raise BitNetError(
                f"node {node.address} lacks the Python module {missing[1]}.",
                hint="Install bitnet-server[ray], and the same Python, on every node.",
            ) from None
        raise BitNetError(f"node {node.address} does not answer: {_line(error)}") from None


def _checked(models: list[str | None], folder: str | None) -> tuple[str, list[int | str], dict[str, int] | str]:
    """On a node: what :func:`_sizes` finds.

    Raises:
        ObjectStoreFullError, OutOfDiskError: The node's object store has no room for :data:`STORED_BYTES`.
    """
    ray.put(bytes(STORED_BYTES))
    return _sizes(models, folder)


def _sizes(models: list[str | None], folder: str | None) -> tuple[str, list[int | str], dict[str, int] | str]:
    """On a node: the version of bitnet, and the bytes of each model, and of each in the folder, or why they cannot be
    read."""
    sizes: list[int | str] = []
    for model in models:
        try:
            sizes.append(GGUFFile(default_model_path() if model is None else local_path(model)).size)
        except (BitNetError, OSError) as error:
            sizes.append(str(error))
    try:
        within = {} if folder is None else {name: stored_bytes(path) for name, path in models_in(Path(folder)).items()}
    except OSError as error:
        return __version__, sizes, f"{error.strerror or error}."
    return __version__, sizes, within
