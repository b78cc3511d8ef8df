"""Exports a trained policy as one file: .npz for NumPy, .stablehlo for JAX or any XLA runtime.

An .npz file contains arrays and a description, which `jppo.actors.numpy_policy` applies. A .stablehlo file contains the
compiled program of the policy, so that it supports any network.
"""

import hashlib
import io
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import export

from jppo import __version__
from jppo.actors import numpy_policy
from jppo.actors.numpy_params import describe_spaces, numpy_obstacle, to_numpy_params
from jppo.actors.numpy_policy.spaces import ObsArray, array_descriptions
from jppo.config.checks import check_seed
from jppo.devices.jit import jit
from jppo.envs.spaces import Array, ObsSpec, PyTree
from jppo.errors import Refused, describe_error
from jppo.ppo.policy import act, reset_carry
from jppo.ppo.types import derive_key
from jppo.runs.policy import TrainedPolicy, actor_leaves, as_arguments, complete_obs
from jppo.runs.run_dir import check_output, write_output

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
_VERSION = 1
_MARK = b"jppo policy "  # then the version; the file's last bytes, after a SHA-256 of all before
_DIGEST_SIZE = 32


def export_policy(
    policy: TrainedPolicy | str | Path,
    path: str | Path,
    *,
    platforms: Sequence[str] = PLATFORMS,
    env: Any = None,
    trust_env: bool = False,
) -> Path:
    """Writes a policy atomically as one file and returns its path.

    Args:
      policy: `result.policy`, or a run directory.
      path: its ending selects the format: .npz for `jppo.numpy_policy.load`, .stablehlo for `load_exported`.
      platforms: platforms that a .stablehlo file can run on.
      env, trust_env: of a run directory, see `jppo.load_policy`.

    Raises:
      ValueError: the ending or a platform is unknown, the path cannot be written, the run directory has no policy, the
        network is the user's own and the format is .npz, or the network works for one batch size only.
    """
    path = Path(path)
    check_output_path(path)
    if isinstance(platforms, str) or not platforms or set(platforms) - set(PLATFORMS):
        raise Refused(f"platforms = {platforms!r} must be a sequence of {', '.join(PLATFORMS)}")
    if not isinstance(policy, TrainedPolicy | str | Path):
        raise Refused(
            f"policy is a {type(policy).__name__}; it must be a TrainedPolicy, such as result.policy, or a run "
            "directory"
        )
    if not isinstance(policy, TrainedPolicy):
        from jppo.runs.load import load_run  # gymnax takes seconds to import

        policy = load_run(policy, env=env, trust_env=trust_env).policy
    content = _as_npz(policy) if path.suffix.lower() == ".npz" else _as_stablehlo(policy, platforms)
    write_output(path, content, path.suffix.lower())
    return path


def check_output_path(path: Path) -> None:
    """Raises ValueError if the ending selects no format, or the directory does not exist."""
    check_output(path, ".npz (for NumPy alone)", ".stablehlo (for JAX, or any XLA)")


