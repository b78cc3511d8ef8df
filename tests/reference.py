"""Independent implementations of PPO updates in float64 NumPy, with explicit derivatives and Python loops."""

import jax
import jax.numpy as jnp
import numpy as np

from jppo.ppo.minibatches import epoch_keys, minibatch_indices
from jppo.ppo.types import derive_key


class Reference:
    """An update of a feed-forward network with two torsos."""

    def __init__(self, state, config, hyperparams, discrete=True):
        params = jax.tree.map(lambda x: np.asarray(x, float), state.policy_state.params)["params"]
        self.params = self.from_flax(params) | {"log_std": params.get("log_std", np.zeros(0))}
        self.first_moment = jax.tree.map(np.zeros_like, self.params)
        self.second_moment = jax.tree.map(np.zeros_like, self.params)
        self.config, self.discrete, self.h = config, discrete, hyperparams
        self.key = state.key
        self.updates = self.gradient_steps = 0
        self.rate_scale = 1.0
        self.seen_obs, self.seen_discounted = np.zeros((0, 1)), np.zeros(0)

    @staticmethod
    def from_flax(params):
        return {
            "actor": [*params["actor"].values(), params["policy"]],
            "critic": [*params["critic"].values(), params["value"]],
        }

    def as_flax(self):
        *actor, policy = self.params["actor"]
        *critic, value = self.params["critic"]
        extra = {} if self.discrete else {"log_std": self.params["log_std"]}
        return {"params": {"actor": named(actor), "critic": named(critic), "policy": policy, "value": value, **extra}}

    def update(self, rollout):
        config, h = self.config, self.h
        data = {name: np.asarray(column) for name, column in vars(rollout).items()}
        num_steps, num_envs = data["reward"].shape
        raw_obs = data["obs"].astype(float).reshape(num_steps * num_envs, -1)
        reward = data["reward"].astype(float)
        if config.normalize_reward:
            scale = np.sqrt(self.seen_discounted.var() + 1e-8) if self.updates else 1.0
            reward = np.clip(reward / scale, -10, 10)
        advantage = np.zeros_like(reward)
        for n in range(num_envs):
            following = 0.0
            for t in reversed(range(num_steps)):
                ended = data["terminated"][t, n] or data["truncated"][t, n]
                bootstrap = 0.0 if data["terminated"][t, n] else float(data["next_value"][t, n])
                delta = reward[t, n] + h.gamma * bootstrap - float(data["value"][t, n])
                following = delta + (0.0 if ended else h.gamma * h.gae_lambda * following)
                advantage[t, n] = following
        flat = {name: flatten(data[name]) for name in ("action", "log_prob", "value")}
        flat |= {"advantage": advantage.ravel(), "target": (advantage + data["value"]).ravel(), "obs": raw_obs}
        if config.normalize_obs:
            scale = np.sqrt(self.seen_obs.var(0) + 1e-8) if self.updates else 1.0
            centred = raw_obs - self.seen_obs.mean(0) if self.updates else raw_obs
            flat["obs"] = np.clip(centred / scale, -10, 10)
        rate = h.learning_rate * self.rate_scale
        steps = [self.step(batch, rate) for batch in self.minibatches(flat, data)]
        metrics = {name: np.mean([step[name] for step in steps]) for name in steps[0]}
        metrics["value/mean"] = flat["value"].mean(dtype=float)
        metrics["value/explained_variance"] = 1 - flat["advantage"].var() / flat["target"].var()
        metrics["learning_rate"] = rate
        if config.kl_control == "adapt":
            over = metrics["policy/approx_kl"] / h.target_kl
            self.rate_scale *= 1 / 1.5 if over > 2 else 1.5 if over < 0.5 else 1
        self.updates += 1
        self.seen_obs = np.concatenate([self.seen_obs, raw_obs]) if self.updates > 1 else raw_obs
        self.seen_discounted = np.concatenate([self.seen_discounted, 2.0 * data["reward"].ravel() + 0.5])
        return metrics

    def minibatches(self, flat, data):
        for rows in self.shuffled(*data["reward"].shape):
            yield {name: column[rows] for name, column in flat.items()}

    def shuffled(self, num_steps, num_envs):
        config = self.config
        key, self.key = derive_key(self.key, "shuffle"), derive_key(self.key, "next update")
        for keys in epoch_keys(key, config, num_steps * num_envs, jnp.arange(config.effective_strata)):
            yield from np.asarray(minibatch_indices(keys, num_steps, num_envs, config.num_minibatches))

    def step(self, batch, rate):
        if self.config.normalize_advantage:
            advantage = batch["advantage"]
            batch["advantage"] = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        gradient, metrics = self.gradient(batch)
        norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradient)))
        gradient = jax.tree.map(lambda g: g * min(1.0, self.h.max_grad_norm / norm), gradient)
        self.gradient_steps += 1
        blend = jax.tree.map
        self.first_moment = blend(lambda m, g: 0.9 * m + 0.1 * g, self.first_moment, gradient)
        self.second_moment = blend(lambda v, g: 0.999 * v + 0.001 * g**2, self.second_moment, gradient)

        def move(p, m, v):
            m, v = m / (1 - 0.9**self.gradient_steps), v / (1 - 0.999**self.gradient_steps)
            return p - rate * m / (np.sqrt(v) + self.h.adam_eps)

        self.params = blend(move, self.params, self.first_moment, self.second_moment)
        return metrics | {"grad/norm": norm}

    def gradient(self, batch):
        h, size = self.h, len(batch["obs"])
        out, value, record = self.forward(batch)
        head = self.categorical if self.discrete else self.gaussian
        log_prob, entropy, log_prob_slopes, entropy_slopes = head(out, batch["action"])

        log_ratio = log_prob - batch["log_prob"]
        ratio, advantage = np.exp(log_ratio), batch["advantage"]
        plain, clipped = ratio * advantage, np.clip(ratio, 1 - h.clip_eps, 1 + h.clip_eps) * advantage
        slope = np.where(plain <= clipped, -plain, 0.0) / size
        error, old, target = value - batch["target"], batch["value"], batch["target"]
        near = old + np.clip(value - old, -h.vf_clip_eps, h.vf_clip_eps) - target
        if self.config.clip_value:
            inside = np.abs(value - old) < h.vf_clip_eps
            value_loss = 0.5 * np.mean(np.maximum(error**2, near**2))
            value_slope = np.where(error**2 >= near**2, error, near * inside)
        else:
            value_loss, value_slope = 0.5 * np.mean(error**2), error

        out_slope = slope[:, None] * log_prob_slopes[0] - h.ent_coef / size * entropy_slopes[0]
        log_std_slope = slope[:, None] * log_prob_slopes[1] - h.ent_coef / size * entropy_slopes[1]
        gradient = self.backward(record, out_slope, h.vf_coef / size * value_slope[:, None])
        return gradient | {"log_std": log_std_slope.sum(0)}, {
            "loss/policy": -np.mean(np.minimum(plain, clipped)),
            "loss/value": value_loss,
            "policy/entropy": entropy.mean(),
            "policy/approx_kl": np.mean(ratio - 1 - log_ratio),
            "policy/clip_fraction": np.mean(np.abs(ratio - 1) > h.clip_eps),
        }

    def forward(self, batch):
        """Returns the head's outputs [B, A], values [B], and the arrays for `backward`."""
        out, actor_inputs = forward(self.params["actor"], batch["obs"])
        value, critic_inputs = forward(self.params["critic"], batch["obs"])
        return out, value[:, 0], (actor_inputs, critic_inputs)

    def backward(self, record, out_slope, value_slope):
        """Returns the gradient without log_std."""
        slopes = {"actor": out_slope, "critic": value_slope}
        return {
            name: backward(self.params[name], inputs, slopes[name])[0]
            for name, inputs in zip(slopes, record, strict=True)
        }

    @staticmethod
    def categorical(logits, action):
        log_probs = logits - logits.max(1, keepdims=True)
        log_probs = log_probs - np.log(np.exp(log_probs).sum(1, keepdims=True))
        probs = np.exp(log_probs)
        entropy = -(probs * log_probs).sum(1)
        taken = np.eye(logits.shape[1])[action]
        nothing = np.zeros((len(action), 0))
        slopes = (taken - probs, nothing), (-probs * (log_probs + entropy[:, None]), nothing)
        return (taken * log_probs).sum(1), entropy, *slopes

    def gaussian(self, mean, action):
        log_std = self.params["log_std"]
        z = (action - mean) / np.exp(log_std)
        log_prob = (-0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(1)
        entropy = np.full(len(mean), (log_std + 0.5 * np.log(2 * np.pi * np.e)).sum())
        slopes = (z / np.exp(log_std), z**2 - 1), (np.zeros_like(mean), np.ones_like(mean))
        return log_prob, entropy, *slopes


class RecurrentReference(Reference):
    """An update of a network with an encoder, a GRU or LSTM layer, and a hidden layer for each of actor and critic.

    The minibatches consist of sequences, and the gradient is back-propagated through their steps by hand.
    """

    def from_flax(self, params):
        encoder = list(params["encoder"].values())
        return super().from_flax(params) | {"encoder": encoder, "recurrent": dict(params["recurrent"])}

    def as_flax(self):
        heads = super().as_flax()["params"]
        return {"params": heads | {"encoder": named(self.params["encoder"]), "recurrent": self.params["recurrent"]}}

    def minibatches(self, flat, data):
        """Yields samples [L*M, ...], with the carry of each sequence at its start and the first steps of episodes."""
        num_steps, num_envs = data["reward"].shape
        length = self.config.steps_per_sequence
        done = data["terminated"] | data["truncated"]
        starts = flatten(np.concatenate([np.zeros_like(done[:1]), done[:-1]]))
        carry = data["carry"] if self.config.recurrent == "gru" else np.stack(data["carry"], axis=-1)
        for sequences in self.shuffled(num_steps // length, num_envs):
            chunk, env = np.divmod(sequences, num_envs)
            rows = ((chunk * length)[None] + np.arange(length)[:, None]) * num_envs + env[None]
            batch = {name: column[rows.ravel()] for name, column in flat.items()}
            yield batch | {"carry": carry[chunk, env].astype(float), "starts": starts[rows]}

    def forward(self, batch):
        starts = batch["starts"]
        features, encoder_inputs = forward(self.params["encoder"], batch["obs"], last=np.tanh)
        x = features.reshape(*starts.shape, -1)
        memory = GRU(self.params["recurrent"]) if self.config.recurrent == "gru" else LSTM(self.params["recurrent"])
        outputs = flatten(memory.forward(x, batch["carry"], starts))
        out, actor_inputs = forward(self.params["actor"], outputs)
        value, critic_inputs = forward(self.params["critic"], outputs)
        return out, value[:, 0], (encoder_inputs, features, memory, actor_inputs, critic_inputs)

    def backward(self, record, out_slope, value_slope):
        encoder_inputs, features, memory, *head_inputs = record
        actor, from_actor = backward(self.params["actor"], head_inputs[0], out_slope)
        critic, from_critic = backward(self.params["critic"], head_inputs[1], value_slope)
        recurrent, slope = memory.backward(from_actor + from_critic)
        encoder, _ = backward(self.params["encoder"], encoder_inputs, slope * (1 - features**2))
        return {"actor": actor, "critic": critic, "recurrent": recurrent, "encoder": encoder}


class Memory:
    """A recurrent layer: a loop over steps forward, and one backward."""

    def __init__(self, weights):
        self.weights = weights
        self.kernel = weights["recurrent_kernel"]
        self.size = len(self.kernel)

    def forward(self, x, carry, starts):
        """Returns the outputs [L, M, H] for x [L, M, I], the carry before the first step and episode starts [L, M]."""
        self.x, self.starts, self.tape = x, starts, []
        outputs = []
        for x_t, start in zip(x, starts, strict=True):
            carry = np.where(start.reshape(-1, *[1] * (carry.ndim - 1)), 0.0, carry)
            carry, output = self.step(x_t @ self.weights["input_kernel"] + self.weights["input_bias"], carry)
            outputs.append(output)
        return np.array(outputs)

    def backward(self, slopes):
        """Returns the gradient of the weights, and the slope of x, [L*M, I], for the outputs' slopes [L*M, H]."""
        gradient = {name: np.zeros_like(array) for name, array in self.weights.items()}
        slopes = slopes.reshape(*self.starts.shape, self.size)
        x_slopes, carry_slope = np.zeros_like(self.x), None
        for t in reversed(range(len(self.x))):
            gates, carry_slope = self.step_back(self.tape[t], slopes[t], carry_slope, gradient)
            carry_slope = np.where(self.starts[t].reshape(-1, *[1] * (carry_slope.ndim - 1)), 0.0, carry_slope)
            gradient["input_kernel"] += self.x[t].T @ gates
            gradient["input_bias"] += gates.sum(0)
            x_slopes[t] = gates @ self.weights["input_kernel"].T
        return gradient, flatten(x_slopes)


class GRU(Memory):
    """r, z = sigmoid(x + h W), n = tanh(x_n + r (h W_n + b)), h <- (1 - z) n + z h."""

    def step(self, gates, h):
        x_r, x_z, x_n = np.split(gates, 3, axis=1)
        h_r, h_z, h_n = np.split(h @ self.kernel, 3, axis=1)
        r, z, inner = sigmoid(x_r + h_r), sigmoid(x_z + h_z), h_n + self.weights["recurrent_bias"]
        n = np.tanh(x_n + r * inner)
        self.tape.append((h, r, z, n, inner))
        return ((1 - z) * n + z * h,) * 2

    def step_back(self, tape, slope, later, gradient):
        h, r, z, n, inner = tape
        slope = slope if later is None else slope + later
        n_slope = slope * (1 - z) * (1 - n**2)
        z_slope = slope * (h - n) * z * (1 - z)
        r_slope = n_slope * inner * r * (1 - r)
        products = np.concatenate([r_slope, z_slope, n_slope * r], axis=1)
        gradient["recurrent_kernel"] += h.T @ products
        gradient["recurrent_bias"] += (n_slope * r).sum(0)
        return np.concatenate([r_slope, z_slope, n_slope], axis=1), slope * z + products @ self.kernel.T


class LSTM(Memory):
    """i, f, o = sigmoid(x + h W), g = tanh(x_g + h W_g), c <- f c + i g, h <- o tanh(c). Carry: (c, h), [M, H, 2]."""

    def step(self, gates, carry):
        c, h = carry[..., 0], carry[..., 1]
        i, f, g, o = np.split(gates + h @ self.kernel, 4, axis=1)
        i, f, g, o = sigmoid(i), sigmoid(f), np.tanh(g), sigmoid(o)
        after = f * c + i * g
        self.tape.append((c, h, i, f, g, o, after))
        output = o * np.tanh(after)
        return np.stack([after, output], axis=-1), output

    def step_back(self, tape, slope, later, gradient):
        c, h, i, f, g, o, after = tape
        later = np.zeros((*slope.shape, 2)) if later is None else later
        slope = slope + later[..., 1]
        after_slope = later[..., 0] + slope * o * (1 - np.tanh(after) ** 2)
        gates = np.concatenate(
            [
                after_slope * g * i * (1 - i),
                after_slope * c * f * (1 - f),
                after_slope * i * (1 - g**2),
                slope * np.tanh(after) * o * (1 - o),
            ],
            axis=1,
        )
        gradient["recurrent_kernel"] += h.T @ gates
        return gates, np.stack([after_slope * f, gates @ self.kernel.T], axis=-1)


def forward(layers, x, last=lambda x: x):
    """Returns the outputs of dense layers with tanh between them, and the input of each layer."""
    inputs = []
    for layer in layers:
        inputs.append(x)
        x = x @ layer["kernel"] + layer["bias"]
        x = last(x) if layer is layers[-1] else np.tanh(x)
    return x, inputs


def backward(layers, inputs, slope):
    """Returns the gradient of dense layers, and the slope of the first layer's input."""
    gradients = []
    for layer, x in reversed(list(zip(layers, inputs, strict=True))):
        gradients.append({"kernel": x.T @ slope, "bias": slope.sum(0)})
        slope = slope @ layer["kernel"].T
        if layer is not layers[0]:
            slope = slope * (1 - x**2)
    return gradients[::-1], slope


def flatten(array):
    """Reshapes [T, N, ...] to [T*N, ...]."""
    return array.reshape(-1, *array.shape[2:])


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def named(layers):
    return {f"Dense_{i}": layer for i, layer in enumerate(layers)}
