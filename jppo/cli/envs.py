"""`jppo envs`."""

import dataclasses

from jppo.config.families import FAMILIES, HOST_FAMILIES
from jppo.config.presets import preset_for


@dataclasses.dataclass(frozen=True)
class Envs:
    """List the environments that `jppo train` knows by name.

    Also shows how to install further families of environments.
    """

    def run(self) -> int:
        from jppo.envs import available
        from jppo.envs.families import family_env_names, install_command, is_installed
        from jppo.envs.host_families import host_env_names
        from jppo.envs.host_families import is_installed as is_host_family_installed
        from jppo.runs.render import DRAWABLE

        on_device, on_host = available(), host_env_names()
        rows = [("environment", "backends", "preset", "jppo play")]
        for name in dict.fromkeys(on_device + on_host):
            backends = (["device"] if name in on_device else []) + (["ray"] if name in on_host else [])
            can_play = name in DRAWABLE or name not in on_device
            rows.append((name, ", ".join(backends), preset_for(name), "yes" if can_play else "no"))
        for family in filter(is_installed, FAMILIES):
            drawn = "no" if family == "jaxmarl" else "yes"
            rows += [(name, "device", preset_for(name), drawn) for name in family_env_names(family)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row in rows:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
        print("device: environments in JAX; ray: Gymnasium environments")
        missing = [family for family in FAMILIES if not is_installed(family)]
        missing += [family for family in HOST_FAMILIES if not is_host_family_installed(family)]
        if missing:
            print("\nfamilies not installed (docs/environments.md, docs/host_environments.md):")
            for family in missing:
                print(f"  {family:<12}{install_command(family)}")
        return 0
