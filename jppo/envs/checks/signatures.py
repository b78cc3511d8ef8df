"""Checks of the return values of environments on the device, by tracing: the checks jit, contract and carry."""

from collections.abc import Iterator
from typing import Any

import jax

from jppo.envs.action_spaces import action_spec_of
from jppo.envs.base import Environment, Step
from jppo.envs.checks.report import Check, passed, report_exceptions, report_refusals, warning
from jppo.envs.contract import BrokenContractError, describe_returned
from jppo.envs.device_contract import (
    check_methods,
    check_same,
    describe_leaf,
    is_number,
    shape_inputs,
    trace_anew,
    trace_env,
    trace_reset,
)
from jppo.envs.spaces import PyTree


def judge_functions(env: Environment) -> Iterator[Check]:
    """Yields the results of jit, contract and carry for the functions of an `Environment`."""
    lead = (env.num_agents,) if env.num_agents > 1 else ()
    key, action = shape_inputs(env.action_spec, lead)
    with report_exceptions("jit", "tracing reset and step"):
        obs, state = trace_reset(env.reset, key)
        after = trace_anew(env.step, key, state, action)
    yield passed("jit", "reset and step can be traced")
    if not isinstance(after, Step):
        raise BrokenContractError(f"step returned {describe_returned(after)}, not a Step", "return jppo.Step(...)")
    check_same("observations", obs, "step", after.obs)
    check_same("observations", obs, "step (final_obs)", after.final_obs)
    if lead:
        _check_lead(obs, env)
    wanted = {"reward": "float32", "terminated": "bool", "truncated": "bool"} | ({"active": "bool"} if lead else {})
    for name, dtype in wanted.items():
        leaf, right = getattr(after, name), describe_leaf(jax.ShapeDtypeStruct(lead, dtype))
        if getattr(leaf, "shape", None) != lead or not (leaf.dtype == bool if dtype == "bool" else is_number(leaf)):
            found = describe_leaf(leaf) if hasattr(leaf, "dtype") else repr(leaf)
            raise BrokenContractError(f"{name} is {found}, not {right}", f"return {right}")
    if not lead and jax.tree.leaves(after.active):
        raise BrokenContractError("active is not (), but num_agents is 1", "set num_agents, or return active = ()")
    yield passed("contract", "reset and step return the right shapes and dtypes")
    check_same("state", state, "step", after.state, check="carry")
    yield passed("carry", "the state has the same arrays after reset and step")


def _check_lead(obs: PyTree, env: Environment) -> None:
    """Raises BrokenContractError if the observations of several agents have wrong shapes."""
    leaves = zip(jax.tree_util.tree_flatten_with_path(obs)[0], jax.tree.leaves(env.obs_spec), strict=False)
    for (path, leaf), spec in leaves:
        if leaf.shape != (shape := (env.num_agents, *spec.shape)):
            name = f"the observation{jax.tree_util.keystr(path)} of {env.num_agents} agents"
            problem = f"{name} has the shape {list(leaf.shape)}, not {list(shape)}"
            raise BrokenContractError(problem, "stack the observations of all agents", check="spaces")


def judge_source(source: Any, params: Any) -> Iterator[Check]:
    """Yields the results of jit, contract and carry for gymnax's API. `make_env` does not require all types of step."""
    check_methods(source, params)
    params = source.default_params if params is None else params
    with report_exceptions("contract", "action_space"), report_refusals():
        action_spec = action_spec_of(type(source).__name__, source.action_space(params))
    with report_exceptions("jit", "tracing reset and step"):
        _, (_, _, reward, terminated, truncated, _) = trace_env(source, params, action_spec)
    yield passed("jit", "reset and step can be traced")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if flag.dtype != bool or flag.shape:
            raise BrokenContractError(f"{name} is {describe_leaf(flag)}, not bool[]", "return a scalar bool")
    if not is_number(reward):
        raise BrokenContractError(f"reward is {describe_leaf(reward)}, not a number", "return a scalar float")
    if reward.shape:
        yield warning("contract", f"reward is {describe_leaf(reward)}, not a scalar", "return a scalar")
    else:
        yield passed("contract", "reset returns two values and step six, with the right types")
    yield passed("carry", "the state has the same arrays after reset and step")
