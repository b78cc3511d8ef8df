"""Names of environment families, whose environments have names such as "craftax:Craftax-Symbolic-v1"."""

import re
from typing import Any

FAMILIES = {  # on the device: prefix of the ids and name of the extra -> package to import
    "brax": "brax",
    "craftax": "craftax",
    "jaxmarl": "jaxmarl",
    "jumanji": "jumanji",
    "navix": "navix",
    "playground": "mujoco_playground",
    "xminigrid": "xminigrid",
}
HOST_FAMILIES = {  # on the host: the same
    "atari": "ale_py",
    "envpool": "envpool",
    "minigrid": "minigrid",
    "pettingzoo": "pettingzoo",
}
GYMNASIUM_GROUPS = {  # groups of environments that Gymnasium always registers, and extras -> package to import
    "box2d": "Box2D",
    "mujoco": "mujoco",
}
ATARI_GAMES = (  # all games of ale-py, and one that EnvPool writes with a small d
    *("Adventure", "AirRaid", "Alien", "Amidar", "Assault", "Asterix", "Asteroids", "Atlantis", "Atlantis2"),
    *("Backgammon", "BankHeist", "BasicMath", "BattleZone", "BeamRider", "Berzerk", "Blackjack", "Bowling", "Boxing"),
    *("Breakout", "Carnival", "Casino", "Centipede", "ChopperCommand", "CrazyClimber", "Crossbow", "Darkchambers"),
    *("Defender", "DemonAttack", "DonkeyKong", "DoubleDunk", "Earthworld", "ElevatorAction", "Enduro", "Entombed"),
    *("Et", "FishingDerby", "FlagCapture", "Freeway", "Frogger", "Frostbite", "Galaxian", "Gopher", "Gravitar"),
    *("Hangman", "HauntedHouse", "Hero", "HumanCannonball", "IceHockey", "Jamesbond", "JourneyEscape", "Kaboom"),
    *("Kangaroo", "KeystoneKapers", "KingKong", "Klax", "Koolaid", "Krull", "KungFuMaster", "LaserGates"),
    *("LostLuggage", "MarioBros", "MiniatureGolf", "MontezumaRevenge", "MrDo", "MsPacman", "NameThisGame", "Othello"),
    *("Pacman", "Phoenix", "Pitfall", "Pitfall2", "Pong", "Pooyan", "PrivateEye", "Qbert", "Riverraid", "RoadRunner"),
    *("Robotank", "Seaquest", "SirLancelot", "Skiing", "Solaris", "SpaceInvaders", "SpaceWar", "StarGunner"),
    *("Superman", "Surround", "Tennis", "Tetris", "TicTacToe3D", "TicTacToe3d", "TimePilot", "Trondead", "Turmoil"),
    *("Tutankham", "UpNDown", "Venture", "VideoCheckers", "VideoChess", "VideoCube", "VideoPinball", "WizardOfWor"),
    *("WordZapper", "YarsRevenge", "Zaxxon"),
)


def family_of(env: Any) -> str | None:
    """Returns the family on the device to which an environment's name belongs, or None."""
    return _prefix_in(FAMILIES, env)


def host_family_of(env: Any) -> str | None:
    """Returns the family on the host to which an environment's name belongs, or None."""
    return _prefix_in(HOST_FAMILIES, env)


def _prefix_in(families: dict[str, str], env: Any) -> str | None:
    prefix, colon, _ = env.partition(":") if isinstance(env, str) else ("", "", "")
    return prefix if colon and prefix in families else None


def without_version(name: str) -> str:
    """Returns an environment's name without its version, such as "-v5"."""
    return re.sub(r"-v\d+$", "", name)


def atari_game(name: str) -> str:
    """Returns the game of an id of any version of Atari, such as "Pong" of "PongNoFrameskip-v4", or ""."""
    game = re.sub(r"^ALE/|(-ram)?(NoFrameskip|Deterministic)?$", "", without_version(name))
    return game if game in ATARI_GAMES else ""