def load_exported(path: str | Path) -> "ExportedPolicy":
    """Loads the policy of a .stablehlo file. The file is a program that XLA runs: load only trusted files.

    Raises:
      ValueError: the file is missing, damaged or of another version.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise Refused(f"{path} cannot be read: {error.strerror or error}") from None
    head, mark, version = content.rpartition(_MARK)
    if not mark or not version.isdigit():
        remedy = "; load an .npz file with jppo.numpy_policy.load" if content[:2] == b"PK" else ""
        raise Refused(f"{path} is incomplete or was not written by jppo as a .stablehlo file{remedy}")
    if int(version) != _VERSION:
        raise Refused(
            f"{path} has version {int(version)} of the format; jppo {__version__} reads {_VERSION}: load "
            "it with the version of jppo that exported it"
        )
    program, digest = head[:-_DIGEST_SIZE], head[-_DIGEST_SIZE:]
    if hashlib.sha256(program).digest() != digest:
        raise Refused(f"{path} is damaged: its bytes are not those that were exported")
    try:
        return ExportedPolicy(export.deserialize(bytearray(program)))
    except Exception as error:  # deserialize raises errors of many types
        raise Refused(f"{path} is damaged: it holds no program that this JAX can read ({error!r})") from error


class ExportedPolicy:
    """Selects actions like `TrainedPolicy`; the same seed gives the same samples.

    Attributes:
      exported: the program, (obs [B, *obs], seed [] uint32) -> {"greedy", "sampled": [B, *act], "value": [B] f32}.
        That of a recurrent policy also takes the state, leaves [B, ...], and episode_start [B] bool, and returns the
        next "state". The keys of the output "actor_obs", which has no arrays, name the parts of the observation that
        the actions depend on, if they do not depend on all.
    """

    def __init__(self, exported: export.Exported) -> None:
        self.exported = exported
        (obs, _, *memory), _ = jax.tree.unflatten(exported.in_tree, exported.in_avals)
        self._obs_spec = jax.tree.map(lambda leaf: ObsSpec(shape=leaf.shape[1:], dtype=str(leaf.dtype)), obs)
        self._carry_like = memory[0] if memory else ()
        outputs = jax.tree.unflatten(exported.out_tree, exported.out_avals)
        for spaces in outputs.pop("spaces", ()):  # files of jppo 0.2 lack it
            parts = [ObsArray.from_json(leaf)._asdict() for leaf in array_descriptions(json.loads(spaces))]
            specs = [ObsSpec(**part | {"dtype": str(part["dtype"])}) for part in parts]
            self._obs_spec = jax.tree.unflatten(jax.tree.structure(obs), specs)
        self._actor_obs = tuple(outputs.get("actor_obs", ()))  # files of jppo 0.2 lack it
        self._call, self._seeds = jit(exported.call), itertools.count()

    @property
    def is_recurrent(self) -> bool:
        """Whether the policy has a state."""
        return self._carry_like != ()

    def act(
        self,
        obs: Any,
        state: PyTree = None,
        episode_start: Any = None,
        *,
        sampled: bool = False,
        seed: int | None = None,
    ) -> Any:
        """Returns actions for the environment: the most likely ones, or samples. See `TrainedPolicy.act`."""
        seed = next(self._seeds) if seed is None else check_seed(seed)
        obs = complete_obs(self._obs_spec, self._actor_obs, obs)
        outputs = self._outputs(obs, state, episode_start, seed)
        action = outputs["sampled" if sampled else "greedy"]
        return (action, outputs["state"]) if self.is_recurrent else action

    def value(self, obs: Any, state: PyTree = None) -> np.ndarray:
        """Returns the value estimates V(obs), [] or [B] f32, in units of the (scaled) training reward."""
        return self._outputs(obs, state, None, 0)["value"]

    def _outputs(self, obs: Any, state: PyTree, episode_start: Any, seed: int) -> dict[str, Any]:
        batch, single, *memory = as_arguments(self._obs_spec, self._carry_like, obs, state, episode_start)
        outputs = jax.device_get(self._call(batch, np.uint32(seed), *(memory if self.is_recurrent else ())))
        return {
            name: jax.tree.map(lambda leaf: leaf[0], output) if single and name != "state" else output
            for name, output in outputs.items()
        }


def _as_stablehlo(trained: TrainedPolicy, platforms: Sequence[str]) -> bytes:
    policy = trained.policy

    def jppo_policy(obs: PyTree, seed: Array, *memory: PyTree) -> dict[str, Any]:
        carry = reset_carry(policy, *memory) if memory else ()
        greedy = act(policy, trained.state, obs, carry=carry)
        sampled = act(policy, trained.state, obs, derive_key(jax.random.key(seed), "act"), carry)
        outputs = {"greedy": greedy.env_action, "sampled": sampled.env_action, "value": greedy.value}
        outputs |= {"actor_obs": dict.fromkeys(actor_leaves(policy), ()), "spaces": {spaces: ()}}
        return outputs | ({"state": greedy.carry} if memory else {})

    spaces = json.dumps(describe_spaces(policy.obs_spec))  # refuses containers that a file cannot name
    describe_spaces(policy.action_spec)
    (batch,) = export.symbolic_shape("batch")

    def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((batch, *leaf.shape), leaf.dtype)

    arguments = [jax.tree.map(shape_of, policy.obs_spec), jax.ShapeDtypeStruct((), np.uint32)]
    if policy.is_recurrent:
        carry = jax.eval_shape(lambda: jax.tree.map(lambda leaf: leaf[0], policy.initial_carry(1)))
        arguments += [jax.tree.map(shape_of, carry), jax.ShapeDtypeStruct((batch,), bool)]
    try:
        program = bytes(export.export(jax.jit(jppo_policy), platforms=platforms)(*arguments).serialize())
    except Exception as error:  # of the user's network
        raise Refused(
            f"the network cannot be exported ({describe_error(error)}); its operations must work for any batch size "
            f"and on all of {', '.join(platforms)}"
        ) from error
    return program + hashlib.sha256(program).digest() + _MARK + str(_VERSION).encode()


def _as_npz(policy: TrainedPolicy) -> bytes:
    if obstacle := numpy_obstacle(policy.policy):
        raise Refused(f"NumPy cannot apply this policy, because {obstacle}; export it as .stablehlo")
    description, arrays = to_numpy_params(policy.policy, policy.state)
    numpy_policy.NumpyPolicy(description, arrays)  # raises here what it would raise there
    file, described = io.BytesIO(), json.dumps(description | {"written_by": f"jppo {__version__}"})
    contents: dict[str, Any] = arrays | {"description": np.array(described)}
    np.savez(file, **contents)
    return file.getvalue()
