"""What is deployed, and whether it fits a cluster."""

from __future__ import annotations

import json

import pytest

from bitnet.core.errors import BitNetError, InvalidInputError
from bitnet.server import Settings
from bitnet.server.ray.plan import Plan

PLAN = Plan(
    models=((("small", "tiny"), "/models/small.gguf"), (("demo",), None)),
    options={"device": None, "threads": 2},
    settings=Settings(
        api_keys=("secret",), cors=("https://example.org",), max_queue=5, model_aliases=(("claude-*", "small"),)
    ),
    folder="/models",
    replicas=None,
    gpus=0.5,
)


def test_a_plan_survives_its_document_and_leaves_the_keys_out() -> None:
    text = json.dumps(PLAN.document())
    assert "secret" not in text
    assert Plan.read(json.loads(text), ("secret",)) == PLAN
    assert PLAN.deployments == 3


@pytest.mark.parametrize(
    "change", [{"modls": []}, {"models": [{"file": None}]}, {"settings": {"colour": 1}}, {"settings": None}]
)
def test_a_document_that_is_no_plan_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(InvalidInputError, match=r"arguments of the Serve application"):
        Plan.read({**PLAN.document(), **change})


def test_room_is_counted_by_node() -> None:
    pytest.importorskip("ray", reason="needs Ray (the group `ray`)")
    from bitnet.server.ray.cluster import Node, check_room

    found = [Node("a", "192.0.2.1", 8, 2), Node("b", "192.0.2.2", 4, 1)]
    assert [node.holds(1, 1) for node in found] == [2, 1]
    assert [node.holds(1, 0.5) for node in found] == [4, 2]
    assert [node.holds(1, 0.4) for node in found] == [4, 2]  # two on each GPU
    assert [node.holds(1, 2) for node in found] == [1, 0]
    assert [node.holds(3, 0) for node in found] == [2, 1]
    check_room(found, 3, 1, 1)
    with pytest.raises(
        BitNetError, match=r"no room for 4 replicas of 1 CPU and 1 GPU: 2 nodes with 12 CPUs and 3 GPUs have room for 3"
    ):
        check_room(found, 4, 1, 1)
    with pytest.raises(
        BitNetError, match=r"no room for 1 replica of 9 CPUs: 1 node with 8 CPUs and 2 GPUs has room for 0"
    ):
        check_room(found[:1], 1, 9, 0)


@pytest.mark.parametrize(
    ("replicas", "deployments", "cpus"), [(1, 1, 8), (2, 1, 4), (1, 2, 4), (2, 2, 2), (None, 1, 8), (None, 4, 2)]
)
def test_the_replicas_of_all_models_share_the_cpus(replicas: int | None, deployments: int, cpus: int) -> None:
    pytest.importorskip("ray", reason="needs Ray (the group `ray`)")
    from bitnet.server.ray.cluster import Node, check_room, share

    found = [Node("a", "192.0.2.1", 8, 0)]
    assert share(found, replicas, None, None, deployments) == (cpus, 0)
    check_room(found, (replicas or 1) * deployments, cpus, 0)
