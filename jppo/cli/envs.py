"""`jppo envs`."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Annotated

import tyro

from jppo.config.families import FAMILIES, GYMNASIUM_GROUPS, HOST_FAMILIES
from jppo.config.presets import preset_for
from jppo.errors import Refused


@dataclasses.dataclass(frozen=True)
class Envs:
    """List the environments that `jppo train` knows by name.

    Also shows how to install further families of environments.
    """

    pattern: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[TEXT]")] = ""
    """Only names that contain this text, or those of a family, such as jumanji or mujoco."""

    def run(self) -> int:
        from jppo.envs.families import install_command
        from jppo.envs.host_families import gymnasium_group
        from jppo.envs.modules import is_installed

        families, text = FAMILIES | HOST_FAMILIES | GYMNASIUM_GROUPS, self.pattern.lower()
        prefix = text.partition(":")[0]
        only = prefix if prefix in FAMILIES and is_installed(prefix) else ""
        rows = [row for row in _rows(only) if text in row[0].lower() or (text and text == gymnasium_group(row[0]))]
        if not rows and prefix in families and not is_installed(prefix):
            raise Refused(f"{prefix} is not installed; {install_command(prefix)}")
        missing = [family for family in families if not is_installed(family)]
        if not rows:
            others = f", and how to install {len(missing)} more families" if missing else ""
            problem = f"no installed environment has {self.pattern!r} in its name"
            raise Refused(f"{problem}; `jppo envs` lists all{others}")
        title = ("environment", "backends", "preset", "jppo play")
        print(*_table([title, *rows]), "device: environments in JAX; ray: Gymnasium environments", sep="\n")
        if missing and not text:
            heading = "families not installed (docs/environments.md, docs/host_environments.md):"
            print("", heading, *(f"  {family:<12}{install_command(family)}" for family in missing), sep="\n")
        return 0


def _rows(family: str) -> Iterator[tuple[str, ...]]:
    """Yields the rows of all environments, or of those of a family on the device."""
    from jppo.envs import available
    from jppo.envs.envpool import can_draw_envpool, envpool_names
    from jppo.envs.families import can_draw_family, family_env_names
    from jppo.envs.host_families import host_env_names
    from jppo.envs.modules import is_installed
    from jppo.runs.render import DRAWABLE

    def row(name: str, backends: str, can_play: bool) -> tuple[str, ...]:
        return name, backends, preset_for(name), "yes" if can_play else "no"

    on_device, on_host = ([], []) if family else (available(), host_env_names(usable=True))
    for name in dict.fromkeys(on_device + on_host):
        backends = (["device"] if name in on_device else []) + (["ray"] if name in on_host else [])
        yield row(name, ", ".join(backends), name in DRAWABLE or name not in on_device)
    for installed in filter(is_installed, [family] if family else FAMILIES):
        for name in family_env_names(installed):
            yield row(name, "device", can_draw_family(name))
    if not family and is_installed("envpool"):
        for name in envpool_names():
            yield row(name, "ray", can_draw_envpool(name))


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns the lines of a table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
