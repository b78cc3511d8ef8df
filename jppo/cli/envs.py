"""`jppo envs`."""

import dataclasses
import itertools
from collections.abc import Sequence

from jppo.config.families import FAMILIES, GYMNASIUM_GROUPS, HOST_FAMILIES
from jppo.config.presets import preset_for
from jppo.config.terminal import columns, row_lines, wrap


@dataclasses.dataclass(frozen=True)
class Envs:
    """List the environments that `jppo train` knows by name.

    Also shows how to install further families of environments.
    """

    def run(self) -> int:
        from jppo.envs import available
        from jppo.envs.envpool import can_draw_envpool, envpool_names
        from jppo.envs.families import family_env_names, install_command
        from jppo.envs.families.drawing import draws_jaxmarl
        from jppo.envs.host_families import host_env_names
        from jppo.envs.modules import is_installed
        from jppo.runs.render import DRAWABLE

        on_device, on_host = available(), host_env_names(usable=True)
        rows = [("environment", "backends", "preset", "jppo play")]
        for name in dict.fromkeys(on_device + on_host):
            backends = (["device"] if name in on_device else []) + (["ray"] if name in on_host else [])
            can_play = name in DRAWABLE or name not in on_device
            rows.append((name, ", ".join(backends), preset_for(name), "yes" if can_play else "no"))
        for family in filter(is_installed, FAMILIES):
            for name in family_env_names(family):
                can_play = family != "jaxmarl" or draws_jaxmarl(name.partition(":")[2])
                rows.append((name, "device", preset_for(name), "yes" if can_play else "no"))
        if is_installed("envpool"):
            for name in envpool_names():
                rows.append((name, "ray", preset_for(name), "yes" if can_draw_envpool(name) else "no"))
        print(*_table(rows), *wrap("device: environments in JAX; ray: Gymnasium environments"), sep="\n")
        missing = [family for family in FAMILIES | HOST_FAMILIES | GYMNASIUM_GROUPS if not is_installed(family)]
        if missing:
            title = "families not installed (docs/environments.md, docs/host_environments.md):"
            lines = [wrap(install_command(family), 4, start=f"  {family:<12}") for family in missing]
            print("", *wrap(title), *itertools.chain(*lines), sep="\n")
        return 0


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Returns the lines of a table; a few lines per row on a terminal with fewer than 80 columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if columns() < 80:
        (_, *titles), *others = rows
        return [line for name, *cells in others for line in row_lines(name, dict(zip(titles, cells, strict=True)))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
