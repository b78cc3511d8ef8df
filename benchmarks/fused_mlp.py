"""An experiment for GPUs: the forward and the backward pass of the default network as one Pallas kernel each.

The outputs of hidden layers stay in registers. The forward kernel reads observations and writes the network's outputs,
both padded to the sizes of a GPU's matrix products. The backward kernel reads observations and gradients of the
outputs, computes the hidden layers again, and sums the gradients of the weights over its rows. XLA writes each layer's
output to memory and launches at least one kernel per product. The gain was not measured. On CPU, Pallas interprets the
kernels, for tests only. They need Pallas's Triton backend, which is deprecated since JAX 0.11.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jppo.envs.spaces import Array, PyTree
from jppo.networks.actor_critic import ActorCritic
from jppo.networks.distributions import Categorical, DiagGaussian

_ROWS = 64  # rows that a kernel computes at a time
_PROGRAMS = 128  # maximum number of programs per torso in the backward pass: about two per multiprocessor of an H100
_LEAST = 16  # smallest dimension of a product on tensor cores
_WIDEST = 128  # maximum width of the inputs and of a layer; the kernel is designed for 64

Weights = tuple[Array, ...]  # kernels and biases [2, ...] of the actor's and the critic's three layers, padded


class FusedActorCritic:
    """Computes the same function as `jppo.networks.actor_critic.ActorCritic` with two torsos of two tanh layers."""

    def __init__(self, network: ActorCritic) -> None:
        sizes = network.hidden_sizes
        plain = network.kind == "mlp" and network.activation == "tanh" and not network.shared_torso
        if (
            not plain
            or len(sizes) != 2
            or not all(_LEAST <= size <= _WIDEST and size == _padded(size) for size in sizes)
        ):
            raise ValueError(
                f"{network} is not supported; use two separate torsos of two tanh layers of 16, 32, 64 or 128"
            )
        self.network, self.init = network, network.init

    def apply(self, params: PyTree, obs: PyTree) -> tuple[Any, Array]:
        """Returns the distribution and the value [B] for observations with at most 128 numbers."""
        x = jnp.concatenate([leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(obs)], axis=1)
        if x.shape[1] > _WIDEST:
            raise ValueError(f"observations have {x.shape[1]} numbers; the kernel supports at most {_WIDEST}")
        rows = -len(x) % _ROWS
        x = jnp.pad(x, ((0, rows), (0, _padded(x.shape[1]) - x.shape[1])))
        weights, count = _weights_of(params["params"]), len(x) - rows
        outputs = _outputs(x, *weights)
        value, action = outputs[1, :count, 0], self.network.action
        if action.num_actions:
            return Categorical(outputs[0, :count, : action.num_actions]), value
        mean = outputs[0, :count, : action.size]
        return DiagGaussian(mean, jnp.broadcast_to(params["params"]["log_std"], mean.shape)), value


def _padded(size: int) -> int:
    return max(_LEAST, 1 << (size - 1).bit_length())


def _weights_of(params: PyTree) -> Weights:
    """Stacks the weights of both torsos, padded to powers of two."""
    layers = [[params[torso][f"Dense_{number}"] for torso in ("actor", "critic")] for number in (0, 1)]
    layers.append([params["policy"], params["value"]])
    weights: list[Array] = []
    for pair in layers:
        shapes = [layer["kernel"].shape for layer in pair]
        inputs, outputs = (_padded(max(shape[side] for shape in shapes)) for side in (0, 1))
        kernels = [jnp.pad(w["kernel"], [(0, inputs - len(w["kernel"])), (0, outputs - len(w["bias"]))]) for w in pair]
        weights.append(jnp.stack(kernels))
        weights.append(jnp.stack([jnp.pad(w["bias"], (0, outputs - len(w["bias"])))[None] for w in pair]))
    return tuple(weights)


@jax.custom_vjp
def _outputs(x: Array, *weights: Array) -> Array:
    """Returns the outputs [2, B, O] for inputs x [B, I]; B is a multiple of _ROWS."""
    blocks, width = len(x) // _ROWS, weights[-1].shape[-1]
    return pl.pallas_call(
        _forward,
        grid=(2, blocks),
        in_specs=[pl.BlockSpec((_ROWS, x.shape[1]), lambda torso, block: (block, 0)), *map(_of_torso, weights)],
        out_specs=pl.BlockSpec((1, _ROWS, width), lambda torso, block: (torso, block, 0)),
        out_shape=jax.ShapeDtypeStruct((2, len(x), width), x.dtype),
        **_how(),
    )(x, *weights)


def _outputs_fwd(x: Array, *weights: Array) -> tuple[Array, tuple[Array, Weights]]:
    return _outputs(x, *weights), (x, weights)


def _outputs_bwd(kept: tuple[Array, Weights], cotangent: Array) -> tuple[Array, ...]:
    x, weights = kept
    blocks = len(x) // _ROWS
    programs = math.gcd(blocks, _PROGRAMS)
    each = _ROWS * blocks // programs
    summed = pl.pallas_call(
        functools.partial(_backward, blocks // programs),
        grid=(2, programs),
        in_specs=[
            pl.BlockSpec((each, x.shape[1]), lambda torso, program: (program, 0)),
            pl.BlockSpec((1, each, cotangent.shape[2]), lambda torso, program: (torso, program, 0)),
            *map(_of_torso, weights),
        ],
        out_specs=[pl.BlockSpec((1, 1, *w.shape[1:]), lambda torso, program: (torso, program, 0, 0)) for w in weights],
        out_shape=[jax.ShapeDtypeStruct((2, programs, *w.shape[1:]), w.dtype) for w in weights],
        **_how(),
    )(x, cotangent, *weights)
    return jnp.zeros_like(x), *(jnp.sum(gradient, axis=1) for gradient in summed)


_outputs.defvjp(_outputs_fwd, _outputs_bwd)


def _of_torso(weight: Array) -> pl.BlockSpec:
    return pl.BlockSpec((1, *weight.shape[1:]), lambda torso, _: (torso, 0, 0))


def _how() -> dict[str, Any]:
    if jax.default_backend() == "cpu":
        return {"interpret": True}
    return {"compiler_params": plgpu.CompilerParams(num_warps=4, num_stages=1)}


def _dot(x: Array, y: Array, **transposed: bool) -> Array:
    """Multiplies with the precision that JAX is configured for; with TensorFloat-32 by default, as XLA does."""
    asked = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if asked in ("highest", "float32"):
        precision: Any = jax.lax.Precision.HIGHEST
    else:
        precision = getattr(jax.lax.DotAlgorithmPreset, str(asked), jax.lax.Precision.DEFAULT)
    return plgpu.dot(x, y, precision=precision, **transposed)


def _layers(x: Array, weights: list[Array]) -> tuple[Array, Array, Array]:
    """Returns the outputs of both hidden layers and of the output layer."""
    first = jnp.tanh(_dot(x, weights[0]) + weights[1])
    second = jnp.tanh(_dot(first, weights[2]) + weights[3])
    return first, second, _dot(second, weights[4]) + weights[5]


def _forward(x_ref: Any, *refs: Any) -> None:
    *weight_refs, out_ref = refs
    out_ref[0] = _layers(x_ref[...], [ref[0] for ref in weight_refs])[2]


def _backward(blocks: int, x_ref: Any, cotangent_ref: Any, *refs: Any) -> None:
    weights = [ref[0] for ref in refs[:6]]

    def add(block: Array, total: Weights) -> Weights:
        rows = pl.ds(block * _ROWS, _ROWS)
        x, third = x_ref[rows, :], cotangent_ref[0, rows, :]
        one, two, _ = _layers(x, weights)
        second = _dot(third, weights[4], trans_b=True) * (1.0 - two * two)
        first = _dot(second, weights[2], trans_b=True) * (1.0 - one * one)
        pairs = ((x, first), (one, second), (two, third))
        found = [part for x, g in pairs for part in (_dot(x, g, trans_a=True), jnp.sum(g, axis=0)[None])]
        return tuple(map(jnp.add, total, found))

    total = jax.lax.fori_loop(0, blocks, add, tuple(map(jnp.zeros_like, weights)))
    for ref, gradient in zip(refs[6:], total, strict=True):
        ref[0, 0] = gradient
