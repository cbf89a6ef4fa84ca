"""The Serve application: an ingress, an index, and replicas of each model."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from bitnet.server.ray.engine import Engine
from bitnet.server.ray.engine_settings import EngineSettings
from bitnet.server.ray.index import Index
from bitnet.server.ray.ingress import Ingress, IngressSettings
from bitnet.server.ray.multiplexed import FolderSettings, MultiplexedEngine
from bitnet.server.ray.plan import Plan
from bitnet.server.ray.replica import HEALTH_SECONDS
from bitnet.server.ray.router import PrefixRouter
from bitnet.server.ray.scoring import BETA

MAX_ONGOING = 100_000
"""Requests that Serve admits to the ingress, whose own limits are lower and whose refusals say more."""
MAX_REPLICAS = 100
"""Maximum replicas of a model that scales with its load; those that the cluster has no room for wait for it."""
HEALTH_TIMEOUT = 30.0
LOOK_BACK_SECONDS = 10.0
"""Seconds over which the load is averaged before the number of replicas follows it; replicas tell it every 10."""
UPSCALE_SECONDS, DOWNSCALE_SECONDS, IDLE_SECONDS = 5.0, 60.0, 300.0
"""Seconds for which there must have been too few replicas, too many, or nothing to do at all."""
ON_HEAD = {"node:__internal_head__": 0.001}
"""Resources of the deployments that every request needs: they are on the one node that a cluster cannot lose."""
ONE_LOOP = {
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
}
"""Environment of ingress and engines: Serve's work and ours share an event loop, so no chunk waits for a thread."""
MAX_INLINE_BYTES = 256 << 20
INLINE = dict.fromkeys(("RAY_max_direct_call_object_size", "RAY_task_rpc_inlined_bytes_limit"), str(MAX_INLINE_BYTES))
"""Environment of the ingress: answers of more than 100 kB go to Serve's proxy in a message, too, so that a full object
store does not fail them. Ray's own maximum of a message is 512 MiB."""


def build(arguments: dict[str, Any]) -> Application:
    """The application that a Serve config file describes: its ``import_path`` names this function.

    API keys are not in that file: ``BITNET_API_KEY`` holds them, where this runs.
    """
    return application(Plan.read(arguments, tuple(os.environ.get("BITNET_API_KEY", "").split())))


def application(plan: Plan) -> Application:
    """The application of a plan."""
    engines = [EngineSettings(file, plan.options) for _, file in plan.models]
    quiet = {"enable_access_log": False}  # it is called several times a second
    index = serve.deployment(Index).options(
        name="prefixes",
        ray_actor_options={"num_cpus": 0, "resources": ON_HEAD},
        logging_config=quiet,
        max_ongoing_requests=1000,
    )
    prefixes = index.bind()
    deployed = [
        _deployment(Engine, plan, "engine" if len(engines) == 1 else f"engine-{i}").bind(settings, prefixes)
        for i, settings in enumerate(engines)
    ]
    if plan.folder is not None:
        folder = FolderSettings(plan.folder, plan.options, plan.settings)
        deployed.append(_deployment(MultiplexedEngine, plan, "folder").bind(folder, prefixes))
    models = tuple((names, settings) for (names, _), settings in zip(plan.models, engines, strict=True))
    ingress = serve.deployment(Ingress).options(
        name="ingress",
        ray_actor_options={"num_cpus": 0, "resources": ON_HEAD, "runtime_env": {"env_vars": ONE_LOOP | INLINE}},
        max_ongoing_requests=MAX_ONGOING,
        health_check_period_s=HEALTH_SECONDS,
        graceful_shutdown_timeout_s=plan.drain + 5,
        graceful_shutdown_wait_loop_s=0.5,
    )
    layout = plan.options.get("i2s_layout", "official")
    given = IngressSettings(models, plan.settings, plan.local, plan.folder, layout)
    return ingress.bind(given, prefixes, *deployed)


def _deployment(kind: type[Any], plan: Plan, name: str) -> Any:
    """The deployment of a model's replicas, or of those of a folder's models."""
    places = plan.settings.max_seqs
    scale: Mapping[str, Any] = {"num_replicas": plan.replicas}
    if plan.replicas is None:
        policy = AutoscalingPolicy(
            policy_function="bitnet.server.ray.policy:TokenPolicy", policy_kwargs={"places": places}
        )
        by_load = AutoscalingConfig(
            min_replicas=plan.min_replicas,
            initial_replicas=max(1, plan.min_replicas),  # a model that does not load is an error now
            max_replicas=MAX_REPLICAS,
            policy=policy,
            look_back_period_s=LOOK_BACK_SECONDS,
            upscale_delay_s=UPSCALE_SECONDS,
            downscale_delay_s=DOWNSCALE_SECONDS,
            downscale_to_zero_delay_s=IDLE_SECONDS,
        )
        scale = {"autoscaling_config": by_load}
    return serve.deployment(kind).options(
        name=name,
        ray_actor_options={"num_cpus": plan.cpus, "num_gpus": plan.gpus, "runtime_env": {"env_vars": ONE_LOOP}},
        max_ongoing_requests=2 * places,  # the next ones are at hand when a place is free
        max_queued_requests=max(1, plan.settings.max_queue),
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"places": places, "beta": BETA},
        ),
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_TIMEOUT,
        graceful_shutdown_timeout_s=plan.drain,
        graceful_shutdown_wait_loop_s=0.5,
        **scale,
    )
