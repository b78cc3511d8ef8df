"""A program of a user, for the type checker. It uses each public name once. tests/test_typing.py checks it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jppo

SMALL = jppo.PPOConfig(num_envs=8, num_steps=16, num_minibatches=2, hidden_sizes=(8,))
CONFIG = SMALL.replace(keep_next_obs=True)
HYPERPARAMS = jppo.Hyperparams(learning_rate=jppo.schedules.linear(1e-3, 0.0), gamma=0.98)
STEPS = 2_000


class Line(jppo.Reporter):
    """Shows the last return."""

    def update(self, env_steps: int, steps_per_second: float, recent_return: float) -> None:
        print(f"{env_steps:,} steps, return {recent_return:.1f}", end="\r")


def stop_when_solved(event: jppo.CallbackEvent) -> None:
    event.log("my/steps", float(event.steps))
    if event.return_mean > 475.0:
        event.stop("solved")


@jppo.mean_over_rows
def loss(
    apply: Any, batch: jppo.Batch, hyperparams: jppo.Hyperparams, config: jppo.PPOConfig, key: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    return jppo.ppo_loss(apply, batch, hyperparams, config, key)


def half_advantages(
    apply: Any, rollout: jppo.Transition, hyperparams: jppo.Hyperparams, config: jppo.PPOConfig
) -> tuple[jax.Array, jax.Array]:
    advantage, target = jppo.gae_advantages(apply, rollout, hyperparams, config)
    return 0.5 * advantage, target


def own_learner(policy: Any, config: jppo.PPOConfig, axis_name: str | None) -> jppo.Learner:
    return jppo.make_learner(policy, config, axis_name=axis_name)


def curiosity() -> jppo.LossModule:
    """A loss with one more parameter."""

    def init(key: jax.Array, obs: Any) -> tuple[Any, Any]:
        return jnp.zeros(()), ()

    def apply_loss(params: Any, state: Any, *arguments: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        value, metrics = jppo.ppo_loss(*arguments)
        batch: jppo.Batch = arguments[1]
        curiosity = jppo.weighted_mean(params**2 * jax.numpy.ones_like(batch.log_prob), batch.weight)
        return value + 0.1 * curiosity, metrics | {"loss/curiosity": params}

    return jppo.LossModule(init=init, apply=apply_loss)


class Linear:
    """A network with a linear policy and a linear value function."""

    def init(self, key: jax.Array, obs: jax.Array) -> dict[str, jax.Array]:
        return {"policy": 0.01 * jax.random.normal(key, (obs.shape[-1], 2)), "value": jnp.zeros(obs.shape[-1])}

    def apply(self, params: dict[str, jax.Array], obs: jax.Array) -> tuple[jppo.Categorical, jax.Array]:
        return jppo.Categorical(obs @ params["policy"]), obs @ params["value"]


class Counter:
    """A network that also sees the number of the step."""

    def init(self, key: jax.Array, obs: jax.Array, carry: jax.Array) -> jax.Array:
        return 0.01 * jax.random.normal(key, (obs.shape[-1], 2))

    def initial_carry(self, batch_size: int) -> jax.Array:
        return jnp.zeros(batch_size)

    def apply(
        self, params: jax.Array, obs: jax.Array, carry: jax.Array
    ) -> tuple[jppo.Categorical, jax.Array, jax.Array]:
        return jppo.Categorical(obs @ params), carry, carry + 1.0


def corridor() -> jppo.Environment:
    """An environment that ends after four steps to the right."""

    def reset(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(1), jnp.zeros((), jnp.int32)

    def step(key: jax.Array, state: jax.Array, action: jax.Array) -> tuple[jax.Array, jax.Array, Any, Any, Any]:
        place = state + action
        return place[None].astype(jnp.float32), place, -1.0, place >= 4, False

    import gymnasium

    env = jppo.EpisodicEnv(name="corridor", reset=reset, step=step, action_space=gymnasium.spaces.Discrete(2))
    return jppo.with_limit_and_reset(env, limit=20)


def train_policy() -> jppo.Result:
    result = jppo.train(
        "CartPole-v1",
        total_steps=STEPS,
        config=CONFIG,
        hyperparams=HYPERPARAMS,
        loss=loss,
        advantages=half_advantages,
        callback=stop_when_solved,
        progress=Line(),
        run_dir="runs/typed",
        run=jppo.RunConfig(max_checkpoints=1, eval_every=10, eval_episodes=4),
    )
    returns: np.ndarray = result.metrics["episode/return_mean"]
    status: str = result.summary["status"]
    picture: jppo.Picture = result.plot(metrics=["episode/return_mean"], x="minutes")
    print(returns[-1], status, picture.kind, len(picture.data), result.run_dir, result.state, result.agent.config)
    return result


def use_policy(result: jppo.Result) -> None:
    policy: jppo.TrainedPolicy = jppo.load_policy("runs/typed", best=True)
    action = policy.act(np.zeros(4, np.float32))
    value: np.ndarray = policy.value(np.zeros((3, 4), np.float32))
    evaluation: jppo.Evaluation = jppo.evaluate(result, num_episodes=2)
    mean = float(evaluation.returns.mean())
    complete = bool(evaluation.finished.all())
    jppo.play(result, max_steps=20).save("play.gif")
    path = jppo.export_policy(policy, "policy.npz")
    loaded: jppo.numpy_policy.NumpyPolicy = jppo.numpy_policy.load(path)
    compiled: jppo.ExportedPolicy = jppo.load_exported(jppo.export_policy(policy, "policy.stablehlo"))
    obs = np.zeros(4, np.float32)
    print(action, value.shape, mean, complete, loaded.act(obs), compiled.act(obs, sampled=True, seed=1))


def train_networks() -> None:
    networks: list[jppo.Network] = [Linear()]
    recurrent: jppo.RecurrentNetwork = Counter()
    for network in networks:
        jppo.train("CartPole-v1", total_steps=STEPS, num_envs=8, hidden_sizes=[8], network=network, loss=curiosity())
        schedule = jppo.schedules.linear(1e-3, 0)
        jppo.train("CartPole-v1", total_steps=STEPS, config=SMALL, learning_rate=schedule, gamma=1, eval_every=2)
    config = SMALL.replace(sequence_length=8)
    agent: jppo.Anakin = jppo.make_anakin("CartPole-v1", config, total_steps=STEPS, network=recurrent)
    state = agent.init(jax.random.key(0), HYPERPARAMS)
    state, metrics = jppo.jit(agent.step)(state)
    print(int(state.train.update), metrics["loss/policy"], agent.num_updates)


def use_distributions(key: jax.Array) -> None:
    gaussian = jppo.DiagGaussian(jnp.zeros((5, 2)), jnp.zeros((5, 2)))
    several = jppo.MultiCategorical.from_flat(jnp.zeros((5, 5)), (2, 3))
    joint = jppo.Joint({"move": gaussian, "press": several})
    action = joint.sample(seed=key)
    log_prob: jax.Array = joint.log_prob(action)
    entropy: jax.Array = gaussian.entropy() + several.entropy()
    print(log_prob.shape, entropy.shape, gaussian.mode(), several.mode())
    ones, flags = jnp.ones((3, 5)), jnp.zeros((3, 5), bool)
    advantage: jax.Array = jppo.gae(
        reward=ones,
        value=ones,
        next_value=ones,
        terminated=flags,
        truncated=flags,
        gamma=0.99,
        gae_lambda=0.95,
    )
    print(advantage.shape)


def use_environments(key: jax.Array) -> None:
    env: jppo.Environment = jppo.make_env("CartPole-v1")
    obs, state = env.reset(key)
    step: jppo.Step = env.step(key, state, jnp.zeros((), jnp.int32))
    report = jppo.check_env(corridor(), steps=50)
    host = jppo.make_host_env("Taxi-v4")
    print(obs.shape, step.reward, step.terminated, report.passed, report["masks"].status, host.name, host.num_agents)


def use_actors() -> None:
    try:
        result = jppo.train(
            "CartPole-v1",
            backend="ray",
            ray=jppo.RayConfig(num_actors=0),
            config=SMALL,
            total_steps=STEPS,
            progress=jppo.PrintReporter(),
        )
        print(result.summary["return_mean"])
    except jppo.TrainingDiverged as error:
        print(error.result.summary["updates"])
    except (jppo.ActorsFailed, jppo.HostFailed) as error:
        print(error.result)
    agent: jppo.Sebulba = jppo.make_sebulba("CartPole-v1", SMALL, total_steps=STEPS)
    key = jax.random.key(0)
    train_state = agent.init(key, HYPERPARAMS)
    runner = jppo.EnvRunner(agent.runner_spec(key), np.arange(4))
    fragment = runner.collect(train_state.policy_state, gamma=0.99)
    print(fragment.rollout.reward.shape, fragment.stats.returns.count, agent.num_updates)
    runner.close()


def sweep() -> None:
    result: jppo.SweepResult = jppo.sweep(
        "CartPole-v1",
        seeds=4,
        config=SMALL,
        learning_rate=[1e-4, 1e-3],
        total_steps=STEPS,
        selection=jppo.PBTConfig(every=5),
        progress=lambda total_steps: jppo.NullReporter(),
    )
    best: jppo.SettingResult = result.best("CartPole-v1")
    score: float = best.score
    run: jppo.SweepRun = best.best_run
    action = run.policy.act([0.0, 0.0, 0.0, 0.0])
    print(score, best.settings, best.interval, action, result.status, result.table["return_mean"].shape)
    trainable = jppo.tune.trainable("CartPole-v1", total_steps=STEPS, resources=jppo.Resources(cpus=0.5))
    print(trainable)


def measure() -> None:
    preset: jppo.Preset = jppo.PRESETS["default"]
    speed: jppo.BenchResult = jppo.bench("CartPole-v1", preset="default", seconds=0.1, config=SMALL)
    need: jppo.BenchResult = jppo.bench("CartPole-v1", config=preset.config, num_envs=16, dry_run=True)
    print(
        speed.loop.steps_per_second, speed.shares, need.memory["parameters"] < need.memory_free, need.largest_num_envs
    )


def main() -> None:
    key = jax.random.key(0)
    use_policy(train_policy())
    train_networks()
    use_distributions(key)
    use_environments(key)
    use_actors()
    sweep()
    measure()


if __name__ == "__main__":
    main()
